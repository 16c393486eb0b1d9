"""The layers' rows as words, and which of them are worst: what text and Markdown print and the pictures pick from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.report import LayerReport, LossScaleAdvice, RangeReport
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.reporting.words import NOT_APPLICABLE, UNKNOWN, percent, share


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
        lost_l1_share=share(layer.lost_l1_share, is_estimate=True, near=LOST_L1_TOLERANCE),
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


def largest(layer: LayerReport) -> str:
    """Largest finite magnitude as a power of two, rounded down."""
    if layer.histogram is None:
        return UNKNOWN
    return f"2^{layer.histogram.max_exponent}" if layer.histogram.nonzero else NOT_APPLICABLE


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
