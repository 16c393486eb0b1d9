"""Finds the loss scale of each backward.

The scale is recorded when a scaler scales a loss, and applies to the backward that begins at that loss.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpinspect.numeric.formats import is_power_of_two
from mpinspect.ranges.capture.backward_scale import (
    ASIDE,
    UNSCALED,
    BackwardScale,
    constant_factor,
    from_callable,
    from_number,
    from_scaler,
)
from mpinspect.ranges.capture.recording import Recording
from mpinspect.runtime.outputs import tensors_in

#: A loop that multiplies its losses by a smaller power of two weighs them, unless its weights are FP16.
_LEAST_SCALE = 128.0
#: Nor does any other factor from here on weigh losses, if the weights are FP16.
_LEAST_OF_ANY = 1024.0
#: The id of no graph task. Differs from -1, which torch returns outside a backward.
NO_BACKWARD = -2


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
        #: The factor by which the loop itself multiplied the loss of the last backward; whether such factors are loss scales.
        self._factor: float | None = None
        self._scaled_by_loop = False
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

    def backward_called(self, losses: Sequence[torch.Tensor]) -> None:
        """Read the factor by which the loop itself multiplies a loss whose backward is about to begin."""
        self._factor = constant_factor(losses)
        least = 2.0 if self._fp16_weights else _LEAST_SCALE
        factor = self._factor or 0.0
        is_scale = factor >= least if is_power_of_two(factor) else self._fp16_weights and factor >= _LEAST_OF_ANY
        # A loss scale may be lowered later.
        self._scaled_by_loop |= is_scale

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
            return ASIDE
        unseen = self._why_unknown(in_half)
        if unseen and self._scaled_by_loop and self._factor is not None:
            return from_number(self._factor)
        self._unseen = self._unseen or unseen
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
