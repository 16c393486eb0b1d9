"""Ends a launch: makes one report of the recordings, prints it on stderr and writes it to the run directory."""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.reporting import streams
from mpinspect.reporting.active_run import ActiveRun
from mpinspect.run.directory import others_of, process_name, shown
from mpinspect.run.joining import join, with_others, with_ranks
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import STOPPED, Outcome, RecordedModel, Recordings, Seen, outcome_of
from mpinspect.run.record import FILE_NAME, PAGE, REPORTS, SIGTERM, write_record
from mpinspect.run.sigterm import Sigterm, leave_trace_of_sigterm
from mpinspect.runtime.appending import timestamp
from mpinspect.runtime.briefly import brief

if TYPE_CHECKING:
    from mpinspect.run.all_ranks import AllRanks
    from mpinspect.run.report import RunReport
    from mpinspect.run.watcher import Watcher

#: Import names of the frameworks whose arithmetic is not inspected.
_FRAMEWORKS = ("tensorflow", "jax", "paddle", "mxnet")
#: Most seconds that a report may delay ``os._exit``: the report waits for the GPU, which may no longer respond.
_EXIT_DELAY_S = 20.0
#: Most seconds spent reading each rank's models for the job's page.
_RANKS_WITHIN_S = 5.0
#: File by which a failing rank claims the joint report; seconds reserved for the first rank; seconds between checks.
_CLAIM, _FIRST_S, _LOOK_S = ".reported", 1.0, 0.05
#: Matches the session notes that the run's report repeats: a pattern given by the user had no effect.
_UNMATCHED = re.compile(r"the pattern .* matches no ", re.DOTALL)


def say(sentence: str) -> None:
    """Print one line on the process's original stderr, if it is still open; stdout belongs to the script."""
    streams.say(sys.__stderr__, " ".join(sentence.splitlines()))


class Ending:
    """Makes the report, exactly once, however the script ends.

    Args:
        options: the options of the launch.
        directory: this process's run directory, absolute.
        record: the fields of run.json as written at the start.
        speaks: whether to print the report to stderr; if not, only one line if something broke.
        whole: directory of the whole run, if this process is one of several ranks.
        leaves_no_trace: print and write nothing if this process, for example a pool's worker, trained no model.
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
        self.options, self.directory, self.speaks = options, directory, speaks
        self.seen = Seen()
        self.outcome = Outcome()
        #: False only if the script is known to have failed before its first line.
        self.started = True
        #: Made by finish().
        self.report: RunReport | None = None
        self._whole = whole or directory
        #: With several processes every line begins with the process's name.
        name = process_name(directory)
        is_one_of_several = self._is_rank or leaves_no_trace
        self._lead = f"{name}: " if name and is_one_of_several else ""
        self._said: set[str] = set()
        self._record = record
        self._leaves_no_trace = leaves_no_trace
        self._watcher: Watcher | None = None
        self._tracker: ActiveRun | None = None
        self._all_ranks: AllRanks | None = None
        self._once = threading.Lock()
        self._sigterm = Sigterm(self.finish)

    @property
    def over(self) -> bool:
        """Whether the report has begun, or this process is a forked child, which makes no report."""
        return self._once.locked()

    def watch(self) -> None:
        """Begin to inspect the models that the script trains; called when torch has been imported."""
        if self.over or self._watcher is not None:
            return
        self.seen.torch_imported = True
        try:
            from mpinspect.run.watcher import Watcher

            if self._is_rank:
                leave_trace_of_sigterm(self.directory / SIGTERM)
            if self.options.tracker is not None:
                self._tracker = ActiveRun(self.options.tracker, self._before_the_tracker_ends)
            written = None
            if self.speaks and self._is_rank:
                from mpinspect.run.all_ranks import AllRanks

                self._all_ranks = AllRanks(self._whole, curves=self.options.curves)
                written = self._all_ranks.written
            self._watcher = Watcher(self.options, self.directory, self._say, self.seen, self._tracker, written)
            self._watcher.install()
        except Exception as error:
            self.seen.note(f"mpinspect failed when torch was imported, and inspected nothing: {brief(error)}")

    def left_by(self, error: BaseException) -> None:
        """Record the exception that is about to end the script."""
        self.outcome = outcome_of(error)
        if self.outcome.by_error and self._is_rank:
            # If another rank has ended, the launcher's SIGTERM may arrive before this exception has been shown.
            self._sigterm.put_off()
        if self._watcher is not None:
            self._watcher.broke_off(error)

    def abandon(self) -> None:
        """Stop inspecting and make no report, since the parent does both; called in a forked child."""
        self._once = threading.Lock()
        self._once.acquire()
        if self._watcher is not None:
            with suppress(Exception):
                self._watcher.abandon()

    def finish(self, *, flush: bool = True) -> None:
        """Make the report, once; never raises. Waits for the GPU if the script used one. Ctrl-C stops the report early.

        Args:
            flush: whether to flush the script's stdout first, as the exit will do anyway.
        """
        if not self._once.acquire(blocking=False):
            return
        if self._is_rank:
            self._sigterm.put_off()
        try:
            try:
                self._finish(flush)
            finally:
                self._sigterm.let_through()
            if self._tracker is not None:
                self._tracker.end()
        except KeyboardInterrupt:
            self._say(f"stopped before the report was complete: mpinspect report {self._whole} reads the recorded data")
        except Exception as error:
            self._say(f"the report could not be made ({brief(error)}); the recorded data is in {self.directory}")
        if self.outcome == STOPPED:
            _die_by_interrupt()

    def finish_soon(self, outcome: Outcome) -> None:
        """Make the report before ``os._exit`` or ``os.exec*``, within ``_EXIT_DELAY_S`` s, without flushing stdout."""
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
        recordings = Recordings()
        if self._watcher is not None:
            recordings = self._watcher.finish()
        if self._tracker is not None and self._tracker.missing:
            self.seen.note(self._tracker.missing)
        self.seen.other_frameworks = [name for name in _FRAMEWORKS if name in sys.modules]
        if self._leaves_no_trace and not recordings.models and not self.seen.backwards and not self._failed_with_torch:
            return
        if not self.started:
            self._never_started()
            return
        if self.outcome.by_error and self._is_rank and recordings.models:
            self.speaks = self._reports_for_all()
        self.report = self._joined(recordings)
        if flush:
            with suppress(Exception):
                sys.stdout.flush()
        self._print(self.report)
        self._save(self.report, recordings.models)

    def _print(self, report: RunReport) -> None:
        """Print the report, or the first line of its verdict if this process does not speak for the run."""
        if self._leaves_no_trace and self.outcome.by_error:
            say(f"{process_name(self.directory) or self.directory.name} ended by {self.outcome.words}")
        if self.speaks:
            text = str(report) + "\n" if self.options.full else _in_brief(report)
            streams.write(sys.__stderr__, f"\n{text}")
        elif report.first_line and report.first_line not in self._said:
            self._say(report.first_line)

    @property
    def _page(self) -> Path:
        """The page of the whole job if this process reports for all ranks, else the page of this process."""
        return (self._whole if self.speaks else self.directory) / PAGE

    @property
    def _is_rank(self) -> bool:
        """Whether this process is one of several ranks, whose directories lie in one."""
        return self._whole != self.directory

    @property
    def _failed_with_torch(self) -> bool:
        """Whether an exception ended a process that had imported torch and so may have been about to train."""
        return self.outcome.by_error and self.seen.torch_imported

    def _reports_for_all(self) -> bool:
        """Return whether this rank, which an exception ends, prints the report of all ranks.

        The launcher stops the other ranks once this one has exited. If the first rank fails too, it prints the report.
        """
        claim = self._whole / _CLAIM
        enough = time.monotonic() + _FIRST_S
        while not self.speaks and time.monotonic() < enough and not claim.exists():
            time.sleep(_LOOK_S)
        try:
            claim.touch(exist_ok=False)
        except OSError as error:
            return self.speaks and not isinstance(error, FileExistsError)
        return True

    def _joined(self, recordings: Recordings) -> RunReport:
        """Return the joined report; if this process prints it, include other ranks and failures of other processes."""
        others: list[Path] = []
        added: list[Path] = []
        notes: list[str] = []
        models = recordings.models
        if self.speaks:
            others = others_of(self.directory, self._whole)
            ranks = [path for path in others if self._is_rank and path.parent == self._whole]
            if ranks or (self.outcome.by_error and self._is_rank):
                try:
                    models, added, notes = with_ranks(models, self.directory, ranks, outcome=self.outcome)
                except Exception as error:
                    notes = [f"the counts of the other ranks could not be added: {brief(error)}"]
        if self._all_ranks is not None:
            notes += self._all_ranks.finish([(model.name, model.session) for model in models])
        report = join(replace(recordings, models=models), self.seen, self.outcome, self.options, self._whole)
        unmatched = [note for model in recordings.models for note in model.session.notes if _UNMATCHED.match(note)]
        report = replace(report, saw=tuple(dict.fromkeys([*unmatched, *report.saw, *notes])))
        if not self.speaks:
            return report
        try:
            return with_others(report, others, added)
        except Exception as error:
            return replace(
                report, saw=(*report.saw, f"the records of the other processes could not be read: {brief(error)}")
            )

    def _never_started(self) -> None:
        """Print one line; Python has already printed the reason why the script could not start."""
        if self.speaks:
            kept = self._shown(self.directory / FILE_NAME)
            say(f"the script could not be started: nothing was recorded ({kept} has the command)")
        with suppress(OSError):
            self._write_last_record()

    def _save(self, report: RunReport, models: list[RecordedModel]) -> None:
        """Write the report and print where it is. If that fails, print all that was left out before, which no file holds."""
        holds_more = self.speaks and report.holds_more_than_its_verdict
        try:
            self._write(report, models)
        except OSError as error:
            self._say(f"the report can't be written to {self.directory}: {error.strerror or error}")
            if holds_more and not self.options.full:
                streams.write(sys.__stderr__, f"\n{report}\n")
        else:
            if holds_more:
                page, whole = self._shown(self._page), self._shown(self._whole)
                say(f"the whole report: {page} (mpinspect report {shlex.quote(str(whole))} prints it)")

    def _write(self, report: RunReport, models: list[RecordedModel]) -> None:
        """Write the report and the final run.json, which is written even if the disk refuses the report. Raises OSError."""
        try:
            for model in models:
                _save_again(model)
            for name in REPORTS:
                report.save(self.directory / name)
            if self._page.parent != self.directory:
                from mpinspect.run.each_rank import with_each_rank

                # The ranks' own maps make the page several times as large, so only the job's page has them.
                ranks = with_each_rank(self._whole, report.parts, within_s=_RANKS_WITHIN_S)
                replace(report, ranks=ranks).save(self._page)
            self._hand_over(self._page)
        finally:
            self._write_last_record(
                models=[{"name": model.name, "log_dir": model.log_dir} for model in models], saw=list(report.saw)
            )

    def _shown(self, path: Path) -> str:
        """Return a path as the user would write it where the launch began: the script may have changed the directory."""
        return shown(path, self._record.get("working_directory", ""))

    def _before_the_tracker_ends(self) -> None:
        """Give the tracker all scalars and the page, just before the script ends the tracker's run."""
        if self.over or self._watcher is None:
            return
        try:
            report = join(self._watcher.so_far(), self.seen, self.outcome, self.options, self._whole)
            self._hand_over(report.save(self.directory / PAGE))
        except Exception as error:
            self._say(f"the report's page could not be made for {self.options.tracker}: {brief(error)}")

    def _hand_over(self, page: Path) -> None:
        """Give the page to the tracker, if its run is open; print a sentence if that fails."""
        try:
            if self._tracker is not None:
                self._tracker.artifact(page)
        except Exception as error:
            self._say(f"{self.options.tracker} did not take the report's page: {brief(error)}")

    def _write_last_record(self, **more: Any) -> None:
        ended = {
            "ended": timestamp(),
            "outcome": self.outcome.words,
            "status": self.outcome.status,
            "by_error": self.outcome.by_error,
        }
        write_record(self.directory, self._record | ended | more)
        (self.directory / SIGTERM).unlink(missing_ok=True)

    def _say(self, sentence: str) -> None:
        """Print one line on stderr, preceded by the process's name if there are several processes."""
        self._said.add(sentence)
        say(self._lead + sentence)


def _in_brief(report: RunReport) -> str:
    from mpinspect.reporting.text import render
    from mpinspect.run.report.document import in_brief

    return render(in_brief(report))


def _save_again(model: RecordedModel) -> None:
    """Write a model's session file again if the script has removed it."""
    from mpinspect.ranges.store import FILE_NAME as SESSION

    if model.log_dir is not None and not (Path(model.log_dir) / SESSION).exists():
        Path(model.log_dir).mkdir(parents=True, exist_ok=True)
        model.session.save(model.log_dir)


def _die_by_interrupt() -> None:
    """Raise and catch KeyboardInterrupt once more, so that Python dies by SIGINT.

    Python does so only if it still has its internal record of an uncaught KeyboardInterrupt, which any ``exec`` of a
    string clears; dataclasses use such an ``exec``.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
