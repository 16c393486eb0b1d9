"""The end of a launch: what was recorded becomes one report, on stderr and in the run directory."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.run.directory import shown
from mpinspect.run.elsewhere import others_of, process_name, with_others
from mpinspect.run.joining import join
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import STOPPED, Outcome, brief, outcome_of
from mpinspect.run.record import FILE_NAME, write_record
from mpinspect.run.saving import how_it_ended, save
from mpinspect.run.seen import Parts, Seen
from mpinspect.run.stderr import say, write

if TYPE_CHECKING:
    from mpinspect.run.report import RunReport
    from mpinspect.run.watcher import Watcher

#: Import names of the frameworks whose arithmetic nobody watches here.
_FRAMEWORKS = ("tensorflow", "jax", "paddle", "mxnet")
#: Who calls os._exit wants to be gone: a report that waits for a GPU which will not answer must not keep it.
_LAST_WORDS_S = 20.0
#: A session's note that the run's own report repeats: whoever gave a pattern thinks that it holds.
_UNMATCHED = re.compile(r"the pattern .* matches no ", re.DOTALL)


class Ending:
    """What is done when the script is over, once, whoever says so first.

    Args:
        options: of the launch.
        directory: the run directory, absolute.
        record: what run.json says of the start.
        speaks: whether the report goes to stderr; else one line where something broke.
        whole: directory of the whole run, where this process is one of several ranks.
        leaves_no_trace: whether nothing is said and written of a process that trained nothing, such as a pool's worker.
    """

    def __init__(
        self,
        options: LaunchOptions,
        directory: Path,
        record: dict[str, Any],
        *,
        speaks: bool,
        whole: Path | None = None,
        leaves_no_trace: bool = False,
    ) -> None:
        self.options = options
        self.directory = directory
        self.speaks = speaks
        self.seen = Seen()
        self.outcome = Outcome()
        #: Whether the script's first line was reached, as far as is known.
        self.started = True
        #: Made by finish().
        self.report: RunReport | None = None
        self._whole = whole or directory
        #: Among several processes every line says whose it is.
        name = process_name(directory) if whole not in (None, directory) or leaves_no_trace else ""
        self._lead = f"{name}: " if name else ""
        self._said: set[str] = set()
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
            from mpinspect.run.watcher import Watcher

            self._watcher = Watcher(self.options, self.directory, self._say)
            self.seen = _merged(self._watcher.sightings, self.seen)
            self._watcher.install()
        except Exception as error:
            self.seen.torch_imported = True
            self.seen.note(f"mpinspect failed when torch was imported, and watched nothing: {brief(error)}")

    def left_by(self, error: BaseException) -> None:
        """An exception is about to end the script."""
        self.outcome = outcome_of(error)
        if self.outcome.by_error and self._watcher is not None:
            self._watcher.broke_off(error)

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
            self._say(f"stopped before the report was complete: mpinspect report {self._whole} reads what was recorded")
        except Exception as error:
            self._say(f"the report could not be made ({brief(error)}); what was recorded is in {self.directory}")
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
        if self._leaves_no_trace and not parts.models and not self.seen.backwards and not self._failed_with_torch:
            return
        if not self.started:
            self._never_started()
            return
        report = self.report = self._joined(parts)
        if flush:
            with suppress(Exception):
                sys.stdout.flush()
        if self._leaves_no_trace and self.outcome.by_error:
            say(f"{process_name(self.directory) or self.directory.name} ended by {self.outcome.words}")
        if self.speaks:
            write(f"\n{report}\n")
        elif report.first_line and report.first_line not in self._said:
            self._say(report.first_line)
        try:
            save(self.directory, report, parts, self._record, self.outcome)
        except OSError as error:
            self._say(f"the report can't be written to {self.directory}: {error.strerror or error}")

    @property
    def _failed_with_torch(self) -> bool:
        """Whether an exception ended what may have been about to train."""
        return self.outcome.by_error and self.seen.torch_imported

    def _joined(self, parts: Parts) -> RunReport:
        """The report, of which the other processes' part is looked up by the one that speaks."""
        report = join(parts, self.seen, self.outcome, self.options, self._whole)
        unmatched = [note for model in parts.models for note in model.session.notes if _UNMATCHED.match(note)]
        report = replace(report, saw=tuple(dict.fromkeys([*unmatched, *report.saw])))
        if not self.speaks:
            return report
        try:
            return with_others(report, others_of(self.directory, self._whole))
        except Exception as error:
            return replace(report, saw=(*report.saw, f"the other processes could not be looked into: {brief(error)}"))

    def _never_started(self) -> None:
        """Python has said why."""
        if self.speaks:
            kept = shown(self.directory / FILE_NAME)
            say(f"the script could not be started: nothing was recorded ({kept} keeps what was tried)")
        with suppress(OSError):
            write_record(self.directory, self._record | how_it_ended(self.outcome))

    def _say(self, sentence: str) -> None:
        """One line of this process's on stderr."""
        self._said.add(sentence)
        say(self._lead + sentence)


def _die_by_interrupt() -> None:
    """Python ends by the signal if it remembers that Ctrl-C came through, and any ``exec`` of a text, as in dataclasses, makes it
    forget. So it comes through once more."""
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _merged(watched: Seen, before: Seen) -> Seen:
    """The watcher's counts, with what was counted before torch was there."""
    watched.forked += before.forked
    watched.spawned += before.spawned
    watched.watched_children += before.watched_children
    for sentence in before.notes:
        watched.note(sentence)
    return watched
