"""The training precisions as data, and the conversion of a model to one of them."""

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
#: Class names of wrappers that store the parameters elsewhere, or have registered state for the parameters' current dtypes.
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


@dataclass(frozen=True)
class Precision:
    """A training precision.

    Args:
        name: the name that users pass.
        compute: dtype of matrix products and convolutions, forward and backward.
        stored: dtype of the model's weights and of their gradients.
        masters: whether the optimizer updates FP32 copies of the weights, which are rounded into the model after each step.
        autocast: whether forward and loss run under ``torch.autocast(..., compute)``, which runs reductions in FP32.
        scaled: whether the loss is scaled by default. BF16 has FP32's exponent range and needs no loss scale.
        recipe: name of the recipe (``numeric.recipes``) by which torchao computes the products of Linear layers; "" for none.
    """

    name: str
    compute: torch.dtype
    stored: torch.dtype
    masters: bool
    autocast: bool
    scaled: bool
    recipe: str = ""


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
        *(
            Precision(recipe, torch.bfloat16, torch.float32, False, True, False, recipe)
            for recipe in ("fp8-tensorwise", "fp8-rowwise", "mxfp8")
        ),
    )
}


def get_precision(name: str) -> Precision:
    """Return the entry of `PRECISIONS` called ``name``.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def convert_model(
    model: nn.Module, precision: Precision, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> nn.Module:
    """Convert a model in place to a precision's stored dtype; leave it unchanged if the precision stores FP32.

    FP32, FP16 and BF16 parameters and buffers become ``precision.stored``, with three exceptions:

    * BatchNorm and InstanceNorm stay in FP32, or return to FP32, since their running statistics can overflow FP16. They
      still accept half inputs and return half outputs.
    * `torch.nn.LayerNorm`, ``GroupNorm`` and ``RMSNorm`` get half weights and compute their statistics in FP32
      (`mpinspect.training.recompute`).
    * Buffers with finite values that would overflow the stored dtype stay FP32.

    FP64, complex and integer tensors stay unchanged. Every parameter stays the same object, so tied weights stay tied;
    existing gradients are converted too. The optimizers' state of a parameter (momentum) takes the parameter's new dtype.
    Waits for the GPU, to check the range of the values.

    Returns:
        The model.

    Raises:
        ValueError: the model can't be converted (see `check_convertible`); it is then unchanged.
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
            module.flatten_parameters()  # cuDNN needs the weights in one contiguous block again
    return model


def check_convertible(model: nn.Module, precision: Precision) -> None:
    """Raise ValueError if `convert_model` can't convert this model; does not change it. Waits for the GPU.

    A model can't be converted if it has half parameters and the precision stores FP32, if it is wrapped for data parallelism
    and the precision stores half, or if it has uninitialised lazy parameters or values beyond the stored dtype's range.
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
    """Return the dtype that ``precision`` stores for each FP32, FP16 or BF16 parameter, in the model's order.

    A parameter shared with a layer that stays FP32 stays FP32.
    """
    found = {parameter: precision.stored for parameter in model.parameters() if is_convertible(parameter)}
    return found | {parameter: torch.float32 for parameter in _kept_parameters(model) if parameter in found}


def is_convertible(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's dtype is FP32, FP16 or BF16, the dtypes that a conversion may change."""
    return tensor.dtype == torch.float32 or tensor.dtype in _HALVES


def keeps_float32(module: nn.Module) -> bool:
    """Return whether a layer's own parameters and buffers stay in FP32, like any BatchNorm's or InstanceNorm's."""
    return isinstance(module, _NormBase)


def fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether all finite values stay finite when converted to ``dtype``. Waits for the GPU."""
    if tensor.dtype == dtype or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    return bool((tensor.isfinite() == tensor.to(dtype).isfinite()).all())


def cast_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, old: torch.dtype, new: torch.dtype) -> None:
    """Cast a parameter's optimizer state (momentum) from the old to the new dtype; step counts and scalars stay."""
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
        if wrapper == "FSDPModule":
            scale = ""
            if precision.stored == torch.float16:
                scale = ", loss_scale='dynamic'"
            raise ValueError(
                f"the model was sharded by fully_shard, and precision={precision.name!r} would change the dtype of its "
                "parameters: let FSDP2 keep FP32 weights and compute in 16 bits, by fully_shard(..., mp_policy="
                f"MixedPrecisionPolicy(param_dtype={precision.stored})), and use precision='fp32'{scale} here"
            )
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
    if isinstance(value, torch.Tensor) and value.dtype == old:
        return value.to(new)
    if isinstance(value, list):  # LBFGS stores its history in lists
        return [_cast(item, old, new) for item in value]
    return value


def _convert_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    # Like Module.half(): the same Parameter object with new data, and a new gradient accumulator.
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
