"""A projection is added to the model after its optimizer was made: it gets gradients and is never trained."""

# Thread: no thread: torch.optim documents that parameters are taken when the optimizer is made
# Finding: parameters-not-optimized in head
import torch
from torch import nn

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.body(x))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# Five classes turned out to be seven.
model.head = nn.Linear(32, 7)
for step in range(25):
    x, y = torch.randn(32, 16), torch.randint(0, 7, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
