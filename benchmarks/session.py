"""How long a session file takes to write and to read: 1,000 layers, 1,000 samples, and how large it is.

    python benchmarks/session.py [--json benchmarks/results/session-cpu.json]

Each layer has one gradient histogram a sample: about 40 powers of two of a normal distribution, the width that
gradients of real layers have. Times are wall-clock; loading is repeated and the median given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import write_results

from mpinspect import session_file
from mpinspect.exponents import ExponentHistogram
from mpinspect.session import (
    WEIGHT_GRADIENT,
    Progress,
    RunInfo,
    Session,
    TensorInfo,
    TensorKey,
    TensorWindow,
    Window,
)

BINS = 40
ELEMENTS = 1 << 20


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


def window(step: int, keys: list[TensorKey], pool: list[ExponentHistogram]) -> Window:
    tensors = {
        key: TensorWindow(pool[(step * 7919 + position) % len(pool)], 1, {-1: 1}, numel_max=ELEMENTS)
        for position, key in enumerate(keys)
    }
    return Window(step, step, 1, tensors, {-1: 1})


def write(directory: Path, layers: int, samples: int) -> dict[str, float]:
    """Write a run; seconds per call of ``SessionWriter.window``, the rewritings among them."""
    rng = np.random.default_rng(0)
    pool = [histogram(rng) for _ in range(4 * layers + 1)]
    keys = [TensorKey(f"encoder.layers.{index}.linear.weight", WEIGHT_GRADIENT) for index in range(layers)]
    times = []
    with session_file.SessionWriter(directory, RunInfo(model="benchmark")) as writer:
        writer.watched(TensorInfo(*key, key.name, "Linear") for key in keys)
        for step in range(samples):
            counted = window(step, keys, pool)
            start = time.perf_counter()
            writer.window(counted)
            writer.progress(Progress(step + 1, step + 1))
            times.append(time.perf_counter() - start)
    return {
        "append_median_ms": 1e3 * statistics.median(times),
        "append_mean_with_rewritings_ms": 1e3 * statistics.mean(times),
        "longest_rewriting_ms": 1e3 * max(times),
    }


def measure(layers: int, samples: int, repeats: int) -> dict[str, float | int]:
    with tempfile.TemporaryDirectory() as directory:
        written = write(Path(directory), layers, samples)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            session = Session.load(directory)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        totals = session.totals()
        total_s = time.perf_counter() - start
        counted = sum(tensor.samples for tensor in totals.values())
        if counted != layers * samples:
            raise RuntimeError(f"{counted} samples read back of {layers * samples}")
        size = (Path(directory) / session_file.FILE_NAME).stat().st_size
    return {
        "layers": layers,
        "samples": samples,
        "windows_in_file": len(session.windows),
        "file_mb": size / 1e6,
        "load_median_s": statistics.median(times),
        "load_max_s": max(times),
        "totals_s": total_s,
        **written,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results = [measure(options.layers, samples, options.repeats) for samples in options.samples]
    print(json.dumps(results, indent=2))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
