"""The plots, as matplotlib figures on the Agg canvas; neither pyplot nor the user's backend is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report import plot_heat_map, plot_range_offset
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.plot_style import drawn, write


def range_offset(report: RangeReport) -> Figure:
    """Plot the gradients' exponents against the format's range, as outlines before and after the suggested loss scale."""
    return drawn(plot_range_offset.height(report), lambda figure: plot_range_offset.draw(figure, report))


def heat_map(report: RangeReport) -> Figure:
    """Plot a heat map of layers by exponents with the format's edges and the share that it flushes; at most the 60 worst rows."""
    return drawn(plot_heat_map.height(report), lambda figure: plot_heat_map.draw(figure, report))


def save(report: RangeReport, path: str | Path) -> Path:
    """Write both pictures, one above the other, as one PNG. Returns the path.

    Raises:
        OSError: the file can't be written.
    """
    return write(figure(report), path)


def figure(report: RangeReport) -> Figure:
    """Return both pictures, one above the other, as one figure."""
    report = escaped(report)
    heights = [plot_range_offset.height(report), plot_heat_map.height(report)]

    def draw(figure: Figure) -> None:
        parts: Any = figure.subfigures(2, 1, height_ratios=heights, hspace=0.04)
        plot_range_offset.draw(parts[0], report)
        plot_heat_map.draw(parts[1], report)

    return drawn(sum(heights), draw)
