"""Plain data on the end of a launched script, its behaviour and its recordings, with the sentences that describe them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpinspect.runtime.briefly import brief, first_line_of

if TYPE_CHECKING:
    from mpinspect.ranges.session import Session
    from mpinspect.shapes.records import MatmulRecording

#: Most notes of a run: a script that repeats a fault must not fill the report.
_MOST_NOTES = 40

# -- how it ended --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a script ended.

    Args:
        words: "ended", "exit status 3", "RuntimeError: ...", "stopped by Ctrl-C".
        status: the exit status; None if a signal ends the process or another program replaces it.
        by_error: whether an uncaught exception ended it.
    """

    words: str = "ended"
    status: int | None = 0
    by_error: bool = False


#: With this outcome the process dies by the signal.
STOPPED = Outcome("stopped by Ctrl-C", None)


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a script that ends with this uncaught exception."""
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    if not isinstance(error, SystemExit):
        return Outcome(brief(error), 1, by_error=True)
    code = error.code
    if code is None or isinstance(code, int):
        # The exit status is the code's low eight bits.
        status = (code or 0) & 0xFF
        if not status:
            return Outcome()
        return Outcome(f"exit status {status}", status)
    return Outcome(f"exit status 1: {first_line_of(code)}", 1)


# -- recordings, and the script's observed behaviour -------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedModel:
    """A model that was inspected.

    Attributes:
        name: its class, its path in a larger model ("ActorCritic.actor") or the script's variable; a number like "-2"
            is appended if the name is already taken.
        session: its record.
        log_dir: the directory of its session file and TensorBoard log; None if writing failed.
    """

    name: str
    session: Session
    log_dir: str | None = None


@dataclass(frozen=True)
class Recordings:
    """Everything recorded in one process.

    Attributes:
        models: in the order of attachment.
        matmuls: the matrix products of one training step; None if not recorded.
        trace: path of the profile of one training step, with --kernels; None without a profile.
    """

    models: list[RecordedModel] = field(default_factory=list)
    matmuls: MatmulRecording | None = None
    trace: Path | None = None


@dataclass
class Seen:
    """Counts of what happened in the process that ran the script, updated as it happens.

    Attributes:
        torch_imported: whether torch was imported.
        optimizers: torch optimizers made.
        models: models inspected.
        backwards: backward passes of any model.
        forwards_without_gradient: calls of outermost modules with gradients disabled.
        steps: optimizer steps.
        forked, spawned: child processes by fork, and by multiprocessing's spawn or forkserver.
        watched_children: spawned children that were inspected too.
        other_frameworks: import names such as "tensorflow".
        notes: further sentences for the report.
    """

    torch_imported: bool = False
    optimizers: int = 0
    models: int = 0
    backwards: int = 0
    forwards_without_gradient: int = 0
    steps: int = 0
    forked: int = 0
    spawned: int = 0
    watched_children: int = 0
    other_frameworks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Add a sentence to the report, unless it is a repetition or there are too many."""
        if sentence not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(sentence)

    def sentences(self) -> list[str]:
        """Return sentences on observed and unobserved parts of the run, the most important first."""
        return [*self._of_torch(), *self._of_frameworks(), *self._of_children(), *self.notes]

    def _of_torch(self) -> list[str]:
        if not self.torch_imported:
            return ["torch was never imported: there was nothing to inspect"]
        if self.watched_children and not (self.optimizers or self.models or self.backwards):
            # The child processes did the training.
            return []
        made = _count(self.optimizers, "optimizer was", "optimizers were") + " made"
        if self.models and not self.backwards and not self.optimizers:
            models = _count(self.models, "model was", "models were")
            return [f"no training was detected: {models} inspected in inference, where each forward is a step"]
        if self.models and not self.backwards:
            return [f"{made}; {_count(self.models, 'model was', 'models were')} called, and no backward ran"]
        if self.models:
            return [f"{made}; {_count(self.models, 'model was', 'models were')} inspected"]
        forwards = _count(self.forwards_without_gradient, "forward", "forwards")
        if not self.backwards and self.forwards_without_gradient:
            return [f"{made}, and {forwards} ran without a backward: no training was detected"]
        if not self.backwards:
            return [
                f"{made} and no backward ran: there were no gradients to inspect (gradients of torch.func are not inspected)"
            ]
        backwards = _count(self.backwards, "backward", "backwards")
        found_none = f"{made} and {backwards} ran, but no module was found whose gradients could be inspected"
        if self.optimizers:
            # If the model was copied or replaced, the optimizer's parameters are not those that get the gradients.
            found_none += ": was the model copied, or made after the optimizer?"
        return [found_none]

    def _of_frameworks(self) -> list[str]:
        if not self.other_frameworks:
            return []
        names = ", ".join(self.other_frameworks)
        return [
            f"{names} was imported, and its computations were not inspected (mpinspect.Recorder counts any framework's arrays)"
        ]

    def _of_children(self) -> list[str]:
        sentences = []
        unwatched = self.spawned - self.watched_children
        if self.forked:
            was, what = _was(self.forked)
            sentences.append(f"{was} forked; computations in {what} were not inspected")
        if self.watched_children:
            was, _ = _was(self.watched_children)
            sentences.append(
                f"{was} spawned and watched: each that trained has a directory of its own (process-0, ...)"
            )
        if unwatched > 0:
            was, what = _was(unwatched)
            sentences.append(f"{was} spawned; computations in {what} were not inspected")
        return sentences


def _was(processes: int) -> tuple[str, str]:
    if processes == 1:
        return "1 process was", "it"
    return f"{processes} processes were", "them"


def _count(number: int, one: str, many: str) -> str:
    if number == 0 and one.endswith(" was"):
        return f"no {one}"
    return f"{number} {one if number == 1 else many}"
