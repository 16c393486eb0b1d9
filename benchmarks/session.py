"""A large run: the cost of writing it during training, and the time to read it and report on it.

    python benchmarks/session.py [--layers 2000] [--kinds 1] [--samples 1000] [--json benchmarks/results/session-cpu.json]

Each tensor has one histogram a sample: about 40 powers of two of a normal distribution, the width that gradients of real layers
have. The run is written three ways:

- by the writer alone: seconds per call and per rewriting (which merges neighbouring windows), and the file's size;
- as an inspector writes it, session file and TensorBoard log, while a loop of small torch operations runs: how long the loop's
  calls into the recording took, and the longest single operation and step (100 operations), against the same loop alone.
  Writes follow on each other without the pause that a run leaves between them;
- the result is read: by ``mpinspect report`` as a user runs it, and by its parts, each in a fresh process with its peak
  resident memory.

Times are wall-clock, on a machine that should have nothing else to do; medians where something is repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import arguments, write_results
from targets import checked

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.capture import recording as recordings
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.session import Progress, RunInfo
from mpinspect.ranges.store import FILE_NAME, SessionWriter
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window

BINS = 40
ELEMENTS = 1 << 20
OPERATIONS_PER_STEP = 100

#: The largest resident memory of a process. Not ru_maxrss, which a child begins with its parent's.
PEAK = """
def peak_rss_mb():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024
"""
#: Prints the seconds of each part and the process's largest resident memory.
PARTS = f"""
import json, sys, time
{PEAK}
started = time.perf_counter()
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.store import read_session
imported = time.perf_counter()
session = read_session(sys.argv[1])
loaded = time.perf_counter()
report = analyse(session)
analysed = time.perf_counter()
text = str(report)
rendered = time.perf_counter()
print(json.dumps({{
    "import_s": imported - started, "load_s": loaded - imported, "analyse_s": analysed - loaded, "text_s": rendered - analysed,
    "peak_rss_mb": peak_rss_mb(), "windows": len(session.windows),
    "counted": sum(tensor.samples for tensor in session.totals().values()),
}}))
"""
#: The command as a user runs it, and the largest resident memory at its end.
COMMAND = f"""
import sys
from mpinspect.commands.cli import main
{PEAK}
status = main(["report", sys.argv[1]])
print(peak_rss_mb(), file=sys.stderr)
raise SystemExit(status)
"""


def histogram(rng: np.random.Generator) -> ExponentHistogram:
    """Counts of a layer with about a million elements whose exponents are spread over 40 powers of two."""
    shape = np.exp(-(((np.arange(BINS) - rng.uniform(20, 30)) / 7.0) ** 2))
    counts = rng.poisson(ELEMENTS * shape / shape.sum()).astype(np.int64)
    counts[[0, -1]] += 1
    return ExponentHistogram.from_counts(
        counts,
        -40,
        powers_of_two=rng.poisson(counts / 2**22),
        near_top=rng.binomial(counts, 2.0**-12),
        zeros=int(rng.integers(1000)),
        min_abs=2.0**-40 * float(rng.uniform(1, 2)),
        max_abs=2.0**-1 * float(rng.uniform(1, 2)),
    )


class MadeRun:
    """The windows of a run with many tensors."""

    def __init__(self, layers: int, kinds: int) -> None:
        rng = np.random.default_rng(0)
        self.kinds = KINDS[:kinds]
        self._pool = [histogram(rng) for _ in range(4 * layers + 1)]
        modules = [f"encoder.layers.{index}.linear" for index in range(layers)]
        self.watched = [
            TensorInfo(*_key(module, kind), module, "Linear", (1024, 1024), "float32")
            for module in modules
            for kind in self.kinds
        ]

    def window(self, step: int) -> Window:
        """Return the window of one sampled step."""
        tensors = {
            info.key: TensorWindow(
                self._pool[(step * 7919 + position) % len(self._pool)], 1, {-1: 1}, numel_max=ELEMENTS
            )
            for position, info in enumerate(self.watched)
        }
        return Window(step, step, 1, tensors, {-1: 1})

    def info(self) -> RunInfo:
        return RunInfo(model="benchmark", kinds=self.kinds)


def _key(module: str, kind: str) -> TensorKey:
    return TensorKey(module if kind.startswith("activation") else f"{module}.weight", kind)


def write(directory: Path, run: MadeRun, samples: int) -> dict[str, float]:
    """Write the run with the writer alone; return milliseconds per call, including rewritings."""
    times = []
    with SessionWriter(directory, run.info()) as writer:
        writer.watched(run.watched)
        for step in range(samples):
            counted = run.window(step)
            start = time.perf_counter()
            writer.window(counted)
            writer.progress(Progress(step + 1, step + 1, backwards=step + 1))
            times.append(time.perf_counter() - start)
    return {
        "append_median_ms": 1e3 * statistics.median(times),
        "append_mean_with_rewritings_ms": 1e3 * statistics.mean(times),
        "longest_rewriting_ms": 1e3 * max(times),
        "file_mb": (directory / FILE_NAME).stat().st_size / 1e6,
    }


def stall(directory: Path, run: MadeRun, writes: int) -> dict[str, float]:
    """Write this many windows while a loop runs; return the milliseconds of the loop's delays."""
    alone = _Loop()
    for _ in range(200):
        alone.step()
    # Write without pauses: the worst case.
    recordings.WRITE_INTERVAL_S, recordings.WRITE_COST_FACTOR = 0.0, 0
    recording = recordings.Recording(run.info(), open_sinks(directory, run.info()).sinks)
    recording.watch(run.watched)
    loop, calls = _Loop(), []
    for step in range(writes):
        window = run.window(step)
        start = time.perf_counter()
        recording.add_window(window)
        recording.step_done(step + 1, 0, step + 1, True)
        calls.append(time.perf_counter() - start)
        while recording.is_writing:
            loop.step()
    recording.close()
    return {
        "longest_call_ms": 1e3 * max(calls),
        "median_call_ms": 1e3 * statistics.median(calls),
        **{f"{name}_while_written": value for name, value in loop.figures().items()},
        **{f"{name}_alone": value for name, value in alone.figures().items()},
    }


class _Loop:
    """Steps of small operations that time themselves."""

    def __init__(self) -> None:
        self._matrix = torch.rand(32, 32)
        self._operations: list[float] = []
        self._steps: list[float] = []

    def step(self) -> None:
        began = before = time.perf_counter()
        longest = 0.0
        for _ in range(OPERATIONS_PER_STEP):
            torch.mm(self._matrix, self._matrix)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        self._operations.append(longest)
        self._steps.append(before - began)

    def figures(self) -> dict[str, float]:
        steps = sorted(self._steps)
        return {
            "longest_operation_ms": 1e3 * max(self._operations),
            "longest_step_ms": 1e3 * steps[-1],
            "step_p99_ms": 1e3 * steps[int(0.99 * len(steps))],
            "median_step_ms": 1e3 * statistics.median(steps),
        }


def read(directory: Path, run: MadeRun, samples: int, repeats: int) -> dict[str, float]:
    """Read and report in fresh processes; return seconds and megabytes."""
    parts = [json.loads(_python(PARTS, directory).stdout) for _ in range(repeats)]
    counted, expected = parts[0].pop("counted"), len(run.watched) * samples
    if counted != expected:
        raise RuntimeError(f"{counted} samples read back of {expected}")
    figures = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    return figures | dict(_command(directory, repeats))


def _command(directory: Path, repeats: int) -> Iterator[tuple[str, float]]:
    times, memory = [], 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        done = _python(COMMAND, directory)
        times.append(time.perf_counter() - start)
        memory = max(memory, float(done.stderr.split()[-1]))
    yield "command_s", statistics.median(times)
    yield "command_longest_s", max(times)
    yield "command_peak_rss_mb", memory


def _python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def measure(options: argparse.Namespace, kinds: int) -> dict[str, Any]:
    run = MadeRun(options.layers, kinds)
    with tempfile.TemporaryDirectory() as directory:
        written = write(Path(directory) / "alone", run, options.samples)
        return {
            "layers": options.layers,
            "kinds": kinds,
            "samples": options.samples,
            **written,
            **read(Path(directory) / "alone", run, options.samples, options.repeats),
            **(stall(Path(directory) / "beside", run, options.writes) if options.writes else {}),
        }


def promises(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets for 2,000 layers, one kind and 1,000 samples, if measured."""
    large = [run for run in runs if (run["layers"], run["kinds"], run["samples"]) == (2000, 1, 1000)]
    return [
        checked(f"session.{key}", run[figure])
        for run in large
        for key, figure in (("report", "command_s"), ("memory", "command_peak_rss_mb"))
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument(
        "--kinds",
        type=int,
        nargs="+",
        default=[1],
        choices=range(1, len(KINDS) + 1),
        help="tensors of a layer",
    )
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--writes", type=int, default=150, help="windows written beside a loop; 0: none")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = [measure(options, kinds) for kinds in options.kinds]
    results = {"runs": runs, "checked": promises(runs)}
    print(json.dumps(results, indent=2))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
