"""Checks whether a step of the user's training can run under a dispatch mode of ours."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

from mpinspect.runtime.compiled_graphs import KEEPING
from mpinspect.runtime.distributed import data_parallel, world_size


class OwnMode(TorchDispatchMode):
    """A dispatch mode of ours, which is left where that is possible."""

    _is_entered = False
    #: Whether inference mode was on when the mode was entered.
    _in_inference_mode = False

    def __enter__(self) -> Any:
        self._is_entered, self._in_inference_mode = True, torch.is_inference_mode_enabled()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> bool:
        """Exit the mode. Return False where that isn't possible now.

        A mode of the script may be above it on this thread's stack. At its end, ``torch.inference_mode`` restores torch's
        state from its beginning: a mode that was left within it would be expected again, and the next operator would fail.
        """
        is_restored = torch.is_inference_mode_enabled() and not self._in_inference_mode
        if self._is_entered and not is_restored and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_entered = False
        return not self._is_entered


def obstacle(models: Collection[torch.nn.Module]) -> str:
    """Return why a step of the models cannot be recorded now; "" if it can."""
    if any(not isinstance(mode, OwnMode) for mode in _get_current_dispatch_mode_stack()):
        return "the script has entered a torch dispatch mode of its own"
    if KEEPING.has_missed_any(models):
        return "code was compiled by torch.compile before or out of sight, and operators inside it are not seen"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the step is captured into a CUDA graph"
    return ""


def doubt(models: Collection[torch.nn.Module]) -> str:
    """Return why a step of the models is recorded only if that is asked for; "" if nothing speaks against it.

    FSDP and quantised weights, for example, may put their own tensor types and modes below autograd.
    """
    if world_size() > 1 and not _are_replicated(models):
        return "the run is distributed, and not by DistributedDataParallel alone"
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.UninitializedParameter)
    if any(type(parameter) not in plain for model in models for parameter in model.parameters()):
        return "a parameter is a tensor of another class"
    return ""


def _are_replicated(models: Collection[torch.nn.Module]) -> bool:
    """Return whether DistributedDataParallel synchronises all weights that are trained."""
    replicated = data_parallel()
    trained = (each for model in models for each in model.parameters() if each.requires_grad)
    return all(id(each) in replicated for each in trained)
