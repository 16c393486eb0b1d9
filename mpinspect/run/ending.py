"""The end of a launch: what was recorded becomes one report, on stderr and in the run directory."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.reporting import streams
from mpinspect.run.directory import others_of, process_name, shown
from mpinspect.run.joining import join, with_others
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import STOPPED, Outcome, RecordedModel, Recordings, Seen, brief, outcome_of
from mpinspect.run.record import FILE_NAME, REPORTS, now, write_record

if TYPE_CHECKING:
    from mpinspect.run.report import RunReport
    from mpinspect.run.watcher import Watcher

#: Import names of the frameworks whose arithmetic is not inspected.
_FRAMEWORKS = ("tensorflow", "jax", "paddle", "mxnet")
#: Seconds that ``os._exit`` is delayed at most by a report, which may wait for a GPU that no longer answers.
_EXIT_DELAY_S = 20.0
#: A session's note that the run's report repeats: whoever gave a pattern believes that it is in effect.
_UNMATCHED = re.compile(r"the pattern .* matches no ", re.DOTALL)


def say(sentence: str) -> None:
    """Print one line of ours on the stderr that the process was given, if that is still open. stdout is the script's."""
    streams.say(sys.__stderr__, " ".join(sentence.splitlines()))


class Ending:
    """Reports when the script is over: once, on whichever way out comes first.

    Args:
        options: of the launch.
        directory: this process's run directory, absolute.
        record: what run.json holds since the start.
        speaks: whether to print the report to stderr; else one line if something broke.
        whole: directory of the whole run, where this process is one of several ranks.
        leaves_no_trace: print and write nothing if this process trained nothing, as a pool's worker.
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
        #: Among several processes every line begins with the process's name.
        name = process_name(directory) if whole not in (None, directory) or leaves_no_trace else ""
        self._lead = f"{name}: " if name else ""
        self._said: set[str] = set()
        self._record = record
        self._leaves_no_trace = leaves_no_trace
        self._watcher: Watcher | None = None
        self._once = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether the report has begun, or this is a forked child, which makes none."""
        return self._once.locked()

    def watch(self) -> None:
        """Begin to inspect what the script trains; called when torch has been imported."""
        if self.over or self._watcher is not None:
            return
        self.seen.torch_imported = True
        try:
            from mpinspect.run.watcher import Watcher

            self._watcher = Watcher(self.options, self.directory, self._say, self.seen)
            self._watcher.install()
        except Exception as error:
            self.seen.note(f"mpinspect failed when torch was imported, and watched nothing: {brief(error)}")

    def left_by(self, error: BaseException) -> None:
        """Keep the exception that is about to end the script."""
        self.outcome = outcome_of(error)
        if self.outcome.by_error and self._watcher is not None:
            self._watcher.broke_off(error)

    def abandon(self) -> None:
        """Leave inspection and report to the parent; called in a forked child."""
        self._once = threading.Lock()
        self._once.acquire()
        if self._watcher is not None:
            with suppress(Exception):
                self._watcher.abandon()

    def finish(self, *, flush: bool = True) -> None:
        """Report, once; never raises. Waits for the GPU, if the script used one. Ctrl-C cuts it short.

        Args:
            flush: whether to flush the script's stdout first, as the exit will do anyway.
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
        """Report before ``os._exit`` or ``os.exec*``: in ``_EXIT_DELAY_S`` seconds at most, without flushing stdout."""
        if self.over:
            return
        self.outcome = outcome
        work = threading.Thread(target=self.finish, kwargs={"flush": False}, daemon=True)
        try:
            work.start()
        except RuntimeError:
            # No thread can start while the interpreter shuts down.
            self.finish(flush=False)
        else:
            work.join(_EXIT_DELAY_S)

    def _finish(self, flush: bool) -> None:
        recordings = Recordings() if self._watcher is None else self._watcher.finish()
        self.seen.other_frameworks = [name for name in _FRAMEWORKS if name in sys.modules]
        if self._leaves_no_trace and not recordings.models and not self.seen.backwards and not self._failed_with_torch:
            return
        if not self.started:
            self._never_started()
            return
        report = self.report = self._joined(recordings)
        if flush:
            with suppress(Exception):
                sys.stdout.flush()
        if self._leaves_no_trace and self.outcome.by_error:
            say(f"{process_name(self.directory) or self.directory.name} ended by {self.outcome.words}")
        if self.speaks:
            streams.write(sys.__stderr__, f"\n{report}\n")
        elif report.first_line and report.first_line not in self._said:
            self._say(report.first_line)
        try:
            self._save(report, recordings.models)
        except OSError as error:
            self._say(f"the report can't be written to {self.directory}: {error.strerror or error}")

    @property
    def _failed_with_torch(self) -> bool:
        """Whether an exception ended a process that had imported torch, and so may have been about to train."""
        return self.outcome.by_error and self.seen.torch_imported

    def _joined(self, recordings: Recordings) -> RunReport:
        """Return the report, in the process that speaks with what broke in the others."""
        report = join(recordings, self.seen, self.outcome, self.options, self._whole)
        unmatched = [note for model in recordings.models for note in model.session.notes if _UNMATCHED.match(note)]
        report = replace(report, saw=tuple(dict.fromkeys([*unmatched, *report.saw])))
        if not self.speaks:
            return report
        try:
            return with_others(report, others_of(self.directory, self._whole))
        except Exception as error:
            return replace(
                report, saw=(*report.saw, f"the records of the other processes could not be read: {brief(error)}")
            )

    def _never_started(self) -> None:
        """Say that nothing was recorded. Python has said why the script could not be started."""
        if self.speaks:
            kept = shown(self.directory / FILE_NAME)
            say(f"the script could not be started: nothing was recorded ({kept} keeps the command)")
        with suppress(OSError):
            self._write_last_record()

    def _save(self, report: RunReport, models: list[RecordedModel]) -> None:
        """Write the report and the last run.json. Raises OSError."""
        for model in models:
            _save_again(model)
        for name in REPORTS:
            report.save(self.directory / name)
        self._write_last_record(
            models=[{"name": model.name, "log_dir": model.log_dir} for model in models], saw=list(report.saw)
        )

    def _write_last_record(self, **more: Any) -> None:
        ended = {
            "ended": now(),
            "outcome": self.outcome.words,
            "status": self.outcome.status,
            "by_error": self.outcome.by_error,
        }
        write_record(self.directory, self._record | ended | more)

    def _say(self, sentence: str) -> None:
        """Print one line of this process on stderr."""
        self._said.add(sentence)
        say(self._lead + sentence)


def _save_again(model: RecordedModel) -> None:
    """Write a session file anew if the script has removed it."""
    from mpinspect.ranges.store.session_file import FILE_NAME as SESSION

    if model.log_dir is not None and not (Path(model.log_dir) / SESSION).exists():
        Path(model.log_dir).mkdir(parents=True, exist_ok=True)
        model.session.save(model.log_dir)


def _die_by_interrupt() -> None:
    """Raise and catch Ctrl-C once more.

    Python dies by the signal only if it remembers that KeyboardInterrupt passed through, and any ``exec`` of a text, as in
    dataclasses, makes it forget.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
