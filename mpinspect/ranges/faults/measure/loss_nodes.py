"""The operations nearest to a loss on a device, kept from the backward's begin until it is known whether the step broke.

On a CPU the ``Examination`` reads them before the backward frees their arguments. On a device that would wait, so the small
arguments outlive the backward by a step or two, and are read only if the step turns out to be broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from mpinspect.ranges.capture.culprit import LOSS
from mpinspect.ranges.capture.graph import dtype_of, graph, operator_of
from mpinspect.ranges.capture.largest import has_memory
from mpinspect.ranges.faults.measure.examination import Examining, key_of
from mpinspect.ranges.faults.measure.measuring import Run
from mpinspect.ranges.faults.measure.singularities import (
    KNOWS_PACKED,
    MATRIX_PRODUCTS,
    Singular,
    applies_mask,
    attributes,
    earliest,
    has_finder,
    infinite_operand,
    is_packed,
    singular,
)
from mpinspect.ranges.session import END, Event

#: Maximum number of nodes of a backward and of a step, of elements of a kept tensor, and of bytes kept of a step.
_MOST_NODES, _MOST_OF_STEP, _MOST_ELEMENTS, _MOST_BYTES = 24, 240, 1 << 16, 4 << 20
#: Maximum number of steps whose nodes are kept: the values of a step are known one step later, or two.
_MOST_STEPS = 3
#: Maximum number of examined steps.
_MOST_EXAMINED = 3


class LossNodes(Examining):
    """Keeps the nodes nearest to each loss on a device, and examines those of the first broken steps. Must run after the watch.

    Never waits in a step whose values are finite, and launches nothing but copies of small views.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._kept: dict[int, list[KeptNode]] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in watched steps on a device, until enough were examined."""
        on_cpu = not self._parameters or self._parameters[0].parameter.is_cpu
        self.at_work = watched and not on_cpu and KNOWS_PACKED and self._examined < _MOST_EXAMINED

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Keep the nodes nearest to losses on a device, of a step's first micro-batches."""
        kept = self._kept.setdefault(self._clock.step, [])
        left = _MOST_BYTES - sum(node.nbytes for node in kept)
        if left > 0 and len(kept) < _MOST_OF_STEP and not any(loss.is_cpu for loss in losses):
            kept += kept_nodes([loss.grad_fn for loss in losses], left)

    def end_step(self, step: int, sampled: bool) -> None:
        """Examine the nodes of steps with a new event, and drop those of steps that are known to be finite."""
        for event in self._new_events():
            if event.phase != END and not event.aside and not event.given:
                self._examine(event)
        for old in [each for each in self._kept if each <= step - _MOST_STEPS]:
            del self._kept[old]

    def run_ends(self) -> None:
        """Examine the nodes of the last steps, and record suspects of skipped steps; waits for the device.

        No suspect is an operation through which the backward of one of the last steps was finite: a hook may repair its gradient.
        """
        self.end_step(self._clock.step, False)
        with torch.no_grad():
            last = map(_first_singular, self._kept.values() if self._suspects else ())
            self._record_suspects({key_of(found) for found in last if found is not None})
        self._kept.clear()

    @torch.no_grad()
    def _examine(self, event: Event) -> None:
        """Record the singular operation that explains an event, if any. Waits for the device."""
        nodes = self._kept.pop(event.step, [])
        if not nodes or self._examined >= _MOST_EXAMINED:
            return
        is_backward = event.phase == "backward"
        found = _first_singular(nodes)
        if is_backward and event.skipped:
            self._suspect(event.step, found)
            return
        if (
            event.phase == "forward"
            and event.what != LOSS
            and (found is None or found.kind not in ("mask", "zero-row"))
        ):
            # Other arguments may have been computed from the output that was not finite.
            return
        if found is None and is_backward and any(map(applies_mask, nodes)):
            found = earliest(map(infinite_operand, nodes))
        if found is not None:
            self._examined += 1
            self._record_singular(found, event.step, loss_finite=is_backward)


class KeptNode:
    """A node of autograd's graph without the graph: its name, its number, and what it saved of few elements.

    A saved tensor with more elements is on the meta device, where reading it raises a RuntimeError.

    Args:
        node: the node, whose backward has not run.
        saved: the value of each attribute, with a tensor's version.
    """

    def __init__(self, node: Any, saved: Mapping[str, tuple[Any, int]]) -> None:
        self._name, self._number, self._saved = node.name(), node._sequence_nr(), saved
        self._input_metadata = [SimpleNamespace(dtype=dtype_of(node), shape=())]
        self.next_functions: tuple[tuple[KeptNode | None, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        tensors = (value for value, _ in self._saved.values() if isinstance(value, torch.Tensor))
        return sum(each.nbytes for each in tensors if not each.is_meta)

    def name(self) -> str:
        return str(self._name)

    def _sequence_nr(self) -> int:
        return int(self._number)

    def __getattr__(self, name: str) -> Any:
        try:
            value, version = self._saved[name]
        except KeyError:
            raise AttributeError(name) from None
        has_values = isinstance(value, torch.Tensor) and not value.is_meta and value.numel()
        if has_values and (value._version != version or not has_memory(value)):
            raise RuntimeError(f"{name} was changed in place, or freed")
        return value


def kept_nodes(starts: Iterable[Any], most_bytes: int = _MOST_BYTES) -> list[KeptNode]:
    """Return the nodes nearest to losses, before their backward; none if no node among them may be singular. Never waits."""
    nodes = graph(starts, _MOST_NODES)
    if not any(map(has_finder, nodes)):
        return []
    # A mask is to blame only if the scores were finite.
    makes_scores = MATRIX_PRODUCTS if any(map(applies_mask, nodes)) else ()
    kept = dict[Any, KeptNode]()
    for node in nodes:
        is_needed = has_finder(node) or operator_of(node) in makes_scores
        kept[node] = KeptNode(node, _saved(node, most_bytes) if is_needed else {})
        most_bytes -= kept[node].nbytes
    for node in nodes:
        edges = ((each and (kept.get(each) or KeptNode(each, {})), place) for each, place in node.next_functions)
        kept[node].next_functions = tuple(edges)
    return list(kept.values())


def _saved(node: Any, most_bytes: int) -> dict[str, tuple[Any, int]]:
    """Return what a node saved, by attribute, with its version; nothing if hooks packed it or an operand was changed in place."""
    if is_packed(node):
        return {}
    try:
        saved = {name: getattr(node, name) for name in attributes(node, "_saved_")}
        return {name: _small(value, most_bytes) for name, value in saved.items() if not _is_of_subclass(value)}
    except RuntimeError:
        return {}


def _is_of_subclass(value: Any) -> bool:
    """Return whether a value is a tensor with operators of its own, such as a DTensor."""
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


def _small(value: Any, most_bytes: int) -> tuple[Any, int]:
    if not isinstance(value, torch.Tensor):
        return value, 0
    # Without the graph that made it.
    value = value.detach()
    if value.numel() > _MOST_ELEMENTS or value.nbytes > most_bytes:
        value = value.to("meta")
    elif value.untyped_storage().nbytes() > 2 * value.nbytes:
        # A view would keep a larger tensor alive.
        value = value.clone()
    return value, value._version


def _first_singular(nodes: Iterable[Any]) -> Singular | None:
    """Return the singular operation that ran first; a difference may have been taken from anything."""
    return earliest(each for each in map(singular, nodes) if each is not None and each.kind != "difference")
