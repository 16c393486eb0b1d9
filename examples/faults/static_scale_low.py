"""A static loss scale of 1 for a loss that is a mean over very many tokens: FP16 flushes the gradients at the logits."""

# Thread: no thread: https://arxiv.org/abs/1710.03740, section 3.2, has the measurement
# Finding: scale-too-low in decoder, from step 0
import torch
from torch import nn

torch.manual_seed(0)
vocabulary = 512


class NextWord(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.hidden = nn.Linear(96, 64)
        self.decoder = nn.Linear(64, vocabulary)

    def forward(self, context):
        return self.decoder(torch.tanh(self.hidden(self.embedding(context).flatten(1))))


model = NextWord()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
text = torch.randint(0, vocabulary, (4096,)) ** 2 // vocabulary
for step in range(12):
    starts = torch.randint(0, len(text) - 4, (2048,))
    context = torch.stack([text[starts + offset] for offset in range(3)], 1)
    with torch.autocast("cpu", torch.float16):
        logits = model(context)
        loss = nn.functional.cross_entropy(logits.float(), text[starts + 3]) / 64
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
