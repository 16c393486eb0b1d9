"""After any disk error the session file is readable and names the lost steps, and the training is unchanged."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import made_sessions as made
import pytest
import torch
from together import together
from trainings import take_step

import mpinspect
from mpinspect.integrations.inspecting import InspectsTraining
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.capture import recording as recordings
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.store import FILE_NAME, SessionError, SessionWriter, read_session, writer
from mpinspect.ranges.store.frames import HEADER
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window
from mpinspect.run.directory import claim
from mpinspect.run.ending import Ending
from mpinspect.run.options import LaunchOptions, Rank
from mpinspect.run.record import first_record, read_record, write_first, write_record
from mpinspect.run.report import RunReport
from mpinspect.runtime.background import Background

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR)
STEPS = 7


class Disk:
    """Counts the calls that change files below ``root``, and makes some of them fail.

    Args:
        root: calls on files elsewhere neither count nor fail.
        at: returns whether a call fails, given its number from 0.
        how: the errno to raise; "short": a write accepts half of its data; "torn": it writes half, then raises ENOSPC;
            "done": the call does its work, then raises EIO.
        on_call: called before each call, with the data to write or None.
    """

    def __init__(
        self,
        root: Path,
        at: Callable[[int], bool] = lambda number: False,
        how: int | str = errno.ENOSPC,
        on_call: Callable[[bytes | None], None] = lambda data: None,
    ) -> None:
        self.root, self.names = root, []
        self._at, self._how, self._on_call = at, how, on_call
        #: The maximum size of all files together, in bytes.
        self._most = 1 << 30

    @property
    def room(self) -> int:
        """The free space, in bytes."""
        return max(self._most - sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file()), 0)

    @room.setter
    def room(self, room: int) -> None:
        self._most += room - self.room

    def does(self, name: str, path: Any, work: Callable[[], Any], data: bytes | None = None, file: Any = None) -> Any:
        """Do the work, or fail."""
        if isinstance(path, int) or not Path(path).is_relative_to(self.root):
            return work()
        self._on_call(data)
        self.names.append(name)
        if not self._at(len(self.names) - 1):
            return work()
        if isinstance(self._how, int):
            raise OSError(self._how, os.strerror(self._how))
        if self._how == "done":
            work()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        taken = 0 if data is None else FileIO.write(file, data[: len(data) // 2])
        if taken and self._how == "short":
            return taken
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def failing(self) -> Iterator[Disk]:
        """Make calls fail within the block."""
        disk = self

        class File(FileIO):
            def write(self, data: Any) -> int:
                data = bytes(data)
                if Path(self.name).is_relative_to(disk.root):
                    data = data[: disk.room]
                    if not data:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(disk.does("write", self.name, lambda: FileIO.write(self, data), data, self))

            def truncate(self, size: int | None = None) -> int:
                return int(disk.does("truncate", self.name, lambda: FileIO.truncate(self, size)))

        def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            raw = options.get("buffering") == 0
            return disk.does("open", path, lambda: File(path, mode) if raw else plain(path, mode, *args, **options))

        def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda path, *args, **options: disk.does(name, path, lambda: original(path, *args, **options))

        def synced(descriptor: int) -> None:
            disk.does("fsync", Path(f"/proc/self/fd/{descriptor}").readlink(), lambda: fsync(descriptor))

        fsync, plain = os.fsync, pathlib.Path.open
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pathlib.Path, "open", opened)
            for name in ("replace", "unlink", "mkdir"):
                patch.setattr(pathlib.Path, name, wrapped(name, getattr(pathlib.Path, name)))
            patch.setattr(os, "fsync", synced)
            patch.setattr(os, "open", wrapped("open a directory", os.open))
            yield self


EVENT = s.Event(3, 0, "backward", "", kinds.WEIGHT_GRADIENT, "", "inf")


@pytest.fixture
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread, write in every step and rewrite the file early, so that each run makes the same calls."""
    monkeypatch.setattr(recordings, "WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(recordings, "WRITE_COST_FACTOR", 0)
    monkeypatch.setattr(writer, "SYNC_INTERVAL_S", 0.0)
    monkeypatch.setattr(writer, "SYNC_SHARE", float("inf"))
    monkeypatch.setattr(writer, "window_limit", lambda tensors: 2)
    monkeypatch.setattr(Background, "_started", lambda self: False)
    monkeypatch.setitem(sys.modules, "mpinspect.ranges.report.tensorboard", None)


def recorded(directory: Path) -> tuple[s.Session, list[str]]:
    """Record STEPS steps with an event and a measurement, and return the session in memory and the notes."""
    told: list[str] = []
    opened = open_sinks(directory, s.RunInfo(model="m"))
    recording = Recording(s.RunInfo(model="m"), opened.sinks, tell=told.append)
    for trouble in opened.troubles:
        recording.note(trouble)
    for number in range(STEPS):
        recording.add_window(made.step_window(number))
        if number == EVENT.step:
            recording.event(EVENT)
            recording.measured(s.Measurement("kind", "name", 3, {"figure": 1.0}))
        recording.step_done(number + 1, 0, number + 1, True)
        recording.flush()
    recording.close()
    return recording.session(), told


def first_lost(session: s.Session) -> int:
    return max((window.last_step + 1 for window in session.windows), default=0)


def reported_as_lost(told: list[str]) -> int | None:
    """Return the first step that a note reports as lost, or None."""
    found = [re.search(r"records since step (\d+) are not in the log_dir", note) for note in told]
    return next((int(match[1]) for match in found if match), None)


@pytest.mark.usefixtures("_steady")
def test_no_record_is_lost_if_any_call_fails_once(tmp_path: Path) -> None:
    """Each call of a run fails in turn; every file that could be opened is complete in the end."""
    (tmp_path / "calls").mkdir()
    with Disk(tmp_path / "calls").failing() as calls:
        whole, _ = recorded(tmp_path / "calls" / "run")
    assert {"write", "fsync", "replace", "open", "mkdir", "open a directory"} <= set(calls.names)
    cases = [(number, ERRORS[number % len(ERRORS)]) for number in range(len(calls.names))]
    cases += [(n, how) for n, name in enumerate(calls.names) if name == "write" for how in ("short", "torn")]
    cases += [(n, "done") for n, name in enumerate(calls.names) if name not in ("write", "open", "open a directory")]
    for number, how in cases:
        case = f"{how} at call {number} ({calls.names[number]})"
        root = tmp_path / f"{number}-{how}"
        root.mkdir()
        with Disk(root, lambda call, at=number: call == at, how).failing():  # type: ignore[misc]
            kept, told = recorded(root / "run")
        assert kept.totals() == whole.totals(), case
        assert (kept.events, kept.progress) == (whole.events, whole.progress), case
        if any("no file is written" in note for note in told):
            assert not (root / "run" / FILE_NAME).exists(), case
            continue
        read = read_session(root / "run")
        assert not any("damaged" in note or "within a record" in note for note in read.notes), case
        has_all = read.totals() == whole.totals() and read.progress == whole.progress and read.events == whole.events
        assert has_all or reported_as_lost(told) == first_lost(read), (case, told)
        assert has_all or how == "done", (case, told)


@pytest.mark.usefixtures("_steady")
def test_the_first_lost_step_is_named_if_the_disk_fails_permanently(tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()
    with Disk(tmp_path / "calls").failing() as calls:
        whole, _ = recorded(tmp_path / "calls" / "run")
    for number, how in itertools.product(range(len(calls.names)), (errno.ENOSPC, "torn")):
        case = f"{how} from call {number} ({calls.names[number]})"
        root = tmp_path / f"{number}-{how}"
        root.mkdir()
        with Disk(root, lambda call, since=number: call >= since, how).failing():  # type: ignore[misc]
            kept, told = recorded(root / "run")
        assert kept.totals() == whole.totals(), case
        if any("no file is written" in note for note in told):
            continue
        with suppress(SessionError):
            read = read_session(root / "run")
            assert reported_as_lost(told) == (None if read.progress.ended else first_lost(read)), (case, told)


@pytest.mark.usefixtures("_steady")
def test_a_kill_at_any_call_loses_no_earlier_record(tmp_path: Path) -> None:
    """The test copies the file before each call, and as it would be with half of the call's data written."""
    file, left = tmp_path / "run" / FILE_NAME, []

    def kill(data: bytes | None) -> None:
        if file.exists():
            with FileIO(file) as opened:
                before = opened.readall()
            left.append(before)
            if data is not None:
                left.append(before + data[: len(data) // 2])

    with Disk(tmp_path, on_call=kill).failing():
        recorded(tmp_path / "run")
    seen = 0
    for content in dict.fromkeys(left):
        copy = tmp_path / "copy"
        copy.write_bytes(content)
        if len(content) < len(HEADER):
            continue
        read = read_session(copy)
        assert (
            read.totals()
            == s.Session(windows=tuple(made.step_window(step) for step in range(first_lost(read)))).totals()
        )
        assert first_lost(read) >= seen
        seen = first_lost(read)
    assert seen == STEPS
    assert len(left) > 50


def test_disk_errors_do_not_change_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(recordings, "WRITE_COST_FACTOR", 0)

    def trained(log_dir: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inspector = mpinspect.Inspector(model, optimizers=optimizer, log_dir=log_dir)
        with inspector:
            for _ in range(3):
                take_step(optimizer, model(torch.randn(3, 4)).square().sum())
        assert inspector.report().session.progress.steps == 3
        return [parameter.detach() for parameter in model.parameters()]

    alone = trained(None)
    for number in range(0, 24, 2):
        root = tmp_path / str(number)
        root.mkdir()
        disk = Disk(root, lambda call, since=number: call >= since, errno.EIO)  # type: ignore[misc]
        with disk.failing(), warnings.catch_warnings():
            warnings.simplefilter("ignore", mpinspect.MpinspectWarning)
            weights = trained(root / "run")
        assert all(map(torch.equal, weights, alone)), number


@pytest.mark.parametrize("write", [write_first, write_record])
def test_the_run_record_is_either_complete_or_unchanged(write: Callable[..., Any], tmp_path: Path) -> None:
    record = first_record(LaunchOptions("train.py"), Rank())
    (tmp_path / "calls").mkdir()
    with Disk(tmp_path / "calls").failing() as calls:
        write(tmp_path / "calls" / "run", record)
    for number, how in itertools.product(range(len(calls.names)), (errno.ENOSPC, "short", "torn")):
        root = tmp_path / f"{number}-{how}"
        root.mkdir()
        if write is write_record:
            write_first(root / "run", {**record, "command": "before"})
        with Disk(root, lambda call, at=number: call == at, how).failing(), suppress(OSError):  # type: ignore[misc]
            write(root / "run", record)
        read = read_record(root / "run")
        assert "damaged" not in read.trouble, (number, how)
        assert read.command == "train.py" or (read.command == ("before" if write is write_record else ""))
        assert {path.name for path in (root / "run").glob("*")} <= {"run.json"}


def test_the_outcome_is_recorded_if_the_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(report: object, path: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = LaunchOptions("train.py")
    record = first_record(options, Rank())
    assert write_first(tmp_path, record)
    monkeypatch.setattr(RunReport, "save", refuse)
    Ending(options, tmp_path, record, speaks=True).finish()
    assert read_record(tmp_path).outcome == "ended"
    assert f"the report can't be written to {tmp_path}" in capfd.readouterr().err


# -- a full disk ----------------------------------------------------------------------------------------------------------


class Log:
    """A sink in the same directory that writes as much as TensorBoard's log, in small parts."""

    yields = True

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "log").open("xb", buffering=0)

    def window(self, window: Window) -> None:
        for _ in range(64):
            if self._file.write(b"12345678") < 8:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()

    def progress(self, *args: object) -> None: ...

    watched = event = note = measurement = precision = progress


def large_window(step: int) -> Window:
    """Return a window of some kilobytes that does not compress."""
    draw = random.Random(step)
    tensors = {}
    for number in range(60):
        counts = [draw.randrange(1, 9999) for _ in range(30)]
        histogram = ExponentHistogram.from_counts(counts, 0, powers_of_two=[0] * 30, min_abs=1.0, max_abs=2.0**29)
        tensors[TensorKey(f"w{number}", kinds.WEIGHT_GRADIENT)] = TensorWindow(histogram, 1, {29: 1}, numel_max=9)
    return Window(step, step, 1, tensors, {29: 1})


@pytest.mark.usefixtures("_steady")
@pytest.mark.parametrize("freed", [0, 900, 200_000])
def test_the_session_file_has_priority_on_a_full_disk_and_names_lost_steps(freed: int, tmp_path: Path) -> None:
    told: list[str] = []
    with Disk(tmp_path).failing() as disk:
        session = SessionWriter(tmp_path, s.RunInfo())
        recording = Recording(s.RunInfo(), [session, Log(tmp_path)], tell=told.append)
        for number in range(60):
            recording.add_window(large_window(number))
            if number == 21:
                disk.room = 100
            if number == 40:
                disk.room += freed
            recording.step_done(number + 1, 0, number + 1, True)
        recording.close()
    read = read_session(tmp_path)
    assert "since step 21 (" in told[0]
    if freed > 10_000:
        assert (read.totals(), read.progress) == (recording.session().totals(), recording.progress)
        assert reported_as_lost(told) is None
        return
    assert reported_as_lost(told) == first_lost(read) >= 21
    assert read.progress.ended == bool(freed)
    assert reported_as_lost(list(read.notes)) == (first_lost(read) if freed else None)


# -- several runs at once ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_steady")
def test_concurrent_runs_in_one_log_dir_get_different_names(tmp_path: Path) -> None:
    for attempt in range(5):
        wanted = tmp_path / str(attempt) / "a"
        opened = together(8, lambda number, wanted=wanted: open_sinks(wanted, s.RunInfo(model=str(number))))
        assert {each.path.name for each in opened} == {"a", *(f"a-{number}" for number in range(2, 9))}
        for number, each in enumerate(opened):
            each.sinks[0].close()
            assert read_session(each.path).info.model == str(number)


def test_ranks_of_two_concurrent_jobs_share_no_directory(tmp_path: Path) -> None:
    for attempt in range(5):
        options = LaunchOptions("train.py", log_dir=str(tmp_path / str(attempt)))
        ranks = [Rank(number, 2, job) for job in ("one", "two") for number in range(2)]
        wholes = together(4, lambda each, o=options, r=ranks: claim(o, r[each], {"job": r[each].job})[0])
        assert wholes[0] == wholes[1] != wholes[2] == wholes[3]


# -- paths ------------------------------------------------------------------------------------------------------------------


def test_a_relative_log_dir_is_resolved_when_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    with SessionWriter(there / "runs" / "a", s.RunInfo(model="other")) as other:
        other.window(made.step_window(0))
    before = other.path.read_bytes()
    monkeypatch.chdir(here)
    with SessionWriter("runs/a", s.RunInfo(), limit=2) as own:
        monkeypatch.chdir(there)
        for step in range(20):
            own.window(made.step_window(step))
    assert other.path.read_bytes() == before
    assert len(read_session(here / "runs" / "a").windows) <= 4
    monkeypatch.chdir(here)
    assert mpinspect.Recorder("runs/b").log_dir == (here / "runs" / "b").resolve()


def test_changing_a_symlink_during_the_run_does_not_move_the_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    latest = tmp_path / "latest"
    latest.symlink_to("one")
    with SessionWriter(latest, s.RunInfo(), limit=2) as own:
        latest.unlink()
        latest.symlink_to("two")
        for step in range(20):
            own.window(made.step_window(step))
    assert len(read_session(tmp_path / "one").windows) <= 4
    assert not list((tmp_path / "two").iterdir())


def test_a_renamed_run_does_not_overwrite_a_new_run_of_its_old_name(tmp_path: Path) -> None:
    with SessionWriter(tmp_path / "a", s.RunInfo(model="first"), limit=2) as first:
        for step in range(3):
            first.window(made.step_window(step))
        (tmp_path / "a").rename(tmp_path / "b")
        with SessionWriter(tmp_path / "a", s.RunInfo(model="second")) as second:
            for step in range(5):
                second.window(made.step_window(step))
            for step in range(3, 9):
                first.window(made.step_window(step))
    assert read_session(tmp_path / "a").info.model == "second"
    assert len(read_session(tmp_path / "a").windows) == 5
    assert first_lost(read_session(tmp_path / "b")) == 9


def test_relative_paths_are_resolved_before_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    options = LaunchOptions("train.py", log_dir="runs/a")
    record = first_record(options, Rank())
    ending = Ending(options, claim(options, Rank(), record)[0], record, speaks=True)
    callback = InspectsTraining(log_dir="runs/b")
    mpinspect.profile_kernels(lambda: os.chdir(tmp_path), trace="trace.json", warmup=0)
    assert (here / "trace.json").exists()
    assert Path.cwd() == tmp_path
    callback._begin(torch.nn.Linear(1, 1), (), None, None, 0, 1)
    callback.detach()
    assert (here / "runs" / "b" / FILE_NAME).exists()
    ending.finish()
    assert (here / "runs" / "a" / "report.html").exists()
    assert not (tmp_path / "runs").exists()
    # Messages show the path relative to the directory of the launch.
    assert ending._shown(ending.directory / "report.html") == "runs/a/report.html"


@pytest.mark.parametrize("name", [f"{FILE_NAME}.rewriting", f"{FILE_NAME}.rewriting.0"])
def test_existing_symlinks_are_replaced_instead_of_followed(name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(precious)
    with SessionWriter(run, s.RunInfo(), limit=2) as own:
        for step in range(20):
            own.window(made.step_window(step))
    page = tmp_path / "report.html"
    page.symlink_to(precious)
    mpinspect.Recorder().report().save(page)
    assert precious.read_text() == "mine"
    assert not page.is_symlink()
    assert len(read_session(run).windows) <= 4


def test_a_pipe_named_like_a_session_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(SessionError, match="pipe or a device"):
        read_session(tmp_path)
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(ValueError, match="pipe or a device"):
        mpinspect.read_trace(tmp_path / "trace.json")
    os.mkfifo(tmp_path / "run.json")
    assert "pipe or a device" in read_record(tmp_path).trouble
