"""A backbone is frozen and stays in the optimizer, as many fine-tuning scripts have it; the head is trained."""

# Thread: as detached_encoder.py, but intended
import torch
from torch import nn

torch.manual_seed(0)


class Finetuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for layer in self.backbone:
            x = torch.relu(layer(x))
        return self.head(x)


model = Finetuned()
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(16, 16), torch.randint(0, 3, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
