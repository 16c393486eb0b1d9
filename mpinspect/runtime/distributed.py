"""Handles distributed tensors, reading only this process's part of them, so that no hook starts a collective."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_PIPELINING = "torch.distributed.pipelining"
#: Its functions that run a stage once on memory that nobody has written to, to learn the shapes of its outputs.
_TRIALS = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, the result of a collective under way, or any other tensor unchanged.

    Starts no communication. Waits for a collective that the training has started, as the tensor's next use would: with
    gloo the host waits, with NCCL the current stream.
    """
    if type(tensor) is torch.Tensor:
        # The usual case; this check is cheaper than looking up a missing attribute.
        return tensor
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return local_part(local)
    if hasattr(tensor, "trigger_wait"):
        # An AsyncCollectiveTensor; its class is not imported here, since most processes do not use it.
        under_way: Any = tensor
        with torch.no_grad():
            arrived: torch.Tensor = under_way.wait()
        return arrived
    return tensor


def is_distributed(parameter: torch.Tensor) -> bool:
    """Return whether it is a DTensor; on FSDP2's parameters post-accumulate hooks run, but tensor hooks never do."""
    return hasattr(parameter, "_local_tensor")


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without one. Communicates nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def is_pipeline_trial() -> bool:
    """Return whether a pipeline is trying out its stage, before the first step: what it computes there means nothing.

    Looks through the call stack, but only in processes that use torch's pipelining.
    """
    if _PIPELINING not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _TRIALS and frame.f_globals.get("__name__", "").startswith(_PIPELINING):
            return True
        frame = frame.f_back
    return False
