"""Heat map of layers by exponents: the spread of each layer's values, the format's edges, and the share that the format loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS, kind_named
from mpinspect.ranges.report.layers import (
    EMPTY,
    Repeated,
    badness,
    flushed_at_recommended,
    flushed_words,
    has_no_values,
    log2_recommended,
    overflowed_share,
    repeated,
    seen_layers,
)
from mpinspect.reporting.plot_style import (
    FAINT,
    exponent_axis,
    exponent_limits,
    headline,
    legend_below,
    notes,
    shares,
    shortened,
)
from mpinspect.reporting.words import NOT_APPLICABLE, UNKNOWN, format_name, optional, percent, share

MAX_ROWS = 60
#: Up to this many layers have a row each; if there are more, repeated blocks share one.
_ONE_BY_ONE = 24
_NAME_LENGTH = 60
#: The bounds of the classes of shares, and a colour for each class; their lightness alone suffices to distinguish them.
_BOUNDS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
COLOURS = ("#dcebf7", "#a6cbe6", "#5f9fd0", "#2068a8", "#08306b")
#: Width of a column next to the map in points.
_COLUMN = 44

#: A column's heading, and a layer's figure in words.
_Column = tuple[str, Callable[[LayerReport], str]]
#: A line of the map: a layer with its name, or a kind's title.
_Line = tuple[str, LayerReport | None]


def rows(report: RangeReport) -> list[Repeated]:
    """Return the rows to show, by kind: the worst MAX_ROWS of the gradients, or of all if there are no gradients."""
    seen = [layer for layer in seen_layers(report) if _nonzero(layer) or _broken(layer)]
    gradients = [layer for layer in seen if layer.kind in GRADIENT_KINDS]
    found = repeated(gradients or seen, _ONE_BY_ONE)
    places = sorted(range(len(found)), key=lambda place: badness(found[place].worst), reverse=True)[:MAX_ROWS]
    return [found[place] for place in sorted(places, key=lambda place: (KINDS.index(found[place].worst.kind), place))]


def height(report: RangeReport) -> float:
    """Return the figure's height in inches."""
    found = rows(report)
    return 2.5 + 0.19 * (len(found) + len({row.worst.kind for row in found})) if found else 1.6


def draw(figure: Figure | SubFigure, report: RangeReport) -> None:
    """Draw one row per layer and one column per power of two, coloured by share of the layer's non-zero elements."""
    found, format = rows(report), FORMATS[report.format]
    headline(figure, _finding(report, found))
    axes = figure.subplots()
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No layer has a finite non-zero value to show.", ha="center", va="center", fontsize=11)
        return
    # A kind's title has a line of its own, above its layers.
    lines: list[_Line] = [
        line
        for kind, group in groupby(found, lambda row: row.worst.kind)
        for line in ((kind_named(kind).title, None), *((_name(row), row.worst) for row in group))
    ]
    low, high = exponent_limits((row.worst.histogram for row in found if row.worst.histogram), format)
    cells = np.array([_shares(layer, low, high) for _, layer in lines])
    axes.pcolormesh(
        np.arange(low, high + 1),
        np.arange(len(lines) + 1),
        np.where(cells > 0, cells, np.nan),
        cmap=ListedColormap(COLOURS),
        norm=BoundaryNorm(_BOUNDS, len(COLOURS)),
        zorder=1,
    )
    axes.set_ylim(len(lines), 0)
    exponent_axis(axes, format, low, high)
    axes.set_xlabel("magnitude")
    _label(axes, lines, _columns(report, found))
    handles = [
        Patch(color=colour, label=f"to {percent(most)}") for colour, most in zip(COLOURS, _BOUNDS[1:], strict=True)
    ]
    legend_below(axes, len(handles), handles, "share of the layer's non-zero elements")
    notes(figure, " ".join(_notes(report, found, low, high)))


def _nonzero(layer: LayerReport) -> int:
    return (layer.histogram or EMPTY).nonzero


def _broken(layer: LayerReport) -> int:
    return (layer.histogram or EMPTY).nonfinite


def _shares(layer: LayerReport | None, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if layer is None or layer.representative is None:
        return np.zeros(high - low)
    return shares(layer.representative, low, high)


def _finding(report: RangeReport, found: list[Repeated]) -> str:
    """Return the message of the map: the layer that loses most, or that no layer loses anything."""
    name = format_name(report.format)
    layers = [row.worst for row in found if not row.worst.rounding_noise]
    if not layers:
        return f"Layers against the range of {name}"
    worst = max(layers, key=badness)
    called = next(f"'{shortened(row.name, _NAME_LENGTH)}'" for row in found if row.worst is worst)
    if _broken(worst):
        return f"{called} holds infinities or NaNs"
    if worst.overflowed and worst.histogram is not None:
        may = "overflows" if overflowed_share(worst.histogram, FORMATS[report.format]).low else "may overflow"
        return f"{called} {may} {name} at loss scale 1"
    lost, serves = worst.lost_l1_share, f"{name} at loss scale 1 serves every layer"
    if lost is None or not lost.high:
        return f"{serves}: none loses anything to flushing"
    if lost.high <= LOST_L1_TOLERANCE:
        return f"{serves}: none loses more than {percent(lost.high)} of its sum of magnitudes to flushing"
    return f"{called} loses most in {name}: {flushed_words(worst, worst.flushed_fraction)} flushed at loss scale 1"


def _columns(report: RangeReport, found: list[Repeated]) -> list[_Column]:
    """Return the columns next to the map; the last ones only where a layer has such values."""
    layers = [row.worst for row in found]
    columns: list[_Column] = [("flushed", _of_values(lambda layer: flushed_words(layer, layer.flushed_fraction)))]
    k = log2_recommended(report.loss_scale)
    if k and layers[0].kind in GRADIENT_KINDS:
        at_recommended = _of_values(lambda layer: flushed_words(layer, flushed_at_recommended(layer, report)))
        columns.append((f"at 2^{k}", at_recommended))
    if any(layer.overflowed for layer in layers):
        format = FORMATS[report.format]
        overflowed = _of_values(
            lambda layer: optional(layer.histogram, lambda counts: share(overflowed_share(counts, format)), UNKNOWN)
        )
        columns.append(("overflow", overflowed))
    if any(map(_broken, layers)):
        columns.append(("inf, NaN", lambda layer: f"{_broken(layer):,}"))
    return columns


def _of_values(words: Callable[[LayerReport], str]) -> Callable[[LayerReport], str]:
    """Return a column's words on finite non-zero values: "-" for layers that have none."""
    return lambda layer: NOT_APPLICABLE if has_no_values(layer) else words(layer)


def _label(axes: Axes, lines: list[_Line], columns: list[_Column]) -> None:
    """Put the layers' names left of the map, their figures right of it, and draw lines between them."""
    axes.set_yticks(np.arange(len(lines)) + 0.5, [name for name, _ in lines], fontsize=8, parse_math=False)
    axes.tick_params(axis="y", length=0)
    beside: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "center"}
    beside |= {"fontsize": 8, "annotation_clip": False}
    for number, (heading, _) in enumerate(columns, start=1):
        axes.annotate(heading, (1, 0.5), (number * _COLUMN + 4, 0), fontweight="bold", color=FAINT, **beside)
    for place, (label, (_, layer)) in enumerate(zip(axes.get_yticklabels(), lines, strict=True)):
        axes.axhline(place, color="white", linewidth=0.6, zorder=2)
        if layer is None:
            label.set_fontweight("bold")
            continue
        for number, (_, words) in enumerate(columns, start=1):
            axes.annotate(words(layer), (1, place + 0.5), (number * _COLUMN + 4, 0), **beside)


def _name(row: Repeated) -> str:
    return shortened(row.name, _NAME_LENGTH) + (" (rounding noise)" if row.worst.rounding_noise else "")


def _notes(report: RangeReport, found: list[Repeated], low: int, high: int) -> Iterator[str]:
    yield "Flushed: of the layer's non-zero elements, at loss scale 1."
    if any(len(row.members) > 1 for row in found):
        yield "{0..11}: the worst of them."
    kinds = {row.worst.kind for row in found}
    layers = sum(1 for layer in seen_layers(report) if layer.kind in kinds and (_nonzero(layer) or _broken(layer)))
    shown = sum(len(row.members) for row in found)
    if shown < layers:
        yield f"The worst {len(found)} rows: {shown} layers of {layers}."
    used = [row.worst.histogram for row in found if row.worst.histogram is not None and row.worst.histogram.nonzero]
    if any(histogram.min_exponent < low or histogram.max_exponent >= high for histogram in used):
        yield "Values beyond the map are gathered in its outermost cells."
