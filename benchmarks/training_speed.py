"""The cost of LossScaler and MixedPrecision: fp16-amp training steps against torch.autocast + torch.amp.GradScaler by hand.

    python benchmarks/training_speed.py [--json benchmarks/results/training_speed-cpu.json] [--rounds 7]

All three ways train the same model on the same batches, in short alternating blocks; the figure is the median over the rounds
of the ratio of steps per second. On a CPU all three emulate FP16 products, and the benchmark measures CPU time, which depends
less on the machine's other load. Blocks still cannot resolve a percent. So the results also hold the time inside the scaler's
calls (scale, step without the optimizer's step, update; the median of each), and the ratio that follows from these
alone. Under three minutes on two cores.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from machine import arguments, write_results
from torch import nn

import mpinspect
from mpinspect.demo.demo import stdlib_tokens, word_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_HAND, LOSS_SCALER, MIXED_PRECISION = "GradScaler by hand", "LossScaler", "MixedPrecision"
#: Seconds: wall-clock on a GPU, CPU time of the process on a CPU.
SECONDS = time.perf_counter if DEVICE == "cuda" else time.process_time
#: The target for LossScaler's steps per second, relative to GradScaler's.
TARGET = 0.99

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its batches, steps in a block, and whether products are FP16 (else only the loss is scaled)."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    steps: int
    half: bool = True


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def small_batch(generator: torch.Generator) -> Batch:
    return torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)


CORPUS = stdlib_tokens(100_000)
WORKLOADS = (
    Workload("MLP 64-128-10, batch 32", small_model, small_batch, 20),
    Workload("the same, FP32 products", small_model, small_batch, 40, half=False),
    Workload("the demo's word model, 2048 tokens", word_model, lambda generator: CORPUS.batch(generator, 2048), 3),
)


@dataclass
class Stopwatch:
    """Seconds of every call, by name. The optimizer's step is subtracted from the scaler's."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    optimizer_seconds: float = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _wait()
            self.optimizer_seconds = 0.0
            started = SECONDS()
            result = call(*args, **kwargs)
            _wait()
            self.seconds.setdefault(name, []).append(SECONDS() - started - self.optimizer_seconds)
            return result

        return run

    def optimizers_own(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = SECONDS()
            result = step(*args, **kwargs)
            _wait()
            self.optimizer_seconds += SECONDS() - started
            return result

        return run

    def milliseconds(self) -> float:
        """Return the sum of the calls' medians, for one step."""
        return 1e3 * sum(statistics.median(values) for values in self.seconds.values())


class Way:
    """One of the three ways, with its own model, optimizer and scaler."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload
        self.model = workload.model().to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(0)
        self.scaler: torch.amp.GradScaler = mpinspect.LossScaler(DEVICE)
        if name == BY_HAND:
            self.scaler = torch.amp.GradScaler(DEVICE)
        self.precision = None
        if name == MIXED_PRECISION:
            kind = "fp16-amp" if workload.half else "fp32"
            self.precision = mpinspect.MixedPrecision(self.model, self.optimizer, kind, "dynamic")
            self.scaler = self.precision.scaler

    def steps(self) -> float:
        """Train one block; return seconds per step, without making the batches."""
        batches = [self.workload.batch(self.generator) for _ in range(self.workload.steps)]
        batches = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches]
        step = self._by_hand if self.precision is None else self._mixed_precision
        _wait()
        started = SECONDS()
        for batch in batches:
            step(*batch)
        _wait()
        return (SECONDS() - started) / len(batches)

    def inside(self) -> float:
        """Return the milliseconds per step inside the scaler's calls."""
        watch, names = Stopwatch(), ("scale", "step", "update")
        for name in names:
            setattr(self.scaler, name, watch.timed(name, getattr(self.scaler, name)))
        self.optimizer.step = watch.optimizers_own(self.optimizer.step)  # type: ignore[method-assign]
        self.steps()
        del self.optimizer.step
        for name in names:
            delattr(self.scaler, name)
        return watch.milliseconds()

    def _by_hand(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        emulated = self.workload.half and DEVICE == "cpu"
        with mpinspect.half_arithmetic() if emulated else contextlib.nullcontext():
            with torch.autocast(DEVICE, torch.float16, enabled=self.workload.half):
                loss = nn.functional.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _mixed_precision(self, x: torch.Tensor, y: torch.Tensor) -> None:
        assert self.precision is not None
        self.precision.zero_grad()
        with self.precision.autocast():
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.precision.backward(loss)
        self.precision.step()


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@dataclass
class Row:
    """One way on one workload (medians over rounds). Ratios: steps per second relative to the loop by hand."""

    workload: str
    way: str
    step_ms: float
    inside_ms: float
    ratio: float
    ratio_from_calls: float


def measure(workload: Workload, rounds: int) -> list[Row]:
    """Time alternating blocks, in reverse order every other round; then the time inside the calls, also alternating."""
    ways = [Way(name, workload) for name in (BY_HAND, LOSS_SCALER, MIXED_PRECISION)]
    for way in ways:
        way.steps()
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    inside: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            times[way.name].append(way.steps())
    for _ in range(rounds):
        for way in ways:
            inside[way.name].append(way.inside())
    step = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    calls = {name: min(values) for name, values in inside.items()}
    return [
        Row(
            workload.name,
            name,
            step[name],
            calls[name],
            statistics.median(hand / own for hand, own in zip(times[BY_HAND], times[name], strict=True)),
            step[BY_HAND] / (step[BY_HAND] + calls[name] - calls[BY_HAND]),
        )
        for name in times
    ]


def table(rows: list[Row]) -> str:
    lines = [f"{'':36} {'':20} {'step':>9} {'in calls':>10} {'steps/s':>8} {'by calls':>9}"]
    for row in rows:
        lines.append(
            f"{row.workload:36} {row.way:20} {row.step_ms:6.2f} ms {row.inside_ms:7.3f} ms {row.ratio:7.3f}x "
            f"{row.ratio_from_calls:8.4f}x"
        )
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Format the additional time of LossScaler's calls, and the length of a step in which it is 1%."""
    inside = {(row.workload, row.way): row.inside_ms for row in rows}
    smallest = WORKLOADS[0].name
    extra = max(0.0, inside[smallest, LOSS_SCALER] - inside[smallest, BY_HAND])
    return (
        f"LossScaler's calls take {extra * 1e3:.0f} us a step more than GradScaler's: {TARGET:.0%} of its steps per second are "
        f"kept where a step takes {extra * TARGET / (1 - TARGET):.1f} ms or more"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = [row for workload in WORKLOADS for row in measure(workload, options.rounds)]
    print(table(rows))
    print(verdict(rows))
    if options.json:
        write_results(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
