"""A recording has bounded memory, writes on another thread, and is complete once it is closed."""

import os
import re
import resource
import textwrap
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import launched
import made_sessions as made
import pytest

from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.capture import recording as recordings
from mpinspect.ranges.capture.recording import UNWRITTEN_LIMIT, MpinspectWarning, Recording, WindowList
from mpinspect.ranges.capture.sinks import MOST_TOLD, WAITING_LIMIT
from mpinspect.ranges.store import SessionWriter, read_session
from mpinspect.ranges.windows.columns import TensorColumns
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import Window, merge_windows

TESTS = Path(__file__).parents[1]


class Kept:
    """A sink that stores its calls and their threads; a test can block its disk."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[tuple[str, object]] = []
        self.threads: set[threading.Thread] = set()
        self.disk = threading.Event()
        self.disk.set()
        self._fails = fails

    def _tell(self, what: str, value: object = None) -> None:
        self.disk.wait()
        self.threads.add(threading.current_thread())
        if self._fails:
            raise OSError("no space left")
        self.told.append((what, value))

    def watched(self, infos: object) -> None:
        self._tell("watched", infos)

    def window(self, window: Window) -> None:
        self._tell("window", window)

    def event(self, event: s.Event) -> None:
        self._tell("event", event)

    def note(self, note: str) -> None:
        self._tell("note", note)

    def measurement(self, measurement: s.Measurement) -> None:
        self._tell("measurement", measurement)

    def precision(self, precision: s.Precision) -> None:
        self._tell("precision", precision)

    def progress(self, progress: s.Progress) -> None:
        self._tell("progress", progress)

    def close(self) -> None:
        self._tell("close")

    def of(self, what: str) -> list[object]:
        return [value for name, value in self.told if name == what]


def step(recording: Recording, number: int) -> None:
    recording.add_window(made.step_window(number))
    recording.step_done(number + 1, 0, number + 1, True)


def event(number: int = 0) -> s.Event:
    return s.Event(number, 0, "backward", "", kinds.WEIGHT_GRADIENT, "", "inf")


@pytest.fixture(autouse=True)
def _at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(recordings, "WRITE_COST_FACTOR", 0)


# -- when windows end ---------------------------------------------------------------------------------------------------


def last_steps(monkeypatch: pytest.MonkeyPatch, steps_a_second: list[float]) -> list[int]:
    """Return the last steps of the windows that a run of this pace writes, at intervals of a second."""
    monkeypatch.setattr(recordings, "WRITE_INTERVAL_S", 1.0)
    sink, now = Kept(), [0.0]
    recording = Recording(s.RunInfo(), [sink], clock=lambda: now[0])
    for number, pace in enumerate(steps_a_second):
        now[0] += 1 / pace
        step(recording, number)
        recording._sinks.wait()
    return [window.last_step for window in sink.of("window")]


def test_runs_of_different_pace_end_their_windows_at_common_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock decides when to write, and two runs are compared between common ends of windows."""
    quick = last_steps(monkeypatch, [100.0] * 1000)
    for pace in ([70.0] * 1000, [100.0 + 40 * (number % 300 > 150) for number in range(1000)]):
        other = last_steps(monkeypatch, pace)
        common = sorted({*quick} & {*other})
        # A window has at most the steps of two intervals, and common ends are at most 256 steps apart.
        assert max(b - a for a, b in pairwise(other)) <= 2 * max(pace)
        assert max(b - a for a, b in pairwise(common)) <= 256
        assert common[-1] > 700


def test_slow_steps_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_steps(monkeypatch, [0.5] * 6) == [0, 1, 2, 3, 4, 5]


# -- writing on another thread ------------------------------------------------------------------------------------------


def test_sinks_are_called_on_another_thread_and_are_complete_after_close() -> None:
    sink = Kept()
    recording = Recording(s.RunInfo(), [sink])
    recording.watch(())
    recording.event(event())
    for number in range(20):
        step(recording, number)
    recording.close()
    assert threading.current_thread() not in sink.threads
    assert (sink.told[0][0], sink.told[-1][0]) == ("watched", "close")
    assert merge_windows(*sink.of("window")) == merge_windows(*recording.session().windows)
    assert sink.of("progress")[-1] == recording.progress
    assert recording.progress.ended


def test_a_slow_disk_does_not_block_the_training_and_waiting_windows_are_merged() -> None:
    sink = Kept()
    recording = Recording(s.RunInfo(), [sink])
    sink.disk.clear()
    steps = 10 * UNWRITTEN_LIMIT
    for number in range(steps):
        step(recording, number)
        recording.event(event(number))
    assert recording.is_writing
    assert len(recording._unwritten) < 2 * UNWRITTEN_LIMIT
    sink.disk.set()
    recording.close()
    assert len(sink.of("window")) < 2 * UNWRITTEN_LIMIT
    assert sum(window.sampled_steps for window in sink.of("window")) == steps
    assert merge_windows(*sink.of("window")).tensors == merge_windows(*recording.session().windows).tensors
    assert len(sink.of("event")) == steps


def test_a_short_run_has_the_same_windows_in_its_file_as_in_memory() -> None:
    sink = Kept()
    recording = Recording(s.RunInfo(), [sink])
    assert WAITING_LIMIT >= 2 * UNWRITTEN_LIMIT
    for number in range(2 * UNWRITTEN_LIMIT - 1):
        step(recording, number)
    recording.close()
    assert tuple(sink.of("window")) == recording.session().windows


def test_events_are_announced_and_written_at_once() -> None:
    sink, announced = Kept(), []
    recording = Recording(s.RunInfo(), [sink], announce=announced.append)
    recording.event(event())
    assert announced == [event()]
    recording._sinks.wait()
    assert sink.of("event") == [event()]


def test_flush_returns_when_the_file_is_complete(tmp_path: Path) -> None:
    recording = Recording(s.RunInfo(), [SessionWriter(tmp_path, s.RunInfo())])
    for number in range(5):
        step(recording, number)
        recording.flush()
        read = read_session(tmp_path)
        assert read.progress.steps == sum(window.sampled_steps for window in read.windows) == number + 1
    recording.close()


def test_a_failing_sink_is_reported_once_on_the_recording_thread() -> None:
    broken, sound, told = Kept(fails=True), Kept(), []
    recording = Recording(
        s.RunInfo(), [broken, sound], tell=lambda note: told.append((note, threading.current_thread()))
    )
    step(recording, 0)
    recording.flush()
    ((note, thread),) = told
    assert "Kept failed and is no longer written: no space left" in note
    assert thread is threading.current_thread()
    step(recording, 1)
    recording.close()
    assert len(told) == 1
    assert sound.of("note") == [note]
    assert recording.session().notes == (note,)


def test_a_sink_that_fails_during_close_produces_a_warning() -> None:
    recording = Recording(s.RunInfo(), [Kept(fails=True)])
    with pytest.warns(MpinspectWarning, match="no space left"):
        recording.close()


# -- how a run may end -----------------------------------------------------------------------------------------------------

RUN = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import made_sessions as made
from mpinspect.ranges import session as s
from mpinspect.ranges.capture import recording as recordings
from mpinspect.ranges.store.sinks import open_sinks
recordings.WRITE_INTERVAL_S, recordings.WRITE_COST_FACTOR = 0.0, 0
recording = recordings.Recording(s.RunInfo(), open_sinks(sys.argv[2], s.RunInfo()).sinks)

def train(first, last):
    for step in range(first, last):
        recording.add_window(made.step_window(step))
        recording.step_done(step + 1, 0, step + 1, True)
"""


def ended_by(code: str, directory: Path) -> tuple[launched.Ended, s.Session]:
    launched.write(directory / "work", RUN + textwrap.dedent(code))
    done = launched.bare(directory / "work", "train.py", str(TESTS), str(directory), forked=True)
    return done, read_session(directory)


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("signal.raise_signal(signal.SIGINT)", -2)],
    ids=["falls off", "sys.exit", "exception", "Ctrl-C"],
)
def test_records_are_written_however_the_interpreter_ends(end: str, status: int, tmp_path: Path) -> None:
    done, read = ended_by(f"train(0, 20)\nrecording.write()\n{end}", tmp_path)
    assert done.status == status, done.err
    assert read.progress.steps == sum(window.sampled_steps for window in read.windows) == 20
    assert not read.notes


def test_a_recording_can_be_closed_in_an_atexit_handler(tmp_path: Path) -> None:
    done, read = ended_by("import atexit\natexit.register(recording.close)\ntrain(0, 20)", tmp_path)
    assert (done.status, done.err) == (0, "")
    assert read.progress.ended
    assert sum(window.sampled_steps for window in read.windows) == 20


def test_os_exit_right_after_close_loses_no_record(tmp_path: Path) -> None:
    done, read = ended_by("train(0, 20)\nrecording.close()\nos._exit(5)", tmp_path)
    assert done.status == 5
    assert read.progress.ended
    assert read.progress.steps == sum(window.sampled_steps for window in read.windows) == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    """The child trains and closes its recording while the parent writes, and both exit normally."""
    done, read = ended_by(
        """
        train(0, 20)
        child = os.fork()
        if not child:
            train(20, 40)
            recording.close()
            sys.exit(0)
        train(20, 30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        recording.close()
        """,
        tmp_path,
    )
    assert done.status == 0, done.err
    assert read.progress.steps == sum(window.sampled_steps for window in read.windows) == 30
    assert not read.notes


# -- in memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1] * 200, [1, 5, 2, 9, 1, 1, 1] * 30, [0] * 100, [64, *[1] * 300]])
def test_merging_bounds_the_number_of_windows_and_covers_every_step(lengths: list[int]) -> None:
    kept, merges = WindowList(), 0
    first = 0
    for length in lengths:
        before = len(kept)
        kept.add(Window(first, first + max(length, 1) - 1, length, {}, {0: length}), limit=8)
        merges = max(merges, before + 1 - len(kept))
        first += max(length, 1)
        assert len(kept) <= 16
    windows = kept.as_tuple()
    assert merges <= 2, "one call merges few windows"
    assert sum(window.sampled_steps for window in windows) == sum(lengths)
    edges = [(window.first_step, window.last_step) for window in windows]
    assert all(last + 1 == following for (_, last), (following, _) in pairwise(edges))


def test_a_run_of_many_tensors_is_stored_as_equal_columns() -> None:
    keys = [TensorKey(f"layer.{number}", kinds.WEIGHT_GRADIENT) for number in range(40)]
    tensor = next(iter(made.step_window(3).tensors.values()))
    windows = [Window(number, number, 1, dict.fromkeys(keys, tensor)) for number in range(5)]
    recording = Recording(s.RunInfo())
    for window in windows:
        recording.add_window(window)
    held = recording.session()
    assert all(isinstance(window.tensors, TensorColumns) for window in held.windows)
    assert held.windows == tuple(windows)
    assert held.totals() == s.Session(windows=tuple(windows)).totals()


# -- a disk that is full for a while ------------------------------------------------------------------------------------------


class Disk:
    """Limits the size of this process's files: as on a full disk, a write is truncated, and the next one fails."""

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, self._before[1]))

    def make_room(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.make_room()


def test_no_record_is_lost_if_a_full_disk_has_room_again(tmp_path: Path, disk: Disk) -> None:
    told: list[str] = []
    recording = Recording(s.RunInfo(), [SessionWriter(tmp_path, s.RunInfo())], tell=told.append)

    def steps(numbers: range) -> None:
        for number in numbers:
            step(recording, number)
            recording.flush()

    steps(range(5))
    before = read_session(tmp_path)
    disk.fill((tmp_path / "session.mpinspect").stat().st_size + 40)
    recording.event(event(5))
    steps(range(5, 60))
    recording.note("something else")
    recording.flush()
    # The file contains no partial record, so a reader gets the same session as before.
    assert read_session(tmp_path) == before
    (full,) = (note for note in told if "could not write" in note)
    assert full.startswith("SessionWriter could not write the records since step 5 (")
    assert "holds them in memory" in full
    assert len(recording._sinks._keepers[0]._windows) <= WAITING_LIMIT
    disk.make_room()
    steps(range(60, 63))
    recording.close()
    read = read_session(tmp_path)
    assert read.totals() == recording.session().totals()
    assert sum(window.sampled_steps for window in read.windows) == 63
    assert read.events == (event(5),)
    assert read.progress == recording.progress
    (again,) = (note for note in read.notes if "could write again" in note)
    # The writing thread may retry a few steps later.
    assert re.search("again at step 6[0-3]: the records since step 5 have been written too", again)
    assert {full, again, "something else"} <= set(read.notes)
    assert not any("damaged" in note or "within a record" in note for note in read.notes)


def test_a_disk_that_stays_full_is_reported_at_the_end(tmp_path: Path, disk: Disk) -> None:
    told: list[str] = []
    recording = Recording(s.RunInfo(), [SessionWriter(tmp_path, s.RunInfo())], tell=told.append)
    disk.fill(1)
    for number in range(4):
        step(recording, number)
        recording.flush()
    recording.close()
    assert [re.sub(r" \(.*|until.*", "", note) for note in told] == [
        "SessionWriter could not write the records since step 0",
        "SessionWriter could not write ",
    ]
    # The file holds no window, so the first step is lost too.
    assert "the records since step 0 are not in the log_dir; the report is still complete" in told[1]
    assert recording.session().progress.steps == 4
    assert read_session(tmp_path).windows == ()


def test_the_tensorboard_log_resumes_after_a_full_disk_without_a_torn_record(tmp_path: Path, disk: Disk) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    from mpinspect.ranges.report.tensorboard import TensorBoardSink

    recording = Recording(s.RunInfo(), [TensorBoardSink(tmp_path)], tell=lambda note: None)
    (file,) = tmp_path.iterdir()
    for number in range(9):
        if number == 3:
            disk.fill(file.stat().st_size + 17)
        if number == 6:
            disk.make_room()
        step(recording, number)
        recording.flush()
    recording.close()
    steps = {found.step for found in EventFileLoader(str(file)).Load()}
    # Steps 3 to 5 waited, and may be merged into one window.
    assert {0, 1, 2, 6, 7, 8} <= steps


def test_a_repeatedly_full_disk_adds_a_limited_number_of_notes(tmp_path: Path, disk: Disk) -> None:
    told: list[str] = []
    recording = Recording(s.RunInfo(), [SessionWriter(tmp_path, s.RunInfo())], tell=told.append)
    for number in range(40):
        (disk.make_room if number % 2 else lambda: disk.fill(1))()
        step(recording, number)
        recording.flush()
    disk.make_room()
    recording.close()
    assert len(told) == 2 * MOST_TOLD
    assert read_session(tmp_path).totals() == recording.session().totals()


def test_retried_events_do_not_count_towards_the_event_limit(tmp_path: Path, disk: Disk) -> None:
    """The writer counts the events that it has written, not the attempts."""
    with SessionWriter(tmp_path, s.RunInfo()) as writer:
        disk.fill(writer.path.stat().st_size)
        for _ in range(1500):
            with pytest.raises(OSError, match="too large"):
                writer.event(event())
        disk.make_room()
        writer.event(event())
        writer.progress(s.Progress(1))
    read = read_session(tmp_path)
    assert (read.events, read.notes) == ((event(),), ())


def test_of_the_backwards_of_a_step_the_last_one_has_its_loss_scale():
    recording = Recording(s.RunInfo())
    for step, scale in [
        (0, 64.0),
        (0, 64.0),
        (1, 64.0),
        (1, 4.0),
        (2, 64.0),
        (2, 4.0),
        (3, 4.0),
        (3, 64.0),
        (4, 8.0),
        (4, 64.0),
    ]:
        recording.scale(step, scale)
    assert recording.progress.scales == ((0, 64.0), (1, 4.0), (3, 64.0))
