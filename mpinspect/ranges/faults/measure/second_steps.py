"""Computes chosen steps of a training twice, and follows the loss scale's power through them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from mpinspect.ranges.capture import optimizer_steps, scalers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import EARLY_FORWARDS, LATER_STEPS, StepChoice, StepClock
from mpinspect.ranges.capture.weights import RarerWork
from mpinspect.ranges.faults.measure.implicit import ImplicitConversions
from mpinspect.ranges.faults.measure.in_fp64 import InFP64
from mpinspect.ranges.faults.measure.operands import OperatorCall
from mpinspect.ranges.faults.measure.optimizer_arithmetic import WholeStep
from mpinspect.ranges.faults.measure.powers import PowersOfScale
from mpinspect.ranges.faults.measure.recomputation import Recomputation
from mpinspect.ranges.faults.measure.rounded_numbers import StoredNumbers
from mpinspect.ranges.faults.measure.stuck_numbers import StuckNumbers
from mpinspect.ranges.records import Record
from mpinspect.runtime.compiled_graphs import KEEPING, CallsGraphs, is_any_compiled
from mpinspect.runtime.device import is_capturing
from mpinspect.runtime.dispatch import OwnMode, doubt, obstacle
from mpinspect.runtime.guard import Guarded, guarded, hides_modes
from mpinspect.runtime.hooks import HandleList
from mpinspect.runtime.torch_calls import INFERENCE_MODE
from mpinspect.runtime.wrappers import named_plainly, plain_names

#: The first step that an inspector has computed twice: before it, optimizers have no state.
_EARLY_STEP = 1


class RunningModules:
    """Follows the calls of a model's modules.

    Args:
        is_inference: whether a forward without gradients is no evaluation beside a training.
    """

    def __init__(self, is_inference: bool = False) -> None:
        self._paths, self._is_inference = [""], is_inference
        #: The number of paths with that of the module that began an evaluation; 0 while none is running.
        self._evaluates_from = 0
        self.in_optimizer = False
        self.model_returned: Callable[[Any], None] | None = None
        self._handles = HandleList()

    def path(self) -> str:
        """Return the dotted path of the innermost module that is running; "" outside of all."""
        return self._paths[-1]

    @property
    def any_running(self) -> bool:
        """Whether a module is running."""
        return len(self._paths) > 1

    @property
    def evaluates(self) -> bool:
        """Whether the model runs for evaluation: in eval mode without gradients."""
        return self._evaluates_from > 0 and not self._is_inference

    def follow(self, model: torch.nn.Module) -> None:
        """Add the hooks."""
        plain, compiled = plain_names(model), KEEPING.inside(model.modules())
        for path, module in model.named_modules():
            if id(module) not in compiled:
                leave = self._leave if path else self._leave_model
                self._handles.add_around(module, partial(self._enter, plain[path], module), leave)

    def unfollow(self) -> None:
        """Remove the hooks."""
        self._handles.remove_all()
        self.in_optimizer = False

    def _enter(self, path: str, module: torch.nn.Module, args: Any) -> None:
        self._paths.append(path)
        if not self._evaluates_from and not module.training and not torch.is_grad_enabled():
            self._evaluates_from = len(self._paths)

    def _leave(self, args: Any, output: Any = None) -> None:
        if self._evaluates_from == len(self._paths):
            self._evaluates_from = 0
        if self.any_running:
            # The call in which the hooks were added had no entry.
            self._paths.pop()

    def _leave_model(self, args: Any, output: Any = None) -> None:
        self._leave(args, output)
        if self.model_returned is not None:
            self.model_returned(output)


class Running(Protocol):
    """Knows the modules that are running, and whether an optimizer is stepping (``in_optimizer``).

    ``model_returned`` is called with each output of the whole model, if it is set.
    """

    in_optimizer: bool
    model_returned: Callable[[Any], None] | None

    def path(self) -> str:
        """Return the dotted path of the innermost module that is running; "" outside of all."""

    @property
    def any_running(self) -> bool:
        """Whether a module is running."""

    @property
    def evaluates(self) -> bool:
        """Whether the model runs for evaluation: in eval mode without gradients."""


class Follower(Protocol):
    """Follows all operators of a step, and makes records of them. Waits for the device."""

    def ran(self, call: OperatorCall) -> None:
        """Follow one operator."""

    def records(self) -> Sequence[Record]:
        """Return the records, once the step has ended."""


class Twice(OwnMode):  # type: ignore[no-untyped-call]
    """Runs every operator unchanged, then has it computed again and its loss scale followed.

    Args:
        computations: compute the operators of forwards and backwards, and their ``of_optimizer`` those of an optimizer.
        running: knows the running modules.
        followers: see all operators, the optimizer's too.
        failed: called with an exception of one of them, which then sees no more; None lets it pass.
    """

    #: The chosen branch of `torch.cond` and the like runs unchanged.
    supports_higher_order_operators = True

    def __init__(
        self,
        computations: Sequence[Recomputation],
        running: Running,
        followers: Sequence[Follower] = (),
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._computations, self._followers = list(computations), list(followers)
        self._running, self._failed = running, failed
        self._process = os.getpid()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled."""
        return True

    @property
    def calls_graphs(self) -> CallsGraphs | None:
        """Calls compiled graphs; None for running them as they are."""
        return next((each.calls_graphs for each in self._computations if isinstance(each, WholeStep)), None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A forked child, such as a worker that loads data, has the mode on its stack as well.
        if getattr(func, "_schema", None) is None or os.getpid() != self._process:
            return func(*args, **kwargs)
        if is_capturing():
            # A second run would become a part of the script's graph.
            self._followers = []
            for each in self._computations:
                each.cut_short("once a CUDA graph was captured")
            return func(*args, **kwargs)
        # The preparations' mode, if it is below, is to see the script's operators alone.
        is_above_own = torch._C._len_torch_dispatch_stack() and isinstance(_get_current_dispatch_mode(), OwnMode)
        alone = _disable_current_modes if is_above_own else nullcontext
        with alone():
            pending = [(each, self._attempt(each, each.before, func, args, kwargs)) for each in self._computing()]
        result = func(*args, **kwargs)
        with alone():
            for each, prepared in pending:
                if prepared:
                    self._attempt(each, each.after, prepared, result, sys._getframe(1))
            if self._followers:
                call = OperatorCall(func, args, kwargs, result, sys._getframe(1), self._running.in_optimizer)
                for follower in tuple(self._followers):
                    self._attempt(follower, follower.ran, call)
        return result

    def stop(self) -> None:
        """Pass everything on from now on."""
        self._computations, self._followers = [], []
        # A cycle of references would keep the model alive.
        self._running.model_returned = None

    def leave(self) -> bool:
        """Stop, and exit the mode. Return False where that isn't possible now."""
        self.stop()
        return super().leave()

    def _computing(self) -> Sequence[Recomputation]:
        """Return what computes the operator that runs again; nothing for a part of a validation."""
        if torch._C._current_autograd_node() is not None:
            return self._computations
        # A closure, as Lightning's, enables gradients again for the loop's own code.
        if self._running.in_optimizer and not self._running.any_running and not torch.is_grad_enabled():
            return [each.of_optimizer for each in self._computations if each.of_optimizer is not None]
        return () if self._running.evaluates else self._computations

    def _attempt(self, whose: Recomputation | Follower, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function; if it fails, end the work of the one to whom it belongs."""
        try:
            return function(*args)
        except Exception as error:
            if self._failed is None:
                raise
            self._computations = [
                each for each in self._computations if whose not in (each, each.of_optimizer, each.judged)
            ]
            self._followers = [each for each in self._followers if each is not whose]
            self._failed(error)
            return None


class StepTwice(Twice):  # type: ignore[no-untyped-call]
    """Computes a running step twice, optimizers included, and follows the powers of its loss scale.

    Args:
        running, failed: as of ``Twice``.
        parameters, buffers, by_hand: as of ``SecondComputation``.
        is_compiled: whether the step has compiled code, through which no power is followed.
        in_fp64: the seconds for computing FP32 operators of uncompiled code in FP64 as well.
        is_inference: whether the step is a forward without a backward, whose outputs are judged.
    """

    def __init__(
        self,
        running: Running,
        failed: Callable[[Exception], None],
        parameters: list[tuple[str, torch.nn.Parameter]],
        buffers: list[tuple[str, torch.Tensor]],
        is_compiled: bool,
        by_hand: bool = False,
        in_fp64: float = 0.0,
        is_inference: bool = False,
    ) -> None:
        self._powers = PowersOfScale(running.path, parameters)
        self._step = WholeStep(running.path, parameters, buffers, by_hand, is_inference)
        followers: list[Follower] = [each(running.path) for each in (StuckNumbers, ImplicitConversions, StoredNumbers)]
        if not is_compiled:
            followers.append(self._powers)
        computations: list[Recomputation] = [self._step]
        self._in_fp64: InFP64 | None = None
        if in_fp64 and not is_compiled:
            self._in_fp64 = InFP64(running.path, parameters, self._step, in_fp64)
            computations.append(self._in_fp64)
        super().__init__(computations, running, followers, failed)
        running.model_returned = self._returned if is_inference else None
        self._thread = threading.get_ident()

    def _returned(self, output: Any) -> None:
        for each in self._computations:
            self._attempt(each, each.returned, output)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the operators that follow on this thread as the optimizer's."""
        if threading.get_ident() == self._thread:
            self._running.in_optimizer = True
            for each in self._computations:
                each.optimizer_steps(optimizer)

    def optimizer_stepped(self) -> None:
        """Take the operators that follow on this thread as the training's."""
        if threading.get_ident() == self._thread:
            self._running.in_optimizer = False
            for each in self._computations:
                each.of_optimizer = None

    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Follow the loss scale from here."""
        if self._powers in self._followers and threading.get_ident() == self._thread:
            self._powers.scaled(scaler, given, scaled)

    def end(self) -> tuple[list[Record], list[str]]:
        """Stop; return the records, and sentences on the operators that were left out. Waits for the device."""
        # A later computation reads the twins of an earlier one, which ends with its records.
        ended: list[Recomputation | Follower] = [*reversed(self._computations), *self._followers]
        left_out = list(filter(None, (each.left_out() for each in self._computations)))
        self.stop()
        return [record for each in ended for record in self._attempt(each, each.records) or ()], left_out

    @property
    def seconds_in_fp64(self) -> float:
        """How long the step has been computed in FP64, the run's own operators included."""
        return 0.0 if self._in_fp64 is None else self._in_fp64.seconds


class SecondSteps(Guarded):
    """Computes chosen steps of an inspected training twice. Listens to optimizers and scalers after the model's capture.

    Args:
        model: the inspected model.
        steps: numbers of the chosen steps, from 0; None for an early one and LATER_STEPS.
        clock: the capture's step clock.
        recording: receives the records, and has the events.
        is_inference: whether each forward is a step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        steps: Iterable[int] | None,
        clock: StepClock,
        recording: Recording,
        is_inference: bool = False,
    ) -> None:
        super().__init__(recording.note)
        self._model, self._clock, self._recording, self._is_inference = model, clock, recording, is_inference
        early = range(EARLY_FORWARDS) if is_inference else (_EARLY_STEP,)
        self._choice = StepChoice((*early, *LATER_STEPS)) if steps is None else StepChoice(steps, by_work=False)
        self._rarer_work = RarerWork(clock, model)
        self._thread = threading.get_ident()
        self._step = -1
        self._running = RunningModules(is_inference)
        #: The step that is computed twice, or one whose mode is below a mode that the script has entered since.
        self._twice: StepTwice | None = None

    @guarded
    def attach(self) -> None:
        """Begin to listen; to be called on the thread that trains."""
        self._thread = threading.get_ident()
        KEEPING.begin(self)
        optimizer_steps.listen(self)
        scalers.listen(self)
        if self._is_inference:
            INFERENCE_MODE.listen(self.inference_mode_changes)
        else:
            self.step_may_have_ended()

    @guarded
    def detach(self) -> None:
        """Stop listening, and leave a step that has not ended uncounted."""
        optimizer_steps.unlisten(self)
        scalers.unlisten(self)
        INFERENCE_MODE.unlisten(self.inference_mode_changes)
        KEEPING.end(self)
        self._running.unfollow()
        if self._twice is not None:
            self._twice.leave()

    @guarded
    def inference_mode_changes(self) -> None:
        """End a step that was computed twice up to here, in an inference (``INFERENCE_MODE``)."""
        if threading.get_ident() == self._thread and not hides_modes():
            self._end(self._step)

    # -- called by optimizers and scalers ---------------------------------------------------------------------------

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def scaler_unscales(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    scaler_steps = scaler_unscaled = scaler_unscales

    @guarded
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the following operators as the optimizer's."""
        if self._twice is not None:
            self._twice.optimizer_steps(optimizer)

    @guarded
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step, if this was its last optimizer."""
        if self._twice is not None:
            self._twice.optimizer_stepped()
        self.step_may_have_ended()

    @guarded
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """End the step, if the scaler has skipped it."""
        self.step_may_have_ended()

    @guarded
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Follow the loss scale from here."""
        if self._twice is not None:
            self._twice.loss_scaled(scaler, given, scaled)

    # -- steps ------------------------------------------------------------------------------------------------------

    def step_may_have_ended(self) -> None:
        """End a step that was computed twice, if the clock has ended it, and begin to compute the next one, if it is due."""
        if threading.get_ident() != self._thread or self._clock.step == self._step:
            return
        begun, self._step = self._step, self._clock.step
        self._choice.passed(begun, self._rarer_work.amount(), *self._clock.kind)
        self._end(begun)
        if self._twice is None and self._choice.is_due(self._step, self._recording.broken_phases):
            self._begin()

    def _begin(self) -> None:
        in_fp64, model = self._choice.begins(self._step), self._model
        reason = obstacle([model]) or doubt([model])
        if reason:
            self._recording.note(f"no step was computed twice: {reason}")
            return
        parameters = named_plainly(model, model.named_parameters())
        buffers = named_plainly(model, model.named_buffers())
        self._running.follow(model)
        self._twice = StepTwice(
            *(self._running, self._failed, parameters, buffers, is_any_compiled([model])),
            in_fp64=in_fp64,
            is_inference=self._is_inference,
        )
        self._twice.__enter__()

    def _end(self, step: int) -> None:
        self._running.unfollow()
        if self._twice is None:
            return
        records, left_out = self._twice.end()
        self._choice.took(self._twice.seconds_in_fp64)
        if self._twice.leave():
            self._twice = None
        self._choice.ends(records, self._recording.broken_phases())
        for record in records:
            self._recording.record(replace(record, step=step))
        for sentence in left_out:
            self._recording.note(sentence)

    def _failed(self, error: Exception) -> None:
        self.fault("the second computation of a step", (), error)
