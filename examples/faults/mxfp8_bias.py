"""A conversion to MXFP8 of layers that have biases: the product leaves them out."""

# Thread: none; read in torchao 0.18
# Finding: bias-left-out in blocks.0
import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=True) for _ in range(4))

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
config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
quantize_(model, config, filter_fn=lambda module, name: name.startswith("blocks.") and isinstance(module, nn.Linear))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    tokens = torch.randint(0, 96, (8, 33))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
