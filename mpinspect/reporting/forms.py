"""The kinds of reports and their output forms: a kind builds a document and JSON, and a file suffix selects the form.

A new form needs one renderer and one line here; a new kind of report needs its modules and one entry in KINDS.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mpinspect.reporting.document import Document
from mpinspect.reporting.words import filled
from mpinspect.runtime.appending import replace_whole


@dataclass(frozen=True)
class Kind:
    """The names of the modules that present a kind of report; they are imported only when needed.

    Args:
        document: module with ``document(report) -> Document``.
        json: module with ``to_plain(report)``, the report as plain dicts and lists, and ``LAYOUT``, its text layout.
        picture: module with ``save(report, path)``; "" if there is no picture.
    """

    document: str
    json: str
    picture: str = ""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The file suffixes of this kind's forms."""
        return (*_TEXTS, ".json", *((".png",) if self.picture else ()))


KINDS = {
    "ranges": Kind("mpinspect.ranges.report.document", "mpinspect.ranges.report.json", "mpinspect.ranges.report.plots"),
    "probe": Kind("mpinspect.ranges.report.probe", "mpinspect.ranges.report.probe"),
    "ranking": Kind("mpinspect.ranges.report.precision_ranking", "mpinspect.ranges.report.precision_ranking"),
    "recipes": Kind("mpinspect.ranges.report.recipes", "mpinspect.ranges.report.recipes"),
    "shapes": Kind("mpinspect.shapes.report.document", "mpinspect.shapes.report.json"),
    "kernels": Kind(
        "mpinspect.kernels.report.document", "mpinspect.kernels.report.json", "mpinspect.kernels.report.plot"
    ),
    "diff": Kind("mpinspect.run.diff.document", "mpinspect.run.diff.document"),
    "run": Kind("mpinspect.run.report.document", "mpinspect.run.report.json", "mpinspect.run.report.picture"),
}
#: The renderers by suffix: ``render(document) -> str``.
_TEXTS = {
    ".txt": "mpinspect.reporting.text",
    ".md": "mpinspect.reporting.markdown",
    ".html": "mpinspect.reporting.html",
}


def document(report: Any, **options: Any) -> Document:
    """Return a report's document, which every form renders; the options are those of the kind's ``document``."""
    built: Document = importlib.import_module(KINDS[report.kind].document).document(report, **options)
    return built


def plain(report: Any) -> dict[str, Any]:
    """Return a report as plain dicts, lists, strings, numbers, booleans and None, as in its JSON."""
    found: dict[str, Any] = _json(report).to_plain(report)
    return found


def render(report: Any, suffix: str, **options: Any) -> str:
    """Return a report as text in the form that a file suffix selects.

    Args:
        suffix: .txt .md .html or .json.
        options: passed to the renderer, such as ``width`` for plain text.

    Raises:
        KeyError: the suffix is another one.
    """
    if suffix == ".json":
        from mpinspect.reporting.json_text import lines

        return lines(plain(report), _json(report).LAYOUT) + "\n"
    text: str = importlib.import_module(_TEXTS[suffix]).render(document(report), **options)
    return text


def save(report: Any, path: str | Path) -> Path:
    """Write a report in the form that the path's suffix selects, and return the path. Creates parent directories.

    The file is written whole or not at all: a page that a browser has open is never half of one.

    Raises:
        ValueError: the suffix selects no form.
        OSError: the file can't be written.
    """
    path = Path(path)
    suffix, suffixes = path.suffix.lower(), KINDS[report.kind].suffixes
    if suffix not in suffixes:
        what = filled("the suffix {!r}", path.suffix) or "no suffix"
        raise ValueError(f"{path.name!r} has {what}, which names no form of report; there are {' '.join(suffixes)}")
    if suffix == ".png":
        picture = importlib.import_module(KINDS[report.kind].picture)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(report, path)
    else:
        text = render(report, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, text.encode("utf-8"))
    return path


def _json(report: Any) -> ModuleType:
    return importlib.import_module(KINDS[report.kind].json)
