"""Replaces files atomically: readers find the old file or the new one, even if the writer is killed. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: str | Path, document: Any) -> None:
    """Write a document as JSON, replacing an existing file; create the folder if needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No search for results matches this suffix, if the file is left behind.
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(target)
