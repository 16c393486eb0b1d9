"""Walk autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def graph(starts: Iterable[Any], most: int, since: int = -1) -> list[Any]:
    """Return at most ``most`` nodes of the graph that leads to ``starts``, made after the node ``since``, the nearest first."""
    found: dict[Any, None] = dict.fromkeys(start for start in starts if start is not None)
    queue = list(found)
    for node in queue:
        for following, _ in node.next_functions:
            if following is None or following in found or len(found) >= most:
                continue
            if since < 0 or following._sequence_nr() > since:
                found[following] = None
                queue.append(following)
    return queue
