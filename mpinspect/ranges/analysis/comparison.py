"""Compares the range reports of two runs: the first step that differs, layers, settings, events, the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mpinspect.numeric.exponents import ratio
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.changed_settings import Change, changed_settings
from mpinspect.ranges.analysis.drift import LEAST_RISE
from mpinspect.ranges.analysis.first_line import first_line, gravest
from mpinspect.ranges.analysis.layer_report import LayerReport, layer_report
from mpinspect.ranges.analysis.parting import Course, Stretch, courses, stretches
from mpinspect.ranges.analysis.ranges import tensor_infos
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.kinds import phrase
from mpinspect.ranges.session import Event, Progress
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow
from mpinspect.ranges.windows.window import merge_windows
from mpinspect.reporting.finding import INFERRED, SEVERITIES, Finding, gravest_first
from mpinspect.reporting.words import and_more, as_power, steps_named

#: The ids of the findings on the differences of two runs.
RANGE_DIFF_IDS = (
    *("events-differ", "layers-differ", "layers-moved", "runs-part"),
    *("scale-window-moved", "settings-differ", "steps-not-shared"),
)
_INFO, _WARNING, _ = SEVERITIES

#: First and last step of a stretch.
Steps = tuple[int, int]


@dataclass(frozen=True)
class LayerChange:
    """How one tensor differs between two runs, over the steps compared.

    Args:
        name, kind: see TensorKey.
        differs_from: the first stretch of steps with unequal counts; None if all are equal.
        moved_from: the first stretch where the tensor moved (``parting``); None if it did not.
        elsewhere_fraction: share of the elements that would have to move to another power of two (or to or from zeros,
            infinities and NaNs) to give the other run's counts; mean over the stretches, 0..1, measured.
        beyond_fraction: the part of ``elsewhere_fraction`` beyond the tensor's usual change between stretches; estimated.
        zeros_fraction: share of the elements that are zero, in either run.
        first, second: reports on either run's counts in these steps.
    """

    name: str
    kind: str
    differs_from: Steps | None
    moved_from: Steps | None
    elsewhere_fraction: float
    beyond_fraction: float
    zeros_fraction: tuple[float, float]
    first: LayerReport
    second: LayerReport


@dataclass(frozen=True)
class Parting:
    """The first stretch where two runs differ, and the tensor that differs most in it.

    Args:
        first_step, last_step: the stretch.
        name, kind: the tensor, see TensorKey.
        elsewhere_fraction, zeros_fraction: as in LayerChange, in this stretch.
        tensors: number of tensors that differ in it.
    """

    first_step: int
    last_step: int
    name: str
    kind: str
    elsewhere_fraction: float
    zeros_fraction: tuple[float, float]
    tensors: int


@dataclass(frozen=True)
class Compared:
    """The extent of a comparison.

    Args:
        steps: the first and the last step compared; None if the runs counted no steps in common.
        sampled_steps: number of steps that the second run counted in the stretches compared.
        stretches: number of stretches compared.
        same_steps: number of stretches where both runs certainly counted the same steps, so that counts can be equal.
        tensors: number of tensors that both runs counted.
    """

    steps: Steps | None
    sampled_steps: int
    stretches: int
    same_steps: int
    tensors: int


@dataclass(frozen=True)
class RangeDiff:
    """The differences of two runs of a model.

    Args:
        first, second: the reports, judged in the same format.
        compared: the scope of the comparison.
        settings: the settings that differ.
        differs: the first place where counts differ; None if all comparable counts are equal.
        moved: the first place where a tensor changed by more than its usual variation; None without one.
        layers: the tensors that both runs counted, the most moved first.
        only_first, only_second: the tensors that only the first, or only the second run counted.
        events_only_first, events_only_second: the events of only the first, or only the second run.
        scales_part: the first step with different loss scales, and both scales (None: unknown); None if they agree.
        differences: findings on the differences.
        new: findings of the second run that the first lacks or has at a lower severity.
        gone: findings of the first run that the second lacks or has at a lower severity.
    """

    first: RangeReport
    second: RangeReport
    compared: Compared
    settings: tuple[Change, ...]
    differs: Parting | None
    moved: Parting | None
    layers: tuple[LayerChange, ...]
    only_first: tuple[TensorKey, ...]
    only_second: tuple[TensorKey, ...]
    events_only_first: tuple[Event, ...]
    events_only_second: tuple[Event, ...]
    scales_part: tuple[int, float | None, float | None] | None
    differences: tuple[Finding, ...] = ()
    new: tuple[Finding, ...] = ()
    gone: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The differences and the new findings, the gravest first."""
        return tuple(gravest_first((*self.differences, *self.new)))


def compare_ranges(first: RangeReport, second: RangeReport) -> RangeDiff:
    """Return the differences of two reports on runs of one model, judged in the same format."""
    aligned = stretches(first.session, second.session)
    counted = [{layer.key: None for layer in report.layers if layer.samples} for report in (first, second)]
    keys = [key for key in counted[0] if key in counted[1]]
    found = courses(aligned, keys)
    events = [{_identity(event): event for event in report.events} for report in (first, second)]
    diff = RangeDiff(
        first=first,
        second=second,
        compared=_compared(aligned, len(keys)),
        settings=tuple(changed_settings(first.session, second.session)),
        differs=_parting(aligned, found, lambda course: course.differs),
        moved=_parting(aligned, found, lambda course: course.moved),
        layers=tuple(sorted(_layers(aligned, found, first), key=_badness, reverse=True)),
        only_first=tuple(key for key in counted[0] if key not in counted[1]),
        only_second=tuple(key for key in counted[1] if key not in counted[0]),
        events_only_first=tuple(event for at, event in events[0].items() if at not in events[1]),
        events_only_second=tuple(event for at, event in events[1].items() if at not in events[0]),
        scales_part=scales_part(first.session.progress, second.session.progress),
    )
    return replace(
        diff,
        differences=tuple(_differences(diff)),
        new=_added(first.findings, second.findings),
        gone=_added(second.findings, first.findings),
    )


def _added(before: Sequence[Finding], after: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings of ``after`` that ``before`` lacks or has at a lower severity."""
    known: dict[tuple[str, str], int] = {}
    for finding in before:
        at = finding.id, finding.layer
        known[at] = max(known.get(at, 0), SEVERITIES.index(finding.severity))
    return tuple(f for f in after if SEVERITIES.index(f.severity) > known.get((f.id, f.layer), -1))


# -- where they part ----------------------------------------------------------------------------------------------------


def _compared(aligned: Sequence[Stretch], tensors: int) -> Compared:
    steps = None
    if aligned:
        steps = aligned[0].first_step, aligned[-1].last_step
    counted = sum(stretch.second.sampled_steps for stretch in aligned)
    return Compared(steps, counted, len(aligned), sum(stretch.same_steps for stretch in aligned), tensors)


def _parting(
    aligned: Sequence[Stretch], found: Mapping[TensorKey, Course], where: Callable[[Course], int | None]
) -> Parting | None:
    """Return the earliest stretch that ``where`` yields for any tensor, and the tensor that differs most in it."""
    at = min((row for course in found.values() if (row := where(course)) is not None), default=None)
    if at is None:
        return None
    there = [key for key, course in found.items() if where(course) == at]
    # A tensor that only one run counted there has no distance and differs most.
    key = max(there, key=lambda key: _or(found[key].elsewhere[at], 1.0))
    stretch = aligned[at]
    zeros = tuple(_zeros(window.tensors.get(key)) for window in (stretch.first, stretch.second))
    share = _or(found[key].elsewhere[at], 1.0)
    return Parting(stretch.first_step, stretch.last_step, *key, share, (zeros[0], zeros[1]), len(there))


def _layers(
    aligned: Sequence[Stretch], found: Mapping[TensorKey, Course], report: RangeReport
) -> Iterator[LayerChange]:
    infos = tensor_infos(report.session, found)
    format = FORMATS[report.format]
    sides = zip(*((each.first, each.second) for each in aligned), strict=True)
    totals = [merge_windows(*windows).tensors for windows in sides]
    for key, course in found.items():
        if any(key not in side for side in totals):
            continue
        one, other = (side[key] for side in totals)
        yield LayerChange(
            key.name,
            key.kind,
            _steps(aligned, course.differs),
            _steps(aligned, course.moved),
            _mean(course.elsewhere),
            _mean(course.beyond),
            (_zeros(one), _zeros(other)),
            layer_report(infos[key], one, format),
            layer_report(infos[key], other, format),
        )


def _badness(change: LayerChange) -> tuple[bool, float, float]:
    return change.moved_from is not None, change.beyond_fraction, change.elsewhere_fraction


def _steps(aligned: Sequence[Stretch], row: int | None) -> Steps | None:
    return None if row is None else (aligned[row].first_step, aligned[row].last_step)


def _zeros(tensor: TensorWindow | None) -> float:
    if tensor is None:
        return 0.0
    return ratio(tensor.histogram.zeros, tensor.histogram.total)


def _mean(shares: Sequence[float]) -> float:
    known = [share for share in shares if not math.isnan(share)]
    return ratio(sum(known), len(known))


def _or(share: float, unknown: float) -> float:
    return unknown if math.isnan(share) else share


# -- events and scales --------------------------------------------------------------------------------------------------


def _identity(event: Event) -> tuple[object, ...]:
    return event.step, event.micro_batch, event.phase, event.module, event.what, event.tensor, event.value


def scales_part(first: Progress, second: Progress) -> tuple[int, float | None, float | None] | None:
    """Return the first step with different loss scales, and both scales; None if they agree over the steps of both runs."""
    one, other = ({change.step: change.scale for change in run.scales} for run in (first, second))
    if not one or not other:
        return None
    end = min(first.steps, second.steps)
    here, there = next(iter(one.values())), next(iter(other.values()))
    for step in sorted({*one, *other}):
        here, there = one.get(step, here), other.get(step, there)
        if here != there and step <= end:
            return step, here, there
    return None


# -- findings -----------------------------------------------------------------------------------------------------------


def _differences(diff: RangeDiff) -> Iterator[Finding]:
    if diff.differs is not None:
        yield _parts(diff.differs)
    elif not diff.compared.same_steps:
        yield Finding("steps-not-shared", _INFO, "", _not_shared(diff.compared), {"stretches": diff.compared.stretches})
    if diff.moved is not None:
        yield _moved(diff, diff.moved)
    if diff.only_first or diff.only_second:
        yield _layers_differ(diff)
    if diff.settings:
        names = [change.name for change in diff.settings]
        yield Finding("settings-differ", _INFO, "", f"These settings differ: {', '.join(names)}.", {"settings": names})
    if diff.events_only_first or diff.events_only_second:
        yield _events_differ(diff)
    yield from _scale_window(diff.first.loss_scale, diff.second.loss_scale)


def _parts(parting: Parting) -> Finding:
    named = steps_named(parting.first_step, parting.last_step)
    where = phrase(parting.name, parting.kind) + and_more(parting.tensors - 1)
    message = f"The counts differ from {named} on, in {where}."
    return Finding("runs-part", _INFO, parting.name, message, {"tensors": parting.tensors}, step=parting.first_step)


def _not_shared(compared: Compared) -> str:
    if not compared.stretches:
        return "The runs counted no steps in common: only totals can be compared."
    return (
        "The runs did not count the same steps: the comparison shows how far counts differ, not whether they are equal."
    )


def _moved(diff: RangeDiff, parting: Parting) -> Finding:
    moved = [change for change in diff.layers if change.moved_from is not None]
    named = steps_named(parting.first_step, parting.last_step)
    message = (
        f"{len(moved):,} of {len(diff.layers):,} tensors moved beyond their usual variation, first "
        f"{phrase(parting.name, parting.kind)} in {named}."
    )
    evidence = {"moved": len(moved), "of": len(diff.layers), "elsewhere_fraction": parting.elsewhere_fraction}
    return Finding(
        "layers-moved",
        _WARNING,
        parting.name,
        message,
        evidence,
        "Look at the settings that differ, and at this layer in both reports.",
        certainty=INFERRED,
        step=parting.first_step,
    )


def _layers_differ(diff: RangeDiff) -> Finding:
    first, second = len(diff.only_first), len(diff.only_second)
    names = [*diff.only_first, *diff.only_second]
    message = f"{first:,} tensors were counted only in A, {second:,} only in B."
    return Finding("layers-differ", _INFO, names[0].name, message, {"only_first": first, "only_second": second})


def _events_differ(diff: RangeDiff) -> Finding:
    """Return the finding on events that only one run has: a warning if an event of the second run did harm."""
    harm = gravest(diff.events_only_second)
    shown = harm or next(iter((*diff.events_only_second, *diff.events_only_first)))
    whose = "B" if shown in diff.events_only_second else "A"
    message = f"Infinities or NaNs only in {whose}, first at {first_line(shown)}."
    evidence = {"only_first": len(diff.events_only_first), "only_second": len(diff.events_only_second)}
    severity = _WARNING if harm else _INFO
    return Finding("events-differ", severity, shown.module, message, evidence, step=shown.step)


def _scale_window(first: LossScaleAdvice, second: LossScaleAdvice) -> Iterator[Finding]:
    """Yield a finding if the windows of safe scales, where both are known, moved by LEAST_RISE powers of two."""
    lows, highs = [_lowest(advice) for advice in (first, second)], [advice.highest for advice in (first, second)]
    apart = [abs(math.log2(one) - math.log2(other)) for one, other in (lows, highs) if one and other]
    if max(apart, default=0) < LEAST_RISE:
        return
    # If the windows share no scale, every scale that suits one run breaks the other.
    disjoint = any(low and high and low > high for low, high in zip(lows, reversed(highs), strict=True))
    was, now = (f"{as_power(low)} .. {as_power(high)}" for low, high in zip(lows, highs, strict=True))
    message = f"The window of safe loss scales is {was} in A and {now} in B."
    evidence = {"first": [lows[0], highs[0]], "second": [lows[1], highs[1]]}
    yield Finding("scale-window-moved", _WARNING if disjoint else _INFO, "", message, evidence)


def _lowest(advice: LossScaleAdvice) -> float | None:
    """Return the window's lower end; None if values flushed before counting leave it unknown."""
    return None if advice.needed is None else advice.lowest
