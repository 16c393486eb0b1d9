"""Finds 16-bit sums that persist from step to step (moving averages, running losses, counters) and lose their terms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.faults.measure.twins import storage_key
from mpinspect.ranges.records import FrozenBuffer, GrowingSum, Record

aten = torch.ops.aten

#: Operators that replace all values of their first argument, that take its values, and that weigh them against new ones.
_REPLACING = frozenset({aten.zero_, aten.fill_, aten.copy_, aten.uniform_, aten.normal_})
_MOVING = frozenset({aten.stack, aten.cat, aten.clone, aten.index, aten.index_select})
_WEIGHING = frozenset({aten.mul_, aten.div_, aten.lerp_})
#: The least share of elements that an addition leaves unchanged, of those that have a term other than zero.
_UNCHANGED = 0.5
#: The largest number of elements of a sum that is taken for one of losses or counts.
_FEW = 64
#: The least part of a term by which a growing sum is rounded.
_ROUNDED = 0.25

_Describe = Callable[..., Any]


class KeptSums:
    """Judges additions to 16-bit tensors that are older than the step: their lost terms are never recovered.

    Args:
        parameters: the model's parameters; updates that they lose have a fault of their own.
        buffers: names of the model's 16-bit buffers, by storage.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], buffers: dict[int, str]) -> None:
        self._buffers = buffers
        #: Storages that this step has made or filled anew, and those of weights and gradients.
        self._other: set[int] = set()
        for parameter in parameters:
            # Tensors of other classes may have no storage.
            self._other.update(storage_key(each) for each in (parameter, parameter.grad) if is_plain(each))
        self._weighed: set[int] = set()
        #: Storages whose values this step has taken from older ones.
        self._moved: set[int] = set()
        #: Additions that left a sum unchanged, by line.
        self._frozen: defaultdict[str, list[FrozenBuffer]] = defaultdict(list)
        self._growing: list[tuple[StorageWeakRef, GrowingSum]] = []

    def ran(self, func: Any, args: tuple[Any, ...], results: Iterable[torch.Tensor]) -> None:
        """Remember the storages that an operator has made, filled anew, or weighed."""
        if not func._schema.is_mutable:
            made = set(map(storage_key, results))
            is_moved = func.overloadpacket in _MOVING and args and all(map(self.is_old, _tensors(args[0])))
            self._other |= made
            # A storage that was freed may have had the same key.
            self._moved -= made
            if is_moved:
                self._moved |= made
        elif func.overloadpacket in _REPLACING:
            self._other.add(storage_key(args[0]))
            self._moved.discard(storage_key(args[0]))
        elif func.overloadpacket in _WEIGHING:
            self._weighed.add(storage_key(args[0]))

    def keeps(self, tensor: Any) -> bool:
        """Return whether an operand is a tensor that is older than the step, and neither a weight nor a gradient."""
        return isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self._other

    def is_old(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is kept, or has the values of kept ones."""
        return self.keeps(tensor) or storage_key(tensor) in self._moved

    def added_in_place(
        self, value: torch.Tensor, before: torch.Tensor, added: torch.Tensor, describe: _Describe
    ) -> None:
        """Judge an addition that has changed a kept tensor to ``value``. Waits for the device.

        Args:
            before, added: the two terms in FP32, of ``value``'s shape or broadcast to it.
            describe: makes a record of a class at this line, with figures.
        """
        key = storage_key(value)
        is_added = (added != 0).expand_as(before)
        unchanged = float((value.float() == before)[is_added].float().mean()) if bool(is_added.any()) else 0.0
        if unchanged >= _UNCHANGED:
            record = describe(FrozenBuffer, unchanged=unchanged)
            named = replace(record, names=(*record.names, self._buffers.get(key, "")))
            self._frozen[record.names[1]].append(named)
        elif key not in self._weighed:
            self.added(value, before, added, describe)

    def added(self, value: torch.Tensor, kept: torch.Tensor, term: torch.Tensor, describe: _Describe) -> None:
        """Judge an addition of a term to a kept tensor of few elements, which ``value`` may replace. Waits for the device."""
        if value.numel() >= _FEW or not value.numel():
            return
        total, size = float(kept.abs().max()), float(term.abs().max())
        eps = torch.finfo(value.dtype).eps
        # Half a unit in the last place of a power of two is eps / 2 of it.
        if 0 < size < math.inf and total * eps / 2 >= _ROUNDED * size:
            unit = eps * 2.0 ** math.floor(math.log2(total))
            record = describe(GrowingSum, total=total, term=size, unit=unit, stops_at=2 * size / eps)
            named = replace(record, names=(*record.names, self._buffers.get(storage_key(value), "")))
            reference = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
            self._growing.append((reference, named))

    def records(self) -> list[Record]:
        """Return the sums that additions leave unchanged, and those that will stop growing."""
        # A buffer that several lines, or several modules at one line, add to is frozen at each.
        found: list[Record] = [replace(additions[-1], times=len(additions)) for additions in self._frozen.values()]
        # A sum of the step alone is gone by its end.
        return found + [record for reference, record in self._growing if not reference.expired()]  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)
