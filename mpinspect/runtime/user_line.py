"""Warnings that name the line of the user's code that led to them, however many layers of libraries are in between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

#: Packages between the user's code and ours: torch calls our hooks, trainers call torch.
_BETWEEN = ("mpinspect", "torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "contextlib")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn as of the innermost line outside of these packages; as of the caller's where there is none (a thread, the exit).

    Not by a stacklevel, which can't tell packages, and whose ``skip_file_prefixes`` came with Python 3.12.
    """
    caller = sys._getframe(1)
    frame: FrameType | None = caller
    while frame is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    frame = frame or caller
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__") or "sys",
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _package(frame: FrameType) -> str:
    # The loader's name where the package itself is run: `python -m mpinspect` is "__main__".
    name = frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or ""
    return str(name).partition(".")[0]
