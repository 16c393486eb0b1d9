"""Walks autograd's graph from a loss towards the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def receivers(node: Any) -> Iterator[Any]:
    """Yield the nodes that receive a node's gradients."""
    return (each for each, _ in node.next_functions if each is not None)


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


def graph(starts: Iterable[Any], most: int, since: int = -1) -> list[Any]:
    """Return at most ``most`` nodes of the graph that leads to ``starts``, made after the node ``since``, the nearest first."""
    return list(walk(starts, most, None if since < 0 else lambda node: node._sequence_nr() > since))
