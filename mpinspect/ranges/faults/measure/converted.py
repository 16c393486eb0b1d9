"""Reads how the products of a model's layers are computed: which operands are quantised, into which format, by which library.

Classes are recognised by name, so nothing is imported: torchao's Float8Linear and weights in its training wrappers (their module
stays an nn.Linear), and TransformerEngine's modules. No tensor's values are read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpinspect.numeric.formats import FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E5M2
from mpinspect.numeric.recipes import (
    AMAX,
    CEIL,
    E4M3_SCALE,
    EVEN,
    FLOAT32_SCALE,
    FLOOR,
    HISTORY,
    NEAREST,
    POWER_OF_TWO,
    RCEIL,
    STOCHASTIC,
    WHOLE,
    Product,
    Products,
    Quantization,
    uniform,
)
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.session import CONFIGURED, CONVERTER_CALLED, LayersRecord
from mpinspect.runtime.garbage_collection import living
from mpinspect.runtime.wrappers import class_of, registered, unwrapped

#: The modules of TransformerEngine that compute products.
_OF_TRANSFORMER_ENGINE = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
#: Classes of layers other than nn.Linear whose weight is stored transposed.
_TRANSPOSED = ("Conv1D",)
_TORCHAO_CONFIGS = ("Float8LinearConfig", "Float8TrainingOpConfig", "MXFP8TrainingOpConfig")
#: The classes of converted modules and weights.
_CONVERTED = (
    *("Float8Linear", "MXFP8Linear"),
    *("Float8TrainingWeightWrapperTensor", "MXFP8TrainingWeightWrapperTensor"),
)
#: Where torchao 0.17 and later note that their converter has run.
_CONVERTER, _HAS_RUN = "torchao.float8._inductor_patch", "_PATCHED"
#: Set once an inspected model of this process has had layers that torchao converted.
met_converted = threading.Event()
_E4M3, _E5M2, _E2M1 = FLOAT8_E4M3.name, FLOAT8_E5M2.name, FLOAT4_E2M1.name
#: The scale and its rule, by whether the configuration asks for powers of two.
_SCALES = {False: (FLOAT32_SCALE, AMAX), True: (POWER_OF_TWO, RCEIL)}
#: The rule of TransformerEngine's recipes with one scale per tensor.
_TENSORWISE = {"DelayedScaling": HISTORY, "Float8CurrentScaling": AMAX}
_MX_RULES = {"floor": FLOOR, "rceil": RCEIL, "ceil": CEIL, "even": EVEN}


def converted_layers(layers: Iterable[Layer], heads: Collection[str] = ()) -> tuple[LayersRecord, ...]:
    """Return the layers with matrix products, grouped by all that their record holds; in the order of their first modules.

    Args:
        layers: the model's modules.
        heads: the paths of those whose output the model returns.
    """
    layers = list(layers)
    embedded = {id(weight) for layer in layers if (weight := _embedding(layer.module)) is not None}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer in layers:
        module = unwrapped(layer.module)
        weights = _weights(module)
        found = _products(module, weights)
        if found is not None:
            products, library, emulated = found
            is_head = layer.path in heads or any(id(weight) in embedded for weight in weights)
            shape = _shape(module, weights)
            key = (class_of(module).__name__, shape, products, library, emulated, is_head, _lacks_bias(module))
            groups.setdefault(key, []).append(layer.path)
    return tuple(LayersRecord(tuple(modules), *key) for key, modules in groups.items())


def asked_for(layers: Sequence[LayersRecord]) -> tuple[str, ...]:
    """Return the traces of a conversion by torchao if neither a layer of the run nor one of another model is converted.

    The converter's note that it has run counts until an inspected model has converted layers: it may be that model's, of an
    earlier training in a notebook. Searches the garbage collector's objects, which takes milliseconds, if torchao's modules are
    imported.
    """
    if any(record.products.bits and record.library == "torchao" for record in layers):
        met_converted.set()
    kinds = list(_of_torchao())
    if not any(kind.__name__ in _TORCHAO_CONFIGS for kind in kinds) or any(record.products.bits for record in layers):
        return ()
    alive = {type(each).__name__ for each in living(kinds)}
    if not alive.isdisjoint(_CONVERTED):
        return ()
    has_run = getattr(sys.modules.get(_CONVERTER), _HAS_RUN, False) and not met_converted.is_set()
    return tuple(trace for trace, is_there in ((CONVERTER_CALLED, has_run), (CONFIGURED, alive)) if is_there)


def _of_torchao() -> Iterator[type]:
    """Yield the classes of configurations, converted modules and weights in torchao's imported modules."""
    for path, module in list(sys.modules.items()):
        if path.startswith("torchao."):
            attributes = getattr(module, "__dict__", {})
            found = (attributes.get(name) for name in (*_TORCHAO_CONFIGS, *_CONVERTED))
            yield from (kind for kind in found if isinstance(kind, type))


# -- the parts of a module ---------------------------------------------------------------------------------------------------


def _embedding(module: torch.nn.Module) -> torch.Tensor | None:
    if not isinstance(module, torch.nn.Embedding):
        return None
    weight: torch.Tensor | None = registered(unwrapped(module), "_parameters").get("weight")
    return weight


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters with two dimensions or more."""
    parameters = registered(module, "_parameters").values()
    return [each for each in parameters if each is not None and not is_lazy(each) and each.dim() > 1]


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside a DTensor."""
    local: torch.Tensor = object.__getattribute__(weight, "__dict__").get("_local_tensor", weight)
    return local


def _shape(module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return input and output features."""
    attributes = vars(module)
    told = tuple(attributes.get(name) for name in ("in_features", "out_features"))
    if all(isinstance(size, int) for size in told):
        return tuple(size for size in told if isinstance(size, int))
    if not weights:
        return ()
    rows, columns = weights[0].shape[-2:]
    if class_of(module).__name__ in _TRANSPOSED:
        return rows, columns
    return columns, rows


def _lacks_bias(module: torch.nn.Module) -> bool:
    """Return whether the weight has a gradient and the bias, which asks for one, has none."""
    parameters = registered(module, "_parameters")
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or bias is None or not (weight.requires_grad and bias.requires_grad):
        return False
    return weight.grad is not None and bias.grad is None


# -- their products ----------------------------------------------------------------------------------------------------------


def _products(module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> tuple[Products, str, bool] | None:
    """Return a module's products, their library, and whether they are emulated; None if it is not a layer with products."""
    for kind in type(module).__mro__:
        if kind.__name__ == "Float8Linear":
            config = vars(module).get("config")
            return _of_float8(config), "torchao", bool(getattr(config, "emulate", False))
        if kind.__name__ == "MXFP8Linear" and kind.__module__.startswith("torchao."):
            return _of_mxfp8(module)
        if kind.__name__ in _OF_TRANSFORMER_ENGINE and kind.__module__.startswith("transformer_engine."):
            return _of_transformer_engine(module), "transformer_engine", False
    for weight in weights:
        found = _of_wrapper(_local(weight))
        if found is not None:
            return found
    if isinstance(module, torch.nn.Linear) or class_of(module).__name__ in _TRANSPOSED:
        return Products(), "", False
    return None


def _of_float8(config: Any) -> Products:
    """Return the products of a Float8LinearConfig."""
    scale, rule = _SCALES[bool(getattr(config, "round_scales_to_power_of_2", False))]

    def operand(name: str, default: str) -> Quantization | None:
        cast = getattr(config, f"cast_config_{name}", None)
        if cast is None or _value(cast, "scaling_type") == "disabled":
            return None
        # A row's scale is one number for each row of the operand, along the dimension that is summed over.
        block = {"axiswise": (1, WHOLE)}.get(_value(cast, "scaling_granularity"), (WHOLE, WHOLE))
        return Quantization(_element(getattr(cast, "target_dtype", None)) or default, block, scale, rule)

    return Products(
        Product(operand("input", _E4M3), operand("weight", _E4M3)),
        Product(operand("grad_output", _E5M2), operand("weight_for_grad_input", _E4M3)),
        Product(operand("grad_output_for_grad_weight", _E5M2), operand("input_for_grad_weight", _E4M3)),
    )


def _of_wrapper(weight: torch.Tensor) -> tuple[Products, str, bool] | None:
    """Return the products that a weight's torchao training wrapper asks for; None without a wrapper."""
    for kind in type(weight).__mro__:
        if kind.__name__ == "Float8TrainingWeightWrapperTensor":
            config = getattr(weight, "config", None)
            return _of_float8(getattr(config, "_float8_linear_config", None)), "torchao", False
        if kind.__name__ == "MXFP8TrainingWeightWrapperTensor":
            return _of_mxfp8(getattr(weight, "config", None))
    return None


def _of_mxfp8(holder: Any) -> tuple[Products, str, bool]:
    """Return the products that a configuration of MXFP8, or a layer with its settings, asks for."""
    rule = _MX_RULES.get(_value(holder, "scale_calculation_mode"), RCEIL)
    element = Quantization(_E4M3, (1, 32), POWER_OF_TWO, rule)
    products = uniform(element, element, element)
    if getattr(holder, "wgrad_with_hp", False):
        products = Products(products.fprop, products.dgrad)
    return products, "torchao", _value(holder, "kernel_preference") == "emulated"


def _of_transformer_engine(module: torch.nn.Module) -> Products:
    """Return the products of the recipe with which a module of TransformerEngine was last called."""
    attributes = vars(module)
    meta = attributes.get("fp8_meta")
    if not attributes.get("fp8") or not isinstance(meta, dict) or meta.get("recipe") is None:
        return Products()
    found = _of_recipe(meta["recipe"])
    if getattr(meta["recipe"], "backward_override", None):
        # "dequantized" rounds the operands of dgrad and wgrad, and multiplies them in a wide format.
        return Products(found.fprop)
    return found


def _of_recipe(recipe: Any) -> Products:
    name = type(recipe).__name__
    backward = {"HYBRID": _E5M2}.get(getattr(getattr(recipe, "fp8_format", None), "name", ""), _E4M3)
    if name in _TENSORWISE:
        rule = _TENSORWISE[name]
        forward = Quantization(_E4M3, (WHOLE, WHOLE), FLOAT32_SCALE, rule)
        return uniform(forward, forward, Quantization(backward, forward.block, forward.scale, rule))
    if name == "MXFP8BlockScaling":
        forward = Quantization(_E4M3, (1, 32), POWER_OF_TWO, RCEIL)
        return uniform(forward, forward, Quantization(backward, (1, 32), POWER_OF_TWO, RCEIL))
    if name == "Float8BlockScaling":
        return _of_blocks(recipe, backward)
    if name == "NVFP4BlockScaling":
        block = (1, 16) if getattr(recipe, "disable_2d_quantization", False) else (16, 16)
        rounding = NEAREST if getattr(recipe, "disable_stochastic_rounding", False) else STOCHASTIC
        return uniform(
            Quantization(_E2M1, (1, 16), E4M3_SCALE, AMAX),
            Quantization(_E2M1, block, E4M3_SCALE, AMAX),
            Quantization(_E2M1, (1, 16), E4M3_SCALE, AMAX, rounding),
        )
    return Products()


def _of_blocks(recipe: Any, backward: str) -> Products:
    scale, rule = _SCALES[not getattr(recipe, "use_f32_scales", False)]
    x, weight, gradient = (
        {2: (128, 128)}.get(getattr(recipe, f"{name}_block_scaling_dim", default), (1, 128))
        for name, default in (("x", 1), ("w", 2), ("grad", 1))
    )
    return uniform(
        Quantization(_E4M3, x, scale, rule),
        Quantization(_E4M3, weight, scale, rule),
        Quantization(backward, gradient, scale, rule),
    )


def _value(holder: Any, name: str) -> str:
    """Return the value of an enumeration's member that an object holds; "" if it holds none."""
    return str(getattr(getattr(holder, name, None), "value", ""))


def _element(dtype: Any) -> str:
    """Return the name of an 8-bit format by torch's dtype; "" if it is none."""
    return next((name for name in (_E4M3, _E5M2) if name in str(dtype)), "")
