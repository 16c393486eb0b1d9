"""Checks whether a step of the user's training can run under a dispatch mode of ours."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mpinspect.runtime.compiled_graphs import KEEPING
from mpinspect.runtime.distributed import data_parallel, world_size


def obstacle(models: Collection[torch.nn.Module]) -> str:
    """Return why a step of the models cannot be recorded now; "" if it can."""
    if torch._C._len_torch_dispatch_stack():
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
