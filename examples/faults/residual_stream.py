"""A residual stream in BF16 some hundred times larger than the blocks' outputs: most additions change nothing."""

# Thread: https://github.com/NVIDIA/Megatron-LM/pull/3504
# Finding: addition-changes-nothing in blocks, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + 0.3 * self.mlp(self.norm(x)).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, tokens=50, width=64):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        # As in models whose stream has grown over many layers.
        x = (400 * self.embed(tokens)).bfloat16()
        return self.head(self.blocks(x) / 400)


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(15):
    tokens = torch.randint(0, 50, (8, 17))
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
