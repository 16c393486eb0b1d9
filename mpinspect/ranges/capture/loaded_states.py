"""Remembers the optimizers whose FP32 states were cast to 16 bits when they were loaded.

``Optimizer.load_state_dict`` casts each floating-point state to its parameter's dtype. A model may be attached after that, so
all optimizers of the process are remembered.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.optimizers import states_of
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.runtime.torch_calls import STATES_LOADED
from mpinspect.runtime.user_line import innermost_line

_NARROW = (torch.float16, torch.bfloat16)


class CastStates(NamedTuple):
    """The states of an optimizer that a call of ``load_state_dict`` has cast.

    Args:
        states: their names, "exp_avg".
        before, after: the first one's dtypes, by torch's names.
        line: the user's line of the call, "train.py:12".
    """

    states: tuple[str, ...]
    before: str
    after: str
    line: str


#: The optimizers whose states were loaded since ``was_loaded`` was last asked.
_fresh: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_cast: weakref.WeakKeyDictionary[torch.optim.Optimizer, CastStates] = weakref.WeakKeyDictionary()


def listen() -> None:
    """Remember the casts of all optimizers from now on; no effect if they already are."""
    STATES_LOADED.unlisten(_loaded)
    STATES_LOADED.listen(_loaded, after=True)


def unlisten() -> None:
    """Stop remembering."""
    STATES_LOADED.unlisten(_loaded)


def cast_states(optimizer: torch.optim.Optimizer) -> CastStates | None:
    """Return the states that an optimizer's last load has cast and that still are in 16 bits; None without any."""
    found = _cast.get(optimizer)
    first = next(iter(optimizer.state), None)
    if found is None or not isinstance(first, torch.Tensor):
        return None
    states = states_of(optimizer, first)
    # The loop may have restored them in FP32.
    is_narrow = any(getattr(states.get(name), "dtype", None) in _NARROW for name in found.states)
    return found if is_narrow else None


def cast_to_half(optimizer: torch.optim.Optimizer) -> str:
    """Return the line of an optimizer's last load if it has cast a state to FP16, whose dtype may have changed since; or ""."""
    found = _cast.get(optimizer)
    return found.line if found is not None and found.after == dtype_name(torch.float16) else ""


def was_loaded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's states were loaded since the last call."""
    is_fresh = optimizer in _fresh
    _fresh.discard(optimizer)
    return is_fresh


def _loaded(optimizer: Any, saved: Any, _: None) -> None:
    # A state dict may have any form, and the training must not stop for it.
    with contextlib.suppress(Exception):
        _fresh.add(optimizer)
        _cast.pop(optimizer, None)
        found = {name: dtypes for name, *dtypes in _casts(optimizer, saved)}
        if found:
            before, after = map(dtype_name, next(iter(found.values())))
            _cast[optimizer] = CastStates(tuple(found), before, after, innermost_line(sys._getframe(1)))


def _casts(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
    """Yield the name and both dtypes of each state in 16 bits that was saved in more."""
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(keys, parameters, strict=False):
        before, after = saved["state"].get(key, {}), states_of(optimizer, parameter)
        for name, state in after.items():
            old = before.get(name)
            if not isinstance(state, torch.Tensor) or state.dtype not in _NARROW or not isinstance(old, torch.Tensor):
                continue
            if old.is_floating_point() and old.dtype.itemsize > state.dtype.itemsize:
                yield name, old.dtype, state.dtype
