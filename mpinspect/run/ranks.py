"""Adds up what the processes of a job recorded of each model: one session a model, however many ranks. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from mpinspect.ranges.analysis.rank_findings import ended_early
from mpinspect.ranges.analysis.ranks import LEFT, LEFT_ORDER, NotOneModelError, RankSum, ranks_named
from mpinspect.ranges.session import Measurement, Session
from mpinspect.run.record import KILLED, ProcessRecord

_RANK = re.compile(r"rank(\d+)")
#: What torch's collectives raise on the ranks that are left when another is gone.
_BEREFT = re.compile(r"Dist\w*Error|[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|NCCL|[Gg]loo|[Tt]imed out")


class ModelsOfRanks:
    """The models of a run, with the sessions of ranks added up as they come: one is in memory at a time, and the sums.

    Args:
        each: whether every rank's models stay by themselves.
    """

    def __init__(self, *, each: bool = False) -> None:
        self._each = each
        #: Sums of ranks and single sessions by the model's name, in the order in which they were added.
        self._models: dict[str, RankSum | Session] = {}
        self._jobs: dict[str, str] = {}
        self._present: set[int] = set()
        self._world = 0
        self._left: list[Measurement] = []
        #: Sentences on what was not added up, and why.
        self.notes: list[str] = []

    def add(self, process: str, name: str, session: Session, *, world_size: int = 1, job: str = "") -> None:
        """Add what a process recorded of a model.

        Args:
            process: the process's directory in the run directory: "rank1", "rank0/process-0"; "" for the run itself.
            name: the model's.
            session: the record; its rank is the process's if it has none.
            world_size, job: as the process was started with.
        """
        alone = f"{process}/{name}" if process else name
        found = _with_rank(session, process, world_size)
        if found.info.world_size < 2 or self._each:
            self._models[alone] = session
            return
        # Inspectors that a script makes itself, one log_dir per rank, are distinguished by their directories.
        name = name if process else found.info.model or name
        total = self._models.setdefault(name, RankSum())
        try:
            # A process whose record is missing has no job: only its rank shows where it belongs.
            if job and job != (self._jobs.setdefault(name, job) or job):
                raise NotOneModelError("it is of another run: two runs are in one folder")
            if not isinstance(total, RankSum):
                raise NotOneModelError("another model has its name")
            total.add(found)
        except NotOneModelError as error:
            self.notes.append(f"{alone} is shown by itself: {error}")
            self._models[alone] = session
        self._present.add(found.info.rank)
        self._world = max(self._world, found.info.world_size)

    def ended(self, process: str, record: ProcessRecord) -> None:
        """Take down how a process ended, if it is a rank's and ended before its script did."""
        found = left_early(process, record)
        if found is not None:
            self._left.append(found)

    @property
    def died(self) -> str:
        """A sentence on the ranks that ended before their script did; "" if none did."""
        found = ended_early(Session(measurements=tuple(self._left)))
        return next((finding.message for finding in found), "")

    def models(self) -> Iterator[tuple[str, Session]]:
        """Yield each model's name and session, which of several ranks is their sum."""
        absent = [rank for rank in range(self._world) if rank not in self._present]
        if absent:
            self.notes.insert(0, f"{ranks_named(absent)} of {self._world:,} left nothing that can be added")
        for name, found in self._models.items():
            yield name, found.session(absent, self._left) if isinstance(found, RankSum) else found


def left_early(process: str, record: ProcessRecord) -> Measurement | None:
    """Return how a rank's process ended before its script did; None if it did not, or is no rank's."""
    match = _RANK.fullmatch(process)
    if match is None or not record.ended_early:
        return None
    kind = "itself"
    words = f"{'by' if record.by_error else 'with'} {record.outcome}"
    if record.outcome == KILLED:
        kind, words = "killed", record.outcome.removeprefix("ended ")
    elif record.by_error and _BEREFT.search(record.outcome):
        kind, words = "bereft", f"by {record.outcome.partition(':')[0]} in a collective"
    return Measurement(LEFT, rank=int(match[1]), figures={"order": float(LEFT_ORDER.index(kind))}, text=words)


def _with_rank(session: Session, process: str, world_size: int) -> Session:
    """Return the session with its rank; a session written by an older version has that of its process."""
    match = _RANK.match(process)
    if session.info.world_size > 1 or match is None:
        return session
    rank = int(match[1])
    return replace(session, info=replace(session.info, rank=rank, world_size=max(world_size, rank + 1, 2)))
