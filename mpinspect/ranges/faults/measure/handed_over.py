"""An observer that compares the gradients from the backward with the gradients that the optimizer receives.

It records the largest magnitude of every parameter's gradient at four moments of a measured step: after its backward, before
and after a scaler unscales, and when the optimizer steps. Each moment takes one call of torch for all parameters. Results on a
device are judged a step later, when they have reached the host.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from mpinspect.numeric.formats import is_power_of_two
from mpinspect.ranges.capture.backward_scale import constant_factor
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Backward, Call, ParameterGradient
from mpinspect.ranges.faults.measure.lost_backwards import Backwards, LostBackwards
from mpinspect.ranges.faults.measure.measuring import Magnitudes, Measuring, Run, magnitudes
from mpinspect.ranges.records import (
    Change,
    ChangedBeforeStep,
    ChangedWhileScaled,
    LeftOver,
    MastersGivenSmaller,
    MissingGradients,
    NotOptimized,
    Record,
    ReplacedBeforeStep,
    Stale,
    SteppedOnChangingScale,
    SteppedWhileScaled,
    UnscaledAgain,
    UnscaledNeverScaled,
)
from mpinspect.runtime.distributed import has_process_group

#: Number of steps observed after each event, and the maximum number of such steps in a run.
_AFTER_EVENT, _MOST_AFTER_EVENTS = 3, 30
#: Maximum number of a step's backwards that are preceded by a reading of the gradients; if backwards may be lost, each is.
_MOST_BACKWARDS, _MOST_IF_LOST = 4, 32
#: How a module was called, by whether its calls had a graph (None: no call): the name of a flag of ``MissingGradients``.
_HOW_CALLED = {None: "not_called", True: "called", False: "without_graph"}
#: Ratios that differ by at most this relative amount count as equal, because FP32 rounds each element separately.
_SAME = 1e-3
#: The least limit of a clip that may contain the loss scale, and its least part of the scale: limits of true gradients are small.
_SCALED_LIMIT, _OF_SCALE = 64.0, 0.05
#: torch adds it to the norm by which it divides a limit.
_EPSILON = 1e-6
#: A clip that multiplies scaled gradients by less changes the step.
_CLIPPED = 0.9
#: Gradients that are smaller by this factor or more at the masters count as divided, for example by a loss scale.
_DIVIDED = 2.0


class _ScaledByLoop(NamedTuple):
    """A step whose loss the loop multiplied by ``factor``, a power of two.

    ``is_undivided``: whether an optimizer of torch, at the learning rate ``lr``, took the gradients as the backward gave them.
    """

    step: int
    factor: float
    lr: float
    is_undivided: bool


AnyChange = TypeVar("AnyChange", bound=Change)


@dataclass
class _Step:
    """The evidence of one step, judged when its magnitudes have reached the host.

    Args:
        is_measured: whether all observers measure in this step; False in the steps after an event.
        moments: the gradients' magnitudes by moment of the step.
        left: the gradients' magnitudes at the beginning of each of the step's backwards.
        lost: the evidence on gradients that are zeroed between two backwards.
        places, in_place: the gradients' addresses when the step's first backward began, and the parameters whose gradients had
            the same address at the optimizer's step.
        arrived: the parameters that received a gradient.
        stepping, with_masters: the parameters that an optimizer steps, and those whose masters it steps.
        backwards: the number of the step's backwards.
        is_scaled: whether a scaler multiplied losses.
        scale: the loss scale of the last backward; None if the host does not know it.
        clip: the limit and the norm of the first clip of gradients that carry the loop's own scale; None without one.
        has_scaled_limit: whether the limit of a clip seems to have been multiplied by the loss scale.
        multiplied_by: the constant factor that the loop applied to the loss of the last backward; None without one.
        lr: the learning rate of the first parameter group of the last optimizer that stepped; NaN if it is no number or the
            optimizer is not torch's.
        scaled, still_scaled: the parameters with gradients from a scaled backward, and the subset that an optimizer stepped
            before a scaler divided the gradients.
        divided_early: the subset of these whose gradients a scaler divided before the last backward.
        aside, never_scaled: the parameters with gradients from a backward that no scaler scaled, and the subset whose gradients
            a scaler divided.
        unscaled: how often a scaler has unscaled each parameter's gradient since its optimizer last stepped.
        kept, again: the unscaled gradients when the last backward began; these and the counts of ``unscaled`` when a scaler
            last unscaled gradients again.
    """

    is_measured: bool = False
    moments: dict[str, list[Magnitudes]] = field(default_factory=lambda: defaultdict(list))
    left: list[Magnitudes] = field(default_factory=list)
    lost: Backwards = field(default_factory=Backwards)
    places: dict[str, int] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    stepping: set[str] = field(default_factory=set)
    with_masters: set[str] = field(default_factory=set)
    backwards: int = 0
    is_scaled: bool = False
    scale: float | None = None
    clip: tuple[float, HostCopy] | None = None
    has_scaled_limit: bool = False
    multiplied_by: float | None = None
    lr: float = math.nan
    scaled: set[str] = field(default_factory=set)
    still_scaled: set[str] = field(default_factory=set)
    divided_early: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    never_scaled: set[str] = field(default_factory=set)
    unscaled: dict[str, int] = field(default_factory=dict)
    kept: Magnitudes | None = None
    again: tuple[Magnitudes, Mapping[str, int]] | None = None

    def copies(self) -> list[HostCopy]:
        """Return the copies that judging the step reads."""
        found = [*(each for parts in self.moments.values() for each in parts), *self.left, *(self.again or ())[:1]]
        if self.divided_early and self.kept is not None:
            found.append(self.kept)
        norms = [] if self.clip is None else [self.clip[1]]
        return [copy for each in found for copy in each.copies()] + self.lost.copies() + norms

    def read(self, moment: str) -> dict[str, float]:
        """Return the magnitudes at a moment, by name."""
        return {name: value for part in self.moments[moment] for name, value in part.read().items()}


class HandedOver(Measuring):
    """Compares gradients between a backward's end and the optimizer's step, or their masters' gradients at that step.

    Records nothing in a distributed run, where the time of averaging the gradients is unknown.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._armed = self._armed_in_all = 0
        self._now = _Step()
        self._lost = LostBackwards(self._parameters, self._optimizers)
        #: For each measured step, the common factor of division on the way to the masters; NaN without one.
        self._divisors: list[float] = []
        self._scaled_by_loop: list[_ScaledByLoop] = []
        #: The parameters that ever received a gradient, and the parameters that an optimizer steps.
        self._ever: set[str] = set()
        #: The parameters that needed no gradient in the first step.
        self._frozen: set[str] | None = None
        self._optimized: set[str] = set()
        self._stepped = False
        #: The modules that were called in measured steps: whether any call built a graph.
        self._called: dict[str, bool] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps, and in the steps after an event."""
        if self._frozen is None:
            self._frozen = {watched.name for watched in self._parameters if not watched.parameter.requires_grad}
        if self._new_events():
            self._armed = _AFTER_EVENT
        is_armed = (sampled or watched) and self._armed > 0 and self._armed_in_all < _MOST_AFTER_EVENTS
        self._armed -= self._armed > 0
        self._armed_in_all += is_armed
        self.at_work = self.wants_backward_end = (self._clock.measured or is_armed) and not has_process_group()
        self._now = _Step(self._clock.measured, lost=self._lost.begin_step(self._clock.measured))

    def called(self, call: Call) -> None:
        """Record that a module was called, and whether a graph was built."""
        self._lost.called(self._now.lost, call.outputs)
        self._called[call.layer.path] = self._called.get(call.layer.path, False) or torch.is_grad_enabled()

    def backward_begins(self, backward: Backward) -> None:
        """Record the magnitudes of gradients that earlier steps have left."""
        if self._stepped and len(self._now.left) < (_MOST_BACKWARDS, _MOST_IF_LOST)[self._now.lost.is_proof]:
            if not self._now.left:
                self._now.places = self._gradients_places()
            self._now.left.append(magnitudes(self._parameters))
            self._lost.backward_begins(self._now.lost, self._now.left[-1], backward.micro_batch)
        if self._now.unscaled:
            # Cleared gradients begin anew, also in a loop that updates the weights itself.
            cleared = {watched.name for watched in self._parameters if watched.parameter.grad is None}
            self._now.unscaled = {name: count for name, count in self._now.unscaled.items() if name not in cleared}
            self._now.kept = magnitudes(watched for watched in self._parameters if watched.name in self._now.unscaled)

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Record the constant factor that the loop applied to the loss, and the tensors that it reaches."""
        self._lost.backward_called(self._now.lost, losses)
        self._now.multiplied_by = constant_factor(losses)

    def loss_scaled(self, losses: list[torch.Tensor], scaled: list[torch.Tensor], micro_batch: int) -> None:
        """Record that a scaler is in use."""
        self._now.is_scaled = True

    def parameter_gradient(self, gradient: ParameterGradient, backward: Backward) -> None:
        """Record that a gradient has arrived."""
        self.parameter_gradients([gradient], backward)

    def parameter_gradients(self, gradients: list[ParameterGradient], backward: Backward) -> None:
        """Record that gradients have arrived, and whether their backward's loss was scaled."""
        names = [each.watched.name for each in gradients]
        self._now.arrived.update(names)
        self._now.scale = backward.scale.value
        if backward.scale.value != 1.0:
            self._now.scaled.update(names)
        if backward.scale.is_aside:
            self._now.aside.update(names)

    def backward_ends(self) -> None:
        """Record the gradients after a backward, and drop earlier records: a closure may run a backward within the step."""
        self._now.backwards += 1
        self._now.moments.clear()
        self._now.stepping.clear()
        self._now.with_masters.clear()
        self._add("given", self._parameters)
        self._now.lost.last = self._now.moments["given"][-1]

    def clipping(self, parameters: list[WatchedParameter], limit: object, norm: torch.Tensor) -> None:
        """Record the gradients that a loop with a scale of its own is about to clip, and whether the limit contains the scale."""
        is_first = self.at_work and not self._now.is_scaled and self._now.clip is None and is_plain(norm)
        # A loop may clip to infinity for the norm alone.
        largest, scale = float(limit) if isinstance(limit, (int, float)) else math.inf, self._now.scale or 0.0
        self._now.has_scaled_limit |= scale > 1 and max(_SCALED_LIMIT, _OF_SCALE * scale) <= largest < math.inf
        if is_first and largest < math.inf and scale > 1:
            self._now.clip = largest, HostCopy(norm.detach().reshape(1).float())
            self._add("clipped", parameters)

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients before a scaler unscales them."""
        self._add("scaled", self._optimizers.parameters(optimizer))
        names = {watched.name for watched in self._optimizers.parameters(optimizer)}
        self._now.never_scaled |= (names & self._now.aside) - self._now.scaled
        counts = {name: self._now.unscaled.get(name, 0) + 1 for name in names}
        again = {name: count for name, count in counts.items() if count > 1}
        if again and self._now.kept is not None:
            self._now.again = self._now.kept, again
        self._now.unscaled |= counts

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients after a scaler has unscaled them."""
        self._add("unscaled", self._optimizers.parameters(optimizer))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients that the optimizer receives."""
        if not self.at_work:
            return
        self._now.lost.last = None
        self._add("handed", self._optimizers.parameters(optimizer))
        self._see_in_place()
        names = {watched.name for watched in self._optimizers.parameters(optimizer)}
        # An optimizer from elsewhere may divide by a scale itself.
        lr = optimizer.param_groups[0].get("lr") if type(optimizer).__module__.startswith("torch.optim.") else None
        self._now.lr = float(lr) if isinstance(lr, (int, float)) else math.nan
        self._now.stepping |= names
        self._optimized |= names
        self._masters.optimizer_steps(optimizer)
        masters = list(self._masters.of(optimizer))
        if masters:
            self._now.with_masters.update(master.name for master in masters)
            self._optimized |= self._now.with_masters
            self._add("masters", masters)
        # A fused optimizer receives the scale and divides by it within its step.
        if self._now.is_scaled and getattr(optimizer, "grad_scale", None) is None:
            divided = (name for each in self._now.moments["unscaled"] for names in each.values.names for name in names)
            still = (names & self._now.scaled).difference(divided)
            self._now.still_scaled |= still
            self._now.divided_early |= still & self._now.unscaled.keys()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped: gradients still present at the next backward are left over."""
        self._stepped = True
        if self._masters.writes_gradients(optimizer):
            self._now.with_masters.difference_update(each.name for each in self._masters.of(optimizer))
        self.step_skipped(optimizer)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the counts of unscaling for the optimizer's gradients, which are used up."""
        self._see_in_place()
        if self._now.unscaled:
            for watched in self._optimizers.parameters(optimizer):
                self._now.unscaled.pop(watched.name, None)

    def end_step(self, step: int, sampled: bool) -> None:
        """Compare the magnitudes at the four moments, for the steps whose copies are complete; record the differences."""
        super().end_step(step, sampled)
        if not self.at_work:
            return
        now, ever = self._now, frozenset(self._ever)
        self._ever |= now.arrived
        self._arrivals.call(now.copies(), partial(self._judge, step, now, ever))

    def run_ends(self) -> None:
        """Record the masters' divisor, optimized parameters without a gradient, and parameters with one but no optimizer."""
        super().run_ends()
        for lost in self._lost.found():
            self._record(lost)
        self._record_changing_scale()
        self._masters.settle()
        if self._divisors and all(divisor >= _DIVIDED for divisor in self._divisors):
            weights = tuple(each.name for each in self._masters.weights())
            least, most, steps = min(self._divisors), max(self._divisors), len(self._divisors)
            found = MastersGivenSmaller(step=self._clock.step, names=weights, least=least, most=most, steps=steps)
            self._record_names(found)
        if not self._optimized or not self._ever:
            return
        step, of = self._clock.step, len(self._parameters)
        never, only_ever = self._optimized - self._ever, self._ever - self._optimized
        missing: dict[str, list[str]] = {}
        for watched in self._parameters:
            if watched.parameter.requires_grad and watched.name in never:
                how = _HOW_CALLED[self._called.get(watched.owner)] if self._called else "unknown"
                missing.setdefault(how, []).append(watched.name)
        for how, names in missing.items():
            self._record_names(MissingGradients(step=step, names=tuple(names), of=of, **{how: True}))  # type: ignore[arg-type]
        left_out = [watched for watched in self._parameters if watched.name in only_ever]
        # An unknown tensor in an optimizer may be a copy of one of these parameters.
        if left_out and not self._masters.may_be_of(left_out):
            elements, idle = sum(watched.parameter.numel() for watched in self._parameters), self._masters.idle()
            share = sum(watched.parameter.numel() for watched in left_out) / max(elements, 1)
            names_left_out = tuple(watched.name for watched in left_out)
            unfrozen = len((self._frozen or set()).intersection(names_left_out))
            left = NotOptimized(step=step, names=names_left_out, fraction=share, idle=idle, unfrozen=unfrozen)
            self._record_names(left)

    def _see_in_place(self) -> None:
        """Record which gradients that earlier steps left have been added to."""
        if self.at_work and self._now.left:
            # A script may replace the gradients, for example by the results of torch.autograd.grad, which does not accumulate.
            here = self._gradients_places()
            self._now.in_place |= {name for name, place in self._now.places.items() if here.get(name) == place}

    def _record_changing_scale(self) -> None:
        """Record a loss scale of the loop that changed, if no step divided the gradients and no learning rate followed it."""
        steps = self._scaled_by_loop
        if not all(each.is_undivided and each.lr > 0 for each in steps):
            return
        for before, after in pairwise(steps):
            fallen = before.factor / after.factor
            if fallen != 1 and abs(math.log2(after.lr / before.lr / fallen)) >= 0.5:
                found = SteppedOnChangingScale(
                    step=after.step, before=before.factor, after=steps[-1].factor, steps=len(steps)
                )
                self._record(found)
                return

    # -- inside -----------------------------------------------------------------------------------------------------

    def _judge(self, step: int, seen: _Step, ever: frozenset[str]) -> None:
        """Record the faults of one step; ``ever``: the parameters that had received a gradient before it."""
        found = [*_stale(seen, ever), *_changed(seen), *_left_over(seen)]
        given = {name: value for name, value in seen.read("given").items() if name in seen.with_masters}
        is_whole = seen.backwards == len(seen.left) or not seen.lost.is_proof
        if seen.is_measured and seen.stepping and not seen.with_masters and is_whole:
            at_step = dict.fromkeys(seen.stepping, 0.0) | seen.read("handed")
            self._lost.judge(step, seen.lost, seen.read("given"), at_step)
            self._scaled_by_loop += _scaled_by_loop(step, seen)
        handed = seen.read("masters")
        # A loop may skip a step by passing no gradients to its optimizer.
        is_skipped = bool(_broken(given)) and not handed
        if seen.is_measured and seen.backwards and seen.with_masters and not is_skipped:
            handed = dict.fromkeys(given, 0.0) | handed
            change = _change(Change, ratios(given, handed), ())
            self._divisors.append(1 / change.factor if change.is_uniform and change.factor else math.nan)
            found += _changed_in_masters(seen, given, handed)
        for record in found:
            if record.names:
                self._record_names(replace(record, step=step))

    def _add(self, moment: str, parameters: Iterable[WatchedParameter]) -> None:
        """Add an optimizer's gradients to the record of a moment."""
        self._now.moments[moment].append(magnitudes(parameters))

    def _gradients_places(self) -> dict[str, int]:
        """Return the address of each plain gradient's memory."""
        gradients = ((watched.name, watched.parameter.grad) for watched in self._parameters)
        return {name: gradient.data_ptr() for name, gradient in gradients if is_plain(gradient)}


# -- rules over the evidence of a step: they yield records, those without names if nothing is wrong ----------------------


def _changed(seen: _Step) -> Iterator[Record]:
    """Yield the changes of gradients between their backward, the scaler's division and the optimizer's step."""
    given, scaled, unscaled = seen.read("given"), seen.read("scaled"), seen.read("unscaled")
    if not given:
        return
    yield from _divided_too_often(seen, scaled)
    factors = ratios(given, scaled)
    names = () if seen.has_scaled_limit else _named(factors)
    at_limit = max(Counter(scaled[name] for name in names).values(), default=0)
    yield _change(ChangedWhileScaled, factors, names, at_limit=float(at_limit))
    # A gradient that is None at the optimizer's step counts as zero.
    handed = dict.fromkeys(seen.stepping, 0.0) | seen.read("handed")
    yield _clipped_by_loop(seen, given, handed)
    # The changes between the last known gradients (after unscaling if there is a scaler) and the optimizer's step.
    before, moment = (unscaled, "unscaled") if unscaled else (given, "given")
    zeroed = [name for name, ratio in ratios(before, handed).items() if ratio == 0 or math.isnan(ratio)]
    by = None if seen.is_scaled else seen.multiplied_by
    yield _changed_before_step(seen, moment, before, handed, zeroed, multiplied_by=by)
    # A backward of torch.autograd.grad adds nothing to the gradients.
    kept = seen.kept.read() if seen.divided_early and seen.kept is not None else {}
    summed = {name for name, value in given.items() if kept.get(name) != value}
    still = {name: ratio for name, ratio in ratios(given, handed).items() if name in seen.still_scaled & summed}
    yield _change(SteppedWhileScaled, still, still, divided_early=bool(seen.divided_early))
    replaced = [name for name in _broken(given) if math.isfinite(handed.get(name, math.nan))]
    yield ReplacedBeforeStep(names=tuple(replaced), of=len(given))


def _scaled_by_loop(step: int, seen: _Step) -> Iterator[_ScaledByLoop]:
    """Yield the step if the loop itself multiplied its loss by a power of two and all gradients stayed finite."""
    factors = ratios(seen.read("given"), seen.read("handed")).values()
    scale = seen.multiplied_by
    if scale and is_power_of_two(scale) and not seen.is_scaled and factors and all(map(math.isfinite, factors)):
        yield _ScaledByLoop(step, scale, seen.lr, is_undivided=set(factors) == {1.0})


def _clipped_by_loop(seen: _Step, given: Mapping[str, float], handed: Mapping[str, float]) -> Record:
    """Return the change by a clip of gradients that the loop divides by its own scale afterwards."""
    undivided = {name for name, ratio in ratios(given, seen.read("clipped")).items() if ratio == 1}
    changed = _change(Change, {name: each for name, each in ratios(given, handed).items() if name in undivided}, ())
    if seen.clip is None or seen.has_scaled_limit or not changed.is_uniform or not seen.scale:
        return ChangedWhileScaled(factor=1.0)
    limit, norm = seen.clip
    clip = limit / (float(norm.values()[0]) + _EPSILON)
    is_divided = math.isclose(changed.factor * seen.scale, clip, rel_tol=_SAME)
    names = tuple(undivided) if is_divided and clip < _CLIPPED else ()
    return ChangedWhileScaled(factor=clip, is_uniform=True, of=changed.of, names=names)


def _changed_in_masters(seen: _Step, given: Mapping[str, float], handed: Mapping[str, float]) -> Iterator[Record]:
    """Yield gradients that became zero (None counts as zero) or finite on their way to the masters."""
    # With several backwards an earlier one may have been infinite, so only a single one is judged.
    is_single = seen.backwards == 1
    factors = ratios(given, handed)
    zeroed = [name for name, ratio in factors.items() if ratio == 0 or (is_single and math.isnan(ratio))]
    if zeroed:
        yield _changed_before_step(seen, "given", given, handed, zeroed, masters=True)
    replaced = [name for name in _broken(given) if is_single and 0 < handed[name] < math.inf]
    yield ReplacedBeforeStep(names=tuple(replaced), of=len(given))


def _changed_before_step(
    seen: _Step,
    moment: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    zeroed: Sequence[str],
    **figures: Any,
) -> ChangedBeforeStep:
    """Return the change from ``before``, values of a moment, to ``after``, the values that the optimizer receives."""
    factors = ratios(before, after)
    return _change(
        ChangedBeforeStep,
        factors,
        zeroed or _named(factors),
        zeroed=len(zeroed),
        sum_of_squares=math.fsum(part.sum_of_squares() for part in seen.moments[moment]),
        not_finite=len(_broken(before)),
        nans=len(_broken(after)),
        largest=max(filter(math.isfinite, after.values()), default=0.0),
        **figures,
    )


def _divided_too_often(seen: _Step, scaled: Mapping[str, float]) -> Iterator[Record]:
    """Yield gradients that a scaler divided a second time, or whose loss no scaler had scaled."""
    never = [name for name in scaled if name in seen.never_scaled and scaled[name] > 0]
    yield UnscaledNeverScaled(names=tuple(never), of=len(scaled))
    if seen.again is not None:
        kept, counts = seen.again
        again = [name for name, value in kept.read().items() if value > 0 and name in counts]
        times = max((counts[name] for name in again), default=0)
        yield UnscaledAgain(names=tuple(again), of=len(counts), times=times)


def _stale(seen: _Step, ever: frozenset[str]) -> Iterator[Record]:
    """Yield the gradients that the optimizer received although no backward of this step produced them."""
    if seen.arrived:
        handed = seen.read("handed") | seen.read("masters")
        stale = [name for name, value in handed.items() if value > 0 and name in ever and name not in seen.arrived]
        yield Stale(names=tuple(stale), parameters=len(stale), of=len(handed))


def _left_over(seen: _Step) -> Iterator[Record]:
    """Yield gradients left over at the step's first backward, unless a later backward began with zeros (zero_grad())."""
    left = [found.read() for found in seen.left]
    # NaN != 0 is true, so left-over NaNs count as well.
    # A frozen parameter may keep the last gradient from its training.
    added_to = seen.in_place & seen.arrived
    old = [name for first in left[:1] for name, value in first.items() if value != 0 and name in added_to]
    if old and all(any(value != 0 for value in values.values()) for values in left):
        largest, of = max(filter(math.isfinite, left[0].values()), default=0.0), len(seen.read("given"))
        yield LeftOver(names=tuple(old), parameters=len(old), of=of, largest=largest, not_finite=len(_broken(left[0])))


def ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return each finite gradient's factor of change, by name; NaN if it is no longer finite."""
    return {
        name: after[name] / value if math.isfinite(after[name]) else math.nan
        for name, value in before.items()
        if name in after and math.isfinite(value) and value > 0
    }


def _broken(values: Mapping[str, float]) -> list[str]:
    return [name for name, value in values.items() if not math.isfinite(value)]


def _named(ratios: Mapping[str, float]) -> list[str]:
    return [name for name, ratio in ratios.items() if ratio != 1]


def _change(kind: type[AnyChange], ratios: Mapping[str, float], names: Iterable[str], **figures: Any) -> AnyChange:
    """Return the record of a change of these gradients: their median factor, and whether all gradients share it."""
    names, finite = tuple(names), [ratio for ratio in ratios.values() if math.isfinite(ratio)]
    of_names = [ratios[name] for name in names if math.isfinite(ratios.get(name, math.nan))]
    factor = statistics.median(of_names or finite or [math.nan])
    is_uniform = bool(finite) and all(abs(ratio - factor) <= _SAME * abs(factor) for ratio in finite)
    return kind(names=names, factor=factor, is_uniform=is_uniform, of=len(ratios), **figures)
