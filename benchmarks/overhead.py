"""What the inspector costs while a model trains: a GPT on the CPU, bare and inspected, in one run.

    python benchmarks/overhead.py [--json benchmarks/results/overhead-cpu.json] [--rounds 3]

Wall-clock time cannot resolve a percent on a busy machine, so the figure that counts is the time spent inside the
inspector's own callbacks over the bare step; the wall-clock ratio stands beside it. `wandb.watch` (offline; skipped where
wandb is not installed) and TensorBoard's `add_histogram` of every gradient run beside it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from machine import write_results
from torch import nn

import mpinspect
from mpinspect.capture import capture
from mpinspect.capture.hooks import ModelHook
from mpinspect.session import KINDS

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 6, 384, 6, 8192, 8, 256
#: Everything through which training enters the inspector.
ENTRANCES: tuple[tuple[type, str], ...] = (
    (ModelHook, "__call__"),
    (capture._GradientHook, "__call__"),
    (capture.Capture, "_weight_gradient"),
    (capture.Capture, "optimizer_steps"),
    (capture.Capture, "optimizer_stepped"),
    (capture.Capture, "loss_scaled"),
    (capture.Capture, "scaler_steps"),
    (capture.Capture, "scaler_stepped"),
)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.gelu, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """6 layers, width 384, vocabulary 8192 (tied), 256 tokens: 13.9 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Trainer:
    """One model and its loop; ``steps`` returns seconds per step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.after_backward: Callable[[], None] = lambda: None

    def steps(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
            started = time.perf_counter()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten()).backward()
            self.after_backward()
            self.optimizer.step()
            times.append(time.perf_counter() - started)
        return times


class Stopwatch:
    """Seconds spent inside the inspector's entrances (outermost call only)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.depth = 0

    @contextmanager
    def around_entrances(self) -> Iterator[None]:
        originals = [(owner, name, getattr(owner, name)) for owner, name in ENTRANCES]
        for owner, name, original in originals:
            setattr(owner, name, self._timed(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - started

        return run


@dataclass
class Row:
    """One way of looking, against the bare steps of the same round (medians over rounds)."""

    name: str
    step_ms: float
    wall_ratio: float
    callbacks_fraction: float | None
    bound: float | None


def inspected(trainer: Trainer, steps: int, **options: Any) -> tuple[list[float], float]:
    """Seconds per step, and seconds in callbacks per step."""
    watch = Stopwatch()
    with watch.around_entrances(), mpinspect.Inspector(trainer.model, optimizers=trainer.optimizer, **options):
        times = trainer.steps(steps)
    return times, watch.seconds / steps


def with_add_histogram(trainer: Trainer, steps: int) -> tuple[list[float], None]:
    """TensorBoard's own histograms of every parameter's gradient, every step."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as directory, SummaryWriter(directory) as writer:

        def write() -> None:
            for name, parameter in trainer.model.named_parameters():
                writer.add_histogram(name, parameter.grad)

        trainer.after_backward = write
        times = trainer.steps(steps)
        trainer.after_backward = lambda: None
    return times, None


def with_wandb(trainer: Trainer, steps: int) -> tuple[list[float], None] | None:
    """wandb.watch of gradients, every step, offline."""
    try:
        import wandb
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as directory:
        os.environ["WANDB_SILENT"] = "true"
        run = wandb.init(mode="offline", dir=directory, project="overhead")
        wandb.watch(trainer.model, log="gradients", log_freq=1)
        trainer.after_backward = lambda: run.log({"step": 1})
        times = trainer.steps(steps)
        trainer.after_backward = lambda: None
        wandb.unwatch(trainer.model)
        run.finish()
    return times, None


WEIGHTS_ALONE = functools.partial(inspected, capture=("weight_gradient",), watch=False)

#: name, most that the callbacks may take of the bare step, steps per round, how.
WAYS: tuple[tuple[str, float | None, int, Callable[[Trainer, int], Any]], ...] = (
    ("weight + activation gradients, every step, watch on", 0.15, 4, inspected),
    ("every=10, watch off", 0.015, 10, functools.partial(inspected, every=10, watch=False)),
    ("watch alone", 0.025, 4, functools.partial(inspected, capture=())),
    ("between samples, watch off", None, 4, functools.partial(inspected, capture=(), watch=False)),
    ("weight gradients alone, every step, watch off", None, 4, WEIGHTS_ALONE),
    ("all five kinds, every step, watch on", None, 4, functools.partial(inspected, capture=KINDS)),
    ("add_histogram of every gradient", None, 2, with_add_histogram),
    ("wandb.watch(log='gradients')", None, 2, with_wandb),
)


def measure(rounds: int) -> list[Row]:
    """Every way against the bare steps around it, in each round."""
    trainer = Trainer()
    trainer.steps(2)
    found: dict[str, list[tuple[float, float, float | None]]] = {}
    for number in range(rounds):
        bare = statistics.median(trainer.steps(4))
        for name, _, steps, way in WAYS:
            result = way(trainer, steps)
            if result is None:
                continue
            times, callbacks = result
            again = statistics.median(trainer.steps(2))
            base = (bare + again) / 2
            bare = again
            mean = statistics.mean(times)
            found.setdefault(name, []).append((mean, mean / base, None if callbacks is None else callbacks / base))
        print(f"round {number + 1} of {rounds}: bare step {bare * 1e3:.0f} ms", flush=True)
    rows = [Row("bare", bare * 1e3, 1.0, None, None)]
    for name, bound, _, _ in WAYS:
        if name in found:
            means, walls, inside = zip(*found[name], strict=True)
            known = [value for value in inside if value is not None]
            rows.append(
                Row(
                    name,
                    statistics.median(means) * 1e3,
                    statistics.median(walls),
                    statistics.median(known) if known else None,
                    bound,
                )
            )
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'':52} {'step':>9} {'wall':>6} {'in callbacks':>13} {'at most':>8}"]
    for row in rows:
        inside = "" if row.callbacks_fraction is None else f"{row.callbacks_fraction:.2%}"
        bound = "" if row.bound is None else f"{row.bound:.1%}"
        lines.append(f"{row.name:52} {row.step_ms:6.0f} ms {row.wall_ratio:5.2f}x {inside:>13} {bound:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = measure(options.rounds)
    print(table(rows))
    if options.json:
        write_results(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
