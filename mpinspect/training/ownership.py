"""Checks that a single MixedPrecision steps an optimizer, through its own step(), and that its LossScaler is its own.

Without these checks the failures would be silent. An optimizer stepped directly uses scaled gradients, or masters without
gradients; optimizers that share parameters unscale their gradients twice; a scaler shared by two networks changes its scale
between their steps.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mpinspect.runtime.hooks import Uncopied
from mpinspect.training.closures import held_parameters
from mpinspect.training.loss_scaler import LossScaler
from mpinspect.training.masters import is_master

#: The guard on each optimizer's step; replaced if the optimizer is given to another MixedPrecision.
_guards: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
#: The owner of each scaler.
_owners: weakref.WeakKeyDictionary[LossScaler, weakref.ref[object]] = weakref.WeakKeyDictionary()


def checked_optimizers(model: torch.nn.Module, given: object) -> list[torch.optim.Optimizer]:
    """Return the given optimizers as a list, after checking them.

    Raises:
        TypeError: model or optimizer is of the wrong type.
        ValueError: an optimizer has no parameter of the model, or masters of another MixedPrecision; or two optimizers
            share parameters.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"MixedPrecision needs a torch.nn.Module, not {type(model).__name__}")
    several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    seen: set[int] = set()
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        held = held_parameters(optimizer)
        _check_held(model, optimizer, held)
        if not seen.isdisjoint(map(id, held)):
            raise ValueError(
                "two of the optimizers hold the same parameters: their gradients would be unscaled twice. Give each parameter to "
                "one optimizer, and each optimizer once"
            )
        seen.update(map(id, held))
    if not several:
        raise TypeError("MixedPrecision needs an optimizer")
    return several


def _check_held(model: torch.nn.Module, optimizer: torch.optim.Optimizer, held: list[torch.Tensor]) -> None:
    kind = type(optimizer).__name__
    if any(is_master(parameter) for parameter in held):
        raise ValueError(
            f"the {kind} holds the FP32 masters of another MixedPrecision already: continue with that one, or make the model "
            "and the optimizer again"
        )
    if {id(parameter) for parameter in held}.isdisjoint(id(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"the {kind} holds none of the model's parameters: it was made for another model, or "
            "before the model was copied or loaded again. Make it from model.parameters()"
        )


def take_scaler(owner: object, scaler: LossScaler) -> None:
    """Make ``owner`` the owner of this scaler. Raises ValueError if the scaler has another owner."""
    other = _owners.get(scaler)
    if other is not None and other() not in (None, owner):
        raise ValueError(
            "this LossScaler is used by another MixedPrecision already: one network's overflow would change the scale of the "
            "other between its backward and its step. Give each its own"
        )
    _owners[scaler] = weakref.ref(owner)


class StepGuard(Uncopied):
    """Raises if ``optimizer.step()`` is called outside the owner's step; inactive in a copy of the optimizer."""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    @classmethod
    def put(cls, owner: Any, optimizer: torch.optim.Optimizer) -> None:
        """Guard an optimizer for ``owner``, whose ``stepping`` attribute is True while its step runs."""
        cls.remove(optimizer)
        _guards[optimizer] = optimizer.register_step_pre_hook(cls(owner))

    @staticmethod
    def remove(optimizer: torch.optim.Optimizer) -> None:
        handle = _guards.pop(optimizer, None)
        if handle is not None:
            handle.remove()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owner = self._owner()
        if owner is not None and not owner.stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called directly: its gradients would be scaled or missing. "
                "Call the MixedPrecision's step() instead; it steps the optimizer"
            )
