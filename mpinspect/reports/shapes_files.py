"""The lint's report into a file, in the form that the suffix names. A new form is a line here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpinspect.analysis.shapes.report import ShapeReport

#: Module by suffix; each has ``render(report) -> str``.
_BY_SUFFIX = {".txt": "shapes_text", ".md": "shapes_markdown", ".json": "shapes_json"}


def save(report: ShapeReport, path: str | Path) -> Path:
    """Write the report; parent directories are made. Returns the path.

    Raises:
        ValueError: a suffix that names no form.
        OSError: the file can't be written.
    """
    path = Path(path)
    name = _BY_SUFFIX.get(path.suffix.lower())
    if name is None:
        what = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise ValueError(f"{path.name!r} has {what}, which names no form of report; there are {' '.join(_BY_SUFFIX)}")
    module = importlib.import_module(f"mpinspect.reports.{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(module.render(report), encoding="utf-8")
    return path
