"""The cost of counting blocks along with exponents on a CPU, over counting exponents alone. Every ratio is taken within one run.

    python benchmarks/blocks.py [--json benchmarks/results/blocks-cpu.json] [--repeats 9] [--quick]

All ways read the same matrix, in turn, and each repetition begins with another one. The targets are of the process's CPU
time, and of ratios within a repetition, so that other programs disturb less; ratios of the least CPU time and of the wall-clock
time stand beside. One orientation is counted: blocks along rows, as fprop's operands have them, or along columns (the transposed
matrix), as wgrad's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from counting import in_turn
from hard_data import DENSE, HALF_ZEROS, WIDE, fresh
from machine import arguments, write_results
from targets import checked, verdicts
from torch import nn

from mpinspect.counting import fastest
from mpinspect.counting.blocks import blocks_and_exponents
from mpinspect.ranges.capture.layers import Selection, find_layers
from mpinspect.ranges.faults.measure.converted import converted_layers

#: 25 M elements; tiles, threads' parts and blocks of 128 x 128 divide it.
SHAPE, QUICK = (6016, 4096), (128, 4096)
BF16_VALUES = "bfloat16 values"
CASES = (
    *((torch.float32, data) for data in (DENSE, HALF_ZEROS, WIDE, BF16_VALUES)),
    (torch.bfloat16, DENSE),
)
BLOCKS = ((1, 32), (1, 16), (1, 128), (128, 128))
EXPONENTS, PROMISED, COLUMNS = "exponents", "1x32", "1x32 columns"


@dataclass
class Row:
    """One way on one kind of data. ``over_exponents``: relative to the exponents alone, which the others count, too.

    Args:
        ms: median of the CPU time; ``over_exponents``: median of its ratios within a repetition; ``least``: ratio of the least.
        wall, least_wall: the same two ratios of the wall-clock time.
    """

    dtype: str
    data: str
    threads: int
    way: str
    ms: float
    over_exponents: float
    least: float
    wall: float
    least_wall: float


def ways(values: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return name -> call."""
    found: dict[str, Callable[[], Any]] = {EXPONENTS: lambda: fastest.count(values)}
    for rows, columns in BLOCKS:
        found[f"{rows}x{columns}"] = lambda block=(rows, columns): blocks_and_exponents(values, block, exponents=True)
    found[COLUMNS] = lambda: blocks_and_exponents(values.T, exponents=True)
    return found


def measure(dtype: torch.dtype, data: str, threads: int, shape: tuple[int, int], repeats: int) -> list[Row]:
    """Measure all ways on one kind of data."""
    torch.set_num_threads(threads)
    drawn = fresh(DENSE, math.prod(shape), torch.bfloat16).float() if data == BF16_VALUES else None
    calls = ways((fresh(data, math.prod(shape), dtype) if drawn is None else drawn).reshape(shape))
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repeats):
        for name, call in in_turn(calls, repetition).items():
            started, began = time.process_time(), time.perf_counter()
            call()
            cpu[name].append(time.process_time() - started)
            wall[name].append(time.perf_counter() - began)
    name = str(dtype).removeprefix("torch.")

    def ratios(seconds: dict[str, list[float]], way: str) -> tuple[float, float]:
        pairs = zip(seconds[way], seconds[EXPONENTS], strict=True)
        return statistics.median(taken / alone for taken, alone in pairs), min(seconds[way]) / min(seconds[EXPONENTS])

    return [
        Row(
            name,
            data,
            threads,
            way,
            statistics.median(cpu[way]) * 1e3,
            *ratios(cpu, way),
            *ratios(wall, way),
        )
        for way in calls
    ]


def promises(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the targets with the larger ratio of one and two threads."""
    return [
        checked(
            key,
            max(row.over_exponents for row in rows if (row.dtype, row.data, row.way) == (dtype, data, PROMISED)),
        )
        for key, dtype, data in (
            ("blocks.float32", "float32", DENSE),
            ("blocks.wide", "float32", WIDE),
            ("blocks.bfloat16_values", "float32", BF16_VALUES),
            ("blocks.bfloat16", "bfloat16", DENSE),
        )
    ]


def ledger_ms(repeats: int = 5) -> float:
    """Return the least CPU time, in ms, of looking up which format each product of 1,000 modules computes in."""
    pairs = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(400))
    layers = find_layers(nn.Sequential(*pairs), Selection(None, None))
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        converted_layers(layers)
        taken.append(1000 * (time.process_time() - started))
    return min(taken) * 1000 / len(layers)


def line(row: Row) -> str:
    ratios = f"{row.over_exponents:5.2f}x (least {row.least:.2f}x), wall {row.wall:.2f}x ({row.least_wall:.2f}x)"
    return f"{row.dtype:9} {row.data:15} {row.threads} threads {row.way:14} {row.ms:8.2f} ms {ratios}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="calls of each way to take the median of (default 9)")
    parser.add_argument("--quick", action="store_true", help="small matrices, three repetitions")
    options = parser.parse_args()
    shape, repeats = (QUICK, 3) if options.quick else (SHAPE, options.repeats)
    trouble = fastest.warm_up(compile_here=True)
    print("\n".join(trouble))
    rows = []
    for dtype, data in CASES:
        for threads in (1, 2):
            found = measure(dtype, data, threads, shape, repeats)
            print("\n".join(map(line, found)), flush=True)
            rows += found
    kept = [*promises(rows), checked("blocks.ledger", ledger_ms())]
    print(verdicts(kept))
    if options.json:
        results = {"repeats": repeats, "notes": trouble, "rows": [asdict(row) for row in rows], "checked": kept}
        write_results(options.json, results)


if __name__ == "__main__":
    main()
