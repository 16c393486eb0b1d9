"""Reports: each renders one kind of report in one form and knows no other. A new form is one file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Modules by suffix, for each kind of report. A module has ``save(report, path)`` where the form is not text, else
#: ``render(report) -> str``.
RANGES = {".txt": "text", ".md": "markdown", ".json": "json", ".png": "plots"}
SHAPES = {".txt": "shapes_text", ".md": "shapes_markdown", ".json": "shapes_json"}
KERNELS = {".txt": "kernels_text", ".md": "kernels_markdown", ".json": "kernels_json", ".png": "plot_kernels"}


def save(report: Any, path: str | Path, forms: Mapping[str, str]) -> Path:
    """Write a report in the one of its ``forms`` that the suffix names; parent directories are made. Returns the path.

    Raises:
        ValueError: a suffix that names no form.
        OSError: the file can't be written.
    """
    path = Path(path)
    name = forms.get(path.suffix.lower())
    if name is None:
        what = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise ValueError(f"{path.name!r} has {what}, which names no form of report; there are {' '.join(forms)}")
    module = importlib.import_module(f"{__name__}.{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(module, "save"):
        module.save(report, path)
    else:
        path.write_text(module.render(report), encoding="utf-8")
    return path
