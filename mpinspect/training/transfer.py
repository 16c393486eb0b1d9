"""Copies gradients from half parameters to FP32 masters, and checks whether they have been zeroed since."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Tensor = torch.Tensor
#: By parameter: its gradient when it was last copied to the master (a weak reference), and that tensor's version then.
_TRANSFERRED: Any = WeakIdKeyDictionary()


@torch.no_grad()
def copy_gradients(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Overwrite the masters' gradients with the parameters' gradients, in the masters' dtype; None stays None.

    A sparse gradient is coalesced after the conversion, so that duplicates are added in FP32 without overflow.
    """
    sources, targets = [], []
    for parameter, master in zip(parameters, masters, strict=True):
        gradient = parameter.grad
        if gradient is None:
            master.grad = None
            continue
        if gradient.is_sparse:
            master.grad = gradient.to(master.dtype).coalesce()
            continue
        if master.grad is None or master.grad.is_sparse:
            master.grad = torch.empty_like(master)
        sources.append(gradient)
        targets.append(master.grad)
    if targets:
        torch._foreach_copy_(targets, sources)
    _remember(parameters)


@torch.no_grad()
def copy_gradients_flat(parameters: Sequence[Tensor], master: Tensor) -> None:
    """Overwrite the gradient of one flat master with all the parameters' gradients; None becomes zeros."""
    if master.grad is None:
        master.grad = torch.empty_like(master)
    for parameter, target in zip(parameters, unflatten(master.grad, parameters), strict=True):
        if parameter.grad is None:
            target.zero_()
        elif parameter.grad.is_sparse:
            target.copy_(parameter.grad.to_dense())
        else:
            target.copy_(parameter.grad)
    _remember(parameters)


def unflatten(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor in the parameters' shapes."""
    pieces = torch.split(flat.detach(), [parameter.numel() for parameter in parameters])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]


def require_zeroed(named: Iterable[tuple[str, Tensor]], writes: int) -> None:
    """Raise if a gradient was copied to its master, written in place exactly ``writes`` times since, and is not zero.

    Gradient values are read, which waits for the GPU, only if the tensor and its number of writes match.

    Raises:
        RuntimeError: gradients of two steps would be or have been added up.
    """
    for name, parameter in named:
        if _writes_since(parameter) == writes and _any(parameter.grad):
            raise RuntimeError(
                f"the gradient of {name!r} in the model was copied to its FP32 master already and has not been "
                f"zeroed since, so the gradients of two steps add up. optimizer.zero_grad() zeroes the masters' gradients "
                f"only: call model.zero_grad() too (zeroing through .grad.data can not be seen)"
            )


def any_written_since(parameters: Iterable[Tensor]) -> bool:
    """Return whether any gradient was written in place since it was copied to its master; does not wait for the GPU."""
    return any(_writes_since(parameter) for parameter in parameters)


def _remember(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        # A view (DistributedDataParallel's gradient_as_bucket_view) shares its version counter with other gradients.
        if gradient is None or gradient._is_view():
            _TRANSFERRED.pop(parameter, None)
        else:
            _TRANSFERRED[parameter] = (weakref.ref(gradient), gradient._version)


def _writes_since(parameter: Tensor) -> int | None:
    """Return the number of in-place writes to a gradient since its copy; None if this tensor was not copied."""
    reference, version = _TRANSFERRED.get(parameter, (None, 0))
    gradient = parameter.grad
    if gradient is None or reference is None or reference() is not gradient:
        return None
    return int(gradient._version - version)


def _any(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    if gradient.is_sparse:
        gradient = gradient._values()
    return bool(gradient.any())
