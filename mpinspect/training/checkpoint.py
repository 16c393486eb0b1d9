"""Files that are there in full or not at all, and the check of what was loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpinspect.training.precision import PRECISIONS, Precision

KIND = "mpinspect.MixedPrecision"
VERSION = 1


class CheckpointError(ValueError):
    """What was given is no checkpoint of this model's; nothing was changed."""


def save(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint: to a file beside it first, which then takes the name, so that a kill leaves the old or the new one.

    Raises:
        OSError: it can't be written; a file that was there is untouched.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's file is its owner's alone; a checkpoint gets what any other new file would.
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Runs no code from the file (``weights_only``).

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: the file is no checkpoint, or cut off.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {source}")
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{source} can't be read as a checkpoint ({type(error).__name__}): it is cut off, or another program's. "
            "Take an earlier checkpoint, or load it with torch.load and see what it is"
        ) from error
    return require(state)


def require(state: Any) -> dict[str, Any]:
    """``state``, if it is a MixedPrecision's; CheckpointError saying what it looks like otherwise."""
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
    state: Mapping[str, Any], model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise CheckpointError unless the weights and optimizers in ``state`` are those of this model and these optimizers."""
    missing = sorted({"precision", "weights", "optimizers", "scaler", "counters"}.difference(state))
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
        if there[name].shape != tensor.shape:
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} has shape {tuple(there[name].shape)} there and "
                f"{tuple(tensor.shape)} here"
            )
    _require_optimizers(state["optimizers"], optimizers)


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
        keys = {key for slots in there["state"].values() for key in slots}
        known = {key for slots in optimizer.state.values() for key in slots}
        if keys and known and keys.isdisjoint(known):
            raise CheckpointError(
                f"the checkpoint's optimizer keeps {', '.join(sorted(keys))}, the {type(optimizer).__name__} here "
                f"{', '.join(sorted(known))}: make the same kind of optimizer"
            )


def statement(there: Precision, here: Precision, scale: str) -> str:
    """What loading a checkpoint of one precision into another did, in words. ``scale``: a clause on the loss scale."""
    if there == here:
        return f"loaded a {here.name} checkpoint as it was saved; {scale}"
    kept_there = "FP32" if there.masters or there.stored == torch.float32 else _NAMES[there.stored]
    kept_here = "FP32" if here.masters or here.stored == torch.float32 else _NAMES[here.stored]
    if kept_there == kept_here:
        weights = f"the {kept_here} weights and optimizer state were taken over exactly"
    elif kept_here == "FP32":
        weights = (
            f"the {kept_there} weights and optimizer state were widened to FP32 (what {kept_there} lost stays lost)"
        )
    else:
        weights = f"the {kept_there} weights and optimizer state were rounded to {kept_here}"
    if here.masters:
        weights += f", and the model got {_NAMES[here.stored]} copies of them"
    return f"loaded a {there.name} checkpoint into {here.name}: {weights}; {scale}"


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
