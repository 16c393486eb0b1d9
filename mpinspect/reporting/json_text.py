"""What the JSON forms have in common: strict JSON, ASCII, readable in a diff."""

from __future__ import annotations

import json
from typing import Any


def lines(value: Any, depth: int) -> str:
    """JSON text with a line for each member of the containers down to ``depth``; what is deeper stands in one line."""
    return _lines(value, 0, depth)


def _lines(value: Any, at: int, depth: int) -> str:
    if at >= depth or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, allow_nan=False)
    indent = "  " * (at + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_lines(item, at + 1, depth)}" for key, item in value.items()]
    else:
        items = [_lines(item, at + 1, depth) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent}" + f",\n{indent}".join(items) + f"\n{'  ' * at}{closing}"
