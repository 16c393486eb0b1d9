"""Gradients that waited for the end of their backward, and a small training with some."""

import math

import torch
from torch import nn

from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import ParameterGradient


def waited(*gradients: torch.Tensor) -> list[ParameterGradient]:
    watched = WatchedParameter("weight", "", nn.Parameter(torch.ones(1)), True)
    return [ParameterGradient(watched, gradient, gradient._version, 0, None) for gradient in gradients]


def row_of(each: ParameterGradient) -> torch.Tensor:
    assert each.found is not None
    return each.found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()


def of_slope(weight: torch.Tensor, slope: float) -> torch.Tensor:
    """Return a loss term whose gradient at each weight is ``slope``; for an infinite slope the term is zero."""
    return (weight * slope).sum() if math.isfinite(slope) else (weight - weight.detach()).sqrt().sum()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
