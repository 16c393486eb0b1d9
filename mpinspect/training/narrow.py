"""Converts a model's Linear layers to FP8 products by torchao, which is imported here, when a precision asks for it."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from mpinspect.numeric.recipes import RECIPES
from mpinspect.reporting.words import and_more, some
from mpinspect.runtime.user_line import warn_user
from mpinspect.training.precision import Precision

#: The oldest torchao with all that is used here.
_OLDEST = (0, 18)
#: The names under which ``Float8LinearConfig`` knows its recipes.
_FLOAT8 = {"fp8-tensorwise": "tensorwise", "fp8-rowwise": "rowwise"}
_MODULES = {
    **dict.fromkeys(_FLOAT8, ("torchao.float8",)),
    "mxfp8": ("torchao.prototype.moe_training.mxfp8_linear", "torchao.quantization.quantize_.common"),
}
_CONVERTED = ("Float8Linear", "MXFP8Linear", "Float8TrainingWeightWrapperTensor", "MXFP8TrainingWeightWrapperTensor")


def layers_to_convert(model: nn.Module, precision: Precision, keep_wide: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the ``nn.Linear`` layers that a precision converts; () if it converts none. Imports torchao.

    Args:
        model: the model, without wrappers.
        precision: the training precision.
        keep_wide: shell patterns of paths to leave out.

    Raises:
        ImportError: torchao is missing, older than 0.18, or can't be imported.
        ValueError: patterns for a precision that converts nothing, or that match no layer; a model that is converted already,
            has no ``nn.Linear`` (exactly this class) or is one, or was sharded; sizes that torchao's kernels refuse.
    """
    patterns = [keep_wide] if isinstance(keep_wide, str) else list(keep_wide)
    if not precision.recipe:
        if patterns:
            raise ValueError(f"keep_wide={patterns!r}: precision={precision.name!r} converts no layers to FP8")
        return ()
    _check_plain(model, precision)
    # A shared layer has several paths.
    modules = model.named_modules(remove_duplicate=False)
    linear = {path: module for path, module in modules if isinstance(module, nn.Linear)}
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in linear):
            raise ValueError(f"keep_wide={pattern!r} matches none of the model's Linear layers: {some([*linear])}")
    kept = {id(each) for path, each in linear.items() if any(fnmatchcase(path, pattern) for pattern in patterns)}
    # A subclass may compute something else; in nn.MultiheadAttention, the enclosing module reads its weight.
    chosen = {path: each for path, each in linear.items() if type(each) is nn.Linear and id(each) not in kept}
    if not chosen:
        raise ValueError(
            f"precision={precision.name!r} converts layers of the class torch.nn.Linear, and the model has none to convert"
        )
    _check_sizes(chosen, precision)
    _import_torchao(precision)
    return tuple(chosen)


def convert_layers(model: nn.Module, precision: Precision, paths: Iterable[str]) -> bool:
    """Convert layers in place, and return whether their products are emulated in FP32. Parameters stay the same objects.

    A layer casts its input as autocast does. Its forward raises ValueError unless the number of rows suits the kernels.
    """
    layers = {path: model.get_submodule(path) for path in paths}
    if not layers:
        return False
    emulated = _is_emulated(next(model.parameters()).device, precision.recipe)
    if precision.recipe in _FLOAT8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(_FLOAT8[precision.recipe]), emulate=emulated)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path in layers)
    else:
        _to_mxfp8(layers.values(), emulated)
    converted: dict[nn.Module, nn.Module] = {}
    for path, layer in layers.items():
        if layer in converted:
            # torchao may convert one of the paths of a shared layer, or make a layer for each.
            model.set_submodule(path, converted[layer])
            continue
        converted[layer] = model.get_submodule(path)
        converted[layer].register_forward_pre_hook(partial(_prepared, path, precision))
    return emulated


def _is_emulated(device: torch.device, recipe: str) -> bool:
    needed = RECIPES[recipe].compute_capability
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < tuple(map(int, needed.split(".")))


def _to_mxfp8(layers: Iterable[nn.Module], emulated: bool) -> None:
    """Make these layers MXFP8Linear. (torchao 0.18's converter, ``quantize_``, leaves out their biases.)"""
    from torchao.prototype.moe_training.mxfp8_linear import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    for layer in layers:
        layer.__class__ = _mxfp8_class()
        layer.kernel_preference = KernelPreference.EMULATED if emulated else KernelPreference.AUTO
        layer.scale_calculation_mode = ScaleCalculationMode.RCEIL
        layer.wgrad_with_hp = False  # type: ignore[assignment]


@cache
def _mxfp8_class() -> type[nn.Module]:
    from torchao.prototype.moe_training import mxfp8_linear

    class MXFP8Linear(mxfp8_linear.MXFP8Linear):  # type: ignore[misc]
        """torchao's MXFP8Linear, but its FP32 weight is cast to its input's dtype, as autocast does in nn.Linear."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = mxfp8_linear._to_mxfp8_then_scaled_mm(
                input,
                self.weight.to(input.dtype),
                kernel_preference=self.kernel_preference,
                scale_calculation_mode=self.scale_calculation_mode,
                wgrad_with_hp=self.wgrad_with_hp,
            )
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return MXFP8Linear


def _prepared(path: str, precision: Precision, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a layer's arguments with its input in autocast's dtype (torchao's Float8Linear knows CUDA's autocast alone)."""
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    given = args[0]
    rows, multiple = given.numel() // max(given.shape[-1], 1), RECIPES[precision.recipe].multiple
    if rows % multiple and torch.is_grad_enabled() and layer.weight.requires_grad:
        raise ValueError(
            f"the layer {path!r} was called with {rows:,} rows (all dimensions but the last), and {precision.name} sums its "
            f"weight gradient over multiples of {multiple} rows: pad or drop the batch (DataLoader(drop_last=True)), or "
            f"leave the layer out by keep_wide={path!r}"
        )
    device = given.device.type
    if not torch.is_autocast_enabled(device):
        return None
    return given.to(torch.get_autocast_dtype(device)), *args[1:]


def _check_plain(model: nn.Module, precision: Precision) -> None:
    """Raise ValueError if a model was converted or sharded, or is itself a Linear."""
    if type(model) is nn.Linear:
        raise ValueError("the model is itself a Linear, which torchao can't convert in place: wrap it in nn.Sequential")
    for path, module in model.named_modules():
        parameters = (type(getattr(each, "data", each)) for each in module._parameters.values())
        kinds = {kind.__name__ for each in (type(module), *parameters) for kind in each.__mro__}
        if kinds.intersection(_CONVERTED):
            raise ValueError(
                f"the layer {path!r} is converted by torchao already: give the FP32 model as it was before, or train the "
                "converted one with precision='bf16-amp'"
            )
        if "FSDPModule" in kinds:
            raise ValueError(
                f"the model was sharded by fully_shard, and precision={precision.name!r} replaces its layers: convert it by "
                "torchao before fully_shard, and use precision='bf16-amp' here"
            )


def _check_sizes(layers: dict[str, nn.Linear], precision: Precision) -> None:
    multiple = RECIPES[precision.recipe].multiple
    refused = [path for path, each in layers.items() if each.in_features % multiple or each.out_features % multiple]
    if refused:
        first = layers[refused[0]]
        raise ValueError(
            f"precision={precision.name!r} takes layers whose features are multiples of {multiple}, unlike "
            f"{some(refused)} ({first.in_features} -> {first.out_features} in the first): pad them, or leave them "
            f"in BF16 by keep_wide={tuple(refused)!r}"
        )


def _import_torchao(precision: Precision) -> None:
    """Import the modules of torchao that convert to this precision; their warnings are shown as one."""
    try:
        found = version("torchao")
    except PackageNotFoundError:
        raise ImportError(f"precision={precision.name!r} needs torchao: pip install mpinspect[fp8]") from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        raise ImportError(
            f"precision={precision.name!r} needs torchao {'.'.join(map(str, _OLDEST))} or newer, and {found} is installed: "
            "pip install --upgrade mpinspect[fp8]"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for module in _MODULES[precision.recipe]:
                importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"torchao {found} can't be imported with torch {torch.__version__}: {error}") from error
    if caught:
        more = and_more(len(caught) - 1, " (and {} more)")
        warn_user(f"torchao {found} warned when it was imported{more}: {caught[0].message}", UserWarning)
