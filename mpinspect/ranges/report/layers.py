"""The layers as tables and pictures take them: which were seen, which are worst, what they flush, where their values lie."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import FORMATS, FloatFormat
from mpinspect.ranges.analysis.report import LayerReport, LossScaleAdvice, RangeReport
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.reporting.document import Strip

#: Powers of two that are drawn below the flush edge.
_BELOW = 15


def seen_layers(report: RangeReport) -> list[LayerReport]:
    """Return the layers that were counted at least once, in the model's order; those that never fired stand under coverage."""
    return [layer for layer in report.layers if layer.samples and layer.histogram is not None]


@dataclass(frozen=True)
class Repeated:
    """A layer, or one that a model's blocks repeat.

    Args:
        name: of the one, or as in "h.{0..11}.attn.weight".
        worst: the one that loses most of them.
        members: all of them.
    """

    name: str
    worst: LayerReport
    members: tuple[LayerReport, ...]


def one_by_one(layers: Iterable[LayerReport]) -> list[Repeated]:
    """Return each layer by itself."""
    return [Repeated(layer.name, layer, (layer,)) for layer in layers]


def repeated(layers: Iterable[LayerReport]) -> list[Repeated]:
    """Return the layers, those as one whose names differ in the numbers of their blocks alone, in the order of the first of each.

    The last part of a module's path is no block's: the layers of a Sequential do not repeat one another.
    """
    groups: dict[tuple[object, ...], list[LayerReport]] = {}
    for layer in layers:
        parts = layer.name.split(".")
        last = layer.module.count(".") if layer.module else len(parts)
        pattern = tuple("" if place < last and part.isdigit() else part for place, part in enumerate(parts))
        groups.setdefault((layer.kind, layer.module_type, *pattern), []).append(layer)
    return [
        Repeated(_common_name([layer.name for layer in group]), max(group, key=badness), tuple(group))
        for group in groups.values()
    ]


def _common_name(names: list[str]) -> str:
    """As in "h.{0..11}.attn.weight", or "h.{0,2,5}.attn.weight"."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_alternatives(list(dict.fromkeys(parts))) for parts in columns)


def _alternatives(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def worst(layers: Iterable[LayerReport], limit: int) -> list[LayerReport]:
    """Return the ``limit`` layers that lose most, worst first; all of them in the model's order if they are not more."""
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


def log2_recommended(advice: LossScaleAdvice) -> int | None:
    """Return the recommended scale as a power of two, rounded down; None where there is none."""
    return None if advice.recommended is None else math.frexp(advice.recommended)[1] - 1


def flushed_at_recommended(layer: LayerReport, report: RangeReport) -> Interval | None:
    """Share of the non-zero elements that flush at the recommended scale; None without a scale or without values."""
    k = log2_recommended(report.loss_scale)
    if k is None or layer.histogram is None or layer.flushed_fraction is None:
        return None
    return Visibility(layer.histogram, layer.floor_exponent).flushed_fraction(FORMATS[report.format], k)


def range_strip(histogram: ExponentHistogram, format: FloatFormat) -> Strip:
    """Return shares of the non-zero elements by exponent: below the format's flush edge, between that and its top, and beyond."""
    # The exponents that survive begin at the smallest subnormal's less one: its upper half rounds up.
    edge, top = format.min_subnormal_exponent - 1, format.max_exponent + 1
    low = edge - _BELOW
    first = histogram.min_exponent
    counts = (histogram.counts / max(histogram.nonzero, 1)).tolist()
    bins = [0.0] * (top - low)
    below = above = 0.0
    for exponent, fraction in enumerate(counts, first):
        if exponent < low:
            below += fraction
        elif exponent >= top:
            above += fraction
        else:
            bins[exponent - low] += fraction
    return Strip(below, (tuple(bins[:_BELOW]), tuple(bins[_BELOW:])), above)
