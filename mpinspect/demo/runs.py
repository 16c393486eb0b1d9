"""Trains the demo's model once in one precision, and returns its losses as a curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from mpinspect.demo.demo import (
    BATCH_TOKENS,
    CONTEXT,
    TOKENS,
    VOCABULARY,
    Corpus,
    stdlib_tokens,
    train_inspected,
    word_loss,
    word_model,
)
from mpinspect.demo.loss_curves import Curve
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.inspector import Inspector
from mpinspect.training.mixed_precision import MixedPrecision

#: A function called with each step's loss, a 0-d tensor.
AfterStep = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Setting:
    """The settings shared by all runs of a comparison.

    Args:
        steps: number of steps of each run.
        learning_rate: Adam's learning rate. Higher than in the demo alone, so that FP32 stops improving within these
            steps and the steps skipped at first by a dynamic scale make little difference.
        batch_tokens: number of words over which a step's loss is averaged.
        tokens: number of words of text, a tenth of them held out for validation.
        vocabulary: number of distinct words.
        validate_every: number of steps between validations; the last step is always validated.

    Raises:
        ValueError: steps or validate_every below 1.
    """

    steps: int = 100
    learning_rate: float = 1.5e-2
    batch_tokens: int = BATCH_TOKENS
    tokens: int = TOKENS
    vocabulary: int = VOCABULARY
    validate_every: int = 10

    def __post_init__(self) -> None:
        if self.steps < 1 or self.validate_every < 1:
            raise ValueError(f"steps={self.steps}, validate_every={self.validate_every}: both must be 1 or more")

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of Adam at a learning rate of {self.learning_rate:g}, {self.batch_tokens:,} words a step, "
            f"a vocabulary of {self.vocabulary:,}"
        )


@dataclass(frozen=True)
class Text:
    """The words to train on, and the words held out for validation."""

    training: Corpus
    held_out: Corpus

    @classmethod
    def read(cls, setting: Setting) -> Text:
        """Return the text of the Python standard library's source. Raises FileNotFoundError if it is missing."""
        return cls(*stdlib_tokens(setting.tokens, setting.vocabulary).split())

    @property
    def validation_words(self) -> int:
        """The number of words over which the validation loss is averaged."""
        return len(self.held_out.tokens) - CONTEXT


@dataclass(frozen=True)
class Way:
    """A way to train: its name, and the arguments of MixedPrecision."""

    name: str
    precision: str
    loss_scale: float | str | None = None


FP32 = Way("FP32", "fp32")


def inspected(
    setting: Setting, text: Text, seed: int, directory: Path, after_step: AfterStep
) -> tuple[RangeReport, Curve]:
    """Train in FP32 as the demo does, and return the inspector's report and the losses."""
    model = word_model(seed, setting.vocabulary)
    losses = _Losses(setting, text, model.state_dict, after_step)
    report = train_inspected(
        model,
        text.training,
        directory,
        steps=setting.steps,
        seed=seed,
        learning_rate=setting.learning_rate,
        batch_tokens=setting.batch_tokens,
        after_step=losses,
    )
    return report, Curve(FP32.name, seed, None, None, 0, tuple(losses.training), tuple(losses.validation))


def trained(
    way: Way, setting: Setting, text: Text, seed: int, after_step: AfterStep, log_dir: Path | None = None
) -> Curve:
    """Train through MixedPrecision and return the losses; weights and batches are the same for every way.

    Args:
        log_dir: where an inspector writes the run's session; None for no inspector.
    """
    model = word_model(seed, setting.vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    mixed = MixedPrecision(model, optimizer, precision=way.precision, loss_scale=way.loss_scale)
    losses = _Losses(setting, text, mixed.weights, after_step)
    start = None if way.loss_scale is None else mixed.loss_scale
    generator = torch.Generator().manual_seed(seed)
    with nullcontext() if log_dir is None else Inspector(model, optimizers=optimizer, log_dir=log_dir):
        for _ in range(setting.steps):
            batch = text.training.batch(generator, setting.batch_tokens)
            mixed.zero_grad()
            with mixed.autocast():
                loss = word_loss(model, batch)
            mixed.backward(loss)
            mixed.step()
            losses(loss.detach())
    return Curve(
        name=way.name,
        seed=seed,
        loss_scale_start=start,
        loss_scale_end=None if start is None else mixed.loss_scale,
        skipped_steps=mixed.skipped_steps,
        training_losses=tuple(losses.training),
        validation_losses=tuple(losses.validation),
        emulated=mixed.emulated,
    )


def validation_loss(weights: Mapping[str, torch.Tensor], text: Text) -> float:
    """Return the mean cross-entropy over the held-out words, each once, computed in FP32 by a separate model."""
    model = word_model(0, len(weights["output.bias"]))
    model.load_state_dict(weights)
    total = 0.0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for batch in text.held_out.in_order():
            total += word_loss(model, batch).item() * len(batch[1])
    return total / text.validation_words


class _Losses:
    """Collects a run's losses step by step. Validation reads the weights only, so it does not affect the run."""

    def __init__(
        self, setting: Setting, text: Text, weights: Callable[[], Mapping[str, torch.Tensor]], after_step: AfterStep
    ) -> None:
        self.training: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self._setting, self._text, self._weights, self._after_step = setting, text, weights, after_step

    def __call__(self, loss: torch.Tensor) -> None:
        self.training.append(loss.item())
        taken = len(self.training)
        if taken % self._setting.validate_every == 0 or taken == self._setting.steps:
            self.validation.append((taken, validation_loss(self._weights(), self._text)))
        self._after_step(loss)
