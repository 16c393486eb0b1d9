"""The kinds of reports and their forms: a kind builds one document and its JSON, and a suffix picks the form.

A new form of all reports is one renderer and one line here; a new kind of report is a ``document`` module and one entry.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mpinspect.reporting.document import Document


@dataclass(frozen=True)
class Kind:
    """Where a kind of report is told. The modules are named and not imported, for nothing here knows the questions.

    Args:
        document: has ``document(report) -> Document``.
        json: has ``to_plain(report)``, the report as plain dicts and lists, and ``LAYOUT`` of its text.
        picture: has ``save(report, path)``; "" where there is no picture.
    """

    document: str
    json: str
    picture: str = ""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The forms of this kind."""
        return (*_TEXTS, ".json", *((".png",) if self.picture else ()))


KINDS = {
    "ranges": Kind("mpinspect.ranges.report.document", "mpinspect.ranges.report.json", "mpinspect.ranges.report.plots"),
    "probe": Kind("mpinspect.ranges.report.probe", "mpinspect.ranges.report.probe"),
    "shapes": Kind("mpinspect.shapes.report.document", "mpinspect.shapes.report.json"),
    "kernels": Kind(
        "mpinspect.kernels.report.document", "mpinspect.kernels.report.json", "mpinspect.kernels.report.plot"
    ),
    "run": Kind("mpinspect.run.report.document", "mpinspect.run.report.json", "mpinspect.run.report.picture"),
}
#: The renderers by suffix: ``render(document) -> str``.
_TEXTS = {
    ".txt": "mpinspect.reporting.text",
    ".md": "mpinspect.reporting.markdown",
    ".html": "mpinspect.reporting.html",
}


def document(report: Any, **options: Any) -> Document:
    """Return what a report says, before it has a form.

    Args:
        report: of any kind.
        options: of the kind's ``document``.
    """
    built: Document = importlib.import_module(KINDS[report.kind].document).document(report, **options)
    return built


def plain(report: Any) -> dict[str, Any]:
    """Return a report as plain dicts, lists, strings, numbers, booleans and None: what its JSON holds."""
    found: dict[str, Any] = _json(report).to_plain(report)
    return found


def render(report: Any, suffix: str, **options: Any) -> str:
    """Return a report as text in the form of a suffix.

    Args:
        suffix: .txt .md .html or .json.
        options: of the renderer; ``width`` of plain text.

    Raises:
        KeyError: another suffix.
    """
    if suffix == ".json":
        from mpinspect.reporting.json_text import lines

        return lines(plain(report), _json(report).LAYOUT) + "\n"
    text: str = importlib.import_module(_TEXTS[suffix]).render(document(report), **options)
    return text


def save(report: Any, path: str | Path) -> Path:
    """Write a report in the form that the suffix names; parent directories are made. Returns the path.

    Raises:
        ValueError: a suffix that names no form.
        OSError: the file can't be written.
    """
    path = Path(path)
    suffix, suffixes = path.suffix.lower(), KINDS[report.kind].suffixes
    if suffix not in suffixes:
        what = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise ValueError(f"{path.name!r} has {what}, which names no form of report; there are {' '.join(suffixes)}")
    if suffix == ".png":
        picture = importlib.import_module(KINDS[report.kind].picture)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(report, path)
    else:
        text = render(report, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def _json(report: Any) -> ModuleType:
    return importlib.import_module(KINDS[report.kind].json)
