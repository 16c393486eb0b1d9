"""Chooses the first view of a run's map: the place where it broke, FP16's effect on an FP32 run, or the run as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mpinspect.numeric.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, floor_log2
from mpinspect.ranges.analyse import judged_in
from mpinspect.ranges.analysis.evidence import own_scale
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.registry import depends_on_scale, part_of, shows_in_ranges, what_broke
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, WEIGHT, WEIGHT_GRADIENT, kind_named
from mpinspect.ranges.report.place import code_of, heading, is_of, line_of, phase_of
from mpinspect.ranges.session import LOSSES, Event, Session
from mpinspect.ranges.windows.window import Window, coarsen
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import format_name, steps_named

#: The whole run, in place of one of its blocks.
WHOLE = -1
_FP8 = (FLOAT8_E4M3.name, FLOAT8_E5M2.name)
#: Kinds of tensor, the nearest to a module's output first.
_NEAREST = (ACTIVATION, ACTIVATION_GRADIENT, WEIGHT_GRADIENT, WEIGHT)


class Culprit(NamedTuple):
    """The place that is to blame, and the rows that show it.

    Args:
        kind: the kind of tensor; "" if no tensor is to blame, which leaves the choice to the map.
        marked: names of the tensors of that kind that are the culprit's own.
        near: if there are none, names of those that are part of it, or of the nearest one.
        name: of a row of its own; "" without a culprit, and if ``marked`` has rows.
        said: the event there or the fault, in a few words without the step.
        at: the line of the script and the operator; "" where the ranges show the fault.
        phase: "forward" or "backward", if ``at`` is known.
        step: the step in which it began; None if it belongs to no step.
        is_after: whether the row of its own stands after the ones that are near.
        words: a sentence on the rows that are marked.
    """

    kind: str
    marked: tuple[str, ...]
    near: tuple[str, ...] = ()
    name: str = ""
    said: str = ""
    at: str = ""
    phase: str = ""
    step: int | None = None
    is_after: bool = False
    words: str = ""


_NOBODY = Culprit("", ())
_OF_EACH_BACKWARD = "The map shows each backward's own gradients; the optimizer takes .grad, the sum of all so far."
_NOT_SHOWN = "The ranges do not show this fault."
_NEXT_TO_IT = "\u25b7: parts or neighbours of the marked row."


class Opening(NamedTuple):
    """The layer, step and scale that a map shows at first.

    Args:
        format: name of the format.
        scale: the loss scale, a power of two.
        culprit: the place that is to blame; empty without one.
        block: index of the block of steps, or WHOLE.
        has_curve: whether the losses at other loss scales matter, so that their curve is shown.
        is_elsewhere: whether something is to blame, but neither a layer nor the loss scale.
        words: sentences on the marked and shown tensors; "" without any.
        until: the last step in trouble, of a run that skipped all steps that were not finite; None if that is not known.
    """

    format: str
    scale: int
    culprit: Culprit = _NOBODY
    block: int = WHOLE
    has_curve: bool = True
    is_elsewhere: bool = False
    words: str = ""
    until: int | None = None


def blocks_of(session: Session, event: Event | None, limit: int) -> tuple[Window, ...]:
    """Return the windows merged to about ``limit`` blocks; the last window before the event stays as it was counted."""
    windows = session.windows
    before = [window for window in windows if event is not None and window.last_step < event.step]
    if len(windows) <= limit or limit < 3 or not before:
        return coarsen(windows, limit)
    earlier, last, later = before[:-1], before[-1], windows[len(before) :]
    share = max(1, min(limit - 2, round((limit - 1) * len(earlier) / (len(windows) - 1))))
    return (*coarsen(earlier, share), last, *coarsen(later, max(1, limit - 1 - share)))


def opening(report: RangeReport, layers: Sequence[LayerReport], blocks: Sequence[Window]) -> Opening:
    """Return the layer, step and scale that the map shows at first.

    Args:
        layers: the layers on the map.
        blocks: the blocks of steps that the map can show.
    """
    event = what_broke(report)
    finding = next((each for each in report.findings if each.is_alarm), None)
    format, is_other = _format(report, event, finding)
    # A format in which the run does not compute is judged without a loss scale.
    scale = 0 if is_other else _own(report.session)
    found = _culprit(event, finding, layers, report.layers)
    if found is _NOBODY:
        found = _of_end(report, layers)
    has_curve = depends_on_scale(finding, event) if finding is not None else not found.said
    block, words = WHOLE, found.words
    is_in_ranges = finding is not None and shows_in_ranges(finding)
    is_elsewhere = bool(found.name) and not (found.kind or has_curve or is_in_ranges or format in _FP8)
    if is_elsewhere:
        words = _NOT_SHOWN
    if never_zeroed(report) is not None:
        words = f"{words} {_OF_EACH_BACKWARD}".lstrip()
    if format in _FP8 and not found.kind and any(layer.kind == ACTIVATION_GRADIENT for layer in layers):
        found = found._replace(kind=ACTIVATION_GRADIENT)
    if is_other and (format in _FP8 or (not found.kind and format == FLOAT16.name)):
        words = f"{words} {_what_if(report, format)}".lstrip()
    if event is not None:
        first = event.step if found.step is None else min(event.step, found.step)
        block = _healthy(first, found.kind, found.marked or found.near, blocks)
        words = f"{words} {_shown(first, block, blocks)}".strip()
        if not is_other:
            step = event.step if block == WHOLE else blocks[block].last_step
            scale = _scale_at(report.session, step, scale)
    return Opening(format, scale, found, block, has_curve, is_elsewhere, words, _last_skipped(event, report))


def _last_skipped(event: Event | None, report: RangeReport) -> int | None:
    """Return the last step with an event if the run skipped each from this event on; None if a later step may be in trouble.

    That is so where the run ended sooner after the last event than the next one was due.
    """
    steps = {each.step: each.skipped for each in report.events if event is not None and each.step >= event.step}
    # The recording may have left out further ones.
    is_whole = report.session.progress.skipped_steps <= len({each.step for each in report.events if each.skipped})
    if not steps or not all(steps.values()) or not is_whole:
        return None
    longest = max((later - earlier for earlier, later in pairwise(sorted(steps))), default=0)
    return max(steps) if report.session.progress.steps - max(steps) > longest else None


def _format(report: RangeReport, event: Event | None, finding: Finding | None) -> tuple[str, bool]:
    """Return the format, and whether the run computes in another one.

    That is the format in which the run computes. It is the judged one if that was asked for, the one to which a cast of
    gradients is to blame, and FP16 for an FP32 run that did not break: FP32 itself loses nothing.
    """
    computes = run_format(report.session)
    if computes is None or report.format != judged_in(report.session).name:
        return report.format, computes is not None and computes.name != report.format
    evidence = {} if finding is None or event is not None else finding.evidence
    if evidence.get("dtype") in _FP8 and str(evidence.get("phase")).startswith("backward"):
        return evidence["dtype"], True
    if computes == FLOAT32 and event is None:
        return FLOAT16.name, True
    return computes.name, False


def _what_if(report: RangeReport, format: str) -> str:
    computes = run_format(report.session)
    assert computes is not None
    own, shown, scale = format_name(computes.name), format_name(format), "scale" if format in _FP8 else "loss scale"
    return f"The run computes in {own}; the map shows what {shown} would do without a {scale}."


def _own(session: Session) -> int:
    own, _ = own_scale(session)
    return power_of(own or 1.0)


def _scale_at(session: Session, step: int, otherwise: int) -> int:
    """Return the loss scale of a step as a power of two, rounded down."""
    *_, scale = (None, *(change.scale for change in session.scale_history() if change.step <= step))
    return power_of(scale) if scale and math.isfinite(scale) and scale > 0 else otherwise


def power_of(scale: float) -> int:
    """Return a loss scale as a power of two, rounded down unless it is within 1% of the next one."""
    return floor_log2(1.01 * scale)


def never_zeroed(report: RangeReport) -> Finding | None:
    """Return the finding that gradients add up over the steps; None without one. The ranges are of each backward alone."""
    return next((each for each in report.findings if each.id == "gradients-never-zeroed"), None)


# -- the culprit ----------------------------------------------------------------------------------------------------


def _culprit(
    event: Event | None, finding: Finding | None, layers: Sequence[LayerReport], watched: Sequence[LayerReport]
) -> Culprit:
    """Return the culprit; empty if nothing is to blame."""
    if event is not None and (finding is None or is_of(finding, event)):
        return _of_event(event, finding, layers, watched)
    if finding is None:
        return _NOBODY
    said = heading(finding)
    is_in_ranges, phase = shows_in_ranges(finding), phase_of(finding)
    if not finding.layer:
        name = line_of(finding) or part_of(finding) or "no single layer"
        operator = code_of(finding).removeprefix(line_of(finding)).removeprefix(": ")
        return Culprit("", (), (), name, said, operator and f"{operator}: {said}", step=finding.step)
    found = _in_module(finding.layer, said, finding.step, layers, watched)
    if is_in_ranges:
        return found
    words = _not_counted(ACTIVATION, found.kind, layers) if phase == "forward" else _NOT_SHOWN
    return found._replace(at=code_of(finding), phase=phase, words=f"{words} {found.words}".strip())


def _of_end(report: RangeReport, layers: Sequence[LayerReport]) -> Culprit:
    """Return the module in which an exception ended the run, else the run itself; empty for a run that no exception ended."""
    error = report.session.ended_by
    if error is None or not report.verdict.ended:
        return _NOBODY
    # The row has the module's name.
    said, _, _ = report.verdict.ended.partition(" of " if error.name else ": ")
    step = error.step if error.step or error.figures.get("begun") else None
    if not error.name:
        return Culprit("", (), (), "the run", said, step=step)
    found = _in_module(error.name, said, step, layers, report.layers)
    return found._replace(words=f"{_NOT_SHOWN} {found.words}".strip())


def _in_module(
    module: str, said: str, step: int | None, layers: Sequence[LayerReport], watched: Sequence[LayerReport]
) -> Culprit:
    """Return a module or tensor as the culprit."""
    kind, near, is_own = _nearest(module, "", module, layers, watched)
    if is_own:
        return Culprit(kind, near, said=said, step=step)
    return Culprit(kind, (), near, module, said, step=step, words=_NEXT_TO_IT)


def _of_event(
    event: Event, finding: Finding | None, layers: Sequence[LayerReport], watched: Sequence[LayerReport]
) -> Culprit:
    """Return the place where an event arose; ``finding``: the gravest one, if it is about the event."""
    first = "NaN" if event.value == "nan" else "infinity"
    said = f"first {first}"
    at = code_of(finding) if finding is not None and finding.layer in ("", event.module) else ""
    kind, near, is_own = _nearest(event.module, event.what, event.tensor, layers, watched, given=event.given)
    words = "" if event.given else _not_counted(event.what, kind, layers)
    # The code after a module is not a part of it.
    if is_own and not event.after:
        return Culprit(kind, near, said=said, at=at, phase=event.phase, step=event.step, words=words)
    is_loss = event.what in LOSSES and not event.module
    if not event.module and not event.given and not is_loss:
        # The model's own code is nearest to no layer.
        near = ()
    name = event.module if event.module and not event.after else event.place
    is_after, words = event.after or is_loss, f"{words} {_NEXT_TO_IT if near else ''}".strip()
    return Culprit(kind, (), near, name, said, at, event.phase, event.step, is_after, words)


def _not_counted(missing: str, shown: str, layers: Sequence[LayerReport]) -> str:
    """Return a sentence on the tensors that show the fault, if none of them was counted."""
    if missing in (shown, *LOSSES, *(layer.kind for layer in layers)):
        return ""
    titles = kind_named(missing).title, kind_named(shown).title.lower()
    return "{} were not counted: these are {}.".format(*titles)


def _nearest(
    path: str,
    kind: str,
    tensor: str,
    layers: Sequence[LayerReport],
    watched: Sequence[LayerReport],
    *,
    given: bool = False,
) -> tuple[str, tuple[str, ...], bool]:
    """Return the kind and the names of the tensors nearest to a module, and whether they are its own, not those of its parts.

    Args:
        path: the module's path; "" for the model itself.
        kind: the kind looked for; "" for any.
        tensor: name of the tensor looked for.
        watched: all layers in the model's order, those among them that were never counted.
        given: whether the model's input is meant.
    """
    kinds = sorted({layer.kind for layer in layers}, key=lambda each: (each != kind, _NEAREST.index(each)))
    for each in kinds:
        named = tuple(layer.name for layer in layers if (layer.kind, layer.name) == (each, tensor))
        if named and (each == kind or (tensor and not kind)):
            return each, named, True
    for each in kinds:
        inside = [layer for layer in layers if layer.kind == each and path and _is_inside(layer, path)]
        if inside:
            return each, tuple(layer.name for layer in inside), all(layer.module == path for layer in inside)
    of_kind = [layer for layer in layers if layer.kind == kinds[0]]
    places = {layer.key: place for place, layer in enumerate(watched)}
    # The loss follows the last layer.
    end = -1 if given else len(watched)
    sought = [
        place for place, layer in enumerate(watched) if path and (layer.name == tensor or _is_inside(layer, path))
    ] or [end]
    middle = sum(sought) / len(sought)
    near = min(reversed(of_kind), key=lambda layer: abs(places[layer.key] - middle))
    return kinds[0], (near.name,), False


def _is_inside(layer: LayerReport, path: str) -> bool:
    return layer.module == path or f"{layer.module}.".startswith(f"{path}.")


# -- the steps ------------------------------------------------------------------------------------------------------


def _healthy(step: int, kind: str, names: Sequence[str], blocks: Sequence[Window]) -> int:
    """Return the last block before the step in which these tensors were counted and finite; WHOLE if there is none.

    Without names all tensors of the kind are meant.
    """
    for place in reversed(range(len(blocks))):
        if blocks[place].last_step >= step:
            continue
        tensors = [
            tensor.histogram
            for key, tensor in blocks[place].tensors.items()
            if key.kind == kind and (not names or key.name in names)
        ]
        if any(counts.nonzero for counts in tensors) and not any(counts.nonfinite for counts in tensors):
            return place
    return WHOLE


def _shown(step: int, block: int, blocks: Sequence[Window]) -> str:
    if block == WHOLE:
        return f"No healthy step was counted before step {step:,}." if step else ""
    window = blocks[block]
    named = steps_named(window.first_step, window.last_step)
    return f"Shown: {named}, the last counted sample before step {step:,}."
