"""Observers of flushing that no count shows: FP16 gradients divided by the loop or asked for, and an optimizer's FP16 states."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.capture.graph import walk
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.capture.optimizers import states_of
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent
from mpinspect.ranges.records import DividedInHalf, FlushedState, GradientsUnderflow
from mpinspect.runtime.device import is_capturing
from mpinspect.runtime.dispatch import obstacle
from mpinspect.runtime.distributed import has_process_group
from mpinspect.runtime.guard import OwnMode, hides_modes
from mpinspect.runtime.user_line import innermost_line

#: The most steps whose operators are watched.
_MOST_STEPS = 3
#: The least share of the gradients' elements, or of their sum of magnitudes, whose loss is recorded.
_LEAST_LOST = 0.01
#: Maximum number of nodes of a graph that are searched for FP16.
_MOST_NODES = 2048
#: FP16's smallest number, as a power of two.
_LOG2_SMALLEST = FLOAT16.flush_exponent + 1


class DividedGradients(Measuring):
    """Counts the elements that flush where the loop multiplies FP16 gradients by less than 1, or divides them, in FP16.

    Watches the operators between a backward and the next forward or optimizer's step, in a few measured steps of runs with FP16
    weights.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._left = _MOST_STEPS
        self._mode: _Products | None = None
        #: The parameter of each gradient's memory, and the counts of its non-zero elements after the backward.
        self._names: dict[int, str] = {}
        self._before = Sent([], [])
        #: The products of the step: the parameter, the line, the factor (None if unknown), the count of non-zero elements.
        self._products: list[tuple[str, str, float | None, torch.Tensor]] = []

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in the first measured steps with FP16 weights."""
        in_half = any(each.parameter.dtype is torch.float16 for each in self._parameters)
        self.at_work = self._clock.measured and in_half and self._left > 0 and not has_process_group()
        self.wants_backward_end = self.at_work
        self._leave()

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Begin to watch operators."""
        if self._mode is None and self._left > 0 and not hides_modes() and not obstacle(()):
            self._left -= 1
            self._mode = _Products(self._ran, self._recording.note)
            self._mode.begin()

    def backward_ends(self) -> None:
        """Count the gradients' elements."""
        gradients = ((each.name, each.parameter.grad) for each in self._parameters)
        found = [(name, grad) for name, grad in gradients if is_plain(grad) and grad.dtype is torch.float16]
        self._names = {grad.untyped_storage()._cdata: name for name, grad in found}
        self._before, self._products = Sent.of(found, _nonzero), []

    def called(self, call: Call) -> None:
        """Stop at the next forward, other than one that a checkpoint runs again."""
        if not call.recomputed:
            self._judge_later()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop at an optimizer's step."""
        self._judge_later()

    def end_step(self, step: int, sampled: bool) -> None:
        """Judge the steps whose counts have reached the host."""
        self._judge_later()
        super().end_step(step, sampled)

    def run_ends(self) -> None:
        """Judge all."""
        self._judge_later()
        super().run_ends()

    def _judge_later(self) -> None:
        self._leave()
        before, products = self._before, self._products
        if products:
            after = Sent.of((str(number), count) for number, (*_, count) in enumerate(products))
            copies = [*before.copies, *after.copies]
            self._arrivals.call(copies, partial(self._judge, self._clock.step, before, products, after))
        self._names, self._before, self._products = {}, Sent([], []), []

    def _leave(self) -> None:
        if self._mode is not None:
            self._mode.is_over = True
            self._mode = None

    def _ran(self, func: Any, args: tuple[Any, ...], result: Any, frame: FrameType) -> None:
        """Count what a product leaves of a gradient."""
        name = func.overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
        # The mode may still be active when a capture begins, which nothing of ours may enter.
        if name not in ("mul", "div") or len(args) < 2 or is_capturing():
            return
        factor = _factor(name, args[1])
        given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        made = result if isinstance(result, (list, tuple)) else [result] if result is not None else given
        for before, after in zip(given, made, strict=False):
            if is_plain(before) and is_plain(after) and after.dtype is torch.float16 and factor != 0:
                parameter = self._names.get(before.untyped_storage()._cdata)
                if parameter is not None and not (factor and factor >= 1):
                    self._products.append((parameter, innermost_line(frame), factor, torch.count_nonzero(after)))

    def _judge(
        self, step: int, before: Sent, products: Sequence[tuple[str, str, float | None, torch.Tensor]], after: Sent
    ) -> None:
        """Record the first line that loses elements."""
        left, counts = before.read(), after.read()
        every, lost, first = sum(left.values()), dict[str, float](), None
        for number, (name, line, factor, _) in enumerate(products):
            gone = left[name] - counts[str(number)]
            if gone > 0 and line in (line if first is None else first[0]):
                first = first or (line, factor)
                lost[name] = gone
            left[name] = counts[str(number)]
        share = sum(lost.values()) / max(every, 1)
        if first is not None and share >= _LEAST_LOST:
            line, factor = first
            self._record_names(DividedInHalf(step=step, names=tuple(lost), text=line, lost=share, factor=factor))


class _Products(OwnMode):  # type: ignore[no-untyped-call]
    """Calls a function after each operator, with the operator's caller."""

    def __init__(self, ran: Callable[..., None], note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran, self._note, self._process = ran, note, os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A forked child has the mode on its stack as well.
        if not self.is_over and getattr(func, "_schema", None) is not None and os.getpid() == self._process:
            try:
                self._ran(func, args, result, sys._getframe(1))
            except Exception as error:
                self.is_over = True
                self._note(f"mpinspect failed in watching the loop's own products of gradients ({error!r})")
        return result


def _nonzero(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.count_nonzero(each) for each in tensors])


def _factor(name: str, value: Any) -> float | None:
    """Return the number by which a product multiplies; None if it is unknown without waiting for a device."""
    if isinstance(value, torch.Tensor) and (not value.is_cpu or value.numel() != 1):
        return None
    if not isinstance(value, (torch.Tensor, int, float)):
        return None
    number = float(value)
    if name == "mul":
        return number
    return 1 / number if number else None


class AskedGradients(Measuring):
    """Searches the results of ``torch.autograd.grad`` for values that passed through FP16 and crowd at its lower end."""

    def gradients_returned(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Read gradients that ``torch.autograd.grad`` has returned."""
        found = [(str(number), each) for number, each in enumerate(gradients) if is_plain(each) and each.numel()]
        nodes = walk([each.grad_fn for each in outputs if each.grad_fn is not None], _MOST_NODES)
        if found and any(_is_half(node) for node in nodes):
            figures, line = Sent.of(found, _lower_end), innermost_line(sys._getframe(1))
            known = {id(watched.parameter): watched.name for watched in self._parameters}
            names = [known.get(id(each), "") for each in inputs]
            self._arrivals.call(figures.copies, partial(self._judge, self._clock.step, figures, names, line))

    def _judge(self, step: int, figures: Sent, names: Sequence[str], line: str) -> None:
        """Record the worst gradient of a call."""
        shares = {number: _likely_lost(*figure) for number, figure in figures.read().items()}
        worst = max(shares, key=lambda number: shares[number])
        if shares[worst] > _LEAST_LOST:
            self._record(GradientsUnderflow(name=names[int(worst)], step=step, text=line, lost=shares[worst]))


class FlushedStates(Measuring):
    """Counts the zeros in an optimizer's FP16 states without negative elements, such as averages of squared gradients."""

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
            sent = Sent.of(counts)
            self._arrivals.call(sent.copies, partial(self._judge, self._clock.step, name, sent))

    def _judge(self, step: int, state: str, sent: Sent) -> None:
        counts = sent.read()
        flushed, given, negative = map(sum, zip(*counts.values(), strict=True))
        if flushed and not negative:
            names = tuple(name for name, (zeros, *_) in counts.items() if zeros)
            self._record_names(FlushedState(step=step, names=names, text=state, flushed=flushed / given))


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
    # As many values again lie below the smallest number, half as large: see Visibility.likely_hidden_l1_share.
    hidden = min(zeros, smallest) / 2
    return hidden / (hidden + total) if total else 1.0


def _lower_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return for each tensor its zeros, its elements of FP16's smallest magnitude, the sum of magnitudes in units of that, and
    whether an element is no multiple of it.
    """
    rows = []
    for each in tensors:
        units = each.detach().abs().float() * 2.0**-_LOG2_SMALLEST
        off = (units != units.round()).any()
        rows.append(torch.stack([(units == 0).sum(), (units == 1).sum(), units.sum(), off]))
    return torch.stack(rows)
