"""What the JSON forms have in common: records as plain values, a head with the schema, strict ASCII text readable in a diff."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpinspect.runtime.version import __version__

#: How records of some types are taken apart, where their fields alone will not do.
Special = Mapping[type, Callable[[Any], dict[str, Any]]]

_PLAIN = frozenset((int, str, bool, type(None)))


def headed(schema: str, version: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return a report's document: its schema, that schema's version, mpinspect's, and the body.

    Args:
        version: raised when a reader of an older one would misread the file; fields can be added without.
    """
    return {"schema": schema, "schema_version": version, "mpinspect_version": __version__} | body


def fields(record: Any, *, also: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a record's fields by name in their order, without those in ``but``, and then its properties ``also``."""
    names = [field.name for field in dataclasses.fields(record) if field.name not in but]
    return {name: getattr(record, name) for name in (*names, *also)}


def plain(value: Any, special: Special | None = None, *, digits: int | None = None) -> Any:
    """``value`` as JSON can hold it: dicts, lists, strings, numbers, booleans and None.

    JSON has no infinity and no NaN: such floats are the strings "inf", "-inf" and "nan". A value of an unknown type becomes its
    ``str``, so that no report fails for it.

    Args:
        value: a record (a dataclass), a container of them, or a bare value.
        special: for the types in it a function that gives their fields; all fields for other records.
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
        return str(value) if not math.isfinite(value) else value if digits is None else float(f"{value:.{digits}g}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        take_apart = (special or {}).get(type(value), fields)
        return {name: plain(item, special, digits=digits) for name, item in take_apart(value).items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item, special, digits=digits) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict(), special, digits=digits)
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item, special, digits=digits) for item in value]
    return None if value is None else str(value)


class Layout(NamedTuple):
    """How JSON text is laid out: the members of containers down to ``depth`` have a line each, deeper ones share one."""

    depth: int
    indent: int = 2


def lines(value: Any, layout: Layout, at: int = 0) -> str:
    """Plain values as JSON text, from ``at`` levels inside a whole."""
    if at >= layout.depth or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, allow_nan=False)
    indent = " " * layout.indent * (at + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {lines(item, layout, at + 1)}" for key, item in value.items()]
    else:
        items = [lines(item, layout, at + 1) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent}" + f",\n{indent}".join(items) + f"\n{indent[layout.indent :]}{closing}"
