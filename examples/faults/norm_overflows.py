"""An RMSNorm by hand that squares FP16 activations: where one of a row reaches 256, the row becomes zero."""

# Thread: https://github.com/pytorch/pytorch/pull/133085
# Finding: overflow-in-operator in blocks.0.norm, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight.to(x.dtype) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, tokens=40, width=16):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        # The first token's activation is massive in one channel, as it is in trained language models.
        self.embed.weight.data[0, 3] = 400.0
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.embed(tokens).half()
        for block in self.blocks:
            x = block(x)
        return self.head(x / 16)


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(20):
    tokens = torch.randint(0, 40, (8, 12))
    tokens[:, 0] = 0
    with torch.autocast("cpu", torch.float16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), (tokens * 7 + 3).flatten() % 40)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
