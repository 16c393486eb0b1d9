"""Flushing that no count shows: of FP16 gradients that the loop divides or asks for, of FP16 results that the loop keeps, and
of an optimizer's FP16 states.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.capture.backward_scale import factor_of
from mpinspect.ranges.capture.graph import walk
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.loaded_states import cast_to_half, was_loaded
from mpinspect.ranges.capture.optimizers import states_of
from mpinspect.ranges.faults.measure.measuring import Measuring, Sent
from mpinspect.ranges.faults.measure.operands import Judged, is_in_forward
from mpinspect.ranges.faults.measure.twins import ZERO_BUT_FOR_ROUNDING, Marks
from mpinspect.ranges.records import (
    DividedInHalf,
    FlushedResult,
    FlushedState,
    GradientsUnderflow,
    LostSquares,
    Record,
    SaturatedCast,
)
from mpinspect.runtime.storages import storage_key
from mpinspect.runtime.user_line import innermost_line

#: The least share of the gradients' elements, or of their sum of magnitudes, whose loss is recorded.
_LEAST_LOST = 0.01
#: The least share of an operator's non-zero results whose loss is recorded.
_MOSTLY = 0.5
#: A cast to FP8 is recorded if it flushes this share of the non-zero values, and this share of the sum of magnitudes. A cast with
#: A scale is too small from this lost share of the sum of magnitudes on, if the range above the largest is unused by this factor.
_MISSCALED, _UNUSED = 0.05, 64.0
#: a scale flushes less of that sum, since the largest values survive.
_NEARLY_ALL, _MOST_OF_SUM = 0.9, 0.5
#: The least share of the rows of a forward's tensor that nearly vanish in a cast to FP8 with one scale for all rows.
_VANISHING_ROWS = 0.1
#: The least share of a tensor's sum of magnitudes, cut off by a clamp to FP8's range, that is recorded.
_CUT = 0.05
#: The share of an optimizer's gradients that become zero at one line, by their sum of magnitudes or by their number, that is
#: recorded.
_MATTERS = 0.1
#: Maximum number of parameters in a record.
_MOST_NAMES = 200
#: Maximum number of nodes of a graph that are searched for FP16.
_MOST_NODES = 2048
#: From here on FP32 holds an average's square times 1 - beta2, and decays it more slowly than the average.
_LEAST_HELD = 1e-15
#: FP16's smallest number, as a power of two.
_LOG2_SMALLEST = FLOAT16.flush_exponent + 1


class _Line(NamedTuple):
    """The gradients that one line of the loop multiplies.

    Args:
        names: their parameters.
        factor: the first one's factor; None if it is unknown.
        lost, of: the elements that became zero, and the non-zero elements before.
    """

    names: tuple[str, ...]
    factor: float | None
    lost: float
    of: float


class DividedGradients:
    """Counts the elements that flush where the loop multiplies FP16 gradients by less than 1, or divides them, in FP16.

    Args:
        parameters: the model's parameters by name.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._parameters = dict(parameters)
        #: The parameter of each gradient's memory; None if a backward has run since.
        self._names: dict[int, str] | None = None
        self._lines: dict[str, _Line] = {}

    def backward_runs(self) -> None:
        """Handle that gradients may have got other memory."""
        self._names = None

    def multiplied(
        self, name: str, given: Sequence[Any], before: torch.Tensor | None, after: torch.Tensor, frame: FrameType
    ) -> None:
        """Count the elements of a gradient that a product outside of a backward flushes. Waits for the device.

        Args:
            name: "mul" or "div".
            given: the gradient and its factor or divisor; one of several numbers, such as a mask, is left out.
            before: the gradient's old values if the product was written in place.
        """
        if isinstance(given[1], torch.Tensor) and given[1].numel() != 1:
            return
        gradient, factor = given[0], factor_of(name, given[1])
        if gradient.dtype is not torch.float16 or after.dtype is not torch.float16 or (factor and factor >= 1):
            return
        if self._names is None:
            grads = [(name, each.grad) for name, each in self._parameters.items()]
            self._names = {storage_key(grad): name for name, grad in grads if is_plain(grad)}
        parameter = self._names.get(storage_key(gradient), "")
        now = parameter and self._parameters[parameter].grad
        # Other tensors may have the memory of a gradient that was replaced.
        if factor != 0 and is_plain(now) and storage_key(now) == storage_key(gradient):
            nonzero = torch.count_nonzero(gradient if before is None else before)
            line = innermost_line(frame)
            known = self._lines.get(line, _Line((), factor, 0.0, 0.0))
            lost = known.lost + int(nonzero - torch.count_nonzero(after))
            names = tuple(dict.fromkeys((*known.names[:_MOST_NAMES], parameter)))
            self._lines[line] = _Line(names, known.factor, lost, known.of + int(nonzero))

    def records(self) -> list[Record]:
        """Return the first line that loses elements."""
        for line, (names, factor, lost, of) in self._lines.items():
            if lost and lost >= _LEAST_LOST * of:
                return [DividedInHalf(name=names[0], names=names, text=line, lost=lost / of, factor=factor)]
        return []


class Flushes:
    """Follows mostly flushed FP16 results, outside of autograd, until a tensor that persists or an optimizer takes them."""

    def __init__(self) -> None:
        #: The records of all such results.
        self.all: list[FlushedResult] = []
        #: The records of those that a tensor which persists, a logarithm or the loop itself, as a number, has taken.
        self.taken: list[FlushedResult] = []
        #: The records of lines at which a part of an optimizer's gradients became zero.
        self.of_gradients: list[FlushedResult] = []
        #: The records of casts to FP8, by line.
        self.casts: dict[str, FlushedResult] = {}
        #: The records of clamps to the range of FP8, by line.
        self.clamps: dict[str, SaturatedCast] = {}
        #: The flushed results, and those computed from them, by storage.
        self._of: Marks[FlushedResult] = Marks()

    def made(self, judged: Judged) -> None:
        """Judge an operator's result. Waits for the device."""
        value = judged.value
        if value.dtype is not torch.float16:
            return
        local = judged.local()
        flushed = (value == 0) & (local != 0)
        lost, of = int(flushed.sum()), int(torch.count_nonzero(local))
        if _is_most(lost, of):
            largest = float(local.abs().mul_(flushed).max())
            record: FlushedResult = judged.describe(
                FlushedResult, flushed=lost / of, elements=float(of), largest=largest
            )
            self.all.append(record)
            self._of.put(value, record)

    def cast(self, value: torch.Tensor, source: torch.Tensor, describe: Callable[..., FlushedResult]) -> None:
        """Judge a cast of a tensor to FP8; ``describe`` as of ``Judged``. Waits for the device.

        The rows of a gradient may differ by any factor: the large ones make the sum. Those of a forward's tensor count alike.
        """
        sizes = source.detach().float().abs()
        is_lost = (value.float() == 0) & (sizes != 0)
        if not bool(is_lost.any()):
            return
        flushed, count, of = sizes * is_lost, int(is_lost.sum()), int(torch.count_nonzero(sizes))
        lost, unused = float(flushed.sum()) / float(sizes.sum()), torch.finfo(value.dtype).max / float(sizes.max())
        is_whole = count >= _NEARLY_ALL * of and lost >= _MOST_OF_SUM
        rows = _vanishing_rows(is_lost, sizes) if is_in_forward() and not is_whole else 0.0
        if is_whole or rows >= _VANISHING_ROWS or (lost >= _MISSCALED and unused >= _UNUSED):
            figures = {"flushed": count / of, "elements": float(of), "largest": float(flushed.max())}
            # Infinities and NaNs leave no range to use.
            figures |= {"lost": lost, "unused": math.floor(math.log2(unused)) if unused > 0 else 0}
            record = describe(FlushedResult, rows=rows if rows >= _VANISHING_ROWS else 0.0, **figures)
            line = record.names[1]
            self.casts[line] = _together([*filter(None, [self.casts.get(line)]), record])

    def clamped(self, source: torch.Tensor, bound: float, describe: Callable[..., SaturatedCast]) -> None:
        """Judge a clamp of a tensor to -bound and bound; ``describe`` as of ``Judged``. Waits for the device."""
        sizes = source.detach().float().abs()
        beyond, of = (sizes - bound).clamp_(min=0.0), float(sizes.sum())
        if math.isfinite(of) and float(beyond.sum()) >= _CUT * of > 0:
            lost, share = float(beyond.sum()) / of, float(beyond.count_nonzero()) / sizes.numel()
            record = describe(SaturatedCast, lost=lost, saturated=share, largest=float(sizes.max()), bound=bound)
            line = record.names[1]
            self.clamps[line] = max(record, self.clamps.get(line, record), key=lambda each: each.lost)

    def passed_on(self, given: Iterable[Any], value: torch.Tensor, is_kept: bool, taker: str = "") -> None:
        """Follow flushed values from an operator's arguments into its result.

        Args:
            given: the arguments.
            value: the result.
            is_kept: whether the result persists from step to step.
            taker: the operator if it needs the magnitudes of the flushed values.
        """
        origin = next(filter(None, (self._of.of(each) for each in given if is_plain(each))), None)
        if origin is None:
            return
        if is_kept or taker:
            self.taken.append(replace(origin, names=(*origin.names[:3], taker)))
        elif self._of.of(value) is None:
            self._of.put(value, origin)

    def read_by_loop(self, number: torch.Tensor, exact: torch.Tensor | None) -> None:
        """Record flushed values whose sum the loop reads as a zero that its exact number is not. Waits for the device."""
        origin = self._of.of(number) if self._of else None
        if origin is None or exact is None or float(number.detach()):
            return
        if wanted := float(exact.detach()):
            self.taken.append(replace(origin, exact=wanted))

    def added(self, given: Iterable[Any], value: torch.Tensor, exact: torch.Tensor) -> None:
        """Follow flushed values into a sum that is mostly zero where the exact one is not; arguments as of ``passed_on``."""
        if self._of and _is_most(*map(int, ((exact != 0)[value == 0].sum(), torch.count_nonzero(exact)))):
            self.passed_on(given, value, is_kept=False)

    def taken_as_gradients(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Judge gradients that an optimizer takes. Waits for the device.

        Args:
            gradients: each with its exact values.
        """
        total, lost = 0.0, defaultdict[tuple[str, ...], float](float)
        #: The root mean square of each gradient, and the line at which it has lost half or more.
        sizes_and_lines: list[tuple[float, tuple[str, ...]]] = []
        for gradient, exact in gradients if self._of else ():
            sizes = exact.detach().float().abs()
            whole = float(sizes.sum())
            line: tuple[str, ...] = ()
            total += whole
            if (origin := self._of.of(gradient)) is not None:
                size = float(sizes[gradient == 0].sum())
                lost[origin.names[:2]] += size
                line = origin.names[:2] if size >= _MOSTLY * whole else ()
            sizes_and_lines.append((float(sizes.norm()) / max(sizes.numel(), 1) ** 0.5, line))
        largest = max((size for size, _ in sizes_and_lines), default=0.0)
        counted = [line for size, line in sizes_and_lines if size > ZERO_BUT_FOR_ROUNDING * largest]
        for place, size in lost.items():
            # An optimizer like Adam makes equal steps of small and large gradients.
            emptied = counted.count(place)
            if size and (size >= _MATTERS * total or emptied >= _MATTERS * len(counted) > 0):
                alike = [each for each in self.all if each.names[:2] == place]
                record = replace(_together(alike), taken=size / total, emptied=emptied, weights=len(counted))
                self.of_gradients.append(record)

    def most(self) -> list[FlushedResult]:
        """Return the result with the most flushed elements."""
        return sorted(self.all, key=lambda each: each.flushed * each.elements)[-1:]


def _vanishing_rows(is_lost: torch.Tensor, source: torch.Tensor) -> float:
    """Return the share of the rows with a non-zero element that lose nearly all of these."""
    if source.dim() < 2:
        return 0.0
    lost, of = is_lost.sum(-1), source.count_nonzero(-1)
    return int(((lost >= _NEARLY_ALL * of) & (of > 0)).sum()) / max(int((of > 0).sum()), 1)


def _is_most(lost: int, of: int) -> bool:
    return 0 < lost >= _MOSTLY * of


def _together(records: list[FlushedResult]) -> FlushedResult:
    """Return one record of results at one line."""
    first, elements = records[0], sum(each.elements for each in records)
    return replace(
        first,
        name=first.name * all(each.name == first.name for each in records),
        flushed=sum(each.flushed * each.elements for each in records) / elements,
        elements=elements,
        largest=max(each.largest for each in records),
        lost=max(each.lost for each in records),
        unused=min(each.unused for each in records),
        rows=min(each.rows for each in records),
        times=sum(each.times for each in records),
    )


class AskedGradients(Measuring):
    """Searches the results of ``torch.autograd.grad`` for values that passed through FP16 and crowd at its lower end."""

    def gradients_returned(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Read gradients that ``torch.autograd.grad`` has returned."""
        found = [(str(number), each) for number, each in enumerate(gradients) if is_plain(each) and each.numel()]
        nodes = walk((each.grad_fn for each in outputs), _MOST_NODES)
        if found and any(_is_half(node) for node in nodes):
            line = innermost_line(sys._getframe(1))
            known = {id(watched.parameter): watched.name for watched in self._parameters}
            names = [known.get(id(each), "") for each in inputs]
            self._send(Sent.of(found, _lower_end), partial(self._judge, self._clock.step, names, line))

    def _judge(self, step: int, names: Sequence[str], line: str, figures: dict[str, list[float]]) -> None:
        """Record the worst gradient of a call."""
        shares = {number: _likely_lost(*figure) for number, figure in figures.items()}
        worst = max(shares, key=lambda number: shares[number])
        if shares[worst] > _LEAST_LOST:
            self._record(GradientsUnderflow(name=names[int(worst)], step=step, text=line, lost=shares[worst]))


class FlushedStates(Measuring):
    """Counts flushed elements of an optimizer's states: zeros in non-negative FP16 states, such as averages of squared gradients.

    Before a step it also counts, in states with a wider range, the zero averages of squares whose average is not zero.
    """

    @torch.no_grad()
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare both averages of an optimizer like Adam in a measured step, and in the first after its states were loaded."""
        if not was_loaded(optimizer) and not self.at_work:
            return
        counts = []
        for group in optimizer.param_groups:
            for watched in self._optimizers.watched(group["params"]):
                states = states_of(optimizer, watched.parameter)
                mean: Any = states.get("exp_avg")
                squares: Any = states.get("exp_avg_sq")
                epsilon = group.get("eps")
                if _are_wide(mean, squares) and isinstance(epsilon, float) and epsilon > 0:
                    counts.append((watched.name, _lost_squares(mean, squares, epsilon)))
        self._send(Sent.of(counts), partial(self._judge_squares, self._clock.step, cast_to_half(optimizer)))

    def _judge_squares(self, step: int, line: str, counts: dict[str, list[float]]) -> None:
        names = tuple(name for name, (lost, *_) in counts.items() if lost)
        if names:
            lost, of, _ = map(sum, zip(*counts.values(), strict=True))
            largest = max(ratio for _, _, ratio in counts.values())
            self._record_names(LostSquares(step=step, names=names, text=line, flushed=lost / of, largest=largest))

    @torch.no_grad()
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the states of a measured step with the gradients, which are still there."""
        if not self.at_work:
            return
        by_state: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for watched in (*self._optimizers.parameters(optimizer), *self._masters.of(optimizer)):
            gradient = watched.parameter.grad
            for name, state in states_of(optimizer, watched.parameter).items():
                is_half = is_plain(state) and state.dtype is torch.float16
                if is_half and is_plain(gradient) and state.shape == gradient.shape:
                    by_state.setdefault(name, []).append((watched.name, _flushed(state, gradient)))
        for name, counts in by_state.items():
            self._send(Sent.of(counts), partial(self._judge, self._clock.step, name))

    def _judge(self, step: int, state: str, counts: dict[str, list[int]]) -> None:
        flushed, given, negative = map(sum, zip(*counts.values(), strict=True))
        if flushed and not negative:
            names = tuple(name for name, (zeros, *_) in counts.items() if zeros)
            self._record_names(FlushedState(step=step, names=names, text=state, flushed=flushed / given))


def _are_wide(*states: Any) -> bool:
    """Return whether states are plain, of one shape, and in dtypes with FP32's range."""
    dtypes = (torch.float32, torch.bfloat16)
    return all(is_plain(each) and each.dtype in dtypes and each.shape == states[0].shape for each in states)


def _lost_squares(mean: torch.Tensor, squares: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return, for averages whose square FP32 holds: the number of zero averages of squares, the number of all, and the largest
    average with a zero, divided by epsilon.
    """
    sizes = mean.float().abs()
    held = sizes >= _LEAST_HELD
    lost = (squares == 0) & held
    return torch.stack([lost.sum(), held.sum(), (sizes * lost).max() / epsilon])


def _flushed(state: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return how many elements of a state are zero where the gradient is not, the gradient's non-zero, the state's negative."""
    given = gradient != 0
    return torch.stack([((state == 0) & given).sum(), given.sum(), (state < 0).sum()])


def _is_half(node: Any) -> bool:
    return any(each.dtype is torch.float16 for each in getattr(node, "_input_metadata", ()))


def _likely_lost(zeros: float, smallest: float, total: float, is_off_grid: float) -> float:
    """Return the share of the sum of magnitudes that was likely flushed; 1 if only zeros are left."""
    if is_off_grid:
        return 0.0
    # Assume that below the smallest number lie as many values as at it, half as large: see Visibility.likely_hidden_l1_share.
    hidden = min(zeros, smallest) / 2
    return hidden / (hidden + total) if total else 1.0


def _lower_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return for each tensor its zeros, its elements of FP16's smallest magnitude, the sum of magnitudes in units of that, and
    whether an element is not a multiple of it.
    """
    rows = []
    for each in tensors:
        units = each.detach().abs().float() * 2.0**-_LOG2_SMALLEST
        off = (units != units.round()).any()
        rows.append(torch.stack([(units == 0).sum(), (units == 1).sum(), units.sum(), off]))
    return torch.stack(rows)
