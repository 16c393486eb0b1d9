"""Shared parts of the JSON forms: plain values, a header with the schema, and strict ASCII text readable in diffs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpinspect.runtime.version import __version__

#: Functions that return the fields of a record, by its type, for records whose JSON differs from their own fields.
Special = Mapping[type, Callable[[Any], dict[str, Any]]]

_PLAIN = frozenset((int, str, bool, type(None)))


def headed(schema: str, version: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return a report's JSON object: the schema's name and version, mpinspect's version, and the body.

    Args:
        version: the schema's version, incremented when an older reader would misread the file; new fields need no
            increment.
    """
    return {"schema": schema, "schema_version": version, "mpinspect_version": __version__} | body


def fields(record: Any, *, also: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a record's fields by name, in order, without those in ``but``, followed by the properties in ``also``."""
    names = [field.name for field in dataclasses.fields(record) if field.name not in but]
    return {name: getattr(record, name) for name in (*names, *also)}


def named(record: Any, names: str) -> dict[str, Any]:
    """Return the attributes of a record whose names are given, separated by spaces, in that order."""
    return {name: getattr(record, name) for name in names.split()}


def plain(value: Any, special: Special | None = None, *, digits: int | None = None) -> Any:
    """Return ``value`` as JSON can hold it: dicts, lists, strings, numbers, booleans and None.

    JSON has no infinity and no NaN: such floats become the strings "inf", "-inf" and "nan". A value of an unknown type
    becomes its ``str``, so that every report can be written.

    Args:
        value: a record (a dataclass), a container of records, or a bare value.
        special: by record type, a function that returns the fields to write; other records have all their fields.
        digits: significant digits of floats, for estimates and shares; None for all.
    """
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "tolist"):
        # NumPy's scalars and arrays.
        value = value.tolist()
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return value if digits is None else float(f"{value:.{digits}g}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        take_apart = (special or {}).get(type(value), fields)
        return {name: plain(item, special, digits=digits) for name, item in take_apart(value).items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item, special, digits=digits) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict(), special, digits=digits)
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item, special, digits=digits) for item in value]
    return str(value)


class Layout(NamedTuple):
    """Layout of JSON text: containers down to ``depth`` have one line per member, deeper containers a single line."""

    depth: int
    indent: int = 2


def lines(value: Any, layout: Layout, at: int = 0) -> str:
    """Return a plain value as JSON text, indented for a value ``at`` levels deep."""
    if at >= layout.depth or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, allow_nan=False)
    indent = " " * layout.indent * (at + 1)
    if isinstance(value, dict):
        opening, closing = "{}"
        items = [f"{json.dumps(key)}: {lines(item, layout, at + 1)}" for key, item in value.items()]
    else:
        opening, closing = "[]"
        items = [lines(item, layout, at + 1) for item in value]
    return f"{opening}\n{indent}" + f",\n{indent}".join(items) + f"\n{indent[layout.indent :]}{closing}"
