"""The added microseconds per module call while an inspector is attached but takes no sample."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import mpinspect

MODULES = 500


def added_us(rounds: int = 15, passes: int = 10) -> float:
    """Return the time that an inspector adds to a forward, divided by the number of modules: the median over the rounds.

    The watch is off and the next sample far away. The modules are nn.Identity, with gradients enabled.
    """
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Identity() for _ in range(MODULES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2, 4)
    added = []
    for _ in range(rounds):
        bare = _seconds(model, x, passes)
        with mpinspect.Inspector(model, optimizers=optimizer, every=10**9, watch=False):
            # The first step is sampled.
            model(x).sum().backward()
            optimizer.step()
            added.append(_seconds(model, x, passes) - bare)
    return statistics.median(added) / (MODULES + 1) * 1e6


def _seconds(model: nn.Module, x: torch.Tensor, passes: int) -> float:
    """Return the least time of a few forwards, to exclude interruptions."""
    times = []
    for _ in range(passes):
        started = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - started)
    return min(times)
