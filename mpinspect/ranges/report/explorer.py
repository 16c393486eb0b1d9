"""The interactive map of a run's layers: packs the run's counts for a script that computes every figure from them.

Beside the counts it packs the loss scale's history, the events and the lost updates, which share one axis of steps.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FORMATS, FloatFormat
from mpinspect.ranges.analysis.evidence import own_scale
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.faults.registry import what_broke
from mpinspect.ranges.kinds import TABLE, UPDATE
from mpinspect.ranges.report.layers import log2_of, log2_recommended, repeated, seen_layers
from mpinspect.ranges.report.opening import Opening, blocks_of, never_zeroed, opening, power_of
from mpinspect.ranges.report.scale_line import event_facts, event_line, event_maxima, events_line, in_same_places
from mpinspect.ranges.session import Event, ScaleChange, Session
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.document import Tone, Widget
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.streams import printable
from mpinspect.reporting.words import class_beside, format_name, with_power

#: Most histograms in a page: 2,000 layers in 8 blocks of the run make a file of some megabytes.
_MOST_HISTOGRAMS = 16_000
#: Most blocks of the run on the slider.
_MOST_BLOCKS = 24


class NoteCell(NamedTuple):
    """A cell in the rows of a module's layers; sorting by its column puts the largest ``rank`` first."""

    text: str
    tone: Tone = ""
    rank: float = 0.0


@dataclass(frozen=True)
class ModuleNotes:
    """Facts of other reports about the model's modules, shown with the layers of each.

    Args:
        columns: headings of further columns of the map's table, and their meanings.
        cells: by module's path, a cell for each column.
        lines: by module's path, sentences shown when one of its layers is chosen.
    """

    columns: tuple[tuple[str, str], ...] = ()
    cells: Mapping[str, tuple[NoteCell, ...]] = field(default_factory=dict)
    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


NO_NOTES = ModuleNotes()


#: Kind, name, share elsewhere and first step moved of tensors, see ``Mapped``.
Changes: TypeAlias = tuple[tuple[str, str, float, "int | None"], ...]


class Mapped(NamedTuple):
    """A model to show on a map: its name on the page, its report, and notes on its modules."""

    name: str
    report: RangeReport
    notes: ModuleNotes = NO_NOTES
    #: In a comparison with another run, how its tensors changed: the one that moved first, then the most moved.
    changes: Changes = ()


def picture(*models: Mapped, of: str = "Model") -> Widget | None:
    """Return the map for a page's front, which opens with the model that broke; None if no tensor was counted.

    ``of`` names the choice if there are several.
    """
    found = next(widget(*models), None)
    if found is None:
        return None
    shown = [model for model in models if _shown(model.report)]
    broke = [place for place, model in enumerate(shown) if what_broke(model.report) is not None]
    worst = max(range(len(shown)), key=lambda place: (place in broke, _gravity(shown[place].report), -place))
    return replace(found, title="", first=worst, of=of)


def _gravity(report: RangeReport) -> int:
    return max((SEVERITIES.index(finding.severity) for finding in report.findings), default=-1)


def widget(*models: Mapped, together: bool = False) -> Iterator[Widget]:
    """Yield the map of the models, with a choice of one if there are several; nothing if no tensor was counted.

    Args:
        together: whether the page opens with the maps of all models, which move together.
    """
    shown = [model for model in models if _shown(model.report)]
    if not shown:
        return
    yield Widget(
        "The maps" if together and len(shown) > 1 else "The map",
        "mpinspect.ranges.report",
        "explorer",
        tuple((model.name, partial(packed, *model[1:3], model.name, model.changes)) for model in shown),
        "The interactive map needs JavaScript; the tables have the same figures.",
        together,
    )


def packed(report: RangeReport, notes: ModuleNotes = NO_NOTES, name: str = "", changes: Changes = ()) -> str:
    """Return ``data(...)`` as gzipped JSON in base64."""
    text = json.dumps(data(report, notes, name, changes), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode("ascii")


def data(report: RangeReport, notes: ModuleNotes = NO_NOTES, name: str = "", changes: Changes = ()) -> dict[str, Any]:
    """Return the data of the script: formats, every tensor's counts in each block of the run, and the run's history.

    ``name`` distinguishes the model from others on its page; "" stands for its class. ``changes`` are as in ``Mapped``.
    """
    layers = _shown(report)
    updates = [layer for layer in seen_layers(report) if layer.kind == UPDATE]
    limit = max(1, min(_MOST_BLOCKS, _MOST_HISTOGRAMS // (len(layers) + len(updates))))
    windows = blocks_of(report.session, what_broke(report), limit)
    first = opening(report, layers, windows)
    groups, group_of = [], {}
    for place, group in enumerate(repeated(layers)):
        groups.append({"name": printable(group.name), "size": len(group.members)})
        group_of.update(dict.fromkeys((layer.key for layer in group.members), place))
    progress = report.session.progress
    own, has_collapsed = own_scale(report.session)
    return {
        "model": printable(name or report.session.info.model),
        "format": first.format,
        "opening": _opening(report, first),
        # No loss scale repairs a run that broke for another reason.
        "suggested": _suggested(report) if first.has_curve or not report.events else None,
        "own": power_of(own or 1.0),
        "collapsed": has_collapsed,
        "windows": {
            format: window
            for format, advice in ((report.format, report.loss_scale), ("float16", report.in_float16))
            if (window := _window(advice)) is not None
        },
        # Whether keeping a module in FP32 takes FP32 weights first.
        "narrow_weights": bool({FLOAT16.name, BFLOAT16.name} & set(report.session.precision.weights)),
        "computes": computes.name if (computes := run_format(report.session)) else "",
        "steps": progress.steps,
        "skipped": progress.skipped_steps,
        "scales": [(change.step, log2_of(change.scale)) for change in _scales(report.session)],
        "by_hand": _by_hand(report),
        "held": list(_held(report)),
        "events": [_event(event) for event in report.session.events],
        "places": list(_places(report.session.events)),
        "lost": _lost_updates(report, windows),
        "formats": [_format(format) for format in FORMATS.values()],
        "kinds": [
            {"name": kind.name, "title": kind.title, "is_scaled": kind.is_scaled}
            for kind in TABLE
            if kind.name != UPDATE
        ],
        "blocks": [
            {"first": window.first_step, "last": window.last_step, "counted": window.sampled_steps}
            for window in windows
        ],
        "groups": groups,
        "tensors": [_tensor(layer, group_of[layer.key], windows) for layer in layers],
        # Shown next to a module's tensors, not in a map: flushing does not decide whether an update is lost.
        "updates": [_tensor(layer, 0, windows) for layer in updates],
        "notes": _notes(notes),
        "changes": [(kind, printable(tensor), *figures) for kind, tensor, *figures in changes],
    }


def _scales(session: Session) -> tuple[ScaleChange, ...]:
    """Return the changes of the loss scale with the one that follows from the last skipped step."""
    return (*session.scale_history(), *filter(None, [session.last_fall()]))


def _by_hand(report: RangeReport) -> str:
    """Return the loss scale, or its range, that the loop applies itself and that gradients thus arrive with; "" without one."""
    found = (each.evidence for each in report.findings if each.id == "scaler-missing-in-float16")
    scales = (each[name] for each in found for name in ("least", "most") if name in each)
    return " to ".join(dict.fromkeys(with_power(scale) for scale in scales if isinstance(scale, float)))


def _opening(report: RangeReport, first: Opening) -> dict[str, Any]:
    found = first.culprit
    return {
        "scale": first.scale,
        "kind": found.kind,
        "block": first.block,
        "marked": list(map(printable, found.marked)),
        "near": list(map(printable, found.near)),
        # The row for a culprit without a tensor of its own; "after": whether it follows the rows that are near.
        "name": printable(report.session.with_classes(found.name) + report.session.class_beside(found.name)),
        "after": found.is_after,
        "said": printable(report.session.with_classes(found.said)),
        "at": printable(found.at),
        "phase": found.phase,
        "step": found.step,
        "until": first.until,
        "curve": first.has_curve,
        "elsewhere": first.is_elsewhere,
        "grave": bool(report.verdict.ended) or any(each.severity == SEVERITIES[-1] for each in report.findings),
        "words": printable(first.words),
    }


def _notes(notes: ModuleNotes) -> dict[str, Any]:
    return {
        "columns": notes.columns,
        "cells": {printable(module): cells for module, cells in notes.cells.items()},
        "lines": {printable(module): list(map(printable, lines)) for module, lines in notes.lines.items()},
    }


def _tensor(layer: LayerReport, group: int, windows: Sequence[Window]) -> dict[str, Any]:
    return {
        "name": printable(layer.name),
        "module": printable(layer.module),
        # After the name, for a reader.
        "type": printable(class_beside(layer.module, layer.module_type)),
        "kind": layer.kind,
        "group": group,
        "floor": layer.floor_exponent,
        "noise": layer.rounding_noise,
        "blocks": _blocks(layer, windows),
    }


def _suggested(report: RangeReport) -> tuple[str, int] | None:
    """Return the format that needs a loss scale, and the scale suggested for it; None if none is needed or known."""
    for format, advice in ((report.format, report.loss_scale), ("float16", report.in_float16)):
        if advice is not None and advice.needed is not False and (scale := log2_recommended(advice)) is not None:
            return format, scale
    return None


def _window(advice: LossScaleAdvice | None) -> tuple[int, int] | None:
    """Return the window of safe scales as powers of two, rounded inwards; None if there is none or its lower end is unknown."""
    if advice is None or advice.needed is None or advice.lowest is None or advice.highest is None:
        return None
    window = math.ceil(math.log2(advice.lowest)), math.floor(math.log2(advice.highest))
    return window if window[0] <= window[1] else None


def _places(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Yield, for events that follow each other in the same place, words and the first one's index."""
    first = 0
    for group in in_same_places(events):
        yield {"first": first, "words": printable(events_line(group))}
        first += len(group)


def _held(report: RangeReport) -> Iterator[tuple[int, float]]:
    """Yield the steps whose gradients were added to earlier ones, with the largest magnitude in .grad as a power of two."""
    finding = never_zeroed(report)
    if finding is not None:
        sums = zip(finding.evidence["steps"], finding.evidence["largest"], strict=True)
        yield from ((step, math.log2(largest)) for step, largest in sums if 0 < largest < math.inf)


def _event(event: Event) -> dict[str, Any]:
    return {
        "step": event.step,
        "module": printable(event.module),
        "tensor": printable(event.tensor),
        "kind": event.what,
        "value": event.value,
        "skipped": bool(event.skipped),
        "words": printable(event_line(event)),
        "facts": printable("; ".join(event_facts(event))),
        "explanation": printable(event.explanation),
        "maxima": event_maxima(event),
    }


def _lost_updates(report: RangeReport, windows: Sequence[Window]) -> dict[str, Any]:
    """Return, by storage format, each parameter's lost and non-zero updates in each block, and whether they were measured."""
    found: dict[str, Any] = {}
    for layer in report.layers:
        for storage, whole in (layer.lost_updates or {}).items():
            of_storage = found.setdefault(storage, {"label": format_name(storage), "measured": True, "tensors": {}})
            of_storage["measured"] &= whole.measured
            blocks = [window.tensors.get(layer.key) for window in windows]
            updates = [None if tensor is None else tensor.lost_updates.get(storage) for tensor in blocks]
            of_storage["tensors"][printable(layer.name)] = [each and (each.lost, each.nonzero) for each in updates]
    return found


def has_map(report: RangeReport) -> bool:
    """Return whether a tensor was counted that the map shows."""
    return bool(_shown(report))


def _shown(report: RangeReport) -> list[LayerReport]:
    """Return the counted layers of the map, which has no updates."""
    return [layer for layer in seen_layers(report) if layer.kind != UPDATE]


def _blocks(layer: LayerReport, windows: Sequence[Window]) -> list[list[Any] | None]:
    found = [window.tensors.get(layer.key) for window in windows]
    return [None if tensor is None else _histogram(tensor.histogram) for tensor in found]


def _histogram(histogram: ExponentHistogram) -> list[Any]:
    """Return the histogram's fields in the order that the script's ``unpack`` expects."""
    return [
        histogram.min_exponent,
        histogram.zeros,
        histogram.infs,
        histogram.nans,
        histogram.min_significand,
        histogram.max_significand,
        histogram.counts.tolist(),
        histogram.powers_of_two.tolist(),
        histogram.near_top.tolist(),
    ]


def _format(format: FloatFormat) -> dict[str, Any]:
    return {
        "name": format.name,
        "label": format_name(format.name),
        "low": format.min_subnormal_exponent,
        "normal": format.min_normal_exponent,
        "top": format.max_exponent,
        "edge": format.overflow_significand,
        "tie": format.overflow_edge_overflows,
        "flush": format.flush_exponent,
        "ftz": format.flushes_subnormals,
    }
