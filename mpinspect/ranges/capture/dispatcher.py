"""The dispatcher: turns the calls of hooks during training into observations, and passes them to the observers of the step.

The dispatcher handles the model's hooks and the steps, the ``listener`` the calls of optimizers and scalers; the observers
(``counting``, ``watch``, ``updates``) process the tensors. Every method that the training calls is guarded: no error
of the inspector reaches the training.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from mpinspect.ranges.capture.broken_off import forget_caller, keep_caller
from mpinspect.ranges.capture.compiled_code import CompiledCode
from mpinspect.ranges.capture.compiled_regions import formats_in_graph, may_run_eagerly
from mpinspect.ranges.capture.counting import StepPrecision
from mpinspect.ranges.capture.largest import Found
from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.ranges.capture.loss_scale import NO_BACKWARD, ScaleOfBackward
from mpinspect.ranges.capture.model_hooks import ModelHooks
from mpinspect.ranges.capture.observations import (
    NO_CONTEXT,
    Backward,
    Call,
    LastValues,
    Observer,
    OutputGradient,
    ParameterGradient,
    is_many,
    out_of_reach,
    overrides,
    tracing,
    transforms,
)
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import CallChoice, Pace, StepClock
from mpinspect.ranges.capture.tensor_hooks import backward_ended
from mpinspect.ranges.capture.waiting import WaitingGradients
from mpinspect.ranges.capture.watch import Watch
from mpinspect.ranges.capture.weights import WeightChanges
from mpinspect.runtime.compiled_graphs import compiled_graphs
from mpinspect.runtime.distributed import is_pipeline_trial, local_part
from mpinspect.runtime.guard import Guarded, entrance, guarded, overrides_functions
from mpinspect.runtime.outputs import tensor_list

#: The note of a run on the meta device.
ON_META = (
    "the model is on the meta device, which holds shapes and no values, so nothing was counted: move it before training, "
    "for example by model.to_empty(device=...) and an initialisation"
)


#: How often the script's variables are searched between two forwards without a backward: some loops always have two.
_MOST_SEARCHES = 4


class Dispatcher(Guarded):
    """Passes the events of one model's training to the observers, which ``Capture`` makes."""

    def __init__(
        self,
        layers: Iterable[Layer],
        parameters: Sequence[WatchedParameter],
        clock: StepClock,
        pace: Pace,
        optimizers: ModelOptimizers,
        loss_scale: float | Callable[[], Any] | None,
        scalers: Collection[Any],
        recording: Recording,
        eager_samples: bool,
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(recording.note)
        #: In an inference, where each forward is a step: called when one follows another. None in a training.
        self._before_forward = before_forward
        self.clock, self._pace, self.optimizers, self._recording = clock, pace, optimizers, recording
        me = weakref.ref(self)
        self._hooks = ModelHooks(me)
        ask = self.runs_eagerly if eager_samples else None
        self._compiled = CompiledCode(layers, ask, clock, self._hooks, recording)
        #: Paths of the modules whose calls were seen.
        self._called = self._compiled.called
        #: Gradients held until the end of their backward.
        self.waiting = WaitingGradients(Backward.held_gradients, recording.note, functools.partial(backward_ended, me))
        trained = (watched.parameter for watched in parameters if watched.parameter.requires_grad)
        fp16_weights = any(parameter.dtype == torch.float16 for parameter in trained)
        self.scale = ScaleOfBackward(loss_scale, scalers, fp16_weights, recording, self.waiting.stop)
        self._precision = StepPrecision(self.scale)
        self._parameters = parameters
        self._weight_changes = WeightChanges(parameters)
        self._choice = CallChoice()
        #: A counting observer precedes an observer that can use its counts instead of reading the tensor.
        self._observers: tuple[Observer, ...] = ()
        #: All observers (empty while the capture is paused), and the observers that are active in this step.
        self.observing: tuple[Observer, ...] = ()
        self.at_work: tuple[Observer, ...] = ()
        #: The active observers of calls.
        self._takers: list[Observer] = []
        self._watch: Watch | None = None
        #: Whether a pipeline is trying out the model, before the step begins.
        self._on_trial = False
        #: The context of the current backward.
        self._backward = NO_CONTEXT
        #: The previous output gradient, with its row of counts or largest magnitude.
        self._last_gradient: LastValues[Found] = LastValues()
        self.attached = False
        #: Autograd's task of a backward whose parameter gradients no observer takes.
        self.untaken = NO_BACKWARD
        #: Whether the model has run, and none of its modules since.
        self._has_run = False
        #: How often the script's variables were searched between two forwards.
        self._searches = 0
        #: Whether this step is not observed at all; every hook checks this first.
        self.quiet = False

    @property
    def any_called(self) -> bool:
        """Whether a call of a module has been seen."""
        return bool(self._called)

    def step_ended(self) -> None:
        """Record the captured data, if that is due."""

    def find_replaced_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the parameters that have replaced watched ones; the optimizer holds parameters that are not known yet."""

    # -- the forward ----------------------------------------------------------------------------------------------

    @entrance
    def forward_ran(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """Observe a module whose forward has run, and request the gradients of its outputs."""
        if (transforms() is not None or tracing() is not None) and self._is_out_of_reach():
            return
        outputs = tensor_list(output)
        for each in outputs:
            if type(each) is not torch.Tensor and not self.met_overrides and overrides_functions(type(each)):
                self.met_overrides = True
                self.forward_ran(layer, args, kwargs, output)
                return
        self._called.add(layer.path)
        # A forward during a backward is recomputed by activation checkpointing. Its outputs are not counted again, but in
        # reentrant checkpointing the gradients arrive at these recomputed tensors.
        recomputed = torch._C._current_graph_task_id() != -1
        in_training = (recomputed and not self._on_trial) or (self.clock.in_forward and self._is_of_step)
        if not in_training:
            if not self._training_forward(layer):
                return
            self.clock.forward_kind = layer.path, tuple(map(_kind, outputs))
        if not self.at_work:
            return
        if not recomputed and self._before_forward is None:
            if self._has_run:
                self._runs_again()
            if not layer.path:
                self._has_run = self.clock.model_ran = True
                caller = keep_caller()
                if torch.is_grad_enabled():
                    self.clock.left_out.forward_ran(caller)
        if not recomputed and not self._choice.takes(layer.path):
            return
        call = Call(layer, args, kwargs, outputs, recomputed, self.clock.micro_batch)
        self._precision.called(call)
        if self._hooks.wrapped_inputs and self._watch in self.at_work:
            self._hooks.see_through_wrappers(call, self._watch)
        for observer in self._takers:
            observer.called(call)
        self._hooks.await_gradients(call)

    def inference_begins(self) -> None:
        """End the step of the last forward, if there was one: the whole model is about to run."""
        # Not within an entrance, which hides the dispatch modes that this may leave and enter.
        if self._before_forward is not None and self._end_forward():
            self._before_forward()

    @entrance
    def _end_forward(self) -> bool:
        """Return whether the next step may begin."""
        if self._is_out_of_reach():
            return False
        if self.clock.begun:
            self.end_step()
        return True

    @property
    def _is_of_step(self) -> bool:
        """Whether a forward belongs to a step: in a training only one with gradients does."""
        return torch.is_grad_enabled() or self._before_forward is not None

    def _runs_again(self) -> None:
        """Search for a loss that is not finite if the model has had no backward since: the loop may have left it out."""
        self._has_run = False
        if self.clock.model_ran and self._searches < _MOST_SEARCHES:
            self._searches += 1
            self.search_variables(waits=False)
        forget_caller()

    def search_variables(self, error: BaseException | None = None, waits: bool = True) -> object:
        """Search the script's variables for losses that are not finite."""

    def _training_forward(self, layer: Layer) -> bool:
        """Report a forward to the step clock; return whether the forward belongs to training."""
        if not self.clock.begun:
            is_recomputed = torch._C._current_graph_task_id() != -1
            self._on_trial = (is_recomputed and self._on_trial) or is_pipeline_trial()
            if self._on_trial:
                return False
        if not self._is_of_step:
            # This is validation, or the first forward of a reentrant checkpoint, which belongs to training. No step begins.
            self.clock.calls_without_gradient += 1
            return layer.module.training
        self._forward_begins()
        return True

    def _forward_begins(self) -> None:
        """Report a training forward to the step clock, and end the previous step if it is complete."""
        if self.clock.after_backward:
            # These gradients are left over, or held for a backward in another thread. The next backward may change them.
            self.waiting.finish()
        if self.clock.forward(self._weight_changes.updated):
            if self._weight_changes.only_cleared:
                for observer in self.observing:
                    observer.gradients_dropped()
            self.end_step()
            self.clock.forward(self._weight_changes.updated)
        self._choice.begin_forward()
        if self.clock.enough_closures:
            # The rest of this optimizer's step is as cheap as an unobserved step.
            self.at_work, self.quiet = (), True
        if self._parameters and self._parameters[0].parameter.is_meta:
            self.observing, self.at_work, self.quiet = (), (), True
            self._recording.note(ON_META)

    @entrance
    def runs_eagerly(self) -> bool:
        """Return whether a compiled region that is about to be called runs eagerly: in training forwards of sampled steps."""
        if not may_run_eagerly() or self._is_out_of_reach():
            return False
        # Also in steps that run compiled, since no hook inside the region reports to the clock.
        self._forward_begins()
        self._compiled.ran_eagerly |= self._pace.sampled
        return self._pace.sampled

    # -- the backward ---------------------------------------------------------------------------------------------

    def read_graph(self, losses: list[torch.Tensor]) -> None:
        """Read the formats in the losses' graph, once per measured step, if some modules' calls may be unseen."""
        if not self.clock.measured or self._precision.has_read_graph or (self._called and not compiled_graphs()):
            return
        formats = formats_in_graph(losses, (watched.parameter for watched in self._parameters))
        if formats is not None:
            self._precision.graph_read(formats)
            for observer in self.at_work:
                observer.graph_read(formats)

    @entrance
    def activation_gradient(
        self, layer: Layer, values: torch.Tensor, counted: bool, number: int, is_input: bool
    ) -> None:
        """Observe the gradient of a module's output, or of an input that no module made."""
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
        """Observe a parameter's gradient that has just arrived, or hold it until the end of its backward."""
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
        """Call ``finish`` at the end of a backward. It observes the held gradients, or notifies the observers."""
        finish()

    def _context(self, gradient: torch.Tensor) -> Backward | None:
        """Return the context that all gradients of a backward share; None if the gradient can't be observed."""
        backward, task = self._backward, torch._C._current_graph_task_id()
        if backward.task == task == self.scale.task and not is_many(gradient):
            return backward
        if self._on_trial or self._is_out_of_reach(gradient):
            return None
        return self._backward_begins(gradient.dtype)

    def _is_out_of_reach(self, gradient: torch.Tensor | None = None) -> bool:
        """Return whether observing is impossible at the moment, and note the reason."""
        reason = out_of_reach(gradient)
        if reason is not None:
            self._recording.note(reason)
        return reason is not None

    def _backward_begins(self, dtype: torch.dtype) -> Backward:
        """Return the context of a backward, worked out at its first gradient."""
        in_half = dtype is torch.float16 or self._precision.narrowest == "float16"
        scale, is_new = self.scale.now(in_half)
        # Parameters outside modules have no observable forward: without an optimizer, the backwards show where a step begins.
        told_by_backwards = is_new and not self._called and not self.clock.has_optimizers
        if told_by_backwards and self.clock.backward_again(self._weight_changes.updated):
            self.end_step()
            # Ending the step discards the backward's scale, because a backward may continue past a step's end; look it up again.
            self.scale.now(in_half)
        is_inner = torch.is_grad_enabled()
        self.clock.backward(is_inner=is_inner)
        if not is_inner:
            forget_caller()
        self._last_gradient.forget()
        by_scaler = self.scale.by_scaler and not self.optimizers.any_fused
        task, micro_batch = torch._C._current_graph_task_id(), self.clock.micro_batch
        backward = self._backward = Backward(task, scale, scale.divisor, micro_batch, self.at_work, by_scaler)
        if is_new:
            scaler = self.scale.scaler
            for observer in backward.observers:
                if scaler is not None:
                    observer.scaler_used(scaler)
                observer.backward_begins(backward)
        if task == -1:
            # A pipeline makes FSDP2 reduce the gradients after its last backward.
            self.waiting.stop()
            return backward
        at_end = [observer.backward_ends for observer in backward.observers if observer.wants_backward_end]
        if not self.clock.has_optimizers:
            at_end.append(self._weight_changes.backward_ended)
        if at_end:
            tell = functools.partial(backward_ended, weakref.ref(self), functools.partial(_call_each, at_end))
            torch.autograd.Variable._execution_engine.queue_callback(tell)
        taken = any(observer.takes_parameter_gradients(by_scaler) for observer in backward.observers)
        self.untaken = NO_BACKWARD if taken else task
        may_wait = taken and any(observer.lets_gradients_wait for observer in backward.observers)
        if may_wait and backward.divisor is None and not self._hooks.others_change_gradients:
            readings = () if self._watch is None or not self._watch.at_work else self._watch.readings
            self.waiting.begin(backward, readings, any(observer.lets_outputs_wait for observer in backward.observers))
        else:
            self.waiting.stop()
        return backward

    # -- the step -------------------------------------------------------------------------------------------------

    @guarded
    def end_step(self, *, finished: bool = True) -> None:
        """End the step in all observers, and begin the next step."""
        self.attempt("finish waiting", self.waiting.finish)
        step = self.clock.step
        self.scale.step_ends()
        # A broken-off step is an incomplete sample: it is used only if the run has no other sample.
        sampled = self._pace.sampled and (finished or not self._recording.progress.sampled_steps)
        for observer in self.observing:
            self.attempt("finish", observer.end_step, step, sampled)
        if finished and self.meter is not None:
            self.attempt("settle", self._pace.settle, self.meter, self._recording)
        self.clock.advance(finished)
        self._compiled.step_ended(sampled)
        self.step_ended()
        self._recording.step_done(step + finished, self.clock.skipped_steps, self.clock.backwards, sampled)
        if self.attached:
            self._begin_step()

    def _begin_step(self) -> None:
        self._pace.begin_step()
        self._compiled.begin_step(self._pace.sampled)
        for observer in self._observers:
            observer.begin_step(self._pace.sampled, self._pace.watched)
        self.observing = () if self._pace.resting else self._observers
        self.at_work = tuple(observer for observer in self._observers if observer.at_work)
        # Without an optimizer, only the forwards show where a step begins, so the hooks must stay active.
        self.quiet = not self.at_work and self.clock.has_optimizers
        self.optimizers.begin_step()
        self._choice.any_left_out = False
        self._precision.begin_step()
        self.scale.forget()
        # The step may have ended within a backward, whose other gradients the new step's observers may take.
        self.untaken = NO_BACKWARD
        self._takers = [observer for observer in self.at_work if overrides(observer, "called")]
        outlined = all(observer.outline_suffices for observer in self._takers)
        # The watch then reads the weight gradients when the optimizers step.
        at_optimizers = outlined and self.optimizers.few_hold_all()
        lifted = self._hooks.begin_step(self.quiet, outlined, at_optimizers)
        if self._watch is not None:
            self._watch.outlined(lifted, at_optimizers)


def _kind(output: torch.Tensor) -> tuple[object, torch.dtype]:
    """Return the shape and the dtype of an output; a nested tensor has no shape."""
    return None if output.is_nested else output.shape, output.dtype


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
