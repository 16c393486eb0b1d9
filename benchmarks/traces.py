"""Time and memory to read a large trace, compared with HolisticTraceAnalysis and json.load on the same file.

    python benchmarks/traces.py [--json benchmarks/results/traces-cpu.json] [--repeats 5] [--without-hta]

A real trace (an A100 training a convolutional network) is repeated, with shifted times and identifiers, until it has more than
a million events and 284 MB. Every run is a new process, whose peak memory includes the interpreter and imports. Times exclude
imports; mpinspect's include the whole report. HolisticTraceAnalysis (pip install HolisticTraceAnalysis) is skipped if it is not
installed. The readers alternate. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from machine import arguments, write_results
from targets import checked, verdicts

BASE = Path(__file__).parents[1] / "tests" / "data" / "traces" / "a100_tf32_convnet.json.gz"
LEAST_EVENTS, LEAST_BYTES = 1_000_000, 284_000_000
#: An upper bound on any reader's time.
TIMEOUT_S = 600

_EVENTS = '"traceEvents": ['
#: Matches the numbers that differ between repetitions: a key's text, then the number.
_SHIFTED = re.compile(
    r'("(?:ts|correlation|External id|id|Sequence number|Ev Idx|Record function id)": )(\d+(?:\.\d+)?)(?=[,\s])'
)
#: Larger than any identifier of the base, so that identifiers stay unique; and microseconds between repetitions.
_ID_STRIDE, _TIME_STRIDE = 1_000_000, 1_000_000

#: Each reader's code; ``_MEASURE`` reads argv[1] and prints seconds and peak MB.
_READERS = {
    "mpinspect": "from mpinspect import read_trace as read\nread",
    "json.load": "import json\ndef read(path):\n    with open(path) as file: return json.load(file)",
    "hta": (
        "import logging; logging.disable(logging.CRITICAL)\n"
        "from hta.trace_analysis import TraceAnalysis\n"
        "def read(path): return TraceAnalysis(trace_files={0: path}, trace_dir='')"
    ),
}
_MEASURE = """
import sys, time
start = time.perf_counter()
kept = read(sys.argv[1])
seconds = time.perf_counter() - start
# Not getrusage's ru_maxrss: that has the memory of the process that started this one in it.
with open("/proc/self/status") as file:
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
print("\\n", seconds, int(peak) / 1024)
"""


def repetitions(body: str) -> Iterator[str]:
    """Yield the events repeatedly, with later times and new identifiers."""
    parts = _SHIFTED.split(body)
    texts, keys, numbers = parts[::3], parts[1::3], parts[2::3]
    for repetition in count():
        shifted = [
            f"{key}{float(number) + repetition * _TIME_STRIDE:.3f}"
            if key == '"ts": '
            else f"{key}{int(number) + repetition * _ID_STRIDE}"
            for key, number in zip(keys, numbers, strict=True)
        ]
        yield "".join(text for pair in zip(texts, [*shifted, ""], strict=True) for text in pair)


def make_trace(path: Path) -> dict[str, int]:
    """Write the trace; return its size."""
    with gzip.open(BASE, "rt", encoding="utf-8") as file:
        text = file.read()
    start = text.index(_EVENTS) + len(_EVENTS)
    end = text.rindex("}\n  ]") + 1
    events_each = len(json.loads(text)["traceEvents"])
    written = events = 0
    with path.open("w", encoding="utf-8") as file:
        written += file.write(text[:start])
        for body in repetitions(text[start:end]):
            written += file.write(("," if events else "") + body)
            events += events_each
            if events >= LEAST_EVENTS and written >= LEAST_BYTES:
                break
        written += file.write(text[end:])
    return {"events": events, "bytes": written}


def run(reader: str, path: Path) -> dict[str, float]:
    """Read the trace once, in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", _READERS[reader] + _MEASURE, str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{reader} failed on {path}:\n{done.stderr[-2000:]}")
    seconds, peak = map(float, done.stdout.split()[-2:])
    return {"seconds": seconds, "peak_mb": peak}


def measure(readers: dict[str, tuple[str, Path]], repeats: int) -> dict[str, dict[str, float]]:
    """Return, by label, least and median time and the largest peak. Readers alternate, to share the machine's other load."""
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in readers}
    for _ in range(repeats):
        for label, (reader, path) in readers.items():
            runs[label].append(run(reader, path))
    return {
        label: {
            "min_s": round(min(one["seconds"] for one in of_label), 3),
            "median_s": round(statistics.median(one["seconds"] for one in of_label), 3),
            "peak_mb": round(max(one["peak_mb"] for one in of_label), 1),
        }
        for label, of_label in runs.items()
    }


def promises(results: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    own, other = results["mpinspect"], results.get("HolisticTraceAnalysis")
    kept = [checked("traces.seconds", own["median_s"]), checked("traces.memory", own["peak_mb"])]
    if other is not None:
        kept.append(checked("traces.over_hta", other["median_s"] / own["median_s"]))
    return kept


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-hta", action="store_true", help="HolisticTraceAnalysis takes most of the time")
    options = parser.parse_args()
    with_hta = not options.without_hta and find_spec("hta") is not None
    if not with_hta:
        print("without HolisticTraceAnalysis: " + ("not asked for" if options.without_hta else "not installed"))
    with tempfile.TemporaryDirectory() as folder:
        plain, zipped = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
        size = make_trace(plain)
        with plain.open("rb") as source, gzip.open(zipped, "wb", compresslevel=6) as target:
            while piece := source.read(1 << 20):
                target.write(piece)
        size["gzip_bytes"] = zipped.stat().st_size
        print(", ".join(f"{value:,} {name}" for name, value in size.items()))
        readers = {"mpinspect": ("mpinspect", plain), "mpinspect, gzip": ("mpinspect", zipped)}
        readers["json.load"] = ("json.load", plain)
        if with_hta:
            readers["HolisticTraceAnalysis"] = ("hta", plain)
            readers["HolisticTraceAnalysis, gzip"] = ("hta", zipped)
        results = measure(readers, options.repeats)
    own = results["mpinspect"]
    for label, result in results.items():
        times = result["median_s"] / own["median_s"]
        print(f"{label:28} " + "  ".join(f"{key} {value:8.2f}" for key, value in result.items()) + f"  x {times:.2f}")
    kept = promises(results)
    print(verdicts(kept))
    if options.json:
        write_results(options.json, {"trace": size, "repeats": options.repeats, "readers": results, "checked": kept})
    return 0 if all(row["met"] for row in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
