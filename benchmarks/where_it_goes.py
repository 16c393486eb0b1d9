"""Profiles the inspector's time in a training step of the GPT: weight and activation gradients, every step, watch on.

    python benchmarks/where_it_goes.py [--json benchmarks/results/where_it_goes-cpu.json] [--steps 5] [--quick]

cProfile counts and times the calls. A function of the package is charged with its own time and with its calls outside of the
package (torch, NumPy, waiting for threads), so the shares add up to the inspector's total. The profiler slows down every Python
call, which overstates small functions with many calls. Compare only the shares; benchmarks/overhead.py measures the
inspector's share of a step.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from entrances import faults_are_errors
from machine import arguments, write_results
from networks import GPT, adamw, tokens
from onlookers import Trainer

import mpinspect
from mpinspect.counting import fastest

_PACKAGE = Path(mpinspect.__file__).parent
#: Functions of the package that run the training's own work: a backward's time is not the inspector's.
_AROUND_THE_TRAINING = {(str(_PACKAGE / "runtime/torch_calls.py"), "run")}
#: The greatest depth of nested calls outside of the package whose time is attributed to the package.
_DEEPEST_CALLS = 50

#: (file, line, function), and its entry in pstats: primitive calls, calls, own seconds, cumulative seconds, callers.
Function = tuple[str, int, str]
Entry = tuple[int, int, float, float, dict[Function, tuple[int, int, float, float]]]


@dataclass
class Row:
    """One function of the package. ``own_ms_per_step`` includes calls outside of the package; ``fraction`` is of all rows."""

    function: str
    calls_per_step: float
    own_ms_per_step: float
    fraction: float


def profile(steps: int) -> dict[Function, Entry]:
    """Return the statistics of this many inspected steps, after the first ones."""
    torch.manual_seed(0)
    trainer = Trainer(GPT(6, 384, 6, 256, 8192), adamw, tokens(8, 256, 8192))
    profiler = cProfile.Profile()
    with mpinspect.Inspector(trainer.model, optimizers=trainer.optimizer):
        trainer.steps(2)
        profiler.enable()
        trainer.steps(steps)
        profiler.disable()
    found: Any = pstats.Stats(profiler)
    stats: dict[Function, Entry] = found.stats
    return stats


def own_seconds(stats: dict[Function, Entry]) -> dict[Function, tuple[int, float]]:
    """Return calls and seconds of each function of the package, including its calls outside of the package.

    The time of an outside function is divided among its callers, in proportion to its time for each, repeatedly, until it
    reaches a function of the package or the training itself.
    """
    own = {function: entry[2] for function, entry in stats.items() if is_ours(function)}
    outside = {function: entry[2] for function, entry in stats.items() if not is_ours(function)}
    for _ in range(_DEEPEST_CALLS):
        passed_on: dict[Function, float] = defaultdict(float)
        for function, seconds in outside.items():
            for caller, share in _shares_of_callers(function, stats[function]).items():
                (own if caller in own else passed_on)[caller] += seconds * share
        outside = passed_on
    return {function: (stats[function][1], seconds) for function, seconds in own.items()}


def _shares_of_callers(function: Function, entry: Entry) -> dict[Function, float]:
    seconds = {caller: spent[3] for caller, spent in entry[4].items() if caller != function}
    total = sum(seconds.values())
    return {caller: spent / total for caller, spent in seconds.items()} if total else {}


def is_ours(function: Function) -> bool:
    file, _, inside = function
    return Path(file).is_relative_to(_PACKAGE) and (file, inside) not in _AROUND_THE_TRAINING


def rows_of(own: dict[Function, tuple[int, float]], steps: int) -> list[Row]:
    """Return the rows, largest first."""
    total = sum(seconds for _, seconds in own.values()) or 1.0
    named = [(name(function), calls, seconds) for function, (calls, seconds) in own.items()]
    named.sort(key=lambda row: -row[2])
    return [Row(path, calls / steps, seconds / steps * 1e3, seconds / total) for path, calls, seconds in named]


def name(function: Function) -> str:
    """Format a function as "ranges/capture/watch.py:extremes", with its line if a file may hold several of that name."""
    file, line, inside = function
    path = Path(file).relative_to(_PACKAGE).as_posix()
    return f"{path}:{line} {inside}" if inside.startswith(("<", "__")) or inside == "run" else f"{path}:{inside}"


def table(rows: list[Row]) -> str:
    lines = [f"{'':56} {'calls a step':>12} {'ms a step':>10} {'share':>7}"]
    for row in rows:
        lines.append(f"{row.function:56} {row.calls_per_step:12.1f} {row.own_ms_per_step:10.3f} {row.fraction:7.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=15, help="how many functions to name (default 15)")
    parser.add_argument("--quick", action="store_true", help="two steps")
    options = parser.parse_args()
    faults_are_errors()
    fastest.warm_up(compile_here=True)
    steps = 2 if options.quick else options.steps
    rows = rows_of(own_seconds(profile(steps)), steps)
    named = rows[: options.rows]
    print(table(named))
    total = sum(row.own_ms_per_step for row in rows)
    print(f"all {len(rows)} functions of ours: {total:.1f} ms a step, under the profiler")
    if options.json:
        write_results(options.json, {"steps": steps, "total_ms": total, "rows": [asdict(row) for row in named]})


if __name__ == "__main__":
    main()
