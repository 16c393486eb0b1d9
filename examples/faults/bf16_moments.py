"""A language model cast to BF16 before its AdamW is made: the second moment is BF16 too and cannot decay."""

# Thread: https://github.com/areal-project/AReaL/issues/1292
# Finding: moments-cannot-decay
import torch
from torch import nn

torch.manual_seed(0)
vocabulary, width = 256, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.lm_head(hidden + self.mlp(hidden))


model = Model().to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
for step in range(30):
    tokens = torch.randint(0, vocabulary, (8, 33))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
