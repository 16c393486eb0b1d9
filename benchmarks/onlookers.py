"""The observers of a training that the overhead benchmark compares: settings of the inspector, and other tools.

Each is called with a trainer and a number of steps. It returns the seconds of every step, and the seconds per step inside the
inspector's callbacks or their counterpart (None: not measured); or None if it can't run here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from entrances import Stopwatch
from networks import Batch
from torch import nn

import mpinspect
from mpinspect.ranges.kinds import KINDS

Measured = tuple[list[float], float | None]


class Trainer:
    """One model and its loop. ``after_backward`` is called between backward and the optimizer's step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        batch: Callable[[str], Batch],
    ) -> None:
        self.model = model
        self.optimizer = optimizer(model.parameters())
        self._batch = batch
        self.after_backward: Callable[[], object] = lambda: None

    def steps(self, count: int) -> list[float]:
        """Continue training; return the seconds of each step, without making the batch."""
        times = []
        for _ in range(count):
            x, y = self._batch("cpu")
            started = time.perf_counter()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.after_backward()
            self.optimizer.step()
            times.append(time.perf_counter() - started)
        return times


@dataclass(frozen=True)
class Onlooker:
    """A row of the table. ``target``: the target that this row measures for the GPT, a key of ``targets.TARGETS``."""

    name: str
    steps: int
    look: Callable[[Trainer, int], Measured | None]
    target: str | None = None


def inspected(trainer: Trainer, steps: int, *, settling: int = 0, **options: Any) -> Measured:
    """Train under an inspector, after ``settling`` unmeasured steps."""
    watch = Stopwatch()
    with watch.around_entrances(), mpinspect.Inspector(trainer.model, optimizers=trainer.optimizer, **options):
        trainer.steps(settling)
        watch.seconds = 0.0
        times = trainer.steps(steps)
    return times, watch.seconds / steps


def with_budget(trainer: Trainer, steps: int) -> Measured | None:
    """Train under an inspector with a budget; None for versions without that option.

    The first steps are excluded: the first samples are taken regardless of the budget, and later steps compensate for them.
    Many steps must follow, since in a few steps a single sample would dominate the result.
    """
    if "max_overhead" not in inspect.signature(mpinspect.Inspector).parameters:
        return None
    return inspected(trainer, steps, settling=8, max_overhead=0.02)


def with_sums(trainer: Trainer, steps: int, *, outputs: bool) -> Measured:
    """Measure reading alone: hooks sum the gradients that the inspector counts and, with ``outputs``, modules' outputs.

    The seconds are the time inside ``sum()``.
    """
    watch = Stopwatch()
    add_up = watch.timed(torch.Tensor.sum)

    def came(gradient: torch.Tensor) -> None:
        add_up(gradient)

    def returned(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        if outputs:
            add_up(first.detach())
        if next(module.children(), None) is None and first.requires_grad:
            first.register_hook(came)

    handles = [module.register_forward_hook(returned) for module in trainer.model.modules()]
    handles += [parameter.register_hook(came) for parameter in trainer.model.parameters()]
    try:
        trainer.steps(1)
        watch.seconds = 0.0
        return trainer.steps(steps), watch.seconds / steps
    finally:
        for handle in handles:
            handle.remove()


def with_add_histogram(trainer: Trainer, steps: int) -> Measured:
    """TensorBoard's add_histogram of every parameter's gradient, in every step."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as directory, SummaryWriter(directory) as writer:

        def write() -> None:
            for name, parameter in trainer.model.named_parameters():
                writer.add_histogram(name, parameter.grad)

        return _steps_with(trainer, steps, write), None


def with_wandb(trainer: Trainer, steps: int) -> Measured | None:
    """wandb.watch of gradients, every step, offline."""
    try:
        import wandb
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as directory:
        os.environ["WANDB_SILENT"] = "true"
        run = wandb.init(mode="offline", dir=directory, project="overhead")
        wandb.watch(trainer.model, log="gradients", log_freq=1)
        try:
            return _steps_with(trainer, steps, lambda: run.log({"step": 1})), None
        finally:
            wandb.unwatch(trainer.model)
            run.finish()


def with_underflow_overflow(trainer: Trainer, steps: int) -> Measured | None:
    """Transformers' DebugUnderflowOverflow: extremes of all weights, inputs and outputs in the forward, without gradients."""
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError:
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        DebugUnderflowOverflow(trainer.model)
        try:
            return trainer.steps(steps), None
        finally:
            # It stores no handles of its hooks, and the model has no other hooks.
            for module in trainer.model.modules():
                module._forward_hooks.clear()


def _steps_with(trainer: Trainer, steps: int, after_backward: Callable[[], object]) -> list[float]:
    trainer.after_backward = after_backward
    try:
        return trainer.steps(steps)
    finally:
        trainer.after_backward = lambda: None


def looking(**options: Any) -> Callable[[Trainer, int], Measured]:
    return functools.partial(inspected, **options)


def every_step(**options: Any) -> Callable[[Trainer, int], Measured]:
    """Return an observer without the first three steps, in which memory is allocated and duplicate reads are detected."""
    return looking(settling=3, **options)


WEIGHTS = ("weight_gradient",)

ONLOOKERS = (
    Onlooker("weight gradients, every step, watch off", 3, every_step(capture=WEIGHTS, watch=False)),
    Onlooker("weight + activation gradients, every step, watch off", 4, every_step(watch=False)),
    Onlooker("weight + activation gradients, every step, watch on", 4, every_step(), "overhead.default"),
    Onlooker("all five kinds, every step, watch on", 2, every_step(capture=KINDS)),
    Onlooker("weight gradients, every=10, watch off", 10, looking(capture=WEIGHTS, every=10, watch=False)),
    Onlooker(
        "weight + activation gradients, every=10, watch off", 10, looking(every=10, watch=False), "overhead.every_10"
    ),
    Onlooker("all five kinds, every=10, watch on", 10, looking(capture=KINDS, every=10)),
    Onlooker("the watch alone", 3, every_step(capture=()), "overhead.watch"),
    Onlooker("between samples, watch off", 3, looking(capture=(), watch=False)),
    Onlooker("max_overhead=0.02", 30, with_budget, "overhead.budget"),
    Onlooker("only sum() of the same gradients", 3, functools.partial(with_sums, outputs=False)),
    Onlooker("only sum() of the same gradients and of all outputs", 3, functools.partial(with_sums, outputs=True)),
    Onlooker("TensorBoard's add_histogram of every gradient", 2, with_add_histogram),
    Onlooker("wandb.watch(log='gradients')", 2, with_wandb),
    Onlooker("Transformers' DebugUnderflowOverflow", 2, with_underflow_overflow),
)
