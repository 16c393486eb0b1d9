"""Adds up the recordings of a job's processes: one session a model, however many ranks. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mpinspect.ranges.analysis.ranks import ENDED_EARLY, ENDINGS, NotOneModelError, RankSum, ranks_named
from mpinspect.ranges.faults.name.ranks import RANK_ENDED_EARLY, ended_early
from mpinspect.ranges.session import Measurement, RunInfo, Session
from mpinspect.ranges.store import FILE_NAME, SessionError, read_session
from mpinspect.reporting.words import number_of
from mpinspect.run.options import MOST_RANKS
from mpinspect.run.record import KILLED, STILL_RUNNING, STOPPED, ProcessRecord, read_record
from mpinspect.runtime.background import give_way

_RANK = re.compile(r"rank(\d+)")
#: Errors of torch's collectives on the remaining ranks after another has ended.
_IN_A_COLLECTIVE = re.compile(
    r"Dist\w*Error|[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|NCCL|[Gg]loo|[Tt]imed out"
)


class ModelsOfRanks:
    """Sums the sessions of ranks, model by model. Besides the sums only one session is in memory at a time.

    Args:
        each: whether to leave every rank's models separate.
    """

    def __init__(self, *, each: bool = False) -> None:
        self._each = each
        #: Sums of ranks and single sessions by the model's name, in the order of addition.
        self._models: dict[str, RankSum | Session] = {}
        #: The job of the first process whose record names one.
        self._job = ""
        #: Records by the process's directory.
        self._records: dict[str, ProcessRecord] = {}
        #: Ranks with an added session, each with a phrase if it has not ended; and ranks with unreadable files.
        self._present: dict[int, str] = {}
        self._unreadable: set[int] = set()
        self._world = 0
        self._ended_early: list[Measurement] = []
        #: Sentences on omissions, with their reasons.
        self.notes: list[str] = []

    def process(self, process: str, record: ProcessRecord) -> None:
        """Register a process by its directory in the run ("rank1", "rank0/process-0"; "" for the run itself) and run.json."""
        self._records[process] = record
        if found := early_end(process, record):
            self._ended_early.append(found)
        if _RANK.fullmatch(process):
            self._world = max(self._world, record.world_size)

    def add(self, process: str, name: str, session: Session) -> None:
        """Add a registered process's session of the model ``name``; without a rank of its own it gets the process's."""
        record = self._records.get(process, ProcessRecord())
        alone = f"{process}/{name}" if process else name
        found = _with_rank(session, process, record.world_size)
        rank, world = found.info.rank, found.info.world_size
        is_rank = world > 1 or _RANK.match(process) is not None
        if is_rank and rank < world <= MOST_RANKS:
            self._present[rank] = _unfinished(session, record)
            self._world = max(self._world, world)
        if self._each or not is_rank:
            self._models[alone] = session
            return
        if not process:
            # Inspectors that a script makes itself, one log_dir per rank, are distinguished by their directories.
            name = found.info.model or name
        total = self._models.setdefault(name, RankSum())
        try:
            if not rank < world <= MOST_RANKS:
                raise NotOneModelError(f"it claims to be rank {rank:,} of {world:,}")
            # A process without a record has no job: only its rank shows where it belongs.
            self._job = self._job or record.job
            if record.job not in ("", self._job):
                raise NotOneModelError("it belongs to another run: two runs share one folder, so move one away")
            if not isinstance(total, RankSum):
                raise NotOneModelError("another model has its name")
            total.add(found)
        except NotOneModelError as error:
            self.notes.append(f"{alone} is shown separately: {error}")
            self._models[alone] = session
            if isinstance(total, RankSum) and not total.ranks:
                del self._models[name]

    def unreadable(self, process: str) -> None:
        """Register that a model of a process can't be read."""
        if match := _RANK.match(process):
            self._unreadable.add(int(match[1]))

    def read(self, place: Path) -> None:
        """Add the models that a process has written to its directory so far; note which can't be read. Never raises."""
        self.process(place.name, read_record(place))
        for file in sorted(place.glob(f"*/{FILE_NAME}")):
            give_way()
            try:
                self.add(place.name, file.parent.name, read_session(file))
            except (SessionError, OSError) as error:
                self.unreadable(place.name)
                self.notes.append(f"{place.name}/{file.parent.name} can't be read: {str(error).rstrip('.')}")

    @property
    def ended_early(self) -> str:
        """A sentence on the ranks that ended before their script did; "" if every rank ended with it."""
        session = Session(RunInfo(world_size=self._world), measurements=tuple(self._ended_early))
        return next((RANK_ENDED_EARLY.finding(each, session).message for each in ended_early(session)), "")

    def models(self) -> Iterator[tuple[str, Session]]:
        """Yield each model's name and session; several ranks' sessions are yielded as their sum."""
        without_folder = self._why_no_folder()
        absent: dict[int, str] = {}
        ranks: dict[str, list[int]] = {}
        for rank in range(self._world):
            if rank not in self._present:
                absent[rank] = self._why_absent(rank, without_folder)
                ranks.setdefault(absent[rank], []).append(rank)
        left = "left no record that can be added"
        self.notes[:0] = [f"{ranks_named(of)} of {self._world:,} {left}: {why}" for why, of in ranks.items()]
        unfinished = {rank: why for rank, why in self._present.items() if why}
        for name, found in self._models.items():
            if isinstance(found, RankSum):
                found = found.session(absent, unfinished, self._ended_early)
            yield name, found

    def _why_absent(self, rank: int, without_folder: str) -> str:
        """Return why no session of a rank was added."""
        if rank in self._unreadable:
            return "its files can't be read"
        record = self._records.get(f"rank{rank}")
        if record is not None:
            return f"no model was recorded ({record.outcome})"
        return without_folder

    def _why_no_folder(self) -> str:
        """Return a sentence on why some ranks may have no folder here."""
        known = {each.host: each.ranks_here for name, each in self._records.items() if _RANK.fullmatch(name)}
        if not known or not all(known.values()):
            return "no folder here"
        elsewhere = self._world - sum(number or 0 for number in known.values())
        if elsewhere > 0:
            return (
                f"no folder here, and {number_of(elsewhere, 'rank')} started on other machines: copy their folders "
                "(rank0, rank1, ...) to these"
            )
        return "no folder, though started on this machine: ended before there was one, or ran without mpinspect"


def _unfinished(session: Session, record: ProcessRecord) -> str:
    """Return a phrase, to follow a rank's name, on a session that has not ended; "" if it has, or if another note covers it."""
    if session.progress.ended:
        return ""
    if record.outcome == STILL_RUNNING:
        return f"had not ended ({STILL_RUNNING})"
    if not record.ended or record.ended_early:
        return ""
    return "left a session file that is damaged or cut off"


def early_end(process: str, record: ProcessRecord) -> Measurement | None:
    """Return how a rank's process ended before its script did; None for other endings and for other processes."""
    match = _RANK.fullmatch(process)
    if match is None or not record.ended_early:
        return None
    if record.outcome in (KILLED, STOPPED):
        kind = {KILLED: "killed", STOPPED: "stopped"}[record.outcome]
        words = record.outcome.removeprefix("ended ")
    elif not record.by_error:
        kind, words = "itself", f"with {record.outcome}"
    elif _IN_A_COLLECTIVE.search(record.outcome):
        kind, words = "in a collective", f"by {record.outcome.partition(':')[0]} in a collective"
    else:
        kind, words = "itself", f"by {record.outcome}"
    return Measurement(ENDED_EARLY, rank=int(match[1]), figures={"order": float(ENDINGS.index(kind))}, text=words)


def _with_rank(session: Session, process: str, world_size: int) -> Session:
    """Return the session with its rank and world size; without a process group at its start, the folder gives the rank."""
    match = _RANK.match(process)
    if session.info.world_size > 1 or match is None:
        return session
    rank = int(match[1])
    return replace(session, info=replace(session.info, rank=rank, world_size=max(world_size, rank + 1)))
