"""A pooling adds up the pixels of a map in FP16 before it divides: of bright images the sum is beyond 65504."""

# Thread: https://github.com/qubvel-org/segmentation_models.pytorch/issues/463
# Finding: overflow-in-operator in pool, from step 6
import torch
from torch import nn

torch.manual_seed(0)


class Pool(nn.Module):
    def forward(self, x):
        return x.sum(1) / x.shape[1]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.pool, self.head = nn.Linear(3, 8), Pool(), nn.Linear(8, 2)

    def forward(self, pixels):
        lifted = torch.relu(self.lift(pixels)).half()
        return self.head(self.pool(lifted).float())


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(16):
    pixels = torch.rand(4, 64 * 64, 3)
    if step >= 6:
        pixels += 40.0  # not normalised, as the validation set is
    loss = nn.functional.cross_entropy(model(pixels), torch.randint(0, 2, (4,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
