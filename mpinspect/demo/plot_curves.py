"""Plots loss against steps for one training in several precisions, like NVIDIA's papers and talks on mixed precision.

The curves coincide, except the one without loss scaling, as in "Mixed Precision Training" (Micikevicius
et al., ICLR 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpinspect.demo.loss_curves import Curve, by_name, from_reference, loss_scale, mean_gap
from mpinspect.reporting.plot_style import FAINT, drawn, headline, notes, write
from mpinspect.reporting.words import NOT_APPLICABLE, bracketed, number_of

_HEIGHT = 5.6
#: Height of a label (two lines) as a fraction of the axes' height.
_LABEL = 0.105
#: The vertical axis need not include the losses of this first fraction of the steps.
_PLUNGE = 0.15


@dataclass(frozen=True)
class _Style:
    """The line style of a precision; styles differ in lightness and leave each other visible where lines coincide."""

    colour: str
    width: float
    dashes: Any
    marker: str


#: A wide pale band for the reference, dashes and dots on top of it, and the strongest line for curves that differ.
_STYLES = (
    _Style("#a8adb3", 7.0, "solid", ""),
    _Style("#d55e00", 2.4, "solid", "o"),
    _Style("#0b2f6b", 1.9, (0, (6, 3)), ""),
    _Style("#00785a", 1.0, "solid", "D"),
)


def save(curves: Sequence[Curve], path: str | Path, title: str) -> Path:
    """Write the chart as a PNG, atomically, and return its path.

    Args:
        curves: at least one; runs with the name of the first are the reference.
        path: an existing file is replaced.
        title: title above the chart.

    Raises:
        OSError: the file can't be written.
    """
    return write(figure(curves, title), path)


def figure(curves: Sequence[Curve], title: str) -> Figure:
    """Return a figure of the mean validation (strong) and training losses (faint), with a thin line for each seed."""

    def draw(made: Figure) -> None:
        headline(made, title)
        _draw(made.subplots(), curves)
        notes(made, _caption(curves))

    return drawn(_HEIGHT, draw)


def _draw(axes: Axes, curves: Sequence[Curve]) -> None:
    axes.set_xlim(0, max(curve.steps for curve in curves))
    axes.set_ylim(*_limits(curves))
    groups = list(by_name(curves).values())
    for place, group in enumerate(groups):
        _training(axes, group, _style(place))
    for place, group in enumerate(groups):
        _validation(axes, group, place)
    _labels(axes, groups, curves)
    axes.set_xlabel("training step")
    axes.set_ylabel("cross-entropy, nats a word")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the vertical axis' limits: the range of losses, without the large ones of the first steps."""
    late: list[float] = []
    for curve in curves:
        begin = int(_PLUNGE * curve.steps)
        late += curve.training_losses[begin:]
        late += [loss for step, loss in curve.validation_losses if step > begin]
    finite = [loss for loss in late if math.isfinite(loss)] or [0.0]
    room = 0.06 * (max(finite) - min(finite)) or 0.5
    return min(finite) - room, max(finite) + room


def _training(axes: Axes, group: Sequence[Curve], style: _Style) -> None:
    losses = [fmean(step) for step in zip(*(curve.training_losses for curve in group), strict=False)]
    axes.plot(range(1, len(losses) + 1), losses, color=style.colour, linewidth=1.0, alpha=0.45, zorder=2)


def _validation(axes: Axes, group: Sequence[Curve], place: int) -> None:
    style = _style(place)
    for curve in group if len(group) > 1 else ():
        axes.plot(*zip(*curve.validation_losses, strict=True), color=style.colour, linewidth=0.7, alpha=0.8, zorder=3)
    steps, losses = _mean(group)
    axes.plot(steps, losses, **_line(style), zorder=4 + place)
    if len(steps) == 1:
        # A line through one point is invisible.
        axes.plot(steps, losses, "s", color=style.colour, zorder=4 + place, clip_on=False)
    if style.marker and axes.get_ylim()[0] <= losses[-1] <= axes.get_ylim()[1]:
        # The axes' edge would cut the last marker in half.
        axes.plot(steps[-1:], losses[-1:], **_line(style), zorder=4 + place, clip_on=False)


def _style(place: int) -> _Style:
    return _STYLES[place % len(_STYLES)]


def _line(style: _Style) -> dict[str, Any]:
    return {
        "color": style.colour,
        "linewidth": style.width,
        "linestyle": style.dashes,
        "marker": style.marker,
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "solid_capstyle": "round",
    }


def _mean(group: Sequence[Curve]) -> tuple[list[int], list[float]]:
    """Return the steps with a validation in every run of the group, and the mean validation loss at each."""
    runs = [dict(curve.validation_losses) for curve in group]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    return steps, [fmean(run[step] for run in runs) for step in steps]


# -- words in the picture -----------------------------------------------------------------------------------------------


def _labels(axes: Axes, groups: Sequence[Sequence[Curve]], curves: Sequence[Curve]) -> None:
    """Label the end of each line with its key, name and final loss; move labels apart that would overlap."""
    training = fmean(curve.final_training_loss for curve in curves)
    ends = [_height(axes, loss) for loss in (*(_mean(group)[1][-1] for group in groups), training)]
    heights = _spread(ends, _LABEL)
    free: Any = {"transform": axes.transAxes, "clip_on": False}
    for place, (group, end, height) in enumerate(zip(groups, ends[:-1], heights[:-1], strict=True)):
        axes.plot([1.008, 1.03], [end, height], color="#999999", linewidth=0.7, **free)
        axes.plot([1.035, 1.06, 1.085], [height] * 3, **_line(_style(place)), markevery=[1], **free)
        axes.text(1.1, height + 0.006, _end_words(group, curves), fontweight="bold", va="bottom", **free)
        axes.text(1.1, height - 0.01, _scale_words(group), fontsize=8, color=FAINT, va="top", **free)
    axes.text(1.1, heights[-1], "training loss (faint lines)", fontsize=8, color=FAINT, va="center", **free)
    axes.text(
        1.1,
        max(heights) + 0.07,
        "validation loss at the end (from the reference)",
        fontsize=8,
        color=FAINT,
        va="bottom",
        **free,
    )


def _height(axes: Axes, loss: float) -> float:
    """Return a loss's height on the axis, 0 at the bottom, 1 at the top; 1 if the loss is above or non-finite."""
    low, high = axes.get_ylim()
    return min((loss - low) / (high - low), 1.0) if math.isfinite(loss) else 1.0


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return the heights in their order, at least ``gap`` apart; groups that overlapped retain their mean height."""
    order = sorted(range(len(heights)), key=lambda place: (heights[place], -place))
    clusters: list[list[float]] = []
    for place in order:
        clusters.append([heights[place], 1])
        while len(clusters) > 1 and clusters[-1][0] - clusters[-2][0] < gap * (clusters[-1][1] + clusters[-2][1]) / 2:
            (upper, many), (lower, few) = clusters.pop(), clusters.pop()
            clusters.append([(upper * many + lower * few) / (many + few), many + few])
    moved = [middle + gap * (number - (size - 1) / 2) for middle, size in clusters for number in range(int(size))]
    found = dict(zip(order, moved, strict=True))
    return [found[place] for place in range(len(heights))]


def _end_words(group: Sequence[Curve], curves: Sequence[Curve]) -> str:
    loss = fmean(curve.final_validation_loss for curve in group)
    return f"{group[0].name}: {loss:.3f}" + bracketed(mean_gap(from_reference(curve, curves) for curve in group))


def _scale_words(group: Sequence[Curve]) -> str:
    scales = dict.fromkeys(loss_scale(curve) for curve in group)
    if list(scales) == [NOT_APPLICABLE]:
        return "the reference"
    words = f"loss scale {' or '.join(scales)}"
    skipped = sorted({curve.skipped_steps for curve in group})
    if len(skipped) > 1:
        return f"{words}, {skipped[0]} to {skipped[-1]} steps skipped"
    if skipped == [0]:
        return words
    return f"{words}, {number_of(skipped[0], 'step')} skipped"


def _caption(curves: Sequence[Curve]) -> str:
    seeds = len({curve.seed for curve in curves})
    caption = "Validation losses are computed in FP32 from the FP32 weights."
    if seeds > 1:
        caption += f" Means of {seeds} seeds, thin lines: each."
    if any(curve.emulated for curve in curves):
        caption += " FP16 was emulated on a CPU."
    return caption
