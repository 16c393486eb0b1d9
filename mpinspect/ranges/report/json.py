"""The report as JSON, with every field; docs/report-schema.md describes the schema."""

from __future__ import annotations

from typing import Any

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import Coverage, RangeReport
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import LostUpdates
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.json_text import Layout, Special, fields, headed, plain

#: Containers down to this depth have one line per member, deeper ones a single line: a layer takes about two lines.
LAYOUT = Layout(3)


def to_plain(report: RangeReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None, keys in the order of the fields."""
    return headed("mpinspect.report", 1, plain(report, _SPECIAL))


def _coverage(coverage: Coverage) -> dict[str, Any]:
    never = [dict(zip(("name", "kind", "reason"), entry, strict=True)) for entry in coverage.never_fired]
    return fields(coverage) | {"never_fired": never}


_SPECIAL: Special = {
    ExponentHistogram: lambda histogram: fields(histogram, also=("nonzero", "total", "min_abs", "max_abs")),
    LostUpdates: lambda updates: fields(updates, also=("fraction",)),
    Coverage: _coverage,
    # Weights belong to how shares are estimated; the counts are of the samples.
    LayerReport: lambda layer: fields(layer, but=("weighed",)),
    # The layers hold the sums of the windows' histograms; only the session file holds each window's.
    Window: lambda window: fields(window, but=("tensors",)),
    # The report itself has the events.
    Session: lambda session: fields(session, but=("events",)),
}
