"""A small ResNet whose GradScaler starts so high that the first half of a short run is skipped."""

# Thread: https://github.com/lucidrains/stylegan2-pytorch/issues/100
# Finding: initial-scale-too-high, from step 0
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for step in range(14):
    images, labels = torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images).float(), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
