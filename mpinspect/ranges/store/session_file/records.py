"""The small records of a session file as JSON: run, watched tensors, events, progress.

``decoding.typed`` reads them: a field that it does not know is skipped, one that a file does not have takes its default, so
fields can be added without a new schema version. A float that is not finite, which JSON can't hold, is written as "inf",
"-inf" or "nan".
"""

from __future__ import annotations

import dataclasses
import json
import math
from types import MappingProxyType
from typing import Any

import numpy as np


def encode(value: object) -> bytes:
    """UTF-8 JSON of a record, or of a list of records, keys or sentences."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        # A name can hold a lone surrogate (a path that is not UTF-8); it must come back as it was.
        "utf-8",
        "surrogatepass",
    )


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
