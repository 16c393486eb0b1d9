"""Handles distributed tensors, reading only this process's part of them, so that no hook starts a collective."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch

from mpinspect.runtime.garbage_collection import living, with_subclasses
from mpinspect.runtime.wrappers import registered

_PIPELINING = "torch.distributed.pipelining"
#: Its functions that run a stage once on uninitialised memory, to determine the shapes of its outputs.
_TRIALS = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, the result of a collective under way, or a nested tensor's values.

    Returns any other tensor unchanged, also a nested tensor whose memory holds values of other tensors.

    Starts no communication. Waits for a collective that the training has started, as the tensor's next use would: with
    gloo the host waits, with NCCL the current stream.
    """
    if type(tensor) is torch.Tensor:
        # The usual case; this check is cheaper than looking up a missing attribute.
        if tensor.is_nested and tensor.is_contiguous():
            return tensor.detach().values()
        return tensor
    if tensor.is_nested and tensor.layout is torch.jagged:
        jagged: Any = tensor
        if jagged._lengths is not None:
            return tensor
        return local_part(jagged._values)
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


def place_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where this process's part of a DTensor begins, and the whole's shape; None for others. Starts no communication."""
    if not is_distributed(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    distributed: Any = tensor
    shape = tuple(distributed.shape)
    _, offset = compute_local_shape_and_global_offset(shape, distributed.device_mesh, distributed.placements)
    return tuple(offset), shape


def has_process_group() -> bool:
    """Return whether this process has joined torch's default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size(group: Any = None) -> int:
    """Return the number of ranks of a process group (None: the default one), or 1 without a group. Communicates nothing."""
    if not has_process_group():
        return 1
    return torch.distributed.get_world_size(group)


def is_pipeline_trial() -> bool:
    """Return whether a pipeline is running its stage on a trial, before the first step, with meaningless values.

    Searches the call stack, but only in processes that use torch's pipelining.
    """
    if _PIPELINING not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _TRIALS and frame.f_globals.get("__name__", "").startswith(_PIPELINING):
            return True
        frame = frame.f_back
    return False


def is_from_stage_before(tensor: torch.Tensor) -> bool:
    """Return whether a module's input arrived from the previous pipeline stage: it is a leaf that requires a gradient."""
    return _PIPELINING in sys.modules and tensor.requires_grad and tensor.is_leaf


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: the process group's, else the launcher's; (0, 1) without either."""
    if has_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    if not 0 <= rank < world:
        return 0, 1
    return rank, world


class Held(NamedTuple):
    """How this process's part of a tensor relates to the other ranks': as in ``TensorInfo``."""

    how: str = ""
    replicas: int = 1
    is_first: bool = True


def held(tensor: torch.Tensor) -> Held:
    """Return how a DTensor lies on the ranks, by its placements; Held() for any other tensor. Starts no communication.

    A tensor that is still to be summed (Partial) in any dimension of the mesh is each rank's own.
    """
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None or not is_distributed(tensor):
        return Held()
    if any(placement.is_partial() for placement in placements):
        return Held("own")
    place = mesh.get_coordinate() or [0] * len(placements)
    replicated = [number for number, placement in enumerate(placements) if placement.is_replicate()]
    replicas = 1
    for number in replicated:
        replicas *= mesh.size(number)
    how = "shard" if len(replicated) < len(placements) else "replica"
    return Held(how, replicas, all(place[number] == 0 for number in replicated))


def data_parallel(least_ranks: int = 2) -> dict[int, torch.nn.Module]:
    """Return the DistributedDataParallel module of each parameter that it synchronises, by the parameter's id.

    A wrapped model has no reference to its wrapper, so this searches all living objects; in a process without a group of
    ``least_ranks`` it skips the search.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None or not has_process_group() or rank_and_world()[1] < least_ranks:
        return {}
    return {
        id(parameter): wrapper
        for wrapper in living(with_subclasses(module.DistributedDataParallel))
        # A module whose __init__ failed has no inner module.
        if (inner := registered(wrapper, "_modules").get("module")) is not None
        for name, parameter in inner.named_parameters()
        if name not in getattr(wrapper, "parameters_to_ignore", ())
    }


def copy_held(wrapper: Any) -> Held:
    """Return how a DistributedDataParallel module's parameters lie on its group's ranks; Held() if the group has ended."""
    distributed, group = torch.distributed, getattr(wrapper, "process_group", None)
    if group is None or not distributed.is_initialized():
        return Held()
    replicas, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if rank < 0:
        # This process is not in the group.
        return Held()
    return Held("replica", replicas, rank == 0)


def allows_uneven_inputs(wrapper: Any) -> bool:
    """Return whether a DistributedDataParallel module trains inside torch's ``Join``: ranks may then take fewer steps."""
    return getattr(getattr(wrapper, "_join_config", None), "enable", False) is True


def summed_in(parameter: torch.Tensor, wrapper: Any = None) -> torch.dtype | None:
    """Return the dtype in which the ranks' gradients of a parameter are summed; None if unknown, or if they are not summed.

    Args:
        parameter: any parameter.
        wrapper: its DistributedDataParallel module, if any. The sum's dtype is the parameter's, or the one that a known
            compression hook uses; unknown hooks give None.
    """
    if wrapper is None:
        return None
    if mixed := getattr(wrapper, "mixed_precision", None):
        return getattr(mixed, "reduce_dtype", None) or parameter.dtype
    hooks = getattr(wrapper, "_comm_hooks", None) or []
    names = ["allreduce_hook", *(getattr(hook, "__name__", "") for hook, _ in hooks if hook is not None)]
    known = {
        "allreduce_hook": parameter.dtype,
        "fp16_compress_hook": torch.float16,
        "bf16_compress_hook": torch.bfloat16,
    }
    return known.get(names[-1])


def sharded_sum_in(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype in which ``fully_shard`` sums the gradients of a module's group; None if unknown or unsharded.

    FSDP2's policy has no public accessor. From torch 2.15 on each parameter has a policy; without a ``reduce_dtype`` its
    gradients are summed in its ``grad_dtype``. Before, the default was the dtype of the computation.
    """
    get_state: Any = getattr(module, "_get_fsdp_state", bool)
    group = getattr(get_state(), "_fsdp_param_group", None)
    policy = getattr(group, "mp_policy", None)
    own = next(module.parameters(), None)
    found: torch.dtype | None
    if policy is not None:
        found = policy.reduce_dtype or policy.param_dtype or getattr(own, "dtype", None)
        return found
    policies = [policy for each in getattr(group, "fsdp_params", ()) if (policy := getattr(each, "mp_policy", None))]
    if not policies:
        return None
    found = policies[0].reduce_dtype or getattr(own, "grad_dtype", None)
    return found
