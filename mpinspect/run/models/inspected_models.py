"""The models of one process that are, or were, inspected: each has one record, however many optimizers and phases it has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from mpinspect.run.models.attach_lock import Turns
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.inspected_model import InspectedModel
from mpinspect.run.models.inspector import LaunchedInspector
from mpinspect.run.models.moments import inside_ours
from mpinspect.run.models.naming import Label, free_name
from mpinspect.run.models.owners import submodules
from mpinspect.run.options import LaunchOptions
from mpinspect.run.seen import RecordedModel, Seen

#: Models recorded at most: a script that trains hundreds (a sweep, federated clients) is understood from the first.
MOST_MODELS = 16
#: Models without any optimizer that are held at once. Nothing tells when the script has let go of one.
_MOST_WITHOUT_OPTIMIZERS = 4


class InspectedModels:
    """All of them.

    Args:
        options: the launch's.
        directory: each model gets a directory below it.
        say: writes a line to stderr.
        seen: the counts.
        turns: the lock around all of it.
        compiled: what no hook may be put on.
    """

    def __init__(
        self,
        options: LaunchOptions,
        directory: Path,
        say: Callable[[str], None],
        seen: Seen,
        turns: Turns,
        compiled: Compiled,
    ) -> None:
        self._options = options
        self._directory = directory
        self._say = say
        self._seen = seen
        self._turns = turns
        self._compiled = compiled
        self._release_is_due = False
        self.all: list[InspectedModel] = []

    def inspect(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], label: Label
    ) -> InspectedModel | None:
        """The record of this model, its inspector attached; None where there are too many already."""
        known = next((each for each in self.all if each.inspector.model is model), None)
        if known is None and self.is_full:
            self.note_that_it_is_full()
            return None
        if known is None:
            known = self._new(model, optimizers, label)
        elif not self._is_over(known):
            known.inspector.resume(optimizers, self._unhookable(model))
        for optimizer in optimizers:
            known.join(optimizer, self._optimizer_gone)
        return known

    @property
    def is_full(self) -> bool:
        """Whether no further model is inspected."""
        return len(self.all) >= MOST_MODELS

    def note_that_it_is_full(self) -> None:
        """Another one came."""
        self._seen.note(f"the first {MOST_MODELS} models that were trained were inspected, and none after them")

    def holding(self, parameters: Collection[int]) -> InspectedModel | None:
        """The model that has all these parameters, by id."""
        return next((each for each in self.all if each.holds(parameters)), None)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> InspectedModel | None:
        """The model that this optimizer steps, if it is inspected at the moment."""
        of_it = (each for each in self.all if each.is_stepped_by(optimizer))
        return next((each for each in of_it if each.inspector.attached), None)

    def release_if_due(self) -> None:
        """Do what could not be done when an optimizer died."""
        if self._release_is_due:
            self._release()

    def _optimizer_gone(self, _: object) -> None:
        # It comes at any moment, and the thread whose turn it is may be waiting for what this one holds.
        with self._turns.mine_if_free() as is_mine:
            if not is_mine or inside_ours(sys._getframe().f_back):
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

    def leave_compiled(self) -> None:
        """Something was compiled: take our hooks off it."""
        for each in self.all:
            model = each.inspector.model
            if model is not None and each.inspector.attached:
                each.inspector.unhook(self._unhookable(model))

    def stop_after_enough_steps(self, optimizer: torch.optim.Optimizer | None) -> None:
        """End the inspection of models that made as many steps as were asked for.

        Args:
            optimizer: of those that it steps; None: of those without any. Others may be at work on threads of their own.
        """
        for each in self.all:
            if each.inspector.attached and self._is_over(each) and each.is_stepped_by(optimizer):
                each.inspector.end()

    def broke_off(self, error: BaseException) -> None:
        """An exception is about to end the script."""
        for each in self.all:
            if each.inspector.attached:
                each.inspector.broke_off(error)

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

    def records(self) -> list[RecordedModel]:
        """What was recorded of each. One that can't be read is noted and left out."""
        records = []
        for each in self.all:
            try:
                records.append(each.record())
            except Exception as error:
                self._seen.note(f"the record of {each.name} could not be read: {error!r}")
        return records

    def _new(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], label: Label) -> InspectedModel:
        name = free_name(model, label, {each.name: each.label for each in self.all})
        say = self._say if not self.all else lambda line: self._say(f"{name}: {line}")
        unhookable = self._unhookable(model)
        inspector = LaunchedInspector(model, self._options, optimizers, self._directory / name, say, unhookable)
        made = InspectedModel(name, label, inspector)
        # Before anything can fail: it has its name, and its directory.
        self.all.append(made)
        self._seen.models += 1
        inspector.attach()
        if not optimizers:
            self._pause_the_oldest_without_optimizers()
        return made

    def _unhookable(self, model: torch.nn.Module) -> frozenset[int]:
        return self._compiled.among(submodules(model))

    def _is_over(self, each: InspectedModel) -> bool:
        return self._options.steps is not None and each.inspector.steps >= self._options.steps

    def _pause_the_oldest_without_optimizers(self) -> None:
        without = [each for each in self.all if each.inspector.attached and not each.had_optimizers]
        for each in without[:-_MOST_WITHOUT_OPTIMIZERS]:
            each.inspector.pause()
