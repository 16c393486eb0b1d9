"""Which loss scale a backward ran under, known on the host or still on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BackwardScale:
    """The loss scale of one backward.

    Args:
        value: the scale, where the host knows it; None where it is unknown or still on the device.
        on_device: a 0-d tensor that holds it, where reading it now would wait for the GPU.
        power_of_two: whether it is (or, on the device, can only be) a power of two, so that unscaling shifts exponents.
        unknown: why it can't be known; "" where it is.
        source: identity of the scaler that keeps it, 0 for none.
    """

    value: float | None = 1.0
    on_device: torch.Tensor | None = None
    power_of_two: bool = True
    unknown: str = ""
    source: int = 0

    def agrees_with(self, other: BackwardScale) -> bool:
        """Whether the two are surely one scale; two that are on the device are if they are one scaler's."""
        if self.value is None or other.value is None:
            return self.source == other.source
        return self.value == other.value

    @property
    def divisor(self) -> float | torch.Tensor | None:
        """What values must be divided by before they are counted; None where shifting exponents does it."""
        if self.power_of_two or self.unknown:
            return None
        return self.value if self.on_device is None else self.on_device


UNSCALED = BackwardScale()


def is_power_of_two(value: float) -> bool:
    """Whether value is 2^k for an integer k."""
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


def from_number(value: float) -> BackwardScale:
    """A scale that the host knows. Not positive or not finite: unknown, with the reason."""
    if not math.isfinite(value) or value <= 0:
        return BackwardScale(None, unknown=f"the loss scale was {value}")
    return BackwardScale(value, power_of_two=is_power_of_two(value))


def from_callable(source: Callable[[], Any]) -> BackwardScale:
    """The scale that the user's own callable gives now; whatever it raises makes the scale unknown."""
    try:
        return from_number(float(source()))
    except Exception as error:
        return BackwardScale(None, unknown=f"loss_scale() failed: {error!r}")


def from_scaler(scaler: Any) -> BackwardScale:
    """The scale that a scaler applies now.

    torch.amp.GradScaler keeps it in a tensor: on a CPU it is read, on a GPU a copy stays there. Other scalers
    are asked for ``get_scale()`` or ``loss_scale``.
    """
    enabled = getattr(scaler, "is_enabled", None)
    if callable(enabled) and not enabled():
        return UNSCALED
    held = getattr(scaler, "_scale", None)
    if isinstance(held, torch.Tensor):
        if held.device.type == "cpu":
            return from_number(float(held))
        return BackwardScale(None, held.detach().clone(), power_of_two=_only_powers_of_two(scaler), source=id(scaler))
    if callable(getattr(scaler, "get_scale", None)):
        return from_callable(scaler.get_scale)
    loss_scale = getattr(scaler, "loss_scale", None)
    if loss_scale is not None:
        return from_callable(loss_scale if callable(loss_scale) else lambda: loss_scale)
    return BackwardScale(None, unknown=f"{type(scaler).__name__} has neither get_scale() nor loss_scale")


def _only_powers_of_two(scaler: Any) -> bool:
    """Whether a GradScaler's scale can only be a power of two: its start and both its factors are."""
    parts = (getattr(scaler, name, None) for name in ("_init_scale", "_growth_factor", "_backoff_factor"))
    return all(isinstance(part, (int, float)) and is_power_of_two(float(part)) for part in parts)
