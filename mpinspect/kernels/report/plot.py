"""Draw the kernel report's figure: kernel time by verdict, and the modules (or kernels) that take most of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.report.document import clean_name, figures, has_modules, share_words, title
from mpinspect.reporting import words
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.plot_style import DPI, RC, drawn, percent_axis, shortened

#: Maximum number of bars for modules or kernels.
MAX_BARS = 15
#: Colours of Okabe and Ito's palette; greys for kernels that are not products, with a darker grey for communication.
COLOURS = {
    "native": "#009e73",
    "degraded": "#e69f00",
    "off": "#d55e00",
    "unknown": "#cc79a7",
    "helper": "#56b4e9",
    "communication": "#666666",
    "other": "#c4c4c4",
}
_LABEL_LENGTH = 58
#: Maximum number of characters in a line above the bars.
_LINE = 92
#: Margin in points between a label inside a bar and the bar's edges.
_MARGIN = 3.0


@dataclass(frozen=True)
class Bar:
    """A bar of the figure: its label, and its times by part (keys of COLOURS)."""

    label: str
    times: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.times.values())


def kernels(report: KernelReport) -> Figure:
    """Return a figure with kernel time by verdict as one stacked bar, and a bar for each of the longest modules below."""
    return drawn(_height(report), lambda figure: _draw(figure, report))


def save(report: KernelReport, path: str | Path) -> Path:
    """Write the figure as PNG and return the path.

    Raises:
        OSError: the file cannot be written.
    """
    report = escaped(report)
    with matplotlib.rc_context(RC):
        kernels(report).savefig(path, format="png", dpi=DPI)
    return Path(path)


def bars(report: KernelReport) -> tuple[Bar, ...]:
    """Return a bar for each of the modules that take most time, or of the kernels if no module is known."""
    if has_modules(report):
        known = [row.module for row in report.by_module[:MAX_BARS]]
        return tuple(Bar(_label(module or "(unknown)", "start"), _times(report, module=module)) for module in known)
    chosen = report.by_name[:MAX_BARS]
    return tuple(
        Bar(_label(clean_name(row.name), "middle"), {_part(row.verdict, row.kind): row.time_us}) for row in chosen
    )


def _label(name: str, cut: str) -> str:
    return words.shortened(name, _LABEL_LENGTH, cut)


def _part(verdict: str, kind: str) -> str:
    return "communication" if kind == "communication" else verdict


def _times(report: KernelReport, module: str | None = None) -> dict[str, float]:
    found = dict.fromkeys(COLOURS, 0.0)
    for row in report.kernels:
        if module is None or row.module == module:
            found[_part(row.verdict, row.named.kind)] += row.time_us
    return {part: time for part, time in found.items() if time > 0}


def _height(report: KernelReport) -> float:
    return 1.8 if not report.kernels else 3.4 + 0.27 * len(bars(report))


def _draw(figure: Figure, report: KernelReport) -> None:
    figure.suptitle(shortened(title(report), 100), fontsize=12, fontweight="bold")
    if report.shares.kernel_time_us <= 0:
        reason = next((finding.message for finding in report.findings), "No kernel was recorded.")
        figure.text(
            0.5, 0.4, "\n".join(textwrap.wrap(shortened(reason, 400), 100)), ha="center", va="center", fontsize=10
        )
        return
    found = bars(report)
    upper, lower = figure.subplots(2, 1, height_ratios=[1.0, max(1.0, 0.62 * len(found))])
    labels = _whole(upper, report)
    _parts(lower, found, report)
    _legend(upper, report)
    _drop_wide(figure, labels)


def _whole(axes: Axes, report: KernelReport) -> list[tuple[Text, Rectangle]]:
    """Draw one bar of all kernel time and return each part's label with its bar."""
    total, left = report.shares.kernel_time_us, 0.0
    labelled = []
    for part, time in _times(report).items():
        width = time / total
        (bar,) = axes.barh(0, width, left=left, color=COLOURS[part], height=0.8)
        label = f"{part} {share_words(width)}"
        text = axes.text(left + width / 2, 0, label, ha="center", va="center", fontsize=9, color=_ink(part))
        labelled.append((text, bar))
        left += width
    axes.set_xlim(0, 1)
    axes.set_yticks([])
    percent_axis(axes.xaxis)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title("\n".join(_sentences(report)), loc="left", fontsize=9.5)
    return labelled


def _drop_wide(figure: Figure, labelled: Iterable[tuple[Text, Rectangle]]) -> None:
    """Remove labels that do not fit their bars; bar widths are measured, since they depend on the longest name."""
    figure.draw_without_rendering()
    margin = _MARGIN * figure.dpi / 72
    for text, bar in labelled:
        if text.get_window_extent().width + 2 * margin > bar.get_window_extent().width:
            text.remove()


def _sentences(report: KernelReport) -> Iterator[str]:
    for number, (figure, of) in enumerate(figures(report.shares)):
        yield from textwrap.wrap(f"{'' if number else 'on Tensor Cores: '}{figure} {of}", _LINE)
    if report.phrase:
        yield from textwrap.wrap(report.phrase, _LINE)


def _parts(axes: Axes, found: Sequence[Bar], report: KernelReport) -> None:
    """Draw one bar per module or kernel, the one with most time on top."""
    total = report.shares.kernel_time_us
    for place, bar in enumerate(found):
        left = 0.0
        for part, time in bar.times.items():
            axes.barh(place, time / total, left=left, color=COLOURS[part], height=0.74)
            left += time / total
        axes.text(left, place, f" {words.duration(bar.total)}", va="center", fontsize=8, color="#444444")
    labels = [shortened(bar.label, _LABEL_LENGTH) for bar in found]
    axes.set_yticks(range(len(found)), labels, fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(bar.total for bar in found) / total)
    percent_axis(axes.xaxis)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    everything = report.by_module if has_modules(report) else report.by_name
    what = "modules" if has_modules(report) else "kernels"
    which = (
        f"the {len(found)} {what} that take most, of {len(everything):,}"
        if len(found) < len(everything)
        else f"all {what}"
    )
    axes.set_xlabel(f"share of all kernel time: {which}")


def _legend(axes: Axes, report: KernelReport) -> None:
    """Draw a legend of all parts with their shares, since labels of small parts do not fit the bar."""
    total, times = report.shares.kernel_time_us, _times(report)
    handles = [matplotlib.patches.Patch(color=COLOURS[part]) for part in times]
    labels = [f"{part} {share_words(time / total)}" for part, time in times.items()]
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=len(labels), fontsize=8)


def _ink(part: str) -> str:
    return "white" if part in ("native", "off", "communication") else "#222222"
