"""When a model must not be let go of: the garbage collector tells of a death in the middle of whatever is at work."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

from mpinspect.runtime import own_code


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
        if own_code.is_of(frame, own_code.WRITING_FILES):
            return False
        ours = ours or own_code.is_of(frame, own_code.NOT_TO_BE_INTERRUPTED)
        frame = frame.f_back
    return ours
