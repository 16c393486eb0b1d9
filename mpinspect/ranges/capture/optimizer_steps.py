"""Notifies listeners of new optimizers and of all optimizers' steps, through one pair of torch's global optimizer hooks.

torch has no hook for a new optimizer, so ``Optimizer.__init__`` is wrapped as long as there are listeners
(``torch_calls.py``). So is ``load_state_dict`` (``loaded_states.py``).

torch iterates over its table of hooks while running them, so adding or removing a hook during another thread's step
would make that step raise an error. Ours are added with the first listener and removed with the last, unless a step is
in progress in some thread at that moment: then they stay, without effect, until the last listener is next removed.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mpinspect.ranges.capture import loaded_states
from mpinspect.runtime.torch_calls import OPTIMIZER_MADE


class StepListener(Protocol):
    """The interface of listeners. Methods must not raise."""

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``Optimizer.__init__`` has run."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``optimizer.step()`` is about to run."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``optimizer.step()`` has run."""


#: The code of torch's wrapper around every optimizer's ``step``, which calls these hooks.
_WRAPPER = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step).__code__
_listeners: list[StepListener] = []
_handles: list[RemovableHandle] = []
#: The hooks that are running: their optimizer's id and the method that they call.
_under_way: set[tuple[int, str]] = set()


def listen(listener: StepListener) -> None:
    """Notify ``listener`` of every optimizer's steps from now on."""
    _listeners.append(listener)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))
    loaded_states.listen()
    if len(_listeners) == 1:
        OPTIMIZER_MADE.listen(_made, after=True)


def unlisten(listener: StepListener) -> None:
    """Stop notifying ``listener``; remove the hooks if it was the last listener and no step is in progress."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and not _under_way:
        while _handles:
            _handles.pop().remove()
    if not _listeners:
        loaded_states.unlisten()
        OPTIMIZER_MADE.unlisten(_made)


def _made(optimizer: torch.optim.Optimizer, _: None) -> None:
    for listener in tuple(_listeners):
        listener.optimizer_made(optimizer)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _notify(optimizer, "optimizer_steps")


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _notify(optimizer, "optimizer_stepped")


def _notify(optimizer: torch.optim.Optimizer, method: str) -> None:
    # Return at once while torch.compile traces: steps inside a compiled function are not observed.
    if torch.compiler.is_compiling() or _is_nested(optimizer):
        return
    _under_way.add((id(optimizer), method))
    try:
        for listener in tuple(_listeners):
            getattr(listener, method)(optimizer)
    finally:
        _under_way.discard((id(optimizer), method))


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is ``super().step()`` inside a step of the same optimizer: torch calls the hooks for both.

    Inspects the call stack, because the post hook is not called for a step that raised. Takes a few microseconds.
    """
    frame, steps = sys._getframe(1), 0
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            steps += 1
    return steps > 1
