"""The power of a quiet sound is computed in FP16, which flushes it before its logarithm is taken."""

# Thread: https://github.com/adobe-research/convmelspec/pull/3
# Finding: operator-flushes in front, from step 1
import torch
from torch import nn


class LogPower(nn.Module):
    def forward(self, sound):
        window = torch.hann_window(64)
        spectrum = torch.stft(sound, 64, 32, window=window, return_complex=True).abs().mean(2)
        power = spectrum.half() ** 2
        return power.float().clamp(min=1e-12).log10() / 4 + 2


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = LogPower()
        self.classes = nn.Linear(33, 4)

    def forward(self, sound):
        return self.classes(self.front(sound))


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
time = torch.arange(512.0)
for step in range(30):
    label = torch.randint(0, 4, (32,))
    sound = 3e-6 * torch.sin(0.4 * (1 + label[:, None]) * time) + 1e-7 * torch.randn(32, 512)
    loss = nn.functional.cross_entropy(model(sound), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
