"""The kernel report's forms by a file's suffix. A new form is one file and one line here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpinspect.analysis.tensor_cores.report import KernelReport

#: Module by suffix. It has ``save(report, path)`` where the form is not text, else ``render(report) -> str``.
_BY_SUFFIX = {".txt": "kernels_text", ".md": "kernels_markdown", ".json": "kernels_json", ".png": "plot_kernels"}


def save(report: KernelReport, path: str | Path) -> Path:
    """Write the report in the form that the suffix names; parent directories are made. Returns the path.

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
    if hasattr(module, "save"):
        module.save(report, path)
    else:
        path.write_text(module.render(report), encoding="utf-8")
    return path
