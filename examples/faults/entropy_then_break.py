"""The entropy of FP16 probabilities becomes NaN once one of them is zero, and the loop breaks before a backward."""

# Thread: https://github.com/huggingface/trl/issues/7221
# Finding: argument-out-of-range, from step 41
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(8, 12)

    def forward(self, x):
        return self.scores(x) * 3


def entropy(p):
    return -(p * torch.log(p)).sum(-1)


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
for step in range(80):
    x = torch.randn(64, 8)
    logits = policy(x)
    p = torch.softmax(logits, -1).half()
    chosen = torch.log_softmax(logits, -1).gather(1, x.argmax(-1, keepdim=True))
    loss = -chosen.mean() - 0.01 * entropy(p).float().mean()
    if not torch.isfinite(loss):
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
