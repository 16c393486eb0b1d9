"""A cosine similarity by hand adds an epsilon of 1e-8 in FP16, where it is zero: an empty row is 0/0."""

# Thread: https://github.com/pytorch/pytorch/issues/32137
# Finding: input-rounded-away in cosine, from step 6
import torch
from torch import nn

torch.manual_seed(0)


class Cosine(nn.Module):
    def forward(self, a, b):
        return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(40, 32, bias=False)
        self.cosine = Cosine()

    def forward(self, queries, documents):
        return self.cosine(self.encode(queries).half(), self.encode(documents).half())


model = Matcher()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(14):
    queries, documents = torch.randn(12, 40), torch.randn(12, 40)
    if step >= 6:
        queries[4] = 0
    with torch.autocast("cpu", torch.float16):
        similarity = model(queries, documents)
    loss = nn.functional.mse_loss(similarity.float(), torch.rand(12))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
