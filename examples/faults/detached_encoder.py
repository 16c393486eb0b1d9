"""The encoder's output goes through .data on its way to the decoder: the encoder never gets a gradient."""

# Thread: https://github.com/YufeiWang777/LRRU/issues/13
# Finding: gradients-missing in encoder
import torch
from torch import nn

torch.manual_seed(0)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 24))

    def forward(self, x):
        code = self.encoder(x).data.clamp(-3, 3)
        return self.decoder(code)


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(25):
    x = torch.randn(32, 24)
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
