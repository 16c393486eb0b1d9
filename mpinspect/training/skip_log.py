"""The record of skipped steps, which counts and logs them and warns once for each kind of problem."""

from __future__ import annotations

import logging
from collections import deque

from mpinspect.numeric.formats import is_power_of_two
from mpinspect.reporting.words import number_or_power
from mpinspect.runtime.user_line import warn_user
from mpinspect.training.scale_rules import ScaleRules, ScaleState
from mpinspect.training.scaled_losses import Cause
from mpinspect.training.skipped_steps import FORWARD, LossScaleWarning, SkippedStep

_log = logging.getLogger("mpinspect.training")

#: Reactions of the scale to a non-finite unscaled loss.
BACK_OFF, HOLD = "back_off", "hold"

#: FP16's smallest magnitude. No gradient of a working model needs a loss scale below it.
_SUSPICIOUSLY_SMALL = 2.0**-24
#: Skipped steps in a row after which to warn that training with this static scale never starts.
_NEVER_STARTS = 10
#: Most skipped steps in the record.
_MOST_KEPT = 100


class SkipLog:
    """The record of skipped steps.

    Args:
        forward_nonfinite: reaction of the scale to a non-finite unscaled loss: BACK_OFF or HOLD.

    Raises:
        ValueError: another value.
    """

    def __init__(self, forward_nonfinite: str) -> None:
        if forward_nonfinite not in (BACK_OFF, HOLD):
            raise ValueError(f"forward_nonfinite is {forward_nonfinite!r}: it must be {BACK_OFF!r} or {HOLD!r}")
        self.forward_nonfinite = forward_nonfinite
        self.skips: deque[SkippedStep] = deque(maxlen=_MOST_KEPT)
        self.count = 0
        self._said: set[str] = set()

    def add(
        self,
        step: int,
        cause: Cause,
        before: ScaleState,
        after: ScaleState,
        rules: ScaleRules,
        window: tuple[float, float] | None,
    ) -> SkippedStep:
        """Record a skipped step, log it at INFO, warn if its kind of problem is new, and return the record."""
        skip = SkippedStep(step, cause.phase, before.scale, after.scale, cause.culprit, window)
        self.skips.append(skip)
        self.count += 1
        _log.info("%s", skip)
        if cause.phase == FORWARD:
            self._warn("forward", f"{skip}. {self._of_forward()}")
        elif rules.is_static and after.skipped_in_a_row >= _NEVER_STARTS:
            self._warn("static", _of_static(after))
        if rules.floor is None and after.scale < min(before.scale, _SUSPICIOUSLY_SMALL):
            self._warn("small", _of_small(skip))
        return skip

    def check_power_of_two(self, scale: float) -> None:
        """Warn if ``scale`` is not a power of two, since scaling then rounds the gradients."""
        if not is_power_of_two(scale):
            self._warn(
                f"rounds at {scale}",
                f"the loss scale {scale:g} is not a power of two: scaling and unscaling round every gradient. "
                "Take the power of two below it.",
            )

    def _of_forward(self) -> str:
        if self.forward_nonfinite == HOLD:
            return "Such steps leave the scale as it is (forward_nonfinite='hold'); look for the cause in the forward."
        return (
            "No loss scale helps; look for the cause in the forward. Until then each such step lowers the scale, as "
            "torch.amp.GradScaler does; forward_nonfinite='hold' leaves it as it is."
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warn_user(message, LossScaleWarning)


def _of_static(state: ScaleState) -> str:
    return (
        f"{state.skipped_in_a_row} steps in a row were skipped at the static loss scale {number_or_power(state.scale)}: a static "
        "scale that overflows from the start never starts training. Lower it, or take a dynamic one."
    )


def _of_small(skip: SkippedStep) -> str:
    return (
        f"the loss scale fell to {number_or_power(skip.next_loss_scale)} and still steps overflow: the scale is probably not "
        f"the cause. Last: {skip}. Look for an infinity or NaN in the model, and give the scaler a floor to stop there instead."
    )
