"""The loss holds the square root of a squared distance: where two embeddings are equal the loss is fine and its gradient
NaN."""

# Thread: https://github.com/pytorch/pytorch/issues/2421
# Finding: argument-out-of-range, from step 8
import torch
from torch import nn

torch.manual_seed(0)
embed = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(embed.parameters(), lr=1e-2)
for step in range(15):
    anchor, positive, negative = torch.randn(3, 16, 12).unbind()
    if step == 8:
        # The same sample was drawn twice.
        positive[5] = anchor[5]
    a, p, n = embed(anchor), embed(positive), embed(negative)
    near, far = (a - p).square().sum(1).sqrt(), (a - n).square().sum(1).sqrt()
    loss = torch.relu(near - far + 1.0).mean() + 0.1 * near.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
