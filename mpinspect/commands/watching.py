"""Shows a run's report again whenever the run has written something, until the run ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mpinspect.commands.output import UnusableError
from mpinspect.ranges.store import FILE_NAME as SESSION
from mpinspect.reporting.streams import say
from mpinspect.run.record import FILE_NAME as RECORD
from mpinspect.run.record import STILL_RUNNING, read_record

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport
    from mpinspect.run.report import RunReport

    AnyReport: TypeAlias = RangeReport | RunReport

#: Least time between two reads: in seconds, and as a multiple of the last read's time.
_PAUSE_S, _PAUSE_FACTOR = 1.0, 2
_CLEAR = "\x1b[2J\x1b[3J\x1b[H"


class _State(NamedTuple):
    """The state of a path: its sessions with their times (ns) and sizes, and the end of the run as run.json has it."""

    files: dict[Path, tuple[int, int]]
    outcome: str

    @classmethod
    def of(cls, path: Path) -> _State:
        found = {}
        for file in [path] if path.is_file() else path.rglob(SESSION):
            with suppress(OSError):
                found[file] = (file.stat().st_mtime_ns, file.stat().st_size)
        # A killed run changes no file. Its record holds the process id, which no longer exists.
        record = min(path.glob(f"rank*/{RECORD}"), default=path / RECORD)
        return cls(found, read_record(record.parent).outcome)

    @property
    def has_ended(self) -> bool | None:
        """Whether the run has ended; None if there is no record of it."""
        if self.outcome == "unknown":
            return None
        return self.outcome != STILL_RUNNING

    @property
    def last_line(self) -> str:
        """The local time of the last data."""
        if not self.files:
            return "no data was written"
        latest = max(changed for changed, _ in self.files.values())
        return f"last data at {time.strftime('%H:%M:%S', time.localtime(latest / 1e9))}"


def watch(path: str, read: Callable[[], AnyReport], show: Callable[[AnyReport], None]) -> AnyReport:
    """Show the report of ``path`` each time that its files change, and return it when the run has ended.

    Raises:
        UnusableError: the path can't be read, and has not changed for a second.
    """
    shown = failed = None
    is_waiting = False
    while True:
        began, now = time.monotonic(), _State.of(Path(path))
        if not now.files and not now.has_ended:
            if not is_waiting:
                say(sys.stderr, f"nothing is recorded in {path} so far: waiting for the first data (Ctrl-C ends this)")
            is_waiting = True
        elif now != shown:
            try:
                report = read()
            except UnusableError:
                # The file may be half written.
                if now == failed:
                    raise
                failed = now
            else:
                shown = now
                _clear()
                show(report)
                if now.has_ended or (now.has_ended is None and _sessions_have_ended(report)):
                    print(f"\n{path}: {now.last_line}; the run has ended", flush=True)
                    return report
                print(f"\n{path}: {now.last_line} (Ctrl-C ends this)", flush=True)
        time.sleep(max(_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began)))


def _sessions_have_ended(report: AnyReport) -> bool:
    from mpinspect.run.report import RunReport

    ranges = [part.ranges for part in report.parts] if isinstance(report, RunReport) else [report]
    return all(each.session.progress.ended for each in ranges)


def _clear() -> None:
    """Clear the screen, if stdout is one."""
    if sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown"):
        sys.stdout.write(_CLEAR)
