"""Checks of pictures: the texts of their labels, legibility, and distinguishable colours."""

import itertools
from unittest.mock import patch

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

#: Deuteranopia on linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
#: Deficiency", 2009, severity 1.
_DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
#: From linear sRGB to XYZ over D65's white.
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_XYZ = _XYZ / _XYZ.sum(axis=1, keepdims=True)


def words(figure: Figure) -> list[str]:
    """Return the texts of a figure, each on one line."""
    return [
        " ".join(text.get_text().split()) for text in figure.findobj(Text) if text.get_visible() and text.get_text()
    ]


def assert_readable(figure: Figure) -> None:
    """Assert that no text crosses the figure's edges or overlaps another text."""
    drawn: list[Text] = []
    # Ticks outside of the axes exist as objects but are not drawn.
    with patch.object(Text, "draw", lambda text, _: drawn.append(text)):
        figure.draw_without_rendering()
    shown = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in shown]
    for said, box in boxes:
        inside = (
            figure.bbox.x0 <= box.x0
            and box.x1 <= figure.bbox.x1
            and figure.bbox.y0 <= box.y0
            and box.y1 <= figure.bbox.y1
        )
        assert inside, f"{said!r} is cut: {box.extents}"
    for (said, box), (other, beside) in itertools.combinations(boxes, 2):
        wide = min(box.x1, beside.x1) - max(box.x0, beside.x0)
        high = min(box.y1, beside.y1) - max(box.y0, beside.y0)
        assert wide <= 1 or high <= 2, f"{said!r} lies over {other!r}"


def assert_distinct(colours: dict[str, str], least: float = 20.0) -> None:
    """Assert that any two colours differ by ``least`` in CIELAB, for normal colour vision and for deuteranopia."""
    for sight in (np.eye(3), _DEUTERANOPIA):
        seen = {name: _lab(sight @ _linear(colour)) for name, colour in colours.items()}
        for one, other in itertools.combinations(seen, 2):
            apart = float(np.linalg.norm(seen[one] - seen[other]))
            assert apart >= least, f"{one} and {other} are {apart:.1f} apart"


def assert_lightness_distinct(colours: dict[str, str], least: float = 7.0) -> None:
    """Assert that any two colours differ by ``least`` in CIELAB's lightness, 0..100, for deuteranopia."""
    seen = {name: _lab(_DEUTERANOPIA @ _linear(colour))[0] for name, colour in colours.items()}
    for one, other in itertools.combinations(seen, 2):
        assert abs(seen[one] - seen[other]) >= least, (one, seen[one], other, seen[other])


def _linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    x, y, z = (np.cbrt(v) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in _XYZ @ np.clip(linear, 0, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
