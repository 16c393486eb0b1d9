"""The project's performance targets: one row each, with its benchmark and its limit.

A benchmark passes its results to ``checked``; ``docs/performance.md`` lists every target, measured or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One target.

    Args:
        benchmark: the script that measures it, without ``.py``.
        what: the measured quantity, for a row of a table.
        limit: the bound, in ``unit``; an upper bound unless ``at_least``.
        unit: "x" a ratio, "%" a fraction given as 0..1, or a unit of measurement.
        gpu: measured on a CUDA GPU.
    """

    benchmark: str
    what: str
    limit: float
    unit: str
    at_least: bool = False
    gpu: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def promise(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {shown(self.limit, self.unit)}"

    @property
    def device(self) -> str:
        return "gpu" if self.gpu else "cpu"


TARGETS: dict[str, Target] = {
    "counting.over_sum": Target("counting", "counting 25 M float32, over sum()", 5.0, "x"),
    "counting.add_histogram": Target(
        "counting", "TensorBoard's add_histogram of 25 M float32, over counting", 25.0, "x", at_least=True
    ),
    "counting.half_zeros": Target("counting", "counting 25 M float32, half of them zeros, over dense ones", 1.3, "x"),
    "blocks.float32": Target(
        "blocks",
        "25 M float32: blocks of 32 and exponents, over exponents, CPU time, the worse of 1 and 2 threads",
        1.6,
        "x",
    ),
    "blocks.wide": Target("blocks", "25 M float32 whose blocks fit no window of 32 exponents: the same", 1.6, "x"),
    "blocks.bfloat16_values": Target("blocks", "25 M float32 with values of bfloat16: the same", 1.6, "x"),
    "blocks.bfloat16": Target("blocks", "25 M bfloat16: the same", 1.6, "x"),
    "blocks.ledger": Target("blocks", "the formats of 1,000 modules' products, once at attach, CPU time", 50.0, "ms"),
    "overhead.default": Target(
        "overhead", "GPT: weight and activation gradients, every step, watch on, in callbacks over the step", 0.04, "%"
    ),
    "overhead.every_10": Target("overhead", "GPT: every=10, watch off, in callbacks over the step", 0.005, "%"),
    "overhead.watch": Target("overhead", "GPT: the watch alone, in callbacks over the step", 0.01, "%"),
    "overhead.budget": Target("overhead", "GPT: max_overhead=0.02, in callbacks over the step", 0.02, "%"),
    "overhead.module_call": Target("overhead", "between samples, watch off, per module call", 1.0, "us"),
    "cold_starts.added": Target(
        "cold_starts", "mpinspect run of the words example, the first on a machine, over later ones", 5.0, "s"
    ),
    "session.report": Target("session", "mpinspect report of 2,000 layers, 1,000 samples", 3.0, "s"),
    "session.memory": Target("session", "its peak memory", 1000.0, "MB"),
    "page.opens": Target("page", "the page of 2,000 tensors opens in Chromium", 2.0, "s"),
    "page.move": Target("page", "its map drawn again, the longest move of the slider", 50.0, "ms"),
    "page.size": Target("page", "its file", 6.0, "MB"),
    "traces.seconds": Target("traces", "a trace of a million events read, median", 6.0, "s"),
    "traces.memory": Target("traces", "its reader's peak memory", 400.0, "MB"),
    "traces.over_hta": Target("traces", "HolisticTraceAnalysis on the same trace, over ours", 1.0, "x", at_least=True),
    "gpu.count_over_read": Target("gpu_counting", "counting 1 GiB of float32, over reading it", 1.25, "x", gpu=True),
    "gpu.count_many": Target(
        "gpu_counting",
        "counting ResNet-50's 161 gradients in one launch, over the time of two reads and 10 us",
        1.0,
        "x",
        gpu=True,
    ),
    "gpu.resnet50": Target(
        "gpu_overhead", "ResNet-50, FP16 AMP, batch 128: the step, defaults, over bare", 1.02, "x", gpu=True
    ),
    "gpu.gpt2": Target("gpu_overhead", "GPT-2 small, FP16 AMP: the step, defaults, over bare", 1.02, "x", gpu=True),
    "gpu.synchronisations": Target(
        "gpu_overhead", "synchronisations that the inspector adds to a step (the worse of both)", 0.0, "", gpu=True
    ),
}


def checked(key: str, value: float) -> dict[str, Any]:
    """Return a target and its measured value, for a results file's ``checked`` list."""
    target = TARGETS[key]
    return {
        "key": key,
        "what": target.what,
        "target": target.promise,
        "unit": target.unit,
        "limit": target.limit,
        "value": value,
        "met": target.met(value),
    }


def shown(value: float, unit: str) -> str:
    """Format a value with its unit, to three significant digits."""
    if unit == "%":
        return f"{_digits(100 * value)}%"
    if unit == "x":
        return f"{_digits(value)}x"
    if value < 0:
        # A difference of two times that is smaller than their noise.
        return "below the noise"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def verdicts(rows: list[dict[str, Any]]) -> str:
    """Format the rows of ``checked`` as plain text, one line each."""
    lines = [
        f"{row['what']:90} {shown(row['value'], row['unit']):>10}  {row['target']:16} {'met' if row['met'] else 'MISSED'}"
        for row in rows
    ]
    return "\n".join(lines)
