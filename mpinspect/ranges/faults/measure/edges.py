"""Follows arguments to the edges of operators' domains, where these are infinite, in a step that is computed twice."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.faults.measure.operands import CASTS, DIFFERENCES, Pending, has_numbers, takes_gradient
from mpinspect.ranges.faults.measure.twins import NARROW, Marks
from mpinspect.ranges.records import CalledLines, Record, RoundedArgument, RoundedBound, RoundedConstant
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: Operators that are infinite, or have an infinite derivative, at zero, and the place of the argument.
_EDGES = {
    **dict.fromkeys((aten.sqrt, aten.rsqrt, aten.log, aten.log2, aten.log10, aten.reciprocal, aten.pow), 0),
    aten.div: 1,
}
#: Operators that are infinite, or have an infinite derivative, at these arguments.
_INFINITE_AT = {
    **dict.fromkeys(_EDGES, (0.0,)),
    **dict.fromkeys((aten.atanh, aten.erfinv, aten.acos, aten.asin), (-1.0, 1.0)),
    aten.log1p: (-1.0,),
    aten.logit: (0.0, 1.0),
}
#: Sums of the terms with the same index.
_INDEXED = (aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_)
#: Operators whose calls have their lines recorded: a later step, which is not computed twice, may break in one of them.
_AT_EDGES = frozenset(
    {*_EDGES, aten.exp, aten.log1p, aten.mul, aten.sum, aten.mean, aten.mm, aten.bmm, aten.addmm, *_INDEXED}
)
#: The most such calls of an operator.
_MOST_CALLS = 8
#: Operators whose result has values of their first argument.
_CARRYING = CASTS | {aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu, aten.abs}
#: Operators that are given a bound or an epsilon, and those that pass on an element that equals it.
_CLAMPS = frozenset({*(aten.clamp, aten.clamp_, aten.clamp_min), *(aten.clamp_min_, aten.clamp_max, aten.clamp_max_)})
_BOUNDING = _CLAMPS | {aten.add}
#: Operators through which a bound is followed: of one tensor and numbers, and monotonic near the bound.
_FOLLOWED = frozenset(
    {*(aten.add, aten.sub, aten.rsub, aten.mul, aten.div), *(aten.sqrt, aten.neg, aten.log, aten.exp)}
)
#: The relative error up to which an element equals the number that it follows from.
_SAME = 0.01
#: The least share of differences of 1 and decay factors that must be zero, and the most operations that make such factors.
_FEW_LOST, _LONGEST = 0.02, 16
#: The least error of an argument near zero, relative to its exact value.
_FAR_OFF = 0.5


class Bound(NamedTuple):
    """A number of the script that rounding changes to a whole number, and the value of an element that equals it.

    Args:
        names: the operator that was given the number, and its line.
        bound, rounded, nearest: the number, its value in the tensor's dtype, and the nearest other value there.
        exact, given: the element that follows from the number, and from its rounded value: the same in FP32.
    """

    names: tuple[str, str]
    bound: float
    rounded: float
    nearest: float
    exact: float
    given: float


class Edges:
    """Compares the arguments of operators that are infinite at zero, in a forward, with their exact values."""

    def __init__(self) -> None:
        #: By operator, the argument near zero that was furthest from its exact value.
        self._arguments: dict[str, RoundedArgument] = {}
        #: Rounded bounds, and the lines of differences, by the storage of their result.
        self._bounds: Marks[Bound] = Marks()
        self._lines_of: Marks[str] = Marks()
        #: The lines of the calls that may be infinite, by operator.
        self._calls: defaultdict[str, list[str]] = defaultdict(list)
        #: The difference of 1 and decay factors that loses most elements.
        self._of_one: RoundedConstant | None = None
        #: The first rounded bound at which an operator is infinite.
        self._reached: RoundedBound | None = None

    def called(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Remember the line of an operator that may be infinite at an edge of its domain."""
        if operator in _AT_EDGES and takes_gradient(args):
            lines, line = self._calls[operator.__name__.rstrip("_")], innermost_line(sys._getframe())
            if len(lines) <= _MOST_CALLS or line not in lines:
                lines.append(line)

    def ran(self, pending: Pending, value: torch.Tensor, describe: Callable[..., Any]) -> None:
        """Follow and judge an operator of the forward. Waits for the device.

        Args:
            value: its result.
            describe: makes a record of a tensor, of a class, at this line.
        """
        self._reach(pending, describe)
        self._follow(pending, value)
        if pending.exact is not None:
            self._compare_with_one(pending, value, describe)
            self._follow_line(pending, value)
            self._compare(pending, describe)

    def _follow(self, pending: Pending, value: torch.Tensor) -> None:
        """Follow a bound or an epsilon that rounding changes through operators of one tensor and numbers."""
        func, (first, *others), kwargs = pending.func, *pending.given
        operator, known = func.overloadpacket, self._bounds.of(first) if has_numbers(first) else None
        numbers = [each for each in (*others, *kwargs.values()) if type(each) in (int, float)]
        is_of_numbers = not any(isinstance(each, torch.Tensor) for each in others)
        if is_of_numbers and operator in (_BOUNDING if value.dtype in NARROW else _CLAMPS):
            found = filter(None, (_rounded(each, dtype) for each in numbers for dtype in _narrow_or_all(value.dtype)))
            if whole := next(found, None):
                names = operator.__name__, innermost_line(pending.frame)
                given = whole[1] if value.dtype in NARROW else whole[0]
                self._bounds.put(value, Bound(names, *whole, exact=whole[0], given=given))
                return
        if known is not None and operator in CASTS and known.given == known.exact and value.dtype in NARROW:
            whole = _rounded(known.exact, value.dtype)
            known = whole and known._replace(rounded=whole[1], nearest=whole[2], given=whole[1])
        elif known is not None and operator in _FOLLOWED and is_of_numbers:
            exact, given = (
                float(func(torch.tensor(each, dtype=torch.float64, device="cpu"), *others, **kwargs))
                for each in known[-2:]
            )
            known = known._replace(exact=exact, given=given)
        elif operator not in _CARRYING:
            known = None
        if known is not None:
            self._bounds.put(value, known)

    def _reach(self, pending: Pending, describe: Callable[..., Any]) -> None:
        """Record that an operator is infinite at a rounded bound of its argument, and finite at the bound itself."""
        operator, given = pending.func.overloadpacket, pending.given[0]
        edges = _INFINITE_AT.get(operator, ())
        if not edges or self._reached is not None or not given or _is_smooth(operator, given):
            return
        if not has_numbers(argument := given[_EDGES.get(operator, 0)]):
            return
        bound = self._bounds.of(argument)
        if bound is not None and bound.given in edges and bound.exact not in edges:
            # Not a zero with a sign.
            figures = {"bound": bound.bound, "rounded": bound.rounded, "given": bound.given + 0.0}
            self._reached = describe(argument, RoundedBound, *bound.names, nearest=bound.nearest, **figures)

    def _follow_line(self, pending: Pending, value: torch.Tensor) -> None:
        """Remember the line of a difference, also of results that have its values."""
        operator, first = pending.func.overloadpacket, pending.given[0][0]
        if operator in DIFFERENCES:
            self._lines_of.put(value, innermost_line(pending.frame))
        elif operator in _CARRYING and has_numbers(first) and (line := self._lines_of.of(first)):
            self._lines_of.put(value, line)

    def _compare_with_one(self, pending: Pending, value: torch.Tensor, describe: Callable[..., Any]) -> None:
        """Record that differences of 1 and decay factors, which one parameter gives, are zero where the exact ones are not."""
        given, exact = pending.given[0], pending.arguments[0]
        if value.dtype not in NARROW or pending.func.overloadpacket not in DIFFERENCES or not has_one(given):
            return
        place = next((place for place, each in enumerate(given) if has_numbers(each)), None)
        if place is None or not _is_of_one_parameter(given[place]):
            return
        lost = float(((value == 0) & (exact[place] != given[place].float())).sum())
        if lost >= _FEW_LOST * value.numel() and (self._of_one is None or lost > self._of_one.elements):
            self._of_one = describe(value, RoundedConstant, elements=lost, of=float(value.numel()))

    def _compare(self, pending: Pending, describe: Callable[..., Any]) -> None:
        """Record an argument near zero, where an operator is singular, that is mostly rounding error."""
        operator, given = pending.func.overloadpacket, pending.given[0]
        if (
            operator not in _EDGES
            or _is_smooth(operator, given)
            or not has_numbers(argument := given[_EDGES[operator]])
        ):
            return
        exact = pending.arguments[0][_EDGES[operator]]
        # An exact zero is the script's own.
        error = ((argument.float() - exact) / exact).abs().nan_to_num(0, 0)
        worst, elements = int(error.argmax()), float((error >= _FAR_OFF).sum())
        name = operator.__name__
        if not elements or (name in self._arguments and elements <= self._arguments[name].elements):
            return
        figures = {"given": float(argument.flatten()[worst]), "exact": float(exact.flatten()[worst])}
        names: tuple[str, ...] = (self._lines_of.of(argument) or "",)
        bound = self._bounds.of(argument)
        if (
            bound is not None
            and math.isclose(bound.exact, figures["exact"], rel_tol=_SAME)
            and bound.given == figures["given"]
        ):
            names += bound.names
            figures |= {"bound": bound.bound, "rounded": bound.rounded, "nearest": bound.nearest}
        figures |= {"elements": elements, "of": error.numel()}
        self._arguments[name] = describe(argument, RoundedArgument, *names, **figures)

    def records(self) -> list[Record]:
        """Return the worst argument of each operator, and the lines of the operators that are called in few places."""
        calls = {
            name: lines if len(lines) <= _MOST_CALLS else dict.fromkeys(lines) for name, lines in self._calls.items()
        }
        lines = (CalledLines(names=tuple(each), text=name) for name, each in calls.items() if len(each) <= _MOST_CALLS)
        return [*lines, *self._arguments.values(), *filter(None, [self._of_one, self._reached])]


def bounds_for_later(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator bounds FP32 values by a number that a later cast to 16 bits may change."""
    is_clamp = func.overloadpacket in _CLAMPS and not func._schema.is_mutable
    return is_clamp and bool(args) and has_numbers(args[0]) and args[0].dtype is torch.float32


def _is_smooth(operator: Any, given: Sequence[Any]) -> bool:
    """Return whether an operator is a power that is finite at zero, with its derivative."""
    return operator is aten.pow and not (isinstance(given[1], (int, float)) and given[1] < 1)


def _narrow_or_all(dtype: torch.dtype) -> Sequence[torch.dtype]:
    """Return a 16-bit dtype itself; for others all that a later cast may have."""
    return (dtype,) if dtype in NARROW else tuple(NARROW)


def has_one(given: Sequence[Any]) -> bool:
    """Return whether an operand of a sum or a difference is the number 1."""
    return any(isinstance(each, (int, float)) and abs(each) == 1 for each in given[:2])


def _is_of_one_parameter(factors: torch.Tensor) -> bool:
    """Return whether a tensor follows element by element from one parameter, such as a layer's decay factors."""
    node = factors.grad_fn
    for _ in range(_LONGEST):
        before = [each for each, _ in node.next_functions if each is not None] if node is not None else []
        if len(before) != 1:
            return False
        (node,) = before
        if (leaf := getattr(node, "variable", None)) is not None:
            return isinstance(leaf, torch.nn.Parameter) and leaf.numel() == factors.numel()
    return False


def _rounded(number: float, dtype: torch.dtype) -> tuple[float, float, float] | None:
    """Return a number, its value in a 16-bit dtype and the nearest other one there; None unless rounding makes it a whole one."""
    value = torch.tensor(number, dtype=dtype, device="cpu")
    rounded = float(value)
    if not math.isfinite(rounded) or rounded == number or rounded != round(rounded):
        return None
    nearest = (value.view(torch.int16) + (1 - 2 * (abs(number) < abs(rounded)))).view(dtype)
    return number, rounded, math.copysign(float(nearest), number)
