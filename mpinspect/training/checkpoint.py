"""Saves checkpoints atomically, loads them, and checks that they fit the model and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpinspect.runtime.appending import replace_whole
from mpinspect.training.closures import held_parameters
from mpinspect.training.masters import MasterWeights
from mpinspect.training.precision import PRECISIONS, Precision

KIND = "mpinspect.MixedPrecision"
VERSION = 1


class CheckpointError(ValueError):
    """The data is not a valid checkpoint of this model, which is unchanged."""


def save(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint atomically: write a temporary file in the same directory, then rename it to ``path``.

    Raises:
        OSError: the file can't be written; an existing file is untouched.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target} can't be written: there is no directory {target.parent}")
    replace_whole(target, lambda file: torch.save(dict(state), file))


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Runs no code from the file (``weights_only``).

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is not a checkpoint, or is truncated.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {source}")
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{source} can't be read as a checkpoint ({type(error).__name__}): it is cut off, or another program's. "
            "Take an earlier checkpoint, or inspect it with torch.load"
        ) from error
    return require(state)


def weights(model: torch.nn.Module, masters: MasterWeights) -> dict[str, Any]:
    """Return a copy of the model's state dict, with FP32 masters in place of 16-bit parameters."""
    # By id, since tied weights have one master and several names.
    of = {id(parameter): master for parameter, master in masters.pairs()}
    state = model.state_dict(keep_vars=True)
    return {name: _copied(of.get(id(tensor), tensor)) for name, tensor in state.items()}


def others(
    model: torch.nn.Module, masters: MasterWeights, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Return the optimizers' parameters that are not the model's, by "<optimizer number>.<position in it>"."""
    own = {id(parameter) for parameter in model.parameters()}
    own.update(id(master) for _, master in masters.pairs())
    return {
        f"{number}.{place}": parameter
        for number, optimizer in enumerate(optimizers)
        for place, parameter in enumerate(held_parameters(optimizer))
        if id(parameter) not in own
    }


def require(state: Any) -> dict[str, Any]:
    """Return ``state`` if it is a MixedPrecision's; otherwise raise CheckpointError with a guess at its kind."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a MixedPrecision's state_dict() is a dict, not {type(state).__name__}")
    if state.get("kind") == KIND:
        if state.get("version") != VERSION:
            raise CheckpointError(
                f"this checkpoint has format version {state.get('version')!r}; this mpinspect reads {VERSION}. "
                "Use the version of mpinspect that wrote it"
            )
        return dict(state)
    raise CheckpointError(f"not a MixedPrecision's state_dict(): {_looks_like(state)}")


def require_fitting(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    others: Mapping[str, torch.Tensor],
) -> None:
    """Raise CheckpointError unless ``state`` fits this model, these optimizers, and ``others``, their additional parameters."""
    try:
        _require_model(state, model)
        _require_optimizers(state["optimizers"], optimizers)
        _require_others(state["others"], others)
        if "steps" not in {name: int(count) for name, count in state["counters"].items()}:
            raise KeyError("steps")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint was changed after it was made, or is damaged ({error!r})") from error


def _require_model(state: Mapping[str, Any], model: torch.nn.Module) -> None:
    missing = sorted({"precision", "weights", "optimizers", "others", "scaler", "counters"}.difference(state))
    if missing:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing)}: it was changed after it was made")
    if state["precision"] not in PRECISIONS:
        raise CheckpointError(f"the checkpoint's precision {state['precision']!r} is unknown to this mpinspect")
    here, there = model.state_dict(), state["weights"]
    strange = sorted(set(here).symmetric_difference(there))
    if strange:
        raise CheckpointError(
            f"the checkpoint is of another model: {strange[0]!r} (and {len(strange) - 1} more names) are in only one of the two"
        )
    for name, tensor in here.items():
        if isinstance(tensor, torch.Tensor) and there[name].shape != tensor.shape:
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} has shape {tuple(there[name].shape)} there and "
                f"{tuple(tensor.shape)} here"
            )


def _require_others(saved: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    here = {name: tensor.shape for name, tensor in others.items()}
    there = {name: tensor.shape for name, tensor in saved.items()}
    if here != there:
        raise CheckpointError(
            f"the optimizers hold {len(here)} parameters that are not the model's, and the checkpoint has {len(there)}, or of "
            "other shapes: make the optimizers from the same parameters"
        )


def _require_optimizers(saved: Sequence[Mapping[str, Any]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if len(saved) != len(optimizers):
        raise CheckpointError(f"the checkpoint holds {len(saved)} optimizers, and there are {len(optimizers)} here")
    for there, optimizer in zip(saved, optimizers, strict=True):
        sizes = [len(group["params"]) for group in there["param_groups"]]
        own = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups of {sizes} parameters, the {type(optimizer).__name__} here {own}: "
                "make it with the same parameter groups"
            )
        _require_kind(there["param_groups"], optimizer)
        _require_shapes(there["state"], optimizer)


def _require_kind(groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError if the saved options are of another kind of optimizer.

    Newer torch versions and schedulers only add options; another kind of optimizer both has extra and lacks some.
    """
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        missing, strange = sorted(set(group) - set(saved)), sorted(set(saved) - set(group))
        if missing and strange:
            raise CheckpointError(
                f"the checkpoint is of another kind of optimizer than the {type(optimizer).__name__} here: it has "
                f"{', '.join(strange)} and lacks {', '.join(missing)}. Make the same kind"
            )


def _require_shapes(slots: Mapping[int, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    held = held_parameters(optimizer)
    for place, slot in slots.items():
        for key in _LIKE_PARAMETERS.intersection(slot):
            if isinstance(slot[key], torch.Tensor) and slot[key].shape != held[place].shape:
                raise CheckpointError(
                    f"the checkpoint's optimizer holds its parameters in another order: {key!r} of number {place} has shape "
                    f"{tuple(slot[key].shape)}, the parameter {tuple(held[place].shape)}. Make it from them in the same order"
                )


def statement(there: Precision, here: Precision, scale: str) -> str:
    """Return a sentence on the conversions between two precisions at loading. ``scale``: a clause on the loss scale."""
    if there == here:
        return f"loaded a {here.name} checkpoint as it was saved; {scale}"
    kept_there, kept_here = ("FP32" if each.masters else _NAMES[each.stored] for each in (there, here))
    if kept_there == kept_here:
        weights = f"the {kept_here} weights and optimizer state were taken over exactly"
    elif kept_here == "FP32":
        weights = (
            f"the {kept_there} weights and optimizer state were widened to FP32 (digits lost in {kept_there} stay lost)"
        )
    else:
        weights = f"the {kept_there} weights and optimizer state were rounded to {kept_here}"
    if here.masters:
        weights += f", and the model got {_NAMES[here.stored]} copies of them"
    return f"loaded a {there.name} checkpoint into {here.name}: {weights}; {scale}"


#: State entries of torch's own optimizers that have the shape of their parameter.
_LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "acc_delta"}
)
_NAMES = {torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"}


def _looks_like(state: Mapping[Any, Any]) -> str:
    if not state:
        return "it is empty"
    if "_growth_tracker" in state or "loss_scaler0" in state:
        return "it looks like a loss scaler's. Load it with .scaler.load_state_dict()"
    if "param_groups" in state:
        return "it looks like an optimizer's. Load it into the optimizer before MixedPrecision is made"
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        return "it looks like a model's weights. Load them into the model before MixedPrecision is made"
    return f"it holds {', '.join(sorted(map(str, state))[:5])}"


def _copied(value: Any) -> Any:
    """Return a detached copy of a tensor; return anything else (a module's extra state) unchanged."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
