"""Escapes a report's strings, so that a string can neither control the terminal nor break a line.

Names, notes and sentences originate in models, files and traces. Records and JSON hold them unescaped. Each renderer of
documents, and each plot, begins with ``escaped``; Markdown's and HTML's own markup is escaped by their renderers.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from mpinspect.reporting.streams import printable

Report = TypeVar("Report")

#: Annotations of fields that hold no text, or text of several lines.
_NO_LINE = re.compile(r"Lines|(?:int|float|bool|None|IntArray|Interval|ExponentHistogram|Count|Seconds|Exponent|[ |])+")


def escaped(report: Report) -> Report:
    """Return the report with ``printable`` applied to every string; the same object if every string is printable."""
    return _escaped(report, {})  # type: ignore[no-any-return]


def _escaped(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, str):
        return printable(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in _fields(type(value))}
        changed = {name: new for name, old in fields.items() if (new := _escaped(old, known)) is not old}
        for name in _fields_of_lines(type(value)):
            changed[name] = "\n".join(map(printable, getattr(value, name).split("\n")))
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, (tuple, list)):
        # Windows share the tuple of their tensors' keys. The report references these objects, so no id is reused.
        if id(value) not in known:
            known[id(value)] = _sequence(value, known)
        return known[id(value)]
    if isinstance(value, (dict, MappingProxyType)):
        items = {_escaped(key, known): _escaped(item, known) for key, item in value.items()}
        same = all(
            new is old
            for pair in zip(items.items(), value.items(), strict=False)
            for new, old in zip(*pair, strict=True)
        )
        return value if same and len(items) == len(value) else items
    return value


def _sequence(value: Any, known: dict[int, Any]) -> Any:
    items = [_escaped(item, known) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    # A named tuple takes its items one by one.
    return getattr(value, "_make", type(value))(items)


@cache
def _fields(record: type) -> tuple[str, ...]:
    """Return the names of the fields that may hold text."""
    return tuple(
        field.name for field in dataclasses.fields(record) if field.init and not _NO_LINE.fullmatch(str(field.type))
    )


@cache
def _fields_of_lines(record: type) -> tuple[str, ...]:
    """Return the names of the fields whose text may have several lines."""
    return tuple(field.name for field in dataclasses.fields(record) if field.init and field.type == "Lines")
