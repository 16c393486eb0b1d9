"""Names the module whose code made a graph node."""

from __future__ import annotations

from typing import Any

from mpinspect.ranges.capture.graph import graph
from mpinspect.ranges.capture.observations import Call

#: Maximum number of graph nodes searched within one module.
_MOST_NODES = 2_000


class ModuleSpans:
    """Remembers the range of graph nodes that each module's own code made. Modules of torch.nn are left out."""

    def __init__(self) -> None:
        #: For each call: the largest sequence number of its inputs, the largest of its outputs, the module's path.
        self._spans: list[tuple[int, int, str]] = []

    def remember(self, call: Call) -> None:
        """Remember the span of a completed call."""
        ends = [output.grad_fn._sequence_nr() for output in call.outputs if output.grad_fn is not None]
        if ends and not type(call.layer.module).__module__.startswith("torch.nn."):
            begun = [given.grad_fn._sequence_nr() for given in call.inputs() if given.grad_fn is not None]
            self._spans.append((max(begun, default=-1), max(ends), call.layer.path))

    def module_of(self, node: Any, nodes: list[Any]) -> str | None:
        """Return the innermost module whose code made a node; "" for the model, None if that is uncertain.

        Args:
            node: a node of the graph.
            nodes: the graph, which holds the nodes that made the modules' outputs.
        """
        place = node._sequence_nr()
        around = sorted((end - begin, begin, end, path) for begin, end, path in self._spans if begin < place <= end)
        for _, begin, end, path in around[:4]:
            # A module may have run after unrelated code: its output must depend on the node.
            made = [each for each in nodes if each._sequence_nr() == end]
            if node in graph(made, _MOST_NODES, since=begin):
                return path
        return None

    def clear(self) -> None:
        """Forget all spans."""
        self._spans.clear()
