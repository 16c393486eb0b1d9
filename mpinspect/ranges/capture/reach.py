"""Where tensors can't be looked at: inside of what transforms, traces or records the calls instead of running them."""

from __future__ import annotations

import sys
from typing import Any

import torch

_TRANSFORMED = "calls inside torch.func transforms (grad, vmap, ...) are not seen: their tensors hold no values"
_BATCHED = "gradients of is_grads_batched=True are not seen: each is many in one, and holds no values"
_TRACED = "calls inside torch.jit.trace are not seen: what counts them would become part of the graph"
_GRAPHED = "steps run as CUDA graphs are not seen: nothing can be counted inside one"


#: What says, unless None, that calls are transformed, and that they are traced.
transforms: Any = torch._C._functorch.peek_interpreter_stack
tracing: Any = torch._C._get_tracing_state
#: Whether a gradient is many in one (is_grads_batched=True).
is_many: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def out_of_reach(may_capture_graphs: bool, gradient: torch.Tensor | None = None) -> str | None:
    """Why tensors can't be looked at just now, in a sentence; None where they can. Does not wait for a GPU.

    Args:
        may_capture_graphs: whether there is a GPU whose streams could be capturing a graph.
        gradient: that has arrived, and may be many in one.
    """
    if transforms() is not None:
        return _TRANSFORMED
    if gradient is not None and is_many(gradient):
        return _BATCHED
    if tracing() is not None:
        return _TRACED
    # What we launched would be replayed into memory that is ours no more.
    if may_capture_graphs and torch.cuda.is_current_stream_capturing():
        return _GRAPHED
    return None


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"].get("unique_graphs"))
