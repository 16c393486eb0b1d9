"""PPO keeps the old log-probabilities of texts in BF16. For long texts their rounding looks like a divergence: no pass runs."""

# Thread: https://github.com/DLR-RM/stable-baselines3/issues/419
# Finding: steps-stopped, from step 40
import torch
from torch import nn

torch.manual_seed(0)
WORDS, TEXTS = 16, 64
policy = nn.Sequential(nn.Embedding(WORDS, 32), nn.Tanh(), nn.Linear(32, WORDS))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)


def write(length):
    text = torch.zeros(TEXTS, length + 1, dtype=torch.long)
    with torch.no_grad():
        for place in range(length):
            text[:, place + 1] = torch.multinomial(policy(text[:, place]).softmax(-1), 1)[:, 0]
    return text


def log_probs(text):
    scores = policy(text[:, :-1]).log_softmax(-1)
    return scores.gather(-1, text[:, 1:, None])[..., 0].sum(-1)


for iteration in range(50):
    text = write(length=4 if iteration < 20 else 64)
    with torch.no_grad():
        old = log_probs(text).bfloat16()
    reward = (text[:, 1:] == 1).float().mean(-1)
    for _ in range(2):
        change = log_probs(text) - old
        divergence = (change.exp() - 1 - change).mean()
        if divergence.item() > 0.02:
            break
        loss = -(change.exp() * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
