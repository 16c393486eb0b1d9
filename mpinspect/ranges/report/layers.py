"""Selects, groups and ranks layers for tables and plots, and computes their flushed shares and range strips."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import FORMATS, FloatFormat, floor_log2
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.windows.tensors import TensorInfo
from mpinspect.reporting.document import Strip
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import NEGLIGIBLE, share

Named = TypeVar("Named", LayerReport, TensorInfo)

#: Powers of two drawn below the flush edge.
_BELOW = 15


def seen_layers(report: RangeReport) -> list[LayerReport]:
    """Return the layers that were counted at least once, in the model's order."""
    return [layer for layer in report.layers if layer.samples and layer.histogram is not None]


@dataclass(frozen=True)
class Repeated:
    """A single layer, or a group of layers that a model's blocks repeat.

    Args:
        name: the layer's name, or the group's merged name: "h.{0..11}.attn.weight".
        worst: the member that loses most.
        members: all layers of the group.
    """

    name: str
    worst: LayerReport
    members: tuple[LayerReport, ...]

    @property
    def range_offset(self) -> int | None:
        """The smallest of the members' range offsets; None if no member has values."""
        return min((layer.range_offset for layer in self.members if layer.range_offset is not None), default=None)

    @property
    def max_exponent(self) -> int | None:
        """The largest exponent in any member; None if none has a finite non-zero value."""
        return max((layer.max_exponent for layer in self.members if layer.max_exponent is not None), default=None)


def repeated(layers: Iterable[LayerReport], at_most: int | None = 0) -> list[Repeated]:
    """Group layers whose names differ only in their blocks' numbers; groups are in the order of their first members.

    A number in the last part of a module's path is not a block's number: layers of one Sequential are not repetitions.

    Args:
        layers: any layers.
        at_most: if there are at most this many layers, each stands alone; None: never group.
    """
    layers = list(layers)
    if at_most is None or len(layers) <= at_most:
        return [Repeated(layer.name, layer, (layer,)) for layer in layers]
    return [
        Repeated(common_name([layer.name for layer in group]), max(group, key=badness), tuple(group))
        for group in by_pattern(layers)
    ]


def by_pattern(layers: Iterable[Named]) -> list[list[Named]]:
    """Group layers of one kind and module class whose names differ only in the numbers of their blocks."""
    groups: dict[tuple[object, ...], list[Named]] = {}
    for layer in layers:
        parts = layer.name.split(".")
        last = layer.module.count(".") if layer.module else len(parts)
        pattern: tuple[str, ...] = tuple(
            "" if place < last and part.isdigit() else part for place, part in enumerate(parts)
        )
        groups.setdefault((layer.kind, layer.module_type, *pattern), []).append(layer)
    return list(groups.values())


def common_name(names: list[str]) -> str:
    """Merge names that differ only in numbers: "h.{0..11}.attn.weight", or "h.{0,2,5}.attn.weight"."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_alternatives(list(dict.fromkeys(parts))) for parts in columns)


def _alternatives(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


#: The counts of a layer without any, and the share of one that loses nothing.
EMPTY, _NONE = ExponentHistogram.from_counts([], 0), Interval(0.0, 0.0, 0.0)


def badness(layer: LayerReport) -> tuple[float, ...]:
    """Return a sort key, larger for worse layers.

    In order: infinities, NaNs, not rounding noise, overflow, lost updates, lost L1 share, flushed share.
    """
    histogram = layer.histogram or EMPTY
    lost = max((update.fraction for update in (layer.lost_updates or {}).values()), default=0.0)
    return (
        # An infinity is nearer to where it began than a NaN.
        (histogram.infs > 0) + (histogram.nonfinite > 0),
        not layer.rounding_noise,
        bool(layer.overflowed),
        lost,
        (layer.lost_l1_share or _NONE).high,
        (layer.flushed_fraction or _NONE).estimate,
    )


def names_in(findings: Iterable[Finding]) -> frozenset[str]:
    """Return the names that findings are about: their layers, and the names that their sentences put in quotes."""
    quoted = (re.findall(r"'([^']+)'", f"{finding.message} {finding.fix}") for finding in findings)
    return frozenset(name for names in quoted for name in names) | {finding.layer for finding in findings} - {""}


def log2_of(scale: float | None) -> float | None:
    """Return log2 of a scale that is positive and finite; None for any other and for an unknown one."""
    return math.log2(scale) if scale is not None and 0 < scale < math.inf else None


def log2_recommended(advice: LossScaleAdvice) -> int | None:
    """Return the recommended scale as a power of two, rounded down; None where there is none."""
    return None if advice.recommended is None else floor_log2(advice.recommended)


def flushed_at_recommended(layer: LayerReport, report: RangeReport) -> Interval | None:
    """Return the share of non-zero elements flushed at the recommended scale; None without a scale or values."""
    return _at_recommended(Visibility.flushed_fraction, layer, report)


def lost_l1_at_recommended(layer: LayerReport, report: RangeReport) -> Interval | None:
    """Return the share of the sum of magnitudes lost at the recommended scale; None without a scale or values."""
    return _at_recommended(Visibility.lost_l1_share, layer, report)


def _at_recommended(
    share_of: Callable[[Visibility, FloatFormat, int], Interval], layer: LayerReport, report: RangeReport
) -> Interval | None:
    k = log2_recommended(report.loss_scale)
    if k is None or layer.representative is None or layer.lost_l1_share is None:
        return None
    return share_of(Visibility(layer.representative, layer.floor_exponent), FORMATS[report.format], k)


def has_no_values(layer: LayerReport) -> bool:
    """Return whether a counted layer has no finite non-zero value, not even a flushed one, so that it has no shares of them."""
    histogram, lost = layer.histogram, layer.lost_l1_share
    return histogram is not None and not histogram.nonzero and (lost is None or not lost.high)


def flushed_words(layer: LayerReport, elements: Interval | None) -> str:
    """Return a share of elements in words, with bounds only as far as the lost L1 share lets them matter."""
    lost = layer.lost_l1_share
    if lost is None or lost.high > LOST_L1_TOLERANCE:
        return share(elements)
    if lost.high > NEGLIGIBLE:
        return share(elements, near=1.0)
    return share(elements, near=1.0, negligible=1.0)


def overflowed_share(histogram: ExponentHistogram, format: FloatFormat) -> Interval:
    """Return the share of the non-zero elements that overflow at scale 1; bounds where the counts leave it open."""
    least, most = (number / max(histogram.nonzero, 1) for number in histogram.overflowed_bounds(format))
    return Interval(most, least, most)


def range_strip(histogram: ExponentHistogram, format: FloatFormat) -> Strip:
    """Return shares of the non-zero elements by exponent: below the format's flush edge, up to its top, and beyond."""
    # Surviving exponents begin one below the smallest subnormal's: values above half of it round up to it.
    edge, top = format.flush_exponent, format.max_exponent + 1
    low = edge - _BELOW
    bins = [0] * (top - low)
    below = above = 0
    for exponent, count in enumerate(histogram.counts.tolist(), histogram.min_exponent):
        if exponent < low:
            below += count
        elif exponent >= top:
            above += count
        else:
            bins[exponent - low] += count
    # Half the smallest subnormal itself rounds to zero: it belongs left of the edge.
    ties = histogram.flushed(format) - below - sum(bins[:_BELOW])
    bins[_BELOW - 1] += ties
    bins[_BELOW] -= ties
    whole = max(histogram.nonzero, 1)
    shares = tuple(count / whole for count in bins)
    return Strip(below / whole, (shares[:_BELOW], shares[_BELOW:]), above / whole)
