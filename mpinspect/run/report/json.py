"""Writes the joined report as JSON that contains the reports of ranges, shapes and kernels unchanged (docs/run.md)."""

from __future__ import annotations

import math
from typing import Any

from mpinspect.reporting import forms
from mpinspect.reporting.json_text import Layout, fields, headed, plain
from mpinspect.reporting.rendering import RendersItself
from mpinspect.run.report import ModuleRow, RunReport, by_module

#: Depth to which each member has its own line; at depth five each finding of each part has one.
LAYOUT = Layout(5)


def to_plain(report: RunReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None."""
    body = {
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
    return headed("mpinspect.run", 1, body)


def _nested(report: RendersItself | None) -> dict[str, Any] | None:
    return None if report is None else forms.plain(report)


def _module(row: ModuleRow) -> dict[str, Any]:
    share = row.lost_l1_share
    bounds = None if share is None else (share.estimate, share.low, share.high)
    is_known = bounds is not None and all(map(math.isfinite, bounds))
    found: dict[str, Any] = plain(fields(row) | {"lost_l1_share": share if is_known else None})
    return found
