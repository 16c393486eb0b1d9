"""The events of a training step as objects (observations), and the interface of the observers that consume them.

Hooks create the observations and the dispatcher passes them to the observers. A tensor is read at most once: the first observer
stores its result (``found``: the row of counts, or the largest magnitude) on the observation for the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from mpinspect.ranges.capture.backward_scale import UNSCALED, BackwardScale
from mpinspect.ranges.capture.calls import Fresh
from mpinspect.ranges.capture.largest import Found
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.loss_scale import NO_BACKWARD
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.runtime.outputs import tensor_list

#: Elements below which reading a tensor again costs no more than checking whether it was read already.
_LEAST = 1 << 16

Known = TypeVar("Known")


@dataclass(eq=False, slots=True)
class Call:
    """One completed call of a module.

    Args:
        layer: the module.
        outputs: the tensors in the module's return value.
        recomputed: whether the call ran inside a backward (activation checkpointing).
        micro_batch: its number, from 0.
        rows: the rows of counts of the outputs that an observer counted, by id of the output.
        counts_gradients: whether an observer counts the gradients at the outputs.
        wants_gradients: whether another observer asks for them.
        fresh: the tensors that the watch saw for the first time in this step, whose gradients it therefore traces.
    """

    layer: Layer
    _args: Any
    _kwargs: Any
    outputs: list[torch.Tensor]
    recomputed: bool
    micro_batch: int
    rows: dict[int, torch.Tensor] | None = None
    counts_gradients: bool = False
    wants_gradients: bool = False
    fresh: Sequence[Fresh] = ()
    _inputs: list[torch.Tensor] | None = None

    def inputs(self) -> list[torch.Tensor]:
        """Return the tensors in the module's arguments: one list for all observers, not to be changed."""
        if self._inputs is None:
            self._inputs = tensor_list(self._args)
            if self._kwargs:
                self._inputs += tensor_list(self._kwargs)
        return self._inputs


class Backward(NamedTuple):
    """The context that all gradients of one backward share.

    Args:
        task: autograd's graph task, or NO_BACKWARD.
        scale: the loss scale.
        divisor: the number to divide values by before counting; None if exponents are shifted instead, or the scale is
            unknown.
        micro_batch: its number, from 0.
        observers: the observers at work in this step.
        checked_by_scaler: whether a GradScaler checks the weight gradients and skips the step if any is non-finite.
    """

    task: int
    scale: BackwardScale
    divisor: float | torch.Tensor | None
    micro_batch: int
    observers: tuple[Observer, ...]
    checked_by_scaler: bool

    def held_gradients(self, gradients: list[Held]) -> None:
        """Pass gradients that were held until the end of this backward to the observers."""
        for observer in self.observers:
            observer.held_gradients(gradients, self)


#: Outside of any backward.
NO_CONTEXT = Backward(NO_BACKWARD, UNSCALED, None, 0, (), True)


@dataclass(eq=False, slots=True)
class OutputGradient:
    """The gradient at a module's output, or at an input that no observed module produced.

    Args:
        layer: the module.
        values: this process's part of the gradient.
        counted: whether the gradients at this layer's outputs are counted.
        number: the tensor's number within the step; -1 if another hook already traces the tensor.
        is_input: whether the tensor is the module's input.
        found: the first observer's result of reading the values, if any.
        version, place, stream: of a held gradient, as for ``ParameterGradient``.
    """

    layer: Layer
    values: torch.Tensor
    counted: bool
    number: int
    is_input: bool
    found: Found | None
    version: int = -1
    place: int = -1
    stream: Any = None

    @property
    def key(self) -> TensorKey:
        return self.layer.gradient_key


@dataclass(slots=True)
class ParameterGradient:
    """The gradient of a parameter, passed on either when it arrives or at the end of its backward.

    Args:
        watched: the parameter.
        values: a tensor that shares the gradient's memory.
        version: the version counter of ``values`` when the gradient arrived.
        place: the number of tensors that the watch had read before it in this step.
        stream: the stream of the gradient's arrival.
        found: the gradient's row of counts; None before it is counted, and if it can't be counted.
    """

    watched: WatchedParameter
    values: torch.Tensor
    version: int = -1
    place: int = -1
    stream: Any = None
    found: torch.Tensor | None = None

    @property
    def key(self) -> TensorKey:
        return self.watched.gradient_key


#: A gradient that is held until the end of its backward.
Held = OutputGradient | ParameterGradient


class Observer:
    """Consumes observations. Subclasses override the methods they need and are independent of each other.

    Calls, gradients and losses are passed only to the observers at work in the current step, everything else to all.
    """

    #: Whether the observer is at work in this step.
    at_work = False
    #: Whether the observer accepts gradients together, at the end of their backward (``held_gradients``).
    lets_gradients_wait = False
    #: Whether small output gradients are among these.
    lets_outputs_wait = False
    #: Whether the calls of the modules that outline the model suffice (``layers.outline``) in this step.
    outline_suffices = False
    #: Whether ``backward_ends`` is called at the end of each backward.
    wants_backward_end = False

    def takes_parameter_gradients(self, checked_by_scaler: bool) -> bool:
        """Return whether the observer handles parameter gradients; ``checked_by_scaler``: whether a scaler checks them."""
        return overrides(self, "parameter_gradients")

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Decide whether the observer is at work in the step that begins."""

    def called(self, call: Call) -> None:
        """Handle a completed call of a module."""

    def backward_begins(self, backward: Backward) -> None:
        """Handle the start of a backward: its first gradient has arrived."""

    def backward_ends(self) -> None:
        """Handle the end of a backward: all its gradients are in ``.grad``. Called only if ``wants_backward_end`` is set."""

    def output_gradient(self, gradient: OutputGradient, backward: Backward) -> None:
        """Handle a gradient that has arrived at an output."""

    def parameter_gradient(self, gradient: ParameterGradient, backward: Backward) -> None:
        """Handle a parameter's gradient that has arrived."""

    def parameter_gradients(self, gradients: list[ParameterGradient], backward: Backward) -> None:
        """Handle parameter gradients at the end of their backward; their values are unchanged since they arrived."""

    def held_gradients(self, gradients: list[Held], backward: Backward) -> None:
        """Handle small output gradients and parameter gradients, in the order of arrival, at the end of their backward."""
        if overrides(self, "output_gradient"):
            for each in gradients:
                if isinstance(each, OutputGradient):
                    self.output_gradient(each, backward)
        if overrides(self, "parameter_gradients"):
            self.parameter_gradients([each for each in gradients if isinstance(each, ParameterGradient)], backward)

    def scaler_used(self, scaler: Any) -> None:
        """Handle the use of a scaler to multiply losses."""

    def loss_scaled(self, losses: list[torch.Tensor], scaled: list[torch.Tensor], micro_batch: int) -> None:
        """Handle losses that a scaler has multiplied; ``scaled`` are the products that have a backward."""

    def scaler_divides(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Handle that a scaler is about to divide the optimizer's gradients, itself or within a fused optimizer's step."""

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for a scaler to divide the optimizer's gradients by the scale, in ``unscale_`` or in its ``step``."""

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the end of that division."""

    def clipping(self, parameters: list[WatchedParameter], limit: object, norm: torch.Tensor) -> None:
        """Prepare for the gradients of these parameters of the model to be clipped.

        Args:
            limit: the largest norm, a number or a tensor.
            norm: the norm of these gradients and perhaps others.
        """

    def autocast_made(self, device: str, enabled: bool) -> None:
        """Handle that an autocast region for a type of device is about to be made."""

    def autocast_cache_cleared(self) -> None:
        """Handle that autocast's cache of casts is about to be cleared, as at the end of an outermost region."""

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Handle a call of ``backward`` or ``torch.autograd.backward`` with these losses, before the backward begins."""

    def backward_left_out(self, losses: list[torch.Tensor]) -> None:
        """Handle losses that are not finite and whose backward the loop has left out."""

    def backward_called_on_edges(self, edges: list[GradientEdge]) -> None:
        """Handle a call of ``torch.autograd.backward`` with edges of the graph, as torch 2.15's pipelines make it."""

    def gradients_returned(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Handle the gradients of the outputs that ``torch.autograd.grad`` has returned, one for each input."""

    def graph_read(self, formats: list[str]) -> None:
        """Handle the dtypes of the values in the losses' graph ("": some could not be read), where calls were not seen."""

    def run_ends(self) -> None:
        """Handle the end of the run: the inspector is being detached, and the model is in its final state."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for the step of an optimizer of the model, which is about to run."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the completed step of an optimizer of the model."""

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle a step of the optimizer that a scaler skipped."""

    def gradients_dropped(self) -> None:
        """Handle that the loop cleared the gradients of the step, which is about to end, without an update of the weights."""

    def end_step(self, step: int, sampled: bool) -> None:
        """Handle the end of the training step; ``sampled``: whether its counts become a sample."""


def overrides(observer: Observer, method: str) -> bool:
    """Return whether a method of an observer does anything."""
    return getattr(type(observer), method) is not getattr(Observer, method)


class LastValues(Generic[Known]):
    """Remembers the result of reading one tensor, to reuse it if the next tensor holds the same values.

    A container returns its last layer's output, or a reshaped view of it, and passes its output gradient on to that layer, so
    each of the two is read only once. The tensor is referenced weakly.
    """

    __slots__ = ("_address", "_dtype", "_found", "_length", "_owner", "_version", "remembers")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the tensor."""
        self.remembers = False
        self._found: Known | None = None

    def found_in(self, tensor: torch.Tensor) -> Known | None:
        """Return the remembered result if this tensor has the same memory, unchanged since; else None.

        Writes that bypass the version counter (through ``.data``) are not detected.
        """
        if not self.remembers or tensor.numel() != self._length or not _is_plain(tensor):
            return None
        base, owner = tensor._base, self._owner()
        same = (
            # While the owner is alive, its memory is not reused for another tensor.
            owner is not None
            and owner is (tensor if base is None else base)
            and tensor.data_ptr() == self._address
            and tensor.dtype is self._dtype
            and tensor._version == self._version
        )
        return self._found if same else None

    def keep(self, tensor: torch.Tensor, found: Known | None) -> None:
        """Remember this tensor and its result instead, unless the tensor is small or ``found`` is None."""
        self.remembers = found is not None and tensor.numel() >= _LEAST and _is_plain(tensor)
        if self.remembers:
            base = tensor._base
            self._owner = weakref.ref(tensor if base is None else base)
            self._address, self._length, self._dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype
            self._version, self._found = tensor._version, found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory and version counter fully determine its values."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


# -- what can be observed at all -----------------------------------------------------------------------------------------

_TRANSFORMED = "calls inside torch.func transforms (grad, vmap, ...) are not seen: their tensors hold no values"
_BATCHED = "gradients of is_grads_batched=True are not seen: each is a batch of gradients, and holds no values"
_TRACED = "calls inside torch.jit.trace are not seen: the counting would become part of the graph"

#: Functions that return None unless a torch.func transform, or torch.jit.trace, is active.
transforms: Any = torch._C._functorch.peek_interpreter_stack
tracing: Any = torch._C._get_tracing_state
#: Returns whether a tensor is a batch of gradients (is_grads_batched=True).
is_many: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def out_of_reach(gradient: torch.Tensor | None = None) -> str | None:
    """Return a sentence on why tensors can't be observed now, or None if they can; never waits for a GPU.

    Args:
        gradient: the gradient that arrived, if the call is for a gradient.
    """
    if transforms() is not None:
        return _TRANSFORMED
    if gradient is not None and is_many(gradient):
        return _BATCHED
    if tracing() is not None:
        return _TRACED
    return None
