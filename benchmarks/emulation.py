"""The cost of emulated half-precision arithmetic on a CPU: a training step of the demo's model, against FP32.

    python benchmarks/emulation.py [--json benchmarks/results/emulation-cpu.json] [--steps 31]

The step is forward, backward and Adam over 8192 tokens. The kinds alternate within one run, so that the machine's other load
affects all of them; a ratio is the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from machine import arguments, write_results

from mpinspect.demo.demo import LEARNING_RATE, stdlib_tokens, word_loss, word_model
from mpinspect.runtime.emulation import half_arithmetic

#: Name -> autocast's dtype; None is FP32, without autocast.
KINDS = {"FP32": None, "FP16 emulated": torch.float16, "BF16 emulated": torch.bfloat16}
WARM_UP = 2
#: Keeps the gradients within FP16's range.
LOSS_SCALE = 1024.0


@dataclass
class Cost:
    """The time of a step, in milliseconds and relative to FP32."""

    kind: str
    median_ms: float
    least_ms: float
    median_ratio: float


class Training:
    """One model, trained in one kind of arithmetic."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.model = word_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Run one step; return its seconds."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        with half_arithmetic() if self.dtype else contextlib.nullcontext():
            with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss = word_loss(self.model, batch)
            (loss * LOSS_SCALE).backward()
        for parameter in self.model.parameters():
            parameter.grad /= LOSS_SCALE
        self.optimizer.step()
        return time.perf_counter() - begun


def measure(steps: int) -> list[Cost]:
    corpus = stdlib_tokens()
    generator = torch.Generator().manual_seed(0)
    trainings = {kind: Training(dtype) for kind, dtype in KINDS.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(WARM_UP + steps):
        batch = corpus.batch(generator)
        for kind, training in trainings.items():
            seconds[kind].append(training.step(batch))
    seconds = {kind: taken[WARM_UP:] for kind, taken in seconds.items()}
    return [
        Cost(
            kind,
            statistics.median(taken) * 1e3,
            min(taken) * 1e3,
            statistics.median(a / b for a, b in zip(taken, seconds["FP32"], strict=True)),
        )
        for kind, taken in seconds.items()
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=31)
    options = parser.parse_args()
    costs = measure(options.steps)
    print(f"{'':16} {'median':>10} {'least':>10} {'ratio':>7}   {options.steps} steps of each")
    for cost in costs:
        print(f"{cost.kind:16} {cost.median_ms:7.0f} ms {cost.least_ms:7.0f} ms {cost.median_ratio:7.2f}")
    if options.json:
        write_results(options.json, {"steps": options.steps, "costs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
