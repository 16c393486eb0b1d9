"""The capture: turns what hooks see of a model's training into observations, and shows them to the observers of the step.

It knows hooks and steps. The observers (``counting``, ``watch``, ``optimizers.Updates``) know what to do with a tensor. Nothing
keeps a tensor of the model: what stays are rows of counts and reduced values.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from mpinspect.counting import fastest
from mpinspect.ranges.capture import optimizer_steps, pickling
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.ranges.capture.backward_scale import NO_BACKWARD, ScaleOfBackward
from mpinspect.ranges.capture.budget import Budget
from mpinspect.ranges.capture.counting import Counting, StepPrecision
from mpinspect.ranges.capture.largest import Found
from mpinspect.ranges.capture.layers import Layer, WatchedParameter, named_parameters
from mpinspect.ranges.capture.loss_scale import UNSCALED
from mpinspect.ranges.capture.model_hooks import ModelHooks
from mpinspect.ranges.capture.observations import (
    Backward,
    Call,
    LastValues,
    Observer,
    OutputGradient,
    ParameterGradient,
    is_many,
    out_of_reach,
    tracing,
    transforms,
)
from mpinspect.ranges.capture.optimizers import ModelOptimizers, Updates
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import Pace, Schedule, StepClock
from mpinspect.ranges.capture.tally import Tally
from mpinspect.ranges.capture.waiting import WaitingGradients
from mpinspect.ranges.capture.watch import Watch
from mpinspect.ranges.capture.weights import BrokenWeights, WeightChanges
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, UPDATE, WEIGHT_GRADIENT
from mpinspect.ranges.session import Event
from mpinspect.runtime.cuda_stopwatch import CudaStopwatch
from mpinspect.runtime.distributed import local_part
from mpinspect.runtime.guard import Guarded, entrance, guarded
from mpinspect.runtime.meter import Meter
from mpinspect.runtime.outputs import tensor_list, tensors_in

_NO_BACKWARD = Backward(NO_BACKWARD, UNSCALED, None, 0, (), True)


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
        self._layers, self._parameters = list(layers), list(parameters)
        self._kinds = frozenset(kinds)
        self._recording = recording
        self.clock = StepClock(schedule)
        for optimizer in optimizers:
            self.clock.know(optimizer)
        budget: Budget | None = None
        if max_overhead is not None:
            budget = Budget(max_overhead, every=schedule.every, samples=bool(kinds), watches=watch)
            on_cuda = any(watched.parameter.is_cuda for watched in self._parameters)
            self.meter = Meter(clock, CudaStopwatch() if on_cuda else None)
        self._pace = Pace(self.clock, budget, bool(kinds), watch)
        me = weakref.ref(self)
        self._hooks = ModelHooks(me)
        #: Weight gradients that wait for the end of their backward.
        self.waiting = WaitingGradients(
            functools.partial(_waited, me), recording.note, functools.partial(_when_a_backward_ends, me)
        )
        fp16_weights = any(watched.parameter.dtype == torch.float16 for watched in self._parameters)
        self._scale = ScaleOfBackward(loss_scale, scalers, fp16_weights, recording, self.waiting.stop)
        self._scalers_given = bool(scalers)
        self._precision = StepPrecision(self._scale)
        self._optimizers = ModelOptimizers(optimizers, {id(watched.parameter): watched for watched in self._parameters})
        self._weight_changes = WeightChanges(self._parameters)
        self._broken_weights = BrokenWeights(self._parameters)
        self._tally = Tally(recording.note, recording.scale)
        self._counting = Counting(self._kinds, self._parameters, self._tally, self._precision, recording)
        self._updates = Updates(self._tally, self._optimizers, UPDATE in self._kinds)
        self._watch: Watch | None = None
        if watch:
            modules = {layer.path: layer.module for layer in self._layers}
            may_pause = budget is not None
            self._watch = Watch(modules, self._optimizers, self._broken_weights, self.clock, recording, may_pause)
        #: Counting first: what it has counted the watch need not read.
        self._observers: tuple[Observer, ...] = (self._counting, self._updates, *([self._watch] if self._watch else []))
        #: Those at work in this step.
        self._at_work: tuple[Observer, ...] = ()
        self._resting = False
        self._any_call = False
        self._may_capture_graphs = False
        #: The context of the gradients that arrive.
        self._backward = _NO_BACKWARD
        #: The output's gradient before, with what was found in it.
        self._last_gradient: LastValues[Found] = LastValues()
        self.attached = False
        #: Whether nothing is to be seen in this step: what every hook asks first.
        self.quiet = False

    # -- attaching and detaching ----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on."""
        self.attached = True
        self._may_capture_graphs = torch.cuda.is_available()
        self._warm_up()
        self._weight_changes.updated()
        self._remember_weights()
        pickling.leave_hooks_out(self, (layer.module for layer in self._layers))
        owners = {watched.owner for watched in self._parameters if watched.counted}
        outputs = bool(self._kinds & {ACTIVATION, ACTIVATION_GRADIENT})
        watches = self._watch is not None
        self._hooks.hook_modules(
            layer for layer in self._layers if watches or (layer.counted and outputs) or layer.path in owners
        )
        if watches or WEIGHT_GRADIENT in self._kinds:
            self._hooks.hook_parameters(self._parameters)
        self._begin_step()
        optimizer_steps.listen(self)
        scaler_watch.listen(self)

    @guarded
    def _warm_up(self) -> None:
        """Load what reads tensors, so that no training step waits for it."""
        if self._kinds or self._watch is not None:
            for note in fastest.warm_up({watched.parameter.device for watched in self._parameters}):
                self._recording.note(note)

    @guarded
    def _remember_weights(self) -> None:
        self._weight_changes.remember()

    def detach(self) -> None:
        """Take every hook off and take in what is still on its way."""
        self._stop()
        self._updates.forget()
        if self.clock.begun:
            # Broken off before an optimizer stepped, or a backward of another network passed through: no step.
            self._end_step(finished=not self.clock.waits_for_optimizer)
        self.collect(wait=True)
        self._note_what_was_missed()
        self._record_whether_updated()
        self._hooks.forget()

    def abandon(self) -> None:
        """Be inert from now on: this is a forked child. Nothing is taken in, no GPU is touched."""
        self._stop()
        self.quiet = True

    def _stop(self) -> None:
        self.attached = False
        scaler_watch.unlisten(self)
        optimizer_steps.unlisten(self)
        self._hooks.remove()
        pickling.stop(self)

    def rest(self, resting: bool) -> None:
        """Count and watch nothing until told otherwise; what the open step had so far is dropped. Steps are still counted."""
        if resting and not self._resting:
            self._finish_waiting()
            self._tally.drop_step()
            self._updates.forget()
        self._resting = resting
        self._begin_step()

    def unhook(self, modules: Collection[int]) -> bool:
        """Take the hooks off these modules, by id; whether there were any. Their parameters stay hooked."""
        return self._hooks.unhook(modules)

    # -- reading --------------------------------------------------------------------------------------------------

    @guarded
    def collect(self, wait: bool) -> None:
        """Close the open window and record what the watch has found; ``wait`` for the GPU."""
        window = self._tally.close_window(wait=wait)
        if window is not None:
            self._recording.add_window(window)
        if wait:
            self._drain()
        self._name_unread()

    @guarded
    def _drain(self) -> None:
        if self._watch is not None:
            self._watch.drain()

    def _name_unread(self) -> None:
        """Have the record name the tensors that could not be read since the last call."""
        self._recording.unread("counted", self._tally.unread.take_new())
        if self._watch is not None:
            self._recording.unread("watched", self._watch.unread.take_new())
        self._recording.unread("searched for infinities and NaNs", self._broken_weights.unread.take_new())

    @guarded
    def broken_weights(self) -> frozenset[str]:
        """Return the names of the weights that are not finite now. Waits for a GPU."""
        return self._broken_weights.names()

    @guarded
    def weights_left(self, before: Collection[str]) -> Event | None:
        """After ``detach``: return an event, not yet recorded, where trained weights are not finite and no other event tells why.

        Waits for a GPU.

        Args:
            before: ``broken_weights`` when the run began.
        """
        told = any(not event.skipped and not event.gradients_finite for event in self._recording.events)
        left = self._broken_weights.left_behind(self.clock.step - 1, before) if self.clock.step and not told else None
        self._name_unread()
        return left

    @guarded
    def between_forward_and_backward(self) -> int | None:
        """Return the step whose forward has run, its last output finite, and whose backward has not; None if there is none."""
        watch = self._watch
        if watch is None or not watch.at_work or not self.clock.in_forward or watch.forward_broke() is not False:
            return None
        return self.clock.step

    @guarded
    def _note_what_was_missed(self) -> None:
        if self.clock.backwards and self._hooks.any_on_modules and not self._any_call:
            self._recording.note(
                "gradients arrived and no call of a module was seen: hooks do not run inside torch.compile, so only weight "
                "gradients were counted and watched. Inspect the model uncompiled to see its activations"
            )
        root = next((layer.module for layer in self._layers if not layer.path), None)
        known = {id(watched.parameter) for watched in self._parameters}
        new = [] if root is None else [name for name, each in named_parameters(root) if id(each) not in known]
        if new:
            self._recording.note(
                f"{len(new)} parameters came into the model after the inspector was made and were not watched: "
                f"{', '.join(new[:5])}{', ...' if new[5:] else ''}"
            )
        if (
            self._scalers_given
            and self._scale.any_scaled
            and self.clock.backwards
            and not self._optimizers.scaler_has_stepped
        ):
            self._recording.note(
                "the scaler scaled losses of this model and stepped no optimizer of it: its skipped steps were not seen. Call "
                "scaler.step(optimizer), or give the optimizer of your FP32 master weights as optimizers="
            )

    @guarded
    def _record_whether_updated(self) -> None:
        """Record whether any update was applied: by an optimizer that was seen, or told by the weights themselves."""
        moved = self._weight_changes.moved()
        self._recording.weights_moved(True if self._optimizers.any_stepped else moved)

    # -- the forward ----------------------------------------------------------------------------------------------

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
        in_training = recomputed or (self.clock.in_forward and torch.is_grad_enabled())
        if not in_training and not self._training_forward(layer):
            return
        if not self._at_work:
            return
        outputs = tensor_list(output)
        self._precision.outputs(outputs)
        call = Call(layer, args, kwargs, outputs, recomputed, self.clock.micro_batch)
        watch = self._watch
        if self._hooks.wrapped_inputs and watch is not None and watch.at_work:
            for number in self._hooks.numbers_inside_wrappers(layer, call.inputs(), watch.unseen_input):
                watch.wrapped_input(number, layer.path)
        for observer in self._at_work:
            observer.called(call)
        self._await_gradients(call)

    def _training_forward(self, layer: Layer) -> bool:
        """Tell the clock of a forward; whether it belongs to training."""
        if not torch.is_grad_enabled():
            # Validation, or the first forward of a reentrant checkpoint: no step begins, and only the latter matters.
            return layer.module.training
        if self.clock.after_backward:
            self.waiting.finish_left_behind()
        if self.clock.forward(self._weight_changes.updated):
            self._end_step()
            self.clock.forward(self._weight_changes.updated)
        return True

    def _await_gradients(self, call: Call) -> None:
        """Hook the tensors whose gradients are followed, and the outputs whose gradients are counted."""
        layer, counted, followed = call.layer, call.counts_gradients, set()
        for tensor, number, is_input in call.fresh:
            if tensor.requires_grad and not (is_input and tensor.is_leaf):
                self._hooks.await_gradient(layer, tensor, counted and not is_input, number, is_input)
                if not is_input:
                    followed.add(id(tensor))
        if counted:
            for tensor in call.outputs:
                if tensor.requires_grad and id(tensor) not in followed:
                    self._hooks.await_gradient(layer, tensor, True, -1, False)

    # -- the backward ---------------------------------------------------------------------------------------------

    @entrance
    def activation_gradient(
        self, layer: Layer, values: torch.Tensor, counted: bool, number: int, is_input: bool
    ) -> None:
        """The gradient at a tensor has arrived."""
        backward = self._context(values)
        if backward is None:
            return
        if type(values) is not torch.Tensor:
            values = local_part(values)
        last = self._last_gradient
        found = last.found_in(values) if last.remembers else None
        gradient = OutputGradient(layer, values, counted, number, is_input, found)
        for observer in backward.observers:
            observer.output_gradient(gradient, backward)
        if counted:
            last.forget()
        else:
            last.keep(values, gradient.found)

    @entrance
    def weight_gradient(self, watched: WatchedParameter, values: torch.Tensor) -> None:
        """The gradient of a parameter has arrived, and does not wait yet."""
        backward = self._context(values)
        if backward is None:
            return
        if self.waiting.task == backward.task:
            self.waiting.make_room(values)
            if self.waiting.hold(watched, values):
                return
        gradient = ParameterGradient(watched, local_part(values))
        for observer in backward.observers:
            observer.parameter_gradient(gradient, backward)

    @entrance
    def backward_ended(self, finish: Callable[[], None]) -> None:
        """A backward is over: observe what waited for that."""
        finish()

    def _context(self, gradient: torch.Tensor) -> Backward | None:
        """Return the context that a gradient shares with all others of its backward; None where it can't be observed."""
        backward, task = self._backward, torch._C._current_graph_task_id()
        if backward.task == task == self._scale.task and not is_many(gradient):
            return backward
        reason = out_of_reach(self._may_capture_graphs, gradient)
        if reason is not None:
            self._recording.note(reason)
            return None
        return self._backward_begins(gradient.dtype)

    def _backward_begins(self, dtype: torch.dtype) -> Backward:
        """Find out the context at the first gradient of a backward."""
        in_half = dtype is torch.float16 or self._precision.narrowest == "float16"
        scale, is_new = self._scale.now(in_half)
        # Parameters of no module have no forward to be seen: without an optimizer the backwards tell where a step begins.
        told_by_backwards = is_new and not self._any_call and not self.clock.has_optimizers
        if told_by_backwards and self.clock.backward_again(self._weight_changes.updated):
            self._end_step()
            # Which forgets the backward, for the sake of those that go on over a step's end.
            self._scale.now(in_half)
        self.clock.backward()
        self._last_gradient.forget()
        by_scaler = self._scale.by_scaler and not self._optimizers.any_fused
        task, micro_batch = torch._C._current_graph_task_id(), self.clock.micro_batch
        backward = self._backward = Backward(task, scale, scale.divisor, micro_batch, self._at_work, by_scaler)
        if is_new:
            for observer in backward.observers:
                observer.backward_begins(backward)
        counts = self._counting.at_work and self._counting.counts_weight_gradients
        if counts and backward.divisor is None and not self._hooks.others_change_gradients:
            watch = self._watch
            self.waiting.begin(backward, watch.looks if watch is not None and watch.at_work else ())
        else:
            self.waiting.stop()
        return backward

    @entrance
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """A GradScaler scaled a loss: its backward, should it reach this model, runs under that scale."""
        products = self._scale.loss_scaled(scaler, scaled)
        if self._at_work and self.clock.begun:
            for observer in self._at_work:
                observer.loss_scaled(list(tensors_in(given)), products, self.clock.micro_batch)

    # -- the optimizers -------------------------------------------------------------------------------------------

    @entrance
    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` begins."""
        self.waiting.finish_left_behind()
        if self._optimizers.owns(optimizer):
            self._optimizers.scaler_steps(optimizer)

    @entrance
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is over: if the optimizer did not step meanwhile, the scaler skipped it."""
        if not self._optimizers.was_skipped(optimizer):
            return
        if self.clock.optimizer_again(optimizer):
            self._end_step()
        for observer in self._observing:
            observer.step_skipped(optimizer)
        if self.clock.optimizer_done(optimizer, skipped=True):
            self._end_step()

    @entrance
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self.waiting.finish_left_behind()
        if not self._optimizers.steps(optimizer):
            return
        self.clock.know(optimizer)
        if self.clock.optimizer_again(optimizer):
            self._end_step()
        self._optimizers.step_begins(optimizer)
        for observer in self._observing:
            observer.optimizer_steps(optimizer)

    @entrance
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        if not self._optimizers.stepped(optimizer):
            return
        for observer in self._observing:
            observer.optimizer_stepped(optimizer)
        if self.clock.optimizer_done(optimizer, skipped=False):
            self._end_step()

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def _observing(self) -> tuple[Observer, ...]:
        return () if self._resting else self._observers

    @guarded
    def _end_step(self, *, finished: bool = True) -> None:
        """Have the observers finish the step, and begin the next."""
        self._finish_waiting()
        step = self.clock.step
        watched = self._watch is not None and self._watch.at_work
        for observer in self._observing:
            self._finish(observer, step, finished)
        sampled = self._counting.at_work
        if finished and self.meter is not None:
            self._settle(self.meter, watched)
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
    def _finish(self, observer: Observer, step: int, finished: bool) -> None:
        observer.end_step(step, finished)

    @guarded
    def _settle(self, meter: Meter, watched: bool) -> None:
        self._pace.settle(meter, self._recording, watched)

    def _begin_step(self) -> None:
        sampled, watched = (False, False) if self._resting else self._pace.next_step()
        for observer in self._observers:
            observer.begin_step(sampled, watched)
        self._at_work = tuple(observer for observer in self._observers if observer.at_work)
        # Without an optimizer it is the forwards that tell where a step begins.
        self.quiet = not self._at_work and self.clock.has_optimizers
        self._optimizers.begin_step()
        self._precision.begin_step()
        self._scale.forget()
        if self.quiet:
            self._hooks.lift()
        else:
            self._hooks.put_back()
            self._hooks.tend()


def _waited(capture: weakref.ref[Capture], gradients: list[ParameterGradient], backward: Backward) -> None:
    alive = capture()
    if alive is not None:
        for observer in backward.observers:
            observer.waited(gradients, backward)


def _when_a_backward_ends(capture: weakref.ref[Capture], finish: Callable[[], None]) -> None:
    alive = capture()
    if alive is not None:
        alive.backward_ended(finish)
