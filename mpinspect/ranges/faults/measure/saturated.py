"""An observer of functions near the loss that are saturated: no result of theirs has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mpinspect.ranges.capture.graph import operator_of, walk
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent
from mpinspect.ranges.faults.measure.singularities import is_packed
from mpinspect.ranges.records import Saturated

#: Maximum number of nodes of a loss's graph that are searched, the nearest first.
_MOST_NODES = 64


def _is_0_or_1(result: torch.Tensor) -> torch.Tensor:
    return (result == 0) | (result == 1)


#: By autograd's name of an operator: its name in words, and where a result has no gradient.
_FUNCTIONS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Sigmoid": ("sigmoid", _is_0_or_1),
    "Softmax": ("softmax", _is_0_or_1),
    "Tanh": ("tanh", lambda result: result.abs() == 1),
}


class SaturatedFunctions(Measuring):
    """Reads, in measured steps, the saved results of a loss's last functions before the backward; never waits for a device."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        #: By the sequence number of a function's node: the innermost module that returned its result.
        self._modules: dict[int, str] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        super().begin_step(sampled, watched)
        self._modules.clear()

    def called(self, call: Call) -> None:
        """Remember the module of a function's result."""
        nodes = [output.grad_fn for output in call.outputs if output.grad_fn is not None]
        for node in nodes:
            if operator_of(node) in _FUNCTIONS:
                self._modules.setdefault(node._sequence_nr(), call.layer.path)

    @torch.no_grad()
    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Send whether all results of a function are saturated to the host."""
        for node in walk([loss.grad_fn for loss in losses], _MOST_NODES):
            name, is_saturated = _FUNCTIONS.get(operator_of(node), ("", None))
            if is_saturated is None or is_packed(node):
                continue
            result = node._saved_result
            if is_plain(result) and result.numel():
                found = Saturated(
                    name=self._modules.get(node._sequence_nr(), ""),
                    step=self._clock.step,
                    names=(name,),
                    text=dtype_name(result.dtype),
                    elements=result.numel(),
                )
                self._send(Sent.of([(name, is_saturated(result).all())]), partial(self._judge, found))

    def _judge(self, found: Saturated, are: dict[str, bool]) -> None:
        if all(are.values()):
            self._record(found)
