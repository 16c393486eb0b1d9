"""Everything that watches torch in one process, tied together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpinspect.run.models.attach_lock import Turns
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.torch_patches import Noticing
from mpinspect.run.options import LaunchOptions
from mpinspect.run.seen import Parts, Seen
from mpinspect.runtime.guard import Guarded, guarded

if TYPE_CHECKING:
    from mpinspect.run.models.attaching import Attaching
    from mpinspect.run.models.backwards import Backwards
    from mpinspect.run.models.inspected_models import InspectedModels
    from mpinspect.run.models.one_step import OneStep


class Watching(Guarded):
    """Hears what noticing tells and passes it on.

    Args:
        options, directory, say: see Watcher.
        seen: the counts.
    """

    def __init__(self, options: LaunchOptions, directory: Path, say: Callable[[str], None], seen: Seen) -> None:
        super().__init__(seen.note)
        self._options = options
        self._directory = directory
        self._say = say
        self._seen = seen
        self._active = False
        self._known: set[int] = set()
        self._turns = Turns()
        self._compiled = Compiled()
        self._noticing = Noticing(self)
        self._finding: _Finding | None = None

    def install(self) -> None:
        """Begin. Little is imported until there is something to find."""
        self._active = True
        self._noticing.install()

    def finish(self) -> Parts:
        """Leave everything as it was, and hand over."""
        self._active = False
        with self._turns.mine():
            self._noticing.remove()
            if self._finding is None:
                return Parts()
            self._finding.attaching.give_up()
            self._finding.one_step.give_up()
            models = self._finding.models
            models.end()
            self._seen.backwards = max(self._seen.backwards, sum(each.inspector.backwards for each in models.all))
            records = models.records()
        self._seen.models = len(records)
        return Parts(records, self._finding.one_step.matmuls, self._finding.one_step.trace)

    @guarded
    def broke_off(self, error: BaseException) -> None:
        """An exception is about to end the script, whose objects are all still there."""
        if self._finding is not None:
            self._finding.models.broke_off(error)

    def abandon(self) -> None:
        """This is a forked child. No lock is taken: another thread of the parent may have held it."""
        self._active = False
        if self._finding is not None:
            self._finding.attaching.give_up()
            self._finding.one_step.abandon()
            self._finding.models.abandon()
        self._noticing.remove()

    # -- what noticing tells ------------------------------------------------------------------------------------------

    @guarded
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's ``__init__`` has run."""
        if not self._active or not isinstance(getattr(optimizer, "param_groups", None), list):
            return
        with self._turns.mine():
            self._seen.optimizers += 1
            self._known.add(id(optimizer))
            finding = self._found()
            finding.models.release_if_due()
            finding.attaching.add(optimizer)
            finding.backwards.search_again()
            self._noticing.watch_backwards(not finding.backwards.settled)

    @guarded
    def backward_begins(self, tensors: Any) -> None:
        """A backward is about to run."""
        if not self._active:
            return
        with self._turns.mine():
            self._seen.backwards += 1
            finding = self._found()
            finding.backwards.begins(tensors)
            finding.models.stop_after_enough_steps(None)

    @guarded
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` is about to run."""
        if self._active and self._finding is not None:
            self._finding.one_step.optimizer_steps(optimizer)

    @guarded
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` has run."""
        if not self._active:
            return
        with self._turns.mine():
            self._seen.steps += 1
            if id(optimizer) not in self._known:
                # It was unpickled or copied, so that its __init__ did not run.
                self.optimizer_made(optimizer)
            finding = self._found()
            finding.models.release_if_due()
            finding.models.stop_after_enough_steps(optimizer)
            finding.one_step.optimizer_stepped(optimizer)

    @guarded
    def module_compiled(self, given: object) -> None:
        """``torch.compile(given)`` has run."""
        if not self._active:
            return
        with self._turns.mine():
            self._compiled.add(given)
            if self._finding is not None:
                self._finding.attaching.leave_compiled()
                self._finding.models.leave_compiled()
                self._finding.one_step.leave_compiled()

    @guarded
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """``scaler.scale(given)`` returned ``scaled``."""
        if self._active and self._finding is not None and not self._finding.backwards.settled:
            with self._turns.mine():
                self._finding.backwards.scaled(scaler, scaled)

    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is about to run."""
        if self._active and self._finding is not None:
            self._finding.one_step.scaler_steps()

    @guarded
    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` has returned."""
        if self._active and self._finding is not None:
            with self._turns.mine():
                self._finding.one_step.scaler_stepped(optimizer)

    def _found(self) -> _Finding:
        if self._finding is None:
            with warnings.catch_warnings():
                # What libraries have to say when they are imported is not for the script, whose warnings may be errors.
                warnings.simplefilter("ignore")
                self._finding = _Finding(self._options, self._directory, self._say, self._seen, self)
        return self._finding

    def attached(self) -> None:
        """A model was attached to."""
        self._noticing.listen_last()
        finding = self._found()
        by_hand = any(not each.had_optimizers for each in finding.models.all)
        counts_backwards = by_hand and self._options.steps is not None
        self._noticing.watch_backwards(counts_backwards or not finding.backwards.settled)


class _Finding:
    """What finds, inspects and records: made, and its modules imported, at the first optimizer or backward."""

    models: InspectedModels
    attaching: Attaching
    backwards: Backwards
    one_step: OneStep

    def __init__(
        self,
        options: LaunchOptions,
        directory: Path,
        say: Callable[[str], None],
        seen: Seen,
        watching: Watching,
    ) -> None:
        from mpinspect.run.models.attaching import Attaching
        from mpinspect.run.models.backwards import Backwards
        from mpinspect.run.models.inspected_models import InspectedModels
        from mpinspect.run.models.one_step import OneStep

        turns, compiled = watching._turns, watching._compiled
        self.models = InspectedModels(options, directory, say, seen, turns, compiled)
        self.attaching = Attaching(self.models, seen, turns, compiled, watching.attached)
        self.backwards = Backwards(self.attaching, seen)
        self.one_step = OneStep(options, directory, self.models, seen, compiled)
