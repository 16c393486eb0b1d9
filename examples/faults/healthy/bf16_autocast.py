"""A small transformer in BF16 autocast with FP32 weights and no scaler."""

# Thread: as bf16_moments.py, done right
import torch
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.head = nn.Linear(32, 128)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(30):
    tokens = torch.randint(0, 128, (4, 17))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
