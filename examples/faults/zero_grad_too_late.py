"""zero_grad() stands between the backward and the step: the optimizer gets no gradient."""

# Thread: https://github.com/ultralytics/ultralytics/pull/11217
# Finding: gradients-zeroed, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.LSTM(8, 16, batch_first=True)
head = nn.Linear(16, 2)
network = nn.ModuleDict({"lstm": model, "head": head})
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(8, 12, 8), torch.randint(0, 2, (8,))
    states, _ = network["lstm"](x)
    loss = nn.functional.cross_entropy(network["head"](states[:, -1]), y)
    loss.backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
