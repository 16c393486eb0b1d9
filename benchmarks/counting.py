"""How fast exponents are counted on a CPU, beside what one would use otherwise. Every figure of a table is of one run.

    python benchmarks/counting.py --json counting.json

Each repetition allocates its tensors anew, because the time of a memory-bound pass depends on the pages that it
happens to get; medians over the repetitions are given. The ratios, not the times, are what carries over to other machines.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import write_results
from torch.utils.tensorboard import SummaryWriter

from mpinspect.counting import count

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
#: What the project promises of float32: counting over sum(), add_histogram() over counting, half zeros over dense.
LIMITS = {"count_over_sum": 18.0, "add_histogram_over_count": 6.0, "half_zeros_over_dense": 1.5}


def time_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def fresh(elements: int, dtype: torch.dtype, *, half_zeros: bool = False) -> torch.Tensor:
    """Normally distributed values of newly allocated memory."""
    values = torch.randn(elements)
    if half_zeros:
        values[torch.rand(elements) < 0.5] = 0
    # A copy even where the dtype is the same: the first write is done by then, as it is for a gradient.
    return values.to(dtype, copy=True)


def measure(elements: int, dtype: torch.dtype, repeats: int, writer: SummaryWriter) -> dict[str, float]:
    """Median times in ms, and their ratios."""
    times: dict[str, list[float]] = {name: [] for name in ("sum", "count", "count_half_zeros", "add_histogram")}
    count(fresh(elements, dtype))
    for step in range(repeats):
        dense = fresh(elements, dtype)
        half = fresh(elements, dtype, half_zeros=True)
        times["sum"].append(time_ms(dense.sum))
        times["count"].append(time_ms(lambda dense=dense: count(dense)))
        times["count_half_zeros"].append(time_ms(lambda half=half: count(half)))
        if dtype == torch.float32:
            times["add_histogram"].append(
                time_ms(lambda dense=dense, step=step: writer.add_histogram("values", dense, step))
            )
    medians = {f"{name}_ms": statistics.median(runs) for name, runs in times.items() if runs}
    medians["count_ns_per_value"] = medians["count_ms"] * 1e6 / elements
    medians["count_over_sum"] = medians["count_ms"] / medians["sum_ms"]
    medians["half_zeros_over_dense"] = medians["count_half_zeros_ms"] / medians["count_ms"]
    if "add_histogram_ms" in medians:
        medians["add_histogram_over_count"] = medians["add_histogram_ms"] / medians["count_ms"]
    return {name: round(value, 4) for name, value in medians.items()}


def small_us(elements: int, repeats: int = 200) -> float:
    """Median time in microseconds of counting one small float32 tensor."""
    values = torch.randn(elements)
    count(values)
    return round(statistics.median(time_ms(lambda: count(values)) for _ in range(repeats)) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=7, help="fresh allocations to take the median of (default 7)")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()

    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            results[name] = measure(options.elements, dtype, options.repeats, writer)
            print(f"{name}: " + "  ".join(f"{key} {value:.3g}" for key, value in results[name].items()))
    small = {str(elements): small_us(elements) for elements in (64, 1024, 4096, 32768)}
    print("float32, small tensors, us per call: " + "  ".join(f"{key}: {value}" for key, value in small.items()))
    for name, limit in LIMITS.items():
        side = ">=" if name.startswith("add_histogram") else "<="
        print(f"float32 {name}: {results['float32'][name]:.2f} (promised: {side} {limit})")
    if options.json:
        results_of_all = {
            "elements": options.elements,
            "repeats": options.repeats,
            "limits_float32": LIMITS,
            "dtypes": results,
            "small_float32_us": small,
        }
        write_results(options.json, results_of_all)


if __name__ == "__main__":
    main()
