"""Files that are written whole: whoever reads one, or kills the writer, finds the old one or the new one. Needs no package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: str | Path, document: Any) -> None:
    """Write a document as JSON in place of what is there; the folder is made if need be."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Its name ends in nothing that is looked for, should it be left behind.
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(target)
