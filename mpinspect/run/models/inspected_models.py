"""Keeps one record for each model inspected in a process, however many optimizers and training phases the model has."""

from __future__ import annotations

import shutil
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.capture.steps import EARLY_FORWARDS
from mpinspect.ranges.records import Record
from mpinspect.ranges.session import is_below
from mpinspect.reporting.active_run import ActiveRun
from mpinspect.run.models.attach_lock import AttachLock, is_unsafe_to_detach
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.launched_inspector import LaunchedInspector
from mpinspect.run.models.naming import Label, free_name
from mpinspect.run.models.owners import parameter_ids
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import RecordedModel, Seen
from mpinspect.runtime.device import free_memory
from mpinspect.runtime.finalizing import until_finalized
from mpinspect.runtime.wrappers import submodules

#: Most models that are recorded: if a script trains hundreds (a sweep, federated clients), the first ones suffice.
MOST_MODELS = 16
#: Most models without an optimizer attached at once: an attached model stays alive after the script drops it.
_MOST_WITHOUT_OPTIMIZERS = 4


class InspectedModel:
    """A model that is or was inspected: its inspector, and the optimizers that step it, held weakly."""

    def __init__(self, name: str, label: Label, inspector: LaunchedInspector) -> None:
        self.name, self.label, self.inspector = name, label, inspector
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.had_optimizers = False
        #: The number of its steps after which it is released; None for no limit.
        self.most_steps: int | None = None
        #: The thread that trains it.
        self.thread = threading.get_ident()

    def join(self, optimizer: torch.optim.Optimizer, gone: Callable[[object], None]) -> None:
        """Add a weak reference to an optimizer that steps the model; ``gone`` is called when it is freed."""
        self.had_optimizers = True
        if all(known() is not optimizer for known in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer, gone))

    def is_stepped_by(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether this optimizer steps the model; for None, whether the model never had an optimizer."""
        if optimizer is None:
            return not self.had_optimizers
        return any(known() is optimizer for known in self.optimizers)

    @property
    def living_optimizers(self) -> list[torch.optim.Optimizer]:
        """The model's optimizers that are still alive."""
        self.optimizers = [known for known in self.optimizers if known() is not None]
        return [optimizer for known in self.optimizers if (optimizer := known()) is not None]

    def holds(self, parameters: Collection[int]) -> bool:
        """Return whether the model has all of these parameters, given by id."""
        model = self.inspector.model
        return model is not None and frozenset(parameters) <= frozenset(parameter_ids(model))

    def record(self) -> RecordedModel:
        """Return the model's recording so far."""
        log_dir = self.inspector.log_dir
        return RecordedModel(self.name, self.inspector.session(), None if log_dir is None else str(log_dir))


class InspectedModels:
    """Attaches inspectors to models, and pauses and ends them.

    Args:
        options: the options of the launch.
        directory: each model gets a directory below it.
        say: callable that prints a line to stderr.
        seen: the counts to update.
        lock: held while attaching and detaching.
        compiled: knows the modules that must not be hooked.
        tracker: gets the models' scalars.
        written: called after each write of a model's record, on the thread that writes; must not raise.
        prepared: returns records of the script's code before the first step, once.
    """

    def __init__(
        self,
        options: LaunchOptions,
        directory: Path,
        say: Callable[[str], None],
        seen: Seen,
        lock: AttachLock,
        compiled: Compiled,
        tracker: ActiveRun | None = None,
        written: Callable[[], None] | None = None,
        prepared: Callable[[], list[Record]] = list,
    ) -> None:
        self._options, self._directory, self._say, self._seen = options, directory, say, seen
        self._lock, self._compiled, self._tracker, self._written = lock, compiled, tracker, written
        self._prepared = prepared
        self._pause_is_due = False
        self.all: list[InspectedModel] = []

    def inspect(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        label: Label,
        before_forward: Callable[[], None] | None = None,
    ) -> InspectedModel | None:
        """Attach or resume a model's inspector and return the model's entry; None if there are too many models.

        Args:
            before_forward: as of ``LaunchedInspector``.
        """
        known = next((each for each in self.all if each.inspector.model is model), None)
        if known is None and self.is_full:
            self.note_that_it_is_full()
            return None
        if known is None:
            known = self._new(model, optimizers, label, before_forward)
        elif not self._is_over(known):
            known.inspector.resume(optimizers, self._unhookable(model))
        for optimizer in optimizers:
            known.join(optimizer, self._optimizer_gone)
        return known

    @property
    def is_full(self) -> bool:
        """Whether the limit on the number of inspected models is reached."""
        return len(self.all) >= MOST_MODELS

    def note_that_it_is_full(self) -> None:
        """Note for the report that a model was left out because too many are recorded."""
        self._seen.note(f"the first {MOST_MODELS} models were inspected, and none after them")

    def holding(self, parameters: Collection[int]) -> InspectedModel | None:
        """Return the model that has all of these parameters, given by id."""
        return next((each for each in self.all if each.holds(parameters)), None)

    def stepped_by(self, optimizer: torch.optim.Optimizer | None) -> InspectedModel | None:
        """Return the model that this optimizer steps, or for None one without any, if it is attached."""
        of_it = (each for each in self.all if each.is_stepped_by(optimizer))
        return next((each for each in of_it if each.inspector.attached), None)

    def pause_if_due(self) -> None:
        """Pause models whose last optimizer was freed at a moment when detaching was unsafe."""
        if self._pause_is_due:
            self._pause_orphans()

    @until_finalized
    def _optimizer_gone(self, _: object) -> None:
        # Weakref callbacks can run inside any code: waiting for the lock could deadlock with the thread that holds it.
        with self._lock.held_if_free() as is_held:
            # The frame above this one belongs to the wrapper of until_finalized.
            if not is_held or is_unsafe_to_detach(sys._getframe(1).f_back):
                self._pause_is_due = True
                return
            try:
                self._pause_orphans()
            except Exception as error:
                self._seen.note(f"mpinspect failed to detach from a model whose optimizers were freed: {error!r}")

    def _pause_orphans(self) -> None:
        """Pause the models whose optimizers were all freed, since the script may want to free the models' memory."""
        self._pause_is_due = False
        for each in self.all:
            if each.had_optimizers and each.inspector.attached and not each.living_optimizers:
                each.inspector.pause()

    def attached(self, thread: int | None = None) -> dict[str, torch.nn.Module]:
        """Return the models with an attached inspector, by name; of one thread, or for None of all."""
        return {
            each.name: model
            for each in self.all
            if each.inspector.attached and (model := each.inspector.model) is not None and thread in (None, each.thread)
        }

    @property
    def are_by_hand(self) -> bool:
        """Whether models are attached, and no optimizer is known of any: the loop updates them itself."""
        return bool(self.attached()) and not any(each.had_optimizers for each in self.all)

    def rarer_work(self) -> int:
        """Return a number that changes with each piece of rarer work in any model (``RarerWork``)."""
        return sum(each.inspector.rarer_work for each in self.all)

    def kind(self) -> tuple[str, tuple[Hashable, ...]]:
        """Return the modules that the models' last forwards began with, and the kind of the step (``StepClock.kind``)."""
        kinds = [each.inspector.kind for each in self.all]
        return " ".join(first for first, _ in kinds), tuple(kind for _, kind in kinds)

    def steps(self) -> dict[str, int]:
        """Return the number of steps that have ended, by model."""
        return {each.name: each.inspector.steps for each in self.all}

    def broken_phases(self) -> tuple[str, ...]:
        """Return, for each step of any model that had one, the phase that was not finite at any loss scale."""
        return tuple(phase for each in self.all for phase in each.inspector.broken_phases)

    def record(self, names: Sequence[str], record: Record, steps: Mapping[str, int] | None = None) -> None:
        """Pass a record, whose measurement spans several models, to the model that it belongs to.

        A record of code outside of modules belongs to all models that broke, or else to the first one.

        Args:
            names: the models' names; if there are several, the record's name begins with its model's.
            steps: the record's step, by model; None for the current step.
        """
        path = record.name
        if not path and len(self.attached()) > len(names):
            # The record may belong to a model that was attached in the middle of the recorded step.
            return
        owner = next((name for name in names if path == name or is_below(path, name)), names[0])
        owners = {owner}
        if not path:
            owners = {each.name for each in self.all if each.name in names and each.inspector.broken_phases} or owners
        if len(names) > 1:
            path = path.removeprefix(owner).removeprefix(".")
        for each in self.all:
            if each.name in owners:
                each.inspector.record(replace(record, name=path), (steps or {}).get(each.name))

    def rest(self, resting: bool) -> None:
        """Suspend (True) or resume (False) counting and watching in all models."""
        for each in self.all:
            each.inspector.rest(resting)

    def leave_compiled(self) -> None:
        """Remove our hooks from modules that have just been compiled."""
        for each in self.all:
            model = each.inspector.model
            if model is not None and each.inspector.attached:
                each.inspector.unhook(self._unhookable(model))

    def stop_after_enough_steps(self, optimizer: torch.optim.Optimizer | None) -> None:
        """End the inspection of models that have made as many steps as the options request.

        Args:
            optimizer: end only models that it steps; None: only models without an optimizer. Other models may be
                training on other threads.
        """
        for each in self.all:
            if each.inspector.attached and self._is_over(each) and each.is_stepped_by(optimizer):
                # A pause releases the model.
                (each.inspector.end if each.most_steps is None else each.inspector.pause)()

    def broke_off(self, error: BaseException) -> None:
        """Note in each attached model's record the step and phase that the ending exception interrupted."""
        for each in self.all:
            if each.inspector.attached:
                each.inspector.broke_off(error)

    def bring_tracker_up_to_date(self) -> None:
        """Log each model's counts so far to the tracker. Waits for the GPU."""
        for each in self.all:
            each.inspector.bring_tracker_up_to_date()

    def end(self) -> None:
        """Detach from every model; if this fails for a model, note the failure and continue with the others."""
        for each in self.all:
            try:
                each.inspector.end()
            except Exception as error:
                self._seen.note(f"the record of {each.name} could not be closed: {error!r}")

    def drop(self) -> None:
        """Detach from every model, and remove the records and their directories; note the first infinity or NaN of each."""
        for each in self.all:
            each.inspector.end()
            event = next(iter(each.inspector.session().events), None)
            if event is not None:
                self._seen.note(f"before the training, in {each.name}: {first_line(event)}")
            if each.inspector.log_dir is not None:
                shutil.rmtree(each.inspector.log_dir, ignore_errors=True)
        self._seen.models -= len(self.all)
        self.all.clear()

    def abandon(self) -> None:
        """Abandon every inspector, in a forked child."""
        for each in self.all:
            each.inspector.abandon()

    def records(self) -> list[RecordedModel]:
        """Return each model's recording; note and leave out any that can't be read."""
        records = []
        for each in self.all:
            try:
                records.append(each.record())
            except Exception as error:
                self._seen.note(f"the record of {each.name} could not be read: {error!r}")
        return records

    def _new(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        label: Label,
        before_forward: Callable[[], None] | None,
    ) -> InspectedModel:
        prepared = self._prepared()
        name = free_name(model, label, {each.name: each.label for each in self.all})
        say = self._say if not self.all else lambda line: self._say(f"{name}: {line}")
        unhookable = self._unhookable(model)
        tracker = None if self._tracker is None else self._tracker.part(name)
        inspector = LaunchedInspector(
            *(model, self._options, optimizers, self._directory / name, say, unhookable, tracker, self._written),
            before_forward,
        )
        made = InspectedModel(name, label, inspector)
        if before_forward is not None and fills_memory(model):
            # An attached model stays alive after the script drops it.
            for each in self.all:
                each.inspector.pause()
        if before_forward is not None and fills_memory(model):
            made.most_steps = EARLY_FORWARDS
            inspector.note(
                f"{name} takes more than half of the memory that is left: only its first {EARLY_FORWARDS} forwards were "
                "inspected, so that the script can free it"
            )
        # Listed before attaching, which may fail, because the name and the directory are already in use.
        self.all.append(made)
        self._seen.models += 1
        inspector.attach()
        for record in prepared:
            inspector.record(record)
        if not optimizers and before_forward is None:
            self._pause_the_oldest_without_optimizers()
        return made

    def _unhookable(self, model: torch.nn.Module) -> frozenset[int]:
        """Return the ids of the modules that get no hooks: compiled ones, unless their sampled steps run eagerly."""
        if self._options.eager_samples:
            return frozenset()
        return self._compiled.among(submodules(model))

    def _is_over(self, each: InspectedModel) -> bool:
        limits = [limit for limit in (self._options.steps, each.most_steps) if limit is not None]
        return bool(limits) and each.inspector.steps >= min(limits)

    def _pause_the_oldest_without_optimizers(self) -> None:
        without = [each for each in self.all if each.inspector.attached and not each.had_optimizers]
        for each in without[:-_MOST_WITHOUT_OPTIMIZERS]:
            each.inspector.pause()


def fills_memory(model: torch.nn.Module) -> bool:
    """Return whether no other model of this size would fit twice into the memory of a device on which it lies."""
    sizes: Counter[torch.device] = Counter()
    for each in model.parameters():
        if not is_lazy(each):
            sizes[each.device] += each.numel() * each.element_size()
    return any(2 * size > free_memory(device) for device, size in sizes.items() if device.type != "meta")
