"""The one table of colours: pages, pictures, TensorBoard and notebooks take theirs from here.

Every colour has a name for its meaning, a light variant, and a dark one for pages in a dark scheme. Text colours have a contrast
of at least 4.5:1 against both grounds of their scheme. No colour is the only sign of anything: a format's regions (flushed,
subnormal, overflow) differ in hatching too, kinds in line style, verdicts in words and in their marks. An error, a warning, good
and flushed, whose hues deuteranopes confuse, differ in lightness. The sets follow Okabe and Ito, "Color Universal Design" (2008),
whose hues stay apart for protanopes, deuteranopes and tritanopes.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """A colour as "#rrggbb" in the light and in the dark scheme."""

    light: str
    dark: str


def _same(colour: str) -> Colour:
    return Colour(colour, colour)


PALETTE = {
    "ground": Colour("#ffffff", "#15181c"),
    "raised": Colour("#f6f7f9", "#1e2227"),
    "ink": Colour("#1c2126", "#e4e8ec"),
    "soft": Colour("#59636e", "#9aa5b1"),
    "line": Colour("#d8dde3", "#363d45"),
    # Severities and verdicts.
    "good": Colour("#00725f", "#4fd0bc"),
    "warning": Colour("#976500", "#ffe07a"),
    "error": Colour("#860d13", "#f9584e"),
    "unknown": Colour("#8a3f80", "#e29bd6"),
    "info": Colour("#1f5fa8", "#7fb8f5"),
    # The values of a histogram, and the regions of a format beneath them.
    "fill": Colour("#2f6fb5", "#4f93e0"),
    "flushed": Colour("#e09c00", "#f5bd4a"),
    "subnormal": Colour("#a8b0b9", "#5d6771"),
    "overflow": Colour("#4c1d95", "#d6bcff"),
    # Kinds of tensor, by name.
    "weight_gradient": _same("#0072b2"),
    "activation_gradient": _same("#d55e00"),
    "activation": _same("#009e73"),
    "weight": _same("#56b4e9"),
    "update": _same("#882255"),
    # Verdicts on kernels.
    "native": _same("#0072b2"),
    "degraded": _same("#f0c000"),
    "off": _same("#d55e00"),
    "unknown-kernel": _same("#cc79a7"),
    "helper": _same("#8fd0f5"),
    "other": _same("#d0d0d0"),
    "communication": _same("#555555"),
}
#: Signs before verdicts of each colour, whose shapes differ where the colours look alike.
MARKS = {"good": "✓", "warning": "▲", "error": "■"}
#: The names of the colours of a page.
_TEXT = ("ink", "soft", "good", "warning", "error", "unknown", "info")
_OF_PAGE = ("ground", "raised", "line", *_TEXT, "fill", "flushed", "subnormal", "overflow")


def light(name: str) -> str:
    """Return a colour of the light scheme, "#rrggbb"."""
    return PALETTE[name].light


def tint(name: str, strength: float) -> str:
    """Return a light-scheme colour mixed with white, "#rrggbb"; ``strength`` 0 (white) to 1 (the colour)."""
    return "#{:02x}{:02x}{:02x}".format(*tint_rgb(name, strength))


def tint_rgb(name: str, strength: float) -> tuple[int, int, int]:
    """Return a light-scheme colour mixed with white as three numbers 0..255; ``strength`` 0 (white) to 1 (the colour)."""
    digits = light(name)
    red, green, blue = (round(255 + (int(digits[at : at + 2], 16) - 255) * strength) for at in (1, 3, 5))
    return red, green, blue


def css_variables(*, is_dark: bool = False) -> str:
    """Return the declarations of a page's colours and marks as CSS custom properties: "--ground:#ffffff;..."."""
    colours = (f"--{name}:{PALETTE[name].dark if is_dark else PALETTE[name].light};" for name in _OF_PAGE)
    return "".join((*colours, *(f'--{name}-mark:"{mark}\\a0";' for name, mark in MARKS.items())))
