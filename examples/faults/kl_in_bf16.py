"""A KL divergence of two nearly equal distributions, computed in BF16: its result is rounding error."""

# Thread: https://github.com/vllm-project/speculators/issues/788
# Finding: result-is-rounding-error, from step 1
import torch
from torch import nn

torch.manual_seed(0)
draft = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 128)).bfloat16()
optimizer = torch.optim.SGD(draft.parameters(), lr=1e-2)
for step in range(20):
    hidden = torch.randn(32, 32, dtype=torch.bfloat16)
    logits = draft(hidden)
    target = (logits.detach() + 0.02 * torch.randn_like(logits)).softmax(-1)
    p, log_q = target, logits.log_softmax(-1)
    loss = (p * (p.log() - log_q)).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
