"""Traces a forward's errors, and its numbers near the end of FP16, to the operators that made them.

A tensor's error has an origin: the operator whose own rounding made most of it. An operator that inherits more than it makes
passes on the origin of its operands. So a difference, a logarithm or a root that shows an error leads to the line that made it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from mpinspect.ranges.faults.measure.twins import Marks

aten = torch.ops.aten

#: Operators whose result has the errors of their operands in their own size; others have them relative to the operand.
_ADDING = frozenset({aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub, aten.cat, aten.stack})
#: The largest error of rounding once: relative, and in FP16 also that of a subnormal number.
_ROUNDING = {torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}
#: Elements, evenly spread, of which a tensor's error is estimated.
_SAMPLE = 1 << 14
#: An operator with a larger share of the squared error made most of it.
_MOST = 0.5
#: Numbers of at least this size are near FP16's largest, 2^16: a few more operations overflow.
_NEAR = 2.0**12


class Error(NamedTuple):
    """A tensor's error as a root mean square, relative to its values and in their own size."""

    relative: float
    size: float


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
    """Remembers, by storage, the operators to which a forward's tensors owe their errors and their size."""

    def __init__(self) -> None:
        self._errors: Marks[Origin] = Marks()
        self._near: Marks[Near] = Marks()

    def of(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the names of the operator that made most of the error of the tensor that is furthest off; () without one."""
        worst = max(filter(None, map(self._errors.of, tensors)), key=lambda each: each.error.relative, default=None)
        return worst.names if worst is not None and worst.share > _MOST else ()

    def of_overflow(self, operands: Iterable[torch.Tensor], largest: float) -> Near | None:
        """Return the operator that used up FP16's range before a result of this exact size; None if the last one used more."""
        near = max(filter(None, map(self._near.of, operands)), key=lambda each: each.gain, default=None)
        return near if near is not None and near.gain > largest / near.largest else None

    def made(
        self,
        operator: torch._ops.OpOverload,
        operands: list[torch.Tensor],
        value: torch.Tensor,
        twin: torch.Tensor,
        lost: float,
        names: Callable[[], tuple[str, ...]],
    ) -> None:
        """Attribute a finite result's error, and its size in FP16, to its operator or to those of its operands.

        Args:
            operator: the operator.
            operands: its tensors.
            value, twin: its result, and the exact one.
            lost: the relative error that it is known to make itself, beside the rounding of its result.
            names: returns those of ``Origin``.
        """
        if value.dtype is torch.float16:
            self._near.put(value, self._nearness(operands, value, names))
        error, rounding = _errors(operator, value, twin)
        is_adding = operator.overloadpacket in _ADDING
        known = list(filter(None, map(self._errors.of, operands)))
        total, before = error[is_adding], [each.error[is_adding] for each in known]
        own = min(max(rounding[is_adding], lost), math.sqrt(max(total**2 - math.hypot(*before) ** 2, 0.0)))
        if not total or not (own or known):
            self._errors.put(value, None)
            return
        # An earlier operator leads, unless it made far less: in FP32 it would make the later arithmetic FP32's, too.
        shares: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for each, inherited in zip(known, before, strict=True):
            shares[each.names] += each.share * (inherited / math.hypot(*before)) ** 2
        first = max(shares, key=shares.__getitem__, default=())
        made = (own / total) ** 2 if known else 1.0
        share = shares[first] * (1 - made)
        if made > 2 * share:
            first, share = names(), made
        self._errors.put(value, Origin(first, share, error))

    def _nearness(
        self, operands: list[torch.Tensor], value: torch.Tensor, names: Callable[[], tuple[str, ...]]
    ) -> Near | None:
        largest = _largest(value)
        if largest < _NEAR:
            return None
        before = next(filter(None, map(self._near.of, operands)), None)
        return before or Near(names(), largest, largest / max(1.0, *map(_largest, operands)))


def _errors(operator: torch._ops.OpOverload, value: torch.Tensor, twin: torch.Tensor) -> tuple[Error, Error]:
    """Return a result's error, and the largest that rounding it once makes.

    Of an operator on single elements the relative error is each element's, at most 1: rounding makes no more, whereas a logarithm
    near zero passes on far more.
    """
    relative, least = _ROUNDING.get(value.dtype, (0.0, 0.0))
    twin, off = _sample(twin), _sample(value) - _sample(twin)
    size = twin.abs() if torch.Tag.pointwise in operator.tags else twin.square().mean().sqrt()
    size.clamp_min_(torch.finfo(torch.float32).tiny)
    error = Error(_mean((off / size).clamp_(-1, 1)), _mean(off))
    return error, Error(_mean((relative + least / size).clamp_(max=1)), relative * _mean(twin) + least)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements of a tensor, evenly spread, in FP32."""
    return tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLE)].float()


def _mean(tensor: torch.Tensor) -> float:
    """Return the root mean square."""
    return float(tensor.norm()) / math.sqrt(max(1, tensor.numel()))


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; 0 of an empty tensor."""
    return max(map(abs, map(float, torch.aminmax(tensor)))) if tensor.numel() else 0.0
