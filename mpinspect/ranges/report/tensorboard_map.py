"""The map of layers by exponents as a PNG for TensorBoard's "Images" page.

Drawn with Pillow alone, which matplotlib brings: the training process draws it at its end, and importing matplotlib there
would take a second.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.kinds import UPDATE, kind_named
from mpinspect.ranges.report.layers import Repeated, repeated, seen_layers
from mpinspect.reporting.palette import light, tint, tint_rgb
from mpinspect.reporting.streams import printable
from mpinspect.reporting.words import format_name, shortened

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

#: Most rows of a map; repeated layers share one.
MOST_ROWS = 60
#: Pixels of a row's height and of a power of two's width, and of the margins.
_ROW, _COLUMN, _TOP, _BOTTOM, _RIGHT = 18, 9, 34, 46, 20
_FONT_SIZE, _MOST_LETTERS = 12, 46
#: Powers of two shown beyond the format's range at least, and at most.
_LEAST_MARGIN, _MOST_MARGIN = 6, 24
#: Decades of shares that the shading distinguishes: shares below 10^-5 look the same.
_DECADES = 5
_INK, _SOFT, _GRID = (light(name) for name in ("ink", "soft", "line"))
_FLUSHED, _SUBNORMAL, _OVERFLOWED = (tint(name, 0.2) for name in ("flushed", "subnormal", "overflow"))


def layers_by_kind(report: RangeReport) -> dict[str, list[LayerReport]]:
    """Return the layers that a map can show, by kind, without updates: flushing does not decide whether an update is lost."""
    found: dict[str, list[LayerReport]] = {}
    for layer in seen_layers(report):
        if layer.kind != UPDATE and layer.histogram is not None and layer.histogram.nonzero:
            found.setdefault(layer.kind, []).append(layer)
    return found


def draw(layers: Sequence[LayerReport], format: FloatFormat) -> tuple[bytes, int, int]:
    """Return a map of layers of one kind, at least one, as PNG, and its width and height in pixels.

    A row is a layer, or the worst of those that a model's blocks repeat; a column is a power of two, the darker the larger
    the share of the layer's non-zero elements. The background shows where the format flushes and overflows.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = repeated(layers)
    shown = rows[:MOST_ROWS]
    low, high = _ends(shown, format)
    font = ImageFont.load_default(_FONT_SIZE)
    names = [_shortened(row.name or "(the model)") for row in shown]
    left = 16 + max(math.ceil(font.getlength(name)) for name in names)
    title = f"{kind_named(layers[0].kind).title} against {format_name(format.name)} at scale 1"
    if len(shown) < len(rows):
        title += f": the first {len(shown)} of {len(rows)} rows"
    width = max(left + (high - low) * _COLUMN + _RIGHT, 24 + math.ceil(font.getlength(title)))
    height = _TOP + len(shown) * _ROW + _BOTTOM
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    pen.font = font
    pen.text((12, 9), title, _INK)
    _background(pen, format, low, high, left, _TOP, _TOP + len(shown) * _ROW)
    for place, (name, row) in enumerate(zip(names, shown, strict=True)):
        top = _TOP + place * _ROW
        pen.text((left - 8, top + _ROW // 2), name, _INK, anchor="rm")
        _cells(pen, row, low, high, left, top)
    made = io.BytesIO()
    image.save(made, "PNG", optimize=True)
    return made.getvalue(), width, height


def _edges(format: FloatFormat) -> tuple[int, int, int]:
    """Return the exponents of the flush edge and of the smallest normal number, and the first exponent beyond the top."""
    return format.flush_exponent, format.min_normal_exponent, format.max_exponent + 1


def _ends(rows: list[Repeated], format: FloatFormat) -> tuple[int, int]:
    """Return the first exponent drawn and one past the last; values beyond them are drawn in the outermost cells."""
    flush, _, top = _edges(format)
    used = [row.worst.histogram for row in rows if row.worst.histogram is not None]
    low = min(min(histogram.min_exponent for histogram in used), flush - _LEAST_MARGIN)
    high = max(max(histogram.max_exponent for histogram in used) + 1, top + _LEAST_MARGIN)
    return max(low, flush - _MOST_MARGIN), min(high, top + _MOST_MARGIN)


def _background(pen: ImageDraw, format: FloatFormat, low: int, high: int, left: int, top: int, bottom: int) -> None:
    """Draw the format's regions with their names, and the axis."""

    def place(exponent: int) -> int:
        return left + (exponent - low) * _COLUMN

    flush, normal, over = _edges(format)
    regions = (
        ("flushed", low, flush, _FLUSHED),
        ("subnormal", flush, normal, _SUBNORMAL),
        ("overflow", over, high, _OVERFLOWED),
    )
    for name, start, end, colour in regions:
        if end > start:
            pen.rectangle((place(start), top, place(end) - 1, bottom), colour)
            if (end - start) * _COLUMN > pen.textlength(name):
                pen.text(((place(start) + place(end)) // 2, bottom + 34), name, _SOFT, anchor="mm")
    step = 8 if high - low < 100 else 32
    for exponent in range(-(-low // step) * step, high + 1, step):
        pen.line((place(exponent), top, place(exponent), bottom + 4), _GRID)
        pen.text((place(exponent), bottom + 13), f"2^{exponent}", _SOFT, anchor="mm")
    for edge in {flush, normal, over}:
        pen.line((place(edge), top, place(edge), bottom), _INK)


def _cells(pen: ImageDraw, row: Repeated, low: int, high: int, left: int, top: int) -> None:
    histogram = row.worst.histogram
    assert histogram is not None, "draw() takes layers that were counted"
    shares = [0.0] * (high - low)
    for exponent, count in enumerate(histogram.counts.tolist(), histogram.min_exponent):
        shares[min(max(exponent, low), high - 1) - low] += count / histogram.nonzero
    for column, share in enumerate(shares):
        if share:
            strength = 0.15 + 0.85 * min(max(1 + math.log10(share) / _DECADES, 0.0), 1.0)
            x = left + column * _COLUMN
            pen.rectangle((x, top + 2, x + _COLUMN - 1, top + _ROW - 3), tint_rgb("fill", strength))


def _shortened(name: str) -> str:
    """Return a name's last characters, which distinguish layers best, with those that the font lacks replaced."""
    plain = printable(name).encode("ascii", "backslashreplace").decode("ascii")
    return shortened(plain, _MOST_LETTERS, "start")
