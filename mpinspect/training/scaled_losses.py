"""The losses that were scaled since the last update: looked at only when a step was skipped.

A loss that was infinite or NaN before it was scaled says that the forward failed; then no loss scale helps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mpinspect.training.skipped_steps import BACKWARD, FORWARD, Explainer, NonFinite, power

_log = logging.getLogger("mpinspect.training")

#: Losses remembered one by one; more (many micro-batches) are folded into one number.
_MOST_KEPT = 256
#: A 0-d tensor is kept as it is only where no larger tensor's memory hangs on it (bytes; what CUDA's allocator rounds up to).
_LARGEST_STORAGE = 512
#: The smallest scale that is infinite in FP16: the gradient of an FP16 loss is the scale itself.
_HALF_OVERFLOWS_AT = 65520.0


@dataclass
class ScaledLosses:
    """Holds detached numbers, never a graph. Nothing here waits for the GPU unless it says so."""

    _kept: list[torch.Tensor] = field(default_factory=list)
    #: How often a loss was scaled.
    count: int = 0
    #: Whether one of them was FP16.
    any_half: bool = False
    #: Whether a gradient of something scaled went into a further loss (create_graph=True), as that of a gradient penalty does.
    differentiated: bool = False

    def __len__(self) -> int:
        """Return how many tensors are kept."""
        return len(self._kept)

    def note(self, outputs: Any) -> None:
        """Remember what was scaled: a tensor, or lists and tuples of them, however nested."""
        if isinstance(outputs, torch.Tensor):
            self._note_tensor(outputs)
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self.note(output)

    def noting(self, outputs: Iterable[Any]) -> Iterator[Any]:
        """Hand on what an iterator gives, and remember it."""
        for output in outputs:
            self.note(output)
            yield output

    def watch(self, scaled: Any) -> None:
        """Notice when the gradient of something scaled is to be differentiated itself: a later loss then depends on the scale."""
        if isinstance(scaled, torch.Tensor):
            if scaled.requires_grad:
                scaled.register_hook(self._gradient_arrives)  # type: ignore[no-untyped-call]
        elif isinstance(scaled, (list, tuple)):
            for part in scaled:
                self.watch(part)

    def forget(self) -> None:
        """Let go of everything but the count."""
        self._kept.clear()
        self.any_half = self.differentiated = False

    def any_failed(self) -> bool:
        """Return whether one of the losses was infinite or NaN. Waits for the GPU."""
        return bool(self._kept) and any(not bool(finite) for finite in self._finite_by_device())

    def failed(self, device: torch.device) -> torch.Tensor:
        """Return whether one of the losses was infinite or NaN, and not for the scale: 1.0 or 0.0, 0-d FP32 on ``device``."""
        flag = torch.zeros((), dtype=torch.float32, device=device)
        if self.differentiated:
            return flag
        for finite in self._finite_by_device():
            flag = torch.maximum(flag, (~finite).to(device=device, dtype=torch.float32, non_blocking=True))
        return flag

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        # A hook runs with gradients enabled only where create_graph=True.
        self.differentiated = self.differentiated or torch.is_grad_enabled()

    def _note_tensor(self, loss: torch.Tensor) -> None:
        self.count += 1
        self.any_half = self.any_half or loss.dtype == torch.float16
        loss = loss.detach()
        if hasattr(loss, "to_local"):
            loss = loss.to_local()
        if not loss.numel():
            return
        if loss.dim() or loss.untyped_storage().nbytes() > _LARGEST_STORAGE:
            # The largest magnitude is finite where all are, and NaN where one is.
            loss = loss.abs().amax()
        self._kept.append(loss)
        if len(self._kept) > _MOST_KEPT:
            self._kept[:] = [torch.where(finite, 0.0, torch.nan) for finite in self._finite_by_device()]

    def _finite_by_device(self) -> list[torch.Tensor]:
        groups: dict[torch.device, list[torch.Tensor]] = {}
        for loss in self._kept:
            groups.setdefault(loss.device, []).append(loss.isfinite())
        return [torch.stack(flags).all() for flags in groups.values()]


@dataclass(frozen=True)
class Cause:
    """Why a step was skipped: FORWARD or BACKWARD, and the first value that was not finite where it is known."""

    phase: str
    culprit: NonFinite | None = None


def find_cause(
    losses: ScaledLosses, scale: float, optimizer: torch.optim.Optimizer | None, explainer: Explainer | None
) -> Cause:
    """Return why the step of ``optimizer`` was skipped (None: its gradients are gone). Waits for the GPU."""
    if losses.any_failed():
        if losses.differentiated:
            detail = "it was computed from a scaled gradient, as a gradient penalty is: that may have overflowed"
            return Cause(BACKWARD, NonFinite("", "loss", "", detail))
        return Cause(FORWARD, _ask(explainer, FORWARD, optimizer))
    if losses.any_half and scale >= _HALF_OVERFLOWS_AT:
        detail = f"the loss is FP16, which cannot hold {power(scale)}: compute the loss in FP32"
        return Cause(BACKWARD, NonFinite("", "loss", "inf", detail))
    return Cause(BACKWARD, _ask(explainer, BACKWARD, optimizer))


def let_go(explainer: Explainer, *, forward_finite: bool) -> None:
    """Tell the explainer that the step is over. A fault of its own must not end the training."""
    try:
        explainer.step_ended(forward_finite=forward_finite)
    except Exception:
        _log.warning("ending the search for the cause of a skipped step failed", exc_info=True)


def _ask(explainer: Explainer | None, phase: str, optimizer: torch.optim.Optimizer | None) -> NonFinite | None:
    """Return the explainer's answer. A fault of its own must not end the training."""
    if explainer is None:
        return None
    try:
        if phase == FORWARD:
            return explainer.forward()
        return None if optimizer is None else explainer.gradient(optimizer)
    except Exception:
        _log.warning("looking for the cause of a skipped step failed", exc_info=True)
        return None
