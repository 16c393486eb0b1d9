"""Which leaves a backward will reach: read from the graph, before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

#: Nodes looked at in one graph: enough for any model of thousands of layers, and no more than some 0.2 s.
_MOST_NODES = 300_000


def leaves(tensors: Any) -> dict[int, torch.Tensor]:
    """The leaf tensors, by id, whose ``.grad`` a backward from these tensors can change.

    Args:
        tensors: what ``torch.autograd.backward`` is given: a tensor, a GradientEdge, or a sequence of them.
    """
    found: dict[int, torch.Tensor] = {}
    waiting: list[Any] = []
    for start in _several(tensors):
        if isinstance(start, torch.Tensor) and start.grad_fn is None and start.requires_grad:
            found[id(start)] = start
        node = start.grad_fn if isinstance(start, torch.Tensor) else getattr(start, "node", None)
        if node is not None:
            waiting.append(node)
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        for following in _following(node):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _several(tensors: Any) -> Iterable[Any]:
    if isinstance(tensors, torch.Tensor) or hasattr(tensors, "node"):
        return (tensors,)
    return tensors if isinstance(tensors, (list, tuple)) else ()


def _following(node: Any) -> Iterator[Any]:
    return (following for following, _ in node.next_functions if following is not None)
