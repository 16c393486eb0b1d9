"""The model is made under a BF16 default dtype, and so are its rotary tables: distant positions get neighbours' angles."""

# Thread: https://github.com/EleutherAI/gpt-neox/issues/1003
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)
LENGTH, WIDTH = 512, 32


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        rates = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.outer(torch.arange(LENGTH).type_as(rates), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x, positions):
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self.cos[positions].float(), self.sin[positions].float()
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class Distance(nn.Module):
    """Tells how far two tokens are apart."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.rotary = Rotary()
        self.head = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x, one, other):
        return self.head(self.rotary(self.query(x), one) * self.rotary(self.key(x), other))


torch.set_default_dtype(torch.bfloat16)
model = Distance()
torch.set_default_dtype(torch.float32)
model.query, model.key, model.head = model.query.float(), model.key.float(), model.head.float()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(80):
    one = torch.randint(0, LENGTH - 8, (256,))
    apart = torch.randint(0, 8, (256,))
    loss = nn.functional.cross_entropy(model(torch.ones(256, 8), one, one + apart), apart)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
