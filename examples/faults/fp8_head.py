"""A filter that keeps `output` out of FP8 where the head is named lm_head: it computes in FP8."""

# Thread: https://github.com/pytorch/torchtitan/issues/4008
# Finding: narrow-head in lm_head
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self, width=64, vocabulary=96):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.embed(tokens)))


torch.manual_seed(0)
model = Model()
convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "output")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    tokens = torch.randint(0, 96, (8, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
