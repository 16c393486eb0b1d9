"""The loss scale of one backward, known on the host or still on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpinspect.numeric.formats import is_power_of_two


@dataclass(frozen=True)
class BackwardScale:
    """The loss scale of one backward.

    Args:
        value: the scale, if the host knows it; None if it is unknown or still on the device.
        on_device: a 0-d tensor that holds the scale, if reading it now would wait for the GPU.
        power_of_two: whether the scale is (on a device: can only be) a power of two, so that unscaling only shifts
            exponents.
        unknown: why the scale can't be known; "" if it is known.
        source: ``id`` of the scaler that holds the scale; 0 without a scaler.
        origin: ``id`` of the GradScaler that multiplied the loss, and the version of its scale, which each update raises; None
            without one.
        is_aside: whether no scaler multiplied the loss, although a scaler multiplies other losses of the run: its 1 is not the
            run's loss scale.
    """

    value: float | None = 1.0
    on_device: torch.Tensor | None = None
    power_of_two: bool = True
    unknown: str = ""
    source: int = 0
    origin: tuple[int, int] | None = None
    is_aside: bool = False

    def agrees_with(self, other: BackwardScale) -> bool:
        """Return whether both scales are certainly equal; if either value is not on the host, whether one scaler made both."""
        if self.value is None or other.value is None:
            return self.source == other.source
        return self.value == other.value

    def number(self) -> float | None:
        """Return the scale, None if it is unknown. Waits for the GPU if the scale is still there."""
        return self.value if self.on_device is None else float(self.on_device)

    @property
    def divisor(self) -> float | torch.Tensor | None:
        """The number to divide values by before counting; None if the scale is unknown or is removed by shifting exponents."""
        if self.power_of_two or self.unknown:
            return None
        return self.value if self.on_device is None else self.on_device


UNSCALED = BackwardScale()
ASIDE = BackwardScale(is_aside=True)


def from_number(value: float) -> BackwardScale:
    """Return a scale known on the host; if ``value`` is not positive and finite, an unknown scale with the reason."""
    if not math.isfinite(value) or value <= 0:
        return BackwardScale(None, unknown=f"the loss scale was {value}")
    return BackwardScale(value, power_of_two=is_power_of_two(value))


def from_callable(source: Callable[[], Any]) -> BackwardScale:
    """Return the scale that the user's callable returns now; an unknown scale if the callable raises."""
    try:
        return from_number(float(source()))
    except Exception as error:
        return BackwardScale(None, unknown=f"loss_scale() failed: {error!r}")


def from_scaler(scaler: Any) -> BackwardScale:
    """Return the scale that a scaler applies now.

    torch.amp.GradScaler has its scale in a tensor, which is read on a CPU and copied on a device. Other scalers' scale is taken
    from ``get_scale()`` or ``loss_scale``.
    """
    enabled = getattr(scaler, "is_enabled", None)
    if callable(enabled) and not enabled():
        return UNSCALED
    held = getattr(scaler, "_scale", None)
    if isinstance(held, torch.Tensor):
        origin = origin_of(scaler)
        if held.device.type == "cpu":
            return replace(from_number(float(held)), origin=origin)
        is_power = _only_powers_of_two(scaler)
        return BackwardScale(None, held.detach().clone(), power_of_two=is_power, source=id(scaler), origin=origin)
    if callable(getattr(scaler, "get_scale", None)):
        return from_callable(scaler.get_scale)
    loss_scale = getattr(scaler, "loss_scale", None)
    if callable(loss_scale):
        return from_callable(loss_scale)
    if loss_scale is not None:
        return from_callable(lambda: loss_scale)
    return BackwardScale(None, unknown=f"{type(scaler).__name__} has neither get_scale() nor loss_scale")


def origin_of(scaler: Any) -> tuple[int, int] | None:
    """Return the ``origin`` of a loss that a scaler would multiply now; None if it is no GradScaler. Never waits."""
    held = getattr(scaler, "_scale", None)
    if isinstance(held, torch.Tensor):
        return id(scaler), held._version
    return None


def _only_powers_of_two(scaler: Any) -> bool:
    """Return whether a GradScaler's scale is always a power of two, because its initial scale and both factors are."""
    parts = (getattr(scaler, name, None) for name in ("_init_scale", "_growth_factor", "_backoff_factor"))
    return all(isinstance(part, (int, float)) and is_power_of_two(float(part)) for part in parts)


def constant_factor(losses: Sequence[torch.Tensor]) -> float | None:
    """Return the constant by which the loop multiplied a single loss; it may have divided the product since. None without one.

    Never waits for a device.
    """
    node: Any = losses[0].grad_fn if len(losses) == 1 else None
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        if getattr(node._raw_saved_other, "unpack_hook", None) is not None:
            # Unpacking may repeat a whole forward, as activation checkpointing does.
            return None
        try:
            other = node._saved_other
        except (AttributeError, RuntimeError):
            # It was not saved, or has been freed.
            return None
        if not isinstance(other, torch.Tensor) or other.requires_grad:
            return None
        factor = factor_of(node.name()[:3].lower(), other)
        if factor is None or factor > 1 or node.name() == "MulBackward0":
            return factor
        node = node.next_functions[0][0]
    return None


def factor_of(name: str, value: Any) -> float | None:
    """Return the number by which a product multiplies; None if it is none, or unknown without waiting for a device."""
    if isinstance(value, torch.Tensor) and not (value.is_cpu and value.numel() == 1):
        return None
    if not isinstance(value, (torch.Tensor, int, float)):
        return None
    number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    if name == "mul":
        return number
    return 1 / number if number else None
