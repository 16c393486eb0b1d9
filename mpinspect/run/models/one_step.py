"""Records the matrix products of one real training step (--lint), then another step under torch's profiler (--kernels)."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpinspect.ranges.capture.steps import EARLY_FORWARDS, LATER_STEPS, MOST_SECONDS_IN_FP64, StepChoice
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.inspected_models import InspectedModels
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Seen
from mpinspect.run.record import TRACE
from mpinspect.runtime.compiled_graphs import KEEPING, is_any_compiled
from mpinspect.runtime.dispatch import doubt, obstacle
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.wrappers import named_plainly, submodules

if TYPE_CHECKING:
    from mpinspect.kernels.capture.live_profile import LiveProfile
    from mpinspect.ranges.faults.measure.second_steps import StepTwice
    from mpinspect.shapes.record.live import LiveMatmuls
    from mpinspect.shapes.records import MatmulRecording


#: An optimizer is chosen after this many steps, even if other optimizers have not stepped yet: they may never do so.
_MOST_WAITED = 8
#: The step, of an optimizer that replaces another one, that is computed twice, and how many such optimizers have one.
_EARLY_STEP, _MOST_REPLACED = 1, 2


class OneStep(Guarded):
    """Records everything between the end of one step of an optimizer and the end of its next; without one, of backwards.

    Args:
        options: the options of the launch; ``lint`` and ``kernels`` choose the recordings.
        directory: where the trace is written.
        models: the inspected models.
        seen: receives the notes.
        compiled: knows the modules that must not be hooked.
    """

    def __init__(
        self, options: LaunchOptions, directory: Path, models: InspectedModels, seen: Seen, compiled: Compiled
    ) -> None:
        super().__init__(seen.note)
        self.matmuls: MatmulRecording | None = None
        self.trace: Path | None = None
        # With --kernels alone no products are recorded, since they would delay the profile by one step.
        self._wants_matmuls = options.lint or (options.lint is None and not options.kernels)
        self._is_lint_asked = bool(options.lint)
        self._wants_trace = options.kernels
        self._has_eager_samples = options.eager_samples
        self._directory, self._models, self._seen, self._compiled = directory, models, seen, compiled
        #: The thread whose step is recorded: dispatch modes and profiles are per thread.
        self._thread: int | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        #: Threads inside ``scaler.step()`` whose optimizer has not stepped yet.
        self._unstepped: set[int] = set()
        #: Number of steps of each optimizer, by id, before one is chosen.
        self._steps: Counter[int] = Counter()
        self._recorded: _Recorded | None = None
        #: Chooses further steps that are computed twice.
        self._choice = StepChoice((), after_events=0)
        #: How many more optimizers may replace the chosen one and have an early step computed twice.
        self._left_replaced = 0
        #: Whether further steps are computed twice.
        self._chooses = False
        if self._wants_matmuls:
            # A budget does not know the cost of a step that is computed twice.
            has_budget = options.max_overhead not in (None, math.inf)
            self._choice = StepChoice((), by_work=False) if has_budget else StepChoice(LATER_STEPS)
            self._chooses = not has_budget
            self._left_replaced = _MOST_REPLACED * self._chooses
        #: Steps of the chosen optimizer.
        self._stepped = 0
        self._is_again = self._is_inference = False
        #: Whether the recorded step has compiled code, whose products are not seen.
        self._is_compiled = False
        #: A recorded step still on the stack of dispatch modes, because the script has entered another mode since.
        self._lingering: _Recorded | None = None
        self._profile: LiveProfile | None = None

    @guarded
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the following matrix products as the optimizer's, not the model's."""
        if self._recorded is not None:
            self._recorded.twice.optimizer_steps(optimizer)

    @guarded
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin or end the recorded step after this optimizer's step has run."""
        self._unstepped.discard(threading.get_ident())
        if self._lingering is not None:
            self._leave(self._lingering)
        if not self._is_its_thread:
            return
        if self._is_replaced(optimizer):
            self._optimizer = weakref.ref(optimizer)
            if self._left_replaced > 0:
                self._choice, self._stepped = StepChoice((_EARLY_STEP, *LATER_STEPS)), 0
                self._left_replaced -= 1
        if self._optimizer is not None and self._optimizer() is optimizer:
            self._step_passed()
        if not self._is_needed:
            return
        if self._recorded is not None:
            self._recorded.twice.optimizer_stepped()
        self._step_ended(optimizer)

    @guarded
    def loss_scaled(self, scaler: object, given: object, scaled: object) -> None:
        """Follow the loss scale from here; called when ``scaler.scale(given)`` has returned ``scaled``."""
        if self._recorded is not None:
            self._recorded.twice.loss_scaled(scaler, given, scaled)

    @guarded
    def backward_ended(self) -> None:
        """Begin or end the recorded step after a backward of a script without optimizers: its updates follow."""
        if self._is_its_thread:
            self._step_passed()
            if self._is_needed:
                self._step_ended(None)

    @guarded
    def inference_begins(self, model: torch.nn.Module) -> None:
        """Record the first forwards of a model in a script that trains nothing: each forward is a step.

        Args:
            model: its first forward has begun.
        """
        if not self._is_its_thread:
            return
        if not self._is_inference:
            self._is_inference = True
            self._choice = StepChoice(LATER_STEPS if self._chooses else (), by_work=False)
        elif self._recorded is not None:
            self._step_passed()
        if self._chooses:
            self._choice.choose(range(self._stepped, self._stepped + EARLY_FORWARDS))
        if self._is_needed:
            self._step_ended(None)
        if self._recorded is not None:
            self._recorded.products.calls.began_before(model)

    @guarded
    def before_forward(self) -> None:
        """Begin or end the recorded step when a forward of an inference follows another one."""
        self.backward_ended()

    @guarded
    def inference_mode_changes(self) -> None:
        """End the recorded step here, in an inference (``INFERENCE_MODE``)."""
        if self._is_inference and self._is_its_thread:
            self._finish_products("")

    def _is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether another optimizer trains now, as after a resume or in a new phase, and may have other precisions."""
        is_gone = self._optimizer is not None and self._optimizer() is None
        return is_gone and self._models.stepped_by(optimizer) is not None

    def _step_passed(self) -> None:
        self._choice.passed(self._stepped, self._models.rarer_work(), *self._models.kind())
        self._stepped += 1

    def scaler_steps(self) -> None:
        """Record that ``scaler.step(optimizer)`` is about to run, to detect whether it skips the optimizer's step."""
        self._unstepped.add(threading.get_ident())

    @guarded
    def scaler_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin or end the recorded step if ``scaler.step()`` has skipped the optimizer's step."""
        skipped = threading.get_ident() in self._unstepped
        self._unstepped.discard(threading.get_ident())
        if skipped and self._is_needed and self._is_its_thread:
            self._step_ended(optimizer)

    @property
    def _is_its_thread(self) -> bool:
        return self._thread in (None, threading.get_ident())

    @property
    def _is_needed(self) -> bool:
        wants = self._wants_matmuls or self._wants_trace or self._wants_second
        return wants or self._recorded is not None or self._profile is not None

    @property
    def _wants_second(self) -> bool:
        """Whether another step is computed twice: because something broke after the recorded one, or after many steps."""
        if self._wants_matmuls or self._wants_trace or self._profile is not None:
            return False
        return self._choice.is_due(self._stepped, self._models.broken_phases)

    def give_up(self) -> None:
        """Stop recording because the script has ended, and note incomplete or missing recordings."""
        if self._recorded is not None:
            self._finish_products("the script ended within the step whose matrix products were recorded")
        elif self._wants_matmuls and self._is_lint_asked and self._models.all:
            self._too_few("--lint", "to record one: 2 are needed")
        if self._profile is not None:
            self._finish_profile("the script ended before the profiled step did")
        elif self._wants_trace and self._models.all:
            self._too_few("--kernels", "to profile one: 3 are needed, 4 with --lint")

    def _too_few(self, option: str, wanted: str) -> None:
        self._seen.note(f"the script made too few steps for {option} {wanted}")

    def leave_compiled(self) -> None:
        """Stop recording products and remove the profile's hooks, since a module has just been compiled."""
        if self._recorded is not None:
            recorded, self._recorded = self._recorded, None
            recorded.products.end()
            self._leave(recorded)
            self._note_lint("a model was compiled within the step that was to be recorded")
        if self._profile is not None:
            self._profile.leave_modules()

    def abandon(self) -> None:
        """Drop everything, in a forked child that may be in the middle of a step."""
        if self._recorded is not None:
            self._recorded.products.abandon()
            self._leave(self._recorded)
        self._recorded = self._profile = None
        self._wants_matmuls = self._wants_trace = False

    def _step_ended(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._recorded is None and self._profile is None:
            self._begin(optimizer)
        elif self._optimizer is None or self._optimizer() in (None, optimizer):
            self._go_on(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._models.stepped_by(optimizer) is None or not self._ends_a_round(optimizer):
            return
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._thread = threading.get_ident()
        if self._wants_matmuls or self._wants_second:
            self._begin_products()
        elif self._wants_trace:
            self._begin_profile()

    def _ends_a_round(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether all other optimizers have stepped too, so that the whole step of a GAN is recorded."""
        self._steps[id(optimizer)] += 1
        others = [each for model in self._models.all for each in model.living_optimizers]
        return all(id(each) in self._steps for each in others) or self._steps[id(optimizer)] >= _MOST_WAITED

    def _go_on(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._recorded is not None:
            self._finish_products("")
            if self._is_needed:
                self._begin(optimizer)
        elif self._profile is not None and self._profile.next_step():
            self._finish_profile("")

    def _begin_products(self) -> None:
        from mpinspect.ranges.faults.measure.second_steps import StepTwice
        from mpinspect.shapes.record.live import LiveMatmuls

        self._is_again = not self._wants_matmuls
        in_fp64 = self._choice.begins(self._stepped) if self._is_again else MOST_SECONDS_IN_FP64
        self._wants_matmuls = False
        # Gradients of other threads' models may be freed while they are read.
        models = self._models.attached(self._thread)
        reason = obstacle(models.values()) or ("" if self._is_lint_asked else doubt(models.values()))
        self._is_compiled = is_any_compiled(models.values())
        if self._is_compiled and self._has_eager_samples:
            reason = "compiled code runs uncompiled in sampled steps"
        if reason:
            self._note_lint(reason)
            return
        if self._is_compiled:
            self._note_lint("code is compiled by torch.compile: use mpinspect lint on the model")
        parts = [part for model in models.values() for part in submodules(model)]
        products = LiveMatmuls(models, self._compiled.among(parts) | KEEPING.inside(parts), self._is_inference)
        twice = StepTwice(
            products.calls,
            self._second_failed,
            _named(models, torch.nn.Module.named_parameters),
            _named(models, torch.nn.Module.named_buffers),
            self._is_compiled,
            self._models.are_by_hand and not self._is_inference,
            in_fp64,
            self._is_inference,
        )
        # The recorder of products, above on the stack, decomposes composite operators.
        twice.__enter__()
        products.begin()
        self._recorded = _Recorded(products, twice, tuple(models), self._models.steps())

    def _note_lint(self, reason: str) -> None:
        if self._is_lint_asked and not self._is_again:
            self._seen.note(f"--lint recorded no step: {reason}")

    def _second_failed(self, error: Exception) -> None:
        self._seen.note(f"mpinspect failed in computing the recorded step a second time ({error!r})")

    def _finish_products(self, stopped: str) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        try:
            matmuls = recorded.products.end(stopped)
            records, left_out = recorded.twice.end()
            self._choice.took(recorded.twice.seconds_in_fp64)
        finally:
            # A mode that stayed would see the rest of the run.
            self._leave(recorded)
        if self._is_again:
            self._choice.ends(records, self._models.broken_phases())
        elif not self._is_compiled and (self._is_lint_asked or not stopped):
            self.matmuls = matmuls
        for record in records:
            self._models.record(recorded.names, record, recorded.steps)
        for sentence in left_out:
            self._seen.note(sentence)

    def _leave(self, recorded: _Recorded) -> None:
        self._lingering = None if recorded.leave() else recorded

    def _begin_profile(self) -> None:
        from mpinspect.kernels.capture.live_profile import LiveProfile, obstacle

        self._wants_trace = False
        reason = obstacle()
        if reason:
            self._seen.note(f"--kernels profiled no step: {reason}")
            return
        models = self._models.attached()
        parts = [part for model in models.values() for part in submodules(model)]
        profile = LiveProfile(models, self._directory / TRACE, unhookable=self._compiled.among(parts))
        profile.begin()
        self._profile = profile
        self._models.rest(True)

    def _finish_profile(self, stopped: str) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._models.rest(False)
        trouble = profile.end(stopped)
        if trouble:
            self._seen.note(f"--kernels has no trace: {trouble}")
        else:
            self.trace = profile.path
            self._seen.note("counting and watching were off during the 2 steps that --kernels used for its profile")


class _Recorded(NamedTuple):
    """The step that is recorded.

    Args:
        products: records its matrix products.
        twice: computes it twice.
        names: the names of its models.
        steps: the number of steps that each model has made before.
    """

    products: LiveMatmuls
    twice: StepTwice
    names: tuple[str, ...]
    steps: dict[str, int]

    def leave(self) -> bool:
        """Stop, and exit both modes. Return False while a mode of the script is above them on the stack."""
        self.twice.stop()
        return self.products.leave() and self.twice.leave()


def _named(models: Mapping[str, torch.nn.Module], named: Callable[[torch.nn.Module], Any]) -> list[tuple[str, Any]]:
    """Return parameters or buffers of models, each with its path, which begins with the model's name if there are several."""
    return [
        (f"{name}.{path}" if len(models) > 1 else path, each)
        for name, model in models.items()
        for path, each in named_plainly(model, named(model))
    ]
