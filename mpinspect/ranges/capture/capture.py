"""The capture of one model: makes the observers, adds and removes the hooks, and records the captured data.

It stores rows of counts and reduced values, but no tensor of the model.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from mpinspect.counting import fastest
from mpinspect.ranges.capture import tensor_hooks
from mpinspect.ranges.capture.broken_off import broken_off, forget_caller, lost_losses, variables_of
from mpinspect.ranges.capture.budget import Budget, Limit
from mpinspect.ranges.capture.counting import Counting
from mpinspect.ranges.capture.dispatcher import Dispatcher
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import Layer, ModelParameters, WatchedParameter, any_in_16_bits, describe
from mpinspect.ranges.capture.listener import Listener
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import MOST_CLOSURES, Pace, Schedule, StepClock
from mpinspect.ranges.capture.tally import Tally
from mpinspect.ranges.capture.updates import Updates
from mpinspect.ranges.capture.watch import Watch
from mpinspect.ranges.capture.weights import BrokenWeights
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, UPDATE, WEIGHT_GRADIENT
from mpinspect.ranges.records import ForwardsLeft, NeverUpdated, StepsStopped
from mpinspect.ranges.session import CALLS_LEFT_OUT, CLOSURES_LEFT_OUT, UNEVEN_INPUTS, Event, Measurement
from mpinspect.reporting.words import some
from mpinspect.runtime.device import is_capturing
from mpinspect.runtime.device_stopwatch import EventStopwatch
from mpinspect.runtime.distributed import allows_uneven_inputs
from mpinspect.runtime.guard import guarded, unseen
from mpinspect.runtime.meter import Meter

#: Makes the observers that measure for diagnoses. They follow the watch, since some react to its events.
MakesObservers = Callable[
    [Sequence[Layer], Sequence[WatchedParameter], ModelOptimizers, StepClock, Recording], tuple[Observer, ...]
]


class Capture(Dispatcher):
    """Watches one model from ``attach`` to ``detach``.

    Args:
        layers, parameters: what to hook (mpinspect.ranges.capture.layers).
        kinds: kinds of tensor to count at sampled steps.
        schedule: which steps are sampled.
        watch: run the non-finite watch at every step.
        max_overhead: choose the sampled and watched steps such that the cost stays below this share of the bare steps' time; only
            ``every`` of ``schedule`` then applies, as the least interval. None: ``schedule`` decides.
        limit: the cost above which a budget replaces ``schedule``; None: never.
        loss_scale: the loss scale of training loops that scale by hand: a number, a callable that returns it, or None.
        optimizers, scalers: the ones known to belong to the model; others are found when they step or scale.
        recording: receives the captured data.
        eager_samples: run the model's compiled regions eagerly in the training forwards of sampled steps.
        diagnosing: makes the observers that measure for diagnoses, if any.
        before_forward: in an inference, where each forward is a step: called when one follows another. None in a training.
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
        limit: Limit | None = None,
        eager_samples: bool = False,
        diagnosing: MakesObservers | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        self._layers, self._parameters = list(layers), list(parameters)
        self._kinds = frozenset(kinds)
        self._scalers_given = bool(scalers)
        step_clock = StepClock(schedule)
        for optimizer in optimizers:
            step_clock.know(optimizer)
        budget: Budget | None = None
        if max_overhead is not None:
            budget = Budget(max_overhead, every=schedule.every, samples=bool(kinds), watches=watch)
        super().__init__(
            self._layers,
            self._parameters,
            step_clock,
            Pace(step_clock, budget, limit, bool(kinds), watch),
            ModelOptimizers(optimizers, self._parameters),
            loss_scale,
            scalers,
            recording,
            eager_samples=eager_samples and (watch or bool(self._kinds & {ACTIVATION, ACTIVATION_GRADIENT})),
            before_forward=before_forward,
        )
        is_metered = budget is not None or limit is not None
        if is_metered:
            # The limit is for tiny models, whose cost is the host's.
            self.meter = Meter(time.perf_counter, None if budget is None else EventStopwatch())
        self._model_parameters = ModelParameters(self._layers, self._parameters)
        #: Exists while attached.
        self.listener: Listener | None = None
        self._broken_weights = BrokenWeights(self._parameters)
        self._tally = Tally(recording.note, recording.scale)
        self._counting = Counting(
            self._kinds, self._parameters, self._tally, self._precision, is_inference=before_forward is not None
        )
        me = weakref.WeakMethod(self._wants_updates)
        self._updates = Updates(self._tally, self.optimizers, lambda: (wants := me()) is not None and wants())
        self._observers = (self._counting, self._updates)
        if watch:
            self._watch = self._made_watch(step_clock, recording, may_pause=is_metered)
            self._observers += (self._watch,)
        if diagnosing is not None:
            self._observers += diagnosing(self._layers, self._parameters, self.optimizers, step_clock, recording)

    def _wants_updates(self) -> bool:
        """Return whether updates are counted: if they were requested, and as soon as weights are stored in 16 bits."""
        is_training = self._before_forward is None
        if UPDATE not in self._kinds and is_training and any_in_16_bits(self._parameters):
            self._kinds |= {UPDATE}
            self._recording.watch(describe(self._layers, self._parameters, self._kinds))
        return UPDATE in self._kinds

    def _made_watch(self, clock: StepClock, recording: Recording, *, may_pause: bool) -> Watch:
        modules = {layer.path: layer.module for layer in self._layers}
        broken, choice = self._broken_weights, self._choice
        return Watch(modules, self.optimizers, broken, clock, recording, may_pause=may_pause, choice=choice)

    # -- attaching and detaching ----------------------------------------------------------------------------------

    @unseen
    def attach(self) -> None:
        """Add the hooks and begin the first step."""
        self.attached = True
        self._replace_parameters()
        self._warm_up()
        self.attempt("remember weights", self._weight_changes.remember)
        tensor_hooks.leave_hooks_out(self, (layer.module for layer in self._layers))
        owners = {watched.owner for watched in self._parameters if watched.counted}
        outputs = bool(self._kinds & {ACTIVATION, ACTIVATION_GRADIENT})
        watches = self._watch is not None
        self._hooks.hook_modules(
            [layer for layer in self._layers if watches or (layer.counted and outputs) or layer.path in owners]
        )
        if self._before_forward is not None:
            self._hooks.before_forward([layer for layer in self._layers if not layer.path], self.inference_begins)
        if watches or WEIGHT_GRADIENT in self._kinds:
            self._hooks.hook_parameters(self._parameters)
        self._compiled.attach()
        self._begin_step()
        self.listener = Listener(self, self._hooks.nodes_made, self._recording)
        self.listener.listen()

    def find_replaced_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch parameters that have replaced watched ones (``fully_shard`` replaces them); note the missed gradients."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        replaced = self._replace_parameters(held)
        self._hooks.begin_step(self.quiet)
        if replaced and self.clock.backwards:
            self._recording.note(
                f"{replaced} parameters were replaced after the inspector was attached, and this was noticed in step "
                f"{self.clock.step}: their earlier gradients were not seen. Attach the inspector after fully_shard, or make "
                "the optimizer after both"
            )

    @guarded
    def _replace_parameters(self, held: Collection[int] = ()) -> int:
        """Watch the model's current parameters; return how many are new. ``held``: ids of an optimizer's parameters."""
        replaced = self._model_parameters.replace(held)
        if replaced:
            self._hooks.rehook(replaced)
            self.optimizers.parameters_replaced()
            self.attempt("remember weights", self._weight_changes.remember)
            self._recording.watch(describe(self._layers, self._parameters, self._kinds))
        return len(replaced)

    @guarded
    def _warm_up(self) -> None:
        """Load the code that reads tensors, so that no training step waits for loading."""
        if self._kinds or self._watch is not None:
            for note in fastest.warm_up({watched.parameter.device for watched in self._parameters}):
                self._recording.note(note)

    @guarded
    def _find_wrappers(self) -> None:
        """Record how the ranks hold the parameters of a model that was wrapped after the inspector was attached."""
        if self._model_parameters.find_wrappers():
            self._recording.watch(describe(self._layers, self._parameters, self._kinds))

    def end_step(self, *, finished: bool = True) -> None:
        """End the step in all observers, and begin the next step."""
        if not self.clock.step:
            self._find_wrappers()
        super().end_step(finished=finished)

    @unseen
    def detach(self) -> None:
        """Remove every hook and record the data still being copied to the host; waits for the GPU."""
        self._stop()
        self._updates.forget()
        if self.clock.begun:
            # The step is unfinished if the run broke off before an optimizer stepped, or if another network's backward began it.
            self.end_step(finished=not self.clock.waits_for_optimizer)
        for observer in self._observers:
            self.attempt("run ends", observer.run_ends)
        self.collect(wait=True)
        self._note_what_was_missed()
        self._record_whether_updated()
        self._record_whether_uneven()
        self._record_what_was_left_out()
        self._hooks.forget()
        self.waiting.end()

    def abandon(self) -> None:
        """Deactivate the capture in a forked child process, without recording anything or using a GPU."""
        self._stop()
        self.quiet = True

    def _stop(self) -> None:
        self.attached = False
        forget_caller()
        if self.listener is not None:
            self.listener.unlisten()
            self.listener = None
        self._compiled.remove()
        self._hooks.remove()
        tensor_hooks.leave_hooks_in(self)

    @unseen
    def rest(self, resting: bool) -> None:
        """Pause (or resume) sampling and watching. Pausing drops the open step's samples; steps are still counted."""
        if resting and not self._pace.resting:
            self.attempt("finish waiting", self.waiting.finish)
            self._tally.drop_step()
            self._updates.forget()
        self._pace.resting = resting
        self._begin_step()

    def unhook(self, modules: Collection[int]) -> bool:
        """Remove the hooks of the modules with these ids, but not of their parameters; return whether there were any."""
        return self._hooks.unhook(modules)

    # -- reading --------------------------------------------------------------------------------------------------

    @guarded
    @unseen
    def collect(self, wait: bool) -> None:
        """Close the open window and record it. ``wait``: wait for the GPU, and record the watch's remaining findings too."""
        window = self._tally.close_window(wait=wait)
        if window is not None:
            self._recording.add_window(window)
        if wait:
            self._recording.need_no_gradient(self._counting.not_needed)
            if self._watch is not None:
                self.attempt("drain", self._watch.drain)
        self._name_unread()

    @guarded
    def step_ended(self) -> None:
        """Close the open window if it is due."""
        if self._recording.wants_window(self._tally.open_steps):
            self.collect(False)
        else:
            self._name_unread()

    def _name_unread(self) -> None:
        """Record the names of the tensors that could not be read since the last call."""
        self._recording.unread("counted", self._tally.unread.take_new())
        if self._watch is not None:
            self._recording.unread("watched", self._watch.unread.take_new())
        self._recording.unread("searched for infinities and NaNs", self._broken_weights.unread.take_new())

    @guarded
    @unseen
    def broken_weights(self) -> frozenset[str]:
        """Return the names of the weights that are not finite now. Waits for the GPU."""
        return self._broken_weights.names()

    @guarded
    @unseen
    def weights_left(self, before: Collection[str]) -> Event | None:
        """Return an event, not yet recorded, if trained weights are not finite and no recorded event explains it; else None.

        Call it after ``detach``. Waits for the GPU.

        Args:
            before: ``broken_weights`` when the run began.
        """
        is_explained = any(not event.skipped and not event.gradients_finite for event in self._recording.events)
        if is_explained or not self.clock.step:
            return None
        left = self._broken_weights.left_behind(self.clock.step - 1, before)
        self._name_unread()
        return left

    @guarded
    def broken_off(self, error: BaseException) -> None:
        """Record the exception that is about to end the run; call it before ``detach``."""
        self._recording.measured(broken_off(error, self._layers, self.clock))

    @guarded
    @unseen
    def search_variables(self, error: BaseException | None = None, waits: bool = True) -> bool:
        """Search the script's variables for losses that are not finite, if the last forward has had no backward.

        Returns whether there is one.

        Args:
            error: the exception that is about to end the run.
            waits: whether losses on a device are read as well.
        """
        if not self.clock.awaits_backward or is_capturing():
            return False
        losses = lost_losses(variables_of(error), waits)
        if losses and self.listener is not None:
            self.listener.backward_left_out(losses)
        return bool(losses)

    @guarded
    def between_forward_and_backward(self) -> int | None:
        """Return the current step if its forward has run with a finite last output and its backward has not run; else None."""
        watch = self._watch
        if watch is None or not watch.at_work or not self.clock.in_forward or watch.forward_broke() is not False:
            return None
        return self.clock.step

    @guarded
    def _note_what_was_missed(self) -> None:
        self._compiled.note_unseen()
        if (
            self._scalers_given
            and self.scale.any_scaled
            and self.clock.backwards
            and not self.optimizers.scaler_has_stepped
        ):
            self._recording.note(
                "the scaler scaled losses of this model and stepped no optimizer of it: its skipped steps were not seen. Call "
                "scaler.step(optimizer), or give the optimizer of your FP32 master weights as optimizers="
            )
        new = self._model_parameters.unwatched()
        if new:
            self._recording.note(
                f"{len(new)} parameters were added to the model after the inspector was made, and were not watched: "
                f"{some(new)}. Make it after whatever adds or replaces parameters"
            )

    @guarded
    def _record_whether_uneven(self) -> None:
        """Record that ranks may take fewer steps than others, since they train inside torch's ``Join``."""
        if any(map(allows_uneven_inputs, {id(each.parallel): each.parallel for each in self._parameters}.values())):
            self._recording.measured(Measurement(UNEVEN_INPUTS, "", self.clock.step))

    @guarded
    def _record_what_was_left_out(self) -> None:
        """Record whether modules or closures were called so often that not every call was observed."""
        self._choice.begin_forward()
        often = self._choice.often
        if often:
            path = max(often, key=lambda path: often[path])
            calls, observed = often[path]
            figures = {"calls": float(calls), "observed": float(observed), "modules": float(len(often))}
            self._recording.measured(Measurement(CALLS_LEFT_OUT, path, self.clock.step, figures))
        if self.clock.any_closure_left_out:
            figures = {"observed": float(MOST_CLOSURES)}
            self._recording.measured(Measurement(CLOSURES_LEFT_OUT, "", self.clock.step, figures))

    def _never_zeroed(self, backwards: int) -> list[torch.Tensor]:
        """Return the gradients to which each backward has added: one that zeroes them in between writes as often again."""
        return [each for each in self._added_up(backwards / 2) if each._version <= backwards + 1]

    def _added_up(self, least: float) -> list[torch.Tensor]:
        """Return the gradients that were written more often; backwards of ``torch.autograd.grad`` write none."""
        gradients = (each.parameter.grad for each in self._parameters)
        return [each for each in gradients if each is not None and is_plain(each) and each._version > least]

    @guarded
    def _record_whether_updated(self) -> None:
        """Record whether any update was applied, known from an observed optimizer's step or from changed weights."""
        moved = self.optimizers.any_stepped or self._weight_changes.moved()
        self._recording.weights_moved(moved)
        # Without an optimizer or a scaler the script may need only the gradients.
        is_training = self.optimizers.known or self.scale.any_scaled
        if moved is False and is_training:
            backwards, kept = self.clock.backwards, self._never_zeroed(self.clock.backwards)
            broken = sum(not bool(each.isfinite().all()) for each in kept)
            names = self.optimizers.known
            self._recording.record(NeverUpdated(backwards=backwards, kept_broken=broken, names=names))
        if moved and self.clock.has_stopped and self._recording.progress.steps:
            backwards, most = self.clock.backwards_of_step, self.clock.most_backwards
            step, cleared = self._recording.progress.steps, not self._added_up(backwards / 2)
            scale = self.scale.last.value
            found = StepsStopped(step=step, backwards=backwards, most=most, cleared=cleared, loss_scale=scale)
            self._recording.record(found)
        if moved and self.clock.left_out.is_stopped:
            step, left_out = self._recording.progress.steps, self.clock.left_out
            self._recording.record(ForwardsLeft(step=step, names=left_out.lines, forwards=left_out.number))
