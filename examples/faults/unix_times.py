"""A data set keeps Unix times in FP32, whose numbers lie 128 s apart there: the seconds between events are lost."""

# Thread: no thread: tables of events are often read into one FP32 array
# Finding: result-is-rounding-error, from step 1
import torch
from torch import nn

torch.manual_seed(0)

gaps = torch.randint(1, 60, (512, 12))
times = 1_700_000_000 + torch.randint(0, 10_000_000, (512, 1)) + gaps.cumsum(1)
is_hasty = (gaps[:, 1:].float().mean(1) < 30).float()
events = times.float()

model = nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(30):
    rows = torch.randint(0, 512, (64,))
    seconds = events[rows].diff(dim=1)
    loss = nn.functional.binary_cross_entropy_with_logits(model(seconds / 60).squeeze(1), is_hasty[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
