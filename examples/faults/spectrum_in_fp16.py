"""A loud clip's spectrum is squared in FP16, in the reference of a loss: the loss is NaN once, and then all weights are."""

# Thread: https://github.com/jaywalnut310/vits/issues/15
# Finding: argument-out-of-range, from step 40
import torch
from torch import nn


def magnitude(wave):
    spectrum = torch.stft(wave, 128, 32, window=torch.hann_window(128), return_complex=True)
    real, imaginary = spectrum.real.half(), spectrum.imag.half()
    return torch.sqrt(real * real + imaginary * imaginary + 1e-4)


def distance(estimate, reference):
    e, r = magnitude(estimate), magnitude(reference)
    return torch.norm((r - e).float()) / torch.norm(r.float())


torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 8, 15, padding=7), nn.Tanh(), nn.Conv1d(8, 1, 15, padding=7))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    clean = torch.randn(4, 512) * (60.0 if step == 40 else 1.0)
    noisy = clean + 0.1 * torch.randn_like(clean)
    loss = distance(model(noisy[:, None])[:, 0], clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
