"""Builds a recipe report's document and JSON: what FP8 and FP4 recipes lose of a model's products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import HISTORY, STOCHASTIC, TrainingRecipe
from mpinspect.ranges.analysis.products import modules_named, pattern_of
from mpinspect.ranges.analysis.recipe_comparison import (
    TRANSFORMER_ENGINE,
    OperandLoss,
    ProductRow,
    RecipeCell,
    RecipeReport,
)
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.stale_scales import HISTORIES, StaleScale, stale_scales, unserved_at_scale_one
from mpinspect.ranges.session import Session
from mpinspect.reporting.document import (
    Block,
    Cell,
    Code,
    Column,
    Document,
    Item,
    Items,
    Limit,
    Line,
    Table,
    Tables,
    section,
)
from mpinspect.reporting.json_text import Layout, Special, fields, headed, plain
from mpinspect.reporting.words import by_number, filled, number_of, percent

#: Rows of products.
ROWS = Limit(40, 200, "more; all are in JSON")
#: Smaller shares are shown without their operand.
_SMALL = 1e-5
#: A product without a quantised operand.
_WIDE = "wide"
_LEGEND = (
    "fprop: input x weight; dgrad: output's gradient x weight; wgrad: output's gradient x input. A cell: share of the L1 mass "
    "(the sum of magnitudes) that is flushed to zero in the operand that loses most, and that operand from 0.001% on; *: over "
    "1%. noise: of the output's gradient, which the recipe rounds at random, so that flushing takes nothing on average: the "
    "standard deviation relative to its values' root mean square; not judged. {...}: the worst of these layers. An operand may "
    "lose more in one product than in another, since blocks lie along the dimension that is summed over"
)
_WIDE_LEGEND = "; wide: not quantised"
_JUDGED = (
    "Judged by flushing alone, with the weights as they are. Rounding inside the range, the effect on other layers, the trained "
    "loss, speed and memory are not measured."
)
_NOT_JUDGED = (
    "The limit of 1% is a choice, the same for all recipes: a share just below it is hardly better than one just above. Weights "
    "that are not in the table, such as those of convolutions, embeddings and some routers, are neither judged nor converted."
)
_AFTERWARDS = (
    "The code is for torchao 0.18 and TransformerEngine 2.20. Afterwards mpinspect run states which products are really computed "
    "in FP8 or FP4."
)


def document(report: RecipeReport) -> Document:
    """Return the report as a document."""
    layers, batches = _layers(report), number_of(report.batches, "batch")
    return Document(
        f"Recipes for {report.model}, {layers}, {batches}",
        (
            Line(_JUDGED),
            _judgements(report),
            *section("Change", *_change(report)),
            *section("Product by product", _table(report)),
            *section("Seen and not seen", Items(tuple(map(Item, _notes(report))))),
        ),
    )


def in_run(report: RecipeReport | None, session: Session) -> Iterator[Block]:
    """Yield the blocks of a section in the report of a run; none without a report of its recipes."""
    if report is None:
        return
    layers, steps = _layers(report), number_of(report.batches, "step")
    yield Line(f"Measured in {steps}, on one call of each of {layers}. {_JUDGED}")
    yield _judgements(report)
    yield from _change(report)
    yield _table(report)
    yield Items(tuple(map(Item, _notes(report))))
    if any(_is_delayed(recipe) for recipe in report.recipes):
        yield Items(tuple(map(Item, _on_stale_scales(session))))


def _layers(report: RecipeReport) -> str:
    return number_of(len(report.modules), "layer" if report.not_linear else "Linear layer")


def _is_delayed(recipe: TrainingRecipe) -> bool:
    return any(each.rule == HISTORY for each in recipe.products.operands())


def _on_stale_scales(session: Session) -> Iterator[str]:
    """Yield the share of the outputs' gradients that delayed scaling would have clipped, and the loss with an empty history."""
    histories: dict[str, list[str]] = {}
    for history in HISTORIES:
        histories.setdefault(_clipping(stale_scales(session, history)), []).append(f"{history:,}")
    for clipping, lengths in histories.items():
        of = " or ".join(filter(None, (", ".join(lengths[:-1]), lengths[-1])))
        yield f"With scales from the maximum of {of} earlier steps, {clipping}"
    lost = unserved_at_scale_one(session)
    if lost:
        yield (
            "With an empty history, as after a resume without the scales' state, the scale is 1: E5M2 then clips gradients or "
            f"flushes over 1% of their L1 mass in {modules_named(lost)}."
        )


def _clipping(found: Sequence[StaleScale]) -> str:
    clipped = [each for each in found if each.clipped]
    possible = sum(each.possible > 0 for each in found if not each.clipped)
    unsure = ""
    if possible:
        unsure = f" Those of {number_of(possible, 'other layer')} may have been: not every step before was sampled."
    if not clipped:
        return f"no gradient of {number_of(len(found), 'layer')} was certainly clipped.{unsure}"
    worst = max(clipped, key=lambda each: each.factor)
    return (
        f"gradients of {modules_named(each.module for each in clipped)} would have been clipped: at worst in "
        f"{worst.module!r}, by values {worst.factor:.2g}x too large, {percent(worst.share[0])} to {percent(worst.share[1])} of "
        f"its elements ({worst.clipped} of {number_of(worst.judged, 'sample')}).{unsure}"
    )


def _judgements(report: RecipeReport) -> Items:
    return Items(
        tuple(
            Item(f"{_judgement(report, recipe)}. It needs compute capability {recipe.compute_capability}", recipe.title)
            for recipe in report.recipes
        )
    )


def _judgement(report: RecipeReport, recipe: TrainingRecipe) -> str:
    unserved, unsuited = report.unserved(recipe), report.unsuited(recipe)
    sentence = "flushes at most 1% of the L1 mass of every operand"
    if STOCHASTIC in {each.rounding for each in recipe.products.operands()}:
        sentence += " that it rounds to nearest; the noise of the others is not judged"
    if report.broken:
        sentence += f", leaving out the infinities and NaN in {modules_named(report.broken)}"
    if unserved:
        sentence = f"flushes over 1% of an operand's L1 mass in {modules_named(unserved)}"
    if unsuited:
        rows, columns = report.modules[unsuited[0]]
        sentence += (
            f". Its kernels refuse {modules_named(unsuited)} ({columns} x {rows}): no multiples of {recipe.multiple}"
        )
    return sentence


def _change(report: RecipeReport) -> Iterator[Block]:
    recipe, of_engine = report.advised, report.best_of(TRANSFORMER_ENGINE)
    alone = [name for name in report.not_linear if name not in report.experts]
    if alone:
        yield Line(
            f"Converters leave {modules_named(alone)} as they are, since they are no torch.nn.Linear. To convert "
            "one, replace it by an nn.Linear with the same bias and weight, which has the shape (outputs, inputs) there."
        )
    if recipe is None and report.heads_and_routers:
        yield Line("No layer is left to convert.")
    if recipe is not None:
        yield Line(f"{_converts(report, recipe)}{_as_many(report, recipe)}:")
        yield Code("\n".join(report.code(recipe)))
        yield from _in_torchtitan(report, recipe)
    if report.heads_and_routers:
        names = modules_named(report.heads_and_routers)
        yield Line(f"Left in BF16 whatever flushing takes, as heads and routers are in published recipes: {names}.")
    yield from _of_experts(report)
    if of_engine is None or (recipe is not None and report.converted(of_engine) <= report.converted(recipe)):
        return
    yield Line(f"{_converts(report, of_engine)}, by TransformerEngine's modules under the same names:")
    yield Code("\n".join(report.code(of_engine, TRANSFORMER_ENGINE)))
    config = report.debug_config(of_engine)
    if config:
        yield Line(
            "Or this file for its debug tools, which computes only the products that are not served in high precision:"
        )
        yield Code("\n".join(config))


def _converts(report: RecipeReport, recipe: TrainingRecipe) -> str:
    return f"{recipe.title} covers {report.converted(recipe):,} of {_layers(report)}"


def _as_many(report: RecipeReport, recipe: TrainingRecipe) -> str:
    """Return which other recipes of torchao convert as many layers, in words; the first is advised."""
    others = [
        each.title
        for each in report.recipes
        if each != recipe and report.code(each) and report.converted(each) == report.converted(recipe)
    ]
    form = by_number(
        len(others),
        " ({} covers as many: flushing can't tell which is better)",
        " ({} cover as many: flushing can't tell which is better)",
    )
    return filled(form, ", ".join(others))


def _of_experts(report: RecipeReport) -> Iterator[Block]:
    """Yield how torchao converts the experts that are one parameter, by the first recipe for which it has code."""
    recipe = next((each for each in report.recipes if report.expert_code(each)), None)
    if not report.experts:
        return
    names = modules_named(report.experts)
    if recipe is None:
        yield Line(f"Converters of Linear layers leave the experts {names} as they are.")
        return
    yield Line(
        f"Converters of Linear layers leave the experts {names} as they are. For them torchao has other code, to {recipe.title}. "
        "Run it before the optimizer is made. Unless the model multiplies them by torch._grouped_mm, it has no effect:"
    )
    yield Code("\n".join(report.expert_code(recipe)))


def _in_torchtitan(report: RecipeReport, recipe: TrainingRecipe) -> Iterator[Block]:
    try:
        names = report.filter_fqns(recipe)
    except ValueError as error:
        yield Line(f"For torchtitan there is no such list: {error}.")
    else:
        if names:
            yield Line(f"In torchtitan: filter_fqns={list(names)!r}.")


def _notes(report: RecipeReport) -> Iterator[str]:
    yield _NOT_JUDGED
    yield _AFTERWARDS
    for recipe in report.recipes:
        if recipe.caveats:
            yield (
                f"Not simulated of {recipe.title}: {', '.join(recipe.caveats)}. A training may flush more or less than measured."
            )
    if report.broken:
        yield f"Operands of {modules_named(report.broken)} hold infinities or NaN; their blocks become NaN and are left out."
    if report.not_called:
        yield (
            f"Not judged, since they were not called as modules or their outputs need no gradient: "
            f"{modules_named(report.not_called)}."
        )


def _table(report: RecipeReport) -> Tables:
    groups: dict[tuple[str, str], list[ProductRow]] = {}
    for row in report.rows:
        groups.setdefault((pattern_of(row.module), row.product), []).append(row)
    columns = (
        Column("layers", is_name=True),
        Column("product", is_left=True),
        *(Column(recipe.title) for recipe in report.recipes),
    )
    rows, named = [], ""
    for (_, product), group in groups.items():
        layers = modules_named(row.module for row in group).replace("'", "")
        cells = (_cell([row.cells[place] for row in group]) for place in range(len(report.recipes)))
        rows.append((Cell("" if layers == named else layers), Cell(product), *cells))
        named = layers
    has_wide = any(cell.text == _WIDE for row in rows for cell in row)
    return Tables((Table(columns, tuple(rows), ""),), ROWS, len(rows), _LEGEND + _WIDE_LEGEND * has_wide)


def _cell(cells: list[RecipeCell]) -> Cell:
    """Return the worst figures of the cells of similar modules."""
    nearest = max(
        (worst for cell in cells if (worst := cell.worst) is not None),
        key=lambda each: each.loss.lost_l1_share,
        default=None,
    )
    noises = [each.loss.noise_to_signal for cell in cells for each in cell.operands if each.is_stochastic]
    figures = [] if nearest is None else [_figure(nearest)]
    figures += [f"noise {percent(math.sqrt(noise))}" for noise in sorted(noises)[-1:]]
    is_served = nearest is None or nearest.is_served
    return Cell(", ".join(figures) or _WIDE, "" if is_served else "warning")


def _figure(operand: OperandLoss) -> str:
    share = operand.loss.lost_l1_share
    if share < _SMALL:
        return percent(share)
    # Two digits would show a share just above the limit as the limit.
    figure = percent(share) if operand.is_served or share > 1.05 * LOST_L1_TOLERANCE else f"{100 * share:.3g}%"
    return f"{figure} {operand.tensor}{'' if operand.is_served else '*'}"


# -- JSON ---------------------------------------------------------------------------------------------------------------

LAYOUT = Layout(9, indent=1)
_FIGURES = ("flushed_fraction", "clipped_fraction", "lost_l1_share", "gain", "noise_to_signal")


def to_plain(report: RecipeReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None."""
    names = [recipe.name for recipe in report.recipes]
    kept = {recipe.name: report.kept_wide(recipe) for recipe in report.recipes}
    body = fields(report, but=("recipes",)) | {"recipes": names, "kept_wide": kept}
    return headed("mpinspect.recipes", 1, plain(body, _SPECIAL))


_SPECIAL: Special = {
    RecipeCell: lambda cell: fields(cell, also=("is_served",)),
    QuantizationLoss: lambda loss: fields(loss, also=_FIGURES),
}
