"""The usual training loop, bare and under an inspector."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from mpinspect import Inspector, MixedPrecision


def take_step(
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    scaler: torch.amp.GradScaler | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """Zero the gradients, run the backward, call ``before_step`` and step, through the scaler if there is one."""
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        before_step()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    before_step()
    scaler.step(optimizer)
    scaler.update()


def mixed_step(mp: MixedPrecision, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Take a step of mixed precision on the loss, which is computed under its autocast and returned."""
    mp.zero_grad()
    with mp.autocast():
        loss = loss_of()
    mp.backward(loss)
    mp.step()
    return loss


def closure_of(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor], scaler: torch.amp.GradScaler | None = None
) -> Callable[[], torch.Tensor]:
    """Return a closure for ``optimizer.step``: it zeroes the gradients, and runs the backward of the loss that it returns."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    return closure


def plain_inductor() -> AbstractContextManager[Any]:
    """Let Inductor compile in this process, without vectors: the rest would cost more time than a test's few kernels."""
    import torch._inductor.config as inductor

    return inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": False})  # type: ignore[no-any-return]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def cpu_scaler(scale: float, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def inspected(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
    *,
    lr: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    before_step: Callable[[int], object] = lambda step: None,
    after_step: Callable[[int], object] | None = None,
    **options: Any,
) -> Inspector:
    """Train on ``loss_of(step)`` under an inspector that is given the options; the default is SGD.

    Args:
        before_step: called between each backward and its step.
        after_step: called after each step, without gradients.
    """
    optimizer = optimizer or sgd(model, lr)
    with Inspector(model, **{"optimizers": optimizer, **options}) as inspector:
        for step in range(steps):
            take_step(optimizer, loss_of(step), scaler, partial(before_step, step))
            if after_step is not None:
                with torch.no_grad():
                    after_step(step)
    return inspector
