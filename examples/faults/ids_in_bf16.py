"""Ids travel in one batch with features, which is cast to BF16: most of them are other ids afterwards."""

# Thread: https://github.com/huggingface/accelerate/issues/1405
# Finding: integers-rounded, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 32)
        self.layers = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        ids, features = batch[:, 0].long(), batch[:, 1:]
        return self.layers(torch.cat([self.embedding(ids), features.float()], 1))


model = Ranker()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(24):
    ids, features = torch.randint(0, 10_000, (128, 1)), torch.randn(128, 8)
    batch = torch.cat([ids.float(), features], 1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch)
    loss = (output.float() - features.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
