"""Areas of boxes, in pixels, overflow in FP16: the overlap of large boxes is NaN or 0, and none of them is matched."""

# Thread: https://github.com/pytorch/vision/pull/3325
# Finding: overflow-in-operator, from step 1
import torch
from torch import nn

torch.manual_seed(0)
SIZES = torch.tensor([32.0, 96.0, 288.0, 320.0])
anchors = SIZES.repeat(16)


def overlap(boxes, anchors):
    inner = torch.minimum(boxes[:, None], anchors)
    area = inner * inner
    return area / (boxes.square()[:, None] + anchors.square() - area)


model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for _ in range(40):
    sizes = SIZES[torch.randint(4, (32,))] * (0.9 + 0.2 * torch.rand(32))
    seen = torch.stack([torch.cos(sizes / scale) for scale in range(20, 100, 10)], 1)
    with torch.autocast("cpu", torch.float16):
        scores = model(seen)
        matched = overlap(sizes.half(), anchors.half()) > 0.6
    loss = nn.functional.binary_cross_entropy_with_logits(scores.float(), matched.float())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
