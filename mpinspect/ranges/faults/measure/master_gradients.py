"""An observer that compares a few elements of the masters, and of their gradients, with those of the weights.

The loop's own code transfers them. The observer records gradients of earlier steps that were added, masters that are stepped but
never copied back, masters that their weights overwrite, and masters that differ from their weights before the first step. FP32
weights that an optimizer steps are masters too: a 16-bit copy of them may overwrite them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from mpinspect.ranges import records
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Backward
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.masters import Samples, agree, samples
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent, drawn
from mpinspect.runtime.distributed import has_process_group
from mpinspect.runtime.storages import StorageReference

#: Minimum number of the masters' steps after which the weights must have changed.
_FEWEST_STEPS = 3
#: Maximum number of a step's backwards whose gradients are compared with the masters' gradients.
_MOST_BACKWARDS = 4
#: Minimum share of the masters' gradients that the step's own backwards leave unexplained.
_UNEXPLAINED = 0.01
#: Gradients that differ by less than this part of their norm are alike.
_ALIKE = 0.01
#: Maximum part of that share that stays unexplained once the masters' earlier gradients are included.
_REST = 0.1
#: Maximum number of an optimizer's weights that are searched for writes between two steps, and of steps in which these are read.
_MOST_WEIGHTS, _MOST_READINGS = 16, 20
#: Weights with fewer distinct values, such as signs, are meant to have few.
_FEWEST_VALUES = 17
#: Values whose distinct ones are counted: sorting all that are read takes longer than the rest together.
_MOST_SORTED = 256
#: The dtypes of copies; FP16 holds most of BF16's numbers.
_COPIED_IN = (torch.bfloat16, torch.float16)


@dataclass
class _Step:
    """The evidence of one step, judged when it has reached the host: a few elements of gradients.

    Args:
        backwards: how many backwards the step had.
        before, parts, sums: the masters' gradients before the first backward, the weights' gradients after each backward, and the
            masters' gradients when their optimizers step.
        left: the weights' gradients when these optimizers step.
    """

    backwards: int = 0
    before: Samples | None = None
    parts: list[Samples] = field(default_factory=list)
    sums: list[Samples] = field(default_factory=list)
    left: list[Samples] = field(default_factory=list)

    def copies(self) -> list[HostCopy]:
        """Return the copies that judging the step reads."""
        return [
            copy
            for each in (self.before, *self.parts, *self.sums, *self.left)
            if each is not None
            for copy in each.copies
        ]


class _Left(NamedTuple):
    """A weight as an optimizer's step left it: its memory and its version."""

    memory: StorageReference
    version: int


class _Unmatched(NamedTuple):
    """Elements of tensors that an optimizer steps, by their ids, and of weights, by their names, before ``step``."""

    step: int
    masters: Samples
    weights: Samples


class MasterGradients(Measuring):
    """Compares the gradients of weights and of their masters, in measured steps of runs that have masters.

    Records nothing in a distributed run, where the time of averaging the gradients is unknown.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._stepped = False
        #: A few elements of the weights with masters, from before the masters' first step; and the number of steps since.
        self._began: Samples | None = None
        self._steps = 0
        #: A few elements of the masters after their last step, by the optimizer's id.
        self._after: dict[int, Samples] = {}
        #: The same after the last measured step. The optimizer's life may end with the function that trains.
        self._latest: dict[int, Samples] = {}
        #: Elements of an optimizer's unknown tensors and of the weights without a master, and the step before which they were
        #: read, the optimizer's first; None once its masters are known to be stale.
        self._unmatched: WeakKeyDictionary[torch.optim.Optimizer, _Unmatched | None] = WeakKeyDictionary()
        self._now = _Step()
        #: The memory and versions of an optimizer's largest FP32 weights after its last step.
        self._left: WeakKeyDictionary[torch.optim.Optimizer, dict[str, _Left]] = WeakKeyDictionary()
        #: These weights. They are searched for in measured steps alone: every step asks for them.
        self._largest: WeakKeyDictionary[torch.optim.Optimizer, list[WatchedParameter]] = WeakKeyDictionary()
        self._readings = 0
        #: The FP32 weights that had values which no 16-bit dtype holds after a step.
        self._wide: set[str] = set()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self.wants_backward_end = self._clock.measured and not has_process_group()
        self._now = _Step()

    def backward_begins(self, backward: Backward) -> None:
        """Record the masters' gradients before the step's first backward."""
        if not self._now.backwards:
            self._masters.find_all()
            if self._stepped:
                self._now.before = _gradients(self._masters.all())

    def backward_ends(self) -> None:
        """Record the weights' gradients, and drop the masters': a closure may run a backward within the optimizer's step."""
        self._now.backwards += 1
        self._now.sums.clear()
        if self._now.before is not None and self._now.backwards <= _MOST_BACKWARDS:
            self._now.parts.append(_gradients(self._masters.weights()))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the masters' gradients, which the optimizer is about to use, and read weights that the loop has written."""
        self._read_written(optimizer)
        is_first = optimizer not in self._unmatched
        self._unmatched.setdefault(optimizer)
        if not self.at_work:
            return
        masters = list(self._masters.of(optimizer))
        if is_first:
            self._unmatched[optimizer] = _Unmatched(self._clock.step, *self._masters.unmatched(optimizer))
        self._find_stale(optimizer, masters)
        if masters and self._began is None:
            self._began = _values(self._masters.weights())
        if masters and id(optimizer) in self._after:
            self._compare_with_weights(self._after.pop(id(optimizer)), masters)
        if self._now.backwards and masters:
            self._now.sums.append(_gradients(masters))
            self._now.left.append(_gradients(self._masters.weights()))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped: gradients that the masters still hold at the next backward are left over."""
        self._stepped = True
        self._steps += self._began is not None
        self._after.pop(id(optimizer), None)
        if self.at_work and self._masters.writes_gradients(optimizer):
            self._now.sums.clear()
        if self._readings < _MOST_READINGS and not has_process_group():
            weights = [(each.name, each.parameter) for each in self._fp32_weights(optimizer)]
            self._left[optimizer] = {name: _Left(StorageReference(each), each._version) for name, each in weights}
            if self.at_work:
                self._read(weights, self._know_wide)
        if self.at_work and (masters := list(self._masters.of(optimizer))):
            self._latest[id(optimizer)] = self._after[id(optimizer)] = _values(masters)

    def end_step(self, step: int, sampled: bool) -> None:
        """Compare the gradients of steps whose copies are complete; record gradients that were added up."""
        super().end_step(step, sampled)
        if self.at_work and self._now.sums:
            self._arrivals.call(self._now.copies(), partial(self._judge_gradients, step, self._now))

    def run_ends(self) -> None:
        """Record masters that changed while their weights did not."""
        self._masters.settle()
        for optimizer in self._optimizers.living():
            self._find_stale(optimizer, list(self._masters.of(optimizer)))
        super().run_ends()
        if self._began is None or self._steps < _FEWEST_STEPS:
            return
        masters, began = _read_all(self._latest.values()), self._began.read()
        weights = {each.name: each.parameter for each in self._parameters if each.name in began}
        ended = samples(weights.items()).read()
        is_still = began.keys() == ended.keys() and all(torch.equal(began[name], ended[name]) for name in began)
        # A master may differ from its weight by the rounding of the copy.
        moved = [
            name
            for name, values in masters.items()
            if name in ended and not torch.equal(values.to(weights[name].dtype).double(), ended[name])
        ]
        if is_still and 2 * len(moved) > len(masters):
            names = tuple(moved)
            self._record_names(
                records.MastersNotCopied(step=self._clock.step, names=names, steps=self._steps, of=len(masters))
            )

    def _find_stale(self, optimizer: torch.optim.Optimizer, masters: Sequence[WatchedParameter]) -> None:
        """Find masters that became equal to their weights only when the first step copied them into the weights."""
        if masters and (before := self._unmatched.get(optimizer)):
            names = {str(id(watched.parameter)): watched.name for watched in masters}
            copies = [*before.masters.copies, *before.weights.copies]
            self._arrivals.call(copies, partial(self._judge_stale, weakref.ref(optimizer), names))

    def _judge_stale(self, reference: weakref.ref[torch.optim.Optimizer], names: Mapping[str, str]) -> None:
        optimizer = reference()
        before = None if optimizer is None else self._unmatched.get(optimizer)
        if optimizer is None or before is None:
            return
        masters, weights = before.masters.read(), before.weights.read()
        pairs = [
            (name, masters[key], weights[name]) for key, name in names.items() if key in masters and name in weights
        ]
        stale = {name: ~same for name, *both in pairs if not (same := agree(*both)).all()}
        if 2 * len(stale) > len(pairs):
            self._unmatched[optimizer] = None
            changed = float(torch.cat([*stale.values()]).double().mean())
            self._record_names(
                records.MastersStale(step=before.step, names=tuple(stale), changed=changed, of=len(pairs))
            )

    def _compare_with_weights(self, after: Samples, masters: Sequence[WatchedParameter]) -> None:
        """Find masters that changed between two steps and now equal their weights: the weights overwrote them."""
        now, weights = _values(masters), _values(self._masters.weights())
        copies = [*after.copies, *now.copies, *weights.copies]
        last = self._clock.step - 1
        self._arrivals.call(copies, partial(self._judge_overwritten, last, after, now, weights))

    def _judge_overwritten(self, step: int, after: Samples, now: Samples, weights: Samples) -> None:
        before, here, theirs = after.read(), now.read(), weights.read()
        changed = [name for name in here if name in before and not torch.equal(before[name], here[name])]
        written = [name for name in changed if name in theirs and torch.equal(here[name], theirs[name])]
        if written and len(written) == len(changed):
            moved = torch.cat([before[name] != here[name] for name in written]).double().mean()
            self._record_names(records.MastersOverwritten(step=step, names=tuple(written), changed=float(moved)))

    def _fp32_weights(self, optimizer: torch.optim.Optimizer) -> list[WatchedParameter]:
        """Return the largest FP32 weights that an optimizer steps itself."""
        if self.at_work or optimizer not in self._largest:
            watched = (each for each in self._optimizers.parameters(optimizer) if is_plain(each.parameter))
            wide = [each for each in watched if each.parameter.dtype is torch.float32]
            self._largest[optimizer] = sorted(wide, key=lambda each: -each.parameter.numel())[:_MOST_WEIGHTS]
        return self._largest[optimizer]

    def _read_written(self, optimizer: torch.optim.Optimizer) -> None:
        """Read FP32 weights that other code has written since the optimizer's last step.

        No version shows a write through ``.data``: in measured steps all are read.
        """
        left = self._left.pop(optimizer, {})
        watched = self._fp32_weights(optimizer) if left else ()
        known = [(each, left[each.name]) for each in watched if each.name in left]
        moved = {each.name for each, was in known if not was.memory.is_of(each.parameter)}
        written = [each for each, was in known if each.parameter._version != was.version or each.name in moved]
        if chosen := (watched if self.at_work else written):
            self._readings += not self.at_work
            weights = [(each.name, each.parameter) for each in chosen]
            self._read(weights, partial(self._judge_written, self._clock.step - 1, moved))

    @torch.no_grad()
    def _read(
        self, weights: Iterable[tuple[str, torch.Tensor]], judge: Callable[[dict[str, Sequence[bool]]], object]
    ) -> None:
        """Call ``judge`` with the 16-bit dtypes that hold each weight's values, once they are known."""
        self._send(Sent.of((name, _in_16_bits(weight)) for name, weight in weights), judge)

    def _know_wide(self, rounded: Mapping[str, Sequence[bool]]) -> None:
        self._wide.update(name for name, row in rounded.items() if not any(row))

    def _judge_written(self, step: int, moved: set[str], rounded: Mapping[str, Sequence[bool]]) -> None:
        for place, dtype in enumerate(_COPIED_IN):
            names = tuple(name for name, row in rounded.items() if row[place] and name in self._wide)
            if names:
                was_moved = moved.issuperset(names)
                self._record_names(
                    records.MastersOverwritten(step=step, names=names, text=dtype_name(dtype), moved=was_moved)
                )
                return

    # -- inside -----------------------------------------------------------------------------------------------------

    def _judge_gradients(self, step: int, seen: _Step) -> None:
        self._find_added_up(step, seen)
        self._find_clipped_late(step, seen)

    def _find_clipped_late(self, step: int, seen: _Step) -> None:
        """Record a factor that the weights' gradients got after they were copied into their masters' gradients."""
        if not 0 < seen.backwards == len(seen.parts):
            return
        given, left, masters = seen.parts[-1].read(), _read_all(seen.left), _read_all(seen.sums)
        names, joined = _joined(given, left, masters)
        if not joined:
            return
        ((factor,), off), ((copied,), rest) = (_fitted(joined[:1], each) for each in joined[1:])
        # A copy may have divided by a loss scale, which is a power of two. A clip's factor is none.
        is_copy = copied > 0 and abs(math.log2(copied) - round(math.log2(copied))) < _ALIKE
        if max(off, rest) < _ALIKE and is_copy and 0 < factor < 1 - 4 * _ALIKE:
            self._record_names(
                records.MastersClippedLate(step=step, names=tuple(names), factor=factor, of=len(masters))
            )

    def _find_added_up(self, step: int, seen: _Step) -> None:
        """Record masters' gradients that are a sum of this step's gradients and of their own earlier gradients."""
        if seen.before is None or not 0 < seen.backwards <= _MOST_BACKWARDS:
            return
        sums = _read_all(seen.sums)
        names, joined = _joined(seen.before.read(), *(part.read() for part in seen.parts), sums)
        if not joined:
            return
        *columns, wanted = joined
        _, unexplained = _fitted(columns[1:], wanted)
        (kept, *_, added), rest = _fitted(columns, wanted)
        if unexplained >= _UNEXPLAINED and rest <= _REST * unexplained and kept > _REST:
            self._record_names(
                records.MastersAddedUp(
                    step=step,
                    names=tuple(names),
                    kept=kept,
                    added=added,
                    largest=float(wanted.abs().max()),
                    parameters=len(names),
                    of=len(sums),
                )
            )


def _in_16_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return for each 16-bit dtype whether it holds a weight's values exactly, unless these are few."""
    values = drawn(weight)
    few = values[:: -(-len(values) // _MOST_SORTED)]
    are_many = few.sort().values.diff().count_nonzero() >= _FEWEST_VALUES - 1
    return torch.stack([are_many & (values == values.to(dtype)).all() for dtype in _COPIED_IN])


def _read_all(found: Iterable[Samples]) -> dict[str, torch.Tensor]:
    return {name: values for each in found for name, values in each.read().items()}


def _joined(*found: Mapping[str, torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
    """Return the names that all have, and the values of each as one vector; no vectors if one is zero or not finite."""
    names = [name for name in found[-1] if all(name in each for each in found)]
    joined = [torch.cat([each[name] for name in names]) for each in found] if names else []
    return names, joined if all(torch.isfinite(each).all() and each.any() for each in joined) else []


def _gradients(parameters: Iterable[WatchedParameter]) -> Samples:
    return samples((watched.name, watched.parameter.grad) for watched in parameters)


def _values(parameters: Iterable[WatchedParameter]) -> Samples:
    return samples((watched.name, watched.parameter) for watched in parameters)


def _fitted(columns: Sequence[torch.Tensor], wanted: torch.Tensor) -> tuple[list[float], float]:
    """Return the least-squares coefficients of the columns for a vector, and the residual's share of its norm."""
    sizes = torch.stack([column.norm() for column in columns])
    matrix = torch.stack(list(columns), dim=1) / sizes
    factors = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution[:, 0]
    rest = (wanted - matrix @ factors).norm() / wanted.norm()
    return (factors / sizes).tolist(), float(rest)
