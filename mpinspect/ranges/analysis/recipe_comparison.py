"""What recipes of narrow formats lose of a model's matrix products, which modules each serves, and the code that converts them.

The judgement is on range alone: a product is served if flushing takes at most 1% of each operand's L1 mass (``serving``). That
share named the modules that carried most of MXFP4's harm to a small GPT, and ordered the recipes that round to nearest. Under
stochastic rounding, which flushes as much without bias, it says nothing: such operands have the noise alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import OPERANDS, PRODUCTS, RECIPES, STOCHASTIC, TrainingRecipe
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.session import Session
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.rendering import RendersItself


@dataclass(frozen=True)
class OperandLoss:
    """What a recipe loses of one operand.

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
    """What a recipe loses of one product: an entry per quantised operand, none if the recipe keeps the product wide."""

    recipe: str
    operands: tuple[OperandLoss, ...]

    @property
    def is_served(self) -> bool:
        """Whether every operand is served."""
        return all(each.is_served for each in self.operands)

    @property
    def worst(self) -> OperandLoss | None:
        """The operand that loses most of its L1 mass, of those that are rounded to nearest; None if there is none."""
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
    """What each recipe loses of each product of a model's Linear layers.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        model: class name.
        recipes: the recipes compared.
        rows: the products, in the order of the modules' first calls.
        batches: number of batches; of a run's report, the number of steps in which one call of each layer was measured.
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
        """Return the modules whose features are no multiple of what the recipe's kernels ask for."""
        return tuple(module for module, shape in self.modules.items() if any(size % recipe.multiple for size in shape))

    def kept_wide(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules to leave unconverted: those not served and those with unsuited sizes, in the model's order."""
        kept = {*self.unserved(recipe), *self.unsuited(recipe)}
        return tuple(module for module in self.modules if module in kept)

    @property
    def advised(self) -> TrainingRecipe | None:
        """The recipe for which torchao has a converter and that leaves the fewest modules wide; None if it would convert none."""
        usable = [recipe for recipe in self.recipes if recipe.name in _CONVERTERS]
        best = min(usable, key=lambda recipe: len(self.kept_wide(recipe)), default=None)
        return best if best is not None and len(self.kept_wide(best)) < len(self.modules) else None

    def code(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return lines of Python that convert ``model`` by torchao, without the modules to keep wide; () if torchao can't.

        Linear layers that were not judged are kept wide, too.
        """
        converter = _CONVERTERS.get(recipe.name)
        if converter is None:
            return ()
        names = (*self.kept_wide(recipe), *self.not_called)
        keep = [f"KEEP = {{{', '.join(map(repr, names))}}}"]
        if len(keep[0]) > _WIDTH:
            keep = ["KEEP = {", *(f"    {name!r}," for name in names), "}"]
        if not names:
            keep = ["KEEP = set()"]
        first, *rest = converter
        imports = [line for line in converter if line.startswith(("from", "import"))]
        return (*imports, *keep, *(line for line in (first, *rest) if line not in imports))


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


def _mxfp8(option: str = "") -> tuple[str, ...]:
    # torchao's own converter (quantize_ with MXFP8TrainingOpConfig) leaves out biases, and replaces the parameters.
    return (
        "from torchao.float8.float8_linear_utils import swap_linear_layers",
        "from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear",
        "def to_mxfp8(layer):",
        "    sizes = layer.in_features, layer.out_features, layer.bias is not None",
        f'    made = MXFP8Linear(*sizes, device="meta"{option})',
        "    made.weight, made.bias = layer.weight, layer.bias",
        "    return made",
        "swap_linear_layers(model, to_mxfp8, module_filter_fn=lambda module, name: name not in KEEP)",
    )


#: The code of torchao 0.18 for each recipe that it trains.
_CONVERTERS = {
    "fp8-tensorwise": _float8("tensorwise"),
    "fp8-rowwise": _float8("rowwise"),
    "fp8-rowwise-with-gw-hp": _float8("rowwise_with_gw_hp"),
    "mxfp8": _mxfp8(),
    "mxfp8-wgrad-hp": _mxfp8(", wgrad_with_hp=True"),
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


def recipe_report(session: Session) -> RecipeReport | None:
    """Return what the recipes that a run was asked for lose of its products; None if it measured none.

    Recipes that this version does not know are left out.
    """
    operands = [record for record in session.precision.operands if record.recipe in RECIPES]
    if not operands:
        return None
    recipes = tuple(dict.fromkeys(RECIPES[record.recipe] for record in operands))
    shapes = {record.module: record.shape for record in operands}
    linear = (
        module
        for layers in session.precision.layers
        if layers.type in ("Linear", "Float8Linear", "MXFP8Linear")
        for module in layers.modules
    )
    return RecipeReport(
        session.info.model,
        recipes,
        product_rows({record.key: record.loss for record in operands}, shapes, recipes),
        max(record.steps for record in operands),
        tuple(dict.fromkeys(record.module for record in operands if record.loss.broken)),
        tuple(module for module in linear if module not in shapes),
    )


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
