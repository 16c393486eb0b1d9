"""Traces a forward's errors, and its numbers near the end of FP16, to the operators that made them.

A tensor's error has an origin: the operator whose own rounding made most of it. An operator that inherits more than it makes
passes on the origin of its operands. So a difference, a logarithm or a root that shows an error leads to the line that made it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.faults.measure.operands import Judged, numbers_of
from mpinspect.ranges.faults.measure.twins import Marks

aten = torch.ops.aten

#: Operators that pass on the absolute errors of their operands; others pass on relative errors.
_ADDING = frozenset({aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub, aten.cat, aten.stack})
#: The largest error of rounding once: relative, and in FP16 also that of a subnormal number.
ROUNDING_OF_NARROW = {
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
    torch.float8_e5m2: (2.0**-3, 2.0**-17),
}
ROUNDING_OF_FP32 = {torch.float32: (2.0**-24, 0.0)}
_TINY = torch.finfo(torch.float32).tiny
#: Number of evenly spaced elements from which a tensor's error is estimated.
_SAMPLE = 1 << 14
#: Rounding explains a result's error up to this multiple of the operands' error and one rounding together.
_EXPLAINED = 1.5
#: An operator with a larger share of the squared error made most of it.
_MOST = 0.5
#: Numbers of at least this size are near FP16's largest, 2^16: a few more operations overflow.
_NEAR = 2.0**12


class Error(NamedTuple):
    """A tensor's error as a root mean square: of each element relative to it, of all relative to their size, and absolute."""

    of_each: float
    of_all: float
    absolute: float


_OF_EACH, _OF_ALL, _ABSOLUTE = range(3)


class Origin(NamedTuple):
    """The operator with the largest share of a tensor's error.

    Args:
        names: the operator, its line, its module and the dtype of its result.
        share: its share of the squared error, 0..1.
        error: the tensor's.
    """

    names: tuple[str, ...]
    share: float
    error: Error


class Near(NamedTuple):
    """The operator whose result was the first one near FP16's end.

    Args:
        names: as of ``Origin``.
        largest: the largest magnitude of its result.
        gain: the factor between the largest magnitudes of its operands, or 1 if they are smaller, and of its result.
    """

    names: tuple[str, ...]
    largest: float
    gain: float


class Origins:
    """Remembers, by storage, the operators to which a forward's tensors owe their errors and their size.

    Args:
        rounding: the errors of rounding once, by the dtypes that round.
    """

    def __init__(self, rounding: Mapping[torch.dtype, tuple[float, float]] = ROUNDING_OF_NARROW) -> None:
        self._rounding = rounding
        self._errors: Marks[Origin] = Marks()
        self._near: Marks[Near] = Marks()
        #: The names of the operator that made FP16's zeros of other numbers.
        self._zeros: Marks[tuple[str, ...]] = Marks()

    def of(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the names of the operator that made most of the error of the tensor that is furthest off; () without one."""
        worst = self._worst(tensors)
        return worst.names if worst is not None and worst.share > _MOST else ()

    def of_zeros(self, operands: Iterable[torch.Tensor], where: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the operator that flushed an operand at one of these elements of a result; () without one."""
        for each in operands:
            names = self._zeros.of(each)
            if names is not None and each.shape == where.shape and bool((each[where] == 0).any()):
                return names
        return ()

    def _worst(self, tensors: Iterable[torch.Tensor]) -> Origin | None:
        return max(filter(None, map(self._errors.of, tensors)), key=lambda each: each.error.of_each, default=None)

    def passed_on(self, operands: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Give results whose own errors are not measured, such as masks, the origin of their operands' errors."""
        worst = self._worst(operands)
        for each in results:
            self._errors.put(each, worst)

    def worst_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the operator that made more of a tensor's error than any other; () without one."""
        worst = self._errors.of(tensor)
        return worst.names if worst is not None else ()

    def of_overflow(self, operands: Iterable[torch.Tensor], largest: float) -> Near | None:
        """Return the operator that used up FP16's range before a result of this exact size; None if the last one used more."""
        near = max(filter(None, map(self._near.of, operands)), key=lambda each: each.gain, default=None)
        return near if near is not None and near.gain > largest / near.largest else None

    def made(self, judged: Judged, is_sum: bool) -> None:
        """Attribute a finite result's error, and its size in FP16, to its operator or to those of its operands.

        Args:
            judged: the result.
            is_sum: whether its operator adds up terms, whose errors average out, so that its own is not estimated.
        """
        operator, operands, value = judged.pending.func, numbers_of(judged.args), judged.value
        if value.dtype is torch.float16:
            self._near.put(value, self._nearness(operands, judged))
        self._zeros.put(value, self._flushed_by(operands, judged))
        error, measure = _error(value, judged.twin), _measure(operator)
        if not error[measure]:
            self._errors.put(value, None)
            return
        known = list(filter(None, map(self._errors.of, operands)))
        squares = [each.error[measure] ** 2 for each in known]
        before = math.inf if is_sum else math.sqrt(sum(squares))
        own = self._own(error, before, measure, judged) if known else error[measure]
        shares: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for each, square in zip(known, squares, strict=True):
            shares[each.names] += ratio(each.share * square, sum(squares))
        first = max(shares, key=shares.__getitem__, default=())
        part = min(own / error[measure], 1.0) ** 2
        share = shares[first] * (1 - part)
        # An earlier operator leads, unless it made far less: in FP32 it would make the later arithmetic FP32's, too.
        if part > 2 * share:
            first, share = judged.origin(), part
        elif known and measure != _OF_ALL and not operator._schema.is_mutable:
            # So this operator's own error is due to it as well: an element-wise result has the widest dtype of its operands.
            share += part
        self._errors.put(value, Origin(first, share, error))

    def _flushed_by(self, operands: list[torch.Tensor], judged: Judged) -> tuple[str, ...] | None:
        """Return the names of the first operator that flushed an element which is still zero; None without one."""
        before = next(filter(None, map(self._zeros.of, operands)), None)
        if before is None and judged.value.dtype is not torch.float16:
            return None
        lost = (judged.value == 0) & (judged.twin != 0)
        if not bool(lost.any()):
            return None
        return before or (judged.origin() if bool(judged.local()[lost].any()) else None)

    def _own(self, error: Error, before: float, measure: int, judged: Judged) -> float:
        """Return the error that an operator makes itself: estimated, unless that of its operands grows or shrinks far."""
        value = judged.value
        if value.dtype not in self._rounding:
            return 0.0
        relative, least = self._rounding[value.dtype]
        size = error.absolute / error.of_all if measure == _ABSOLUTE else 1.0
        rounding, total = relative * size + least, error[measure]
        if before / 2 < total < _EXPLAINED * math.hypot(before, rounding):
            return min(rounding, math.sqrt(max(total**2 - before**2, 0.0)))
        return _error(value, judged.local())[measure]

    def _nearness(self, operands: list[torch.Tensor], judged: Judged) -> Near | None:
        largest = _largest(judged.value)
        if largest < _NEAR:
            return None
        before = next(filter(None, map(self._near.of, operands)), None)
        return before or Near(judged.origin(), largest, largest / max([1.0, *map(_largest, operands)]))


def _measure(operator: torch._ops.OpOverload) -> int:
    """Return which of the errors of ``Error`` an operator passes on: a sum of terms, a function of elements, or another one."""
    if operator.overloadpacket in _ADDING:
        return _ABSOLUTE
    return _OF_EACH if torch.Tag.pointwise in operator.tags else _OF_ALL


def _error(value: torch.Tensor, exact: torch.Tensor) -> Error:
    """Return a tensor's error. That of each element is at most its size: so a logarithm near zero does not hide the others."""
    exact, off = sample(exact), sample(value) - sample(exact)
    absolute = _mean(off)
    return Error(
        _mean((off / exact.abs().clamp_min(_TINY)).clamp_(-1, 1)), absolute / max(_mean(exact), _TINY), absolute
    )


def sample(tensor: torch.Tensor, most: int = _SAMPLE) -> torch.Tensor:
    """Return some ``most`` elements of a tensor, evenly spread, in FP32; of FP64 in FP64."""
    few = tensor.detach().flatten()[:: max(1, tensor.numel() // most)]
    return few if few.dtype is torch.float64 else few.float()


def _mean(tensor: torch.Tensor) -> float:
    """Return the root mean square."""
    return float(tensor.norm()) / math.sqrt(max(1, tensor.numel()))


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; 0 of an empty tensor."""
    return max(map(abs, map(float, torch.aminmax(tensor)))) if tensor.numel() else 0.0
