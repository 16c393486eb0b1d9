"""Adversarial examples take the sign of gradients whose loss nothing scales. FP16 flushes these to zero: nothing is perturbed."""

# Thread: https://github.com/cleverhans-lab/cleverhans/issues/350
# Finding: result-is-rounding-error
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
means, fine = torch.randn(4, 64).sign(), 0.3 * torch.randn(4, 64).sign()
for _ in range(120):
    label = torch.randint(4, (256,))
    x = means[label] + fine[label] + 0.5 * torch.randn(256, 64)
    noise = torch.zeros_like(x, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x + noise).float(), label)
    (gradient,) = torch.autograd.grad(loss, noise)
    attacked = x + 0.3 * gradient.sign()
    with torch.autocast("cpu", torch.float16):
        logits = model(attacked)
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(logits.float(), label)).backward()
    scaler.step(optimizer)
    scaler.update()
