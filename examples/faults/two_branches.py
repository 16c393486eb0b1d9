"""Two heads behind one input whose losses differ by ten orders of magnitude: no one loss scale serves both."""

# Thread: no thread: a scale per branch is what users ask for in https://github.com/Lightning-AI/pytorch-lightning/issues/9799
# Finding: scale-window-empty in cls
import torch
from torch import nn

torch.manual_seed(0)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.depth_in = nn.Linear(16, 32)
        self.depth = nn.Linear(32, 1)
        self.cls_in = nn.Linear(16, 32)
        self.cls = nn.Linear(32, 4)

    def forward(self, x):
        return self.depth(torch.relu(self.depth_in(x))), self.cls(torch.relu(self.cls_in(x)))


model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(30):
    x, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
    with torch.autocast("cpu", torch.float16):
        depth, logits = model(x)
    loss = 0.1 * (depth.float() - 300).square().sum() + 1e-8 * nn.functional.cross_entropy(logits.float(), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
