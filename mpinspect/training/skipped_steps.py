"""What is known of a step that was skipped, and the words for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from mpinspect.training.scale_rules import is_power_of_two

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class NonFinite:
    """The first value that was not finite.

    Args:
        layer: dotted path of the module; "" is the model itself.
        name: dotted path of what was looked at: a parameter (its gradient), a module (its output), "loss".
        value: "inf" or "nan"; "" where that is not known.
        detail: how it is known, a clause.
    """

    layer: str
    name: str
    value: str
    detail: str = ""


class Explainer(Protocol):
    """Looks for the cause when a step was skipped; asked only then. May wait for the GPU."""

    def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite | None:
        """Return the first gradient, in the order of the backward, that is not finite."""

    def forward(self) -> NonFinite | None:
        """Return what made the forward not finite, as far as it is known by now."""

    def step_ended(self, *, forward_finite: bool) -> None:
        """A step is over whose outcome the host knows: what was seen of it may be let go. Must not wait unless it was asked."""


@dataclass(frozen=True)
class SkippedStep:
    """A step that a loss scaler skipped, and why.

    Args:
        step: the scaler's count of steps, from 0, skipped ones included.
        phase: FORWARD where the loss was not finite before it was scaled, else BACKWARD.
        loss_scale: the scale of that step's backward.
        next_loss_scale: the scale from then on.
        culprit: the first value that was not finite; None where it could not be found.
        window: (lowest, highest) of the scales that fit, where advice was given.
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
        layer = f"layer {self.culprit.layer!r}" if self.culprit.layer else "the model itself"
        detail = f" ({self.culprit.detail})" if self.culprit.detail else ""
        if self.phase == FORWARD:
            return f"the forward was {kind} already, first seen at {layer}{detail}: the loss scale is not the cause"
        return f"the gradient of {self.culprit.name!r} was {kind}, the first in the backward, at {layer}{detail}"

    def _scale(self) -> str:
        if self.next_loss_scale == self.loss_scale:
            change = f"the loss scale stays at {power(self.loss_scale)}"
        else:
            change = f"the loss scale goes from {power(self.loss_scale)} to {power(self.next_loss_scale)}"
        return change + self._place()

    def _place(self) -> str:
        if self.window is None or self.loss_scale <= 0:
            return ""
        lowest, highest = self.window
        span = f"{power(lowest)} .. {power(highest)}"
        if self.loss_scale > highest:
            above = math.log2(self.loss_scale / highest)
            return f" ({above:.3g} powers of two above the window {span})"
        if self.loss_scale < lowest:
            below = math.log2(lowest / self.loss_scale)
            return f" ({below:.3g} powers of two below the window {span})"
        return f" (within the window {span})"


class LossScaleWarning(UserWarning):
    """The loss scale, or what happens to it, needs a look. The training goes on."""


class LossScaleCollapsedError(RuntimeError):
    """A step overflowed though the loss scale stood at its floor. The step was skipped, the scale stays at the floor.

    Args:
        skipped: that step.
    """

    def __init__(self, skipped: SkippedStep) -> None:
        super().__init__(skipped)
        self.skipped = skipped

    def __str__(self) -> str:
        floor = power(self.skipped.loss_scale)
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
                f"A NaN is often no overflow (0/0, inf - inf, a root at 0) and then no loss scale helps: run {where} in FP32, "
                "and find the operation with torch.autograd.set_detect_anomaly(True)."
            )
        return f"Run {where} in FP32 or BF16, clip what it computes, or lower the floor."


def power(scale: float) -> str:
    """Return a scale as people read it: 2^16, or the number where it is no power of two."""
    if is_power_of_two(scale):
        exponent = math.frexp(scale)[1] - 1
        return f"{scale:g}" if 0 <= exponent <= 10 else f"2^{exponent}"
    return f"{scale:g}"
