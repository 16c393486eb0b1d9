"""Pure BF16 weights at a large learning rate that decays to zero: the updates that round away are the last, small ones."""

# Thread: as bf16_finetune.py, done right
import torch
from torch import nn

torch.manual_seed(5)
model = nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
model = model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
truth = torch.randn(12, 4)
for step in range(150):
    x = torch.randn(64, 12)
    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), (x @ truth).argmax(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print(loss.item())
