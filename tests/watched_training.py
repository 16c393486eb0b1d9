"""Watches a training in this process, as ``mpinspect run`` watches a script's."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from trainings import take_step

from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Recordings, Seen
from mpinspect.run.watcher import Watcher


class Watched:
    """The results of a watched block, filled in when the block ends."""

    def __init__(self, watcher: Watcher, said: list[str]) -> None:
        self.watcher = watcher
        self.said = said
        self.parts = Recordings()

    @property
    def seen(self) -> Seen:
        return self.watcher.seen

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.parts.models]

    def steps(self, number: int = 0) -> int:
        return self.parts.models[number].session.progress.steps

    def gradients(self, number: int = 0) -> set[str]:
        """Return the names of the parameters whose gradients were counted."""
        keys = {key for window in self.parts.models[number].session.windows for key in window.tensors}
        return {key.name for key in keys if key.kind == "weight_gradient"}


@contextmanager
def watched(directory: Path, **options: object) -> Iterator[Watched]:
    """Watch the block's trainings; assert afterwards that torch is restored."""
    before = _replaced()
    said: list[str] = []
    watcher = Watcher(LaunchOptions("train.py", **options), directory, said.append, Seen(torch_imported=True))  # type: ignore[arg-type]
    result = Watched(watcher, said)
    watcher.install()
    try:
        yield result
    finally:
        result.parts = watcher.finish()
        after = _replaced()
        assert after == before, [(a, b) for a, b in zip(after, before, strict=True) if a is not b]


def _replaced() -> tuple[object, ...]:
    tracers = (torch.jit.script, torch.export.export)
    return (torch.optim.Optimizer.__init__, torch.autograd.backward, *tracers, torch.compile, gc.freeze)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, width: int = 4) -> None:
    """Train a few steps on noise."""
    for _ in range(steps):
        take_step(optimizer, model(torch.randn(5, width)).square().mean())
