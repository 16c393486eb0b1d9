"""An encoder that was trained in BF16 runs in FP16: the product in its gated feed-forward overflows, and every output is NaN."""

# Thread: https://github.com/huggingface/transformers/issues/4586
# Finding: overflow-in-operator in layers.2, from step 0
import torch
from torch import nn

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(width, 4 * width, bias=False)
        self.back = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.back(nn.functional.gelu(self.gate(y)) * self.value(y))


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(4)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        return self.norm(self.layers(self.embed(ids))).mean(1)


encoder = Encoder()
with torch.no_grad():
    for weight in (encoder.layers[2].gate.weight, encoder.layers[2].value.weight):
        weight.mul_(300)
encoder.half().eval()
with torch.no_grad():
    for batch in torch.randint(0, 100, (6, 4, 12)):
        print(encoder(batch).float().norm(dim=1))
