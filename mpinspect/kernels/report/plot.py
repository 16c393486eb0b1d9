"""Draw the kernel report's figure: kernel time by verdict, and the modules (or kernels) from which most could be regained."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpinspect.kernels.analysis.limits import outlooks
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.shares import share
from mpinspect.kernels.report.document import clean_name, figures, has_modules, share_words, title
from mpinspect.reporting import words
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.palette import light
from mpinspect.reporting.plot_style import (
    FAINT,
    INK,
    drawn,
    headline,
    legend_below,
    notes,
    percent_axis,
    shortened,
    write,
)

#: Maximum number of bars for modules or kernels.
MAX_BARS = 15
#: By verdict, and by other use of a kernel; kernels outside of these are not products.
COLOURS = {
    **{verdict: light(verdict) for verdict in ("native", "degraded", "off")},
    "unknown": light("unknown-kernel"),
    **{use: light(use) for use in ("helper", "other", "communication")},
}
_LABEL_LENGTH = 58
#: Drawn over the part of a bar that could be regained, from the bar's left end on.
_REGAINED: Any = {"facecolor": "none", "edgecolor": INK, "hatch": "////", "linewidth": 0.8}
#: A label right of a bar.
_BESIDE: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8, "color": FAINT}


@dataclass(frozen=True)
class Bar:
    """A bar of the figure: a module or kernel without its communication.

    Args:
        label: the name.
        times: times in us by part (keys of COLOURS).
        regained_us: upper bound of the savings by mixed precision and Tensor Cores.
    """

    label: str
    times: dict[str, float]
    regained_us: float

    @property
    def total(self) -> float:
        return sum(self.times.values())


def kernels(report: KernelReport) -> Figure:
    """Return a figure: all kernel time by verdict as a stacked bar, and a bar for each of the modules that could regain most."""
    height = 0.9
    if report.shares.kernel_time_us:
        height = 3.4 + 0.25 * len(bars(report))
    return drawn(height, lambda figure: _draw(figure, report))


def save(report: KernelReport, path: str | Path) -> Path:
    """Write the figure as PNG and return the path. Raises OSError if the file cannot be written."""
    return write(kernels(escaped(report)), path)


def bars(report: KernelReport) -> tuple[Bar, ...]:
    """Return bars for the modules, or for the kernels if no module is known, that could regain most, or take most time."""
    found = _everything(report)
    return tuple(sorted(found, key=lambda bar: (-bar.regained_us, -bar.total, bar.label))[:MAX_BARS])


def _everything(report: KernelReport) -> list[Bar]:
    """Return a bar for every module or kernel, without communication, which no precision shortens."""
    by_module = has_modules(report)
    times: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLOURS, 0.0))
    regained: dict[str, float] = defaultdict(float)
    for row, outlook in outlooks(report.kernels):
        if not row.is_communication:
            name = row.module if by_module else row.name
            times[name][row.verdict] += row.time_us
            regained[name] += outlook.saved_at_most_us(row.time_us)
    return [
        Bar(_label(name, by_module=by_module), {part: time for part, time in parts.items() if time > 0}, regained[name])
        for name, parts in times.items()
    ]


def _label(name: str, *, by_module: bool) -> str:
    if by_module:
        return shortened(name or "(unknown)", _LABEL_LENGTH)
    return shortened(clean_name(name), _LABEL_LENGTH, keep="start")


def _part(row: KernelRow) -> str:
    return "communication" if row.is_communication else row.verdict


def _draw(figure: Figure, report: KernelReport) -> None:
    total = report.shares.kernel_time_us
    if total <= 0:
        headline(figure, title(report))
        notes(figure, next((finding.message for finding in report.findings), "No kernel was recorded."))
        return
    found, regained = bars(report), sum(report.limits.saved_at_most_us.values())
    headline(figure, _finding(report, regained))
    upper, lower = figure.subplots(2, 1, height_ratios=[1.0, max(1.0, 0.9 * len(found))])
    parts = dict.fromkeys(COLOURS, 0.0)
    for row in report.kernels:
        parts[_part(row)] += row.time_us
    parts = {part: time for part, time in parts.items() if time > 0}
    _bar(upper, 0, parts, total)
    upper.set_xlim(0, 1)
    upper.set_yticks([0], ["all kernels"], fontsize=8, fontweight="bold")
    upper.tick_params(labelsize=8)
    percent_axis(upper.xaxis)
    upper.spines[["top", "right", "left"]].set_visible(False)
    _lower(lower, found, report)
    handles = [Patch(color=COLOURS[part], label=f"{part} {share_words(time / total)}") for part, time in parts.items()]
    if regained > 0:
        handles.append(Patch(label="could be regained, at most (estimate)", **_REGAINED))
    legend_below(lower, 4, handles)
    notes(figure, *_notes(report))


def _finding(report: KernelReport, regained: float) -> str:
    on = "No matrix product ran"
    if report.shares.product_time_us > 0:
        on = f"{' '.join(next(figures(report.shares)))} on Tensor Cores"
    if regained <= 0:
        return on
    return f"{on}; at most {share_words(share(regained, report.shares.kernel_time_us))} of the kernel time could be regained"


def _bar(axes: Axes, place: int, times: dict[str, float], total: float) -> None:
    left = 0.0
    for part, time in times.items():
        axes.barh(place, time / total, left=left, color=COLOURS[part], height=0.74)
        left += time / total


def _lower(axes: Axes, found: tuple[Bar, ...], report: KernelReport) -> None:
    """Draw one bar per module or kernel, the one from which most could be regained on top."""
    total = report.shares.kernel_time_us
    for place, bar in enumerate(found):
        _bar(axes, place, bar.times, total)
        label = words.duration(bar.total)
        if bar.regained_us > 0:
            axes.barh(place, bar.regained_us / total, height=0.74, **_REGAINED)
            label += f", at most {words.duration(bar.regained_us)} to regain"
        axes.annotate(label, (bar.total / total, place), **_BESIDE)
    axes.set_yticks(range(len(found)), [bar.label for bar in found], fontsize=8, parse_math=False)
    axes.set_ylim(len(found) - 0.4, -0.6)
    # Room for the words at the end of the longest bar.
    axes.set_xlim(0, 1.5 * max((bar.total for bar in found), default=1.0) / total)
    percent_axis(axes.xaxis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of all kernel time")


def _notes(report: KernelReport) -> list[str]:
    everything, what = len(_everything(report)), "modules" if has_modules(report) else "kernels"
    shown = f"{MAX_BARS} of {everything:,}" if everything > MAX_BARS else "All"
    most = "could regain" if any(report.limits.saved_at_most_us.values()) else "take"
    order = f"{shown} {what}, first those that {most} most."
    if report.shares.communication_time_us > 0:
        order += " Communication, which no precision shortens, is in the first bar only."
    counted = "; ".join(filter(None, (*(" ".join(figure) for figure in figures(report.shares)), report.phrase)))
    return [f"{title(report)}.", f"On Tensor Cores: {counted}.", order]
