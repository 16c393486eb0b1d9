"""Draws the joined report of a run with one model."""

from __future__ import annotations

from pathlib import Path

from mpinspect.ranges.report import plots
from mpinspect.reporting.words import filled
from mpinspect.run.report import RunReport


def save(report: RunReport, path: str | Path) -> Path:
    """Write the plot of the run's only model as a PNG, and return its path.

    Raises:
        ValueError: the run does not have exactly one model.
        OSError: the file can't be written.
    """
    if len(report.parts) != 1:
        folders = ", ".join(str(Path(report.log_dir, part.name)) for part in report.parts)
        hint = filled(f"{len(report.parts)}: give one of {{}}", folders) or "none"
        raise ValueError(f"a picture is of one model, and this run has {hint}")
    return plots.save(report.parts[0].ranges, path)
