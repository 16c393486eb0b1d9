"""The plots, as matplotlib figures on the Agg canvas; neither pyplot nor the user's backend is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report import plot_heat_map, plot_range_offset
from mpinspect.ranges.report.layers import log2_recommended
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.plot_style import DPI, RC, drawn


def range_offset(report: RangeReport) -> Figure:
    """Plot the gradients' exponent histograms against the format's range, before and after the suggested loss scale."""
    return drawn(_range_offset_height(report), lambda figure: plot_range_offset.draw(figure, report))


def heat_map(report: RangeReport) -> Figure:
    """Plot a heat map of layers by exponents with the format's edges as lines; at most the 60 worst layers."""
    return drawn(_heat_map_height(report), lambda figure: plot_heat_map.draw(figure, report))


def save(report: RangeReport, path: str | Path) -> Path:
    """Write both pictures, one above the other, as one PNG. Returns the path.

    Raises:
        OSError: the file can't be written.
    """
    report = escaped(report)
    upper, lower = _range_offset_height(report), _heat_map_height(report)

    def draw(figure: Figure) -> None:
        parts: Any = figure.subfigures(2, 1, height_ratios=[upper, lower], hspace=0.04)
        plot_range_offset.draw(parts[0], report)
        plot_heat_map.draw(parts[1], report)

    with matplotlib.rc_context(RC):
        drawn(upper + lower, draw).savefig(path, format="png", dpi=DPI)
    return Path(path)


def _range_offset_height(report: RangeReport) -> float:
    return 6.6 if log2_recommended(report.loss_scale) else 4.0


def _heat_map_height(report: RangeReport) -> float:
    return max(2.8, 1.7 + 0.165 * len(plot_heat_map.rows(report)))
