"""The report as JSON: every field. The schema: docs/report-schema.md."""

from __future__ import annotations

from typing import Any

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis.report import Coverage, RangeReport
from mpinspect.ranges.session import LostUpdates, Session, Window
from mpinspect.reporting.json_text import Layout, Special, fields, headed, plain

#: Containers down to this depth get a line for each of their members, deeper ones one line in all: a layer is two lines or so.
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
    # The layers hold the sum of a window's histograms, the session file holds each.
    Window: lambda window: fields(window, but=("tensors",)),
    # Events stand in the report itself.
    Session: lambda session: fields(session, but=("events",)),
}
