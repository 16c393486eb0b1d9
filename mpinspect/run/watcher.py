"""Watches torch in one process: finds the models that the script trains and has them inspected."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpinspect.reporting.active_run import ActiveRun
from mpinspect.run.models.attach_lock import AttachLock
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.inference import OutermostCalls
from mpinspect.run.models.torch_patches import TorchPatches
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Recordings, Seen
from mpinspect.runtime.guard import Guarded, guarded, hides_modes
from mpinspect.runtime.wrappers import unwrapped

if TYPE_CHECKING:
    from mpinspect.ranges.faults.measure.prepared import Preparation
    from mpinspect.ranges.records import Record
    from mpinspect.run.models.attaching import Attacher
    from mpinspect.run.models.backwards import BackwardSearch
    from mpinspect.run.models.inspected_models import InspectedModels
    from mpinspect.run.models.one_step import OneStep


class Watcher(Guarded):
    """Receives the calls that TorchPatches intercepts and passes them to the parts that find, inspect and record.

    Args:
        options: the options of the launch.
        directory: each model gets a directory below it.
        say: callable that prints a line to stderr.
        seen: the counts to update.
        tracker: gets the models' scalars.
        written: called after each write of a model's record, on the thread that writes; must not raise.
    """

    def __init__(
        self,
        options: LaunchOptions,
        directory: Path,
        say: Callable[[str], None],
        seen: Seen,
        tracker: ActiveRun | None = None,
        written: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(seen.note)
        self.seen, self._options, self._directory = seen, options, directory
        self._say, self._tracker, self._written = say, tracker, written
        self._active = False
        self._known: set[int] = set()
        self._lock = AttachLock()
        self._compiled = Compiled()
        self._patches = TorchPatches(self)
        self._parts: _Parts | None = None
        self._preparation: Preparation | None = None
        #: Whether that search has ended because something was compiled.
        self._ends_search = False
        #: Finds the models of a script that trains nothing; None once it trains.
        self._outermost: OutermostCalls | None = None

    def install(self) -> None:
        """Patch torch; most of mpinspect is imported only when the script makes an optimizer or runs a backward."""
        self._active = True
        self._patches.install()
        self._prepare()
        self._outermost = OutermostCalls(self.model_called, self.seen)
        self._outermost.begin()

    @guarded
    def _prepare(self) -> None:
        """Have the script's operators before its first step computed twice, unless it is one of several ranks."""
        if int(os.environ.get("WORLD_SIZE") or 1) == 1:
            from mpinspect.ranges.faults.measure.prepared import Preparation

            self._preparation = Preparation(self.seen.note)
            self._preparation.begin()

    @guarded
    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.end()

    def _prepared(self) -> list[Record]:
        if self._preparation is None:
            return []
        # A training may begin after an inference.
        return self._preparation.records() if self._outermost is None else self._preparation.so_far()

    def finish(self) -> Recordings:
        """Remove the patches, detach from every model (waits for the GPU) and return the recordings. Never raises."""
        try:
            return self._finish()
        except Exception as error:
            self.seen.note(f"mpinspect failed while it finished: {error!r}")
            return Recordings()

    def so_far(self) -> Recordings:
        """Bring the tracker up to date and return the recordings while the script continues. Waits for the GPU."""
        with self._lock.held():
            parts = self._parts
            if parts is None:
                return Recordings()
            parts.models.bring_tracker_up_to_date()
            return Recordings(parts.models.records(), parts.one_step.matmuls, parts.one_step.trace)

    @guarded
    def broke_off(self, error: BaseException) -> None:
        """Note the step and phase that the script's last exception interrupted; call it while the models are alive."""
        if self._parts is not None:
            self._parts.models.broke_off(error)

    def abandon(self) -> None:
        """Stop everything without writing, in a forked child.

        Takes no lock: another thread of the parent may have held it at the fork.
        """
        self._active = False
        if self._outermost is not None:
            self._outermost.end()
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.attaching.give_up()
            parts.one_step.abandon()
            parts.models.abandon()
        self._patches.remove()

    def attached(self) -> None:
        """Move our listeners last, and stop watching backwards if not needed; called after attaching to a model."""
        self._patches.listen_last()
        parts = self._made()
        by_hand = any(not each.had_optimizers for each in parts.models.all)
        self._patches.watch_backwards_ends(by_hand)
        self._patches.watch_backwards(by_hand or not parts.backwards.settled)

    def model_called(self, model: torch.nn.Module) -> None:
        """Inspect a model that the script calls, as long as nothing is trained."""
        with self._lock.held():
            parts = self._made()
            if not any(each.inspector.model is unwrapped(model) for each in parts.models.all):
                parts.attaching.inspect_inference(model, self._forward_begins)
                parts.one_step.inference_begins(unwrapped(model))

    @guarded
    def _forward_begins(self) -> None:
        """Handle that a model of an inference is about to run again."""
        if self._active and self._parts is not None:
            with self._lock.held():
                self._parts.one_step.before_forward()
                self._parts.models.stop_after_enough_steps(None)

    def _training_begins(self) -> None:
        """Drop the records of models that were only called so far, since the script trains."""
        if self._outermost is None:
            return
        self._outermost.end()
        self._outermost, parts, self._parts = None, self._parts, None
        if parts is not None:
            parts.attaching.give_up()
            parts.one_step.abandon()
            parts.models.drop()

    # -- called by TorchPatches: these must not raise --------------------------------------------------------------------

    @guarded
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the models of a new optimizer; called when torch's ``Optimizer.__init__`` has run."""
        if not self._active or not isinstance(getattr(optimizer, "param_groups", None), list):
            return
        with self._lock.held():
            self._training_begins()
            self.seen.optimizers += 1
            self._known.add(id(optimizer))
            parts = self._made()
            parts.models.pause_if_due()
            parts.attaching.add(optimizer)
            parts.backwards.search_again()
            self._patches.watch_backwards(not parts.backwards.settled)

    @guarded
    def backward_begins(self, tensors: Any) -> None:
        """Attach to models that the backward will reach; called when a backward is about to run."""
        if not self._active:
            return
        with self._lock.held():
            self._training_begins()
            self.seen.backwards += 1
            parts = self._made()
            parts.backwards.begins(tensors)
            parts.models.stop_after_enough_steps(None)

    @guarded
    def gradients_asked(self, outputs: Any, inputs: Any, makes_graph: Any) -> None:
        """End the preparation; called when ``torch.autograd.grad`` is about to run."""
        self._end_preparation()

    @guarded
    def gradients_returned(self, outputs: Any, inputs: Any, makes_graph: Any, gradients: Any) -> None:
        """Attach to models whose gradients ``torch.autograd.grad`` has returned: the loop updates them itself, or by masters."""
        if not self._active:
            return
        with self._lock.held():
            given = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
            has_models = self._outermost is not None and self._parts is not None and self._parts.models.all
            if has_models and not any(isinstance(each, torch.nn.Parameter) for each in given):
                # Gradients of inputs, as of a saliency map, train nothing.
                return
            self._training_begins()
            parts = self._made()
            if self.seen.optimizers and parts.backwards.settled:
                return
            self.seen.backwards += 1
            parts.backwards.asked_for(inputs)
            parts.models.stop_after_enough_steps(None)
            if not self._known:
                parts.one_step.backward_ended()

    @guarded
    def backward_ended(self, tensors: Any, _: None) -> None:
        """Begin or end the recorded step of a script without optimizers; called when a backward has run."""
        self._end_preparation()
        if self._active and self._parts is not None and not self._known:
            with self._lock.held():
                self._parts.one_step.backward_ended()

    @guarded
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the recorded step as inside the optimizer; called when ``optimizer.step()`` is about to run."""
        if self._active and self._parts is not None:
            self._parts.one_step.optimizer_steps(optimizer)

    @guarded
    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step and update the models and recordings; called when ``optimizer.step()`` has run."""
        if not self._active:
            return
        self._end_preparation()
        with self._lock.held():
            self.seen.steps += 1
            if id(optimizer) not in self._known:
                # The optimizer was unpickled or copied, so its __init__ did not run.
                self.optimizer_made(optimizer)
            parts = self._made()
            parts.models.pause_if_due()
            parts.models.stop_after_enough_steps(optimizer)
            parts.one_step.optimizer_stepped(optimizer)

    def inference_mode_changes(self) -> None:
        """End what must not span an end of ``torch.inference_mode``; called when it is about to begin or to end."""
        # An inspector's own use lies within an entrance, which has taken the modes off.
        if self._active and not hides_modes():
            if self._preparation is not None and self._preparation.is_over:
                self._end_preparation()
            if self._parts is not None:
                self._parts.one_step.inference_mode_changes()

    @guarded
    def module_compiled(self, given: object) -> None:
        """Remove hooks from the compiled modules; called when ``torch.compile(given)`` has run."""
        if not self._active:
            return
        # Some versions of torch compile nothing under a dispatch mode.
        self._end_preparation()
        with self._lock.held():
            if self._outermost is not None:
                # torch warns of global hooks on compiled modules.
                self._outermost.end()
                self._ends_search = True
            self._compiled.add(given)
            if self._parts is not None:
                self._parts.attaching.leave_compiled()
                self._parts.models.leave_compiled()
                self._parts.one_step.leave_compiled()

    @guarded
    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Store the scaled loss for the search; called when ``scaler.scale(given)`` has returned ``scaled``."""
        if self._active and self._parts is not None:
            self._parts.one_step.loss_scaled(scaler, given, scaled)
            if not self._parts.backwards.settled:
                with self._lock.held():
                    self._parts.backwards.scaled(scaler, scaled)

    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Watch for a skipped step; called when ``scaler.step(optimizer)`` is about to run."""
        if self._active and self._parts is not None:
            self._parts.one_step.scaler_steps()

    def scaler_unscales(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the inspectors record this event."""

    def scaler_unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the inspectors record this event."""

    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Handle a skipped step; called when ``scaler.step(optimizer)`` has returned."""
        if self._active and self._parts is not None:
            with self._lock.held():
                self._parts.one_step.scaler_stepped(optimizer)

    def _finish(self) -> Recordings:
        self._active = False
        self._end_preparation()
        with self._lock.held():
            self._patches.remove()
            parts = self._parts
            if self._outermost is not None:
                self._outermost.end()
                self._note_unseen(self._outermost)
                for sentence in self._preparation.absorbed() if self._preparation is not None else ():
                    self.seen.note(sentence)
            if parts is None:
                return Recordings()
            parts.attaching.give_up()
            parts.one_step.give_up()
            # The recorded step of an inference was above it on the stack.
            self._end_preparation()
            parts.models.end()
            self.seen.backwards = max(self.seen.backwards, sum(each.inspector.backwards for each in parts.models.all))
            records = parts.models.records()
        self.seen.models = len(records)
        return Recordings(records, parts.one_step.matmuls, parts.one_step.trace)

    def _note_unseen(self, outermost: OutermostCalls) -> None:
        """Note, of a script without a training, which models were not looked for."""
        if self._ends_search:
            self.seen.note("models that were first called after torch.compile were not inspected")
        if outermost.any_elsewhere and not (self._parts and self._parts.models.all):
            self.seen.note("models were called on other threads than the script's first one, and not inspected")

    def _made(self) -> _Parts:
        if self._parts is None:
            with warnings.catch_warnings():
                # Hide warnings of libraries imported here: the script may turn warnings into errors.
                warnings.simplefilter("ignore")
                self._parts = self._make_parts()
        return self._parts

    def _make_parts(self) -> _Parts:
        from mpinspect.run.models.attaching import Attacher
        from mpinspect.run.models.backwards import BackwardSearch
        from mpinspect.run.models.inspected_models import InspectedModels
        from mpinspect.run.models.one_step import OneStep

        seen, lock, compiled = self.seen, self._lock, self._compiled
        models = InspectedModels(
            self._options,
            self._directory,
            self._say,
            seen,
            lock,
            compiled,
            self._tracker,
            self._written,
            self._prepared,
        )
        attaching = Attacher(models, seen, lock, compiled, self.attached)
        one_step = OneStep(self._options, self._directory, models, seen, compiled)
        return _Parts(models, attaching, BackwardSearch(attaching, seen), one_step)


class _Parts(NamedTuple):
    """The objects that find, inspect and record models; created at the first optimizer or backward."""

    models: InspectedModels
    attaching: Attacher
    backwards: BackwardSearch
    one_step: OneStep
