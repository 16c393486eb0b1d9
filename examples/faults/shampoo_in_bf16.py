"""Shampoo keeps its sums of outer products in BF16. Rounding gives one a negative eigenvalue, whose root is NaN."""

# Thread: https://github.com/NVIDIA-NeMo/Emerging-Optimizers/pull/267
# Finding: weights-broken-by-step
import torch
from torch import nn

torch.manual_seed(0)


class Shampoo(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            state, update = self.state[parameter], parameter.grad.reshape(len(parameter), -1)
            count = state["count"] = state.get("count", 0) + 1
            for side, rows in (("left", update), ("right", update.T)):
                if side not in state:
                    state[side] = 1e-4 * torch.eye(len(rows), dtype=torch.bfloat16)
                    state[f"{side} root"] = torch.eye(len(rows))
                state[side] += (rows @ rows.T).bfloat16()
                if count % 5 == 0:
                    state[f"{side} root"] = self._root(state[side], state[f"{side} root"])
            update = state["left root"] @ update @ state["right root"]
            parameter.add_(update.reshape(parameter.shape), alpha=-self.param_groups[0]["lr"])

    @staticmethod
    def _root(matrix, before):
        try:
            values, vectors = torch.linalg.eigh(matrix.float())
        except torch.linalg.LinAlgError:
            return before
        return vectors @ torch.diag(values.pow(-0.25)) @ vectors.T


model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 6))
optimizer = Shampoo(model.parameters(), lr=0.03)
means = torch.randn(6, 20)
for _ in range(40):
    label = torch.randint(6, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(means[label] + 0.9 * torch.randn(64, 20))
    loss = nn.functional.cross_entropy(logits.float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
