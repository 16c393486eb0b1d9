"""The losses of one training repeated in several precisions: the data of a run, and the table that compares them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from mpinspect.reporting.words import NOT_APPLICABLE, as_power, with_power

#: A final training loss is the mean of this many steps, since losses vary more between batches than precisions.
LAST_STEPS = 10

_HEADINGS = ("precision", "seed", "loss scale", "skipped", "training", "validation", "best", "from FP32")


@dataclass(frozen=True)
class Curve:
    """One training run.

    Args:
        name: its precision in words. Runs of the same name differ in seed; a comparison's first name is the reference.
        seed: seed of weights and batches.
        loss_scale_start, loss_scale_end: scale before the first and after the last step; None without a loss scale.
        skipped_steps: number of steps with non-finite gradients.
        training_losses: one for each step, including skipped steps, in nats per word; computed in that precision.
        validation_losses: (steps taken, loss in nats per word); computed in FP32.
        emulated: whether 16-bit arithmetic was emulated on a CPU.
    """

    name: str
    seed: int
    loss_scale_start: float | None
    loss_scale_end: float | None
    skipped_steps: int
    training_losses: tuple[float, ...]
    validation_losses: tuple[tuple[int, float], ...]
    emulated: bool = False

    @property
    def steps(self) -> int:
        """The number of steps, including skipped ones."""
        return len(self.training_losses)

    @property
    def final_training_loss(self) -> float:
        """The mean training loss of the last ``LAST_STEPS`` steps."""
        return fmean(self.training_losses[-LAST_STEPS:])

    @property
    def final_validation_loss(self) -> float:
        return self.validation_losses[-1][1]

    @property
    def best_validation_loss(self) -> float:
        """The lowest measured validation loss; NaN if all are NaN."""
        return min((loss for _, loss in self.validation_losses if not math.isnan(loss)), default=math.nan)


def by_name(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Return the runs of each precision, by name; names and runs retain the given order."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.name, []).append(curve)
    return groups


def from_reference(curve: Curve, curves: Sequence[Curve]) -> float | None:
    """Return the final validation loss minus the reference's at the same seed; None for or without a reference."""
    reference = {other.seed: other.final_validation_loss for other in curves if other.name == curves[0].name}
    if curve.name == curves[0].name or curve.seed not in reference:
        return None
    return curve.final_validation_loss - reference[curve.seed]


def signed(difference: float) -> str:
    """Return a difference with sign and three decimals; any difference that rounds to zero becomes "+0.000"."""
    return f"{round(difference, 3) + 0.0:+.3f}"


def loss_scale(curve: Curve) -> str:
    """Return the run's loss scale in words: "8192 (2^13)", "2^32 -> 2^20"; "-" without one."""
    start, end = curve.loss_scale_start, curve.loss_scale_end
    if start is None or end is None:
        return NOT_APPLICABLE
    if start != end:
        return f"{as_power(start)} -> {as_power(end)}"
    return with_power(start)


def table(curves: Sequence[Curve]) -> str:
    """Return a table with a row per run, and the mean of each precision with several; no seed column for one seed."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for name, group in by_name(curves).items():
        gaps = [from_reference(curve, curves) for curve in group]
        for curve, gap in zip(group, gaps, strict=True):
            scale = (loss_scale(curve), str(curve.skipped_steps))
            rows.append((name * (curve is group[0]), str(curve.seed), *scale, *_losses([curve], [gap])))
        if len(group) > 1:
            rows.append(("", "mean", "", "", *_losses(group, gaps)))
    if len({curve.seed for curve in curves}) > 1:
        return _aligned(rows, left=3)
    return _aligned([row[:1] + row[2:] for row in rows], left=2)


def _losses(group: Sequence[Curve], gaps: Sequence[float | None]) -> list[str]:
    """Return a row's last four cells: means over a group, which may be a single run."""
    means = (
        fmean(curve.final_training_loss for curve in group),
        fmean(curve.final_validation_loss for curve in group),
        fmean(curve.best_validation_loss for curve in group),
    )
    return [*(f"{mean:.3f}" for mean in means), mean_gap(gaps) or NOT_APPLICABLE]


def mean_gap(gaps: Iterable[float | None]) -> str:
    """Return the mean of the known differences from the reference; "" if none is known."""
    known = [gap for gap in gaps if gap is not None]
    return signed(fmean(known)) if known else ""


def _aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
