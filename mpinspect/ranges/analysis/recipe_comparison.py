"""Compares recipes of narrow formats: the losses of a model's matrix products, the modules served, the code that converts them.

The judgement is on range alone: a product is served if flushing takes at most 1% of each operand's L1 mass (``serving``). In a
small GPT, that share identified the modules that caused most of MXFP4's harm, and it ordered the recipes that round to nearest.
It does not judge stochastic rounding, whose flushes have no bias: such operands are judged by their noise alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import OPERANDS, PRODUCTS, STOCHASTIC, TrainingRecipe
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.rendering import RendersItself


@dataclass(frozen=True)
class OperandLoss:
    """The loss of one operand under a recipe.

    Args:
        tensor: "input", "weight" or "gradient" (numeric.recipes).
        is_stochastic: whether its values are rounded at random, without bias.
        loss: the measured loss over all calls of the module.
    """

    tensor: str
    is_stochastic: bool
    loss: QuantizationLoss

    @property
    def is_served(self) -> bool:
        """Whether flushing takes at most 1% of its L1 mass; a stochastic operand, whose loss has no bias, always is."""
        return self.is_stochastic or self.loss.lost_l1_share <= LOST_L1_TOLERANCE


@dataclass(frozen=True)
class RecipeCell:
    """The losses of one product under a recipe: one per quantised operand, () if the product stays wide."""

    recipe: str
    operands: tuple[OperandLoss, ...]

    @property
    def is_served(self) -> bool:
        """Whether every operand is served."""
        return all(each.is_served for each in self.operands)

    @property
    def worst(self) -> OperandLoss | None:
        """The operand rounded to nearest that loses the largest share of its L1 mass; None without such an operand."""
        nearest = (each for each in self.operands if not each.is_stochastic)
        return max(nearest, key=lambda each: each.loss.lost_l1_share, default=None)


@dataclass(frozen=True)
class ProductRow:
    """One product of one module.

    Args:
        module: dotted path.
        product: "fprop", "dgrad" or "wgrad".
        shape: input and output features of the layer.
        cells: one per recipe, in the report's order.
    """

    module: str
    product: str
    shape: tuple[int, int]
    cells: tuple[RecipeCell, ...]


@dataclass(frozen=True, repr=False)
class RecipeReport(RendersItself):
    """The loss of each product of a model's Linear layers under each recipe.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        model: class name.
        recipes: the recipes compared.
        rows: the products, in the order of the modules' first calls.
        batches: number of batches.
        broken: modules with an infinity or NaN in an operand; a block with one becomes NaN in every recipe.
        not_called: Linear layers that no batch called as modules, such as the projections inside ``nn.MultiheadAttention``,
            or whose outputs need no gradient.
    """

    kind: ClassVar[str] = "recipes"

    model: str
    recipes: tuple[TrainingRecipe, ...]
    rows: tuple[ProductRow, ...]
    batches: int
    broken: tuple[str, ...] = ()
    not_called: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """No findings: the table is the judgement."""
        return ()

    @cached_property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Input and output features of each module."""
        return {row.module: row.shape for row in self.rows}

    def unserved(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules with a product that the recipe does not serve."""
        place = self.recipes.index(recipe)
        return tuple(dict.fromkeys(row.module for row in self.rows if not row.cells[place].is_served))

    def unsuited(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules whose features are not multiples of ``recipe.multiple``."""
        return tuple(module for module, shape in self.modules.items() if any(size % recipe.multiple for size in shape))

    def kept_wide(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules to leave unconverted: those not served and those with unsuited sizes, in the model's order."""
        kept = {*self.unserved(recipe), *self.unsuited(recipe)}
        return tuple(module for module in self.modules if module in kept)

    @property
    def advised(self) -> TrainingRecipe | None:
        """The recipe of torchao that leaves the fewest modules wide; None if each would leave all of them wide."""
        usable = [recipe for recipe in self.recipes if recipe.name in _CONVERTERS]
        converting = [recipe for recipe in usable if len(self.kept_wide(recipe)) < len(self.modules)]
        return min(converting, key=lambda recipe: len(self.kept_wide(recipe)), default=None)

    def code(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return lines of Python that convert ``model`` by torchao, without the modules to keep wide; () if torchao can't."""
        converter = _CONVERTERS.get(recipe.name)
        if converter is None:
            return ()
        names = self.kept_wide(recipe)
        keep = [f"KEEP = {{{', '.join(map(repr, names))}}}"]
        if len(keep[0]) > _WIDTH:
            keep = ["KEEP = {", *(f"    {name!r}," for name in names), "}"]
        if not names:
            keep = ["KEEP = set()"]
        imports = [line for line in converter if line.startswith(("from", "import"))]
        return (*imports, *keep, *(line for line in converter if line not in imports))


_WIDTH = 100


def _float8(name: str) -> tuple[str, ...]:
    return (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
        "convert_to_float8_training(",
        "    model,",
        f'    config=Float8LinearConfig.from_recipe_name("{name}"),',
        "    module_filter_fn=lambda module, name: name not in KEEP,",
        ")",
    )


def _mxfp8(name: str) -> tuple[str, ...]:
    return (
        "import torch",
        "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe",
        "from torchao.quantization import quantize_",
        "quantize_(",
        "    model,",
        f"    MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.{name}),",
        "    filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name not in KEEP,",
        ")",
    )


#: The code of torchao 0.18 for each recipe that it trains.
_CONVERTERS = {
    "fp8-tensorwise": _float8("tensorwise"),
    "fp8-rowwise": _float8("rowwise"),
    "fp8-rowwise-with-gw-hp": _float8("rowwise_with_gw_hp"),
    "mxfp8": _mxfp8("MXFP8_RCEIL"),
    "mxfp8-wgrad-hp": _mxfp8("MXFP8_RCEIL_WGRAD_WITH_HP"),
}


def product_rows(
    losses: dict[tuple[str, str, str, str], QuantizationLoss],
    shapes: dict[str, tuple[int, int]],
    recipes: Iterable[TrainingRecipe],
) -> tuple[ProductRow, ...]:
    """Return a row per product of each module.

    Args:
        losses: by module, recipe, product and tensor; a product without an entry for both of its tensors was not computed.
        shapes: input and output features by module, in order.
        recipes: the recipes, in order.
    """
    recipes = tuple(recipes)
    rows = []
    for module, shape in shapes.items():
        for product in PRODUCTS:
            cells = tuple(_cell(losses, module, recipe, product) for recipe in recipes)
            if any(cell.operands for cell in cells):
                rows.append(ProductRow(module, product, shape, cells))
    return tuple(rows)


def _cell(
    losses: dict[tuple[str, str, str, str], QuantizationLoss], module: str, recipe: TrainingRecipe, product: str
) -> RecipeCell:
    operands = []
    for tensor in OPERANDS[product]:
        quantization = recipe.quantization(product, tensor)
        loss = losses.get((module, recipe.name, product, tensor))
        if quantization is not None and loss is not None:
            operands.append(OperandLoss(tensor, quantization.rounding == STOCHASTIC, loss))
    return RecipeCell(recipe.name, tuple(operands))
