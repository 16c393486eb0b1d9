"""The loss scale of a backward, known on the host or still on the device.

The scale is recorded when a scaler scales a loss, and applies to the backward that begins at that loss.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mpinspect.numeric.formats import is_power_of_two
from mpinspect.ranges.capture.recording import Recording
from mpinspect.runtime.outputs import tensors_in

#: The id of no graph task. Differs from -1, which torch returns outside a backward.
NO_BACKWARD = -2


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
_ASIDE = BackwardScale(is_aside=True)


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


class _Scaled(NamedTuple):
    """A backward that began at a scaled loss: its thread, its scale, and the scaler."""

    thread: int
    scale: BackwardScale
    scaler: weakref.ref[Any]


class ScaleOfBackward:
    """Finds the loss scale of the backward that is running.

    A hook on each loss that a GradScaler scaled fires before any hook of the model. It gives the scale of *this*
    backward, whichever scaler made the loss, and distinguishes scaled from unscaled backwards.

    Args:
        loss_scale: for loops that scale the loss by hand: a number or a callable; None otherwise.
        scalers: the scalers that the user passed.
        fp16_weights: whether parameters are stored in FP16 (then, as under FP16 autocast, the loop probably scales by
            hand, so a scale of 1 is not assumed).
        recording: takes the notes.
        changes: called when the scale of the running backward must be determined again.
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
        self._fp16_weights, self._recording, self._changes = fp16_weights, recording, changes
        #: Scaled backwards in progress, by graph task.
        self._scaled: dict[int, _Scaled] = {}
        #: The graph task of the backward in the last call of ``now``, while its scale remains valid.
        self.task = NO_BACKWARD
        #: The scale in the last call of ``now``, for the last backward that reached the model.
        self.last = UNSCALED
        #: Whether the backward in the last call of ``now`` began at a loss that an enabled GradScaler scaled; and the scaler.
        self.by_scaler = False
        self.scaler: Any = None
        #: Whether any GradScaler has scaled a loss, perhaps of another model; and whether a backward of this one began at one.
        self.any_scaled = self._was_scaled = False
        #: Why the scale of a backward of this step is not known, as long as no scaler is seen; "" without such a backward.
        self._unseen = ""

    def now(self, in_half: bool) -> tuple[BackwardScale, bool]:
        """Return the scale of the running backward, and whether this is the first call within that backward.

        Args:
            in_half: whether any value of this step passed through FP16, so that the loop probably scales by hand.
        """
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return self.last, False
        # Torch returns -1 outside a backward.
        self.task = task if task != -1 else NO_BACKWARD
        scaled = self._of_scaled_loss()
        if scaled is None:
            self.last, self.scaler, self.by_scaler = self._find(in_half), None, False
        else:
            self.last, self.scaler = scaled.scale, scaled.scaler()
            self.by_scaler = scaled.scale is not UNSCALED
            self._was_scaled |= self.by_scaler
        if self.last.unknown and not self._unseen:
            self._recording.scale_unknown(self.last.unknown)
        return self.last, True

    def step_ends(self) -> None:
        """Record that a backward's scale is not known, unless the step has shown a scaler since: then it was not scaled."""
        if self._unseen and not self._was_scaled:
            self._recording.scale_unknown(self._unseen)
        self._unseen = ""

    def loss_scaled(self, scaler: Any, scaled: Any) -> list[torch.Tensor]:
        """Record the scale of losses that a GradScaler scaled, for their backward; return the scaled losses that have one."""
        self.any_scaled = True
        scale, used = from_scaler(scaler), weakref.ref(scaler)
        me = weakref.ref(self)

        def backward_begins(gradient: torch.Tensor) -> None:
            alive = me()
            if alive is not None:
                alive._begins(scale, used)

        losses = [loss for loss in tensors_in(scaled) if loss.requires_grad and loss.grad_fn is not None]
        for loss in losses:
            loss.register_hook(backward_begins)  # type: ignore[no-untyped-call]
        return losses

    def _begins(self, scale: BackwardScale, scaler: weakref.ref[Any]) -> None:
        task = torch._C._current_graph_task_id()
        known = self._scaled.get(task)
        if known is not None and not known.scale.agrees_with(scale):
            scale = BackwardScale(None, unknown="one backward ran through losses of different scales")
        self._scaled[task] = _Scaled(threading.get_ident(), scale, scaler)
        self.forget()
        # Drop the scale when this backward ends: the next backward may be unscaled.
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._ended, task))

    def _ended(self, task: int) -> None:
        self._scaled.pop(task, None)
        self.forget()

    def forget(self) -> None:
        """Discard the scale found last: the next gradient is treated as the first of its backward."""
        self.task, self.scaler = NO_BACKWARD, None
        self._changes()

    def _of_scaled_loss(self) -> _Scaled | None:
        """Return the entry of the scaled loss where the running backward began; None if it began elsewhere.

        A nested backward (reentrant checkpointing) has its own graph task and takes the scale of the outer one on its
        thread.
        """
        own = self._scaled.get(torch._C._current_graph_task_id())
        if own is not None:
            return own
        thread = threading.get_ident()
        return next((each for each in reversed(self._scaled.values()) if each.thread == thread), None)

    def _find(self, in_half: bool) -> BackwardScale:
        if callable(self._by_hand):
            return from_callable(self._by_hand)
        if self._by_hand is not None:
            return from_number(float(self._by_hand))
        others = [scaler for scaler in self._scalers if not isinstance(scaler, torch.amp.GradScaler)]
        if others:
            return from_scaler(others[0])
        if self._was_scaled:
            return _ASIDE
        self._unseen = self._unseen or self._why_unknown(in_half)
        if self._unseen:
            return BackwardScale(None, unknown=self._unseen)
        return UNSCALED

    def _why_unknown(self, in_half: bool) -> str:
        """Return why a backward that began at no scaled loss may be scaled nevertheless; "" if it is unscaled."""
        if any(scaler.is_enabled() for scaler in self._scalers):
            return (
                "the scaler given has not scaled a loss through scaler.scale(); if you multiply by its scale yourself, pass "
                "loss_scale=scaler.get_scale"
            )
        if self._fp16_weights:
            what = "the weights are FP16"
        elif in_half:
            what = "values passed through FP16"
        else:
            return ""
        return f"{what} and no scaler was seen; pass loss_scale= (mpinspect run: --loss-scale), 1 if the loss is not scaled"
