"""What a launched script was seen to do, and what it was not seen to do: plain data and the sentences it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpinspect.ranges.session import Session
    from mpinspect.shapes.records import MatmulRecording

#: How many different notes are kept; a script that loops over a fault must not fill the report.
_MOST_NOTES = 40


@dataclass(frozen=True)
class RecordedModel:
    """One model of the script that was inspected.

    Attributes:
        name: its class, its path in a larger model ("ActorCritic.actor") or what the script calls it; "-2" and so on
            behind it where there are several.
        session: what was recorded of it.
        log_dir: the directory of its session file and TensorBoard log; None where none could be written.
    """

    name: str
    session: Session
    log_dir: str | None = None


@dataclass(frozen=True)
class Parts:
    """What the torch side of a launch hands over at the end.

    Attributes:
        models: one a model, in the order in which they were attached.
        matmuls: the matrix products of one real training step, with --lint; None without, or where it was given up.
        trace: the trace of one real training step, with --kernels; None without, or where it was refused.
        notes: what the user should know about the watching itself, a sentence each.
    """

    models: list[RecordedModel] = field(default_factory=list)
    matmuls: MatmulRecording | None = None
    trace: Path | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """Plain counts of what happened in the process that ran the script; changed as it happens.

    Attributes:
        torch_imported: whether the script, or what it imports, imported torch.
        optimizers: torch optimizers that were made.
        models: models an inspector was attached to.
        backwards: backward passes that ran, of whatever model.
        forwards_without_gradient: calls of outermost modules with gradients off, or of models that are never trained.
        steps: optimizer steps that ran.
        forked, spawned: child processes by fork, and by multiprocessing's spawn or forkserver.
        watched_children: of the spawned ones, those that were watched themselves.
        other_frameworks: such as "tensorflow", by their import names.
        notes: further sentences.
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
        """Keep a sentence, once."""
        if sentence not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(sentence)

    def sentences(self) -> list[str]:
        """What was seen and what was not, in plain words, the most important first."""
        return [*self._of_torch(), *self._of_frameworks(), *self._of_children(), *self.notes]

    def _of_torch(self) -> list[str]:
        if not self.torch_imported:
            return ["torch was never imported: there was nothing to inspect"]
        if self.watched_children and not (self.optimizers or self.models or self.backwards):
            # It had others do the training.
            return []
        made = _count(self.optimizers, "optimizer was", "optimizers were") + " made"
        if self.models and not self.backwards:
            return [f"{made}; {_count(self.models, 'model was', 'models were')} called, and no backward ran"]
        if self.models:
            return [f"{made}; {_count(self.models, 'model was', 'models were')} inspected"]
        forwards = _count(self.forwards_without_gradient, "forward", "forwards")
        if not self.backwards and self.forwards_without_gradient:
            return [f"{made}, and {forwards} ran without a backward: this script trained nothing that could be seen"]
        if not self.backwards:
            return [
                f"{made} and no backward ran: there were no gradients to inspect (those of torch.autograd.grad and torch.func "
                "are not seen)"
            ]
        backwards = _count(self.backwards, "backward", "backwards")
        return [f"{made} and {backwards} ran, but no module was found whose gradients could be inspected"]

    def _of_frameworks(self) -> list[str]:
        if not self.other_frameworks:
            return []
        names = ", ".join(self.other_frameworks)
        return [
            f"{names} was imported: what it computed was not seen (mpinspect.Recorder counts any framework's arrays)"
        ]

    def _of_children(self) -> list[str]:
        sentences = []
        unwatched = self.spawned - self.watched_children
        if self.forked:
            was, what = _was(self.forked)
            sentences.append(f"{was} forked; what {what} computed was not seen")
        if self.watched_children:
            was, _ = _was(self.watched_children)
            sentences.append(
                f"{was} spawned and watched: each that trained has a directory of its own (process-0, ...)"
            )
        if unwatched > 0:
            was, what = _was(unwatched)
            sentences.append(f"{was} spawned and not watched; what {what} computed was not seen")
        return sentences


def _was(processes: int) -> tuple[str, str]:
    return ("1 process was", "it") if processes == 1 else (f"{processes} processes were", "they")


def _count(number: int, one: str, many: str) -> str:
    return f"no {one}" if number == 0 and one.endswith(" was") else f"{number} {one if number == 1 else many}"
