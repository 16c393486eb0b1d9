"""Computes a script's 16-bit constants twice: values that it makes before its first training step, such as tables.

An infinity that only the 16-bit computation has is recorded. The exact values of the models' cast buffers are kept for the steps
that are computed twice.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mpinspect.runtime.distributed import has_process_group

if TYPE_CHECKING:
    from mpinspect.ranges.faults.measure.second import SecondComputation
    from mpinspect.ranges.records import Record

_NARROW = (torch.float16, torch.bfloat16)
#: Operators after which the rest is left out: a script may prepare its data one number at a time.
_MOST_OPERATORS = 100_000


class SetUp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator unchanged, and has those with 16-bit values computed a second time.

    Args:
        note: called with a sentence if that fails; nothing more is computed then.
    """

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._process, self._thread = note, os.getpid(), threading.get_ident()
        self._second: SecondComputation | None = None
        self._left = _MOST_OPERATORS
        self._is_on = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled."""
        return True

    def begin(self) -> None:
        """Enter the mode on this thread, unless another one is active."""
        if not torch._C._len_torch_dispatch_stack():
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True

    def end(self, buffers: Iterable[torch.Tensor]) -> tuple[list[Record], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Exit the mode; return its infinities, and the exact values of those buffers that differ from them."""
        second, self._second, self._left = self._second, None, 0
        self.leave()
        if second is None or has_process_group():
            return [], []
        from mpinspect.ranges.records import BornInfinite

        pairs = [(each, second.twin(each)) for each in buffers if type(each) is torch.Tensor and each.dtype in _NARROW]
        exact = [(each, twin.clone()) for each, twin in pairs if twin is not None]
        born = [each for each in second.records() if isinstance(each, BornInfinite)]
        return [replace(each, in_set_up=True) for each in born], exact

    def leave(self) -> None:
        """Exit the mode; if a mode of the script is above it on the stack, it stays and passes everything on."""
        self._left = 0
        if self._is_on and threading.get_ident() == self._thread and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._left <= 0 or getattr(func, "_schema", None) is None or os.getpid() != self._process:
            return func(*args, **kwargs)
        self._left -= 1
        second = self._computing(args, kwargs)
        pending = second and self._attempt(second.before, func, args, kwargs)
        result = func(*args, **kwargs)
        if second is not None and pending:
            self._attempt(second.after, pending, result, sys._getframe(1))
        return result

    def _computing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SecondComputation | None:
        """Return the second computation, which the first 16-bit operator makes."""
        values = (*args, *kwargs.values())
        if self._second is None and any(getattr(each, "dtype", each) in _NARROW for each in values if _has_dtype(each)):
            from mpinspect.ranges.faults.measure.constants import Constants

            self._second = Constants(lambda: "", ())
        return self._second

    def _attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self._second, self._left = None, 0
            self._note(f"mpinspect failed in computing the script's constants a second time ({error!r})")
            return None


def _has_dtype(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.dtype))
