"""One MixedPrecision steps an optimizer, through its own step(), and has its LossScaler for itself.

What goes wrong otherwise is silent. An optimizer that steps by itself steps on scaled gradients, or on masters that have none;
optimizers that share parameters unscale them twice; a scaler of two networks moves its scale between their steps.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mpinspect.training.closures import held_parameters
from mpinspect.training.loss_scaler import LossScaler
from mpinspect.training.masters import is_master

#: The guard on an optimizer's step: an optimizer that goes to another MixedPrecision leaves the first one's behind.
_guards: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
#: Whose a scaler is.
_owners: weakref.WeakKeyDictionary[LossScaler, weakref.ref[object]] = weakref.WeakKeyDictionary()


def checked_optimizers(model: torch.nn.Module, given: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers given, as a list.

    Raises:
        TypeError: model or optimizer is of the wrong type.
        ValueError: an optimizer holds none of the model's parameters, or masters made by another MixedPrecision; two share some.
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
            f"the {kind} holds the FP32 masters of another MixedPrecision already: go on with that one, or make the model and "
            "the optimizer anew"
        )
    if {id(parameter) for parameter in held}.isdisjoint(id(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"the {kind} holds none of the model's parameters: it was made for another model, or "
            "before the model was copied or loaded anew. Make it from model.parameters()"
        )


def take_scaler(owner: object, scaler: LossScaler) -> None:
    """``owner`` has this scaler from now on.

    Raises:
        ValueError: another one has it.
    """
    other = _owners.get(scaler)
    if other is not None and other() not in (None, owner):
        raise ValueError(
            "this LossScaler serves another MixedPrecision already: one network's overflow would change the scale of the other "
            "between its backward and its step. Give each its own"
        )
    _owners[scaler] = weakref.ref(owner)


class StepGuard:
    """Refuses ``optimizer.step()`` outside of the owner's step. In a copy of the optimizer it does nothing."""

    def __init__(self, owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    @classmethod
    def put(cls, owner: Any, optimizer: torch.optim.Optimizer) -> None:
        """Guard an optimizer for ``owner``, which says by ``.stepping`` whether it is at work."""
        cls.remove(optimizer)
        _guards[optimizer] = optimizer.register_step_pre_hook(cls(owner))

    @staticmethod
    def remove(optimizer: torch.optim.Optimizer) -> None:
        """Take the guard off."""
        handle = _guards.pop(optimizer, None)
        if handle is not None:
            handle.remove()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None and not owner.stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by itself: it would step on gradients scaled or missing. "
                "Call the MixedPrecision's step() instead; it steps the optimizer"
            )

    def __deepcopy__(self, memo: object) -> StepGuard:
        return StepGuard()

    def __reduce__(self) -> Any:
        return StepGuard, ()
