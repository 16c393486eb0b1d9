"""Plots gradient exponents against a format's range, unscaled and scaled, as in the GTC 2018 mixed-precision talk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.numeric.formats import FORMATS, FloatFormat
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.kinds import GRADIENT_KINDS, kind_named
from mpinspect.ranges.report.layers import log2_recommended, overflowed_share, seen_layers
from mpinspect.ranges.report.scale_line import scale_in_brief
from mpinspect.reporting.plot_style import (
    INK,
    LEAST_SHARE,
    exponent_axis,
    exponent_limits,
    headline,
    legend_below,
    notes,
    percent_axis,
    shares,
    shortened,
)
from mpinspect.reporting.words import filled, format_name, percent, powers_of_two, share, with_power

#: The vertical axis reaches above 100% to leave room for the arrows, whose heights are shares of the axis'.
_TOP, _ARROWS = 60.0, (0.78, 0.9)


def height(report: RangeReport) -> float:
    """Return the figure's height in inches."""
    return 4.6 if any(histogram.nonzero for histogram in _pooled(report).values()) else 1.4


def draw(figure: Figure | SubFigure, report: RangeReport) -> None:
    """Draw each kind's outline at scale 1, dashed where another scale is recommended, and at that scale, solid."""
    format, pooled = FORMATS[report.format], _pooled(report)
    headline(figure, _finding(report))
    axes = figure.subplots()
    if not any(histogram.nonzero for histogram in pooled.values()):
        axes.set_axis_off()
        axes.text(0.5, 0.5, _why_empty(pooled), ha="center", va="center", fontsize=11)
        return
    k = log2_recommended(report.loss_scale) or 0
    scaled = {
        shift: {kind: counts.shifted(shift) for kind, counts in pooled.items()} for shift in sorted({0, k}, key=abs)
    }
    low, high = exponent_limits((counts for kinds in scaled.values() for counts in kinds.values()), format)
    for place, (shift, kinds) in zip(_ARROWS[2 - len(scaled) :][::-1], scaled.items(), strict=True):
        is_before = shift != k
        at = f" at loss scale {with_power(2.0**shift)}"
        for kind, counts in kinds.items():
            if counts.nonzero:
                _outline(axes, kind, counts, (low, high), at + _fate(counts, format), is_before=is_before)
        largest = max(counts.max_exponent for counts in kinds.values() if counts.nonzero)
        _offset_arrow(axes, largest, format, place, high, at, is_before=is_before)
    axes.set_yscale("log")
    axes.set_ylim(LEAST_SHARE / 2, _TOP)
    axes.set_yticks([1.0, 1e-1, 1e-2, 1e-3, 1e-4, LEAST_SHARE])
    percent_axis(axes.yaxis)
    axes.tick_params(axis="y", which="minor", left=False)
    axes.set_ylabel("share of the kind's\nnon-zero elements")
    exponent_axis(axes, format, low, high)
    axes.set_xlabel("magnitude of the gradient elements")
    legend_below(axes, len(pooled))
    notes(figure, *_notes(report, pooled, low, high))


def _finding(report: RangeReport) -> str:
    """Return the picture's message: whether a loss scale is needed, and its effect."""
    advice, name = report.loss_scale, format_name(report.format)
    if not advice.available:
        return f"Gradients against the range of {name}"
    if advice.serves_none:
        return f"No single loss scale serves every gradient in {name}"
    if advice.needed is None:
        return f"It is not known whether {name} needs a loss scale"
    if not advice.needed:
        return f"{name} needs no loss scale: no layer that was seen loses too much without one"
    needs = f"{name} needs a loss scale of {with_power(advice.recommended)}"
    before, after = advice.flushed_fraction_unscaled, advice.flushed_fraction_scaled
    if before is None or after is None:
        return needs
    worst = shortened(advice.worst_layer, 40)
    return f"{needs}: in '{worst}' it flushes {percent(before)} without, {percent(after)} with it"


def _pooled(report: RangeReport) -> dict[str, ExponentHistogram]:
    """Return the merged histogram of each kind of gradient, without layers of rounding noise."""
    layers = [layer for layer in seen_layers(report) if not layer.rounding_noise]
    found = {
        kind: merge(layer.histogram for layer in layers if layer.kind == kind and layer.histogram is not None)
        for kind in GRADIENT_KINDS
    }
    return {kind: histogram for kind, histogram in found.items() if histogram.total}


def _fate(counts: ExponentHistogram, format: FloatFormat) -> str:
    """Return in words the format's effect on the values that it can't hold."""
    fate, overflowed = f": {percent(counts.flushed_fraction(format))} flushed", overflowed_share(counts, format)
    return f"{fate}, {share(overflowed)} overflow" if overflowed.high else fate


def _outline(
    axes: Axes, kind: str, counts: ExponentHistogram, limits: tuple[int, int], words: str, *, is_before: bool
) -> None:
    found, style = shares(counts, *limits), kind_named(kind)
    edges = np.arange(limits[0], limits[1] + 1)
    heights = np.where(found > 0, np.maximum(found, LEAST_SHARE), 0)
    if not is_before:
        axes.stairs(heights, edges, fill=True, color=style.colour, alpha=0.12, zorder=2)
    line = (0, (3, 1.5)) if is_before else "solid"
    label = style.title.lower() + words
    # The kind drawn first is wider, so that an outline that coincides with it leaves it visible.
    width = 2.8 if kind == GRADIENT_KINDS[0] else 1.4
    axes.stairs(heights, edges, color=style.colour, linewidth=width, linestyle=line, label=label, zorder=4)


def _offset_arrow(
    axes: Axes, largest: int, format: FloatFormat, height: float, high: int, at: str, *, is_before: bool
) -> None:
    """Draw an arrow, with the range offset, from the largest gradient to the format's top."""
    offset, top = format.max_exponent - largest, format.max_exponent + 1
    powers = powers_of_two(abs(offset))
    words = f"range offset: {powers} unused{at}" if offset >= 0 else f"{powers} beyond the format{at}"
    ends = sorted((min(largest + 1, high), top))
    transform = axes.get_xaxis_transform()
    if offset:
        style: Any = {"arrowstyle": "<->", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        style["linestyle"] = "--" if is_before else "-"
        axes.annotate(
            "", (ends[0], height), (ends[1], height), xycoords=transform, textcoords=transform, arrowprops=style
        )
    # To the left of the format's top there is always room, however short the arrow.
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}
    place: Any = {"xycoords": transform, "textcoords": "offset points"}
    axes.annotate(words, (ends[1], height), (-5, 3), ha="right", va="bottom", fontsize=8.5, bbox=box, zorder=5, **place)


def _left_out(pooled: dict[str, ExponentHistogram]) -> str:
    broken = sum(histogram.nonfinite for histogram in pooled.values())
    return f"Exact zeros are left out{filled(', and {:,} infinite or NaN elements', broken or None)}."


def _notes(report: RangeReport, pooled: dict[str, ExponentHistogram], low: int, high: int) -> Iterator[str]:
    """Yield the notes below the plot: values not shown, values flushed before counting, the loss-scale advice."""
    floor = percent(LEAST_SHARE)
    drawn = f"{_left_out(pooled)} Shares below {floor} are drawn as {floor}."
    if any(h.nonzero and (h.min_exponent < low or h.max_exponent >= high) for h in pooled.values()):
        drawn += " Values beyond the picture are gathered in its outermost bars."
    yield drawn
    if any(layer.floor_exponent is not None and layer.kind in GRADIENT_KINDS for layer in report.layers):
        yield "Some of the zeros may be values that were flushed before they were counted: the shares are of those seen."
    advice = f"{scale_in_brief(report)}."
    yield advice if report.loss_scale.available else f"{advice} {report.loss_scale.reason}"


def _why_empty(pooled: dict[str, ExponentHistogram]) -> str:
    if not pooled:
        return "No gradient was counted."
    if all(histogram.zeros == histogram.total for histogram in pooled.values()):
        return "Every gradient element that was counted is zero."
    return f"No gradient element that was counted is finite and non-zero.\n{_left_out(pooled)}"
