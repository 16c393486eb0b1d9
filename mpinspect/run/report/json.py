"""The joined report as JSON: the reports of ranges, shapes and kernels as they are alone, and what joins them. docs/run.md."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mpinspect.reporting.forms import form
from mpinspect.reporting.json_text import lines
from mpinspect.reporting.rendering import RendersItself
from mpinspect.run.report import ModuleRow, RunReport, by_module
from mpinspect.runtime.version import __version__

SCHEMA = "mpinspect.run"
#: Raised when a reader of an older version would misread the file; fields can be added without.
SCHEMA_VERSION = 1

_LINE_DEPTH = 5


def render(report: RunReport) -> str:
    """The report as JSON text, ASCII only; ends with a newline."""
    return lines(document(report), _LINE_DEPTH) + "\n"


def document(report: RunReport) -> dict[str, Any]:
    """What ``render`` writes, as plain dicts, lists, strings, numbers, booleans and None."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "mpinspect_version": __version__,
        "command": report.command,
        "outcome": report.outcome,
        "first_line": report.first_line,
        "log_dir": report.log_dir,
        "saw": list(report.saw),
        "modules": [_module(row) for row in by_module(report)],
        "models": [{"name": part.name, "ranges": _nested(part.ranges)} for part in report.parts],
        "shapes": _nested(report.shapes),
        "kernels": _nested(report.kernels),
    }


def _nested(report: RendersItself | None) -> dict[str, Any] | None:
    if report is None:
        return None
    found: dict[str, Any] = form(report.kind, ".json").document(report)
    return found


def _module(row: ModuleRow) -> dict[str, Any]:
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    share = row.lost_l1_share
    bounds = None if share is None else {name: getattr(share, name) for name in ("estimate", "low", "high")}
    if bounds is not None and not all(map(math.isfinite, bounds.values())):
        bounds = None
    return fields | {"lost_l1_share": bounds}
