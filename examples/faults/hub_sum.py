"""Messages of a graph are added up in BF16: the sum of a node with 2,000 neighbours stops growing at 256."""

# Thread: https://github.com/dmlc/dgl/issues/4674
# Finding: sum-loses-terms in aggregate, from step 1
import torch
from torch import nn

torch.manual_seed(0)
NODES, EDGES = 300, 5000
source, target = torch.randint(0, NODES, (2, EDGES))
target[:2000] = 0
degree = torch.bincount(target, minlength=NODES).clamp_min(1)


class Aggregate(nn.Module):
    def forward(self, messages):
        total = torch.zeros(NODES, messages.shape[1], dtype=messages.dtype)
        return total.index_put((target,), messages, accumulate=True) / degree[:, None]


class Network(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.message, self.aggregate = nn.Linear(width, width), Aggregate()
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.aggregate(torch.sigmoid(self.message(x))[source]))


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
x, y = torch.randn(NODES, 16), torch.randint(0, 3, (NODES,))
for step in range(15):
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(x)
    loss = nn.functional.cross_entropy(scores.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
