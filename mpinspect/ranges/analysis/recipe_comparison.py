"""Compares recipes of narrow formats: the losses of a model's matrix products, the modules served, the code that converts them.

The judgement is on range alone: a product is served if flushing takes at most 1% of each operand's L1 mass (``serving``). In a
small GPT, that share identified the modules that caused most of MXFP4's harm, and it ordered the recipes that round to nearest.
It does not judge stochastic rounding, whose flushes have no bias: such operands are judged by their noise alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import OPERANDS, PRODUCTS, RECIPES, STOCHASTIC, TrainingRecipe, as_recipe, is_grouped
from mpinspect.ranges.analysis.products import is_named_head, is_named_router
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.session import Session
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.rendering import RendersItself

#: The libraries for which there is code.
TORCHAO, TRANSFORMER_ENGINE = "torchao", "transformer_engine"


@dataclass(frozen=True)
class OperandLoss:
    """The loss of one operand under a recipe.

    Args:
        tensor: "input", "weight" or "gradient" (numeric.recipes).
        is_stochastic: whether its values have stochastic rounding, which is unbiased.
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
    """The loss of each product of a model's layers under each recipe.

    Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        model: class name.
        recipes: the recipes compared.
        rows: the products, in the order of the modules' first calls.
        batches: number of batches; of a run's report, the number of steps in which one call of each layer was measured.
        broken: modules with an infinity or NaN in an operand; a block with one becomes NaN in every recipe.
        not_called: Linear layers that no batch called as modules, such as the projections inside ``nn.MultiheadAttention``,
            or whose outputs need no gradient.
        not_linear: the judged modules of other classes than ``torch.nn.Linear``, which converters of layers leave unchanged.
        experts: those of ``not_linear`` that are paths of parameters, each with a matrix for each expert.
        conv1d: those of ``not_linear`` that are of transformers' class Conv1D.
        tokens: by module, the number that wgrad sums over; of several the one with the fewest factors of two, which is a multiple
            of 16, say, only if all are. Of experts, the tokens of one expert.
        functions: by path in ``experts``, the torch function that multiplied them, if possible one that is not grouped.
    """

    kind: ClassVar[str] = "recipes"

    model: str
    recipes: tuple[TrainingRecipe, ...]
    rows: tuple[ProductRow, ...]
    batches: int
    broken: tuple[str, ...] = ()
    not_called: tuple[str, ...] = ()
    not_linear: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    conv1d: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """No findings: the table is the judgement."""
        return ()

    @cached_property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Input and output features of each module."""
        return {row.module: row.shape for row in self.rows}

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The modules without heads and routers, or all if there are no others: the verdict on a recipe is about these."""
        return tuple(each for each in self.modules if each not in self.heads_and_routers) or tuple(self.modules)

    def unserved(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules with a product that the recipe does not serve."""
        place = self.recipes.index(recipe)
        return tuple(dict.fromkeys(row.module for row in self.rows if not row.cells[place].is_served))

    def worst(self, recipe: TrainingRecipe, modules: Collection[str] = ()) -> tuple[ProductRow, OperandLoss] | None:
        """Return the operand rounded to nearest that loses most under a recipe, and its product; None without such an operand.

        Args:
            recipe: one of the report's.
            modules: those that are compared; () for ``layers``.
        """
        place, among = self.recipes.index(recipe), {*(modules or self.layers)}
        found = ((row, worst) for row in self.rows if row.module in among and (worst := row.cells[place].worst))
        return max(found, key=lambda each: each[1].loss.lost_l1_share, default=None)

    def unsuited(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules whose features are not multiples of ``recipe.multiple``."""
        return tuple(module for module, shape in self.modules.items() if any(size % recipe.multiple for size in shape))

    def uneven(self, recipe: TrainingRecipe) -> dict[str, int]:
        """Return, by Linear layer to convert, its number of tokens if the kernels refuse to sum over that many in wgrad."""
        kept = {*self.kept_wide(recipe), *self.not_linear}
        return {
            module: tokens
            for module, tokens in self.tokens.items()
            if tokens % recipe.token_multiple and module not in kept
        }

    def uneven_experts(self, recipe: TrainingRecipe) -> int:
        """Return the tokens of one expert that the kernels of a grouped product refuse; 0 if they take all that were seen."""
        uneven = (self.tokens.get(path, 0) for path in self.experts)
        return next((tokens for tokens in uneven if tokens % recipe.multiple), 0)

    @property
    def heads_and_routers(self) -> tuple[str, ...]:
        """The Linear layers named as heads or routers, which published recipes leave in BF16 regardless of flushing."""
        return tuple(
            module
            for module in self.modules
            if module not in self.not_linear and (is_named_head(module) or is_named_router(module))
        )

    def kept_wide(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the Linear layers to leave unconverted, in order: not served, of unsuited sizes, heads and routers."""
        kept = {*self.unserved(recipe), *self.unsuited(recipe), *self.heads_and_routers} - {*self.not_linear}
        return tuple(module for module in self.modules if module in kept)

    def converted(self, recipe: TrainingRecipe) -> int:
        """Return the number of Linear layers that are not kept wide."""
        return len(self.modules) - len(self.not_linear) - len(self.kept_wide(recipe))

    def runnable(self, recipe: TrainingRecipe) -> int:
        """Return the number of converted Linear layers whose tokens in these batches the kernels take, or torchao pads."""
        return self.converted(recipe) - len(self.uneven(recipe)) * (not self.pads(recipe))

    @property
    def advised(self) -> TrainingRecipe | None:
        """The recipe of torchao that converts the most Linear layers; None if it would convert none. See ``best_of``."""
        return self.best_of(TORCHAO)

    def best_of(self, library: str) -> TrainingRecipe | None:
        """Return the recipe of a library that converts the most Linear layers that can run; None if it would convert none.

        Of equals it is the first of the lowest compute capability.
        """
        usable = [recipe for recipe in self.recipes if recipe.name in _TEMPLATES[library] and self.converted(recipe)]
        return max(usable, key=lambda each: (self.runnable(each), -float(each.compute_capability)), default=None)

    def code(self, recipe: TrainingRecipe | str, library: str = TORCHAO) -> tuple[str, ...]:
        """Return lines of Python that compute ``model`` in a recipe, without the modules to keep wide; () if a library can't.

        Linear layers that were not judged are kept wide, too. torchao's FP8 pads tokens that its kernels would refuse.

        Args:
            recipe: the recipe, or its name.
            library: "torchao" converts the ``nn.Linear`` layers; "transformer_engine" is for a model whose ``nn.Linear`` layers
                are TransformerEngine's under the same names.
        """
        recipe = as_recipe(recipe)
        template = _TEMPLATES[library].get(recipe.name)
        if template is None:
            return ()
        if library == TORCHAO and self.pads(recipe):
            template = _PADDED[recipe.name]
        names = (*self.kept_wide(recipe), *self.not_called)
        imports = [line for line in template if line.startswith("from")]
        return (*imports, *_names_kept(names), *template[len(imports) :])

    def pads(self, recipe: TrainingRecipe) -> bool:
        """Whether torchao's code pads the tokens of some layer."""
        return recipe.name in _PADDED and bool(self.uneven(recipe))

    def converted_experts(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the experts that a recipe serves and torchao converts.

        None where they are not multiplied by torch's grouped product, nor in FP8, which torchao does not pad, if kernels refuse
        an expert's tokens.
        """
        can_run = all(map(is_grouped, self.functions.values()))
        if recipe.name not in _OF_EXPERTS or not can_run:
            return ()
        if recipe.name == "fp8-rowwise" and self.uneven_experts(recipe):
            return ()
        kept = {*self.unserved(recipe), *self.unsuited(recipe)}
        return tuple(path for path in self.experts if path not in kept)

    def covered(self, recipe: TrainingRecipe) -> int:
        """Return the number of Linear layers and experts that torchao converts and whose tokens the kernels take."""
        return self.runnable(recipe) + len(self.converted_experts(recipe))

    @property
    def advised_for_experts(self) -> TrainingRecipe | None:
        """The recipe of torchao that converts the most Linear layers and experts; None if none converts experts."""
        usable = [recipe for recipe in self.recipes if self.converted_experts(recipe)]
        return max(usable, key=lambda each: (self.covered(each), -float(each.compute_capability)), default=None)

    def expert_code(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return lines of Python by which torchao converts the experts of ``model`` that a recipe serves; () if it can't.

        See ``converted_experts``. The parameters are replaced: an optimizer is made afterwards.
        """
        served = self.converted_experts(recipe)
        if not served:
            return ()
        *imports, config, call = _OF_EXPERTS[recipe.name]
        lines = [*imports, *_names_kept(served, "EXPERTS"), config]
        if self.uneven_experts(recipe):
            lines.append("config.pad_token_groups_for_grouped_mm = True")
        return (*lines, call)

    def wide_products(self, recipe: TrainingRecipe) -> dict[str, tuple[str, ...]]:
        """Return the products that the recipe does not serve, by module."""
        place = self.recipes.index(recipe)
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.cells[place].is_served:
                found.setdefault(row.module, []).append(row.product)
        return {module: tuple(products) for module, products in found.items()}

    def debug_config(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return lines of YAML for TransformerEngine's debug tools, which compute only the unserved products in high precision.

        The names of its modules must end with the paths here. () if every product is served.
        """
        alike: dict[tuple[str, ...], list[str]] = {}
        for module, products in self.wide_products(recipe).items():
            if module in self.not_linear:
                continue
            alike.setdefault(products, []).append(re.escape(module))
        lines = []
        for products, modules in alike.items():
            lines += [
                f"keep_{'_and_'.join(products)}_wide:",
                "  enabled: True",
                "  layers:",
                rf"    layer_name_regex_pattern: '(.*\.)?({'|'.join(modules)})$'",
                "  transformer_engine:",
                "    DisableQuantizationGEMM:",
                "      enabled: True",
                f"      gemms: [{', '.join(products)}]",
            ]
        return tuple(lines)

    def filter_fqns(self, recipe: TrainingRecipe) -> tuple[str, ...]:
        """Return the modules to keep wide as torchtitan's ``filter_fqns``.

        torchtitan leaves out each layer whose path contains one of these strings.

        Raises:
            ValueError: some string is contained in the path of a module that the recipe serves.
        """
        kept = (*self.kept_wide(recipe), *self.not_called)
        for name in self.modules:
            part = next((each for each in kept if each in name), None)
            if part is not None and name not in (*kept, *self.not_linear):
                raise ValueError(f"filter_fqns can't leave out {part!r} alone: {name!r} contains it")
        return kept


def _names_kept(names: Sequence[str], variable: str = "KEEP") -> tuple[str, ...]:
    if not names:
        return (f"{variable} = set()",)
    line = f"{variable} = {{{', '.join(map(repr, names))}}}"
    return (line,) if len(line) <= _WIDTH else (f"{variable} = {{", *(f"    {name!r}," for name in names), "}")


_WIDTH = 100


#: Replaces transformers' Conv1D, which converters leave as it is.
CONV1D_CODE = (
    "import torch",
    "from transformers.pytorch_utils import Conv1D",
    "for name, module in [*model.named_modules()]:",
    "    if isinstance(module, Conv1D):  # its weight has the shape (inputs, outputs)",
    '        linear = torch.nn.Linear(*module.weight.shape, device="meta")',
    "        weight = module.weight.detach().T.contiguous()",
    "        linear.weight = torch.nn.Parameter(weight, module.weight.requires_grad)",
    "        linear.bias = module.bias",
    "        model.set_submodule(name, linear)",
)


def _float8(name: str, pads: bool = False) -> tuple[str, ...]:
    config = f'Float8LinearConfig.from_recipe_name("{name}")'
    if pads:
        return ("from dataclasses import replace", *_float8_of(f"replace({config}, pad_inner_dim=True)"))
    return _float8_of(config)


def _float8_of(config: str) -> tuple[str, ...]:
    return (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
        "convert_to_float8_training(",
        "    model,",
        f"    config={config},",
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


def _transformer_engine(name: str) -> tuple[str, ...]:
    return (
        f"from transformer_engine.common.recipe import {name}",
        "from transformer_engine.pytorch import autocast",
        "def wide(forward):",
        "    def run(*args, **kwargs):",
        "        with autocast(enabled=False):",
        "            return forward(*args, **kwargs)",
        "    return run",
        "for name in KEEP:",
        "    module = model.get_submodule(name)",
        "    module.forward = wide(module.forward)",
        f"recipe = {name}()  # around each forward: with autocast(recipe=recipe):",
    )


#: The code of torchao 0.18 for each recipe that it trains.
_CONVERTERS = {
    "fp8-tensorwise": _float8("tensorwise"),
    "fp8-rowwise": _float8("rowwise"),
    "fp8-rowwise-with-gw-hp": _float8("rowwise_with_gw_hp"),
    "mxfp8": _mxfp8(),
    "mxfp8-wgrad-hp": _mxfp8(", wgrad_with_hp=True"),
}
_PADDED = {"fp8-tensorwise": _float8("tensorwise", pads=True), "fp8-rowwise": _float8("rowwise", pads=True)}


def _experts(kind: str, recipe: str) -> tuple[str, ...]:
    return (
        f"from torchao.prototype.moe_training.config import {kind}TrainingOpConfig, {kind}TrainingRecipe",
        "from torchao.quantization import FqnToConfig, quantize_",
        f"config = {kind}TrainingOpConfig.from_recipe({kind}TrainingRecipe.{recipe})",
        # With a filter of modules, it would convert the modules inside of them, too.
        "quantize_(model, FqnToConfig(dict.fromkeys(EXPERTS, config)), filter_fn=None)",
    )


#: The code of torchao 0.18 for experts.
_OF_EXPERTS = {
    "fp8-rowwise": _experts("Float8", "FP8_ROWWISE"),
    "mxfp8": _experts("MXFP8", "MXFP8_RCEIL"),
    "mxfp8-wgrad-hp": _experts("MXFP8", "MXFP8_RCEIL_WGRAD_WITH_HP"),
}
_TEMPLATES = {
    TORCHAO: _CONVERTERS,
    # As of TransformerEngine 2.20.
    TRANSFORMER_ENGINE: {
        "fp8-tensorwise": _transformer_engine("Float8CurrentScaling"),
        "fp8-delayed": _transformer_engine("DelayedScaling"),
        "fp8-block": _transformer_engine("Float8BlockScaling"),
        "mxfp8": _transformer_engine("MXFP8BlockScaling"),
        "nvfp4": _transformer_engine("NVFP4BlockScaling"),
    },
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
    """Return the losses of a run's products under the recipes that it was asked for; None if it measured none.

    Recipes that this version does not know are left out.
    """
    operands = [record for record in session.precision.operands if record.recipe in RECIPES]
    if not operands:
        return None
    recipes = tuple(dict.fromkeys(RECIPES[record.recipe] for record in operands))
    shapes = {record.module: record.shape for record in operands}
    # A converter takes subclasses of nn.Linear, too.
    others = [layers for layers in session.precision.layers if layers.type == "Conv1D"]
    linear = [
        module
        for layers in session.precision.layers
        if layers not in others and layers.library != "transformer_engine"
        for module in layers.modules
    ]
    return RecipeReport(
        session.info.model,
        recipes,
        product_rows({record.key: record.loss for record in operands}, shapes, recipes),
        max(record.steps for record in operands),
        tuple(dict.fromkeys(record.module for record in operands if record.loss.broken)),
        tuple(module for module in linear if module not in shapes),
        tuple(dict.fromkeys(record.module for record in operands if not record.is_linear)),
        tuple(dict.fromkeys(record.module for record in operands if record.is_experts)),
        tuple(module for layers in others for module in layers.modules if module in shapes),
        {record.module: record.tokens for record in operands},
        {record.module: record.function for record in operands if record.is_experts},
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
