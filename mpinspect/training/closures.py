"""Optimizer steps with a closure under a loss scaler: gradients are checked after each evaluation; an overflow undoes the step.

torch.amp.GradScaler refuses a closure given by keyword. If a closure is given by position, the optimizer runs it *after*
GradScaler has unscaled the gradients, and then steps on the scaled gradients that the closure computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Evaluation = Callable[[], Any]


class Overflow(Exception):
    """Raised when a gradient is non-finite after an evaluation; it propagates through the optimizer's own step."""


@dataclass(frozen=True)
class ClosureStep:
    """Outcome of a step: the optimizer's return value, or the first evaluation's loss if the step was skipped."""

    result: Any
    skipped: bool


def taken_from(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Evaluation | None, Callable[[Evaluation], Any]]:
    """Return the closure in the arguments of ``step`` (None if absent), and a function that steps with another closure."""
    closure = kwargs.get("closure", next(iter(args), None))
    if kwargs.get("closure") is not None and not callable(closure):
        raise TypeError(f"the closure must be a function that returns the loss, not {closure!r}")
    if not callable(closure):
        return None, lambda _: optimizer.step(*args, **kwargs)
    if "closure" in kwargs:
        return closure, lambda other: optimizer.step(*args, **{**kwargs, "closure": other})
    return closure, lambda other: optimizer.step(other, *args[1:], **kwargs)


def run(optimizer: torch.optim.Optimizer, evaluate: Evaluation, step: Callable[[Evaluation], Any]) -> ClosureStep:
    """Take one step of ``optimizer``.

    The first evaluation runs before the optimizer's step; if it overflows, the step is not started. The optimizer's first
    closure call returns that evaluation's loss, unless the optimizer changed its weights beforehand (as sharpness-aware
    optimizers do). For optimizers that may call the closure again, such as L-BFGS, weights and state are copied first, and
    restored if a later evaluation overflows or fails.

    Args:
        evaluate: runs the closure and leaves unscaled gradients; raises Overflow if one is non-finite.
        step: calls ``optimizer.step`` with the closure passed to it.
    """
    try:
        with torch.enable_grad():
            loss = evaluate()
    except Overflow as overflow:
        return ClosureStep(overflow.args[0], skipped=True)
    before = None
    if not _asks_once(optimizer):
        before = Snapshot(optimizer)
    fresh = [loss]

    def closure() -> Any:
        if fresh and (before is None or before.weights_unchanged()):
            return fresh.pop()
        fresh.clear()
        with torch.enable_grad():
            return evaluate()

    try:
        return ClosureStep(step(closure), skipped=False)
    except BaseException as error:
        if before is not None:
            before.restore()
        if isinstance(error, Overflow):
            return ClosureStep(loss, skipped=True)
        raise


def _asks_once(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer calls its closure exactly once and first, as torch's own do except L-BFGS."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


class Snapshot:
    """Copies of an optimizer's weights, state and options, which take as much memory as the originals."""

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._weights = [(weight, weight.clone()) for weight in held_parameters(optimizer)]
        options = [
            (group, {key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
        ]
        self._options = [(group, {key: _keep(value) for key, value in kept.items()}) for group, kept in options]
        self._state = _keep(optimizer.state)

    def weights_unchanged(self) -> bool:
        """Return whether the weights still equal their copies. Waits for the GPU."""
        return all(torch.equal(weight, copy) for weight, copy in self._weights)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights, state and options in place, in the same tensors and containers."""
        for weight, copy in self._weights:
            weight.copy_(copy)
        for group, options in self._options:
            group.update({key: give_back() for key, give_back in options.items()})
        self._state()


def _keep(value: Any) -> Callable[[], Any]:
    """Return a function that restores ``value`` to its current content, in place if it is mutable, and returns it."""
    if isinstance(value, torch.Tensor):
        return _kept_tensor(value)
    if isinstance(value, dict):
        return _kept_dict(value)
    if isinstance(value, list):
        return _kept_list(value)
    if type(value) is tuple:
        parts = [_keep(part) for part in value]
        return lambda: tuple(give_back() for give_back in parts)
    return lambda: value


def _kept_tensor(value: torch.Tensor) -> Callable[[], Any]:
    copy = value.detach().clone()

    def give_back() -> torch.Tensor:
        value.detach().copy_(copy)
        return value

    return give_back


def _kept_dict(value: dict[Any, Any]) -> Callable[[], Any]:
    entries = {key: _keep(entry) for key, entry in value.items()}

    def give_back() -> dict[Any, Any]:
        kept = {key: entry() for key, entry in entries.items()}
        value.clear()
        value.update(kept)
        return value

    return give_back


def _kept_list(value: list[Any]) -> Callable[[], Any]:
    entries = [_keep(entry) for entry in value]

    def give_back() -> list[Any]:
        value[:] = [entry() for entry in entries]
        return value

    return give_back


def held_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups in order: the tensors that ``step`` updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
