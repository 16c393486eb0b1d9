"""Finds 16-bit tensors that persist from step to step (averages, schedules, counters) and that rounding leaves unchanged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.faults.measure.twins import reference, storage_key
from mpinspect.ranges.records import FrozenBuffer, GrowingSum, Record

aten = torch.ops.aten

#: Operators that replace all values of their first argument, that take its values, and that weigh them against new ones.
_REPLACING = frozenset({aten.zero_, aten.fill_, aten.copy_, aten.uniform_, aten.normal_})
_MOVING = frozenset({aten.stack, aten.cat, aten.clone, aten.index, aten.index_select})
_WEIGHING = frozenset({aten.mul_, aten.div_, aten.lerp_, aten.pow_})
#: Operators that bound a tensor.
_BOUNDING = frozenset({aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum})
_BOUNDING_IN_PLACE = frozenset({aten.clamp_, aten.clamp_min_, aten.clamp_max_})
#: Operators that compute a tensor's new values from its old ones, in place and otherwise. Sums have a judgement of their own.
CHANGING_IN_PLACE = frozenset(
    {
        *(aten.add_, aten.sub_, aten.mul_, aten.div_, aten.lerp_, aten.addcmul_, aten.addcdiv_, aten.pow_),
        *(aten.index_add_, aten.scatter_add_),
    }
)
CHANGING = frozenset({aten.mul, aten.div, aten.lerp, aten.addcmul, aten.addcdiv, aten.pow})
_CARRYING = _BOUNDING | CHANGING | {aten.add, aten.sub, aten.clone}
#: The least share of elements that an operator leaves unchanged, of those that it changes in FP32.
_UNCHANGED = 0.5
#: The largest number of elements of a sum that is taken for one of losses or counts.
_FEW = 64
#: The least part of a term by which a growing sum is rounded.
_ROUNDED = 0.25
#: The distance from its target, relative to itself, at which an average in 16 bits may stay.
_NEAR = 2.0**-4

_Describe = Callable[..., Any]


class _Frozen(NamedTuple):
    """A new tensor with the values of a kept one, which it may replace."""

    record: FrozenBuffer
    key: int
    kept: StorageWeakRef
    new: StorageWeakRef


class KeptSums:
    """Judges changes of 16-bit tensors that are older than the step: lost ones are never recovered.

    Args:
        others: the weights that optimizers step, whose lost updates have a fault of their own, and all gradients.
        buffers: names of the model's 16-bit buffers, by storage.
        weights: names of the model's other 16-bit weights, by storage, which the loop itself may change.
    """

    def __init__(self, others: Iterable[Any], buffers: dict[int, str], weights: dict[int, str]) -> None:
        self._names, self._weights = buffers | weights, weights
        #: Storages that this step has made or filled anew, and the others. Tensors of other classes may have no storage.
        self._other = {storage_key(each) for each in others if is_plain(each)}
        self._weighed: set[int] = set()
        #: Storages whose values this step has taken from older ones.
        self._moved: set[int] = set()
        #: Changes that left a tensor as it was, by line and storage.
        self._frozen: defaultdict[str, dict[int, FrozenBuffer]] = defaultdict(dict)
        #: The same, not in place: by the new tensor's storage.
        self._replacing: dict[int, _Frozen] = {}
        self._growing: list[tuple[StorageWeakRef, GrowingSum]] = []

    def ran(self, func: Any, args: tuple[Any, ...], results: Iterable[torch.Tensor]) -> None:
        """Remember the storages that an operator has made, filled anew, or weighed."""
        results = list(results)
        self._follow(func.overloadpacket, args, results)
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

    def _follow(self, operator: Any, args: tuple[Any, ...], results: list[torch.Tensor]) -> None:
        """Follow tensors that were left unchanged into a copy and out of a bound, at which they rightly stay."""
        keys = [storage_key(each) if isinstance(each, torch.Tensor) else 0 for each in args[:2]]
        if operator in _BOUNDING_IN_PLACE and _is_at_bound(args[0], args[1:]):
            self._replacing.pop(keys[0], None)
            for each in self._frozen.values():
                each.pop(keys[0], None)
        place = next((place for place, key in enumerate(keys) if key in self._replacing), None)
        if place is None:
            return
        found = self._replacing[keys[place]]
        if operator is aten.copy_ and keys[0] == found.key:
            self._frozen[found.record.names[1]][found.key] = found.record
        elif operator in _CARRYING and results and results[0].shape == args[place].shape:
            others = (*args[:place], *args[place + 1 :])
            is_bound = operator in _BOUNDING and _is_at_bound(results[0], others)
            if not is_bound and (operator not in CHANGING or _mostly(results[0] == args[place])):
                self._replacing[storage_key(results[0])] = found._replace(new=reference(results[0]))

    def keeps(self, tensor: Any) -> bool:
        """Return whether an operand is a tensor that is older than the step, and neither a weight nor a gradient."""
        return isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self._other

    def is_old(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is kept, or has the values of kept ones."""
        return self.keeps(tensor) or storage_key(tensor) in self._moved

    def changed(self, value: torch.Tensor, before: torch.Tensor, change: torch.Tensor, describe: _Describe) -> None:
        """Judge an operator that has changed a kept tensor to ``value`` in place. Waits for the device.

        Args:
            before, change: the old values and the exact change in FP32, of ``value``'s shape or broadcast to it.
            describe: makes a record of a class at this line, with figures.
        """
        key = storage_key(value)
        if record := self._unchanged(value, before, change, key, describe):
            known = self._frozen[record.names[1]].get(key)
            # Of several operators at a line, such as `mul_` and `add_`, the last one decides.
            times = known.times if known and known.names == record.names else 0
            self._frozen[record.names[1]][key] = replace(record, times=times + 1)
        elif key not in self._weighed:
            self.added(value, before, change, describe)

    def replaced(
        self, value: torch.Tensor, kept: torch.Tensor, local: Callable[[], torch.Tensor], describe: _Describe
    ) -> None:
        """Judge a new tensor that may replace the kept one that it is computed from. Waits for the device."""
        if kept.dtype != value.dtype or kept.shape != value.shape or not _mostly(value == kept):
            return
        before, key = kept.float(), storage_key(kept)
        if record := self._unchanged(value, before, local() - before, key, describe):
            self._replacing[storage_key(value)] = _Frozen(record, key, reference(kept), reference(value))

    def _unchanged(
        self, value: torch.Tensor, before: torch.Tensor, change: torch.Tensor, key: int, describe: _Describe
    ) -> FrozenBuffer | None:
        """Return a record if most elements equal their old values, of those that would change in FP32."""
        # Subnormal numbers are as good as zero.
        is_changed = (change != 0) & ((before == 0) | (before.abs() >= torch.finfo(value.dtype).tiny))
        if not bool(is_changed.any()):
            return None
        unchanged = float((value.float() == before)[is_changed.expand_as(value)].float().mean())
        if unchanged < _UNCHANGED:
            return None
        record: FrozenBuffer = describe(FrozenBuffer, unchanged=unchanged)
        return replace(record, names=(*record.names, self._names.get(key, "")), is_weight=key in self._weights)

    def added(self, value: torch.Tensor, kept: torch.Tensor, term: torch.Tensor, describe: _Describe) -> None:
        """Judge the addition of a term to a kept tensor of few elements, which ``value`` may replace. Waits for the device."""
        if value.numel() >= _FEW or not value.numel():
            return
        total, size = float(kept.abs().max()), float(term.abs().max())
        eps = torch.finfo(value.dtype).eps
        # Half a unit in the last place of a power of two is eps / 2 of it.
        if 0 < size < math.inf and total * eps / 2 >= _ROUNDED * size:
            unit = eps * 2.0 ** math.floor(math.log2(total))
            record = describe(GrowingSum, total=total, term=size, unit=unit, stops_at=2 * size / eps)
            named = replace(record, names=(*record.names, self._names.get(storage_key(value), "")))
            self._growing.append((reference(value), named))

    def records(self) -> list[Record]:
        """Return the tensors that their changes leave as they were, and the sums that will stop growing."""
        for each in self._replacing.values():
            # A result of the step alone is gone by its end, and a constant is still there.
            if each.kept.expired() and not each.new.expired():  # type: ignore[no-untyped-call]
                self._frozen[each.record.names[1]][each.key] = each.record
        # Several tensors are frozen at one line, and a buffer at each line that changes it.
        frozen = (list(each.values()) for each in self._frozen.values() if each)
        found: list[Record] = [replace(each[-1], times=sum(one.times for one in each)) for each in frozen]
        return found + [record for reference, record in self._growing if not reference.expired()]  # type: ignore[no-untyped-call]


def arrives(operator: Any, args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Return whether an interpolation is fast enough to stay, once its steps are rounded away, near its target only."""
    is_known = operator in (aten.lerp, aten.lerp_) and isinstance(args[2], (int, float))
    return is_known and torch.finfo(dtype).eps / 2 <= _NEAR * args[2]


def _mostly(condition: torch.Tensor) -> bool:
    return float(condition.float().mean()) >= _UNCHANGED


def _is_at_bound(value: torch.Tensor, bounds: Iterable[Any]) -> bool:
    """Return whether most elements equal one of the numbers or tensors that bound them, as the value's format rounds it."""
    return any(
        _mostly(value == torch.as_tensor(each, dtype=value.dtype, device=value.device))
        for each in bounds
        if each is not None
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)
