"""The capture: hooks on a model, and what they set going at each forward, backward and step.

Nothing keeps a tensor of the model: what stays are rows of counts and reduced values.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy

from mpinspect.counting import fastest
from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture import optimizer_steps, pickling
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.ranges.capture.backward_scale import NO_BACKWARD, ScaleOfBackward
from mpinspect.ranges.capture.broken_weights import BrokenWeights
from mpinspect.ranges.capture.budget import Budget
from mpinspect.ranges.capture.last_values import LastValues
from mpinspect.ranges.capture.layers import Layer, WatchedParameter, named_parameters
from mpinspect.ranges.capture.lifted import LiftedHooks
from mpinspect.ranges.capture.loss_scale import UNSCALED, BackwardScale
from mpinspect.ranges.capture.optimizers import ModelOptimizers, UpdateCapture, skips_on_device
from mpinspect.ranges.capture.reach import has_compiled, is_many, out_of_reach, tracing, transforms
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import Schedule, StepClock
from mpinspect.ranges.capture.tally import Sample, Tally, dtype_name, passed_through
from mpinspect.ranges.capture.tensor_hooks import AccumulatedHook, ForwardHook, OutputGradientHook, ParameterHook
from mpinspect.ranges.capture.waiting import Waiting, WaitingGradients
from mpinspect.ranges.capture.watch import Found, Watch
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, UPDATE, WEIGHT, WEIGHT_GRADIENT
from mpinspect.ranges.session import Event, TensorKey, narrowest
from mpinspect.runtime.cuda_stopwatch import CudaStopwatch
from mpinspect.runtime.distributed import is_distributed, local_part
from mpinspect.runtime.guard import Guarded, entrance, guarded
from mpinspect.runtime.hooks import HandleList, hook_gradient
from mpinspect.runtime.meter import Meter
from mpinspect.runtime.outputs import tensor_list, tensors_in


class _OfBackward(NamedTuple):
    """What holds for the gradients of one backward.

    Args:
        task: the graph task.
        scale: the loss scale.
        divisor: what values are divided by before they are counted.
        watch: where it looks at this step.
        counts: whether weight gradients are counted.
        looks: whether the watch looks at weight gradients that are not.
    """

    task: int
    scale: BackwardScale
    divisor: float | torch.Tensor | None
    watch: Watch | None
    counts: bool
    looks: bool


class Capture(Guarded):
    """Watches one model from ``attach`` to ``detach``.

    Args:
        layers, parameters: what to hook (mpinspect.ranges.capture.layers).
        kinds: kinds of tensor to count at sampled steps.
        schedule: which steps are sampled.
        watch: keep the non-finite watch at every step.
        max_overhead: choose which steps are sampled, and watched, such that the cost stays below this share of the bare steps;
            of ``schedule`` then only ``every`` holds, as the least interval. None: the schedule tells.
        loss_scale: the scale of loops that scale by hand: a number, a callable that gives it, or None.
        optimizers, scalers: those known to belong to the model; others are found when they step or scale.
        recording: takes what is captured.
        clock: seconds, monotonic; what the cost is measured with.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        parameters: Iterable[WatchedParameter],
        *,
        kinds: Collection[str],
        schedule: Schedule,
        watch: bool,
        loss_scale: float | Callable[[], Any] | None,
        optimizers: Collection[torch.optim.Optimizer],
        scalers: Collection[Any],
        recording: Recording,
        max_overhead: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(recording.note)
        self._layers = list(layers)
        self._parameters = list(parameters)
        self._kinds = frozenset(kinds)
        self._recording = recording
        self.clock = StepClock(schedule)
        for optimizer in optimizers:
            self.clock.know(optimizer)
        self._me = weakref.ref(self)
        self._tally = Tally(recording.note, recording.scale)
        #: Weight gradients that wait for the end of their backward.
        self.waiting = WaitingGradients(
            functools.partial(_looks_at_waiting, self._me),
            recording.note,
            functools.partial(_when_a_backward_ends, self._me),
        )
        self._may_wait = True
        self._watch = Watch({layer.path: layer.module for layer in self._layers}) if watch else None
        self._budget: Budget | None = None
        if max_overhead is not None:
            self._budget = Budget(max_overhead, every=schedule.every, samples=bool(self._kinds), watches=watch)
            on_cuda = any(watched.parameter.is_cuda for watched in self._parameters)
            self.meter = Meter(clock, CudaStopwatch() if on_cuda else None)
        self._optimizers = ModelOptimizers(optimizers, {id(watched.parameter): watched for watched in self._parameters})
        self._updates = UpdateCapture(self._tally)
        fp16_weights = any(watched.parameter.dtype == torch.float16 for watched in self._parameters)
        self._scale = ScaleOfBackward(loss_scale, scalers, fp16_weights, recording, self.waiting.stop)
        self._scalers_given = bool(scalers)
        self._scaler_has_stepped = False
        #: Optimizers inside a scaler's step that have not stepped themselves.
        self._in_scaler_step: set[int] = set()
        #: Optimizers (by id) whose step has begun and not ended.
        self._in_optimizer_step: set[int] = set()
        self._handles = HandleList()
        self._hook_ids: list[tuple[torch.nn.Module, int]] = []
        self._parameter_hooks: list[tuple[torch.Tensor, int]] = []
        self._lifted = LiftedHooks()
        #: Parameters that can't be hooked yet: frozen, or lazy ones without a shape.
        self._later: list[WatchedParameter] = []
        #: The narrowest format that an output or a gradient of this step was seen in.
        self._narrow = "float32"
        self._any_output = self._any_call = False
        #: Layers whose outputs were counted in this step with their gradients enabled.
        self._counted_layers: set[str] = set()
        self._may_capture_graphs = False
        #: Whether full backward hooks of others wrap some module's inputs.
        self._wrapped_inputs = False
        self._weight_state: tuple[int, list[float] | None] | None = None
        #: Each weight, with what it was as the run began.
        self._first_weights: list[tuple[torch.Tensor, tuple[int, list[float] | None]]] = []
        self._has_stepped = False
        self._broken_weights = BrokenWeights(self._parameters)
        #: Kinds and watch while it rests.
        self._rested: tuple[frozenset[str], Watch | None] | None = None
        #: Steps that the watch looked at, and not at the one before; events arrive a few steps late at most.
        self._after_pause: deque[int] = deque(maxlen=8)
        #: What holds for the gradients of the backward at work.
        self._of_backward = _OfBackward(NO_BACKWARD, UNSCALED, None, None, False, False)
        #: The gradient before: its row, or its largest magnitude, and its layer where it was not counted.
        self._last_gradient: LastValues[Found] = LastValues()
        self._last_path = ""
        #: Layers that are not counted, whose output's gradient is counted all the same: it goes on to one that is.
        self._counted_ahead: set[str] = set()
        self.attached = False
        #: Whether this step is sampled, and the watch where it looks at this step.
        self._sampled = False
        self._looking: Watch | None = None
        #: Whether nothing is to be seen in this step: what every hook asks first.
        self.quiet = False

    # -- coming and going ---------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on."""
        self.attached = True
        self._may_capture_graphs = torch.cuda.is_available()
        self._warm_up()
        self._updated()
        self._remember_weights()
        pickling.leave_hooks_out(self, (layer.module for layer in self._layers))
        self._hook_modules()
        self._hook_parameters(self._parameters)
        self._begin_step()
        optimizer_steps.listen(self)
        scaler_watch.listen(self)

    @guarded
    def _warm_up(self) -> None:
        """Load what will look at tensors, so that no training step waits for it."""
        if self._kinds or self._watch is not None:
            for note in fastest.warm_up({watched.parameter.device for watched in self._parameters}):
                self._recording.note(note)

    def detach(self) -> None:
        """Take every hook off and take in what is still on its way."""
        self.attached = False
        scaler_watch.unlisten(self)
        optimizer_steps.unlisten(self)
        self._handles.remove_all()
        pickling.stop(self)
        self._updates.forget()
        if self.clock.begun:
            # Broken off before an optimizer stepped, or a backward of another network passed through: no step.
            self._end_step(finished=not self.clock.waits_for_optimizer)
        self.collect(wait=True)
        self._say_what_was_missed()
        self._say_whether_updated()
        if self._scalers_given and self._scale.any_scaled and self.clock.backwards and not self._scaler_has_stepped:
            self._recording.note(
                "the scaler scaled losses of this model and stepped no optimizer of it: its skipped steps were not seen. Call "
                "scaler.step(optimizer), or give the optimizer of your FP32 master weights as optimizers="
            )
        self._hook_ids.clear()
        self._parameter_hooks.clear()
        self._lifted.forget()

    @guarded
    def broken_weights(self) -> frozenset[str]:
        """Names of the weights that are not finite now. Waits for a GPU."""
        return self._broken_weights.names()

    @guarded
    def weights_left(self, before: Collection[str]) -> Event | None:
        """After ``detach``: an event, not yet recorded, where trained weights are not finite and none tells why. Waits for a GPU.

        Args:
            before: ``broken_weights`` when the run began.
        """
        told = any(not event.skipped and not event.gradients_finite for event in self._recording.events)
        left = self._broken_weights.left_behind(self.clock.step - 1, before) if self.clock.step and not told else None
        self._name_unread()
        return left

    @guarded
    def between_forward_and_backward(self) -> int | None:
        """The step whose forward has run, its last output finite, and whose backward has not; None elsewhere, or if not known."""
        watch = self._looking
        if watch is None or not self.clock.in_forward or watch.forward_broke() is not False:
            return None
        return self.clock.step

    def rest(self, resting: bool) -> None:
        """Count and watch nothing until told otherwise; what the open step had so far is dropped. Steps are still counted."""
        if resting and self._rested is None:
            self._rested = (self._kinds, self._watch)
            self._kinds, self._watch = frozenset(), None
            self._finish_waiting()
            self._tally.drop_step()
        elif not resting and self._rested is not None:
            (self._kinds, self._watch), self._rested = self._rested, None
        self._begin_step()

    def unhook(self, modules: Collection[int]) -> bool:
        """Take the hooks off these modules, by id; whether there were any. Their parameters stay hooked."""
        leave = [(module, hook) for module, hook in self._hook_ids if id(module) in modules]
        self._hook_ids = [(module, hook) for module, hook in self._hook_ids if id(module) not in modules]
        self._lifted.forget(modules)
        for module, hook in leave:
            module._forward_hooks.pop(hook, None)
            module._forward_hooks_with_kwargs.pop(hook, None)
        return bool(leave)

    def abandon(self) -> None:
        """Be inert from now on: this is a forked child. Nothing is taken in, no GPU is touched."""
        self.attached, self.quiet = False, True
        scaler_watch.unlisten(self)
        optimizer_steps.unlisten(self)
        self._handles.remove_all()
        pickling.stop(self)

    @guarded
    def _say_what_was_missed(self) -> None:
        if self.clock.backwards and self._hook_ids and not self._any_call:
            self._recording.note(
                "gradients arrived and no call of a module was seen: hooks do not run inside torch.compile, so only weight "
                "gradients were counted and watched. Inspect the model uncompiled to see its activations"
            )
        root = next((layer.module for layer in self._layers if not layer.path), None)
        known = {id(watched.parameter) for watched in self._parameters}
        new = (
            [name for name, parameter in named_parameters(root) if id(parameter) not in known]
            if root is not None
            else []
        )
        if new:
            self._recording.note(
                f"{len(new)} parameters came into the model after the inspector was made and were not watched: "
                f"{', '.join(new[:5])}{', ...' if new[5:] else ''}"
            )

    @guarded
    def _remember_weights(self) -> None:
        weights = [watched.parameter for watched in self._parameters if _can_be_hooked(watched.parameter)]
        self._first_weights = [(weight, _state(weight)) for weight in weights]

    @guarded
    def _say_whether_updated(self) -> None:
        """Record whether any update was applied: by an optimizer that was seen, or told by the weights themselves."""
        moved: bool | None = self._has_stepped or any(_state(weight) != was for weight, was in self._first_weights)
        if not moved and not all(values is not None for _, (_, values) in self._first_weights):
            # Off a CPU ``weight.data -= ...`` leaves no trace that could be read without waiting.
            moved = None
        self._first_weights.clear()
        self._recording.weights_moved(moved)

    @guarded
    def collect(self, wait: bool) -> None:
        """Close the open window and judge what has been watched; ``wait`` for the GPU."""
        window = self._tally.close_window(wait=wait)
        if window is not None:
            self._recording.add_window(window)
        if wait and self._watch is not None:
            self._drain(self._watch)
        self._name_unread()

    @guarded
    def _drain(self, watch: Watch) -> None:
        for event in watch.drain():
            self._tell(event)
        self.clock.skipped_steps += watch.take_skips_on_device()
        self._recording.skips(self.clock.skipped_steps)

    def _name_unread(self) -> None:
        """Have the record name the tensors that could not be read since this was last called."""
        self._recording.unread("counted", self._tally.unread.take_new())
        if self._watch is not None:
            self._recording.unread("watched", self._watch.unread.take_new())
        self._recording.unread("searched for infinities and NaNs", self._broken_weights.unread.take_new())

    def _hook_modules(self) -> None:
        owners = {watched.owner for watched in self._parameters if watched.counted}
        wants_outputs = bool(self._kinds & {ACTIVATION, ACTIVATION_GRADIENT})
        for layer in self._layers:
            if _is_never_called(layer.module):
                continue
            if self._watch is None and not (layer.counted and wants_outputs) and layer.path not in owners:
                continue
            hook = ForwardHook(self, layer)
            handle = self._handles.add(layer.module.register_forward_hook(hook, with_kwargs=True))
            self._hook_ids.append((layer.module, handle.id))

    def _hook_parameters(self, parameters: Iterable[WatchedParameter]) -> None:
        if WEIGHT_GRADIENT not in self._kinds and self._watch is None:
            return
        self._later = [watched for watched in parameters if not _can_be_hooked(watched.parameter)]
        for watched in parameters:
            parameter: Any = watched.parameter
            if not _can_be_hooked(parameter):
                continue
            if is_distributed(parameter):
                self._handles.add(parameter.register_post_accumulate_grad_hook(AccumulatedHook(self, watched)))
            else:
                handle = self._handles.add(parameter.register_hook(ParameterHook(self, watched)))
                self._parameter_hooks.append((parameter, handle.id))

    # -- the forward --------------------------------------------------------------------------------------------

    @entrance
    def forward_ran(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """A module's forward has run."""
        if transforms() is not None or tracing() is not None or self._may_capture_graphs:
            reason = out_of_reach(self._may_capture_graphs)
            if reason is not None:
                self._recording.note(reason)
                return
        # Inside a backward the forward is a recomputation (activation checkpointing): not counted again, but with
        # the reentrant kind its tensors are the ones that the gradients reach.
        self._any_call = True
        recomputed = torch._C._current_graph_task_id() != -1
        if (
            not recomputed
            and not (self.clock.in_forward and torch.is_grad_enabled())
            and not self._training_forward(layer)
        ):
            return
        watch = self._looking
        if not self._sampled and watch is None:
            return
        outputs = tensor_list(output)
        for tensor in outputs:
            self._any_output = True
            if tensor.dtype is not torch.float32:
                self._pass_through(tensor.dtype)
        counted = self._sampled and layer.counted
        rows = self._count_outputs(layer, outputs) if counted and self._is_first_forward(layer, recomputed) else {}
        counted = counted and ACTIVATION_GRADIENT in self._kinds
        awaited: set[int] = set()
        if watch is not None:
            inputs = tensor_list(args) + tensor_list(kwargs) if kwargs else tensor_list(args)
            awaited = self._watch_call(watch, layer, inputs, outputs, rows, counted, recomputed)
        if counted:
            for tensor in outputs:
                if id(tensor) not in awaited and tensor.requires_grad:
                    self._await_gradient(layer, tensor, counted=True, number=-1, is_input=False)

    def _training_forward(self, layer: Layer) -> bool:
        """Tell the clock of a forward; whether it belongs to training."""
        if not torch.is_grad_enabled():
            # Validation, or the first forward of a reentrant checkpoint: no step begins, and only the latter matters.
            return layer.module.training
        if self.clock.after_backward:
            self.waiting.finish_left_behind()
        if self.clock.forward(self._updated):
            self._end_step()
            self.clock.forward(self._updated)
        return True

    def _is_first_forward(self, layer: Layer, recomputed: bool) -> bool:
        """Whether outputs are to be counted: once each, with gradients enabled (a reentrant checkpoint's when recomputed)."""
        if ACTIVATION not in self._kinds or not torch.is_grad_enabled():
            return False
        if recomputed:
            return layer.path not in self._counted_layers
        self._counted_layers.add(layer.path)
        return True

    def _pass_through(self, dtype: torch.dtype) -> None:
        if dtype is torch.float32:
            return
        name = passed_through(dtype)
        if name not in ("float32", self._narrow):
            self._narrow = narrowest((self._narrow, name))

    def _narrowed(self, dtype: torch.dtype) -> str:
        """The format that a gradient of this dtype was rounded to on its way.

        Under autocast an FP32 gradient may be the upcast of an FP16 one, here or at any layer after: so it counts as
        rounded if anything in the step was. Where no output was seen (torch.compile), a GradScaler tells of FP16.
        """
        self._pass_through(dtype)
        if not self._any_output and self._scale.by_scaler:
            return narrowest((self._narrow, "float16"))
        return self._narrow

    def _count_outputs(self, layer: Layer, outputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        key = TensorKey(layer.path, ACTIVATION)
        rows = {}
        for tensor in outputs:
            row = self._count(key, tensor, passed_through(tensor.dtype))
            if row is not None:
                rows[id(tensor)] = row
        return rows

    def _count(self, key: TensorKey, tensor: torch.Tensor, narrow: str) -> torch.Tensor | None:
        """Count a tensor, one of no backward; its row, if it can be counted."""
        values = local_part(tensor)
        row = self._tally.count(key, values)
        if row is not None:
            self._tally.add(Sample(key, row, values.numel(), dtype_name(values.dtype), narrow))
        return row

    def _watch_call(
        self,
        watch: Watch,
        layer: Layer,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        rows: dict[int, torch.Tensor],
        counted: bool,
        recomputed: bool,
    ) -> set[int]:
        """Let the watch see a call; returns the ids of the outputs whose gradient is awaited with it."""
        micro_batch = self.clock.micro_batch
        if self._wrapped_inputs:
            for tensor in inputs:
                self._see_through_wrapper(watch, tensor, layer)
        awaited, finite = set(), True
        for tensor, number, is_input in watch.module_called(layer.path, inputs, outputs):
            if not (recomputed or is_input):
                finite = watch.output(layer.path, tensor, number, micro_batch, rows.get(id(tensor))) and finite
            if tensor.requires_grad and not (is_input and tensor.is_leaf):
                self._await_gradient(layer, tensor, counted=counted and not is_input, number=number, is_input=is_input)
                if not is_input:
                    awaited.add(id(tensor))
        if not finite or watch.forward_is_broken:
            watch.look_at_inputs(layer.path, inputs, micro_batch)
        return awaited

    def _see_through_wrapper(self, watch: Watch, tensor: torch.Tensor, layer: Layer) -> None:
        """A full backward hook hands its module a wrapped input and may change the gradient on the way out of it."""
        node: Any = tensor.grad_fn
        if node is None or type(node).__name__ != "BackwardHookFunctionBackward":
            return
        inner, index = node.next_functions[tensor.output_nr]
        if inner is None or not inner.next_functions:
            return
        number = inner.metadata.get((id(self), index))
        if number is None:
            number = inner.metadata[id(self), index] = watch.unseen_input()
            hook = OutputGradientHook(self._me, layer, False, number, True)
            inner.register_prehook(lambda gradients: hook(gradients[index]))
        watch.wrapped_input(number, layer.path)

    def _await_gradient(
        self, layer: Layer, tensor: torch.Tensor, *, counted: bool, number: int, is_input: bool
    ) -> None:
        handle = hook_gradient(tensor, OutputGradientHook(self._me, layer, counted, number, is_input))
        if self._wrapped_inputs and tensor.grad_fn is not None:
            node: Any = tensor.grad_fn
            node.metadata[id(self), tensor.output_nr] = number
        if handle is not None:
            # A module that returns a parameter.
            self._handles.add(handle)

    # -- the backward -------------------------------------------------------------------------------------------

    @entrance
    def activation_gradient(
        self, layer: Layer, gradient: torch.Tensor, counted: bool, number: int, is_input: bool
    ) -> None:
        """The gradient at a tensor has arrived."""
        of = self._what_holds(gradient)
        if of is None:
            return
        if type(gradient) is not torch.Tensor:
            gradient = local_part(gradient)
        last = self._last_gradient
        found = last.found_in(gradient) if last.remembers else None
        if self._sampled and (counted or layer.path in self._counted_ahead):
            if of.divisor is None:
                row = self._row_of(layer, gradient, found, counted)
                found = row if row is not None else found
            else:
                row = self._tally.count(layer.gradient_key, gradient, of.divisor)
            if counted and row is not None:
                self._add_gradient(layer.gradient_key, gradient, row, of.scale)
        if of.watch is not None and number >= 0:
            found = of.watch.activation_gradient(layer.path, gradient, number, self.clock.micro_batch, found, is_input)
        if counted:
            last.forget()
            self._last_path = ""
        else:
            last.keep(gradient, found)
            self._last_path = layer.path

    def _row_of(self, layer: Layer, gradient: torch.Tensor, found: Found | None, counted: bool) -> torch.Tensor | None:
        """The row of a gradient's counts, of the values as they are; ``found``: what is known of the same values already.

        A container's gradient is not asked for, its last layer's is, and mostly that is the same memory: then it is counted when
        it comes first, at the container, where else the watch would read it once more.
        """
        if isinstance(found, torch.Tensor):
            return found
        if found is not None:
            self._counted_ahead.add(self._last_path)
        elif counted and self._last_path:
            self._counted_ahead.discard(self._last_path)
        return self._tally.count(layer.gradient_key, gradient)

    @entrance
    def weight_gradient(self, watched: WatchedParameter, gradient: torch.Tensor) -> None:
        """The gradient of a parameter has arrived, and does not wait yet."""
        of = self._what_holds(gradient)
        if of is None:
            return
        if self.waiting.task == of.task:
            self.waiting.make_room(gradient)
            if self.waiting.hold(watched, gradient):
                return
        gradient, row = local_part(gradient), None
        if of.counts and watched.counted:
            row = self._tally.count(watched.gradient_key, gradient, of.divisor)
            if row is not None:
                self._add_gradient(watched.gradient_key, gradient, row, of.scale)
            if of.divisor is not None:
                # Of the values divided.
                row = None
        if of.watch is not None and (row is not None or of.looks):
            of.watch.weight_gradient(watched.name, watched.owner, gradient, self.clock.micro_batch, row)

    def _look_at_waiting(self, waiting: list[Waiting], of: _OfBackward) -> None:
        """The same for parameters' gradients that have waited to be counted together."""
        self._tally.count_together(waiting)
        for each in waiting:
            if each.found is not None:
                self._add_gradient(each.watched.gradient_key, each.values, each.found, of.scale)
        if of.watch is not None:
            looked_at = waiting if of.looks else [each for each in waiting if each.found is not None]
            of.watch.waited(looked_at, self.clock.micro_batch)

    @entrance
    def backward_ended(self, finish: Callable[[], None]) -> None:
        """A backward is over, and what waited for that is looked at."""
        finish()

    def _what_holds(self, gradient: torch.Tensor) -> _OfBackward | None:
        """What holds for a gradient and all others of its backward, found out at the first; None where it can't be looked at."""
        of, task = self._of_backward, torch._C._current_graph_task_id()
        if of.task == task == self._scale.task and not is_many(gradient):
            return of
        reason = out_of_reach(self._may_capture_graphs, gradient)
        if reason is not None:
            self._recording.note(reason)
            return None
        return self._backward_reached(gradient.dtype)

    def _backward_reached(self, dtype: torch.dtype) -> _OfBackward:
        """A backward is at work, and this is the first look at it in this step."""
        in_half = dtype is torch.float16 or self._narrow == "float16"
        scale, is_new = self._scale.now(in_half)
        # Parameters of no module have no forward to be seen: without an optimizer the backwards tell where a step begins.
        told_by_backwards = is_new and not self._any_call and not self.clock.has_optimizers
        if told_by_backwards and self.clock.backward_again(self._updated):
            self._end_step()
            # Which forgets the backward, for the sake of those that go on over a step's end.
            self._scale.now(in_half)
        self.clock.backward()
        watch = self._looking
        if is_new and watch is not None:
            watch.backward_scale(scale)
        self._last_gradient.forget()
        counts = self._sampled and WEIGHT_GRADIENT in self._kinds
        # A GradScaler finds out by itself whether a weight gradient is not finite, and skips the step then.
        looks = watch is not None and (not self._scale.by_scaler or self._optimizers.any_fused)
        of = _OfBackward(torch._C._current_graph_task_id(), scale, scale.divisor, watch, counts, looks)
        self._of_backward = of
        if self._may_wait and of.divisor is None and counts:
            self.waiting.begin(of, watch.looks if watch is not None else ())
        else:
            self.waiting.stop()
        return of

    def _add_gradient(self, key: TensorKey, gradient: torch.Tensor, row: torch.Tensor, scale: BackwardScale) -> None:
        """Add a gradient's counts."""
        dtype = gradient.dtype
        narrow = self._narrow if dtype is torch.float32 and self._any_output else self._narrowed(dtype)
        self._tally.add(Sample(key, row, gradient.numel(), dtype_name(dtype), narrow, scale))

    # -- scalers ------------------------------------------------------------------------------------------------

    @entrance
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """A GradScaler scaled a loss: its backward, should it reach this model, runs under that scale."""
        losses = self._scale.loss_scaled(scaler, scaled)
        if self._looking is not None and self.clock.begun:
            for loss in tensors_in(given):
                self._looking.loss(loss, self.clock.micro_batch)
            for loss in losses:
                self._looking.scaled_loss(loss, self.clock.micro_batch)

    @entrance
    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` begins."""
        self.waiting.finish_left_behind()
        if self._optimizers.owns(optimizer):
            self._in_scaler_step.add(id(optimizer))
            self._scaler_has_stepped = True

    @entrance
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is over: if the optimizer did not step meanwhile, the scaler skipped it.

        A step that began and did not end was undone: a closure's second evaluation overflowed, say.
        """
        undone = id(optimizer) in self._in_optimizer_step
        if id(optimizer) not in self._in_scaler_step and not undone:
            return
        self._in_scaler_step.discard(id(optimizer))
        self._in_optimizer_step.discard(id(optimizer))
        if undone:
            self._updates.forget()
        if self.clock.optimizer_again(optimizer):
            self._end_step()
        if self._looking is not None:
            # Something was not finite: which parameter tells its gradient, still there.
            self._looking.skipped(True)
            for watched in self._optimizers.parameters(optimizer):
                if watched.parameter.grad is not None:
                    gradient = local_part(watched.parameter.grad)
                    self._looking.weight_gradient(watched.name, watched.owner, gradient, self.clock.micro_batch, None)
        if self.clock.optimizer_done(optimizer, skipped=True):
            self._end_step()

    # -- optimizers -----------------------------------------------------------------------------------------------

    @entrance
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self.waiting.finish_left_behind()
        self._in_scaler_step.discard(id(optimizer))
        if not self._optimizers.owns(optimizer):
            return
        self.clock.know(optimizer)
        if self.clock.optimizer_again(optimizer):
            self._end_step()
        self._in_optimizer_step.add(id(optimizer))
        if self._looking is not None and not self._broken_weights.exhausted and self._looking.forward_broke():
            self._broken_weights.look_before_step()
        if self._looking is not None:
            self._looking.weights_are_about_to_move()
        found_inf = getattr(optimizer, "found_inf", None)
        if self._watch is not None and isinstance(found_inf, torch.Tensor):
            self._watch.stepped_with(found_inf)
        if self._sampled and UPDATE in self._kinds:
            self._updates.before(optimizer, self._optimizers.parameters(optimizer))

    @entrance
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        self._in_optimizer_step.discard(id(optimizer))
        if not self._optimizers.owns(optimizer):
            return
        self._has_stepped = True
        self._updates.after(optimizer)
        if self._looking is not None and not skips_on_device(optimizer):
            self._looking.skipped(False)
        if self.clock.optimizer_done(optimizer, skipped=False):
            self._end_step()

    # -- the step -------------------------------------------------------------------------------------------------

    @guarded
    def _end_step(self, *, finished: bool = True) -> None:
        """Send the step's counts off, judge the steps that have arrived, and begin the next."""
        self._finish_waiting()
        step, sampled = self.clock.step, self._sampled
        if not finished and self._recording.progress.sampled_steps:
            # What is left over is no sample of a whole step; but better than nothing where there is none.
            self._tally.drop_step()
            sampled = False
        if sampled:
            self._send_counts(step)
        if self._watch is not None:
            self._judge_watched(self._watch, step)
        if self._budget is not None and finished:
            self._settle(self._budget)
        self.clock.advance()
        if self._recording.wants_window(self._tally.open_steps):
            self.collect(False)
        else:
            self._name_unread()
        steps = self.clock.step if finished else step
        self._recording.step_done(steps, self.clock.skipped_steps, self.clock.backwards, sampled)
        if self.attached:
            self._begin_step()

    @guarded
    def _finish_waiting(self) -> None:
        self.waiting.finish()

    @guarded
    def _send_counts(self, step: int) -> None:
        if WEIGHT in self._kinds:
            self._count_weights()
        self._tally.end_step(step)

    @guarded
    def _judge_watched(self, watch: Watch, step: int) -> None:
        for event in watch.end_step(step):
            self._tell(event)
        self.clock.skipped_steps += watch.take_skips_on_device()

    def _tell(self, event: Event) -> None:
        """Pass an event on; where a forward broke, say if the module's weights were broken already."""
        if event.phase == "forward" and not self._broken_weights.exhausted:
            # Skipped, or nobody has stepped since the forward ran.
            unmoved = event.skipped or (event.skipped is None and self.clock.has_optimizers)
            event = self._broken_weights.explain(event, unmoved=event.step == self.clock.step and unmoved)
        if event.step in self._after_pause:
            gap = "the step before was not looked at (max_overhead), so it may have begun earlier"
            event = replace(event, explanation=f"{event.explanation}; {gap}")
        self._recording.event(event)

    @guarded
    def _settle(self, budget: Budget) -> None:
        """Tell the budget, and the record, what the step that ends has cost; it chooses for the next."""
        assert self.meter is not None
        step_s, own_s = self.meter.end_step()
        watched = self._looking is not None
        bare_s = budget.end_step(step_s, own_s)
        later_s = self.meter.next_step(budget.samples or budget.watches)
        budget.charge_later(later_s)
        self._recording.spent(watched, None if step_s is None else bare_s, own_s, later_s)

    def _begin_step(self) -> None:
        budget, watched_before = self._budget, self._looking is not None
        self._sampled = bool(self._kinds) and (self.clock.sampled if budget is None else budget.samples)
        self._looking = self._watch if budget is None or budget.watches else None
        if budget is not None and self._looking is not None and not watched_before and self.clock.step:
            self._after_pause.append(self.clock.step)
        # Without an optimizer it is the forwards that tell where a step begins.
        self.quiet = not self._sampled and self._looking is None and self.clock.has_optimizers
        self._in_scaler_step.clear()
        self._in_optimizer_step.clear()
        self._broken_weights.begin_step()
        self._narrow, self._any_output = "float32", False
        self._scale.forget()
        self._counted_layers.clear()
        if self.quiet:
            self._lift_hooks()
        else:
            self._lifted.put_back()
            self._tend_hooks()

    def _lift_hooks(self) -> None:
        """Hooks off for as long as nothing is to be seen.

        Not where something was compiled: a module with other hooks than before would be compiled once more.
        """
        if not has_compiled():
            self._lifted.lift_modules(self._hook_ids)
            self._lifted.lift_parameters(self._parameter_hooks)

    def _tend_hooks(self) -> None:
        """Hooks as the model is now: what was unfrozen meanwhile gets them, and ours come after everybody else's."""
        if any(_can_be_hooked(watched.parameter) for watched in self._later):
            self._hook_parameters(self._later)
        self._wrapped_inputs = any(module._backward_hooks for module, _ in self._hook_ids)
        # In one of those anything may be done to gradients that have come before.
        self._may_wait = not self._wrapped_inputs and not global_hooks._global_backward_hooks
        for module, hook_id in self._hook_ids:
            # Another hook that came later may change the output: see what the next module is given.
            hooks: Any = module._forward_hooks
            if hook_id in hooks and next(reversed(hooks)) != hook_id:
                hooks.move_to_end(hook_id)

    def _count_weights(self) -> None:
        for watched in self._parameters:
            if watched.counted:
                self._count(TensorKey(watched.name, WEIGHT), watched.parameter, passed_through(watched.parameter.dtype))

    def _updated(self) -> bool:
        """Whether the weights changed, or their gradients went, since this was last asked. Does not wait for a GPU."""
        first = next((watched.parameter for watched in self._parameters if _can_be_hooked(watched.parameter)), None)
        if first is None:
            return True
        before, self._weight_state = self._weight_state, _state(first)
        return first.grad is None or self._weight_state != before


def _looks_at_waiting(capture: weakref.ref[Capture], waiting: list[Waiting], of: _OfBackward) -> None:
    alive = capture()
    if alive is not None:
        alive._look_at_waiting(waiting, of)


def _when_a_backward_ends(capture: weakref.ref[Capture], finish: Callable[[], None]) -> None:
    alive = capture()
    if alive is not None:
        alive.backward_ended(finish)


def _is_never_called(module: torch.nn.Module) -> bool:
    """Whether it has no forward: lists and dicts of modules or parameters."""
    return type(module).forward is torch.nn.Module.forward and "forward" not in vars(module)


def _can_be_hooked(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not is_lazy(parameter)


def _state(parameter: torch.Tensor) -> tuple[int, list[float] | None]:
    """What changes when a loop without an optimizer updates a parameter: its version and, on a CPU, its first values.

    ``parameter.data -= ...`` changes the values and not the version.
    """
    try:
        local = detached_values(local_part(parameter))
    except Exception:
        # A subclass of Tensor that has no values at hand.
        return parameter._version, None
    has_values = local.device.type == "cpu" and local.layout is torch.strided
    return parameter._version, local.reshape(-1)[:4].tolist() if has_values else None
