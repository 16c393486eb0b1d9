"""Records infinities and NaNs of a step that is computed twice: those of the precision, and those that FP32 has too."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpinspect.ranges.capture.graph import dtype_of, walk
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.operands import CASTS, Judged, has_numbers, is_decision, is_in_forward, numbers_of
from mpinspect.ranges.faults.measure.origins import Origins
from mpinspect.ranges.faults.measure.recomputation import Makers, relative_error
from mpinspect.ranges.faults.measure.twins import NARROW, OF_NARROW, Marks, is_finite
from mpinspect.ranges.records import BornInfinite, BrokenAlike, Record
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import has_storage
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: The logarithm of FP16's largest number.
_LARGEST_EXPONENT = math.log(65504)
#: The most nodes of a graph that are searched for an operator in 16 bits.
_MOST_NODES = 256
#: The most lines on which one operator is named as infinite.
_MOST_LINES = 5
#: Operators that read no values: a backward begins with one of its loss's shape.
_WITHOUT_VALUES = frozenset({aten.ones_like, aten.zeros_like, aten.empty_like, aten.full_like})
#: Operators that replace infinities.
_REPLACING = frozenset({aten.nan_to_num, aten.nan_to_num_})
#: Finite results of infinite operands are right up to this relative error, and up to this part of the largest element.
_HARMLESS, _NEGLIGIBLE = 0.05, 2.0**-11


@dataclass
class _Fate:
    """What became of a tensor that infinities have reached.

    Args:
        records: those of the operators that made the infinities.
        is_of_graph: whether a gradient depends on the tensor.
        is_taken: whether an operator has taken it.
    """

    records: frozenset[BornInfinite]
    is_of_graph: bool
    is_taken: bool = False


class Broken:
    """Judges results that are not finite.

    Args:
        origins: the operators that made large or small values, which lead to infinities.
        makers: the operators that have got autograd's nodes.
        is_inference: whether every result counts, in place of those on which a gradient depends.
    """

    def __init__(self, origins: Origins, makers: Makers, is_inference: bool = False) -> None:
        self._origins, self._makers, self._is_inference = origins, makers, is_inference
        self.born: list[BornInfinite] = []
        #: The results of a forward's operators of that kind, and the tensors computed from them.
        self._fates: Marks[_Fate] = Marks()
        self._all_fates: list[_Fate] = []
        #: The operators whose infinities have changed a result of the graph, or a tensor in place.
        self._harmful: set[BornInfinite] = set()
        #: Those whose infinities have made a backward infinite or NaN that is finite in FP32.
        self._fatal: set[BornInfinite] = set()
        self._alike: list[BrokenAlike] = []
        #: Whether gradients of other ranks have been added, so that infinities may be theirs.
        self.is_exchanged = False
        #: The largest argument of the first exponential in FP32 that FP16 can't hold, and its line.
        self._exponent: tuple[float, str] | None = None

    def exponential(self, argument: torch.Tensor) -> None:
        """Remember the argument of an exponential in FP32 whose result is infinite in FP16. Waits for the device."""
        if self._exponent is None and has_numbers(argument) and argument.dtype is torch.float32 and argument.numel():
            largest = float(argument.detach().max())
            if _LARGEST_EXPONENT < largest < math.inf:
                self._exponent = largest, innermost_line(sys._getframe())

    def ran(self, operator: Any, operands: Iterable[Any], results: Iterable[Any], is_of_graph: bool) -> None:
        """Follow infinities from an operator's tensors to its results.

        Args:
            is_of_graph: whether a gradient depends on the results.
        """
        if not self._all_fates or operator in _WITHOUT_VALUES:
            return
        fates = [fate for each in filter(has_storage, operands) if (fate := self._fates.of(each))]
        records = frozenset().union(*(fate.records for fate in fates))
        for fate in fates:
            fate.is_taken = True
        if operator is aten.copy_ or (self._is_inference and operator is aten._local_scalar_dense):
            self._harmful |= records
        for each in filter(has_storage, results) if records else ():
            self._follow(each, records, is_of_graph and (self._is_inference or each.is_floating_point()))

    def _follow(self, result: torch.Tensor, records: frozenset[BornInfinite], is_of_graph: bool) -> None:
        fate = _Fate(records, is_of_graph)
        self._all_fates.append(fate)
        self._fates.put(result, fate)

    def is_right(self, result: torch.Tensor) -> None:
        """Handle a result that is right: infinities before it did no harm."""
        if self._all_fates and (fate := self._fates.of(result)):
            fate.is_taken = True
            self._fates.put(result, None)

    def is_finite(
        self, operator: Any, result: torch.Tensor, twin: torch.Tensor, operands: Iterable[torch.Tensor]
    ) -> None:
        """Handle a finite result, which may be right nevertheless, as a tanh's is."""
        fate = self._fates.of(result) if self._all_fates else None
        if fate is None:
            return
        # Other elements are off by ordinary rounding.
        broken = [~each.isfinite() for each in operands if each.shape == result.shape and not is_finite(each)]
        if broken:
            where = torch.stack(broken).any(0)
            exact = twin.abs()
            bound = _HARMLESS * exact + _NEGLIGIBLE * exact.max()
            is_right = bool(((result.float() - twin).abs() <= bound)[where].all())
        else:
            is_right = relative_error(result, twin) <= _HARMLESS
        if is_right:
            self.is_right(result)
        elif operator not in _REPLACING and (fate.is_of_graph or str(operator).endswith("_")):
            # A clamp may follow a replacement. Outside of the graph, gradients and weights are changed in place.
            self._harmful |= fate.records

    def judge(self, judged: Judged) -> None:
        """Record infinities and NaNs: which are of the precision, and which the exact computation has too."""
        pending, value, twin, _, describe = judged
        local = judged.local()
        broken, of = ~value.float().isfinite(), float(value.numel())
        born, of_precision = broken & local.isfinite(), broken & twin.isfinite()
        if not is_in_forward() and bool(of_precision.any()):
            reached = filter(None, map(self._fates.of, numbers_of(pending.given[0])))
            fatal = frozenset[BornInfinite]().union(*(fate.records for fate in reached))
            self._harmful |= fatal
            self._fatal |= fatal
        if bool(born.any()) and value.dtype in OF_NARROW.narrow:
            self._add(judged, born, float(local[born].abs().max()))
        elif self.born:
            return
        elif bool(of_precision.any()):
            # What FP32 has too may be left out of its result alone, by the mask of a ReLU for instance.
            if not self._alike or all(map(is_finite, numbers_of(pending.given[0]))):
                self._add(judged, of_precision, 0.0)
        elif not self.is_exchanged and bool((broken & (value != -torch.inf)).any()):
            # Masks and logarithms of zero give -inf, which softmax and sums of exponentials take. An operator that overwrote its
            # input can't show it.
            is_seen = not pending.func._schema.is_mutable
            from_finite = is_seen and all(map(is_finite, numbers_of(pending.given[0])))
            figures = {"elements": float(_breaking(value).sum()), "of": of, "from_finite": from_finite}
            if is_seen and not from_finite:
                figures |= _broken_operand(pending.given[0])
            self._alike.append(describe(BrokenAlike, **figures))

    def _add(self, judged: Judged, where: torch.Tensor, largest: float) -> None:
        """Record an infinity or NaN of the precision, with the operators before it that lead to it."""
        pending, value = judged.pending, judged.value
        figures = {"elements": float(where.sum()), "of": float(value.numel()), "largest": largest}
        figures["is_negative"] = float(bool((value[where] == -torch.inf).all()))
        line, operands = "", numbers_of(pending.given[0])
        names: tuple[str, ...] = ()
        if self._exponent is not None and largest and pending.func.overloadpacket in CASTS:
            figures["exponent"], line = self._exponent
        elif is_in_forward() and not largest:
            given = [each for each in leaves(pending.given[0]) if has_numbers(each) or is_decision(each)]
            names = self._origins.of_zeros(operands, where) or self._origins.of(given)
            if not names and value.dtype not in NARROW:
                names, figures["is_last"] = self._last_narrow(given), 1.0
        elif is_in_forward() and (near := self._origins.of_overflow(operands, largest)):
            names, figures["near"] = near.names, near.largest
        record: BornInfinite = self._makers.placed(judged.describe(BornInfinite, line, *names, **figures))
        self.born.append(record)
        if is_in_forward():
            before = self._fates.of(value) or _Fate(frozenset(), False)
            before.is_taken = True
            records = frozenset([record]) | before.records
            self._follow(value, records, self._is_inference or pending.node is not None)

    def _last_narrow(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the operator, line, module and dtype of the last operator in 16 bits before some tensors; () if unknown."""
        for node in walk((each.grad_fn for each in tensors), _MOST_NODES):
            dtype, maker = dtype_of(node), self._makers.of(node)
            if dtype in NARROW and maker is not None:
                return *maker, "", dtype_name(dtype)
        return ()

    def records(self) -> list[Record]:
        """Return the first operator that broke, and the same operator where it broke on further lines."""
        # Broken weights break all that follows; an operator with finite inputs is a cause of its own.
        self._alike.sort(key=lambda each: not each.from_finite)
        followed = {each for fate in self._all_fates for each in fate.records}
        ended_in = {each for fate in self._all_fates if fate.is_of_graph and not fate.is_taken for each in fate.records}
        unused = followed - ended_in - self._harmful
        # A mask breaks no backward.
        self.born = [replace(each, is_negative=0.0) if each in self._fatal else each for each in self.born]
        self.born = [replace(each, is_unused=1.0) if each in unused else each for each in self.born]
        self.born.sort(key=lambda each: each.is_unused)
        return [
            *(each for found in (self.born, self._alike) for each in found[:1]),
            *(each for found in (self.born, self._alike) for each in _further(found)),
        ]


def _breaking(value: torch.Tensor) -> torch.Tensor:
    """Return where a tensor is +inf or NaN."""
    return value.isnan() | (value == torch.inf)


def _broken_operand(arguments: Sequence[Any]) -> dict[str, float]:
    """Return the index of the only argument that is not finite, and its number of infinities and NaNs; {} without just one."""
    given = {index: float(_breaking(each).sum()) for index, each in enumerate(arguments) if has_numbers(each)}
    broken = {index: count for index, count in given.items() if count}
    return {"operand": next(iter(broken)), "given": next(iter(broken.values()))} if len(broken) == 1 else {}


def _further(found: Sequence[Record]) -> Iterator[Record]:
    """Yield records of further lines on which the first record's operator breaks in a forward, with finite inputs."""
    seen = [each.names[1] for each in found[:1]]
    for each in found[1:]:
        is_cause = getattr(each, "largest", 0.0) or getattr(each, "from_finite", False)
        is_alike = each.names[0] == found[0].names[0] and found[0].names[2] == each.names[2] == "forward"
        if is_cause and is_alike and each.names[1] not in seen and len(seen) < _MOST_LINES:
            seen.append(each.names[1])
            yield each
