"""A small network, its batches, and the session of a plain loop over them, which a trainer's callback must reproduce."""

import torch
from equality import equal
from torch import nn

import mpinspect
from mpinspect.ranges.session import Session

BATCHES, SIZE, WIDTH = 8, 4, 8
LEARNING_RATE = 0.1


class Regressor(nn.Module):
    """Maps WIDTH numbers to 1; ``net`` is seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, WIDTH, generator=generator) for _ in range(BATCHES)]


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch)[:, 0] - batch.sum(dim=1)).square().mean()


def train_by_hand(accumulate: int = 1, scaler: torch.amp.GradScaler | None = None) -> tuple[Session, nn.Module]:
    """Train in a plain loop over the batches; return the Inspector's session and the trained model."""
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with mpinspect.Inspector(model, optimizers=optimizer) as inspector:
        for number, batch in enumerate(make_batches(), start=1):
            scaler.scale(loss_of(model.net, batch) / accumulate).backward()
            if number % accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return inspector.session(), model


def hooks_on(model: nn.Module) -> int:
    """Return the number of hooks on modules and parameters."""
    on_modules = sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules())
    return on_modules + sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    return equal(first.state_dict(), second.state_dict())
