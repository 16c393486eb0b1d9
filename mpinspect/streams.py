"""Writing to a terminal or pipe that may lack a layer's name, be closed, or not be there at all."""

from __future__ import annotations

import contextlib
from typing import TextIO


def write(stream: TextIO | None, text: str) -> None:
    """Write text, what the stream's encoding lacks escaped, and flush. Never raises an Exception: nobody may be listening."""
    with contextlib.suppress(Exception):
        if stream is not None:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
