"""Writes the joined report as JSON that contains the reports of ranges, shapes and kernels unchanged (docs/run.md)."""

from __future__ import annotations

import math
from typing import Any

from mpinspect.reporting import forms
from mpinspect.reporting.json_text import Layout, fields, headed, plain
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
        "models": [{"name": part.name, "ranges": forms.plain(part.ranges)} for part in report.parts],
        "shapes": report.shapes and forms.plain(report.shapes),
        "kernels": report.kernels and forms.plain(report.kernels),
    }
    return headed("mpinspect.run", 1, body)


def _module(row: ModuleRow) -> dict[str, Any]:
    found: dict[str, Any] = plain(fields(row))
    share = row.lost_l1_share
    if share is not None and not all(map(math.isfinite, (share.estimate, share.low, share.high))):
        found["lost_l1_share"] = None
    return found
