"""Computes chosen steps of a training twice, and follows the loss scale's power through them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mpinspect.ranges.capture import optimizer_steps, scalers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import LATER_STEPS, StepChoice, StepClock
from mpinspect.ranges.capture.weights import RarerWork
from mpinspect.ranges.faults.measure.optimizer_arithmetic import WholeStep
from mpinspect.ranges.faults.measure.powers import PowersOfScale
from mpinspect.ranges.faults.measure.second import SecondComputation
from mpinspect.runtime.compiled_graphs import KEEPING, is_any_compiled
from mpinspect.runtime.dispatch import doubt, obstacle
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.hooks import HandleList
from mpinspect.runtime.wrappers import named_plainly, plain_names

#: The first step that an inspector has computed twice: before it, optimizers have no state.
_EARLY_STEP = 1


class RunningModules:
    """Follows the calls of a model's modules."""

    def __init__(self) -> None:
        self._paths = [""]
        #: The depth of the module that began an evaluation; 0 while none is running.
        self._evaluates_from = 0
        self._handles = HandleList()

    def path(self) -> str:
        """Return the dotted path of the innermost module that is running; "" outside of all."""
        return self._paths[-1]

    @property
    def depth(self) -> int:
        """The number of modules that are running."""
        return len(self._paths) - 1

    @property
    def evaluates(self) -> bool:
        """Whether the model runs for evaluation: in eval mode without gradients."""
        return self._evaluates_from > 0

    def follow(self, model: torch.nn.Module) -> None:
        """Add the hooks."""
        plain, compiled = plain_names(model), KEEPING.inside(model.modules())
        for path, module in model.named_modules():
            if id(module) not in compiled:
                self._handles.add_around(module, partial(self._enter, plain[path], module), self._leave)

    def unfollow(self) -> None:
        """Remove the hooks."""
        self._handles.remove_all()

    def _enter(self, path: str, module: torch.nn.Module, args: Any) -> None:
        self._paths.append(path)
        if not self._evaluates_from and not module.training and not torch.is_grad_enabled():
            self._evaluates_from = self.depth

    def _leave(self, args: Any, output: Any = None) -> None:
        if self._evaluates_from == self.depth:
            self._evaluates_from = 0
        self._paths.pop()


class Twice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator unchanged, then has it computed a second time and its loss scale followed.

    Args:
        second: computes the operators of forwards and backwards, and its ``of_optimizer`` those of an optimizer.
        running: knows the running modules.
        powers: sees all operators, the optimizer's too.
        failed: called with an exception of either, which then sees no more; None lets it pass.
    """

    #: Of `torch.cond` and the like, the chosen branch runs as it is.
    supports_higher_order_operators = True

    def __init__(
        self,
        second: SecondComputation,
        running: RunningModules,
        powers: PowersOfScale | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._second: SecondComputation | None = second
        self.calls_graphs = getattr(second, "calls_graphs", None)
        self._powers = powers
        self._running, self._failed = running, failed
        self._process = os.getpid()
        self.in_optimizer = False
        self.is_over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A forked child, such as a worker that loads data, has the mode on its stack as well.
        if self.is_over or getattr(func, "_schema", None) is None or os.getpid() != self._process:
            return func(*args, **kwargs)
        second = self._computing()
        pending = second and self._attempt(second.before, func, args, kwargs)
        result = func(*args, **kwargs)
        if second is not None and pending:
            self._attempt(second.after, pending, result, sys._getframe(1))
        if self._powers is not None:
            self._attempt(self._powers.ran, func, args, kwargs, result, sys._getframe(1), self.in_optimizer)
        return result

    def _computing(self) -> SecondComputation | None:
        """Return the second computation of the operator that runs; None for a part of a validation."""
        if self._second is None or torch._C._current_autograd_node() is not None:
            return self._second
        # A closure, as Lightning's, enables gradients again for the loop's own code.
        if self.in_optimizer and not self._running.depth and not torch.is_grad_enabled():
            return self._second.of_optimizer
        return None if self._running.evaluates else self._second

    def _attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            if self._failed is None:
                raise
            self._second = self._powers = self.calls_graphs = None
            self._failed(error)
            return None


class SecondSteps(Guarded):
    """Computes chosen steps of an inspected training twice. Listens to optimizers and scalers after the model's capture.

    Args:
        model: the inspected model.
        steps: numbers of the chosen steps, from 0; None for an early one and LATER_STEPS.
        clock: the capture's step clock.
        recording: receives the records, and has the events.
    """

    def __init__(
        self, model: torch.nn.Module, steps: Iterable[int] | None, clock: StepClock, recording: Recording
    ) -> None:
        super().__init__(recording.note)
        self._model, self._clock, self._recording = model, clock, recording
        self._choice = (
            StepChoice((_EARLY_STEP, *LATER_STEPS)) if steps is None else StepChoice(steps, with_rarer_work=0)
        )
        self._rarer_work = RarerWork(clock, model)
        self._thread = threading.get_ident()
        self._step = -1
        self._running = RunningModules()
        self._second: WholeStep | None = None
        self._powers: PowersOfScale | None = None
        #: The mode of the step that is computed twice, or one below a mode that the script has entered since.
        self._mode: Twice | None = None

    @guarded
    def attach(self) -> None:
        """Begin to listen; to be called on the thread that trains."""
        self._thread = threading.get_ident()
        KEEPING.begin(self)
        optimizer_steps.listen(self)
        scalers.listen(self)
        self._step_may_have_ended()

    @guarded
    def detach(self) -> None:
        """Stop listening, and leave a step that has not ended uncounted."""
        optimizer_steps.unlisten(self)
        scalers.unlisten(self)
        KEEPING.end(self)
        self._second = self._powers = None
        self._running.unfollow()
        self._leave()

    # -- called by optimizers and scalers ---------------------------------------------------------------------------

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def scaler_unscales(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    scaler_steps = scaler_unscaled = scaler_unscales

    @guarded
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the following operators as the optimizer's."""
        self._in_optimizer(True)
        if self._second is not None and threading.get_ident() == self._thread:
            self._second.optimizer_steps(optimizer)

    @guarded
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step, if this was its last optimizer."""
        self._in_optimizer(False)
        if self._second is not None and threading.get_ident() == self._thread:
            self._second.optimizer_stepped()
        self._step_may_have_ended()

    @guarded
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """End the step, if the scaler has skipped it."""
        self._step_may_have_ended()

    @guarded
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Follow the loss scale from here."""
        if self._powers is not None and threading.get_ident() == self._thread:
            self._powers.scaled(scaler, given, scaled)

    def _in_optimizer(self, value: bool) -> None:
        if self._mode is not None and threading.get_ident() == self._thread:
            self._mode.in_optimizer = value

    # -- steps ------------------------------------------------------------------------------------------------------

    def _step_may_have_ended(self) -> None:
        if threading.get_ident() != self._thread or self._clock.step == self._step:
            return
        begun, self._step = self._step, self._clock.step
        self._choice.passed(begun, self._rarer_work.amount())
        self._end(begun)
        if self._mode is None and self._choice.is_due(self._step, self._recording.broken_phase):
            self._begin()

    def _begin(self) -> None:
        self._choice.begins(self._step)
        model = self._model
        reason = obstacle([model]) or doubt([model])
        if reason:
            self._recording.note(f"no step was computed twice: {reason}")
            return
        parameters = named_plainly(model, model.named_parameters())
        self._second = WholeStep(self._running.path, parameters, named_plainly(model, model.named_buffers()))
        if not is_any_compiled([model]):
            self._powers = PowersOfScale(self._running.path, parameters)
        self._running.follow(self._model)
        self._mode = Twice(self._second, self._running, self._powers, self._failed)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, step: int) -> None:
        self._running.unfollow()
        self._leave()
        second, powers = self._second, self._powers
        self._second = self._powers = None
        if second is None:
            return
        records = [*second.records(), *(powers.records() if powers else ())]
        self._choice.ends(records, self._recording.broken_phase())
        for record in records:
            self._recording.record(replace(record, step=step))
        if left_out := second.left_out():
            self._recording.note(left_out)

    def _leave(self) -> None:
        """Exit the mode. While a mode of the script is above it on the stack, it stays there and passes everything on."""
        if self._mode is not None:
            self._mode.is_over, self._mode.calls_graphs = True, None
            if _get_current_dispatch_mode() is self._mode:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._mode = None

    def _failed(self, error: Exception) -> None:
        self._second = self._powers = None
        self.fault("the second computation of a step", (), error)
