"""When a model must not be let go of: the garbage collector tells of a death in the middle of whatever is at work."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

#: Code of ours that must not be interrupted by letting a model go.
_ROOMS = (
    "capture",
    "counting",
    "session_file",
    "reports",
    "inspector",
    "launch.models.inspect",
    "launch.models.attaching",
    "launch.models.naming",
    "launch.models.variables",
)


def inside_ours(frame: FrameType | None) -> bool:
    """Whether it is a bad moment to let a model go: our own code, or torch at work on something else, is further up this stack.

    An object's death is told at once, wherever the garbage collector happened to run.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    own = threading.get_ident()
    stacks = [frame, *(each for thread, each in sys._current_frames().items() if thread != own)]
    return any(_is_ours(each) for each in stacks)


def _is_ours(frame: FrameType | None) -> bool:
    ours = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "mpinspect.background":
            # The writing of files, which has nothing to do with models, and may take seconds.
            return False
        ours = ours or (name.startswith("mpinspect.") and name.removeprefix("mpinspect.").startswith(_ROOMS))
        frame = frame.f_back
    return ours
