"""Counts, without a GPU, the kernels that the watch launches on a GPU between samples, and the bytes that they read.

    python benchmarks/device_reads.py [--json benchmarks/results/device_reads-cpu.json]

The subjects are GPT-2 small with 8 x 1024 tokens, and a block of a Llama of 1 B parameters with 2 x 1024: the difference
between models of four blocks and of three. The kernels are replaced by a counter of launches, tensors and bytes. Linear layers
and attention return zeros, since values don't matter. The microseconds are estimated from an H100's memory rate and the time of
a launch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from machine import arguments, write_results
from networks import GPT, Llama, tokens
from torch import nn

from mpinspect import Inspector
from mpinspect.counting.cuda import available
from mpinspect.counting.pieces import COUNTABLE
from mpinspect.ranges.capture import device_magnitudes

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import host_kernels

#: Bytes of tensors that the watch may hold on a device of 80 GB.
HELD = int(80e9) // 256
LENGTH = 1024
#: An H100 SXM's memory rate: nine tenths of NVIDIA's 3.35 TB/s. An H200 reached 0.88 of its 4.8 TB/s.
BYTES_PER_S = 0.9 * 3.35e12
#: The kernels' time relative to reading alone (benchmarks/gpu_counting.py, BF16), and the time of a dependent launch.
OVER_READING, LAUNCH_S = 1.12, 5e-6
#: GPU seconds per step: GPT-2's measured on an H200, uncompiled; the block's from 6 FLOPs per weight and token, at two fifths
#: of an H100's 989 TFLOPS in BF16.
GPT_S, BLOCK_S = 28e-3, 6 * 60.8e6 * 2048 / (0.4 * 989e12)


@dataclass
class Row:
    """The launches and reads of a step."""

    model: str
    step: str
    launches: int
    tensors_read: int
    tensors_spared: int
    megabytes: float
    estimated_us: float
    of_the_step: float


class Step(NamedTuple):
    """Whether the loop scales the loss and clips the gradients."""

    scales: bool
    clips: bool


class Zeros(torch.autograd.Function):
    """An output of a given size and its inputs' gradients, all zero, in the dtypes that autocast gives them."""

    @staticmethod
    def forward(ctx: Any, size: int, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(None, x, *others)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return x.new_zeros(*x.shape[:-1], size, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if each is None else torch.zeros_like(each) for each in ctx.saved_tensors)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return zeros in place of a Linear layer's output."""
    return Zeros.apply(weight.shape[0], x, weight, bias)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return zeros in place of attention's output."""
    return Zeros.apply(value.shape[-1], query, key, value)


class Costs:
    """Replaces the kernels, and counts their launches and reads. Every tensor counts as finite, with magnitude 0."""

    DTYPES = COUNTABLE

    def __init__(self) -> None:
        self.step: Counter[str] = Counter()

    def largest_many(self, tensors: list[torch.Tensor], slots: Any, broken: torch.Tensor, only_if_broken: bool) -> None:
        self._launched(tensors, is_read=not only_if_broken)

    @staticmethod
    def largest_of_slots(slots: Any, is_double: bool) -> list[float | None]:
        return [0.0] * len(slots)

    def add_many(self, counted: list[Any]) -> None:
        self._launched([each.values for each in counted], is_read=True)

    def add(self, values: torch.Tensor, row: torch.Tensor) -> None:
        self._launched([values], is_read=True)

    def _launched(self, tensors: list[torch.Tensor], is_read: bool) -> None:
        self.step["launches"] += len({tensor.dtype for tensor in tensors})
        self.step["read" if is_read else "spared"] += len(tensors)
        self.step["bytes"] += sum(tensor.nbytes for tensor in tensors) if is_read else 0


COSTS = Costs()


def counted(make: Callable[[], nn.Module], sequences: int, step: Step) -> Counter[str]:
    """Return the costs of the sixth step, which has no measurements for diagnoses."""
    torch.manual_seed(0)
    model, (x, y) = make(), tokens(sequences, LENGTH, 512)("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=step.scales)
    with Inspector(model, optimizers=optimizer, scalers=scaler, every=1000):
        for _ in range(6):
            COSTS.step.clear()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if step.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return Counter(COSTS.step)


def row(model: str, step: str, found: Counter[str], step_s: float) -> Row:
    seconds = found["launches"] * LAUNCH_S + OVER_READING * found["bytes"] / BYTES_PER_S
    share = seconds / step_s
    return Row(
        model, step, found["launches"], found["read"], found["spared"], found["bytes"] / 1e6, seconds * 1e6, share
    )


STEPS = {
    "a scaler checks the weight gradients": Step(scales=True, clips=False),
    "no scaler, clipped by norm": Step(scales=False, clips=True),
    "no scaler, not clipped": Step(scales=False, clips=False),
}


def rows() -> list[Row]:
    found = []
    for name, step in STEPS.items():
        gpt = counted(lambda: GPT(12, 768, 12, LENGTH, 50304), 8, step)
        found.append(row("GPT-2 small, 8 x 1024 tokens", name, gpt, GPT_S))
    for name, step in STEPS.items():
        three, four = (counted(lambda n=n: Llama(n, 2048, 32, 8, 8192, 512), 2, step) for n in (3, 4))
        block = Counter({what: four[what] - three[what] for what in three | four})
        found.append(row("a Llama's block of 61 M parameters, 2 x 1024 tokens", name, block, BLOCK_S))
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    with pytest.MonkeyPatch.context() as monkeypatch:
        host_kernels.install(monkeypatch)
        monkeypatch.setattr(available, "counter", lambda: COSTS)
        monkeypatch.setattr(device_magnitudes, "held_bytes", lambda device: HELD)
        monkeypatch.setattr(nn.functional, "linear", linear)
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
        found = rows()
    for each in found:
        print(each)
    if options.json:
        write_results(options.json, {"rows": [asdict(each) for each in found]})


if __name__ == "__main__":
    main()
