"""Finds tensors in 16 bits or FP8 that persist from step to step (averages, counters) and that rounding leaves unchanged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.backward_scale import factor_of
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.faults.measure.operands import SCALING, SUBTRACTIONS, Judged
from mpinspect.ranges.faults.measure.twins import distance
from mpinspect.ranges.records import AnyRecord, FrozenBuffer, GrowingSum, Record
from mpinspect.runtime.storages import StorageReference, storage_key

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
#: Operators that add new values to a tensor after its decay.
_ADDING = frozenset({aten.add, aten.add_, aten.sub, aten.sub_, aten.addcmul, aten.addcmul_, aten.clone})
_CARRYING = _BOUNDING | CHANGING | {aten.add, aten.sub, aten.clone}
#: The least share of elements that an operator leaves unchanged, of those that it changes in FP32.
_UNCHANGED = 0.5
#: The largest number of elements of a sum that is taken for one of losses or counts.
_FEW = 64
#: The least rounding error of an addition to a growing sum that is recorded, as a part of the term.
_ROUNDED = 0.25
#: An average in 16 bits may stop within this relative distance of its target.
_NEAR = 2.0**-4
#: The largest harmless loss, as a part of the average: Adam divides by its square root, which halves the error.
_HARMLESS = 0.25

#: Normalisations that update running statistics, which are arguments 3 and 4.
NORMALISING = frozenset(
    getattr(aten, name)
    for name in ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
)
#: The least distance of running statistics from those of a batch, in standard deviations or parts of the variance, its least
#: multiple of what chance explains, and the least share of statistics that stand still there.
_FAR, _BY_CHANCE, _STANDING = 0.1, 4.0, 0.25

_Describe = Callable[..., Any]


class _Net(NamedTuple):
    """The change of a kept tensor by several operators; the first one decays it.

    Args:
        kept, new: the tensor, and its last result, which may replace it.
        before: the values before the first operator.
        record: at the last operator; None before a second one.
        off, change: norms of the error and of the exact change.
    """

    kept: StorageReference
    new: StorageReference
    before: torch.Tensor
    record: FrozenBuffer | None = None
    off: float = 0.0
    change: float = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether most of the change is rounding errors; a tensor that stays as it is has an error of the change's size."""
        return self.off >= _UNCHANGED * self.change


class _Frozen(NamedTuple):
    """A new tensor with the values of a kept one, which it may replace."""

    record: FrozenBuffer
    kept: StorageReference
    new: StorageReference


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
        #: Storages of averages that decay so fast that the terms which rounding loses are a small part of them.
        self._followers: set[int] = set()
        #: Storages whose values this step has taken from older ones.
        self._moved: set[int] = set()
        #: Changes that left a tensor as it was, by line and storage.
        self._frozen: defaultdict[str, dict[int, FrozenBuffer]] = defaultdict(dict)
        #: The tensors in FP32 that were copied into tensors which stayed as they were, by line.
        self._sources: defaultdict[str, list[StorageReference]] = defaultdict(list)
        #: Changes whose result, a new tensor, equals the old one, by the new tensor's storage.
        self._replacing: dict[int, _Frozen] = {}
        self._growing: list[tuple[StorageReference, GrowingSum]] = []
        #: Storages that this step has changed, neither made nor filled anew.
        self._changed: set[int] = set()
        #: Sums whose rounding errors the script itself computes, and these errors.
        self._compensated: set[int] = set()
        #: The changes of decaying averages, by the storage of the last result.
        self._nets: dict[int, _Net] = {}

    def ran(self, func: Any, args: tuple[Any, ...], results: Iterable[torch.Tensor]) -> None:
        """Remember the storages that an operator has made, filled anew, or weighed."""
        results = list(results)
        self._follow(func.overloadpacket, args, results)
        self._follow_errors(func.overloadpacket, args, results)
        if not func._schema.is_mutable:
            made = set(map(storage_key, results))
            is_moved = func.overloadpacket in _MOVING and args and all(map(self.is_old, _tensors(args[0])))
            self._other |= made
            # A storage that was freed may have had the same key.
            self._moved -= made
            if is_moved:
                self._moved |= made
        elif func.overloadpacket in _REPLACING or (func.overloadpacket is aten.mul_ and factor_of("mul", args[1]) == 0):
            self._net_replaced(func.overloadpacket, args)
            self._other.add(storage_key(args[0]))
            self._moved.discard(storage_key(args[0]))
        elif func.overloadpacket in _WEIGHING:
            self._weighed.add(storage_key(args[0]))

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as made in this step, by code that is not observed."""
        self._other |= {storage_key(each) for each in tensors if is_plain(each)}

    def _follow(self, operator: Any, args: tuple[Any, ...], results: list[torch.Tensor]) -> None:
        """Follow unchanged tensors into copies, and drop those that a bound (a clamp, say) rightly stops."""
        keys = list(map(_key, args[:2]))
        if operator in _BOUNDING_IN_PLACE and _is_at_bound(args[0], args[1:]):
            self._replacing.pop(keys[0], None)
            for each in self._frozen.values():
                each.pop(keys[0], None)
        place = next((place for place, key in enumerate(keys) if key in self._replacing), None)
        if place is None:
            return
        found = self._replacing[keys[place]]
        if operator is aten.copy_ and keys[0] == found.kept.key:
            self._frozen[found.record.names[1]][found.kept.key] = found.record
        elif operator in _CARRYING and results and results[0].shape == args[place].shape:
            others = (*args[:place], *args[place + 1 :])
            is_bound = operator in _BOUNDING and _is_at_bound(results[0], others)
            if not is_bound and (operator not in CHANGING or _mostly(results[0] == args[place])):
                self._replacing[storage_key(results[0])] = found._replace(new=StorageReference(results[0]))

    def _follow_errors(self, operator: Any, args: tuple[Any, ...], results: list[torch.Tensor]) -> None:
        """Follow the error of a compensated sum (Kahan's): a difference of an old copy and the sum that another one keeps."""
        keys, made = set(map(_key, args[:2])), set(map(storage_key, results))
        sums = keys & self._changed
        if operator in SUBTRACTIONS and sums and keys & self._moved:
            self._compensated |= made | sums
        elif operator in CHANGING_IN_PLACE and keys & self._compensated:
            self._compensated |= made
        elif not made <= keys:
            self._compensated -= made

    def is_compensated(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a sum whose rounding errors the script computes, or has these errors."""
        return storage_key(tensor) in self._compensated

    def keeps(self, tensor: Any) -> bool:
        """Return whether an operand is a tensor that is older than the step, and neither a weight nor a gradient."""
        return isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self._other

    def is_of_model(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a buffer, or a weight that no optimizer steps."""
        return storage_key(tensor) in self._names

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
        self._changed.add(key)
        if key in self._followers:
            return
        if record := self._unchanged(value, before, change, key, describe):
            self._freeze(key, record)
        elif key not in self._weighed:
            self.added(value, before, change, describe)

    def _freeze(self, key: int, record: FrozenBuffer) -> None:
        known = self._frozen[record.names[1]].get(key)
        # If a line has several operators, such as `mul_` and `add_`, the last one decides.
        times = known.times if known and known.names == record.names else 0
        self._frozen[record.names[1]][key] = replace(record, times=times + 1)

    def cast_back(self, value: torch.Tensor, kept: torch.Tensor, change: torch.Tensor, describe: _Describe) -> None:
        """Judge a new tensor that may replace a kept one, from which it was computed in FP32. Waits for the device.

        Args:
            change: the exact change in FP32.
        """
        if record := self._unchanged(value, kept.float(), change, storage_key(kept), describe):
            self._replacing[storage_key(value)] = _Frozen(record, StorageReference(kept), StorageReference(value))

    def copied_back(self, source: torch.Tensor, kept: torch.Tensor, change: torch.Tensor, describe: _Describe) -> None:
        """Judge values in FP32 that are about to be copied into a kept tensor; ``change`` as of ``cast_back``."""
        if record := self._unchanged(source.to(kept.dtype), kept.float(), change, storage_key(kept), describe):
            self._freeze(storage_key(kept), record)
            self._sources[record.names[1]].append(StorageReference(source))

    def compensates(self, kept: torch.Tensor) -> None:
        """Remember that the script computes the rounding errors of a tensor's changes."""
        self._compensated.add(storage_key(kept))

    def replaced(self, judged: Judged, kept: torch.Tensor) -> None:
        """Judge a new tensor that may replace the kept one that it is computed from. Waits for the device."""
        value = judged.value
        if kept.dtype == value.dtype and kept.shape == value.shape and _mostly(value == kept):
            self.cast_back(value, kept, judged.local() - kept.float(), judged.describe)

    def normalised(self, args: tuple[Any, ...], results: Sequence[torch.Tensor], describe: _Describe) -> None:
        """Judge running statistics in 16 bits that a batch has updated: whether many stand still, far from those of the batch.

        Waits for the device.
        """
        # The last two arguments, and the last results, of all of them.
        momentum, epsilon = args[-2:]
        if args[5] is False or len(results) < 3 or args[0].numel() < 2 * args[0].shape[1]:
            return
        size = args[0].numel() / args[0].shape[1]
        mean, deviation = results[1].float(), results[2].float().reciprocal()
        variance = (deviation.square() - epsilon) * size / (size - 1)
        for running, of_batch, unit in ((args[3], mean, deviation), (args[4], variance, variance)):
            away = of_batch - running
            stuck = (running + momentum * away).to(running.dtype) == running
            share = float(stuck.float().mean())
            far = max(_FAR, _BY_CHANCE / math.sqrt(size))
            if share >= _STANDING and float((away / unit)[stuck].square().mean().sqrt()) >= far:
                record: FrozenBuffer = describe(FrozenBuffer, unchanged=share)
                key = storage_key(running)
                self._freeze(key, self._named(record, key))

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
        record: FrozenBuffer = describe(FrozenBuffer, unchanged=unchanged, is_weight=key in self._weights)
        return self._named(record, key)

    def _named(self, record: AnyRecord, key: int) -> AnyRecord:
        """Return a record with the name of the model's tensor that has this storage, or "", as the last of its names."""
        return replace(record, names=(*record.names, self._names.get(key, "")))

    def added(self, value: torch.Tensor, kept: torch.Tensor, term: torch.Tensor, describe: _Describe) -> None:
        """Judge the addition of a term to a kept tensor of few elements, which ``value`` may replace. Waits for the device."""
        if value.numel() >= _FEW or not value.numel():
            return
        total, size = float(kept.abs().max()), float(term.abs().max())
        eps = torch.finfo(value.dtype).eps
        # Half a unit in the last place of a power of two is eps / 2 of it.
        if 0 < size < math.inf and total * eps / 2 >= _ROUNDED * size:
            unit = eps * 2.0 ** math.floor(math.log2(total))
            # It stops at the first power of two above which such a term is half a unit in the last place, or less.
            stops_at = 2.0 ** math.ceil(math.log2(2 * size / eps))
            record = describe(GrowingSum, total=total, term=size, unit=unit, stops_at=stops_at)
            self._growing.append((StorageReference(value), self._named(record, storage_key(value))))

    def averaged(self, judged: Judged) -> None:
        """Judge the change of a decaying average by all operators so far. Waits for the device."""
        operator, args, value, twin, old = judged.operator, judged.args, judged.value, judged.twin, judged.pending.old
        net = next((self._nets[key] for each in args[:2] if (key := _key(each)) in self._nets), None)
        if net is not None and operator in _ADDING and net.before.shape == value.shape:
            unchanged, key = float((value == net.before).float().mean()), net.kept.key
            is_weight = key in self._weights
            record = self._named(judged.describe(FrozenBuffer, unchanged=unchanged, is_weight=is_weight), key)
            off, change = distance(value, twin), distance(net.before, twin)
            new = StorageReference(value)
            self._nets[storage_key(value)] = net._replace(new=new, record=record, off=off, change=change)
        elif operator in SCALING and (kept := next(filter(self._is_average, args[:2]), None)) is not None:
            other = args[1] if kept is args[0] else args[0]
            factor = factor_of(operator.__name__.rstrip("_"), other)
            if factor is None or not 0 < factor < 1:
                return
            if old is not None and follows(1 - factor, value.dtype, _HARMLESS):
                self._followers.add(storage_key(value))
            if not follows(1 - factor, value.dtype) and kept.shape == value.shape and kept.dtype == value.dtype:
                before = kept.detach().clone() if old is None else old
                self._nets[storage_key(value)] = _Net(StorageReference(kept), StorageReference(value), before)

    def _is_average(self, tensor: Any) -> bool:
        """Return whether a tensor is kept, and no weight that the loop itself trains."""
        return self.keeps(tensor) and not (tensor.requires_grad and storage_key(tensor) in self._weights)

    def _net_replaced(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Follow an average's new values into its own memory."""
        key = storage_key(args[0])
        net = self._nets.pop(_key(args[1]), None) if operator is aten.copy_ else None
        self._nets.pop(key, None)
        if net is not None and net.kept.key == key:
            self._nets[key] = net._replace(new=net.kept)

    def _averages(self) -> Iterator[FrozenBuffer]:
        """Yield a record for each line whose changes, of most elements, are mostly rounding errors."""
        by_line: defaultdict[str, list[_Net]] = defaultdict(list)
        for key, net in self._nets.items():
            is_kept = net.kept.key == key or (net.kept.expired() and not net.new.expired())
            if is_kept and net.record is not None and net.change:
                by_line[net.record.names[1]].append(net)
        for line, nets in by_line.items():
            of = sum(net.before.numel() for net in nets)
            lost = [net for net in nets if net.is_lost]
            if not self._frozen.get(line) and of >= _FEW and sum(net.before.numel() for net in lost) >= _UNCHANGED * of:
                rounded = math.hypot(*(net.off for net in lost)) / math.hypot(*(net.change for net in lost))
                record = lost[-1].record
                if record is not None:
                    yield replace(record, times=len(lost), rounded=rounded)

    def records(self) -> list[Record]:
        """Return the tensors that their changes leave as they were, and the sums that will stop growing."""
        for each in self._replacing.values():
            # By the step's end a temporary result has been freed; a constant still exists.
            if each.kept.expired() and not each.new.expired():
                self._frozen[each.record.names[1]][each.kept.key] = each.record
        for line, sources in self._sources.items():
            # Where FP32 copies live on, as masters do, nothing is lost.
            if not any(each.expired() for each in sources):
                self._frozen.pop(line, None)
        # Several tensors are frozen at one line, and a buffer at each line that changes it.
        left = ([one for key, one in each.items() if key not in self._compensated] for each in self._frozen.values())
        frozen = (each for each in left if each)
        found: list[Record] = [replace(each[-1], times=sum(one.times for one in each)) for each in frozen]
        found += self._averages()
        for alive, record in self._growing:
            if not alive.expired() and alive.key not in self._compensated:
                found.append(record)
        return found


def arrives(operator: Any, args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Return whether an interpolation is fast enough to be near its target when rounding stops it."""
    return operator in (aten.lerp, aten.lerp_) and isinstance(args[2], (int, float)) and follows(args[2], dtype)


def follows(rate: float, dtype: torch.dtype, near: float = _NEAR) -> bool:
    """Return whether an average that adds this part of its target in each step approaches it in spite of rounding."""
    return torch.finfo(dtype).eps / 2 <= near * rate


def _key(value: Any) -> int:
    """Return the key of a tensor's storage; 0 for other values."""
    return storage_key(value) if isinstance(value, torch.Tensor) else 0


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
