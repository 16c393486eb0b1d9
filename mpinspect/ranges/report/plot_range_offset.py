"""Plots gradient exponents against a format's range, unscaled and scaled, as in the GTC 2018 mixed-precision talk."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.numeric.formats import FORMATS, FloatFormat
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.kinds import GRADIENT_KINDS, kind_named
from mpinspect.ranges.report.layers import log2_recommended, seen_layers
from mpinspect.ranges.report.scale_line import scale_line
from mpinspect.reporting.plot_style import draw_regions, exponent_axis, percent_axis
from mpinspect.reporting.streams import printable
from mpinspect.reporting.words import format_name, percent, power_of_two

#: Powers of two shown: at least below and at least above the format's range, and at most on either side. Values beyond
#: are counted in the outermost bar.
_LOW_MARGIN, _HIGH_MARGIN, _MAX_MARGIN = 12, 6, 40
#: Width of the arrow's note, in powers of two on an axis of 80.
_NOTE_WIDTH = 16


def draw(figure: Figure | SubFigure, report: RangeReport) -> None:
    """Draw one panel at scale 1 and, if a scale other than 1 is recommended, one at that scale."""
    format = FORMATS[report.format]
    pooled = _pooled(report)
    short = format_name(format.name)
    figure.suptitle(f"Gradients against the range of {short}", fontsize=12, fontweight="bold")
    if not any(histogram.nonzero for histogram in pooled.values()):
        _say(figure, _why_empty(pooled))
        return
    k = log2_recommended(report.loss_scale)
    shifts = [0] + ([k] if k else [])
    low, high = _limits(pooled, shifts, format)
    panels = figure.subplots(len(shifts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, shift in zip(panels, shifts, strict=True):
        _panel(axes, {kind: histogram.shifted(shift) for kind, histogram in pooled.items()}, format, low, high)
        scale = power_of_two(2.0**shift)
        axes.set_title(
            "as they are (loss scale 1)" if not shift else f"multiplied by the suggested loss scale {scale}", pad=20
        )
    panels[-1].set_xlabel("magnitude of the gradient elements\n" + "\n".join(_notes(report, pooled, low, high)))


def _pooled(report: RangeReport) -> dict[str, ExponentHistogram]:
    """Return the merged histogram of each kind of gradient, without layers of rounding noise."""
    layers = [layer for layer in seen_layers(report) if not layer.rounding_noise]
    found = {
        kind: merge(layer.histogram for layer in layers if layer.kind == kind and layer.histogram is not None)
        for kind in GRADIENT_KINDS
    }
    return {kind: histogram for kind, histogram in found.items() if histogram.total}


def _limits(pooled: dict[str, ExponentHistogram], shifts: list[int], format: FloatFormat) -> tuple[int, int]:
    """Return the exponents at the axis ends: the format's range and, up to _MAX_MARGIN, the values beyond it."""
    used = [histogram.shifted(k) for histogram in pooled.values() if histogram.nonzero for k in shifts]
    bottom, top = format.min_subnormal_exponent - 1, format.max_exponent + 1
    low = min(bottom - _LOW_MARGIN, min(histogram.min_exponent for histogram in used) - 1)
    high = max(top + _HIGH_MARGIN, max(histogram.max_exponent for histogram in used) + 2)
    return max(low, bottom - _MAX_MARGIN), min(high, top + _MAX_MARGIN)


def _panel(axes: Axes, pooled: dict[str, ExponentHistogram], format: FloatFormat, low: int, high: int) -> None:
    draw_regions(axes, format, low, high)
    smallest = 1.0
    for kind, histogram in pooled.items():
        if not histogram.nonzero:
            continue
        shares = _shares(histogram, low, high)
        smallest = min(smallest, float(shares[shares > 0].min()))
        label = f"{kind_named(kind).title.lower()}: {percent(histogram.flushed_fraction(format))} flushed"
        axes.stairs(shares, np.arange(low, high + 1), fill=True, color=kind_named(kind).colour, alpha=0.35, zorder=2)
        axes.stairs(
            shares, np.arange(low, high + 1), color=kind_named(kind).colour, linewidth=1.4, label=label, zorder=4
        )
    axes.set_yscale("log")
    # Leave room above the bars for the arrow and the legend: a third of the height on the log axis.
    axes.set_ylim(smallest / 3, (1 / smallest) ** 0.5 * 3)
    axes.set_yticks([tick for tick in (1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10) if tick > smallest / 3])
    percent_axis(axes.yaxis)
    axes.tick_params(axis="y", which="minor", left=False)
    axes.set_ylabel("share of the kind's\nnon-zero elements")
    exponent_axis(axes, low, high)
    axes.legend(loc="upper left", fontsize=8.5, frameon=True, framealpha=0.75, edgecolor="none")
    _offset_arrow(axes, max(histogram.max_exponent for histogram in pooled.values() if histogram.nonzero), format, high)


def _shares(histogram: ExponentHistogram, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the share of non-zero elements per exponent low .. high - 1; values beyond are counted at the ends."""
    exponents = histogram.min_exponent + np.arange(len(histogram.counts))
    places = np.clip(exponents, low, high - 1) - low
    return np.bincount(places, weights=histogram.counts, minlength=high - low) / histogram.nonzero


def _offset_arrow(axes: Axes, max_exponent: int, format: FloatFormat, high: int) -> None:
    """Draw an arrow, with the range offset, from the largest gradient to the format's top."""
    offset = format.max_exponent - max_exponent
    top = format.max_exponent + 1
    if offset == 0:
        return
    if offset > 0:
        words = f"range offset: {offset} unused\npower{'s' if offset != 1 else ''} of two"
    else:
        words = f"{-offset} power{'s' if offset != -1 else ''} of two\nbeyond the format"
    height = 0.62
    ends = (min(max_exponent + 1, high), top)
    arrow = {"arrowstyle": "<->", "color": "#222222", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    transform = axes.get_xaxis_transform()
    axes.annotate("", (ends[0], height), (ends[1], height), xycoords=transform, textcoords=transform, arrowprops=arrow)
    fits = abs(ends[1] - ends[0]) >= _NOTE_WIDTH * (high - axes.get_xlim()[0]) / 80
    # A note wider than its arrow ends at the arrow's right end; either way it stands above the histograms.
    place = (sum(ends) / 2, height + 0.03) if fits else (max(ends) - 0.7, height + 0.03)
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5}
    text = axes.text(*place, words, transform=transform, fontsize=9, fontweight="bold", bbox=box, zorder=5)
    text.set_horizontalalignment("center" if fits else "right")
    text.set_verticalalignment("bottom")


def _not_shown(pooled: dict[str, ExponentHistogram]) -> str:
    parts = []
    for kind, histogram in pooled.items():
        broken = histogram.infs + histogram.nans
        more = f" and {broken:,} infinite or NaN" if broken else ""
        parts.append(
            f"{kind_named(kind).title.lower()} {percent(histogram.zeros / histogram.total)} of all elements{more}"
        )
    return "not shown: exact zeros, " + "; ".join(parts)


def _notes(report: RangeReport, pooled: dict[str, ExponentHistogram], low: int, high: int) -> Iterator[str]:
    """Yield the notes below the plot: values not shown, values flushed before counting, the loss-scale advice."""
    yield _not_shown(pooled)
    if any(h.nonzero and (h.min_exponent < low or h.max_exponent >= high) for h in pooled.values()):
        yield "values beyond the picture are gathered in its outermost bars"
    if any(layer.floor_exponent is not None and layer.kind in GRADIENT_KINDS for layer in report.layers):
        yield "some of the zeros may be values that were flushed before they were counted: the shares are of those seen"
    advice = report.loss_scale
    if not advice.available:
        yield textwrap.shorten(f"no loss scale suggested: {printable(advice.reason)}", 110, placeholder=" ...")
        return
    yield scale_line(advice)


def _why_empty(pooled: dict[str, ExponentHistogram]) -> str:
    if not pooled:
        return "No gradient was counted."
    if all(histogram.zeros == histogram.total for histogram in pooled.values()):
        return "Every gradient element that was counted is zero."
    return "No gradient element that was counted is finite and non-zero.\n" + _not_shown(pooled)


def _say(figure: Figure | SubFigure, words: str) -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", va="center", fontsize=11)
