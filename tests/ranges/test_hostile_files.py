"""A malicious file gives a report or one error, in bounded memory, and its names are escaped on a terminal."""

import dataclasses
import functools
import gzip
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import made_sessions as made
import numpy as np
import pytest
from hostile import NEW_LINE, STEERING

from mpinspect.commands.cli import main
from mpinspect.kernels.trace import TraceError, read_trace_file
from mpinspect.kernels.trace.events import EventStream
from mpinspect.kernels.trace.text import TextChunks
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.store import FILE_NAME, SessionError, frames, read_session, save_session
from mpinspect.ranges.store import checks as counts
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window

#: The limit of memory for reading a file of a few megabytes.
MOST_MB = 1000


def test_fuzzed_inputs_give_a_report_or_one_error(tmp_path: Path) -> None:
    """``python tests/hostile.py`` is the long form of this test."""
    ended = hostile.run(160, 0, tmp_path)
    assert ended["session: reported"] > 40
    assert ended["baseline: refused"] > 20
    # Reading the file is tested with more inputs, without a report.
    fuzzed = hostile.Hostile(1, tmp_path / "more")
    file, loaded = tmp_path / FILE_NAME, 0
    for _ in range(800):
        file.write_bytes(fuzzed.session())
        try:
            loaded += isinstance(read_session(file), s.Session)
        except SessionError:
            continue
    assert loaded > 420


def test_fuzzed_inputs_are_reproducible_from_a_seed(tmp_path: Path) -> None:
    first, second = (hostile.Hostile(7, tmp_path / name) for name in ("a", "b"))
    for _ in range(50):
        assert first.session() == second.session()
        assert first.trace() == second.trace()


# -- sessions -------------------------------------------------------------------------------------------------------------


def session_of(folder: Path, *records: tuple[bytes, Any]) -> Path:
    """Write a session file of an info record and these records; payloads other than bytes become JSON."""
    payloads = [(kind, value if isinstance(value, bytes) else json.dumps(value).encode()) for kind, value in records]
    file = folder / FILE_NAME
    framed = [frames.frame(kind, payload) for kind, payload in ((frames.INFO, b'{"model": "Net"}'), *payloads)]
    file.write_bytes(frames.HEADER + b"".join(framed))
    return file


EVENT = {"step": 1, "micro_batch": 0, "phase": "forward", "module": "", "what": "weight", "tensor": "", "value": "inf"}


@pytest.mark.parametrize(
    ("kind", "payload", "says"),
    [
        (frames.PROGRESS, {"steps": "x"}, "steps is 'x', not a whole number"),
        (frames.PROGRESS, {"steps": 10**30}, "steps is 1000000000000000000000000000000, not within"),
        (frames.PROGRESS, {"steps": -1}, "steps is -1, not within"),
        (frames.PROGRESS, b'{"own_s": 1e400}', "own_s is inf, beyond float64"),
        (frames.PROGRESS, b'{"scales": [[1, 1' + b"0" * 400 + b"]]}", "beyond float64"),
        (frames.PROGRESS, b'{"own_s": Infinity}', "holds Infinity, which is no JSON"),
        (frames.PROGRESS, b'{"steps": 1' + b', "steps": 1' * 100_000 + b"}", "has a key twice"),
        (frames.NOTE, b"[" * 1_000_000, "is nested too deeply"),
        (frames.NOTE, {"a": 1}, "is an object, not text"),
        (frames.INFO, {"kinds": ["gradients"]}, "kinds is 'gradients', none of weight_gradient"),
        (frames.KEYS, [["a", "tensor"]], "kind is 'tensor', none of"),
        (frames.WATCHED, [{"name": "a", "kind": "weight"}], "module is missing"),
        (frames.EVENT, EVENT | {"phase": "sideways"}, "phase is 'sideways', none of forward, backward, end"),
        (frames.EVENT, EVENT | {"what": 3}, "what is 3, not text"),
        (frames.EVENT, EVENT | {"value": "\x1b[2J"}, r"value is '\x1b[2J', none of inf, nan"),
        (frames.DROPPED, {"events": "many"}, "is 'many', not a whole number"),
    ],
)
def test_a_field_of_a_wrong_type_ends_the_reading_with_a_note(
    kind: bytes, payload: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = session_of(tmp_path, (frames.NOTE, "before"), (kind, payload), (frames.NOTE, "after"))
    read = read_session(file)
    assert read.notes[0] == "before"
    assert "after" not in read.notes
    assert says in read.notes[-1]
    assert f"({kind.decode()} " in read.notes[-1]
    assert "or a newer mpinspect wrote it" in read.notes[-1]
    assert main(["report", str(file), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert main(["report", str(file)]) == 0


def changed_window(change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> bytes:
    """Return the payload of a window of two tensors, after a change of its header and columns."""
    payload = next(payload for _, kind, payload in frames.frames(_two_tensors(), []) if kind == frames.WINDOW)
    body = zlib.decompress(payload)
    (size,) = struct.unpack_from("<I", body)
    header, at, columns = json.loads(body[4 : 4 + size]), 4 + size, {}
    for name, dtype, length in header["columns"]:
        columns[name] = np.frombuffer(body, dtype, length, at).copy()
        at += columns[name].nbytes
    change(header, columns)
    header["columns"] = header.get("listed") or [[name, c.dtype.str, len(c)] for name, c in columns.items()]
    text = json.dumps(header).encode()
    return zlib.compress(struct.pack("<I", len(text)) + text + b"".join(c.tobytes() for c in columns.values()), 9)


@functools.cache
def _two_tensors() -> bytes:
    histogram = ExponentHistogram.from_counts([3, 0, 7], -5, powers_of_two=[1, 0, 2], near_top=[1, 0, 2], zeros=2)
    tensor = TensorWindow(histogram, 4, {-3: 3, -4: 1}, lost_updates={"float16": LostUpdates(1, 2)})
    tensors = {TensorKey(name, kinds.WEIGHT_GRADIENT): tensor for name in "ab"}
    session = s.Session(windows=(Window(0, 9, 4, tensors, {-3: 4}),))
    with tempfile.TemporaryDirectory() as folder:
        return save_session(session, folder).read_bytes()


def put(name: str, numbers: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda header, columns: columns.update({name: np.array(numbers)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("min_exponent", [-(2**62), 2**62]), "impossible number in 'min_exponent'"),
        (put("min_exponent", [4096, 0]), "more bins than there are exponents"),
        (put("bins", [-3, 9]), "negative number in 'bins'"),
        (put("peaks", [-1, 5]), "negative number in 'peaks'"),
        (put("peak_exponents", [10**6] * 4), "impossible number in 'peak_exponents'"),
        (put("peak_counts", [0, 1, 1, 1]), "a peak that no sample had"),
        (put("counts", [0, 1, 7, 3, 0, 7]), "more powers of two and near tops than values"),
        (put("counts", [-(2**63), 1, 7, 3, 0, 7]), "negative number in 'counts'"),
        (put("counts", [2**62, 0, 2**62] * 2), "more elements than an int64"),
        (put("powers_of_two", [127, 0, 2, 1, 0, 2]), "more powers of two and near tops than values"),
        (put("near_top", [-1, 0, 2, 1, 0, 2]), "negative number in 'near_top'"),
        (put("min_significand", [np.nan, 1.0]), "impossible number in 'min_significand'"),
        (put("max_significand", [np.inf, 1.0]), "impossible number in 'max_significand'"),
        (put("samples", [1.0, 2.0]), "no column 'samples', or one of a wrong type"),
        (put("key", [0, 0]), "has a tensor twice"),
        (put("key", [0, 2]), "a tensor without a name"),
        (put("key", [0, -1]), "a tensor without a name"),
        (put("context", [0, 9]), "refers to a context that is not there"),
        (lambda header, columns: header.update(gradient_peaks=[["x", 1]]), "gradient_peaks.exponent is 'x'"),
        (lambda header, columns: header.update(gradient_peaks=[[0, 0]]), "gradient_peaks.steps is 0"),
        (lambda header, columns: header.update(first_step="x"), "first_step is 'x'"),
        (
            lambda header, columns: header.update(lost_updates=[[5, "float16", 1, 2, True]]),
            "of a tensor that is not there",
        ),
        (
            lambda header, columns: header.update(lost_updates=[["a", "float16", 1, 2, True]]),
            "lost_updates.position is 'a'",
        ),
        (lambda header, columns: header.update(listed=[["key", "|O", 1]]), "columns.type is '|O'"),
        (lambda header, columns: header.update(listed=[["key", "<i8", -1]]), "columns.entries is -1"),
        (lambda header, columns: header["contexts"][0].update(floor_exponent=1e400), "no JSON"),
    ],
)
def test_an_invalid_window_is_left_out_with_a_note(change: Any, says: str, tmp_path: Path) -> None:
    keys = [["a", "weight_gradient"], ["b", "weight_gradient"]]
    file = session_of(tmp_path, (frames.KEYS, keys), (frames.WINDOW, changed_window(change)))
    read = read_session(file)
    assert not read.windows
    assert says in read.notes[-1]
    hostile.report_session(file)


def test_two_keys_of_the_same_tensor_are_refused(tmp_path: Path) -> None:
    keys = [["a", "weight_gradient"], ["a", "weight_gradient"]]
    window = changed_window(lambda header, columns: None)
    assert (
        "a tensor twice" in read_session(session_of(tmp_path, (frames.KEYS, keys), (frames.WINDOW, window))).notes[-1]
    )


# -- bombs ----------------------------------------------------------------------------------------------------------------


def bomb(megabytes: int, piece: bytes = bytes(1 << 20)) -> bytes:
    pack = zlib.compressobj(9)
    return b"".join([*(pack.compress(piece) for _ in range(megabytes)), pack.flush()])


def test_windows_that_decompress_to_too_many_bytes_are_refused(
    tmp_path: Path, peak_mb: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = session_of(tmp_path, (frames.WINDOW, bomb(300)))
    assert file.stat().st_size < 1 << 20
    assert "unpacks to more than 268,435,456 bytes" in read_session(file).notes[-1]
    assert peak_mb() < MOST_MB
    # The sum of many windows has a limit too.
    keys = [["a", "weight_gradient"], ["b", "weight_gradient"]]
    window = changed_window(lambda header, columns: None)
    monkeypatch.setattr(counts, "LARGEST_WINDOWS", 10 * len(zlib.decompress(window)))
    read = read_session(session_of(tmp_path, (frames.KEYS, keys), *[(frames.WINDOW, window)] * 30))
    assert len(read.windows) == 10
    assert "unpacks to more than 0 bytes" in read.notes[-1]


def test_a_window_of_many_small_bins_is_refused(tmp_path: Path, peak_mb: Callable[[], float]) -> None:
    """After merging, each tensor would have a bin for every exponent from -2000 to 2000."""
    tensors, keys = 20_000, []
    keys = [[str(number), "weight_gradient"] for number in range(tensors)]

    def spread(exponent: int) -> bytes:
        def change(header: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
            for name in columns:
                columns[name] = np.zeros(tensors, "<i8") if columns[name].dtype != "<f8" else np.ones(tensors)
            columns |= {name: np.ones(tensors, "|i1") for name in ("bins", "counts", "samples")}
            columns |= {"key": np.arange(tensors), "min_exponent": np.full(tensors, exponent)}
            columns |= {name: np.zeros(0, "|i1") for name in ("peak_exponents", "peak_counts")}
            header["lost_updates"] = []

        return changed_window(change)

    file = session_of(tmp_path, (frames.KEYS, keys), (frames.WINDOW, spread(-2000)), (frames.WINDOW, spread(2000)))
    read = read_session(file)
    assert len(read.windows) == 1
    assert "more than 33,554,432 bins" in read.notes[-1]
    assert peak_mb() < MOST_MB


def test_records_and_files_above_the_size_limit_are_refused(tmp_path: Path, peak_mb: Callable[[], float]) -> None:
    file = session_of(tmp_path, (frames.KEYS, b"[" + b"[]," * (12 << 20) + b"[]]"))
    assert "bytes of JSON, more than 33,554,432" in read_session(file).notes[-1]
    file.write_bytes(frames.HEADER)
    with file.open("r+b") as out:
        out.truncate(1 << 40)
    with pytest.raises(
        SessionError, match=r"session\.mpinspect is larger than 536,870,912 bytes: a session file is never that large"
    ):
        read_session(file)
    assert peak_mb() < MOST_MB


def test_a_traces_other_values_are_stored_up_to_a_limit(tmp_path: Path) -> None:
    """The values have nine megabytes, and the gzip file about a hundredth of that."""
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wb", 1) as out:
        out.write(b"{")
        for number in range(50):
            out.write(b'"a%d": "' % number + b"x" * 180_000 + b'", ')
        out.write(json.dumps(hostile._good_trace())[1:].encode())
    stream = EventStream(TextChunks(file))
    assert sum(map(len, stream.batches())) == 18
    assert 10 < len(stream.top_level) < 25


@pytest.mark.parametrize("key", ["distributedInfo", "deviceProperties", "traceName", "job_name", "mast_job_name"])
@pytest.mark.parametrize("depth", [300, 900, 100_000])
@pytest.mark.parametrize("as_text", [False, True])
def test_deep_nesting_in_a_trace_raises_no_recursion_error(key: str, depth: int, as_text: bool, tmp_path: Path) -> None:
    nested = "[" * depth + "]" * depth
    text = json.dumps(hostile._good_trace() | {key: "@"}).replace('"@"', json.dumps(nested) if as_text else nested)
    (tmp_path / "t.json").write_text(text)
    try:
        kernels = read_trace_file(tmp_path / "t.json").kernels
    except TraceError:
        return
    assert len(kernels) == 6


# -- terminals --------------------------------------------------------------------------------------------------------------

NAME = f"layer{STEERING}{NEW_LINE}"


def assert_plain(text: str) -> None:
    steering = [ascii(line) for line in text.split("\n") if not line.isprintable() or line.startswith("forged")]
    assert not steering


def steering_session() -> s.Session:
    """Return a session in which every name contains ``NAME``."""
    session = hostile.good_session()
    context = {"dtypes": (NAME,), "passed_through": NAME, "lost_updates": {NAME: LostUpdates(3, 5)}}

    def named(window: Window) -> Window:
        import dataclasses

        tensors = {
            TensorKey(key.name + NAME, key.kind): dataclasses.replace(tensor, **context)
            for key, tensor in window.tensors.items()
        }
        return dataclasses.replace(window, tensors=tensors)

    watched = [
        TensorInfo(info.name + NAME, info.kind, NAME, NAME, info.shape, NAME, note)
        for info, note in zip(session.watched, [NAME, ""] * 20, strict=False)
    ]
    events = [
        s.Event(step, 0, "forward", NAME, kinds.ACTIVATION, NAME + "x", "inf", explanation=NAME) for step in range(3)
    ]
    info = s.RunInfo(NAME, NAME, kinds.KINDS, 1, True, {NAME: NAME}, 0.02)
    progress = s.Progress(9, 9, scale_unknown_reason=NAME)
    return s.Session(info, tuple(watched), tuple(map(named, session.windows)), tuple(events), (NAME, NAME), progress)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    for name, session in (("Net", steering_session()), (f"Net{NEW_LINE}\x1b[31m", made.full_session())):
        whole = dataclasses.replace(session, progress=dataclasses.replace(session.progress, ended=True))
        save_session(whole, tmp_path / "run" / name / FILE_NAME)
    record = {"outcome": NAME, "command": NAME, "saw": [NAME], "models": [{"log_dir": f"gone{NAME}"}]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    return tmp_path / "run"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    text = json.dumps(hostile._good_trace())
    for good in ("gemm_0", "gemm_1", "aten::mm", "NVIDIA H100"):
        text = text.replace(good, good + json.dumps(NAME)[1:-1])
    (tmp_path / "traces").mkdir()
    for rank in (0, 1):
        path = tmp_path / "traces" / f"rank{rank}\x1b[31m\nforged.json"
        path.write_text(text.replace('"rank": 0', f'"rank": {rank}'))
    (tmp_path / "traces" / "broken\x1b[31m\nforged.json").write_text("{")
    return tmp_path / "traces"


@pytest.mark.parametrize("which", ["run", "session", "trace"])
def test_names_from_files_are_escaped_on_terminals_and_in_markdown(
    which: str, run_directory: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "run": ["report", run_directory],
        "session": ["report", run_directory / "Net"],
        "trace": ["kernels", trace],
    }
    words = [*map(str, given[which]), "--md", str(tmp_path / "out.md")]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert_plain(captured.out + captured.err)
    assert r"\x1b[31m" in captured.out
    assert_plain((tmp_path / "out.md").read_text(encoding="utf-8"))
    assert main([*words, "--json"]) == 0
    # JSON contains the original names.
    document = capsys.readouterr().out
    assert document.isascii()
    assert STEERING in json.dumps(json.loads(document), ensure_ascii=False).replace("\\", "") or "\\u001b" in document


def test_escape_sequences_in_names_from_files_are_not_sent_to_a_colour_terminal(
    run_directory: Path, trace: Path
) -> None:
    import io
    import re

    from rich.console import Console

    from mpinspect.kernels.profile import read_trace
    from mpinspect.reporting import forms
    from mpinspect.reporting.text import print_to
    from mpinspect.run.reading import read_run

    for report in (read_run(run_directory), read_trace(trace)):
        file = io.StringIO()
        print_to(forms.document(report), Console(file=file, force_terminal=True, width=90))
        # Rich's own sequences set colours and weights.
        assert_plain(re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()))
        assert_plain(re.sub(r"<[^>]*>", "", forms.render(report, ".html")))


WORD = "x\x1b[31m\x07\u202e\udcff\nforged"


@pytest.mark.parametrize(
    "words",
    [
        ["report", WORD],
        ["report", "--fail-on", WORD, "run"],
        ["report", "run", f"--{WORD}"],
        ["report", "run", "--md", WORD],
        ["kernels", WORD],
        ["kernels", "t.json", "--gpu", WORD],
        ["lint", f"{WORD}:make"],
        ["lint", f"torch.nn:{WORD}"],
        ["lint", "torch.nn:Linear", "--input", WORD],
        ["lint", "torch.nn:Linear", "--baseline", WORD],
        ["lint", "torch.nn:Linear", "--gpu", WORD],
        ["lint", "torch.nn:ReLU", "--dtype", WORD],
        ["demo", "--steps", WORD],
        ["run", f"--{WORD}", "script.py"],
        ["run", "--every", WORD, "script.py"],
        ["run", WORD],
        [WORD],
    ],
)
def test_arguments_in_errors_are_escaped(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert status == 2
    assert "forged" in captured.err
    assert_plain(captured.out + captured.err)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu": NAME}, ""),
        ({"dtype": NAME}, ""),
        ({"findings": [{"id": NAME, "layer": NAME, "size": 3}]}, "1 gone"),
        ({"findings": [{"id": "a", "layer": "", "size": 10**400}]}, "is damaged (findings.size is"),
        ({"findings": [{"id": NAME, "layer": "", "size": NAME}]}, "is damaged (findings.size is"),
        ({"schema": NAME}, "is not a baseline"),
        ({"schema_version": NAME}, "of another version"),
        ({"schema_version": [[[[1]]]]}, "of another version"),
        ({"gpu": 3}, "is damaged (gpu is 3, not text)"),
    ],
)
def test_an_invalid_baseline_is_refused_with_a_reason(
    change: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"schema": hostile.BASELINE_SCHEMA, "schema_version": 1, "gpu": "H100", "dtype": "float16", "findings": []}
    (tmp_path / "b.json").write_text(json.dumps(good | change))
    status = main(["lint", "torch.nn:ReLU", "--input", "4,4", "--gpu", "H100", "--baseline", str(tmp_path / "b.json")])
    captured = capsys.readouterr()
    assert status == (2 if "damaged" in says or "baseline" in says or "version" in says else 0)
    assert says in captured.out + captured.err
    assert_plain(captured.out + captured.err)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": Infinity}', '{"a": 1, "a": 2}', "\xff"])
def test_an_unparsable_baseline_is_refused_with_a_fix(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.json").write_bytes(text.encode("latin-1"))
    assert main(["lint", "torch.nn:ReLU", "--input", "4,4", "--baseline", str(tmp_path / "b.json")]) == 2
    error = capsys.readouterr().err
    assert "b.json can't be read: it" in error
    assert "Rewrite it with --write-baseline" in error
