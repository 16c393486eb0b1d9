"""A policy and its reference share one model and one autocast region: the reference's forward takes the policy's cached casts."""

# Thread: https://github.com/X-GenGroup/Flow-Factory/pull/186
# Finding: autocast-around-updates in body, from step 1
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(20, 48)
        self.head = nn.Linear(48, 8)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


torch.manual_seed(0)
policy = Policy()
reference = [each.detach().clone() for each in policy.parameters()]
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
rewards = torch.randn(20, 8)


def swap(values):
    kept = [each.detach().clone() for each in policy.parameters()]
    for each, value in zip(policy.parameters(), values, strict=True):
        each.data.copy_(value)
    return kept


for step in range(30):
    x = torch.randn(64, 20)
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy(x)
        with torch.no_grad():
            kept = swap(reference)
            expected = policy(x)
            swap(kept)
    chosen, before = logits.float().log_softmax(-1), expected.float().log_softmax(-1)
    kl = (chosen.exp() * (chosen - before)).sum(-1).mean()
    loss = kl - (chosen.exp() * (x @ rewards)).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
