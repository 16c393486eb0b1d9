"""FP32 masters are set to the BF16 weights after each evaluation: what had gathered in their low bits is lost."""

# Thread: https://github.com/TensorAuto/OpenTau/pull/185
# Finding: masters-overwritten, from step 3
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 4)).bfloat16()
masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=2e-5)
truth = torch.randn(24, 4)
for step in range(32):
    x = torch.randn(64, 24)
    loss = nn.functional.mse_loss(model(x.bfloat16()).float(), torch.tanh(x @ truth))
    model.zero_grad()
    loss.backward()
    for p, master in zip(model.parameters(), masters, strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)
        if step % 4 == 3:
            # The evaluation has saved the model, and loads it again.
            for p, master in zip(model.parameters(), masters, strict=True):
                master.copy_(p)
