"""Shared style of the plots: colours, a format's regions along the exponent axis, axes, shortened names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter

from mpinspect.numeric.formats import FloatFormat
from mpinspect.reporting.streams import printable

FONT = "DejaVu Sans"

#: Pixels per inch of the files.
DPI = 140
#: Width of a figure in inches.
_WIDTH = 10.5

#: Set while a figure is drawn, so that the user's own style does not apply. Any, since matplotlib types each key.
RC: Any = {
    "font.family": FONT,
    "font.size": 9.0,
    "text.usetex": False,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.edgecolor": "#666666",
    "axes.facecolor": "white",
    "axes.grid": False,
    "axes.titlesize": 10.0,
    "axes.unicode_minus": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Region:
    """What a format does to magnitudes between 2^low and 2^high; None means unbounded."""

    name: str
    low: int | None
    high: int | None
    colour: str


def regions(format: FloatFormat) -> tuple[Region, ...]:
    """Return a format's regions along log2|x|, smallest magnitudes first; edges account for rounding (FP16: 2^-25)."""
    flush = format.min_normal_exponent if format.flushes_subnormals else format.min_subnormal_exponent - 1
    top = format.max_exponent + 1
    found = [Region("flushed to zero", None, flush, "#f6d5d0")]
    if flush < format.min_normal_exponent:
        found.append(Region("subnormal", flush, format.min_normal_exponent, "#fbeecb"))
    found.append(Region("normal", format.min_normal_exponent, top, "#e3f1e2"))
    found.append(Region("overflow", top, None, "#f6d5d0"))
    return tuple(found)


def draw_regions(
    axes: Axes, format: FloatFormat, low: int, high: int, *, shade: bool = True, colour: str = "#777777"
) -> None:
    """Shade the regions between exponents low and high, draw a line at each edge, and put the names above the axes."""
    for region in regions(format):
        left = low if region.low is None else max(region.low, low)
        right = high if region.high is None else min(region.high, high)
        if left >= right:
            continue
        if shade:
            axes.axvspan(left, right, color=region.colour, linewidth=0, zorder=0)
        if region.high is not None and region.high < high:
            axes.axvline(region.high, color=colour, linewidth=1.1, linestyle=(0, (4, 2)), zorder=3)
        # At this size, a character is about 0.75 of a power of two wide on an axis of 75.
        if right - left >= 0.75 * len(region.name) * (high - low) / 75:
            place = ((left + right) / 2, 1.015)
            axes.text(*place, region.name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8.5)


def exponent_axis(axes: Axes, low: int, high: int) -> None:
    """Set the x axis limits to low and high, with at most 19 ticks at powers of two, written 2^k."""
    axes.set_xlim(low, high)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if (high - low) / step <= 18)
    ticks = range(-(-low // step) * step, high + 1, step)
    axes.set_xticks(list(ticks), [f"$2^{{{tick}}}$" for tick in ticks])
    axes.tick_params(axis="x", labelsize=9)


def percent_axis(axis: Axis) -> None:
    """Label the axis in percent, each with as many digits as needed."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axis.set_minor_formatter(NullFormatter())


def shortened(name: str, length: int) -> str:
    """Return a name with its middle replaced by "..." to fit ``length``; characters not in the font become "?"."""
    known = get_font(findfont(FONT)).get_charmap()
    text = "".join(c if ord(c) in known else "?" for c in printable(name)) or "(the model)"
    if len(text) <= length:
        return text
    tail = (length - 3) * 2 // 3
    return f"{text[: length - 3 - tail]}...{text[-tail:]}"


def drawn(height: float, draw: Callable[[Figure], None]) -> Figure:
    """Return a figure of the common width and style, ``height`` inches high, on the Agg canvas, drawn by ``draw``."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(_WIDTH, height), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        FigureCanvasAgg(figure)
        draw(figure)
    return figure
