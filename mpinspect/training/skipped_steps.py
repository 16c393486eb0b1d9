"""Records of skipped steps, and the messages that describe them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from mpinspect.reporting.words import bracketed, number_or_power

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value found for a skipped step.

    Args:
        layer: dotted path of the module; "" is the model itself.
        name: dotted path of the parameter (its gradient was checked) or module (its output was checked), or "loss".
        value: "inf" or "nan"; "" if unknown.
        detail: a clause saying how the value was found.
    """

    layer: str
    name: str
    value: str
    detail: str = ""


class Explainer(Protocol):
    """Finds the cause of a skipped step; ``gradient`` and ``forward`` are called only after a skip, and may wait for the GPU."""

    def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite | None:
        """Return the first non-finite gradient in the order of the backward."""

    def forward(self) -> NonFinite | None:
        """Return the cause of the non-finite forward, as far as it is known."""

    def step_ended(self, *, forward_finite: bool) -> None:
        """Mark the end of a step after its outcome has reached the host; data about the step may then be discarded.

        Must not wait for the GPU unless ``gradient`` or ``forward`` was called.
        """


@dataclass(frozen=True)
class SkippedStep:
    """A step that a loss scaler skipped, and why.

    Args:
        step: the step's number, from 0, counting skipped steps too.
        phase: FORWARD if the unscaled loss was non-finite, else BACKWARD.
        loss_scale: the loss scale of the skipped step's backward.
        next_loss_scale: the loss scale after the skipped step.
        culprit: the first non-finite value; None if it was not found.
        window: (lowest, highest) recommended loss scale; None without a recommendation.
    """

    step: int
    phase: str
    loss_scale: float
    next_loss_scale: float
    culprit: NonFinite | None = None
    window: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"step {self.step} skipped: {self._cause()}; {self._scale()}"

    def _cause(self) -> str:
        if self.culprit is None and self.phase == FORWARD:
            return "the loss was not finite before it was scaled: the loss scale is not the cause"
        if self.culprit is None:
            return "a gradient was not finite"
        kind = {"nan": "NaN", "inf": "infinite"}.get(self.culprit.value, "not finite")
        layer = "the model itself"
        if self.culprit.layer:
            layer = f"layer {self.culprit.layer!r}"
        detail = bracketed(self.culprit.detail)
        if self.phase == FORWARD:
            return f"the forward was {kind} already, first seen at {layer}{detail}: the loss scale is not the cause"
        return f"the gradient of {self.culprit.name!r} was {kind}, the first in the backward, at {layer}{detail}"

    def _scale(self) -> str:
        if self.next_loss_scale == self.loss_scale:
            change = f"the loss scale stays at {number_or_power(self.loss_scale)}"
        else:
            change = f"the loss scale goes from {number_or_power(self.loss_scale)} to {number_or_power(self.next_loss_scale)}"
        return change + self._place()

    def _place(self) -> str:
        if self.window is None or self.loss_scale <= 0:
            return ""
        lowest, highest = self.window
        span = f"{number_or_power(lowest)} .. {number_or_power(highest)}"
        if self.loss_scale > highest:
            above = math.log2(self.loss_scale / highest)
            return f" ({above:.3g} powers of two above the window {span})"
        if self.loss_scale < lowest:
            below = math.log2(lowest / self.loss_scale)
            return f" ({below:.3g} powers of two below the window {span})"
        return f" (within the window {span})"


class LossScaleWarning(UserWarning):
    """Warns of a problem with the loss scale that does not stop the training."""


class LossScaleCollapsedError(RuntimeError):
    """A step overflowed although the loss scale was at its floor. The step was skipped; the scale stays at the floor.

    Args:
        skipped: the skipped step.
    """

    def __init__(self, skipped: SkippedStep) -> None:
        super().__init__(skipped)
        self.skipped = skipped

    def __str__(self) -> str:
        floor = number_or_power(self.skipped.loss_scale)
        return f"the loss scale stands at its floor {floor}, and still {self.skipped}. {self._next()}"

    def _next(self) -> str:
        culprit = self.skipped.culprit
        if self.skipped.phase == FORWARD:
            return (
                "No loss scale helps where the forward is not finite: look at that layer's input and weights, run it in FP32 "
                "(torch.autocast(..., enabled=False)), or lower the learning rate."
            )
        where = "the layers that overflow" if culprit is None else repr(culprit.layer or culprit.name)
        if culprit is not None and culprit.value == "nan":
            return (
                f"A NaN is often not an overflow (0/0, inf - inf, a root at 0), and then no loss scale helps: run {where} in "
                "FP32, and find the operation with torch.autograd.set_detect_anomaly(True)."
            )
        return f"Run {where} in FP32 or BF16, clip its values, or lower the floor."
