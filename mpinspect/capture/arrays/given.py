"""What the caller says of an array beside its values, understood."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mpinspect.counting.foreign import on_host
from mpinspect.formats import FORMATS
from mpinspect.session import GRADIENT_KINDS, KINDS


@dataclass(frozen=True)
class Given:
    """How an array came to be what it is.

    Args:
        scale: what it is still multiplied by; None if that is not known.
        passed_through: name of a format that its values were rounded to on their way; "float32" for none.
        unknown: why the scale is not known; "" where it is.
    """

    scale: float | None = 1.0
    passed_through: str = "float32"
    unknown: str = ""


def understand(kind: str, loss_scale: Any, passed_through: str | None) -> Given:
    """The arguments of ``Recorder.observe``. Only gradients are multiplied by the loss scale.

    Raises:
        ValueError: an unknown kind or format.
        TypeError: a loss scale that is no number.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: there are {', '.join(KINDS)}")
    if passed_through is not None and passed_through not in FORMATS:
        raise ValueError(f"passed_through={passed_through!r}: there are {', '.join(FORMATS)}")
    through = passed_through or "float32"
    if kind not in GRADIENT_KINDS:
        return Given(passed_through=through)
    if loss_scale is None:
        return Given(None, through, "loss_scale=None was given")
    scale = number(loss_scale)
    if not math.isfinite(scale) or scale <= 0:
        return Given(None, through, f"the loss scale was {scale}")
    return Given(scale, through)


def number(given: Any) -> float:
    """A number, or the one that an array or variable holds; waits for the device that it lies on."""
    try:
        # item(), where there is one: float() of an array with a dimension, or of a torch tensor in a graph, warns.
        return float(given.item() if hasattr(given, "item") else given)
    except (TypeError, ValueError):
        return float(on_host(given).values.reshape(()))
