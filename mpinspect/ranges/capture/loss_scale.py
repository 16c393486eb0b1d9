"""The loss scale of a backward, known on the host or still on the device.

It is taken from the scaled loss itself, as its backward begins.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mpinspect.ranges.capture.recording import Recording
from mpinspect.runtime.outputs import tensors_in

#: No graph task, and not torch's number for none either.
NO_BACKWARD = -2


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
        """Return whether the two are surely one scale; two that are on the device are if they are one scaler's."""
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
    """Return whether value is 2^k for an integer k."""
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


def from_number(value: float) -> BackwardScale:
    """Return a scale that the host knows. Not positive or not finite: unknown, with the reason."""
    if not math.isfinite(value) or value <= 0:
        return BackwardScale(None, unknown=f"the loss scale was {value}")
    return BackwardScale(value, power_of_two=is_power_of_two(value))


def from_callable(source: Callable[[], Any]) -> BackwardScale:
    """Return the scale that the user's own callable gives now; whatever it raises makes the scale unknown."""
    try:
        return from_number(float(source()))
    except Exception as error:
        return BackwardScale(None, unknown=f"loss_scale() failed: {error!r}")


def from_scaler(scaler: Any) -> BackwardScale:
    """Return the scale that a scaler applies now.

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
    """Return whether a GradScaler's scale can only be a power of two: its start and both its factors are."""
    parts = (getattr(scaler, name, None) for name in ("_init_scale", "_growth_factor", "_backoff_factor"))
    return all(isinstance(part, (int, float)) and is_power_of_two(float(part)) for part in parts)


class ScaleOfBackward:
    """Finds the loss scale of the backward that is running.

    A GradScaler's scaled loss carries a hook that fires before anything of the model: so the scale is that of *this*
    backward, whichever scaler made it, and an unscaled backward beside it is known to be one.

    Args:
        loss_scale: of loops that scale by hand: a number, a callable, or None.
        scalers: those given by the user.
        fp16_weights: whether parameters are stored in FP16 (then, as under FP16 autocast, a scale by hand is likely, and
            silence is no 1.0).
        recording: takes the notes.
        changes: called when the scale of the backward at work has to be found anew.
    """

    def __init__(
        self,
        loss_scale: float | Callable[[], Any] | None,
        scalers: Iterable[Any],
        fp16_weights: bool,
        recording: Recording,
        changes: Callable[[], None],
    ) -> None:
        self._by_hand = loss_scale
        self._scalers = list(scalers)
        self._fp16_weights = fp16_weights
        self._recording = recording
        self._changes = changes
        #: Scaled backwards under way: graph task -> the thread it runs on, and its scale.
        self._scaled: dict[int, tuple[int, BackwardScale]] = {}
        #: The backward (graph task) of the last ``now``, while its scale is certain.
        self.task = NO_BACKWARD
        self._scale = UNSCALED
        self._by_scaler = False
        self.any_scaled = False

    @property
    def by_scaler(self) -> bool:
        """Whether the backward of the last ``now`` began at a GradScaler's scaled loss."""
        return self._by_scaler

    def now(self, in_half: bool) -> tuple[BackwardScale, bool]:
        """Return the scale of the backward that is running, and whether it is asked for the first time.

        Args:
            in_half: whether something of this step passed through FP16, where a loop is likely to scale by hand.
        """
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return self._scale, False
        # Torch's -1 is outside of any.
        self.task = task if task != -1 else NO_BACKWARD
        scaled = self._of_scaled_loss()
        self._by_scaler = scaled is not None
        self._scale = scaled if scaled is not None else self._find(in_half)
        if self._scale.unknown:
            self._recording.scale_unknown(self._scale.unknown)
        return self._scale, True

    def loss_scaled(self, scaler: Any, scaled: Any) -> list[torch.Tensor]:
        """Follow the backward of a loss that a GradScaler scaled. Returns the scaled losses that have a backward."""
        self.any_scaled = True
        scale = from_scaler(scaler)
        me = weakref.ref(self)

        def backward_begins(gradient: torch.Tensor) -> None:
            alive = me()
            if alive is not None:
                alive._begins(scale)

        losses = [loss for loss in tensors_in(scaled) if loss.requires_grad and loss.grad_fn is not None]
        for loss in losses:
            loss.register_hook(backward_begins)  # type: ignore[no-untyped-call]
        return losses

    def _begins(self, scale: BackwardScale) -> None:
        task = torch._C._current_graph_task_id()
        known = self._scaled.get(task)
        if known is not None and not known[1].agrees_with(scale):
            scale = BackwardScale(None, unknown="one backward ran through losses of different scales")
        self._scaled[task] = (threading.get_ident(), scale)
        self.forget()
        # When this backward has ended its scale is over: another one may be unscaled.
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._ended, task))

    def _ended(self, task: int) -> None:
        self._scaled.pop(task, None)
        self.forget()

    def forget(self) -> None:
        """Take the next gradient for the first of its backward."""
        self.task = NO_BACKWARD
        self._changes()

    def _of_scaled_loss(self) -> BackwardScale | None:
        """Return the scale of the scaled loss that the running backward began at; None if it began elsewhere.

        A backward inside another one (reentrant checkpointing) is a task of its own, on the same thread.
        """
        own = self._scaled.get(torch._C._current_graph_task_id())
        if own is not None:
            return own[1]
        thread = threading.get_ident()
        return next((scale for ident, scale in reversed(self._scaled.values()) if ident == thread), None)

    def _find(self, in_half: bool) -> BackwardScale:
        if callable(self._by_hand):
            return from_callable(self._by_hand)
        if self._by_hand is not None:
            return from_number(float(self._by_hand))
        others = [scaler for scaler in self._scalers if not isinstance(scaler, torch.amp.GradScaler)]
        if others:
            return from_scaler(others[0])
        return UNSCALED if self.any_scaled else self._without_scaling_seen(in_half)

    def _without_scaling_seen(self, in_half: bool) -> BackwardScale:
        if any(scaler.is_enabled() for scaler in self._scalers):
            reason = (
                "the scaler given has not scaled a loss through scaler.scale(); if you multiply by its scale yourself, "
            )
            return BackwardScale(None, unknown=reason + "pass loss_scale=scaler.get_scale")
        if self._fp16_weights or in_half:
            what = "the weights are FP16" if self._fp16_weights else "values passed through FP16"
            reason = f"{what} and no scaler was seen; pass loss_scale= (mpinspect run: --loss-scale), 1 if the loss is not scaled"
            return BackwardScale(None, unknown=reason)
        return UNSCALED
