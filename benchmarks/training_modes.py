"""Speed and memory of each precision of MixedPrecision on a GPU: ResNet-50, GPT-2 small and an LSTM.

    python benchmarks/training_modes.py [--json benchmarks/results/training_modes-gpu.json] [--tiny]

FP32 without TF32 is the baseline, as in NVIDIA's GTC 2018 talk; then FP32 with TF32, and every precision. Synthetic data; each
step is timed by CUDA events, after warm-up steps; medians. Without a GPU the script prints this and exits. --tiny tests the
script with toy sizes, also on a CPU.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from machine import ResultsFile, arguments
from networks import GPT, LSTM, Batch, adamw, gpt2_small, images, resnet, resnet50, sgd, tokens
from torch import nn
from torch.nn import functional as F

import mpinspect


@dataclass(frozen=True)
class Task:
    """A model, its optimizer and one batch on a device, of ``items`` images or tokens."""

    name: str
    unit: str
    items: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[str], Batch]


@dataclass(frozen=True)
class Mode:
    """A precision. ``channels_last``: the preferred layout of convolutions on Tensor Cores."""

    name: str
    precision: str
    tf32: bool = False
    channels_last: bool = True


MODES = (
    Mode("FP32, no TF32", "fp32", channels_last=False),
    Mode("FP32, TF32", "fp32", tf32=True),
    *(Mode(name, name) for name in ("fp16-amp", "bf16-amp", "fp16-master", "bf16-master", "fp16-pure")),
)


def tasks(tiny: bool) -> list[Task]:
    """Return the three tasks, in toy sizes for ``tiny``."""
    if tiny:
        return [
            Task("ResNet", "images", 4, lambda: resnet((1, 1), 8, 10), sgd, images(4, 32, 10)),
            Task("GPT-2", "tokens", 2 * 16, lambda: GPT(1, 32, 2, 16, 64), adamw, tokens(2, 16, 64)),
            Task("LSTM", "tokens", 2 * 8, lambda: LSTM(1, 16, 64), adamw, tokens(2, 8, 64)),
        ]
    return [
        Task("ResNet-50", "images", 128, resnet50, sgd, images(128, 224, 1000)),
        Task("GPT-2 small", "tokens", 8192, gpt2_small, adamw, tokens(8, 1024, 50304)),
        Task("LSTM 2x1024", "tokens", 8192, lambda: LSTM(2, 1024, 32768), adamw, tokens(64, 128, 32768)),
    ]


@dataclass
class Row:
    """One task in one mode. Memory is torch's peak (None on a CPU); both ratios are relative to FP32 without TF32."""

    task: str
    mode: str
    unit: str
    step_ms: float
    per_second: float
    speed_up: float
    peak_memory_gib: float | None
    memory_ratio: float | None
    skipped_steps: int


class Clock:
    """Measures milliseconds of each step, by CUDA events or, on a CPU, by the host's clock."""

    def __init__(self, device: str) -> None:
        self.device = device

    def times(self, step: Callable[[], None], count: int) -> list[float]:
        if self.device != "cuda":
            return [self._on_host(step) for _ in range(count)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda.synchronize()
        for before, after in events:
            before.record()
            step()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in events]

    @staticmethod
    def _on_host(step: Callable[[], None]) -> float:
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * 1e3


def run(task: Task, mode: Mode, device: str, warm_up: int, steps: int) -> tuple[float, float | None, int]:
    """Return the median milliseconds of a step, peak memory in GiB, and the number of skipped steps, including warm-up."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mode.tf32
    torch.manual_seed(0)
    layout = torch.channels_last if mode.channels_last else torch.contiguous_format
    model = task.model().to(device).to(memory_format=layout)
    x, y = task.batch(device)
    if x.dim() == 4:
        x = x.to(memory_format=layout)
    precision = mpinspect.MixedPrecision(model, task.optimizer(model.parameters()), mode.precision)

    def step() -> None:
        precision.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(model(x), y)
        precision.backward(loss)
        precision.step()

    clock = Clock(device)
    clock.times(step, warm_up)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = clock.times(step, steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return statistics.median(times), peak, precision.skipped_steps


def measure(device: str, tiny: bool, file: ResultsFile) -> list[Row]:
    """Measure every task in every mode. Memory is freed in between, and each row is written at once."""
    torch.backends.cudnn.benchmark = True
    warm_up, steps = (1, 2) if tiny else (10, 20)
    rows = []
    for task in tasks(tiny):
        base: tuple[float, float | None] | None = None
        for mode in MODES:
            milliseconds, peak, skipped = run(task, mode, device, warm_up, steps)
            base = base or (milliseconds, peak)
            ratio = peak / base[1] if peak is not None and base[1] else None
            per_second = task.items / milliseconds * 1e3
            speed_up = base[0] / milliseconds
            rows.append(Row(task.name, mode.name, task.unit, milliseconds, per_second, speed_up, peak, ratio, skipped))
            print(line(rows[-1]), flush=True)
            file.write([asdict(row) for row in rows], complete=False)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def heading() -> str:
    return f"{'':12} {'':14} {'step':>10} {'':>18} {'speed-up':>9} {'peak memory':>12} {'of FP32':>8}"


def line(row: Row) -> str:
    memory = "" if row.peak_memory_gib is None else f"{row.peak_memory_gib:.2f} GiB"
    ratio = "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}x"
    rate = f"{row.per_second:,.0f} {row.unit}/s"
    return f"{row.task:12} {row.mode:14} {row.step_ms:7.2f} ms {rate:>18} {row.speed_up:8.2f}x {memory:>12} {ratio:>8}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that the script works; also on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("There is no CUDA GPU here, so nothing was measured (--tiny runs toy sizes on the CPU).")
        return
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU, emulated: no speed is to be expected'}")
    print(heading())
    file = ResultsFile(options.json, rehearsal=options.tiny)
    file.write([asdict(row) for row in measure(device, options.tiny, file)])


if __name__ == "__main__":
    main()
