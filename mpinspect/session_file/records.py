"""The small records of a session file as JSON: run, watched tensors, events, progress.

A field that a reader does not know is skipped, one that a file does not have takes its default, so fields can be
added without a new schema version. A float that is not finite, which JSON can't hold, is written as "inf", "-inf" or "nan".
"""

from __future__ import annotations

import dataclasses
import json
import math
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from mpinspect.session import Event, Progress, RunInfo, ScaleChange, TensorInfo, TensorKey

_Record = TypeVar("_Record", RunInfo, TensorInfo, Event, Progress)


def encode(value: object) -> bytes:
    """UTF-8 JSON of a record, or of a list of records, keys or sentences."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        # A name can hold a lone surrogate (a path that is not UTF-8); it must come back as it was.
        "utf-8",
        "surrogatepass",
    )


def decode(payload: bytes) -> Any:
    """What ``encode`` was given, as plain dicts and lists. Raises ValueError if it is no JSON."""
    return json.loads(payload.decode("utf-8", "surrogatepass"))


def run_info(fields: dict[str, Any]) -> RunInfo:
    record = _build(RunInfo, fields)
    return dataclasses.replace(record, kinds=tuple(record.kinds), versions=MappingProxyType(dict(record.versions)))


def tensor_info(fields: dict[str, Any]) -> TensorInfo:
    record = _build(TensorInfo, fields)
    return dataclasses.replace(record, shape=tuple(record.shape))


def event(fields: dict[str, Any]) -> Event:
    record = _build(Event, fields)
    return dataclasses.replace(
        record, loss_scale=_number(record.loss_scale), last_maxima=tuple(float(value) for value in record.last_maxima)
    )


def progress(fields: dict[str, Any]) -> Progress:
    record = _build(Progress, fields)
    return dataclasses.replace(
        record, scales=tuple(ScaleChange(int(step), _number(scale)) for step, scale in record.scales)
    )


def tensor_key(pair: list[str]) -> TensorKey:
    name, kind = pair
    return TensorKey(str(name), str(kind))


def _build(record: type[_Record], fields: dict[str, Any]) -> _Record:
    known = {field.name for field in dataclasses.fields(record)}
    return record(**{name: value for name, value in fields.items() if name in known})


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as arrays, numpy's scalars as Python's, floats that JSON can't hold as text."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (dict, MappingProxyType)):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
