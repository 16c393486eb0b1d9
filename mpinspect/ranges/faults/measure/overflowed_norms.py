"""An observer that finds hand-written normalisations whose squares overflow in FP16, which makes the results zero.

If a square or a sum under a root is infinite, 1 / root and every quotient by the root are zero: all results are finite. The
graph of a finite loss shows the overflow, since ``rsqrt`` and ``sqrt`` save their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.graph import dtype_of, graph, operator_of, receivers
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent
from mpinspect.ranges.faults.measure.singularities import SAME_VALUES, is_packed
from mpinspect.ranges.records import OverflowedNorm

#: Maximum number of graph nodes searched in all and within one module, and of nodes before a root that are searched for a square
#: or a sum.
_MOST_NODES, _MOST_WITHIN, _MOST_BEFORE = 20_000, 2_000, 12
#: Maximum number of elements read from a root, and of recorded modules.
_MOST_ELEMENTS, _MOST_RECORDS = 1 << 20, 3
#: The argument or result that a root saves, its exponent (a power saves its own), and the saved number of an infinite argument.
_ROOTS: dict[str, tuple[str, float | None, float]] = {
    "sqrt": ("_saved_result", 0.5, torch.inf),
    "rsqrt": ("_saved_result", -0.5, 0.0),
    "pow": ("_saved_self", None, torch.inf),
}
#: Operations whose results may exceed a format's range although their arguments don't.
_GROWING = ("Pow", "Sum", "Mean", "Var")
#: Operations allowed between these and a root, and between a root and the division by it.
_BETWEEN = (*SAME_VALUES, "Add", "Mul", "Div", "Clamp")


class _Root(NamedTuple):
    """A root with infinite arguments.

    Args:
        operator: "rsqrt", "sqrt" or "pow".
        shape: of the result.
        elements: the number of elements of the result whose argument is infinite; 0 if they do no harm. On the result's device.
    """

    operator: str
    shape: torch.Size
    elements: torch.Tensor


class _ModuleSpans:
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
            if node in graph(made, _MOST_WITHIN, since=begin):
                return path
        return None

    def clear(self) -> None:
        """Forget all spans."""
        self._spans.clear()


class OverflowedNorms(Measuring):
    """Reads the roots in the graph of a finite loss, in measured steps with FP16 inputs or outputs of a module."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._spans = _ModuleSpans()
        #: Whether any module's input or output in this step was FP16.
        self._is_narrow = False
        self._told: set[str] = set()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self._clock.measured and len(self._told) < _MOST_RECORDS
        self._forget()

    def called(self, call: Call) -> None:
        """Record whether an input or output is FP16. After the first one, record each module's span of graph nodes."""
        if call.recomputed:
            return
        if not self._is_narrow:
            self._is_narrow = any(tensor.dtype is torch.float16 for tensor in (*call.inputs(), *call.outputs))
        if self._is_narrow:
            self._spans.remember(call)

    @torch.no_grad()
    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Search the graph of the losses for roots of infinity that divide other values."""
        if not self._is_narrow:
            return
        nodes = graph([loss.grad_fn for loss in losses], _MOST_NODES)
        nodes.sort(key=lambda node: int(node._sequence_nr()))
        roots: list[tuple[_Root, Callable[[], str | None]]] = []
        for node in nodes:
            # A saved tensor that was changed since can't be read, and a custom function may save other attributes.
            with suppress(RuntimeError, AttributeError):
                root = _root_of_infinity(node, nodes)
                if root is not None:
                    where = partial(self._spans.module_of, node, nodes)
                    if not root.elements.is_cpu:
                        # The graph is freed before the elements have reached the host.
                        where = partial(_same, where())
                    roots.append((root, where))
        if roots:
            finite = [HostCopy(loss.isfinite().all()) for loss in losses]
            elements = Sent.of((str(place), root.elements) for place, (root, _) in enumerate(roots))
            judge = partial(self._judge, self._clock.step, roots, elements, finite)
            self._arrivals.call([*elements.copies, *finite], judge)

    def end_step(self, step: int, sampled: bool) -> None:
        """Forget the step's modules; record the roots that have reached the host."""
        super().end_step(step, sampled)
        self._forget()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._is_narrow = False
        self._spans.clear()

    def _judge(
        self, step: int, roots: list[tuple[_Root, Callable[[], str | None]]], elements: Sent, finite: list[HostCopy]
    ) -> None:
        """Record the roots of infinity, unless a loss is not finite."""
        if not all(bool(copy.values()) for copy in finite):
            return
        numbers = elements.read()
        for place, (root, where) in enumerate(roots):
            number = numbers[str(place)]
            # The graph may contain another model's code, which belongs to that model's record.
            if number and (module := where()) is not None:
                self._tell(step, module, root, float(number))

    def _tell(self, step: int, module: str, root: _Root, elements: float) -> None:
        if module in self._told or len(self._told) >= _MOST_RECORDS:
            return
        self._told.add(module)
        number = root.shape.numel()
        self._record(
            OverflowedNorm(
                name=module,
                step=step,
                text=f"float16 {root.operator}",
                elements=elements,
                of=number,
                is_by_row=number > 1 and root.shape[-1] == 1,
            )
        )


def _same(module: str | None) -> str | None:
    return module


def _root_of_infinity(node: Any, nodes: Sequence[Any]) -> _Root | None:
    """Return a node's root if its argument is an FP16 square or sum that may have overflowed and if it divides other values."""
    operator = operator_of(node).lower()
    if operator not in _ROOTS or is_packed(node) or not _is_of_a_sum_in_float16(node):
        return None
    saved, exponent, edge = _ROOTS[operator]
    exponent = exponent or node._saved_exponent
    if isinstance(exponent, torch.Tensor) or abs(exponent) != 0.5:
        return None
    kept = getattr(node, saved)
    if not is_plain(kept) or not 0 < kept.numel() <= _MOST_ELEMENTS:
        return None
    # A finite FP16 or FP32 number never has an infinite root, or a root with a reciprocal of zero.
    elements = (kept.abs() == edge).sum()
    if exponent > 0:
        if kept.is_cpu and not elements:
            return None
        does_harm = _is_divisor(node, nodes)
        if does_harm is None:
            return None
        elements = elements * does_harm
    return _Root(operator, kept.shape, elements)


def _is_of_a_sum_in_float16(root: Any) -> bool:
    """Return whether a root's argument is a square or a sum that was computed in FP16 or cast to FP16 afterwards."""
    is_narrow, node = dtype_of(root) is torch.float16, next(receivers(root), None)
    for _ in range(_MOST_BEFORE):
        if node is None:
            return False
        is_narrow = is_narrow or dtype_of(node) is torch.float16
        grows = node.name().startswith(_GROWING) or _is_product_with_itself(node)
        if grows and is_narrow:
            return True
        if not grows and not node.name().startswith(_BETWEEN):
            return False
        node = next(receivers(node), None)
    return False


def _is_product_with_itself(node: Any) -> bool:
    edges = node.next_functions
    return node.name().startswith("Mul") and len(edges) == 2 and edges[0] == edges[1] and edges[0][0] is not None


def _is_divisor(root: Any, nodes: Sequence[Any]) -> torch.Tensor | None:
    """Return, on its device, whether a root is still infinite where it divides other values; None if it divides none.

    Args:
        root: a node of the graph.
        nodes: the graph, in the order in which it was made.
    """
    reached = {root}
    for node in nodes:
        edges, name = [following for following, _ in node.next_functions], node.name()
        if reached.isdisjoint(edges):
            continue
        divides = name.startswith("Div") and len(edges) == 2 and edges[1] in reached
        if (divides or name.startswith("Reciprocal")) and is_packed(node):
            return None
        if divides:
            return torch.any(node._saved_other.isinf())
        if name.startswith("Reciprocal"):
            return torch.any(node._saved_result == 0)
        if name.startswith(_BETWEEN):
            reached.add(node)
    return None
