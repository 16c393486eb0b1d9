"""Reports: each renders one kind of report in one form and knows no other. A new form is one file and one line here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

#: Modules by suffix, for each kind of report. A module has ``save(report, path)`` where the form is not text, else
#: ``render(report) -> str``; that of plain text also ``render_html(report)`` and ``render_console(report, console)``, that
#: of JSON ``document(report)``, the same as plain dicts and lists.
FORMS = {
    "ranges": {".txt": "text", ".md": "markdown", ".json": "json", ".png": "plots"},
    "shapes": {".txt": "shapes_text", ".md": "shapes_markdown", ".json": "shapes_json"},
    "kernels": {".txt": "kernels_text", ".md": "kernels_markdown", ".json": "kernels_json", ".png": "plot_kernels"},
    "run": {".txt": "run_text", ".md": "run_markdown", ".json": "run_json", ".png": "run_picture"},
}


def form(kind: str, suffix: str) -> ModuleType:
    """The module that renders a kind of report in the form of a suffix. Raises KeyError where there is none."""
    return importlib.import_module(f"{__name__}.{FORMS[kind][suffix]}")


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
