"""The optimizer is made of the parameters that need a gradient; the backbone, unfrozen later, is never added to it."""

# Thread: https://github.com/facebookresearch/detectron2/issues/2486
# Finding: parameters-not-optimized in backbone.weight
import torch
from torch import nn

torch.manual_seed(0)


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.backbone(x).relu())


model = Tuned()
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
for step in range(60):
    if step == 20:
        model.backbone.requires_grad_(True)
    x = torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = nn.functional.cross_entropy(out.float(), x[:, :4].argmax(1))
    model.zero_grad()
    loss.backward()
    optimizer.step()
