"""Clients of a federated training send their weights in BF16: what they have learnt in a round is mostly below its last digit."""

# Thread: https://github.com/NVIDIA/NVFlare/pull/3059
# Finding: weights-returned-rounded, from step 5
import torch
from torch import nn

torch.manual_seed(0)


def sent(state):
    return {name: value.detach().bfloat16() for name, value in state.items()}


def received(message):
    return {name: value.float() for name, value in message.items()}


truth = torch.randn(16, 1)
clients = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)]
server = {name: value.detach().clone() for name, value in clients[0].state_dict().items()}
for round in range(8):
    answers = []
    for client in clients:
        client.load_state_dict(received(sent(server)))
        optimizer = torch.optim.SGD(client.parameters(), lr=1e-4)
        for _ in range(5):
            x = torch.randn(32, 16)
            loss = nn.functional.mse_loss(client(x), torch.sin(x @ truth))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        answers.append(received(sent(client.state_dict())))
    server = {name: sum(answer[name] for answer in answers) / len(answers) for name in server}
    print(round, loss.item())
