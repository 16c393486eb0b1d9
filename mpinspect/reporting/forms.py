"""The forms of reports: which module renders a kind of report for a suffix. A new form is one file and one line here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

#: Modules by suffix, for each kind of report; named and not imported, for here nobody knows the questions. A module has
#: ``save(report, path)`` where the form is not text, else ``render(report) -> str``; that of plain text also
#: ``render_html(report)`` and ``render_console(report, console)``, that of JSON ``document(report)``, the same as plain
#: dicts and lists.
FORMS = {
    "ranges": {
        ".txt": "mpinspect.ranges.report.text",
        ".md": "mpinspect.ranges.report.markdown",
        ".json": "mpinspect.ranges.report.json",
        ".png": "mpinspect.ranges.report.plots",
    },
    "shapes": {
        ".txt": "mpinspect.shapes.report.text",
        ".md": "mpinspect.shapes.report.markdown",
        ".json": "mpinspect.shapes.report.json",
    },
    "kernels": {
        ".txt": "mpinspect.kernels.report.text",
        ".md": "mpinspect.kernels.report.markdown",
        ".json": "mpinspect.kernels.report.json",
        ".png": "mpinspect.kernels.report.plot",
    },
    "run": {
        ".txt": "mpinspect.run.report.text",
        ".md": "mpinspect.run.report.markdown",
        ".json": "mpinspect.run.report.json",
        ".png": "mpinspect.run.report.picture",
    },
}


def form(kind: str, suffix: str) -> ModuleType:
    """The module that renders a kind of report in the form of a suffix. Raises KeyError where there is none."""
    return importlib.import_module(FORMS[kind][suffix])


def save(report: Any, path: str | Path, kind: str) -> Path:
    """Write a report of that kind in the form that the suffix names; parent directories are made. Returns the path.

    Raises:
        ValueError: a suffix that names no form.
        OSError: the file can't be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMS[kind]:
        what = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise ValueError(f"{path.name!r} has {what}, which names no form of report; there are {' '.join(FORMS[kind])}")
    module = form(kind, suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(module, "save"):
        module.save(report, path)
    else:
        path.write_text(module.render(report), encoding="utf-8")
    return path
