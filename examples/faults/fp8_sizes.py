"""An emulated conversion with a vocabulary of 100: no kernel of a GPU takes the last layer."""

# Thread: none; torch._scaled_mm asks for multiples of 16
# Finding: sizes-refused in projection
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self, width=64, vocabulary=100):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.embed(tokens)))


torch.manual_seed(0)
model = Model()
model.projection = model.lm_head
del model.lm_head
model.forward = lambda tokens: model.projection(model.blocks(model.embed(tokens)))
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    tokens = torch.randint(0, 100, (8, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
