"""Words and sums on how the products of a model's layers are computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.numeric.recipes import Products, recipe_of
from mpinspect.ranges.session import LayersRecord, Precision
from mpinspect.reporting.words import filled, some

#: Own names of the modules that make logits of a vocabulary or of classes.
_HEADS = ("lm_head", "head", "output", "classifier", "score", "embed_out", "unembed", "logits", "output_layer")
#: Own names of the modules that choose experts. "gate_proj" and "gate_up_proj" belong to a gated MLP.
_ROUTERS = ("router", "gate", "switch", "wg")
_LEVEL = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class ConvertedLayer:
    """One layer of the ledger, in the model's order.

    Args:
        module: its dotted path.
        record: the record of this layer and of all layers with the same figures.
    """

    module: str
    record: LayersRecord

    @property
    def products(self) -> Products:
        return self.record.products

    @property
    def is_narrow(self) -> bool:
        """Whether any operand of its products is quantised."""
        return self.products.bits is not None

    @property
    def pattern(self) -> str:
        """Its path with the numbers of blocks as "{}"."""
        return pattern_of(self.module)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The block numbers in its path."""
        return tuple(int(number) for number in _LEVEL.findall(self.module))


def _own_name(module: str) -> str:
    """Return the last part of a path that is not a number."""
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), module)


def is_named_head(module: str) -> bool:
    """Return whether a module is named as a head and no block of many holds it."""
    return _own_name(module) in _HEADS and not _LEVEL.search(module)


def is_named_router(module: str) -> bool:
    """Return whether a module is named as the choice of experts."""
    return _own_name(module) in _ROUTERS


def pattern_of(module: str) -> str:
    """Return a dotted path with the numbers of blocks as "{}"."""
    return _LEVEL.sub("{}", module)


def ledger(precision: Precision) -> tuple[ConvertedLayer, ...]:
    """Return every layer with products, grouped by record."""
    return tuple(ConvertedLayer(module, record) for record in precision.layers for module in record.modules)


def is_narrow(precision: Precision) -> bool:
    """Return whether any layer computes a product in FP8 or FP4."""
    return any(record.products.bits is not None for record in precision.layers)


def products_named(products: Products) -> str:
    """Return the recipe of narrow products in words: "FP8 tensorwise"; the products of no known recipe by their width."""
    recipe = recipe_of(products)
    if recipe is not None:
        return recipe.title
    return f"FP{products.bits}{filled(' with wide {}', ' and '.join(products.wide))} (no known recipe)"


def layers_line(precision: Precision, wide: str) -> str:
    """Return a line like "81 of 113 Linear in FP8 tensorwise, 32 in BF16"; "" if no layer is narrow.

    Args:
        wide: the format of the other layers in words; "" if unknown.
    """
    if not is_narrow(precision):
        return ""
    layers = sorted(ledger(precision), key=lambda layer: not layer.is_narrow)
    wide = wide or "a wide format"
    found = Counter(_named(layer) if layer.is_narrow else wide for layer in layers)
    (first, narrow), *rest = found.items()
    counts = (
        f"{narrow:,} of {len(layers):,} {_kinds(precision.layers)} in {first}",
        *(f"{n:,} in {name}" for name, n in rest),
    )
    return ", ".join(counts)


def _named(layer: ConvertedLayer) -> str:
    words = products_named(layer.products)
    return f"{words} (emulated)" if layer.record.emulated else words


def _kinds(records: Iterable[LayersRecord]) -> str:
    """Return "Linear" if all layers are nn.Linear, converted or not; otherwise "layers"."""
    if all(record.type in ("Linear", "Float8Linear", "MXFP8Linear") for record in records):
        return "Linear"
    return "layers"


def alike(layers: Iterable[ConvertedLayer]) -> list[list[ConvertedLayer]]:
    """Return the layers in groups whose paths differ in block numbers alone."""
    groups: dict[str, list[ConvertedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.pattern, []).append(layer)
    return list(groups.values())


def modules_named(modules: Iterable[str]) -> str:
    """Return modules in words, with repeated blocks as one: "'h.{0..11}.attn', 'h.{0,2}.mlp', 'head'"."""
    groups: dict[str, list[int]] = {}
    for module in dict.fromkeys(modules):
        numbers = _LEVEL.findall(module)
        if len(numbers) == 1:
            groups.setdefault(_LEVEL.sub("{}", module), []).append(int(numbers[0]))
        else:
            groups[module] = []
    named = [pattern.replace("{}", _numbers(numbers)) for pattern, numbers in groups.items()]
    return "the model itself" if named == [""] else some(named)


def _numbers(numbers: list[int]) -> str:
    """Return "{0..11}", "{0,2}", "5", or "{}" for no number."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    if len(ordered) > 2 and ordered == [*range(ordered[0], ordered[-1] + 1)]:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    return f"{{{','.join(map(str, ordered))}}}"
