"""The layers' rows as words, and which of them are worst: what text and Markdown print and the pictures pick from.

Three different words: a *measured* figure stands bare, an *estimate* is marked "~", with its bounds in brackets where they
are far enough apart to decide something, and what is not known is "?". "-" means that the question does not arise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.analysis.report import LayerReport, LossScaleAdvice, RangeReport
from mpinspect.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.analysis.visibility import Visibility
from mpinspect.exponents import Interval
from mpinspect.formats import FORMATS
from mpinspect.session import GRADIENT_KINDS, KINDS

#: Bounds of a flushed share that are no further apart decide nothing. Of the L1 share the tolerance decides.
_NEAR = 0.1

UNKNOWN = "?"
NOT_APPLICABLE = "-"

#: Headings by kind, in the order in which reports show them.
TITLES = dict(
    zip(KINDS, ("Weight gradients", "Activation gradients", "Activations", "Weights", "Updates"), strict=True)
)


@dataclass(frozen=True)
class LayerRow:
    """One layer in words. ``remarks``: what else a reader of the row must know, each a few words."""

    name: str
    kind: str
    range_offset: str
    flushed: str
    lost_l1_share: str
    subnormal: str
    flushed_scaled: str
    largest: str
    remarks: tuple[str, ...]


def layer_row(layer: LayerReport, report: RangeReport) -> LayerRow:
    """The figures of one layer at scale 1 and, for gradients, at the recommended scale."""
    return LayerRow(
        name=layer.name or "(the model)",
        kind=layer.kind,
        range_offset=UNKNOWN if layer.range_offset is None else str(layer.range_offset),
        flushed=share(layer.flushed_fraction),
        lost_l1_share=share(layer.lost_l1_share, is_estimate=True),
        subnormal=UNKNOWN if layer.subnormal_fraction is None else percent(layer.subnormal_fraction),
        flushed_scaled=share(flushed_at_recommended(layer, report)) if layer.kind in GRADIENT_KINDS else NOT_APPLICABLE,
        largest=largest(layer),
        remarks=tuple(_remarks(layer)),
    )


def flushed_at_recommended(layer: LayerReport, report: RangeReport) -> Interval | None:
    """Share of the non-zero elements that flush at the recommended scale; None without a scale or without values."""
    k = log2_recommended(report.loss_scale)
    if k is None or layer.histogram is None or layer.flushed_fraction is None:
        return None
    return Visibility(layer.histogram, layer.floor_exponent).flushed_fraction(FORMATS[report.format], k)


def log2_recommended(advice: LossScaleAdvice) -> int | None:
    """The recommended scale as a power of two, rounded down; None where there is none."""
    return None if advice.recommended is None else math.frexp(advice.recommended)[1] - 1


def seen_layers(report: RangeReport) -> list[LayerReport]:
    """The layers that were counted at least once, in the model's order; those that never fired stand under coverage."""
    return [layer for layer in report.layers if layer.samples and layer.histogram is not None]


def worst(layers: Iterable[LayerReport], limit: int) -> list[LayerReport]:
    """The ``limit`` layers that lose most, worst first; all of them in the model's order if they are not more."""
    found = list(layers)
    return found if len(found) <= limit else sorted(found, key=badness, reverse=True)[:limit]


def badness(layer: LayerReport) -> tuple[float, ...]:
    """Sorts layers: what is not finite or overflows, then lost updates, lost L1 share, flushed share; noise last."""
    histogram = layer.histogram
    broken = histogram.infs + histogram.nans if histogram is not None else 0
    lost = max((update.fraction for update in (layer.lost_updates or {}).values()), default=0.0)
    return (
        not layer.rounding_noise,
        broken > 0,
        bool(layer.overflowed),
        lost,
        layer.lost_l1_share.estimate if layer.lost_l1_share else 0.0,
        layer.flushed_fraction.estimate if layer.flushed_fraction else 0.0,
    )


def share(interval: Interval | None, *, is_estimate: bool = False) -> str:
    """A share in words: "87%" measured, "~9.8%" or "~9.8% [2.5%..35%]" estimated, "?" unknown.

    Args:
        interval: the share, its bounds shown where they are further apart than 10% (of the lost L1 share, 1%).
        is_estimate: of the lost L1 share, which counts can only estimate.
    """
    if interval is None:
        return UNKNOWN
    low, high = percent(interval.low), percent(interval.high)
    if interval.low == interval.high:
        return low
    if low == high:
        return f"~{low}" if is_estimate else low
    near = interval.high - interval.low <= (LOST_L1_TOLERANCE if is_estimate else _NEAR)
    return f"~{percent(interval.estimate)}{'' if near else f' [{low}..{high}]'}"


def percent(fraction: float) -> str:
    """A share 0..1 with two significant digits, never rounded to 0% or 100%: "87%", "0.3%", "<0.001%", "99.97%"."""
    value = 100 * fraction
    if value == 0 or value == 100:
        return f"{value:.0f}%"
    if value < 0.001:
        return "<0.001%"
    if value < 10:
        return f"{value:.2g}%"
    return f"{value:.0f}%" if value < 99.5 else f"{value:.4g}%" if value < 99.995 else ">99.99%"


def largest(layer: LayerReport) -> str:
    """Largest finite magnitude as a power of two, rounded down."""
    if layer.histogram is None:
        return UNKNOWN
    return f"2^{layer.histogram.max_exponent}" if layer.histogram.nonzero else NOT_APPLICABLE


def power_of_two(scale: float | None) -> str:
    """A scale in words: "8192 (2^13)", "2^-3", "2^40"; "?" for None."""
    if scale is None:
        return UNKNOWN
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        return f"{scale:g}"
    return f"{scale:.0f} (2^{exponent - 1})" if 1 <= exponent <= 25 else f"2^{exponent - 1}"


def _remarks(layer: LayerReport) -> Iterable[str]:
    histogram = layer.histogram
    if histogram is not None and histogram.infs + histogram.nans:
        yield f"{histogram.infs:,} inf, {histogram.nans:,} NaN"
    if layer.overflowed:
        yield f"{layer.overflowed:,} overflow"
    if histogram is not None and not histogram.nonzero:
        yield "all zero" if histogram.zeros else "no finite value"
    if layer.rounding_noise:
        yield "rounding noise"
