"""The losses scaled since the last update; their values are read only after a skipped step.

A loss that was infinite or NaN before scaling means that the forward failed, which no loss scale can prevent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mpinspect.reporting.words import number_or_power
from mpinspect.training.skipped_steps import BACKWARD, FORWARD, Explainer, NonFinite

_log = logging.getLogger("mpinspect.training")

#: The most losses that are stored separately; more (from many micro-batches) are reduced to one number per device.
_MOST_KEPT = 256
#: Largest storage (bytes; CUDA's allocation granularity) of a 0-d loss that is stored as it is.
_LARGEST_STORAGE = 512
#: The smallest scale that is infinite in FP16; the gradient of an FP16 loss is the scale itself.
_HALF_OVERFLOWS_AT = 65520.0


@dataclass
class ScaledLosses:
    """Stores detached losses, never a graph. Methods wait for the GPU only if their docstrings mention it."""

    _kept: list[torch.Tensor] = field(default_factory=list)
    #: The number of scaled losses.
    count: int = 0
    #: Whether any of them was FP16.
    any_half: bool = False
    #: Whether the gradient of a scaled output was computed with create_graph=True, as for a gradient penalty.
    differentiated: bool = False

    def __len__(self) -> int:
        """Return the number of stored tensors."""
        return len(self._kept)

    def note(self, outputs: Any) -> None:
        """Record scaled losses: a tensor, or nested lists and tuples of tensors."""
        if isinstance(outputs, torch.Tensor):
            self._note_tensor(outputs)
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self.note(output)

    def noting(self, outputs: Iterable[Any]) -> Iterator[Any]:
        """Yield the elements of an iterable, recording each as scaled."""
        for output in outputs:
            self.note(output)
            yield output

    def watch(self, scaled: Any) -> None:
        """Detect if a scaled output's gradient will itself be differentiated, so that a later loss depends on the scale."""
        if isinstance(scaled, torch.Tensor):
            if scaled.requires_grad:
                scaled.register_hook(self._gradient_arrives)  # type: ignore[no-untyped-call]
        elif isinstance(scaled, (list, tuple)):
            for part in scaled:
                self.watch(part)

    def forget(self) -> None:
        """Discard everything except the count."""
        self._kept.clear()
        self.any_half = self.differentiated = False

    def any_failed(self) -> bool:
        """Return whether one of the losses was infinite or NaN. Waits for the GPU."""
        return bool(self._kept) and any(not bool(finite) for finite in self._finite_by_device())

    def failed(self, device: torch.device) -> torch.Tensor:
        """Return 1.0 if a loss was infinite or NaN for reasons other than the scale, else 0.0; 0-d FP32 on ``device``."""
        flag = torch.zeros((), dtype=torch.float32, device=device)
        if self.differentiated:
            return flag
        for finite in self._finite_by_device():
            flag = torch.maximum(flag, (~finite).to(device=device, dtype=torch.float32, non_blocking=True))
        return flag

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        # Gradient mode is enabled in a hook only with create_graph=True.
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
            # The largest magnitude is finite if and only if all values are finite.
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
    """Why a step was skipped: FORWARD or BACKWARD, and the first non-finite value if known."""

    phase: str
    culprit: NonFinite | None = None


def find_cause(
    losses: ScaledLosses, scale: float, optimizer: torch.optim.Optimizer | None, explainer: Explainer | None
) -> Cause:
    """Return why the step of ``optimizer`` was skipped (None if its gradients no longer exist). Waits for the GPU."""
    if losses.any_failed():
        if losses.differentiated:
            detail = (
                "it was computed from a scaled gradient, like a gradient penalty, and that gradient may have overflowed"
            )
            return Cause(BACKWARD, NonFinite("", "loss", "", detail))
        return Cause(FORWARD, _ask(explainer, FORWARD, optimizer))
    if losses.any_half and scale >= _HALF_OVERFLOWS_AT:
        detail = f"the loss is FP16, which cannot hold {number_or_power(scale)}: compute the loss in FP32"
        return Cause(BACKWARD, NonFinite("", "loss", "inf", detail))
    return Cause(BACKWARD, _ask(explainer, BACKWARD, optimizer))


def let_go(explainer: Explainer, *, forward_finite: bool) -> None:
    """Call the explainer's ``step_ended``; log its exceptions instead of raising, so that training continues."""
    try:
        explainer.step_ended(forward_finite=forward_finite)
    except Exception:
        _log.warning("ending the search for the cause of a skipped step failed", exc_info=True)


def _ask(explainer: Explainer | None, phase: str, optimizer: torch.optim.Optimizer | None) -> NonFinite | None:
    """Return the explainer's answer; log its exceptions and return None, so that training continues."""
    if explainer is None:
        return None
    try:
        if phase == FORWARD:
            return explainer.forward()
        if optimizer is not None:
            return explainer.gradient(optimizer)
    except Exception:
        _log.warning("the search for the cause of a skipped step failed", exc_info=True)
    return None
