"""Chooses the loss scaler for a precision and the user's ``loss_scale``, and checks the model and optimizers for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpinspect.runtime.user_line import warn_user
from mpinspect.training.loss_scaler import LossScaler, LossScaleWarning
from mpinspect.training.precision import Precision
from mpinspect.training.scale_rules import PRESETS

#: Floor of dynamic scales: if gradients overflow even here, they exceed 2^32 and the loss scale is not the cause.
COLLAPSE = 2.0**-16


def chosen_scaler(given: str | float | LossScaler | None, precision: Precision, device: str) -> LossScaler:
    """Return the scaler for MixedPrecision's ``loss_scale=given``; a disabled scaler if no scale is used.

    Raises:
        TypeError, ValueError: ``given`` is not an allowed value.
    """
    if given is None:
        given = "dynamic" if precision.scaled else "none"
    options: dict[str, Any] = {"device": device, "forward_nonfinite": "hold"}
    if isinstance(given, LossScaler):
        return given
    if given == "none":
        return LossScaler(device=device, enabled=False)
    if given in ("dynamic", "auto"):
        return LossScaler(floor=COLLAPSE, **options)
    if isinstance(given, str) and given in PRESETS:
        return LossScaler.preset(given, floor=COLLAPSE, **options)
    if isinstance(given, str):
        raise ValueError(_wrong_scale(given))
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return LossScaler.static(float(given), **options)
    raise TypeError(_wrong_scale(given))


def require_real(model: torch.nn.Module) -> None:
    """Raise ValueError if a parameter is complex."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is complex, which no loss scaler unscales: use 'fp32', or a bf16 precision, without a scale"
            )


def warn_of_vanishing_eps(optimizers: Sequence[torch.optim.Optimizer], precision: Precision) -> None:
    """Warn if an optimizer's eps rounds to 0 in the FP16 state of FP16 weights without masters.

    With Adam's default eps, a gradient of 0 then divides 0 by 0.
    """
    if precision.stored != torch.float16 or precision.masters:
        return
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        eps = group.get("eps")
        if isinstance(eps, float) and 0 < eps <= 2.0**-25:
            warn_user(
                f"the optimizer's eps={eps:g} is 0 in FP16, so that weights with a gradient of 0 turn NaN: "
                f"with {precision.name!r} give it eps=1e-4 or so",
                LossScaleWarning,
            )
            return


def _wrong_scale(given: object) -> str:
    if isinstance(given, torch.amp.GradScaler):
        return (
            "loss_scale is a torch.amp.GradScaler, which neither supports closures nor reports why a step was skipped: "
            "give an mpinspect.LossScaler, which loads its state_dict() and makes the same decisions"
        )
    names = ", ".join(f'"{name}"' for name in ("dynamic", "auto", "none", *PRESETS))
    return f"loss_scale={given!r}: give one of {names}, a number such as 2.0**16, or a LossScaler"
