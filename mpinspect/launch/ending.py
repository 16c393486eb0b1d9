"""The end of a launch: what was recorded becomes one report, on stderr and in the run directory."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.launch.joining import join
from mpinspect.launch.options import LaunchOptions
from mpinspect.launch.outcome import STOPPED, Outcome, brief
from mpinspect.launch.record import now, write_record
from mpinspect.launch.seen import Parts, RecordedModel, Seen
from mpinspect.launch.stderr import say, write

if TYPE_CHECKING:
    from mpinspect.analysis.run import RunReport
    from mpinspect.launch.watcher import Watcher

#: Import names of the frameworks whose arithmetic nobody watches here.
_FRAMEWORKS = ("tensorflow", "jax", "paddle", "mxnet")
#: Who calls os._exit wants to be gone: a report that waits for a GPU which will not answer must not keep it.
_LAST_WORDS_S = 20.0


class Ending:
    """What is done when the script is over, once, whoever says so first.

    Args:
        options: of the launch.
        directory: the run directory, absolute.
        record: what run.json says of the start.
        speaks: whether the report goes to stderr; else one line where something broke.
        leaves_no_trace: whether nothing is said and written of a process that trained nothing, such as a pool's worker.
    """

    def __init__(
        self,
        options: LaunchOptions,
        directory: Path,
        record: dict[str, Any],
        *,
        speaks: bool,
        leaves_no_trace: bool = False,
    ) -> None:
        self.options = options
        self.directory = directory
        self.speaks = speaks
        self.seen = Seen()
        self.outcome = Outcome()
        #: Made by finish().
        self.report: RunReport | None = None
        self._record = record
        self._leaves_no_trace = leaves_no_trace
        self._watcher: Watcher | None = None
        self._once = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether it has come, or is somebody else's business."""
        return self._once.locked()

    def watch(self) -> None:
        """torch has been imported: have what it does looked at."""
        if self.over or self._watcher is not None:
            return
        try:
            from mpinspect.launch.watcher import Watcher

            self._watcher = Watcher(self.options, self.directory, say)
            self.seen = _merged(self._watcher.sightings, self.seen)
            self._watcher.install()
        except Exception as error:
            self.seen.torch_imported = True
            self.seen.note(f"mpinspect failed when torch was imported, and watched nothing: {brief(error)}")

    def abandon(self) -> None:
        """In a forked child: the watching and its end are the parent's."""
        self._once = threading.Lock()
        self._once.acquire()
        if self._watcher is not None:
            with suppress(Exception):
                self._watcher.abandon()

    def finish(self, *, flush: bool = True) -> None:
        """Report, once; never raises. Waits for the GPU, where one computed. Ctrl-C cuts it short.

        Args:
            flush: whether the script's stdout goes out first, as it will in a moment anyway.
        """
        if not self._once.acquire(blocking=False):
            return
        try:
            self._finish(flush)
        except KeyboardInterrupt:
            say(f"stopped before the report was complete: mpinspect report {self.directory} reads what was recorded")
        except Exception as error:
            say(f"the report could not be made ({brief(error)}); what was recorded is in {self.directory}")
        if self.outcome == STOPPED:
            _die_by_interrupt()

    def finish_soon(self, outcome: Outcome) -> None:
        """Report before a way out that waits for nothing: in ``_LAST_WORDS_S`` seconds at most, and stdout is not flushed."""
        if self.over:
            return
        self.outcome = outcome
        work = threading.Thread(target=self.finish, kwargs={"flush": False}, daemon=True)
        try:
            work.start()
        except RuntimeError:
            # The interpreter is shutting down.
            self.finish(flush=False)
        else:
            work.join(_LAST_WORDS_S)

    def _finish(self, flush: bool) -> None:
        parts = Parts() if self._watcher is None else self._watcher.finish()
        self.seen.other_frameworks = [name for name in _FRAMEWORKS if name in sys.modules]
        if self._leaves_no_trace and not parts.models and not self.seen.backwards:
            return
        report = self.report = join(parts, self.seen, self.outcome, self.options, self.directory)
        if flush:
            with suppress(Exception):
                sys.stdout.flush()
        if self.speaks:
            write(f"\n{report}\n")
        elif report.first_line:
            say(f"{self.directory.name}: {report.first_line}")
        try:
            self._save(report, parts)
        except OSError as error:
            say(f"the report can't be written to {self.directory}: {error.strerror or error}")

    def _save(self, report: RunReport, parts: Parts) -> None:
        for model in parts.models:
            _save_again(model)
        report.save(self.directory / "report.md")
        report.save(self.directory / "report.json")
        write_record(self.directory, self._record | self._last_record(report, parts))

    def _last_record(self, report: RunReport, parts: Parts) -> dict[str, Any]:
        return {
            "ended": now(),
            "outcome": self.outcome.words,
            "status": self.outcome.status,
            "models": [{"name": model.name, "log_dir": model.log_dir} for model in parts.models],
            "saw": list(report.saw),
        }


def _die_by_interrupt() -> None:
    """Python ends by the signal if it remembers that Ctrl-C came through, and any ``exec`` of a text, as in dataclasses, makes it
    forget. So it comes through once more."""
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _save_again(model: RecordedModel) -> None:
    """Where the script removed the session's file while it was written."""
    from mpinspect.session_file import FILE_NAME

    if model.log_dir is not None and not (Path(model.log_dir) / FILE_NAME).exists():
        Path(model.log_dir).mkdir(parents=True, exist_ok=True)
        model.session.save(model.log_dir)


def _merged(watched: Seen, before: Seen) -> Seen:
    """The watcher's counts, with what was counted before torch was there."""
    watched.forked += before.forked
    watched.spawned += before.spawned
    watched.watched_children += before.watched_children
    for sentence in before.notes:
        watched.note(sentence)
    return watched
