"""Apply CUDA's autocast to tensors on other devices, so that operators run in the dtypes that they would have on a GPU.

Autocast acts in the dispatcher by each tensor's device, so CUDA's kernels skip meta tensors. This module's kernels have the
same lists ("Autocast Op Reference" in torch's documentation, ``ATen/autocast_mode.h``) and act only while CUDA's own autocast
flag is set, so a model's nested ``torch.autocast("cuda", enabled=False)`` works as it does on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.amp import autocast_mode

from mpinspect.runtime.emulation.autocast_lists import FLOAT32, FLOAT32_BY_DEFAULT, WIDEST
from mpinspect.runtime.emulation.autocast_policies import (
    CASTING,
    ELIGIBLE,
    Policy,
    cast_all,
    float32,
    float32_by_default,
    where_enabled,
    widest,
)
from mpinspect.shapes.record.fused import FUSED

#: Operators that are not cast: CUDA's autocast raises an error for this one, and a recording must not.
_NOT_CAST = {"binary_cross_entropy"}

#: torch's own functions, saved before other devices' contexts are made to count as CUDA's.
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled

#: Functions that libraries call to query a device's autocast; checkpointing does so to repeat it in the recomputation.
_ASKED = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
_AVAILABLE = "is_autocast_available"


@contextmanager
def as_on_cuda(also: str) -> Iterator[None]:
    """Cast and fuse this thread's operators within the block as on a GPU.

    Args:
        also: type of the device that the model runs on ("meta"); autocast contexts for it count as CUDA's.
    """
    with _contexts_for(also), CASTING.running(_policies()):
        yield


@contextmanager
def autocast_around(dtype: torch.dtype | None, *others: str) -> Iterator[None]:
    """Set CUDA's autocast within the block as ``torch.autocast("cuda", dtype)`` does, on any machine.

    Args:
        dtype: float16 or bfloat16; None switches autocast off.
        others: types of other devices whose autocast is switched off within the block.
    """
    before = {device: _is_enabled(device) for device in ("cuda", *others)}
    before_dtype, before_cache = torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    for device in before:
        _set_enabled(device, False)
    if dtype is not None:
        _set_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    _region.casts = {}
    try:
        yield
    finally:
        _region.casts = None
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        for device, enabled in before.items():
            _set_enabled(device, enabled)
        torch.set_autocast_dtype("cuda", before_dtype)
        torch.set_autocast_cache_enabled(before_cache)


# -- the policies --------------------------------------------------------------------------------------------------------


class _Region(threading.local):
    """A thread's autocast state.

    Args:
        casts: the casts of weights by the weight's id, made once per region as in autocast; None outside a region.
        lowering: number of operators now running with their arguments cast to 16 bits.
    """

    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    lowering: int = 0


_region = _Region()


def lowering() -> bool:
    """Return whether a running operator was cast to 16 bits; autocast's own flag is always off below autograd."""
    return _region.lowering > 0


def _lower(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = torch.get_autocast_dtype("cuda")
    cast, named = (
        list(cast_all(args, dtype, _cast_one)),
        {name: _cast_one(value, dtype) for name, value in kwargs.items()},
    )
    _region.lowering += 1
    try:
        return operation(*cast, **named)
    finally:
        _region.lowering -= 1


def _cast_one(value: Any, dtype: torch.dtype) -> Any:
    if not _is_eligible(value) or value.dtype == dtype:
        return value
    casts = _region.casts
    if casts is None or not _is_weight(value) or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    known = casts.get(id(value))
    if known is None or known[1].dtype != dtype:
        known = casts[id(value)] = (value, value.to(dtype))
    return known[1]


def _is_weight(value: torch.Tensor) -> bool:
    return value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in ELIGIBLE


@cache
def _policies() -> dict[str, Policy]:
    """Return the policy of each operator that this torch version autocasts on CUDA; 16 bits for operators on no other list."""
    listed: dict[str, Policy] = {}
    for names, policy in (
        (FLOAT32, float32(_cast_one)),
        (FLOAT32_BY_DEFAULT, float32_by_default(_is_eligible)),
        (WIDEST, widest(_cast_one, _is_eligible, "cuda")),
    ):
        listed.update(dict.fromkeys(names.split(), policy))
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    cast = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} - _NOT_CAST
    casting = {name: where_enabled("cuda", listed.get(name, _lower)) for name in cast}
    return casting | {name: _fusing(fused) for name, fused in FUSED.items()}


def _fusing(fused: Callable[..., Any]) -> Policy:
    """Return the policy of an operator that a GPU computes as a whole (with cuDNN's casts) and other devices decompose."""

    def run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = partial(fused, operation)
        return _lower(whole, args, kwargs) if torch.is_autocast_enabled("cuda") else whole(*args, **kwargs)

    return run


# -- the model's own contexts --------------------------------------------------------------------------------------------


@contextmanager
def _contexts_for(also: str) -> Iterator[None]:
    """Make ``torch.autocast`` work without a GPU and without a warning; contexts for ``also`` count as CUDA's."""
    original = autocast_mode.autocast.__init__

    def make(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type not in ("cuda", also):
            original(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
            return
        original(self, "cuda", dtype=dtype, enabled=False, cache_enabled=cache_enabled)
        self._enabled = bool(enabled)

    with ExitStack() as stack:
        stack.callback(setattr, autocast_mode.autocast, "__init__", original)
        autocast_mode.autocast.__init__ = make  # type: ignore[method-assign]
        functions = [(torch, name) for name in _ASKED] + [(torch.amp, _AVAILABLE), (autocast_mode, _AVAILABLE)]
        for place, name in functions:
            function = getattr(place, name)
            stack.callback(setattr, place, name, function)
            setattr(place, name, _for_device(function, also))
        yield


def _for_device(function: Callable[..., Any], also: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] == also:
            args = ("cuda", *args[1:])
        elif kwargs.get("device_type") == also:
            kwargs["device_type"] = "cuda"
        return function(*args, **kwargs)

    return call
