"""Heat map of layers by exponents: the spread of each layer's values, and the format's edges."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from mpinspect.numeric.formats import FORMATS, FloatFormat
from mpinspect.ranges.analysis.report import LayerReport, RangeReport
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS, kind_named
from mpinspect.ranges.report.layers import seen_layers, worst
from mpinspect.reporting.plot_style import draw_regions, exponent_axis, percent_axis, shortened
from mpinspect.reporting.words import format_name

MAX_ROWS = 60
_NAME_LENGTH = 44
#: Shares below this have the palest colour.
_LEAST_SHARE = 1e-5
#: Powers of two shown beyond the format's range, at most.
_MAX_MARGIN = 40


def rows(report: RangeReport) -> list[LayerReport]:
    """Return the layers to show, by kind: the worst MAX_ROWS of the gradients, or of all if there are no gradients."""
    seen = [layer for layer in seen_layers(report) if layer.histogram is not None and layer.histogram.nonzero]
    gradients = [layer for layer in seen if layer.kind in GRADIENT_KINDS]
    return sorted(worst(gradients or seen, MAX_ROWS), key=lambda layer: KINDS.index(layer.kind))


def draw(figure: Figure | SubFigure, report: RangeReport) -> None:
    """Draw one row per layer and one column per power of two, coloured by share of the layer's non-zero elements."""
    layers, format = rows(report), FORMATS[report.format]
    short = format_name(format.name)
    figure.suptitle(
        f"Layers against the range of {short} (loss scale 1){_how_many(report, layers)}", fontsize=12, fontweight="bold"
    )
    axes = figure.subplots()
    if not layers:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No layer has a finite non-zero value to show.", ha="center", va="center", fontsize=11)
        return
    low, high = _limits(layers, format)
    shares = np.array([_shares(layer, low, high) for layer in layers])
    edges = np.arange(low, high + 1), np.arange(len(layers) + 1)
    norm = LogNorm(_LEAST_SHARE, float(shares.max()))
    mesh = axes.pcolormesh(
        *edges, np.where(shares > 0, np.maximum(shares, _LEAST_SHARE), np.nan), norm=norm, cmap="YlGnBu"
    )
    axes.invert_yaxis()
    draw_regions(axes, format, low, high, shade=False, colour="#d40000")
    exponent_axis(axes, low, high)
    axes.set_xlabel("magnitude")
    names = [shortened(layer.name, _NAME_LENGTH) for layer in layers]
    size = 8.5 if len(layers) <= 30 else 7.0
    axes.set_yticks(np.arange(len(layers)) + 0.5, names, fontsize=size, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#f4f4f4")
    _colour_by_kind(figure, axes, layers)
    bar = figure.colorbar(mesh, ax=axes, pad=0.015, fraction=0.04, aspect=25)
    bar.set_label("share of non-zero elements")
    percent_axis(bar.ax.yaxis)


def _how_many(report: RangeReport, layers: list[LayerReport]) -> str:
    kinds = {layer.kind for layer in layers}
    of = sum(1 for layer in seen_layers(report) if layer.kind in kinds and layer.histogram and layer.histogram.nonzero)
    return f": the {len(layers)} worst of {of}" if len(layers) < of else ""


def _limits(layers: list[LayerReport], format: FloatFormat) -> tuple[int, int]:
    used = [layer.histogram for layer in layers if layer.histogram is not None]
    bottom, top = format.min_subnormal_exponent - 1, format.max_exponent + 1
    low = min(bottom - 10, min(histogram.min_exponent for histogram in used) - 1)
    high = max(top + 4, max(histogram.max_exponent for histogram in used) + 2)
    return max(low, bottom - _MAX_MARGIN), min(high, top + _MAX_MARGIN)


def _shares(layer: LayerReport, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the share of non-zero elements per exponent low .. high - 1; values beyond are counted at the ends."""
    assert layer.histogram is not None, "rows() takes layers that were counted"
    exponents = layer.histogram.min_exponent + np.arange(len(layer.histogram.counts))
    places = np.clip(exponents, low, high - 1) - low
    return np.bincount(places, weights=layer.histogram.counts, minlength=high - low) / layer.histogram.nonzero


def _colour_by_kind(figure: Figure | SubFigure, axes: Axes, layers: list[LayerReport]) -> None:
    """Colour the layers' names by kind, draw lines between the kinds, and add a legend."""
    for label, layer in zip(axes.get_yticklabels(), layers, strict=True):
        label.set_color(kind_named(layer.kind).colour)
    for index in range(1, len(layers)):
        axes.axhline(index, color="white", linewidth=0.5)
        if layers[index].kind != layers[index - 1].kind:
            axes.axhline(index, color="#111111", linewidth=0.9)
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    handles = [Patch(color=row.colour, label=row.title.lower()) for row in map(kind_named, kinds)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=8.5)
