"""A retriever encodes and ranks in BF16: similarities near one differ in their last bits, and equal scores decide by order."""

# Thread: https://github.com/huggingface/sentence-transformers/issues/3894
# Finding: choices-differ, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.EmbeddingBag(200, width, mode="sum")
        self.project = nn.Linear(width, width)

    def forward(self, ids):
        return nn.functional.normalize(self.project(self.embed(ids)), dim=-1)


model = Encoder().to(torch.bfloat16).eval()
documents = torch.randint(0, 200, (1, 60)).repeat(64, 1)
documents[:, 0] = torch.arange(64)
with torch.inference_mode():
    index = model(documents)
    queries = model(documents.flip(1))
    best = (queries @ index.T).argmax(1)
    print((best == torch.arange(64)).float().mean())
