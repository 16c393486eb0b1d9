"""The report as JSON: every field, strict JSON, versioned. The schema: docs/report-schema.md.

JSON has no infinity and no NaN: such floats are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis.report import Coverage, RangeReport
from mpinspect.ranges.session import LostUpdates, Session, Window
from mpinspect.reporting.json_text import lines
from mpinspect.runtime.version import __version__

SCHEMA = "mpinspect.report"
#: Raised when a reader of an older version would misread the file; fields can be added without.
SCHEMA_VERSION = 1

#: Containers down to this depth get a line for each of their members, deeper ones one line in all: a layer is two lines or so.
_LINE_DEPTH = 3


def render(report: RangeReport) -> str:
    """The report as JSON text, ASCII only, keys in the order of the fields; ends with a newline."""
    return lines(document(report), _LINE_DEPTH) + "\n"


def document(report: RangeReport) -> dict[str, Any]:
    """What ``render`` writes, as plain dicts, lists, strings, numbers, booleans and None."""
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "mpinspect_version": __version__}
    return head | _fields(report)


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it; a type that is not known becomes its ``str``, so that no report fails for it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        special = _SPECIAL.get(type(value))
        return special(value) if special else _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, (tuple, list, set, frozenset, np.ndarray)):
        return [_plain(item) for item in value]
    return str(value)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _histogram(histogram: ExponentHistogram) -> dict[str, Any]:
    derived = {name: getattr(histogram, name) for name in ("nonzero", "total", "min_abs", "max_abs")}
    return _fields(histogram) | {name: _plain(value) for name, value in derived.items()}


def _lost_updates(updates: LostUpdates) -> dict[str, Any]:
    return _fields(updates) | {"fraction": updates.fraction}


def _coverage(coverage: Coverage) -> dict[str, Any]:
    never = [dict(zip(("name", "kind", "reason"), entry, strict=True)) for entry in coverage.never_fired]
    return _fields(coverage) | {"never_fired": never}


def _window(window: Window) -> dict[str, Any]:
    """A window without its histograms: the layers hold their sum, the session file holds each."""
    return {
        field.name: _plain(getattr(window, field.name))
        for field in dataclasses.fields(window)
        if field.name != "tensors"
    }


def _session(session: Session) -> dict[str, Any]:
    """The session; its events stand in the report itself."""
    return {
        field.name: _plain(getattr(session, field.name))
        for field in dataclasses.fields(session)
        if field.name != "events"
    }


_SPECIAL: dict[type, Any] = {
    ExponentHistogram: _histogram,
    LostUpdates: _lost_updates,
    Coverage: _coverage,
    Window: _window,
    Session: _session,
}
