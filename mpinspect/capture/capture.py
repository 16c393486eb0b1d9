"""The capture: hooks on a model, its optimizers and scalers, and what they set going.

Nothing here may raise into the user's training: a fault of ours is noted once, and after a few the part that fails is
left alone. Nothing keeps a tensor of the model: what stays are rows of counts and reduced values.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpinspect.capture import loss_scale as scales
from mpinspect.capture import scalers as scaler_watch
from mpinspect.capture.hooks import HandleList, ModelHook
from mpinspect.capture.layers import Layer, WatchedParameter
from mpinspect.capture.loss_scale import BackwardScale
from mpinspect.capture.outputs import tensors_in
from mpinspect.capture.recording import Recording
from mpinspect.capture.steps import StepClock
from mpinspect.capture.tally import Sample, Tally
from mpinspect.capture.updates import STORAGE_DTYPES, lost_updates, unmoved
from mpinspect.capture.watch import Watch
from mpinspect.counting.reference import count
from mpinspect.session import ACTIVATION, ACTIVATION_GRADIENT, UPDATE, WEIGHT, WEIGHT_GRADIENT, TensorKey

#: A part of the capture that failed this often is not tried again.
FAULT_LIMIT = 3
#: Dtypes that values are rounded to before they can be counted.
_NARROW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[Capture, P], R]) -> Callable[Concatenate[Capture, P], R | None]:
    """Let no fault of this method reach the user's training."""

    @functools.wraps(method)
    def run(self: Capture, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.faults.get(method.__name__, 0) >= FAULT_LIMIT:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fault(method.__name__, error)
            return None

    return run


class _GradientHook:
    """Waits on one output (or input) tensor for its gradient. Holds no tensor."""

    __torch_unserializable__ = True
    __slots__ = ("_capture", "_counted", "_is_input", "_layer", "_number")

    def __init__(self, capture: Capture, layer: Layer, *, counted: bool, number: int, is_input: bool) -> None:
        # Weakly: a graph that outlives the inspector must not keep it.
        self._capture = weakref.ref(capture)
        self._layer = layer
        self._counted = counted
        self._number = number
        self._is_input = is_input

    def __call__(self, gradient: torch.Tensor) -> None:
        capture = self._capture()
        if capture is not None and capture.attached and gradient is not None:
            capture.activation_gradient(self._layer, gradient, self._counted, self._number, self._is_input)


class Capture:
    """Watches one model from ``attach`` to ``detach``.

    Args:
        layers, parameters: what to hook (mpinspect.capture.layers).
        kinds: kinds of tensor to count at sampled steps.
        every: sample every n-th step.
        watch: keep the non-finite watch at every step.
        loss_scale: the scale of loops that scale by hand: a number, a callable that gives it, or None.
        optimizers, scalers: those known to belong to the model; others are found when they step or scale.
        recording: takes what is captured.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        parameters: Iterable[WatchedParameter],
        *,
        kinds: Collection[str],
        every: int,
        watch: bool,
        loss_scale: float | Callable[[], Any] | None,
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any],
        recording: Recording,
    ) -> None:
        self._layers = list(layers)
        self._parameters = list(parameters)
        self._by_parameter = {id(watched.parameter): watched for watched in self._parameters}
        self._kinds = frozenset(kinds)
        self._loss_scale = loss_scale
        self._scalers = list(scalers)
        self._recording = recording
        self.clock = StepClock(every)
        self._tally = Tally(recording.note, recording.scale)
        self._watch = Watch({layer.path for layer in self._layers if layer.is_leaf}) if watch else None
        self._optimizers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        for optimizer in optimizers:
            self._optimizers[optimizer] = True
            self.clock.know(optimizer)
        self.attached = False
        self.faults: dict[str, int] = {}
        self._handles = HandleList()
        self._unfrozen_later: list[WatchedParameter] = []
        self._hook_ids: list[tuple[torch.nn.Module, int]] = []
        self._computed_in: dict[str, torch.dtype] = {}
        self._root_scale: BackwardScale | None = None
        self._any_scaled = False
        self._scaler_has_stepped = False
        self._stepping: set[int] = set()
        self._before: dict[int, list[tuple[WatchedParameter, torch.Tensor]]] = {}
        self._task = -1
        self._task_scale = scales.UNSCALED
        self._sampled = False
        self._quiet = False
        self._weight_state: tuple[int, list[float] | None] | None = None

    # -- coming and going ---------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on."""
        self.attached = True
        self._updated()
        self._begin_step()
        self._hook_modules()
        self._hook_parameters(self._parameters)
        self._handles.add(register_optimizer_step_pre_hook(self._optimizer_steps))
        self._handles.add(register_optimizer_step_post_hook(self._optimizer_stepped))
        scaler_watch.listen(self)

    def detach(self) -> None:
        """Take every hook off and take in what is still on its way."""
        self.attached = False
        scaler_watch.unlisten(self)
        self._handles.remove_all()
        self._hook_ids.clear()
        self._before.clear()
        if self.clock.begun:
            self._end_step()
        self.collect(wait=True)
        self._say_what_was_odd()

    def _say_what_was_odd(self) -> None:
        if self._scalers and self._any_scaled and self.clock.backwards and not self._scaler_has_stepped:
            self._recording.note(
                "the scaler scaled losses of this model and stepped no optimizer of it: its skips and its found_inf were not "
                "seen. Call scaler.step(optimizer), or give the optimizer of your FP32 master weights as optimizers="
            )

    @guarded
    def collect(self, wait: bool) -> None:
        """Close the open window and judge what has been watched; ``wait`` for the GPU."""
        window = self._tally.close_window(wait=wait)
        if window is not None:
            self._recording.add_window(window)
        if wait and self._watch is not None:
            for event in self._watch.drain():
                self._recording.event(event)

    def fault(self, where: str, error: Exception) -> None:
        """A fault of ours: note it, go on."""
        self.faults[where] = self.faults.get(where, 0) + 1
        what = where.strip("_").replace("_", " ")
        self._recording.note(f"mpinspect failed in {what} ({error!r}) and may miss some of it; the training is not affected")

    def _hook_modules(self) -> None:
        owners = {watched.owner for watched in self._parameters if watched.counted}
        for layer in self._layers:
            if self._watch is None and not (layer.counted and self._wants_outputs) and layer.path not in owners:
                continue
            hook = ModelHook(layer.module, functools.partial(self._forward_ran, layer))
            handle = self._handles.add(layer.module.register_forward_hook(hook, with_kwargs=True))
            self._hook_ids.append((layer.module, handle.id))

    @property
    def _wants_outputs(self) -> bool:
        return ACTIVATION in self._kinds or ACTIVATION_GRADIENT in self._kinds

    def _hook_parameters(self, parameters: Iterable[WatchedParameter]) -> None:
        if WEIGHT_GRADIENT not in self._kinds and self._watch is None:
            return
        self._unfrozen_later = [watched for watched in parameters if not watched.parameter.requires_grad]
        for watched in parameters:
            if not watched.parameter.requires_grad:
                continue
            if hasattr(watched.parameter, "to_local"):
                # Tensor hooks never fire on DTensor parameters (FSDP2); what arrives afterwards is the reduced shard.
                hook = functools.partial(self._accumulated, watched)
                self._handles.add(watched.parameter.register_post_accumulate_grad_hook(hook))
            else:
                hook = functools.partial(self._weight_gradient, watched)
                self._handles.add(watched.parameter.register_hook(hook))

    # -- the forward --------------------------------------------------------------------------------------------

    def _forward_ran(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        # Between samples this line is all that a module call costs.
        if not self._quiet:
            self._module_called(layer, args, kwargs, output)

    @guarded
    def _module_called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        # Inside a backward the forward is a recomputation (activation checkpointing): not counted again, but with
        # the reentrant kind its tensors are the ones that the gradients reach.
        recomputed = torch._C._current_graph_task_id() != -1
        if not recomputed:
            if not (layer.module.training or torch.is_grad_enabled()):
                return
            if self.clock.forward(self._updated):
                self._end_step()
                self.clock.forward(self._updated)
        if not self._sampled and self._watch is None:
            return
        outputs = [_local(tensor) for tensor in tensors_in(output)]
        if outputs:
            self._computed_in[layer.path] = outputs[0].dtype
        rows = self._count_outputs(layer, outputs) if self._sampled and layer.counted and not recomputed else {}
        hooked = self._watch_call(layer, args, kwargs, outputs, rows, recomputed) if self._watch is not None else set()
        if self._sampled and layer.counted and ACTIVATION_GRADIENT in self._kinds:
            for tensor in outputs:
                if id(tensor) not in hooked and tensor.requires_grad:
                    self._await_gradient(layer, tensor, counted=True, number=-1, is_input=False)

    def _count_outputs(self, layer: Layer, outputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        if ACTIVATION not in self._kinds:
            return {}
        key = TensorKey(layer.path, ACTIVATION)
        rows = {}
        for tensor in outputs:
            rows[id(tensor)] = row = count(tensor)
            self._tally.add(Sample(key, row, tensor.numel(), _name(tensor.dtype), _NARROW.get(tensor.dtype, "float32")))
        return rows

    def _watch_call(
        self,
        layer: Layer,
        args: Any,
        kwargs: Any,
        outputs: list[torch.Tensor],
        rows: dict[int, torch.Tensor],
        recomputed: bool,
    ) -> set[int]:
        """Let the watch see a call; returns the ids of the outputs whose gradient is awaited with it."""
        assert self._watch is not None
        micro_batch = self.clock.micro_batch
        inputs = [_local(tensor) for tensor in tensors_in((args, kwargs))]
        counted = self._sampled and layer.counted and ACTIVATION_GRADIENT in self._kinds
        hooked = set()
        for tensor in inputs:
            self._see_through_wrapper(tensor, layer)
        for tensor, number, is_input in self._watch.module_called(layer.path, inputs, outputs):
            if not recomputed and is_input:
                self._watch.input(layer.path, tensor, number, micro_batch)
            elif not recomputed:
                self._watch.output(layer.path, tensor, number, micro_batch, rows.get(id(tensor)))
            if tensor.requires_grad and not (is_input and tensor.is_leaf):
                self._await_gradient(layer, tensor, counted=counted and not is_input, number=number, is_input=is_input)
                if not is_input:
                    hooked.add(id(tensor))
        return hooked

    def _see_through_wrapper(self, tensor: torch.Tensor, layer: Layer) -> None:
        """A full backward hook hands its module a wrapped input and may change the gradient on the way out of it."""
        node = tensor.grad_fn
        if self._watch is None or node is None or type(node).__name__ != "BackwardHookFunctionBackward":
            return
        inner, index = node.next_functions[tensor.output_nr]
        if inner is None or not inner.next_functions:
            return
        number = inner.metadata.get((id(self), index))
        if number is None:
            number = inner.metadata[id(self), index] = self._watch.unseen_input()
            hook = _GradientHook(self, layer, counted=False, number=number, is_input=True)
            inner.register_prehook(lambda gradients: hook(gradients[index]))
        self._watch.wrapped_input(number, layer.path)

    def _await_gradient(
        self, layer: Layer, tensor: torch.Tensor, *, counted: bool, number: int, is_input: bool
    ) -> None:
        handle = tensor.register_hook(_GradientHook(self, layer, counted=counted, number=number, is_input=is_input))
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[id(self), tensor.output_nr] = number
        elif tensor.is_leaf:
            # A module that returns a parameter: this hook would outlive the graph.
            self._handles.add(handle)

    # -- the backward -------------------------------------------------------------------------------------------

    @guarded
    def activation_gradient(
        self, layer: Layer, gradient: torch.Tensor, counted: bool, number: int, is_input: bool
    ) -> None:
        """The gradient at a tensor has arrived."""
        gradient = _local(gradient)
        scale = self._backward_scale(gradient.dtype)
        row = None
        if counted and self._sampled:
            row = count(gradient, scale.divisor)
            key = TensorKey(layer.path, ACTIVATION_GRADIENT)
            passed = _NARROW.get(gradient.dtype, "float32")
            self._tally.add(Sample(key, row, gradient.numel(), _name(gradient.dtype), passed, scale))
        if self._watch is not None and number >= 0:
            unscaled_row = row if scale.divisor is None else None
            self._watch.activation_gradient(
                layer.path, gradient, number, self.clock.micro_batch, unscaled_row, is_input
            )

    @guarded
    def _weight_gradient(self, watched: WatchedParameter, gradient: torch.Tensor) -> None:
        if gradient is None or not (self._sampled or self._watch is not None):
            # The clock needs to know of it all the same.
            if not self._quiet:
                self.clock.backward()
            return
        gradient = _local(gradient)
        scale = self._backward_scale(gradient.dtype, watched.parameter.dtype)
        row = None
        if self._sampled and watched.counted and WEIGHT_GRADIENT in self._kinds:
            row = count(gradient, scale.divisor)
            key = TensorKey(watched.name, WEIGHT_GRADIENT)
            passed = self._passed_through(watched, gradient)
            self._tally.add(Sample(key, row, gradient.numel(), _name(gradient.dtype), passed, scale))
        if self._watch is None:
            return
        if row is not None and scale.divisor is None:
            self._watch.weight_gradient(watched.name, watched.owner, gradient, self.clock.micro_batch, row)
        elif not self._scaler_tells:
            self._watch.weight_gradient(watched.name, watched.owner, gradient, self.clock.micro_batch, None)

    def _accumulated(self, watched: WatchedParameter, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._weight_gradient(watched, parameter.grad)

    def _passed_through(self, watched: WatchedParameter, gradient: torch.Tensor) -> str:
        """The format that a weight gradient was rounded to: under autocast the FP32 ``.grad`` is an upcast FP16 one."""
        if gradient.dtype in _NARROW:
            return _NARROW[gradient.dtype]
        return _NARROW.get(self._computed_in.get(watched.owner, torch.float32), "float32")

    @property
    def _scaler_tells(self) -> bool:
        """Whether a GradScaler will find out by itself if a weight gradient is not finite, and skip the step then."""
        return self._root_scale is not None and not any(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self._optimizers
        )

    def _backward_scale(self, dtype: torch.dtype, stored: torch.dtype | None = None) -> BackwardScale:
        """The scale of the backward that is running; one look per backward."""
        self.clock.backward()
        task = torch._C._current_graph_task_id()
        if task != self._task or task == -1:
            self._task = task
            self._task_scale = self._find_scale(stored if stored is not None else dtype)
            if self._task_scale.unknown:
                self._recording.scale_unknown(self._task_scale.unknown)
            if self._watch is not None:
                self._watch.backward_scale(self._task_scale)
        return self._task_scale

    def _find_scale(self, dtype: torch.dtype) -> BackwardScale:
        if self._root_scale is not None:
            return self._root_scale
        if self._loss_scale is not None:
            known = callable(self._loss_scale)
            return scales.from_callable(self._loss_scale) if known else scales.from_number(float(self._loss_scale))  # type: ignore[arg-type]
        others = [scaler for scaler in self._scalers if not isinstance(scaler, torch.amp.GradScaler)]
        if others:
            return scales.from_scaler(others[0])
        if self._scalers and not self._any_scaled and any(scaler.is_enabled() for scaler in self._scalers):
            return BackwardScale(
                None,
                unknown="the scaler given has not scaled a loss through scaler.scale(); if you multiply by its scale "
                "yourself, pass loss_scale=scaler.get_scale",
            )
        if not self._any_scaled and any(watched.parameter.dtype == torch.float16 for watched in self._parameters):
            return BackwardScale(
                None,
                unknown="the weights are FP16 and no scaler was seen; pass loss_scale= (1.0 if the loss is not scaled)",
            )
        if dtype == torch.float16 and not self._any_scaled:
            self._recording.note("no scaler scaled a loss and loss_scale was not given: the loss is taken as unscaled (1.0)")
        return scales.UNSCALED

    # -- scalers ------------------------------------------------------------------------------------------------

    @guarded
    def loss_scaled(self, scaler: Any, scaled: Any) -> None:
        """A GradScaler scaled a loss: its backward, should it reach this model, runs under that scale."""
        self._any_scaled = True
        scale = scales.from_scaler(scaler)
        capture = weakref.ref(self)

        def backward_begins(gradient: torch.Tensor) -> None:
            alive = capture()
            if alive is not None and alive.attached:
                alive._scaled_backward(scale)

        for loss in tensors_in(scaled):
            if loss.requires_grad and loss.grad_fn is not None:
                loss.register_hook(backward_begins)
                if self._watch is not None and self.clock.begun:
                    self._watch.scaled_loss(loss, self.clock.micro_batch)

    @guarded
    def _scaled_backward(self, scale: BackwardScale) -> None:
        if self._root_scale is not None and self._root_scale.value != scale.value:
            scale = BackwardScale(None, unknown="one backward ran through losses of different scales")
        self._root_scale = scale
        self._task = -1
        # When this backward has ended its scale is over: another one may be unscaled.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]

    def _backward_ended(self) -> None:
        self._root_scale = None
        self._task = -1

    @guarded
    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` begins."""
        self._stepping.add(id(optimizer))
        self._scaler_has_stepped = self._scaler_has_stepped or self._is_ours(optimizer)

    @guarded
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is over: if the optimizer did not step meanwhile, the scaler skipped it."""
        if id(optimizer) not in self._stepping:
            return
        self._stepping.discard(id(optimizer))
        if not self._is_ours(optimizer):
            return
        if self.clock.optimizer_again(optimizer):
            self._end_step()
        if self._watch is not None:
            self._watch_skipped(optimizer)
        if self.clock.optimizer_done(optimizer, skipped=True):
            self._end_step()

    def _watch_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """The scaler found something that is not finite: which parameters is told by their gradients, still there."""
        assert self._watch is not None
        self._watch.skipped(True)
        for parameter in _parameters_of(optimizer):
            watched = self._by_parameter.get(id(parameter))
            if watched is not None and parameter.grad is not None:
                gradient = _local(parameter.grad)
                self._watch.weight_gradient(watched.name, watched.owner, gradient, self.clock.micro_batch, None)

    # -- optimizers -----------------------------------------------------------------------------------------------

    @guarded
    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.discard(id(optimizer))
        if not self._is_ours(optimizer):
            return
        self.clock.know(optimizer)
        if self.clock.optimizer_again(optimizer):
            self._end_step()
        if self._sampled and UPDATE in self._kinds:
            self._before[id(optimizer)] = [
                (watched, _local(parameter).detach().clone())
                for parameter in _parameters_of(optimizer)
                if (watched := self._by_parameter.get(id(parameter))) is not None and watched.counted
            ]

    @guarded
    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        for watched, before in self._before.pop(id(optimizer), ()):
            if watched.parameter.grad is not None:
                self._count_update(watched, before)
        # A fused optimizer is told of found_inf on the device and skips without anyone knowing on the host.
        if self._watch is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
            self._watch.skipped(False)
        if self.clock.optimizer_done(optimizer, skipped=False):
            self._end_step()

    @torch.no_grad()
    def _count_update(self, watched: WatchedParameter, before: torch.Tensor) -> None:
        after = _local(watched.parameter).detach()
        if not before.is_floating_point():
            return
        wide = torch.float64 if before.dtype == torch.float64 else torch.float32
        update = after.to(wide) - before.to(wide)
        key = TensorKey(watched.name, UPDATE)
        self._tally.add(Sample(key, count(update), update.numel(), _name(before.dtype)))
        gradient = _local(watched.parameter.grad) if watched.parameter.grad is not None else None
        if before.dtype in _NARROW and gradient is not None and gradient.layout is torch.strided:
            name = _NARROW[before.dtype]
            self._tally.add_lost_updates(key, {name: unmoved(before, after, gradient)}, {name: True})
        elif before.dtype not in _NARROW:
            counts = {name: lost_updates(before, update, dtype) for name, dtype in STORAGE_DTYPES.items()}
            self._tally.add_lost_updates(key, counts, dict.fromkeys(counts, False))

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._optimizers.get(optimizer)
        if known is None:
            known = any(id(parameter) in self._by_parameter for parameter in _parameters_of(optimizer))
            self._optimizers[optimizer] = known
        return known

    # -- the step -------------------------------------------------------------------------------------------------

    @guarded
    def _end_step(self) -> None:
        """Send the step's counts off, judge the steps that have arrived, and begin the next."""
        step = self.clock.step
        if self._sampled:
            if WEIGHT in self._kinds:
                self._count_weights()
            self._tally.end_step(step)
        if self._watch is not None:
            for event in self._watch.end_step(step):
                self._recording.event(event)
        sampled = self._sampled
        self.clock.advance()
        if self._recording.wants_window(self._tally.open_steps):
            self.collect(False)
        self._recording.step_done(self.clock.step, self.clock.skipped_steps, self.clock.backwards, sampled)
        if self.attached:
            self._begin_step()

    def _updated(self) -> bool:
        """Whether the weights changed, or their gradients went, since this was last asked. Does not wait for a GPU."""
        first = next((watched.parameter for watched in self._parameters if watched.parameter.requires_grad), None)
        if first is None:
            return True
        before, self._weight_state = self._weight_state, _state(first)
        return first.grad is None or self._weight_state != before

    def _begin_step(self) -> None:
        self._sampled = bool(self._kinds) and self.clock.sampled
        # Without an optimizer it is the forwards that tell where a step begins.
        self._quiet = not self._sampled and self._watch is None and self.clock.has_optimizers
        self._stepping.clear()
        if self._unfrozen_later and any(watched.parameter.requires_grad for watched in self._unfrozen_later):
            self._hook_parameters(self._unfrozen_later)
        for module, hook_id in self._hook_ids:
            # Another hook that came later may change the output: see what the next module is given.
            if next(reversed(module._forward_hooks)) != hook_id and hook_id in module._forward_hooks:
                module._forward_hooks.move_to_end(hook_id)

    def _count_weights(self) -> None:
        for watched in self._parameters:
            if watched.counted:
                weight = _local(watched.parameter).detach()
                passed = _NARROW.get(weight.dtype, "float32")
                key = TensorKey(watched.name, WEIGHT)
                self._tally.add(Sample(key, count(weight), weight.numel(), _name(weight.dtype), passed))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(parameter: torch.Tensor) -> tuple[int, list[float] | None]:
    """What changes when a loop without an optimizer updates a parameter: its version and, on a CPU, its first values.

    ``parameter.data -= ...`` changes the values and not the version.
    """
    local = _local(parameter.detach())
    return parameter._version, local.reshape(-1)[:4].tolist() if local.device.type == "cpu" else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor; others as they are. No collective."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
