"""The models of one process that are, or were, inspected: each has one record, however many optimizers and phases it has."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType

import torch

from mpinspect.launch.models.inspecting import LaunchedInspector
from mpinspect.launch.models.owners import LooseParameters, parameter_ids
from mpinspect.launch.options import LaunchOptions
from mpinspect.launch.seen import RecordedModel, Seen

#: Models recorded at most: a script that trains hundreds (a sweep, federated clients) is understood from the first.
MOST_MODELS = 16
#: Models without any optimizer that are held at once. Nothing tells when the script has let go of one.
_MOST_WITHOUT_OPTIMIZERS = 4

#: Code of ours that must not be interrupted by letting a model go.
_ROOMS = (
    "capture",
    "counting",
    "session_file",
    "reports",
    "inspector",
    "launch.models.inspect",
    "launch.models.attaching",
)


class InspectedModel:
    """One model: its inspector, and the optimizers that step it, weakly."""

    def __init__(self, name: str, inspector: LaunchedInspector) -> None:
        self.name = name
        self.inspector = inspector
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.had_optimizers = False

    def join(self, optimizer: torch.optim.Optimizer, gone: Callable[[object], None]) -> None:
        """This optimizer steps the model too; ``gone`` is called when it dies."""
        self.had_optimizers = True
        if all(known() is not optimizer for known in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer, gone))

    @property
    def living_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that the script still has."""
        self.optimizers = [known for known in self.optimizers if known() is not None]
        return [optimizer for known in self.optimizers if (optimizer := known()) is not None]

    def holds(self, parameters: Collection[int]) -> bool:
        """Whether all of these parameters, by id, are the model's."""
        model = self.inspector.model
        return model is not None and frozenset(parameters) <= frozenset(parameter_ids(model))

    def record(self) -> RecordedModel:
        """What was recorded so far."""
        log_dir = self.inspector.log_dir
        return RecordedModel(self.name, self.inspector.session(), None if log_dir is None else str(log_dir))


class InspectedModels:
    """All of them.

    Args:
        options: the launch's.
        directory: each model gets a directory below it.
        say: writes a line to stderr.
        seen: the counts.
    """

    def __init__(self, options: LaunchOptions, directory: Path, say: Callable[[str], None], seen: Seen) -> None:
        self._options = options
        self._directory = directory
        self._say = say
        self._seen = seen
        self._release_is_due = False
        self.all: list[InspectedModel] = []

    def inspect(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> InspectedModel | None:
        """The record of this model, its inspector attached; None where there are too many already."""
        known = next((each for each in self.all if each.inspector.model is model), None)
        if known is None and len(self.all) >= MOST_MODELS:
            self._seen.note(f"more than {MOST_MODELS} models were trained: the later ones were not inspected")
            return None
        if known is None:
            known = self._new(model, optimizers)
        elif not self._is_over(known):
            known.inspector.resume(optimizers)
        for optimizer in optimizers:
            known.join(optimizer, self._optimizer_gone)
        return known

    def holding(self, parameters: Collection[int]) -> InspectedModel | None:
        """The model that has all these parameters, by id."""
        return next((each for each in self.all if each.holds(parameters)), None)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> InspectedModel | None:
        """The model that this optimizer steps, if it is inspected at the moment."""
        of_it = (each for each in self.all if any(known() is optimizer for known in each.optimizers))
        return next((each for each in of_it if each.inspector.attached), None)

    def release_if_due(self) -> None:
        """Do what could not be done when an optimizer died."""
        if self._release_is_due:
            self._release()

    def _optimizer_gone(self, _: object) -> None:
        if inside_ours(sys._getframe().f_back):
            self._release_is_due = True
            return
        try:
            self._release()
        except Exception as error:
            self._seen.note(f"mpinspect failed to let a model go: {error!r}")

    def _release(self) -> None:
        """Let go of the models whose optimizers are all gone: the script may have dropped them, and wants the memory."""
        self._release_is_due = False
        for each in self.all:
            if each.had_optimizers and each.inspector.attached and not each.living_optimizers:
                each.inspector.pause()

    def attached(self) -> dict[str, torch.nn.Module]:
        """The models inspected at the moment, by name."""
        return {
            each.name: model
            for each in self.all
            if each.inspector.attached and (model := each.inspector.model) is not None
        }

    def rest(self, resting: bool) -> None:
        """Whether nothing is to be counted or watched for a while."""
        for each in self.all:
            each.inspector.rest(resting)

    def stop_after_enough_steps(self) -> None:
        """End the inspection of models that made as many steps as were asked for."""
        for each in self.all:
            if self._is_over(each) and each.inspector.attached:
                each.inspector.end()

    def end(self) -> None:
        """Detach everything; each for itself, so that one failure costs one model."""
        for each in self.all:
            try:
                each.inspector.end()
            except Exception as error:
                self._seen.note(f"the record of {each.name} could not be closed: {error!r}")

    def abandon(self) -> None:
        """This is a forked child: write nothing."""
        for each in self.all:
            each.inspector.abandon()

    def _new(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> InspectedModel:
        name = self._free_name("Parameters" if isinstance(model, LooseParameters) else type(model).__name__)
        say = self._say if not self.all else lambda line: self._say(f"{name}: {line}")
        inspector = LaunchedInspector(model, self._options, optimizers, self._directory / name, say)
        made = InspectedModel(name, inspector)
        inspector.attach()
        self.all.append(made)
        self._seen.models += 1
        if not optimizers:
            self._pause_the_oldest_without_optimizers()
        return made

    def _free_name(self, wanted: str) -> str:
        plain = re.sub(r"[^\w.\-]+", "_", wanted) or "Model"
        taken = {each.name for each in self.all}
        names = (plain, *(f"{plain}-{number}" for number in range(2, MOST_MODELS + 2)))
        return next(name for name in names if name not in taken)

    def _is_over(self, each: InspectedModel) -> bool:
        return self._options.steps is not None and each.inspector.steps >= self._options.steps

    def _pause_the_oldest_without_optimizers(self) -> None:
        without = [each for each in self.all if each.inspector.attached and not each.had_optimizers]
        for each in without[:-_MOST_WITHOUT_OPTIMIZERS]:
            each.inspector.pause()


def inside_ours(frame: FrameType | None) -> bool:
    """Whether it is a bad moment to let a model go: our own code, or torch at work on something else, is further up this stack.

    An object's death is told at once, wherever the garbage collector happened to run.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    own = threading.get_ident()
    stacks = [frame, *(each for thread, each in sys._current_frames().items() if thread != own)]
    return any(_is_ours(each) for each in stacks)


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("mpinspect.") and name.removeprefix("mpinspect.").startswith(_ROOMS):
            return True
        frame = frame.f_back
    return False
