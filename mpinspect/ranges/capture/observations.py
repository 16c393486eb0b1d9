"""What happens in a training step as objects, and the protocol of the observers that consume them.

Hooks make the observations, the dispatcher (``capture``) shows them to the observers. A tensor is read at most once: what the
first observer finds in it (``found``: its row of counts, or its largest magnitude) is kept on the observation for the others.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mpinspect.ranges.capture.calls import Fresh
from mpinspect.ranges.capture.largest import Found
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.loss_scale import NO_BACKWARD, UNSCALED, BackwardScale
from mpinspect.runtime.outputs import tensor_list

#: Smaller tensors are read in no more time than it takes to find out whether they were.
_LEAST = 1 << 16

Known = TypeVar("Known")


class Call:
    """A module's forward that has run.

    Attributes:
        layer: the module.
        outputs: the tensors in what it returned.
        recomputed: whether it ran inside a backward (activation checkpointing).
        micro_batch: counted from 0.
        rows: by id of an output, the row of its counts, where an observer counted it.
        counts_gradients: whether an observer counts the gradients at the outputs.
        fresh: the tensors whose gradients an observer follows: those that it had not seen before in this step.
    """

    __slots__ = (
        "_args",
        "_kwargs",
        "counts_gradients",
        "fresh",
        "layer",
        "micro_batch",
        "outputs",
        "recomputed",
        "rows",
    )

    def __init__(
        self, layer: Layer, args: Any, kwargs: Any, outputs: list[torch.Tensor], recomputed: bool, micro_batch: int
    ) -> None:
        self.layer = layer
        self._args, self._kwargs = args, kwargs
        self.outputs = outputs
        self.recomputed = recomputed
        self.micro_batch = micro_batch
        self.rows: dict[int, torch.Tensor] | None = None
        self.counts_gradients = False
        self.fresh: list[Fresh] = []

    def inputs(self) -> list[torch.Tensor]:
        """Return the tensors in what the module was given."""
        return tensor_list(self._args) + tensor_list(self._kwargs) if self._kwargs else tensor_list(self._args)


class Backward(NamedTuple):
    """The context of a backward: what all of its gradients share.

    Args:
        task: the graph task; NO_BACKWARD for none.
        scale: the loss scale.
        divisor: what values are divided by before they are counted; None where exponents are shifted instead.
        micro_batch: counted from 0.
        observers: those at work in its step.
        checked_by_scaler: whether a GradScaler finds out by itself if a weight gradient is not finite, and skips the step then.
    """

    task: int
    scale: BackwardScale
    divisor: float | torch.Tensor | None
    micro_batch: int
    observers: tuple[Observer, ...]
    checked_by_scaler: bool

    def waited(self, gradients: list[ParameterGradient]) -> None:
        """Show the observers parameters' gradients that have waited for the end of this backward."""
        for observer in self.observers:
            observer.waited(gradients, self)


#: Outside of any backward.
NO_CONTEXT = Backward(NO_BACKWARD, UNSCALED, None, 0, (), True)


class OutputGradient:
    """The gradient at a module's output, or at an input that no module was seen to make.

    Attributes:
        layer: the module.
        values: the gradient, this process's part of it.
        counted: whether the gradients at this layer's outputs are counted.
        number: the tensor's, within the step; -1 where it is followed elsewhere.
        is_input: whether the tensor is the module's input.
        found: what is known of the values.
    """

    __slots__ = ("counted", "found", "is_input", "layer", "number", "values")

    def __init__(
        self, layer: Layer, values: torch.Tensor, counted: bool, number: int, is_input: bool, found: Found | None
    ) -> None:
        self.layer = layer
        self.values = values
        self.counted = counted
        self.number = number
        self.is_input = is_input
        self.found = found


@dataclass(slots=True)
class ParameterGradient:
    """The gradient of a parameter, on arrival or once it has waited for the end of its backward.

    Args:
        watched: the parameter.
        values: the same memory as the gradient's.
        version: how often that had been changed in place when it arrived.
        place: how many tensors the watch had read in this step before.
        stream: the GPU's stream on which it arrived.
        found: the row of its counts; None while it waits, and where it could not be counted.
    """

    watched: WatchedParameter
    values: torch.Tensor
    version: int = -1
    place: int = -1
    stream: Any = None
    found: torch.Tensor | None = None


class Observer:
    """Consumes observations. Each overrides the methods of what it needs, and knows no other observer.

    Calls, gradients and losses are shown to the observers that are at work in a step, everything else to all.
    """

    #: Whether it is at work in this step.
    at_work = False
    #: Whether it takes gradients of parameters together, once their backward is over (``waited``).
    lets_gradients_wait = False
    #: Whether it wants to be told of the end of each backward.
    wants_backward_end = False

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Decide whether to be at work in the step that begins."""

    def called(self, call: Call) -> None:
        """A module's forward has run."""

    def backward_begins(self, backward: Backward) -> None:
        """The first gradient of a backward has arrived."""

    def backward_ends(self) -> None:
        """The backward is over: every gradient that it brought is in ``.grad``. Called where ``wants_backward_end``."""

    def output_gradient(self, gradient: OutputGradient, backward: Backward) -> None:
        """A gradient at an output has arrived."""

    def parameter_gradient(self, gradient: ParameterGradient, backward: Backward) -> None:
        """A parameter's gradient has arrived."""

    def waited(self, gradients: list[ParameterGradient], backward: Backward) -> None:
        """The backward of these parameters' gradients is over; each is what it was when it arrived."""

    def scaler_used(self, scaler: Any) -> None:
        """A scaler multiplies losses."""

    def loss_scaled(self, losses: list[torch.Tensor], scaled: list[torch.Tensor], micro_batch: int) -> None:
        """A scaler multiplied losses; ``scaled``: those of the products that have a backward."""

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """A scaler is about to divide the optimizer's gradients by the scale, in ``unscale_`` or within its ``step``."""

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """It has divided them."""

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """``backward`` or ``torch.autograd.backward`` was called with these and has not begun."""

    def run_ends(self) -> None:
        """The inspector is being detached: the model is as the run leaves it."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the model is about to step."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """A scaler skipped its step."""

    def end_step(self, step: int, sampled: bool) -> None:
        """The step is over; ``sampled``: what was counted in it is a sample."""


class LastValues(Generic[Known]):
    """Remembers one tensor, which it does not hold, and what was found in it, for the next one where that holds the same values.

    A container hands on the very tensor that its last layer made, or the same memory in another shape, and its output's gradient
    goes on to that layer likewise: these are read once.
    """

    __slots__ = ("_address", "_dtype", "_found", "_length", "_owner", "_version", "remembers")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the tensor."""
        self.remembers = False
        self._found: Known | None = None

    def found_in(self, tensor: torch.Tensor) -> Known | None:
        """Return what was found in the tensor before, if this one is of the same memory, unchanged since; else None.

        Memory that is written to round its version (``.data``) passes for unchanged.
        """
        if not self.remembers or tensor.numel() != self._length or not _is_plain(tensor):
            return None
        base, owner = tensor._base, self._owner()
        same = (
            # As long as its owner lives memory is not given to another tensor.
            owner is not None
            and owner is (tensor if base is None else base)
            and tensor.data_ptr() == self._address
            and tensor.dtype is self._dtype
            and tensor._version == self._version
        )
        return self._found if same else None

    def keep(self, tensor: torch.Tensor, found: Known | None) -> None:
        """Remember this one instead, unless it is small, or nothing was found in it."""
        self.remembers = found is not None and tensor.numel() >= _LEAST and _is_plain(tensor)
        if self.remembers:
            base = tensor._base
            self._owner = weakref.ref(tensor if base is None else base)
            self._address, self._length, self._dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype
            self._version, self._found = tensor._version, found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its memory and version say all about its values."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


# -- what can be observed at all -----------------------------------------------------------------------------------------

_TRANSFORMED = "calls inside torch.func transforms (grad, vmap, ...) are not seen: their tensors hold no values"
_BATCHED = "gradients of is_grads_batched=True are not seen: each is many in one, and holds no values"
_TRACED = "calls inside torch.jit.trace are not seen: what counts them would become part of the graph"
_GRAPHED = "steps run as CUDA graphs are not seen: nothing can be counted inside one"

#: They return None unless calls are transformed, or traced.
transforms: Any = torch._C._functorch.peek_interpreter_stack
tracing: Any = torch._C._get_tracing_state
#: Whether a gradient is many in one (is_grads_batched=True).
is_many: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def out_of_reach(may_capture_graphs: bool, gradient: torch.Tensor | None = None) -> str | None:
    """Return why tensors can't be observed just now, in a sentence; None where they can. Does not wait for a GPU.

    Args:
        may_capture_graphs: whether there is a GPU whose streams could be capturing a graph.
        gradient: the one that arrived, if it is for one that this is asked.
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
