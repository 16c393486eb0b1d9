"""A loss scale by hand has a floor of 4096: a longer sum overflows at it, and the loop drops every gradient from then on."""

# Thread: https://github.com/facebookresearch/metaseq/pull/115
# Finding: scale-too-high in 2, from step 20
import torch
from torch import nn

torch.manual_seed(0)


def main():
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = torch.randn(24, 6)
    scale, floor = 2.0**13, 2.0**12
    for step in range(60):
        samples = 16 if step < 20 else 512
        x = torch.randn(samples, 24)
        with torch.autocast("cpu", torch.float16):
            scores = model(x)
        loss = nn.functional.cross_entropy(scores.float(), (x @ truth).argmax(1), reduction="sum")
        optimizer.zero_grad()
        (loss * scale).backward()
        if all(p.grad.isfinite().all() for p in model.parameters()):
            for p in model.parameters():
                p.grad.div_(scale)
            optimizer.step()
        else:
            scale = max(scale / 2, floor)


main()
