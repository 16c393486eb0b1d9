"""A probe's report as JSON: every field but the reference session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis.agreement import GradientAgreement
from mpinspect.reporting.json_text import Layout, Special, fields, headed, plain

if TYPE_CHECKING:
    from mpinspect.ranges.probe import ProbeReport

LAYOUT = Layout(9, indent=1)


def document(report: ProbeReport) -> dict[str, Any]:
    """The report as plain dicts, lists, strings, numbers, booleans and None."""
    body = fields(report, also=("largest_difference",), but=("layers", "reference")) | {"layers": report.layers}
    return headed("mpinspect.probe", 1, plain(body, _SPECIAL))


def _histogram(histogram: ExponentHistogram) -> dict[str, Any]:
    names = ("min_exponent", "counts", "zeros", "infs", "nans")
    return {name: getattr(histogram, name) for name in names}


_FRACTIONS = ("predicted_flushed_fraction", "measured_flushed_fraction", "lost_upstream_fraction")
_SPECIAL: Special = {
    ExponentHistogram: _histogram,
    GradientAgreement: lambda found: fields(found, also=_FRACTIONS),
}
