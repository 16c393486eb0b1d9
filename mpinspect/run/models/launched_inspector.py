"""The Inspector of a launched script: it does not warn, and can be paused, resumed and abandoned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mpinspect.ranges.analysis.first_line import first_line, gravest
from mpinspect.ranges.capture import layers as model_layers
from mpinspect.ranges.capture.capture import Capture
from mpinspect.ranges.capture.compiled_regions import not_seen_inside
from mpinspect.ranges.capture.sinks import Sink
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.capture.weights import RarerWork
from mpinspect.ranges.faults.measure.returned import WeightsAtStarts
from mpinspect.ranges.inspector import Inspector
from mpinspect.ranges.kinds import ACTIVATION, INFERENCE_KINDS, PARAMETER_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.records import Record
from mpinspect.ranges.session import Event, is_below
from mpinspect.ranges.tracking import Tracking
from mpinspect.reporting.trackers import Tracker
from mpinspect.run.models.owners import Parameters
from mpinspect.run.options import LaunchOptions

#: Keeps alive the sinks inherited by a forked child: closing them would write to the parent's files a second time.
_inherited: list[Sink] = []


class LaunchedInspector(Inspector):
    """An Inspector attached by ``mpinspect run``: it prints only the first harmful event; its notes go to the report.

    Args:
        model: the model to inspect; held only while attached.
        options: the options of the launch.
        optimizers: optimizers known to step the model.
        log_dir: directory of its session file and TensorBoard log.
        say: callable that prints a line to stderr.
        unhookable: ids of modules that must not be hooked, since they are compiled.
        tracker: receives the model's scalars; the launch uploads the page to it.
        written: called after each write of its record, on the thread that writes; must not raise.
        before_forward: in an inference, where each forward is a step: called when one follows another. None in a training.
    """

    #: The launch ends the inspector, not an exit handler.
    _ends_with_the_process = False

    def __init__(
        self,
        model: torch.nn.Module,
        options: LaunchOptions,
        optimizers: Sequence[torch.optim.Optimizer],
        log_dir: Path | None,
        say: Callable[[str], None],
        unhookable: Collection[int] = (),
        tracker: Tracker | None = None,
        written: Callable[[], None] | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        self._say, self._tell_before_forward = say, before_forward
        self._written = written
        self._has_announced = False
        self._model = weakref.ref(model)
        self._selection = model_layers.Selection(options.include, options.exclude)
        is_inference = before_forward is not None
        kinds = _kinds(model, options.kinds)
        chosen: dict[str, Any] = {}
        if is_inference:
            chosen["capture"] = [kind for kind in kinds or (ACTIVATION,) if kind in INFERENCE_KINDS]
        elif kinds is not None:
            chosen["capture"] = kinds
        super().__init__(
            model,
            optimizers=list(optimizers),
            every=Schedule(every=options.every, dense=options.dense),
            include=options.include,
            exclude=options.exclude,
            log_dir=log_dir,
            watch=options.watch,
            loss_scale=options.loss_scale,
            max_overhead=options.max_overhead,
            eager_samples=options.eager_samples,
            tracker=tracker,
            recipes=() if is_inference else options.recipes,
            curves=options.curves,
            inference=is_inference,
            **chosen,
        )
        if is_inference:
            self._note_what_an_inference_lacks(kinds or (), options.recipes)
        if unhookable:
            self._capture = self._on(model, optimizers, unhookable)
        self._rarer_work = RarerWork(self._capture.clock, model)
        self._starts = WeightsAtStarts()
        self._training_starts(model)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model; None if it has been freed."""
        return self._model()

    @property
    def attached(self) -> bool:
        """Whether the hooks are on the model."""
        return self._capture.attached

    @property
    def steps(self) -> int:
        """The number of steps that have ended."""
        return self._capture.clock.step

    @property
    def backwards(self) -> int:
        """The number of backwards that reached the model."""
        return self._capture.clock.backwards

    def note(self, sentence: str) -> None:
        """Add a sentence to the report."""
        self._recording.note(sentence)

    def _note_what_an_inference_lacks(self, kinds: Sequence[str], recipes: Sequence[str]) -> None:
        """Note the requested kinds and recipes that nothing can be measured of."""
        lacking = [kind for kind in kinds if kind not in INFERENCE_KINDS]
        if lacking:
            self.note(f"--kinds {','.join(lacking)}: not counted, since an inference has activations and weights alone")
        if recipes:
            self.note(f"--recipes {','.join(recipes)}: not measured, since recipes are measured in trainings alone")

    @property
    def rarer_work(self) -> int:
        """The amount of this model's ``RarerWork``."""
        return self._rarer_work.amount()

    @property
    def kind(self) -> tuple[str, Hashable]:
        """``StepClock.kind`` of the last step."""
        return self._capture.clock.kind

    @property
    def broken_phases(self) -> tuple[str, ...]:
        """For each step that had one, the phase of this model that was not finite at any loss scale."""
        return self._recording.broken_phases()

    def record(self, record: Record, step: int | None = None) -> None:
        """Store a record under a step; None means the current step."""
        self._recording.record(replace(record, step=self.steps if step is None else step))

    def pause(self) -> None:
        """Remove every hook and release the model; the record stays open. Waits for the GPU."""
        if self._capture.attached:
            self._capture.detach()
            # Stored for ``end``: another optimizer may train the model further and change its weights.
            self._left = self._capture.weights_left(self._broken_before)
            self._recording.write()
        clock = self._capture.clock
        self._capture = self._new_capture((), (), ())
        self._continue(clock)

    def resume(self, optimizers: Sequence[torch.optim.Optimizer], unhookable: Collection[int]) -> None:
        """Attach to the model again, if it is still alive, and continue its count of steps."""
        model = self.model
        if model is None or self.attached:
            return
        clock, self._left = self._capture.clock, None
        self._capture = self._on(model, optimizers, unhookable)
        self._continue(clock)
        self._training_starts(model)
        self._capture.attach()

    def _training_starts(self, model: torch.nn.Module) -> None:
        """Compare the weights with those of the last training's start; an error costs this comparison alone."""
        try:
            returned = self._starts.begins(model)
        except Exception as error:
            self.note(f"the weights at the start of a training were not compared ({error!r})")
            return
        if returned is not None:
            self.record(returned)

    def unhook(self, modules: Collection[int]) -> None:
        """Remove the hooks from modules that have just been compiled, given by id."""
        model = self.model
        if self._capture.unhook(modules) and model is not None:
            self._note_compiled(model_layers.find_layers(model, self._selection), modules)

    def loss_scaled(self, scaler: Any, scaled: Any) -> None:
        """Record a loss that was scaled before the inspector was attached and whose backward is about to run."""
        if self._capture.listener is not None:
            self._capture.listener.loss_scaled(scaler, (), scaled)

    def backward_called(self, losses: Any) -> None:
        """Record the losses of the backward that is about to run and that caused this attachment."""
        if self._capture.listener is not None:
            self._capture.listener.backward_called(losses)

    def _before_forward(self) -> None:
        if self._tell_before_forward is not None:
            self._tell_before_forward()

    def rest(self, resting: bool) -> None:
        """Suspend counting and watching and drop the open step's data, or resume; steps are numbered meanwhile."""
        if self._capture.attached:
            self._capture.rest(resting)

    def end(self) -> None:
        """Detach, if attached, and close the files; a second call does nothing."""
        self._end()

    def abandon(self) -> None:
        """Stop inspecting in a forked child, without using the GPU or flushing files, which belong to the parent."""
        self._capture.abandon()
        _inherited.extend(self._recording.abandon())

    def _on(
        self, model: torch.nn.Module, optimizers: Collection[torch.optim.Optimizer], unhookable: Collection[int]
    ) -> Capture:
        found = model_layers.find_layers(model, self._selection)
        layers = [layer for layer in found if id(layer.module) not in unhookable]
        if len(layers) < len(found):
            self._note_compiled(found, unhookable)
        return self._new_capture(layers, model_layers.find_parameters(model, self._selection), optimizers)

    def _note_compiled(self, layers: Sequence[model_layers.Layer], unhookable: Collection[int]) -> None:
        """Record the outermost modules that got no hooks because they are compiled."""
        paths = [layer.path for layer in layers if id(layer.module) in unhookable]
        outermost = [path for path in paths if not any(is_below(path, other) for other in paths)]
        self._recording.compiled(outermost)
        self.note(not_seen_inside(outermost))

    def _continue(self, clock: Any) -> None:
        new = self._capture.clock
        new.step, new.backwards, new.skipped_steps = clock.step, clock.backwards, clock.skipped_steps

    def _tell(self, note: str) -> None:
        """Do nothing instead of warning: the script may turn warnings into errors, and the report contains the note."""

    def _hand_over(self, tracking: Tracking) -> None:
        """Do nothing: the launch passes one page of all its models to the tracker."""

    def _announce(self, event: Event) -> None:
        """Print the event if it is the first that no loss scaler caught."""
        if not self._has_announced and gravest([event]) is not None:
            self._has_announced = True
            self._say(first_line(event))


def _kinds(model: torch.nn.Module, asked: Sequence[str] | None) -> Sequence[str] | None:
    """Return the kinds to count; without a module only the kinds of parameters, since there are no outputs."""
    if not isinstance(model, Parameters):
        return asked
    return [kind for kind in asked or (WEIGHT_GRADIENT,) if kind in PARAMETER_KINDS]
