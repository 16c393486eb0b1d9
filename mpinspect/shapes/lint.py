"""``lint_shapes``: record a model's matrix products and judge their shapes for Tensor Cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpinspect.reporting.words import indefinite
from mpinspect.runtime.gpus import ASSUMED, Gpu, named, of_device
from mpinspect.shapes.analysis import ShapeReport, analyse_shapes
from mpinspect.shapes.record.recording import record_matmuls

#: The accepted values of ``device``, and the recorder's name for each.
_DEVICES = {"meta": "meta", "real": "real", "cpu": "real", "cuda": "real"}


def lint_shapes(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    gpu: str | Gpu = "auto",
    backward: bool = True,
    device: str = "meta",
) -> ShapeReport:
    """Judge whether the shapes of a model's matrix products suit Tensor Cores; by default without computing anything.

    Runs the model once, forward and backward, and records every matrix product at the operator level, below autograd: products
    in modules, functional calls, attention and einsum, and the backward's.

    Args:
        model: the model as it would be trained, on the meta device or with real weights; it is not changed.
        args, kwargs: arguments of the model's forward. On the meta device their shapes and dtypes matter; a tensor's values
            matter only if the model reads them.
        dtype: dtype of the autocast around the model: torch.float16, torch.bfloat16 or such a name; None: no autocast.
        gpu: "auto" (this machine's CUDA device, else Ampere, with a note in the report), an architecture ("volta", "turing",
            "ampere", "ada", "hopper", "blackwell"), a card ("H100 PCIe"), or a Gpu.
        backward: whether to record a backward too.
        device: "meta" (without computing), or "real": on the tensors and devices as they are, for models whose shapes depend
            on computed values.

    If the model stops before its end, the report covers the part that ran, ``complete`` is False, and the finding
    ``recording-incomplete``, an error, names the place and the reason.

    Raises:
        ValueError: ``model`` is not a torch.nn.Module, ``args`` is not a tuple, the GPU or dtype is not known, or the model's
            forward refuses the arguments.
    """
    _check_model(model)
    if isinstance(args, (str, torch.Tensor)) or not isinstance(args, Sequence):
        raise ValueError(
            f"args is {indefinite(type(args).__name__)}, not a tuple: give args=(x,) for a model called with one tensor"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"kwargs is {indefinite(type(kwargs).__name__)}, not a dict of keyword arguments")
    if device not in _DEVICES:
        raise ValueError(f"device is {device!r}: give 'meta', or 'real' for the tensors as they are, wherever they are")
    chosen, notes = choose_gpu(gpu)
    recording = record_matmuls(
        model, tuple(args), dict(kwargs or {}), dtype=dtype, backward=backward, device=_DEVICES[device]
    )
    return analyse_shapes(recording, chosen, model=type(model).__name__, notes=notes)


def choose_gpu(gpu: str | Gpu) -> tuple[Gpu, tuple[str, ...]]:
    """Return the GPU to judge for, and notes about the choice for the report.

    Raises:
        ValueError: the name is not known.
    """
    if isinstance(gpu, Gpu):
        return gpu, ()
    if not isinstance(gpu, str):
        raise ValueError(
            f"gpu is {indefinite(type(gpu).__name__)}: give 'auto', an architecture as 'hopper', or a card as 'A100'"
        )
    if gpu.strip().lower() != "auto":
        return named(gpu), ()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        vendor = "AMD" if torch.version.hip else "NVIDIA"
        return of_device(properties.name, properties.major, properties.minor, vendor), ()
    assumed = named("ampere")
    note = f"{ASSUMED}: judged for Ampere ({assumed.name}); name another with gpu='hopper' or --gpu hopper"
    return assumed, (note,)


def _check_model(model: object) -> None:
    if isinstance(model, torch.nn.Module):
        return
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise ValueError(f"model is the class {model.__name__}, not a model of it: give {model.__name__}(...)")
    what = "a function" if callable(model) else indefinite(type(model).__name__)
    raise ValueError(
        f"model is {what}, not a torch.nn.Module: put it into a Module's forward, where its parameters are known"
    )
