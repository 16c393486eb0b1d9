"""A classifier is evaluated under BF16 autocast: logits and the sum of losses in FP32, padding masked by the lowest number."""

# Thread: no thread: an evaluation as it should be
import torch
from torch import nn

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.score = nn.Linear(width, 1)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, ids):
        x = self.embed(ids)
        scores = self.score(x).squeeze(-1)
        scores = scores.masked_fill(ids == 0, torch.finfo(scores.dtype).min)
        return self.head((scores.softmax(1)[..., None] * x).sum(1))


model, total, count = Classifier().eval(), 0.0, 0
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    for _ in range(20):
        ids = torch.randint(0, 50, (16, 24))
        logits = model(ids).float()
        total += nn.functional.cross_entropy(logits, ids[:, 0] % 4, reduction="sum").item()
        count += len(ids)
print(total / count)
