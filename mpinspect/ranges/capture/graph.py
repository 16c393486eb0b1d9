"""Walks autograd's graph from a loss towards the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def operator_of(node: Any) -> str:
    """Return a node's operator as autograd names it: "MseLoss", "ToCopy"."""
    name: str = node.name().partition("Backward")[0]
    return name.lstrip("_")


def dtype_of(node: Any) -> Any:
    """Return the dtype of a node's first result; None if unknown."""
    return next((made.dtype for made in getattr(node, "_input_metadata", ())), None)


def numel_of(node: Any) -> int:
    """Return the number of elements of a node's first result; 0 if unknown."""
    try:
        return next((torch.Size(made.shape).numel() for made in getattr(node, "_input_metadata", ())), 0)
    except (TypeError, RuntimeError, AttributeError):  # a nested tensor has no such shape
        return 0


def walk(starts: Iterable[Any], most: int, follows: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield at most ``most`` nodes of the graph that leads to ``starts``, each once, the nearest first.

    Args:
        starts: nodes; None is left out.
        follows: whether to walk to a node; None: to all.
    """
    queue = list(dict.fromkeys(start for start in starts if start is not None))
    found = set(queue)
    for node in queue:
        yield node
        if len(found) >= most:
            continue
        for each, _ in node.next_functions:
            if each is not None and each not in found and len(found) < most and (follows is None or follows(each)):
                found.add(each)
                queue.append(each)


def graph(starts: Iterable[Any], most: int) -> list[Any]:
    """Return at most ``most`` nodes of the graph that leads to ``starts``, the nearest first."""
    return list(walk(starts, most))
