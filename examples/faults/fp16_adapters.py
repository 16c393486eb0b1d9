"""Adapters take the FP16 of the frozen weights beside them, and the scaler refuses to unscale their gradients."""

# Thread: https://github.com/huggingface/peft/issues/341 (ValueError: Attempting to unscale FP16 gradients)
# Finding: gradients-refused in adapter, from step 0
import torch
from torch import nn

torch.manual_seed(0)


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


model = Adapted(nn.Linear(16, 4).half())
optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(10):
    with torch.autocast("cpu", torch.float16):
        scores = model(torch.randn(32, 16))
    loss = nn.functional.cross_entropy(scores.float(), torch.randint(0, 4, (32,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: loss {loss.item():.4f}")
