"""Finds narrow tensors that persist from step to step, whose change in FP32 is lost where it is cast into their format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.backward_scale import factor_of
from mpinspect.ranges.faults.measure.kept_sums import KeptSums, follows
from mpinspect.ranges.faults.measure.operands import SCALING, SUBTRACTIONS
from mpinspect.ranges.faults.measure.twins import OF_NARROW, Marks
from mpinspect.runtime.storages import has_storage, storage_key

aten = torch.ops.aten

_WIDE = frozenset({torch.float32, torch.float64})
#: Operators that compute an element from the same elements of their arguments.
_ELEMENTWISE = frozenset(
    {
        *SCALING,
        *SUBTRACTIONS,
        *(aten.add, aten.add_, aten.lerp, aten.lerp_, aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_),
        *(aten.clamp, aten.clamp_, aten.clone, aten._to_copy, aten.copy_),
    }
)
#: Smaller relative changes are FP32's own rounding, as of a division by a scale after a multiplication by it.
_ROUNDING = 2.0**-20

_Describe = Callable[..., Any]


class _Read(NamedTuple):
    """The values of a kept tensor in a wide dtype, or what was computed from them.

    Args:
        kept: the tensor.
        rate: the part of its target that a moving average adds to it; None if it is not known to be one.
    """

    kept: torch.Tensor
    rate: float | None = None


class ReadBack:
    """Follows narrow tensors that are read into FP32, changed there, and cast back.

    Args:
        kept: knows which tensors are older than the step, and judges their changes.
        of_model: whether only the model's own tensors count, since a forward's inputs are older than its step, too.
    """

    def __init__(self, kept: KeptSums, of_model: bool = False) -> None:
        self._kept, self._of_model = kept, of_model
        #: Nothing is followed in an optimizer's step, whose states have faults of their own.
        self.is_on = True
        self._of: Marks[_Read] = Marks()

    def __bool__(self) -> bool:
        """Whether values are followed."""
        return bool(self._of)

    def follows(self, operator: Any, args: Iterable[Any]) -> bool:
        """Return whether an operator computes with values that are followed."""
        return bool(self) and operator in _ELEMENTWISE and any(self._of.of(each) for each in filter(has_storage, args))

    def called(self, operator: Any, args: tuple[Any, ...], describe: _Describe) -> None:
        """Judge a copy into the tensor itself, which is about to run. Waits for the device.

        Args:
            describe: makes a record of a class at this line, with figures.
        """
        for each in filter(has_storage, args):
            if not each.is_floating_point():
                # Stochastic rounding adds random bits.
                self._of.put(each, None)
        if operator is aten.copy_ and has_storage(args[1]) and (read := self._of.of(args[1])):
            target, source = args[0], args[1].detach()
            if storage_key(target) == storage_key(read.kept) and target.shape == source.shape:
                self._of.put(target, read)
                if self._is_lost(read):
                    self._kept.copied_back(source, target.detach(), _change(source, target), describe)

    def ran(self, operator: Any, args: tuple[Any, ...], results: list[torch.Tensor], describe: _Describe) -> None:
        """Follow values through an operator, and judge a cast that may replace the tensor. Waits for the device."""
        if not self.is_on or operator not in _ELEMENTWISE or not results:
            return
        result = results[0]
        is_wide = result.dtype in _WIDE
        if not is_wide and operator is not aten._to_copy:
            return
        args = args[operator is aten.copy_ :]
        given = [
            read for each in args if has_storage(each) and each.shape == result.shape and (read := self._read(each))
        ]
        if not given:
            if has_storage(result) and self._of.of(result):
                self._of.put(result, None)
            return
        read = given[0]
        if operator in SUBTRACTIONS and len(given) > 1 and storage_key(given[1].kept) == storage_key(read.kept):
            # The script computes the rounding error, and adds it later.
            self._kept.compensates(read.kept)
        if operator in SCALING:
            factor = factor_of(operator.__name__.rstrip("_"), args[1])
            read = read._replace(rate=1 - factor) if factor is not None and 0 < factor < 1 else read
        elif operator in (aten.lerp, aten.lerp_) and isinstance(args[2], float):
            read = read._replace(rate=args[2])
        if (
            operator is aten._to_copy
            and result.dtype is read.kept.dtype
            and args[0].dtype in _WIDE
            and self._is_lost(read)
        ):
            self._kept.cast_back(result, read.kept, _change(args[0], read.kept), describe)
        if is_wide or result.dtype is read.kept.dtype:
            self._of.put(result, read)

    def _read(self, tensor: torch.Tensor) -> _Read | None:
        """Return what a tensor was computed from: itself if it is narrow and older than the step."""
        if read := self._of.of(tensor):
            return read
        keeps = self._kept.is_of_model if self._of_model else self._kept.keeps
        is_kept = tensor.dtype in OF_NARROW.narrow and not tensor.is_meta and keeps(tensor)
        return _Read(tensor.detach()) if is_kept else None

    def _is_lost(self, read: _Read) -> bool:
        """Return whether rounding may stop a tensor: an average that follows its target fast arrives near it."""
        return read.rate is None or not follows(read.rate, read.kept.dtype)

    def clear(self) -> None:
        """Follow nothing any more, and release the tensors."""
        self._of = Marks()


def _change(wide: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the change of a tensor in FP32, without FP32's own rounding."""
    before = kept.detach().float()
    change = wide.detach().float() - before
    return change.masked_fill_(change.abs() <= _ROUNDING * before.abs(), 0.0)
