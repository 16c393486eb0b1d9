"""Shared style of the plots: titles, notes and legends, a format's regions along the exponent axis, shortened names, files."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import ScaledTranslation
from PIL import Image

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FloatFormat
from mpinspect.reporting.palette import light, tint
from mpinspect.reporting.streams import printable
from mpinspect.runtime.appending import replace_whole

FONT = "DejaVu Sans"

#: Pixels per inch of the files.
DPI = 140
#: Width of a figure in inches, and the characters of a title and of a note that fit in a line of it.
_WIDTH = 10.5
_TITLE, _NOTE = 96, 168
#: Smaller shares are drawn as this one: no figure in words is smaller either (``words.percent``).
LEAST_SHARE = 1e-5
#: Powers of two shown beyond a format's range: at least this share of the range and this many, and at most.
_MARGIN, _LEAST_MARGIN, _MOST_MARGIN = 0.15, 10, 40
INK, FAINT = light("ink"), light("soft")

#: Opacity of a region's colour beneath coloured lines and cells.
_TINT = 0.2

#: Set while a figure is drawn, so that the user's own style does not apply. Any, since matplotlib types each key.
RC: Any = {
    "font.family": FONT,
    "font.size": 9.0,
    "text.usetex": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "white",
    "axes.grid": False,
    "axes.titlesize": 10.0,
    "axes.unicode_minus": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Region:
    """The effect of a format on magnitudes between 2^low and 2^high; the ends of the outermost are infinite.

    Regions differ in hatching too, so that everybody can distinguish them beneath coloured lines.
    """

    name: str
    low: float
    high: float
    colour: str = "white"
    hatch: str = ""


def regions(format: FloatFormat) -> tuple[Region, ...]:
    """Return a format's regions along log2|x|, smallest magnitudes first; edges account for rounding (FP16: 2^-25)."""
    flush = format.flush_exponent
    top = format.max_exponent + 1
    found = [Region("flushed", -math.inf, flush, tint("flushed", _TINT), "///")]
    if flush < format.min_normal_exponent:
        found.append(Region("subnormal", flush, format.min_normal_exponent, tint("subnormal", _TINT)))
    found.append(Region("normal", format.min_normal_exponent, top))
    found.append(Region("overflow", top, math.inf, tint("overflow", _TINT), "xxx"))
    return tuple(found)


def exponent_limits(histograms: Iterable[ExponentHistogram], format: FloatFormat) -> tuple[int, int]:
    """Return the exponents at the axis' ends: the format's range, the values beyond it, and room for the names of the regions."""
    used = [histogram for histogram in histograms if histogram.nonzero]
    bottom, top = format.min_subnormal_exponent - 1, format.max_exponent + 1
    margin = min(max(_LEAST_MARGIN, round(_MARGIN * (top - bottom))), _MOST_MARGIN)
    low = min([bottom - margin, *(histogram.min_exponent - 1 for histogram in used)])
    high = max([top + margin, *(histogram.max_exponent + 2 for histogram in used)])
    return max(low, bottom - _MOST_MARGIN), min(high, top + _MOST_MARGIN)


def shares(histogram: ExponentHistogram, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the share of non-zero elements per exponent low .. high - 1; values beyond are counted at the ends."""
    exponents = histogram.min_exponent + np.arange(len(histogram.counts))
    places = np.clip(exponents, low, high - 1) - low
    return np.bincount(places, weights=histogram.counts, minlength=high - low) / max(histogram.nonzero, 1)


def exponent_axis(axes: Axes, format: FloatFormat, low: int, high: int) -> None:
    """Draw the x axis from 2^low to 2^high with the format's regions: shaded, named above the axes, a line at each edge."""
    for region in regions(format):
        left, right = max(low, region.low), min(region.high, high)
        axes.axvspan(
            left, right, facecolor=region.colour, edgecolor=light("line"), hatch=region.hatch, linewidth=0, zorder=0
        )
        if region.high < math.inf:
            # The dashes are seen on white and on the darkest cell.
            axes.axvline(region.high, color="white", linewidth=1.8, zorder=3)
            axes.axvline(region.high, color=INK, linewidth=1.1, linestyle=(0, (4, 2)), zorder=3)
        # The name of a narrow region is continued above "normal" if there is room; "normal" is named in its middle.
        is_normal = region.name == "normal"
        if not is_normal or right - left > 0.15 * (high - low):
            place, align, points = ((left + right) / 2, "center", 0) if is_normal else (left, "left", 3)
            above: Any = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            axes.annotate(region.name, (place, 1), (points, 3), ha=align, fontsize=8.5, **above)
    axes.set_xlim(low, high)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if (high - low) / step <= 18)
    ticks = range(-(-low // step) * step, high + 1, step)
    axes.set_xticks(list(ticks), [f"$2^{{{tick}}}$" for tick in ticks])
    axes.tick_params(axis="x", labelsize=9)


def percent_axis(axis: Axis) -> None:
    """Label the axis in percent, with exact ticks up to 100%."""
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:.6f}".rstrip("0").rstrip(".") + "%" if value < 1.001 else "")
    )
    axis.set_minor_formatter(NullFormatter())


def headline(figure: Figure | SubFigure, words: str) -> None:
    """Put the finding above the plot, at the left, wrapped."""
    lines = textwrap.wrap(printable(words), _TITLE)
    figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=12, fontweight="bold", parse_math=False)


def notes(figure: Figure | SubFigure, *sentences: str) -> None:
    """Put sentences below the plot, at the left, wrapped and never cut."""
    lines = [line for sentence in sentences for line in textwrap.wrap(printable(sentence), _NOTE)]
    words = "\n".join(lines)
    figure.supxlabel(words, x=0.012, ha="left", fontsize=8, color=FAINT, linespacing=1.4, parse_math=False)


def legend_below(axes: Axes, columns: int, handles: Sequence[Artist] | None = None, title: str = "") -> None:
    """Draw the legend, of all labelled artists or of these, below the axis' label."""
    below = axes.transAxes + ScaledTranslation(0, -36 / 72, axes.figure.dpi_scale_trans)
    place: Any = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below, "borderaxespad": 0}
    shown = handles or axes.get_legend_handles_labels()[0]
    axes.legend(
        handles=shown, ncols=columns, fontsize=8, title=title or None, title_fontsize=8, alignment="left", **place
    )


def shortened(name: str, length: int, keep: str = "end") -> str:
    """Return a name that fits ``length``, with "…" for omitted characters; characters not in the font become "?".

    Whole parts are left out ("model.….query.weight") unless one alone is too long. A short first part stays, as towers of a
    model often differ in it alone.

    Args:
        name: a dotted path, or a kernel's name.
        length: in characters.
        keep: "end", or "start" for names whose last part is the least informative.
    """
    known = get_font(findfont(FONT)).get_charmap()
    text = "".join(c if ord(c) in known else "?" for c in printable(name)) or "(the model)"
    if len(text) <= length:
        return text
    if keep == "end":
        head = "".join(re.findall(r"^[^./]*[./]", text[: length // 5]))
        tail = text[1 + len(head) - length :]
        # Not inside "{0..11}".
        return f"{head}…{re.sub(r'^.*?(?=[./](?![^{}]*}))', '', tail, count=1)}"
    words = re.match(r".*[^\W_](?=\W|_)", text[:length])
    return (words[0] if words and len(words[0]) > length // 2 else text[: length - 1]) + "…"


def drawn(height: float, draw: Callable[[Figure], None]) -> Figure:
    """Return a figure of the common width and style, ``height`` inches high, on the Agg canvas, drawn by ``draw``."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(_WIDTH, height), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        FigureCanvasAgg(figure)
        draw(figure)
    return figure


def write(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, whole or not at all, and return its path. Raises OSError if the file can't be written."""
    drawing, picture, target = BytesIO(), BytesIO(), Path(path)
    with matplotlib.rc_context(RC):
        figure.savefig(drawing, format="png", dpi=DPI)
    # Flat colours: a palette of 256 holds them, in a third of the bytes.
    Image.open(drawing).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        picture, format="png", optimize=True
    )
    replace_whole(target, picture.getvalue())
    return target
