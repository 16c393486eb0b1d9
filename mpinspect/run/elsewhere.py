"""What the other processes of a run have left in their directories so far: the first that broke may not be this one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpinspect.run.record import load_record
from mpinspect.runtime.decoding import DecodingError

if TYPE_CHECKING:
    from mpinspect.ranges.session import Event
    from mpinspect.run.report import RunReport

#: Directories of the processes of a run.
_PROCESS = re.compile(r"(rank|process-)\d+")
#: How long other processes' records are read at most: there may be hundreds, on a network file system.
_PATIENCE_S = 5.0


class _Break(NamedTuple):
    """What a model broke by. ``process`` is the directory's name; "" for this process's own."""

    event: Event
    process: str
    model: str


def process_name(directory: Path) -> str:
    """How a process is spoken of: "rank 1", "process-0"; "" for the directory of one that is not among several."""
    name = directory.name
    if not _PROCESS.fullmatch(name):
        return ""
    return name.replace("rank", "rank ")


def others_of(directory: Path, whole: Path) -> list[Path]:
    """Directories of the other ranks in ``whole``, and of the processes that this one spawned."""
    found = [*whole.glob("rank*"), *directory.glob("process-*")]
    return sorted(
        (path for path in found if path != directory and process_name(path)), key=lambda path: in_order(path.name)
    )


def with_others(report: RunReport, others: Iterable[Path]) -> RunReport:
    """The report of a process, with what broke earlier in others as far as they have written it. Waits for none of them."""
    others = list(others)
    errors = [f"{process_name(path)} ended by {error}" for path in others if (error := _error(path))]
    first = _first(report, others)
    if first is None or not first.process:
        return replace(report, saw=(*errors, *report.saw))
    from mpinspect.ranges.analysis.first_line import first_line

    line = first_line(first.event)
    own_steps = [each.event.step for each in _own(report)]
    when = "" if not own_steps else " earlier" if min(own_steps) > first.event.step else " first"
    said = f"{process_name(Path(first.process))} broke{when}: {line}"
    elsewhere = f"{first.process}/{first.model}: {line}"
    return replace(report, broke_elsewhere=elsewhere, saw=(said, *errors, *report.saw))


def _first(report: RunReport, others: Iterable[Path]) -> _Break | None:
    """The gravest of all, then the earliest; this process's own where another's is no earlier."""
    from mpinspect.ranges.analysis.first_line import gravest

    breaks = [*_own(report), *_theirs(others)]
    breaks.sort(key=lambda each: (each.event.step, each.event.phase != "forward", bool(each.process)))
    event = gravest([each.event for each in breaks])
    return next((each for each in breaks if each.event is event), None)


def _own(report: RunReport) -> Iterator[_Break]:
    from mpinspect.ranges.analysis.first_line import gravest

    for part in report.parts:
        event = gravest(part.ranges.events)
        if event is not None:
            yield _Break(event, "", part.name)


def _theirs(others: Iterable[Path]) -> Iterator[_Break]:
    from mpinspect.ranges.analysis.first_line import gravest
    from mpinspect.ranges.store import FILE_NAME as SESSION
    from mpinspect.ranges.store import read_session

    enough = time.monotonic() + _PATIENCE_S
    for session in (session for path in others for session in sorted(path.glob(f"*/{SESSION}"))):
        if time.monotonic() > enough:
            return
        # Whatever another process is just doing to its files.
        with suppress(Exception):
            event = gravest(read_session(session).events)
            if event is not None:
                yield _Break(event, session.parent.parent.name, session.parent.name)


def _error(directory: Path) -> str:
    """The exception that ended a process; "" where none did, or it goes on."""
    with suppress(OSError, DecodingError):
        record = load_record(directory)
        if record.get("by_error") is True:
            return str(record.get("outcome") or "an exception")
    return ""


def in_order(name: str) -> list[tuple[str, int]]:
    """Sorts rank2 before rank10, and rank0/process-1 behind rank0."""
    stems = [(part, part.rstrip("0123456789")) for part in name.split("/")]
    return [(stem, int(part[len(stem) :] or 0)) for part, stem in stems]
