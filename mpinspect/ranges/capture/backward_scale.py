"""Which scale the backward that is running has: taken from the scaled loss itself as its backward begins."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpinspect.ranges.capture import loss_scale as scales
from mpinspect.ranges.capture.loss_scale import BackwardScale
from mpinspect.ranges.capture.recording import Recording
from mpinspect.runtime.outputs import tensors_in

#: No graph task, and not torch's number for none either.
NO_BACKWARD = -2


class ScaleOfBackward:
    """Tells every backward's loss scale, at the moment of that backward.

    A GradScaler's scaled loss carries a hook that fires before anything of the model: so the scale is that of *this*
    backward, whichever scaler made it, and an unscaled backward beside it is known to be one.

    Args:
        loss_scale: of loops that scale by hand: a number, a callable, or None.
        scalers: those given by the user.
        fp16_weights: whether parameters are stored in FP16 (then, as under FP16 autocast, a scale by hand is likely, and
            silence is no 1.0).
        recording: takes the notes.
        changes: called when what was known of the backward at work holds no more.
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
        #: The backward (graph task) that was last looked at, while its scale is certain.
        self.task = NO_BACKWARD
        self._scale = scales.UNSCALED
        self._by_scaler = False
        self.any_scaled = False

    @property
    def by_scaler(self) -> bool:
        """Whether the backward that was last looked at (``now``) began at a GradScaler's scaled loss."""
        return self._by_scaler

    def now(self, in_half: bool) -> tuple[BackwardScale, bool]:
        """The scale of the backward that is running, and whether this is the first look at it.

        ``in_half``: whether something of this step passed through FP16, where a loop is likely to scale by hand.
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
        """A GradScaler scaled a loss. Returns the scaled losses that have a backward."""
        self.any_scaled = True
        scale = scales.from_scaler(scaler)
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
        """Whatever gradient comes next is the first of its backward again."""
        self.task = NO_BACKWARD
        self._changes()

    def _of_scaled_loss(self) -> BackwardScale | None:
        """The scale of the scaled loss that the running backward began at; None if it began elsewhere.

        A backward inside another one (reentrant checkpointing) is a task of its own, on the same thread.
        """
        own = self._scaled.get(torch._C._current_graph_task_id())
        if own is not None:
            return own[1]
        thread = threading.get_ident()
        return next((scale for ident, scale in reversed(self._scaled.values()) if ident == thread), None)

    def _find(self, in_half: bool) -> BackwardScale:
        if callable(self._by_hand):
            return scales.from_callable(self._by_hand)
        if self._by_hand is not None:
            return scales.from_number(float(self._by_hand))
        others = [scaler for scaler in self._scalers if not isinstance(scaler, torch.amp.GradScaler)]
        if others:
            return scales.from_scaler(others[0])
        return scales.UNSCALED if self.any_scaled else self._without_scaling_seen(in_half)

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
        return scales.UNSCALED
