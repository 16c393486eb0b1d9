"""The session file stores every field, loses only its tail after a kill or damage, and has a bounded size."""

import dataclasses
import errno
import gc
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import made_sessions as made
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.store import FILE_NAME, SCHEMA_VERSION, SessionError, SessionWriter, frames, read_session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.runtime import appending

TESTS = Path(__file__).parents[1]


def write(directory: Path, session: s.Session, **options) -> Path:
    """Write the session record by record, as a run does."""
    with SessionWriter(directory, session.info, **options) as writer:
        writer.watched(session.watched)
        for window in session.windows:
            writer.window(window)
        for event in session.events:
            writer.event(event)
        for note in session.notes:
            writer.note(note)
        for measurement in session.measurements:
            writer.measurement(measurement)
        writer.precision(session.precision)
        writer.progress(session.progress)
    return writer.path


def one_process():
    """Return a session as a single process writes it, without ranks."""
    return dataclasses.replace(made.full_session(), ranks=())


# -- round trips --------------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=made.sessions)
def test_save_then_load_gives_the_same_session(session, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    path = session.save(directory)
    assert path == directory / FILE_NAME
    assert s.Session.load(directory) == s.Session.load(path) == session


def test_a_session_written_record_by_record_is_loaded_unchanged(tmp_path):
    session = one_process()
    write(tmp_path / "new" / "run", session)
    assert s.Session.load(tmp_path / "new" / "run") == session


def records_of(value):
    """Yield every dataclass instance in a session, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from records_of(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from records_of(item)


def default_of(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_the_full_session_has_no_field_at_its_default():
    """A new field fails here until ``full_session`` sets it, and then in the test above until the file stores it."""
    seen = set()
    for record in records_of(made.full_session()):
        seen.add(type(record))
        for field in dataclasses.fields(record):
            if default_of(field) is not dataclasses.MISSING:
                assert getattr(record, field.name) != default_of(field), f"{type(record).__name__}.{field.name}"
    records = {kind for kind in vars(s).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert records <= seen


def test_numbers_that_json_cannot_represent_are_restored(tmp_path):
    event = s.Event(0, 0, "backward", "", kinds.UPDATE, "", "inf", float("inf"), (float("inf"), 5e-324))
    progress = s.Progress(scales=(s.ScaleChange(0, float("inf")), s.ScaleChange(1, None)))
    s.Session(events=(event,), progress=progress).save(tmp_path)
    read = s.Session.load(tmp_path)
    assert read.events == (event,)
    assert read.progress == progress


def test_a_name_that_is_not_valid_unicode_is_restored(tmp_path):
    s.Session(notes=("layer \udcff",)).save(tmp_path)
    assert s.Session.load(tmp_path).notes == ("layer \udcff",)


def test_watched_tensors_are_replaced_by_key_and_notes_stored_once(tmp_path):
    first, second = TensorInfo("a", kinds.WEIGHT, "m", "Linear"), TensorInfo("b", kinds.WEIGHT, "m", "Linear")
    frozen = dataclasses.replace(first, note="frozen")
    with SessionWriter(tmp_path, s.RunInfo()) as writer:
        writer.watched([first, second])
        size = writer.path.stat().st_size
        writer.watched([second])
        assert writer.path.stat().st_size == size
        writer.watched([frozen])
        writer.note("once")
        writer.note("once")
    assert read_session(tmp_path).watched == (frozen, second)
    assert read_session(tmp_path).notes == ("once",)


# -- damage ---------------------------------------------------------------------------------------------------------


def is_prefix(part, whole):
    return part == whole[: len(part)]


def assert_a_prefix(read: s.Session, whole: s.Session) -> None:
    assert is_prefix(read.windows, whole.windows)
    assert is_prefix(read.events, whole.events)
    assert is_prefix(read.watched, whole.watched)
    assert read.progress in (whole.progress, s.Progress())


def places(data, starts):
    """Return every byte at a record's begin and end, and every seventh of the rest, which one checksum protects."""
    near = {place for end in (*starts, len(data)) for place in range(end - 24, end + 24)}
    return [place for place in range(len(frames.HEADER), len(data)) if place in near or place % 7 == 0]


def test_a_file_truncated_anywhere_loses_only_its_last_record(tmp_path):
    whole = made.full_session()
    path = write(tmp_path, whole)
    data = path.read_bytes()
    boundaries = {start for start, _, _ in frames.frames(data, [])} | {len(data)}
    for size in places(data, boundaries):
        path.write_bytes(data[:size])
        read = read_session(path)
        assert_a_prefix(read, whole)
        last = max(boundary for boundary in boundaries if boundary <= size)
        cut = [note for note in read.notes if "ends within a record" in note]
        assert len(cut) == (size not in boundaries)
        if cut:
            assert f"The last {size - last:,} of its {size:,} bytes were left out" in cut[0]
    for size in range(len(frames.HEADER)):
        path.write_bytes(data[:size])
        with pytest.raises(SessionError, match=r"holds nothing \(\d+ bytes\).*killed.*Delete it"):
            read_session(path)


def test_a_flipped_byte_anywhere_loses_only_the_records_from_it(tmp_path):
    whole = made.full_session()
    path = write(tmp_path, whole)
    data = bytearray(path.read_bytes())
    starts = [start for start, _, _ in frames.frames(bytes(data), [])]
    for position in places(data, starts):
        data[position] ^= 0x41
        path.write_bytes(data)
        data[position] ^= 0x41
        read = read_session(path)
        assert_a_prefix(read, whole)
        start = max(start for start in starts if start <= position)
        left_out = f"The last {len(data) - start:,} of its {len(data):,} bytes were left out"
        assert left_out in read.notes[-1]


def test_an_undecodable_record_ends_the_reading_with_a_note(tmp_path):
    path = write(tmp_path, made.full_session())
    whole = path.read_bytes()
    for kind in (frames.INFO, frames.WATCHED, frames.WINDOW, frames.EVENT, frames.PROGRESS, frames.KEYS):
        path.write_bytes(whole + frames.frame(kind, b"[1]") + frames.frame(frames.NOTE, b'"later"'))
        read = read_session(path)
        assert "can't be decoded" in read.notes[-1]
        assert "later" not in read.notes
        assert read.windows == made.full_session().windows


def test_zeros_at_the_end_of_the_file_are_left_out(tmp_path):
    path = write(tmp_path, made.full_session())
    path.write_bytes(path.read_bytes() + bytes(512))
    read = read_session(path)
    assert read.windows == made.full_session().windows
    assert "The last 512 of its" in read.notes[-1]


def test_record_types_and_fields_of_a_later_version_are_skipped(tmp_path):
    path = write(tmp_path, made.full_session())
    later = json.dumps({"steps": 7, "mood": "good"}).encode()
    path.write_bytes(path.read_bytes() + frames.frame(b"NEWS", b"\xff") + frames.frame(frames.PROGRESS, later))
    read = read_session(path)
    assert read.progress == s.Progress(steps=7)
    assert read.notes == made.full_session().notes


# -- bounded size ---------------------------------------------------------------------------------------------------


def test_the_file_of_a_long_run_is_bounded_and_loses_no_count(tmp_path):
    sizes = []
    with SessionWriter(tmp_path, s.RunInfo(), limit=4) as writer:
        for step in range(300):
            writer.window(made.step_window(step))
            writer.progress(s.Progress(step + 1, step + 1))
            sizes.append(writer.path.stat().st_size)
            assert len(read_session(tmp_path).windows) <= 8
    assert max(sizes[150:]) <= max(sizes[:150])
    read = read_session(tmp_path)
    expected = s.Session(windows=tuple(made.step_window(step) for step in range(300)))
    assert read.totals() == expected.totals()
    assert read.gradient_peaks() == {0: 300}
    assert [window.first_step for window in read.windows[1:]] == [window.last_step + 1 for window in read.windows[:-1]]
    assert read.progress == s.Progress(300, 300)
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_rewriting_the_file_preserves_all_other_records(tmp_path):
    session = one_process()
    windows = session.windows * 20
    write(tmp_path, dataclasses.replace(session, windows=windows), limit=3)
    read = read_session(tmp_path)
    assert dataclasses.replace(read, windows=()) == dataclasses.replace(session, windows=())
    assert read.totals() == dataclasses.replace(session, windows=windows).totals()


def test_tensors_added_later_are_stored(tmp_path):
    keys = [TensorKey(f"layer{index}", kinds.WEIGHT_GRADIENT) for index in range(10)]
    with SessionWriter(tmp_path, s.RunInfo(), limit=2) as writer:
        for step, key in enumerate(keys):
            writer.window(made.step_window(step, key))
    totals = read_session(tmp_path).totals()
    assert {key: tensor.histogram.total for key, tensor in totals.items()} == dict(zip(keys, range(1, 11), strict=True))


def test_progress_alone_does_not_make_the_file_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("mpinspect.ranges.store.writer.STALE_BYTES", 4096)
    with SessionWriter(tmp_path, s.RunInfo()) as writer:
        for step in range(2000):
            writer.progress(s.Progress(step))
            assert writer.path.stat().st_size < 3 * 4096
    assert read_session(tmp_path).progress.steps == 1999


def test_the_first_of_many_events_and_notes_are_stored_and_the_others_counted(tmp_path):
    with SessionWriter(tmp_path, s.RunInfo()) as writer:
        for step in range(1234):
            writer.event(s.Event(step, 0, "forward", "", kinds.ACTIVATION, "", "inf"))
        for index in range(1001):
            writer.note(f"note {index}")
    read = read_session(tmp_path)
    assert [event.step for event in read.events] == list(range(1000))
    assert "234 further events are not in the session file" in " ".join(read.notes)
    assert "1 further notes are not" in " ".join(read.notes)
    assert "note 999" in read.notes


def test_the_first_and_last_of_many_scale_changes_are_stored(tmp_path):
    scales = tuple(s.ScaleChange(step, 2.0 ** (step % 16)) for step in range(5000))
    with SessionWriter(tmp_path, s.RunInfo()) as writer:
        writer.progress(s.Progress(5000, scales=scales))
    read = read_session(tmp_path)
    assert read.progress.scales == scales[:500] + scales[-500:]
    assert "changes" in read.notes[0]


# -- reading during the run, and after a kill -------------------------------------------------------------------------

WRITING = """
    import itertools, sys
    sys.path.insert(0, sys.argv[1])
    import made_sessions as made
    from mpinspect.ranges import session as s
    from mpinspect.ranges.store import SessionWriter

    writer = SessionWriter(sys.argv[2], s.RunInfo(model="killed"), limit=3)
    for step in itertools.count():
        writer.window(made.step_window(step))
        writer.progress(s.Progress(step + 1, step + 1))
        print(step, flush=True)
"""


def assert_whole_steps(read: s.Session) -> int:
    """Assert that the session contains each step once, and return the number of steps."""
    steps = sum(window.sampled_steps for window in read.windows)
    edges = [(window.first_step, window.last_step) for window in read.windows]
    assert [step for first, last in edges for step in range(first, last + 1)] == list(range(steps))
    counted = sum(tensor.histogram.total for tensor in read.totals().values())
    assert counted == steps * (steps + 1) // 2
    assert read.progress.steps in (steps, steps - 1)
    assert read.info.model == "killed"
    return steps


def test_the_file_is_readable_during_writes_and_after_kill_9(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WRITING), str(TESTS), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "0\n"
        seen = [assert_whole_steps(read_session(tmp_path)) for _ in range(60) if child.stdout.readline()]
        last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        last = max([last, *(int(line) for line in child.stdout if line.endswith("\n"))])
    assert seen == sorted(seen)
    assert seen[-1] > 14, "the file was rewritten several times while it was read"
    read = read_session(tmp_path)
    assert assert_whole_steps(read) >= last + 1
    assert not read.progress.ended


# -- a full disk --------------------------------------------------------------------------------------------------------


class FileSizeLimit:
    """Limits the size of this process's files: as on a full disk, a write is truncated, and the next one fails."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *_) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_full_disk_loses_the_record_but_not_the_file(tmp_path):
    with SessionWriter(tmp_path, s.RunInfo()) as writer:
        writer.window(made.step_window(0))
        with FileSizeLimit(writer.path.stat().st_size + 100), pytest.raises(OSError, match="too large"):
            writer.window(made.step_window(1))
        assert len(read_session(tmp_path).windows) == 1
        writer.window(made.step_window(2))
    read = read_session(tmp_path)
    assert [window.first_step for window in read.windows] == [0, 2]
    assert read.notes == ()


def test_the_old_file_stays_in_use_if_rewriting_fails(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with SessionWriter(tmp_path, s.RunInfo(), limit=2) as writer:
        with monkeypatch.context() as blocked:
            blocked.setattr(appending, "create_numbered", refuse)
            for step in range(6):
                writer.window(made.step_window(step))
        assert len(read_session(tmp_path).windows) == 6
        for step in range(6, 20):
            writer.window(made.step_window(step))
    read = read_session(tmp_path)
    assert len(read.windows) <= 4
    assert read.totals() == s.Session(windows=tuple(made.step_window(step) for step in range(20))).totals()


def test_a_disk_that_is_full_at_the_start_gets_no_file(tmp_path):
    with FileSizeLimit(5), pytest.raises(SessionError, match=r"can't be written.*log_dir with write permission"):
        SessionWriter(tmp_path, s.RunInfo())
    assert list(tmp_path.iterdir()) == []
    with FileSizeLimit(100), pytest.raises(SessionError, match=r"can't be written: file too large"):
        made.full_session().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_raises_an_error_and_can_be_closed_again(tmp_path):
    writer = SessionWriter(tmp_path, s.RunInfo())
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.note("late")


def test_deleting_the_file_during_the_run_raises_an_error(tmp_path):
    with SessionWriter(tmp_path / "run", s.RunInfo()) as writer:
        writer.progress(s.Progress(steps=1))
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError, match=r"session\.mpinspect was deleted during the run"):
            writer.progress(s.Progress(steps=2))


def test_a_file_moved_during_the_run_is_written_at_its_new_path(tmp_path):
    with SessionWriter(tmp_path / "run", s.RunInfo()) as writer:
        (tmp_path / "run").rename(tmp_path / "moved")
        writer.progress(s.Progress(steps=2))
    assert read_session(tmp_path / "moved").progress.steps == 2


def test_a_garbage_collected_writer_closes_its_file(tmp_path):
    SessionWriter(tmp_path, s.RunInfo(model="dropped"))  # An unclosed file would warn, and warnings are errors here.
    gc.collect()
    assert read_session(tmp_path).info.model == "dropped"


@settings(deadline=None, max_examples=20)
@given(st.integers(-5, 0))
def test_a_limit_below_one_is_refused(tmp_path_factory, limit):
    with pytest.raises(ValueError, match="at least 1"):
        SessionWriter(tmp_path_factory.mktemp("run"), s.RunInfo(), limit=limit)


# -- bad input ------------------------------------------------------------------------------------------------------------


def test_another_run_in_log_dir_is_named_and_not_changed(tmp_path):
    path = write(tmp_path, made.full_session())
    before = path.read_bytes()
    expected = r"already holds another run \(91 steps of GröβeNet, started 2024-05-06T07:08:09\): give another log_dir, or delete"
    with pytest.raises(SessionError, match=expected):
        SessionWriter(tmp_path, s.RunInfo())
    with pytest.raises(SessionError, match="already holds another run"):
        made.full_session().save(tmp_path)
    assert path.read_bytes() == before


def test_an_unreadable_file_in_log_dir_is_not_changed(tmp_path):
    (tmp_path / FILE_NAME).write_text("mine")
    with pytest.raises(SessionError, match=r"already holds a session\.mpinspect that can't be read"):
        SessionWriter(tmp_path, s.RunInfo())
    assert (tmp_path / FILE_NAME).read_text() == "mine"


def test_a_log_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="is a file, not a directory: give another log_dir"):
        SessionWriter(tmp_path / "file", s.RunInfo())
    with pytest.raises(SessionError, match="lies within a file"):
        SessionWriter(tmp_path / "file" / "run", s.RunInfo())


@pytest.fixture
def unprivileged():
    """Drop root's rights during the test, since root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_a_log_dir_that_is_not_writable_is_refused(tmp_path, unprivileged):
    closed = tmp_path / "closed"
    if os.geteuid() != 65534:
        closed.mkdir(mode=0o555)
    with pytest.raises(
        SessionError, match=r"can't be written: permission denied\. Give a log_dir with write permission"
    ):
        SessionWriter(closed, s.RunInfo())


def test_a_file_of_another_format_is_refused(tmp_path):
    for content in (b"PK\x03\x04 a zip file", b"short", frames.MAGIC[:-1] + b"x" + b"text mode"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(
            SessionError, match=r"is not an mpinspect session file \(it begins with .*\): give a run directory"
        ):
            read_session(tmp_path / "other")


def test_a_newer_schema_asks_for_an_upgrade(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(frames.MAGIC + struct.pack("<I", SCHEMA_VERSION + 1) + b"anything")
    with pytest.raises(
        SessionError, match=r"newer mpinspect \(schema version 2; this one reads up to 1\): upgrade mpinspect"
    ):
        read_session(tmp_path)


def test_missing_directories_and_missing_sessions_have_different_messages(tmp_path):
    with pytest.raises(SessionError, match=r"There is no .*nowhere: give a run directory"):
        read_session(tmp_path / "nowhere")
    with pytest.raises(SessionError, match=r"holds no session\.mpinspect: no inspector had it as log_dir"):
        read_session(tmp_path)
    write(tmp_path / "b", made.full_session())
    write(tmp_path / "a", made.full_session())
    with pytest.raises(SessionError, match=r"directories in it do: .*/a, .*/b\. Give one of them"):
        read_session(tmp_path)
