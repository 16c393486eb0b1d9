"""Reversible blocks rebuild their inputs in the backward by subtraction. In BF16 each block doubles the error."""

# Thread: https://github.com/facebookresearch/SlowFast/issues/641
# Finding: gradients-inaccurate, from step 1
import torch
from torch import nn

torch.manual_seed(0)
DECAY, DEPTH = 0.5, 16


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, momentum, blocks, *weights):
        with torch.no_grad():
            for block in blocks:
                momentum = DECAY * momentum + (1 - DECAY) * block(x)
                x = x + momentum
        ctx.save_for_backward(x, momentum)
        ctx.blocks = blocks
        return x

    @staticmethod
    def backward(ctx, gradient):
        x, momentum = ctx.saved_tensors
        of_momentum, of_weights = torch.zeros_like(gradient), []
        for block in reversed(ctx.blocks):
            x = x - momentum
            with torch.enable_grad():
                before = x.detach().requires_grad_()
                change = block(before)
            momentum = (momentum - (1 - DECAY) * change.detach()) / DECAY
            of_momentum = of_momentum + gradient
            found = torch.autograd.grad(change, [before, *block.parameters()], (1 - DECAY) * of_momentum)
            gradient, of_momentum, of_weights = gradient + found[0], DECAY * of_momentum, [*found[1:], *of_weights]
        return gradient, None, None, *of_weights


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.outer(self.inner(x).tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.blocks, self.head = (
            nn.Linear(8, 32),
            nn.ModuleList([Block() for _ in range(DEPTH)]),
            nn.Linear(32, 4),
        )

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.entry(x)
        weights = self.blocks.parameters()
        return self.head(Reversible.apply(x, torch.zeros_like(x), list(self.blocks), *weights).float())


net, mixing = Net(), torch.randn(8, 4) / 8**0.5
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for _ in range(60):
    x = torch.randn(64, 8)
    loss = nn.functional.mse_loss(net(x), (2 * x @ mixing).sin() + 0.5 * x[:, :4] * x[:, 4:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
