"""The speed of counting exponents on a CPU, compared with alternatives. Every ratio is taken within one run.

    python benchmarks/counting.py [--json benchmarks/results/counting-cpu.json] [--largest 1000000000] [--quick]

Each repetition allocates new tensors, because the time of a memory-bound pass depends on its pages; results are medians over
the repetitions. The contestants rotate, on tensors that were read once before, after a pause in which the previous one's
threads go to sleep. "read" is the fastest known read of the same memory: NumPy's maximum of it as 64-bit integers, on as many
threads as torch has, or torch's sum(), whichever is faster. The ratios transfer to other machines better than the times.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from hard_data import DENSE, HALF_ZEROS, KINDS, fresh
from machine import arguments, write_results
from targets import checked, verdicts
from torch.utils.tensorboard import SummaryWriter

from mpinspect.counting import fastest, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1_000, 32_000, 1_000_000, 25_000_000, 100_000_000)
#: The size at which the targets, every dtype and hard data are measured.
PROMISED = 25_000_000
#: Above this size, only contestants that read the memory once or twice are measured.
_LARGEST_FOR_SLOW_WAYS = PROMISED
#: The time of a small tensor is the mean over several tensors with about this many elements in all.
_ELEMENTS_A_TURN = 1 << 23
_MOST_TENSORS = 100
#: OpenMP's threads spin for some milliseconds after their work, and would take cores from the next contestant.
_PAUSE_S = 0.01

Contestant = Callable[[torch.Tensor], object]


@dataclass
class Row:
    """One contestant on one kind of data: the median over fresh allocations, and ratios within the same repetitions.

    ``over_sum``: relative to sum() of dense data. ``over_dense``: relative to the same contestant on dense data.
    """

    dtype: str
    elements: int
    data: str
    way: str
    us: float
    ns_per_value: float
    gb_per_s: float
    over_sum: float
    over_dense: float


def contestants(elements: int, dtype: torch.dtype, writer: SummaryWriter) -> dict[str, Contestant]:
    """Return name -> call, for dense data. The last contestants are for float32 only, their usual dtype."""
    target = torch.zeros(elements, dtype=dtype)
    found: dict[str, Contestant] = {
        "mpinspect": fastest.count,
        "mpinspect in torch": reference.count,
        "sum": torch.sum,
        "copy": target.copy_,
    }
    if elements * dtype.itemsize >= 1 << 20:
        found["read"] = Reader(torch.get_num_threads())
    if dtype == torch.float32 and elements <= _LARGEST_FOR_SLOW_WAYS:
        found["torch.frexp"] = torch.frexp
        found["torch.histc"] = lambda values: torch.histc(values, 100)
        found["add_histogram"] = lambda values: writer.add_histogram("values", values)
    return found


class Reader:
    """Reads memory once with NumPy: the maximum of its 64-bit words, with one thread per part."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self, values: torch.Tensor) -> None:
        words = values.view(torch.int64).numpy()
        for done in [self._pool.submit(np.max, part) for part in np.array_split(words, self._threads)]:
            done.result()


def measure(elements: int, dtype: torch.dtype, kinds: tuple[str, ...], repeats: int) -> list[Row]:
    """Measure every contestant on dense data, and mpinspect on the other kinds, which show how its time depends on the data."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        ways = contestants(elements, dtype, writer)
        ours: dict[str, Contestant] = {"mpinspect": fastest.count}
        for repetition in range(repeats):
            for data in kinds:
                timed = in_turn(ways if data == DENSE else ours, repetition)
                for name, taken in time_ways(timed, data, elements, dtype).items():
                    seconds[data, name].append(taken)
    medians = {key: statistics.median(taken) for key, taken in seconds.items()}
    if (DENSE, "read") in medians:
        medians[DENSE, "read"] = min(medians[DENSE, "read"], medians[DENSE, "sum"])
    return [row(dtype, elements, data, name, medians) for data, name in medians]


def time_ways(ways: dict[str, Contestant], data: str, elements: int, dtype: torch.dtype) -> dict[str, float]:
    """Return seconds per call of each contestant, over newly allocated tensors."""
    number = max(1, min(_MOST_TENSORS, _ELEMENTS_A_TURN // elements))
    tensors = [fresh(data, elements, dtype) for _ in range(number)]
    for tensor in tensors:
        tensor.sum()
    taken = {}
    for name, way in ways.items():
        time.sleep(_PAUSE_S)
        started = time.perf_counter()
        for tensor in tensors:
            way(tensor)
        taken[name] = (time.perf_counter() - started) / number
    return taken


def in_turn(ways: dict[str, Contestant], repetition: int) -> dict[str, Contestant]:
    """Rotate the contestants, so that each repetition starts with another one."""
    names = list(ways)
    first = repetition % len(names)
    return {name: ways[name] for name in names[first:] + names[:first]}


def row(dtype: torch.dtype, elements: int, data: str, name: str, medians: dict[tuple[str, str], float]) -> Row:
    taken = medians[data, name]
    return Row(
        str(dtype).removeprefix("torch."),
        elements,
        data,
        name,
        taken * 1e6,
        taken / elements * 1e9,
        elements * dtype.itemsize / taken / 1e9,
        taken / medians[DENSE, "sum"],
        taken / medians[DENSE, name],
    )


def promises(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the targets for float32 with their measured values; empty if their size was not measured."""
    found = {(row.data, row.way): row for row in rows if row.dtype == "float32" and row.elements == PROMISED}
    if not found:
        return []
    count, half_zeros = found[DENSE, "mpinspect"], found[HALF_ZEROS, "mpinspect"]
    return [
        checked("counting.over_sum", count.over_sum),
        checked("counting.add_histogram", found[DENSE, "add_histogram"].us / count.us),
        checked("counting.half_zeros", half_zeros.over_dense),
    ]


def line(row: Row) -> str:
    return (
        f"{row.dtype:9} {row.elements:>13,} {row.data:14} {row.way:19} {row.us:12,.1f} us {row.ns_per_value:8.3f} ns/value "
        f"{row.gb_per_s:7.2f} GB/s {row.over_sum:7.2f}x sum {row.over_dense:6.2f}x dense"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="elements; 1000000000 needs 12 GB of memory")
    parser.add_argument("--repeats", type=int, default=7, help="fresh allocations to take the median of (default 7)")
    parser.add_argument("--quick", action="store_true", help="float32 alone, two sizes, three repetitions")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.largest]
    sizes += [options.largest] if options.largest > SIZES[-1] else []
    cases = [(size, dtype, KINDS if size == PROMISED else (DENSE,)) for dtype in DTYPES for size in sizes]
    if options.quick:
        cases = [(size, torch.float32, (DENSE, HALF_ZEROS)) for size in (1_000, PROMISED)]
    # Above the targets' size only float32 is measured: other dtypes take time and add no information.
    cases = [(size, dtype, kinds) for size, dtype, kinds in cases if size <= PROMISED or dtype == torch.float32]
    repeats = 3 if options.quick else options.repeats

    trouble = fastest.warm_up(compile_here=True)
    print("\n".join(trouble))
    rows = []
    for size, dtype, kinds in cases:
        found = measure(size, dtype, kinds, repeats)
        print("\n".join(map(line, found)), flush=True)
        rows += found
    kept = promises(rows)
    print(verdicts(kept))
    if options.json:
        results = {"repeats": repeats, "notes": trouble, "rows": [asdict(row) for row in rows], "checked": kept}
        write_results(options.json, results)


if __name__ == "__main__":
    main()
