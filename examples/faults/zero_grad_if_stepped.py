"""zero_grad() is called only after a step that was taken: the infinities of a skipped step stay in .grad, and all later steps
are skipped."""

# Thread: https://github.com/pytorch/pytorch/issues/67590
# Finding: gradients-never-zeroed, from step 12
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(40):
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    # One steep loss is more than the scale leaves room for.
    weight = 3e4 if step == 12 else 1.0
    loss = weight * nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        optimizer.zero_grad()
