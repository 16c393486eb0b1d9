"""Generates thousands of damaged or malicious files from a seed; reads each and reports it in every form.

    python tests/hostile.py [--inputs 100000] [--seed 0]

An input passes if its reader produces a report or raises its documented error. ``Hostile`` modifies good files: bits flipped,
truncated, spliced; and, with valid checksums, fields of other types, huge numbers, deep nesting, random columns.
"""

import argparse
import gzip
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_sessions as made
import numpy as np

from mpinspect.commands.lint import BASELINE_SCHEMA, read_baseline
from mpinspect.commands.output import UnusableError
from mpinspect.kernels.profile import read_trace
from mpinspect.kernels.trace import TraceError
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import kinds
from mpinspect.ranges import session as s
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.store import FILE_NAME, SessionError, frames, read_session, save_session
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting import forms
from mpinspect.run.reading import read_run

#: Characters that output must escape: C0, C1, DEL, direction marks, line separators, lone surrogates.
STEERING = "\x00\x07\b\t\r\v\f\x1b[31m\x1b]0;title\x07\x7f\x85\x9b2J\u200e\u202e\u2066\u2028\u2029\ud800\udcff"
#: A forged line, for names that could inject a line break.
NEW_LINE = "\nforged"

LISTS, OBJECTS = "[" * 50_000 + "]" * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000
_TEXTS = (
    LISTS,
    OBJECTS,
    "[" * 990 + "]" * 990,
    "[" * 400,
    "Infinity",
    "-Infinity",
    "NaN",
    "1e999",
    "-1e999",
    "1" * 5000,
    "",
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30, -(10**30), 10**400),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, "", "x", "inf", "-inf", "nan", "NaN", STEERING, NEW_LINE, "é" * 300),
    *([], {}, [[]], [{}], {"": None}, [1], ["x"], [["x", "y"]], {"a": [1, {"b": 2}]}, [None] * 50),
    *("weight", "activation_gradient", "update", "loss", "forward", "end", "float16", "<f8", "O", "V9", "<i8"),
)


def good_session() -> s.Session:
    """Return a session with every kind of record: flushed, overflowed, non-finite and noisy layers; a changing loss scale."""
    session = made.full_session()
    windows, watched = [], []
    for step in range(12):
        tensors = {}
        for number, kind in enumerate((*kinds.KINDS, kinds.WEIGHT_GRADIENT, kinds.ACTIVATION_GRADIENT)):
            low = (-30, -12, -2, 12)[number % 4] - number
            counts = np.array([5, 0, 90 + step, 1000, 700, 3], dtype=np.int64)
            histogram = ExponentHistogram.from_counts(
                counts, low, powers_of_two=counts // 5, near_top=counts // 9, zeros=step, infs=int(step == 9)
            )
            lost = {"float16": LostUpdates(step, step + 5, True)} if kind == kinds.UPDATE else {}
            peaks = {low + 5: 2, low + 4: 1}
            key = TensorKey(f"block.{number}", kind)
            tensors[key] = TensorWindow(
                histogram,
                3,
                peaks,
                ("float16",),
                ("float16", "float32")[number % 2],
                (None, -40)[number % 2],
                lost,
                2000,
            )
            watched.append(TensorInfo(*key, f"block.{number}", "Linear", (3, 4), "float32", ""))
        windows.append(Window(10 * step, 10 * step + 9, 3, tensors, {-3: 2, -1: 1}))
    scales = tuple(s.ScaleChange(10 * n, 2.0 ** (16 - n)) for n in range(8))
    progress = s.Progress(120, 36, 9, 240, True, True, "", scales, 60, 100, 0.5, 9.0)
    infos = {info.key: info for info in (*session.watched, *watched)}
    return s.Session(
        session.info, tuple(infos.values()), (*session.windows, *windows), session.events * 3, session.notes, progress
    )


class Hostile:
    """Inputs of one seed.

    Args:
        seed: for all random choices.
        folder: for files.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._random = random.Random(seed)
        self._folder = folder
        self._records: list[tuple[bytes, bytes]] = []
        for number, session in enumerate((good_session(), made.full_session(), s.Session())):
            data = save_session(session, folder / f"good-{number}").read_bytes()
            self._records.append([(kind, payload) for _, kind, payload in frames.frames(data, [])])  # type: ignore[arg-type]
        self._run = {
            "schema": "mpinspect.run", "command": "train.py --x", "outcome": "running", "process": 1, "host": "there",
            "saw": ["1 model was inspected"], "models": [{"name": "Net", "log_dir": "runs/Net"}], "job": "7", "by_error": True,
        }  # fmt: skip
        self._baseline = {
            "schema": BASELINE_SCHEMA, "schema_version": 1, "gpu": "H100", "dtype": "float16",
            "findings": [{"id": "size-off", "layer": f"head.{n}", "size": 1023 + n} for n in range(4)],
        }  # fmt: skip
        self._trace = _good_trace()

    # -- inputs ---------------------------------------------------------------------------------------------------------

    def session(self) -> bytes:
        """A session file."""
        pick = self._random.random()
        records = list(self._random.choices(self._records, (6, 3, 1))[0])
        if pick < 0.12:
            return self._bytes_changed(_file(records))
        if pick < 0.2:
            return self._spliced(records)
        changes = min(self._random.choice((1, 1, 1, 2, 5)), len(records))
        for place in self._random.sample(range(len(records)), changes):
            records[place] = self._record_changed(*records[place])
        return _file(records)

    def baseline(self) -> bytes:
        """A baseline of the lint."""
        return self._document(self._baseline)

    def run_record(self) -> bytes:
        """A run.json."""
        return self._document(self._run)

    def trace(self) -> bytes:
        """A trace, gzipped or not."""
        data = self._document(self._trace)
        if self._random.random() < 0.3:
            data = gzip.compress(data, 1, mtime=0)
            if self._random.random() < 0.7:
                data = self._bytes_changed(data)
        return data

    # -- changes ----------------------------------------------------------------------------------------------------------

    def _bytes_changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 3, 20))):
            at = self._random.randrange(max(len(changed), 1))
            action = self._random.randrange(5)
            if action == 0 and changed:
                changed[at] ^= 1 << self._random.randrange(8)
            elif action == 1:
                del changed[at:]
            elif action == 2:
                changed[at:at] = changed[self._random.randrange(len(changed) + 1) :][:200]
            elif action == 3:
                del changed[at : at + self._random.randrange(50)]
            else:
                changed[at : at + 4] = self._random.randbytes(4)
            if not changed:
                return b""
        return bytes(changed)

    def _spliced(self, records: list[tuple[bytes, bytes]]) -> bytes:
        """Omit, repeat and reorder records, insert records of another file, and change their types."""
        other = self._random.choice(self._records)
        mixed = [self._random.choice((*records, *other)) for _ in range(self._random.randrange(1, 30))]
        if self._random.random() < 0.5:
            kinds = [kind for kind, _ in records]
            mixed = [(self._random.choice(kinds) if self._random.random() < 0.1 else k, p) for k, p in mixed]
        return _file(mixed)

    def _record_changed(self, kind: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if kind != frames.WINDOW:
            if self._random.random() < 0.1:
                return kind, self._bytes_changed(payload)
            return kind, self._json_changed(payload)
        body = zlib.decompress(payload)
        (size,) = struct.unpack_from("<I", body)
        header, columns = body[4 : 4 + size], body[4 + size :]
        pick = self._random.random()
        if pick < 0.1:
            return kind, self._bytes_changed(payload)
        if pick < 0.2:
            body = self._bytes_changed(body)
            return kind, zlib.compress(body, 1)
        if pick < 0.6:
            header = self._json_changed(header)
        else:
            header, columns = self._columns_changed(header, columns)
        return kind, zlib.compress(struct.pack("<I", len(header)) + header + columns, 1)

    def _columns_changed(self, header: bytes, data: bytes) -> tuple[bytes, bytes]:
        """Change the numbers of one column, and perhaps its type or length."""
        document = json.loads(header)
        chosen, at, parts = self._random.randrange(len(document["columns"])), 0, []
        for index, (name, dtype, length) in enumerate(document["columns"]):
            column = np.frombuffer(data, dtype, length, at)
            at += column.nbytes
            if index == chosen:
                column = self._numbers_changed(column)
                document["columns"][index] = [name, column.dtype.str, len(column)]
            parts.append(column.tobytes())
        return json.dumps(document).encode(), b"".join(parts)

    def _numbers_changed(self, column: np.ndarray) -> np.ndarray:
        if column.dtype == "<f8":
            extremes = (0.0, -1.0, 2.0, 1.0, 1e308, 5e-324, float("inf"), float("nan"), 1.999)
            changed = column.copy()
        else:
            extremes = (0, 1, -1, 127, 2**31, 2**62, 2**63 - 1, -(2**63), -4000, 4000, 10**6)
            changed = column.astype("<i8")
        for _ in range(self._random.choice((1, 1, 2, len(changed)))):
            if len(changed):
                changed[self._random.randrange(len(changed))] = self._random.choice(extremes)
        action = self._random.randrange(8)
        if action == 0:
            changed = np.repeat(changed, 2)
        elif action == 1:
            changed = changed[: len(changed) // 2]
        elif action == 2 and len(changed):
            changed = np.full_like(changed, changed[0])
        return changed

    def _document(self, good: Any) -> bytes:
        text = self._json_changed(json.dumps(good).encode())
        for _ in range(self._random.choice((0, 0, 1, 3))):
            text = self._json_changed(text) if _is_json(text) else text
        return self._bytes_changed(text) if self._random.random() < 0.2 else text

    def _json_changed(self, payload: bytes) -> bytes:
        """Replace, remove or duplicate one value, or make it invalid JSON."""
        try:
            document = json.loads(payload.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return self._bytes_changed(payload)
        mark = "@here@"
        changed = _exchanged(document, self._random, mark)
        text = json.dumps(changed)
        as_text = self._random.random() < 0.25
        written = self._random.choice(_TEXTS) if as_text else json.dumps(self._random.choice(_VALUES))
        if len(written) < 100 and self._random.random() < 0.03:
            written = ",".join([written or "0"] * 2000)
        if self._random.random() < 0.05 and isinstance(changed, dict):
            names = [self._random.choice(list(changed)) for _ in range(50) if changed]
            text = text[:-1] + "".join(f', "{name}": {written}' for name in names) + "}"
        return text.replace(json.dumps(mark), written).encode("utf-8", "surrogatepass")


def _exchanged(value: Any, choose: random.Random, mark: str) -> Any:
    """Return the value with one inner value marked or removed."""
    if isinstance(value, dict) and value and choose.random() < 0.9:
        key = choose.choice(list(value))
        if choose.random() < 0.08:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: _exchanged(value[key], choose, mark)}
    if isinstance(value, list) and value and choose.random() < 0.9:
        place = choose.randrange(len(value))
        if choose.random() < 0.05:
            return value[:place] + value[place + 1 :]
        return [*value[:place], _exchanged(value[place], choose, mark), *value[place + 1 :]]
    return mark


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _file(records: list[tuple[bytes, bytes]]) -> bytes:
    return frames.HEADER + b"".join(frames.frame(kind, payload) for kind, payload in records)


def _good_trace() -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for number in range(6):
        at = 100.0 * number
        args = {"External id": number, "Input Dims": [[64, 64], [64, 63]], "Input type": ["c10::Half", "c10::Half"]}
        args |= {"Input Strides": [[64, 1], [63, 1]], "Sequence number": number, "Fwd thread id": 0}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": at, "dur": 50.0, "args": args},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at + 5, "dur": 5.0,
             "args": {"correlation": number}},
            {"ph": "X", "cat": "kernel", "name": f"gemm_{number}", "pid": 0, "tid": 7, "ts": at + 20, "dur": 30.0,
             "args": {"device": 0, "stream": 7, "correlation": number, "grid": [1, 1, 1]}},
        ]  # fmt: skip
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "computeMajor": 9, "computeMinor": 0, "numSms": 132}],
        "distributedInfo": {"rank": 0, "world_size": 2},
        "traceName": "/tmp/trace.json",
        "traceEvents": events,
    }


# -- reading and reporting ----------------------------------------------------------------------------------------------------


def report_session(file: Path) -> str:
    """Return the text of every report of a session file. Raises SessionError."""
    return _in_every_form(analyse(read_session(file)))


def report_run(folder: Path) -> str:
    """Return the text of every report of a run directory. Raises SessionError."""
    return _in_every_form(read_run(folder))


def report_trace(file: Path) -> str:
    """Return the text of every report of a trace. Raises TraceError."""
    return _in_every_form(read_trace(file))


def _in_every_form(report: Any) -> str:
    json.loads(report.to_json(), parse_constant=lambda name: 1 / 0)
    return forms.render(report, ".txt", width=100) + forms.render(report, ".md") + forms.render(report, ".html")


def report_baseline(file: Path) -> str:
    """Format the keys of a baseline, as the lint prints them. Raises UnusableError."""
    baseline = read_baseline(str(file))
    "".join(map(str, sorted(baseline.findings)))
    return ""


def is_plain(text: str) -> bool:
    """Return whether the text is free of control characters and of lines that a name injected."""
    return text.replace("\n", "").isprintable() and "\nforged" not in text


def run(inputs: int, seed: int, folder: Path) -> Counter[str]:
    """Read and report that many inputs; count them by their outcome.

    Raises:
        AssertionError: some had an unexpected outcome. Each is saved in ``folder`` under its number.
    """
    hostile = Hostile(seed, folder)
    record_folder = folder / "run"
    save_session(made.full_session(), record_folder / "Net")
    kinds: list[tuple[str, Callable[[], bytes], Path, Callable[[Path], str], Path, type[Exception]]] = [
        ("session", hostile.session, folder / FILE_NAME, report_session, folder / FILE_NAME, SessionError),
        ("baseline", hostile.baseline, folder / "b.json", report_baseline, folder / "b.json", UnusableError),
        ("run record", hostile.run_record, record_folder / "run.json", report_run, record_folder, SessionError),
        ("trace", hostile.trace, folder / "t.json", report_trace, folder / "t.json", TraceError),
    ]
    choose, ended, wrong = random.Random(seed), Counter[str](), list[str]()
    for number in range(inputs):
        name, make, file, report, given, refusal = choose.choices(kinds, (50, 30, 8, 12))[0]
        file.write_bytes(make())
        try:
            text = report(given)
            assert is_plain(text), "something in it reached the report raw"
            ended[f"{name}: reported"] += 1
        except refusal as error:
            ended[f"{name}: refused"] += 1
            if not 0 < len(str(error)) < 2000:
                wrong.append(f"input {number} ({name}) was refused without a sentence")
        except Exception as error:
            wrong.append(f"input {number} ({name}) ended in {error!r} at {_place(error)}")
            shutil.copy(file, folder / str(number))
    assert not wrong, "\n".join([f"seed {seed}, in {folder}:", *wrong])
    return ended


def _place(error: Exception) -> str:
    return " < ".join(
        f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)[:-4:-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    ended = run(options.inputs, options.seed, folder)
    shutil.rmtree(folder)
    for how, number in sorted(ended.items()):
        print(f"{number:>8,} {how}")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB at most")


if __name__ == "__main__":
    sys.exit(main())
