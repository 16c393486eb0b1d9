"""Listening to every optimizer's steps: one pair of torch's global hooks, however many listeners there are.

torch walks its table of hooks while they run, so adding or removing one in the middle of another thread's step would
end that step with an error. Ours are added once, when the first listener comes, and removed with the last, unless
a step is under way in some thread at that moment: then they stay, without effect, until the next one leaves.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class StepListener(Protocol):
    """What listeners implement. The methods must not raise."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` is about to run."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` has run."""


_listeners: list[StepListener] = []
_handles: list[RemovableHandle] = []
_under_way: set[tuple[int, str]] = set()


def listen(listener: StepListener) -> None:
    """Tell ``listener`` of every optimizer's steps from now on."""
    _listeners.append(listener)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


def unlisten(listener: StepListener) -> None:
    """Stop telling ``listener``; the last one takes the hooks along."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and not _under_way:
        while _handles:
            _handles.pop().remove()


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Traced by torch.compile, this is nothing: a step inside of a compiled function is not seen.
    if torch.compiler.is_compiling() or _is_nested(optimizer):
        return
    _under_way.add((id(optimizer), "before"))
    try:
        for listener in tuple(_listeners):
            listener.optimizer_steps(optimizer)
    finally:
        _under_way.discard((id(optimizer), "before"))


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or _is_nested(optimizer):
        return
    _under_way.add((id(optimizer), "after"))
    try:
        for listener in tuple(_listeners):
            listener.optimizer_stepped(optimizer)
    finally:
        _under_way.discard((id(optimizer), "after"))


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is ``super().step()`` within a step of the same optimizer: torch's hooks tell of both.

    By the stack, since a step that raised never tells of its end. Some microseconds.
    """
    frame, steps = sys._getframe(1), 0
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            steps += 1
    return steps > 1


def _wrapper_code() -> Any:
    """Return the code of the function that torch puts around every optimizer's step, the one that calls these hooks."""
    made: Any = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step)
    return made.__code__


_WRAPPER = _wrapper_code()
