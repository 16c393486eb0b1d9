"""A padded sample has no token at all: its row of attention scores is -inf everywhere, and the softmax NaN."""

# Thread: https://github.com/huggingface/transformers/issues/31035
# Finding: mask-hides-whole-row in attn, from step 9
import math

import torch
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, keep):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~keep[:, None, :], -math.inf)
        return self.proj(scores.softmax(-1) @ v)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attn = Attention(16)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens, keep):
        hidden = self.embed(tokens)
        return self.head((hidden + self.attn(hidden, keep)).mean(1))


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    tokens, lengths = torch.randint(0, 50, (4, 10)), torch.randint(1, 10, (4,))
    if step == 9:
        lengths[2] = 0
    keep = torch.arange(10)[None] < lengths[:, None]
    loss = nn.functional.cross_entropy(model(tokens, keep), torch.randint(0, 2, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
