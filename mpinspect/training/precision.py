"""The ways to train in lower precision, as data, and the conversion of a model to one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mpinspect.training.recompute import use_half_norms

_HALVES = (torch.float16, torch.bfloat16)
#: What stores its parameters elsewhere, or registered what it needs for the dtypes it met, under the names of their classes.
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


@dataclass(frozen=True)
class Precision:
    """One way to train.

    Args:
        name: as users write it.
        compute: dtype of matrix products and convolutions, forward and backward.
        stored: dtype of the model's weights and of their gradients.
        masters: the optimizer steps FP32 copies of the weights; the model gets them rounded after each step.
        autocast: forward and loss run under ``torch.autocast(..., compute)``, which keeps reductions in FP32.
        scaled: the loss is scaled unless the user says otherwise. BF16 has FP32's exponents and needs none.
    """

    name: str
    compute: torch.dtype
    stored: torch.dtype
    masters: bool
    autocast: bool
    scaled: bool


PRECISIONS = {
    precision.name: precision
    for precision in (
        #                 compute         stored          masters autocast scaled
        Precision("fp32", torch.float32, torch.float32, False, False, False),
        Precision("fp16-amp", torch.float16, torch.float32, False, True, True),
        Precision("bf16-amp", torch.bfloat16, torch.float32, False, True, False),
        Precision("fp16-master", torch.float16, torch.float16, True, True, True),
        Precision("bf16-master", torch.bfloat16, torch.bfloat16, True, True, False),
        Precision("fp16-pure", torch.float16, torch.float16, False, True, True),
    )
}


def get_precision(name: str) -> Precision:
    """Return the entry of `PRECISIONS` called ``name``.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def convert_model(
    model: nn.Module, precision: Precision, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> nn.Module:
    """Convert a model in place to a precision's stored dtype; a mode that stores FP32 changes nothing.

    FP32, FP16 and BF16 parameters and buffers become ``precision.stored``. Three kinds of layer are treated apart:

    * BatchNorm and InstanceNorm stay in FP32, or return to it: their running statistics overflow FP16. They take half
      inputs, and give half outputs, as they are.
    * `torch.nn.LayerNorm`, ``GroupNorm`` and ``RMSNorm`` get half weights and compute their statistics in FP32
      (`mpinspect.training.recompute`).
    * Buffers with finite values that the stored dtype can't hold stay FP32.

    FP64, complex and integer tensors stay as they are. Every parameter stays the same object, so weights tied by sharing
    one parameter stay tied; gradients that are there are converted too. What the optimizers know of a parameter (momentum)
    takes the parameter's dtype. Waits for the GPU: it reads how large values are.

    Returns:
        The model.

    Raises:
        ValueError: before any change; see `check_convertible`.
    """
    check_convertible(model, precision)
    if precision.stored == torch.float32:
        return model
    optimizers = list(optimizers)
    for parameter, dtype in stored_dtypes(model, precision).items():
        if parameter.dtype != dtype:
            for optimizer in optimizers:
                cast_state(optimizer, parameter, parameter.dtype, dtype)
            _convert_parameter(parameter, dtype)
    _convert_buffers(model, precision)
    use_half_norms(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the weights in one piece of memory again
    return model


def check_convertible(model: nn.Module, precision: Precision) -> None:
    """Raise ValueError if `convert_model` can't convert this model; changes nothing. Waits for the GPU.

    Refused are: half parameters where the precision stores FP32; a model wrapped for data parallelism where it stores
    half; lazy parameters not yet made; parameters beyond the stored dtype's range.
    """
    _check_made(model)
    if precision.stored == torch.float32:
        _check_full(model, precision)
        return
    _check_unwrapped(model, precision)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, dtype in stored_dtypes(model, precision).items():
        if not fits(parameter, dtype):
            raise ValueError(
                f"parameter {names[parameter]!r} holds values beyond {_largest(dtype):g}, the largest of {dtype}: they would "
                f"become infinite; scale that layer down, or use precision='bf16-master' or an AMP mode"
            )


def stored_dtypes(model: nn.Module, precision: Precision) -> dict[torch.Tensor, torch.dtype]:
    """Return the dtype in which ``precision`` stores each FP32, FP16 or BF16 parameter of a model, in the order of the model.

    A parameter shared with a layer that stays FP32 stays FP32.
    """
    kept = set() if precision.stored == torch.float32 else {id(parameter) for parameter in _kept_parameters(model)}
    return {
        parameter: torch.float32 if id(parameter) in kept else precision.stored
        for parameter in model.parameters()
        if is_convertible(parameter)
    }


def is_convertible(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has one of the dtypes that training in lower precision trades for another."""
    return tensor.dtype == torch.float32 or tensor.dtype in _HALVES


def keeps_float32(module: nn.Module) -> bool:
    """Return whether a layer's own parameters and buffers stay in FP32: BatchNorm and InstanceNorm of every kind."""
    return isinstance(module, _NormBase)


def fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether no finite value becomes infinite in ``dtype``. Waits for the GPU."""
    if tensor.dtype == dtype or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    return bool((tensor.isfinite() == tensor.to(dtype).isfinite()).all())


def cast_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, old: torch.dtype, new: torch.dtype) -> None:
    """What an optimizer keeps in a parameter's old dtype (momentum) takes the new one; step counts and their like stay."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        scalar = isinstance(value, torch.Tensor) and value.dim() == 0 != parameter.dim()
        if key != "step" and not scalar:
            state[key] = _cast(value, old, new)


def _kept_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if keeps_float32(module):
            yield from module.parameters(recurse=False)


def _check_full(model: nn.Module, precision: Precision) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype in _HALVES:
            raise ValueError(
                f"precision={precision.name!r} keeps the weights in FP32, but parameter {name!r} is {parameter.dtype}: was "
                f".half() or .bfloat16() called? Give the FP32 model, or use precision='fp16-master' or 'bf16-master'"
            )


def _check_unwrapped(model: nn.Module, precision: Precision) -> None:
    for module in model.modules():
        wrapper = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper:
            raise ValueError(
                f"the model is wrapped in {wrapper} already, and precision={precision.name!r} changes the dtype of its "
                f"parameters: convert first, wrap after"
            )


def _check_made(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(f"{name!r} of a lazy module has no shape yet: run one forward before")


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(new) if value.dtype == old else value
    if isinstance(value, list):  # LBFGS keeps its history in lists
        return [_cast(item, old, new) for item in value]
    return value


def _convert_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    # As Module.half() does it: the same object with other data, and a new gradient accumulator.
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _convert_buffers(model: nn.Module, precision: Precision) -> None:
    converted: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        dtype = torch.float32 if keeps_float32(module) else precision.stored
        for name, buffer in module.named_buffers(recurse=False):
            if not is_convertible(buffer) or not fits(buffer, dtype):
                continue
            # A buffer that two modules share stays shared.
            module._buffers[name] = converted.setdefault(buffer, buffer.to(dtype))


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max
