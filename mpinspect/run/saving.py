"""What a launch leaves in its run directory when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.run.outcome import Outcome
from mpinspect.run.record import REPORTS, now, write_record
from mpinspect.run.seen import Parts, RecordedModel

if TYPE_CHECKING:
    from mpinspect.run.report import RunReport


def save(directory: Path, report: RunReport, parts: Parts, record: dict[str, Any], outcome: Outcome) -> None:
    """Write the report and the last run.json, whose first one held ``record``. Raises OSError."""
    for model in parts.models:
        _save_again(model)
    for name in REPORTS:
        report.save(directory / name)
    models = [{"name": model.name, "log_dir": model.log_dir} for model in parts.models]
    write_record(directory, record | how_it_ended(outcome) | {"models": models, "saw": list(report.saw)})


def how_it_ended(outcome: Outcome) -> dict[str, Any]:
    """The fields of run.json that the end fills in."""
    return {
        "ended": now(),
        "outcome": outcome.words,
        "status": outcome.status,
        "by_error": outcome.by_error,
    }


def _save_again(model: RecordedModel) -> None:
    """Where the script removed the session's file while it was written."""
    from mpinspect.ranges.store import FILE_NAME

    if model.log_dir is not None and not (Path(model.log_dir) / FILE_NAME).exists():
        Path(model.log_dir).mkdir(parents=True, exist_ok=True)
        model.session.save(model.log_dir)
