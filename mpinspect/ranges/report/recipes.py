"""Builds a recipe report's document and JSON: what FP8 and FP4 recipes lose of a model's products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import HISTORY, TrainingRecipe, is_grouped
from mpinspect.ranges.analysis.products import is_named_head, is_named_router, modules_named, pattern_of
from mpinspect.ranges.analysis.recipe_comparison import (
    CONV1D_CODE,
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
    Tone,
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
    "fprop: input x weight; dgrad: output's gradient x weight; wgrad: output's gradient x input. A cell: the largest share that "
    "an operand rounded to nearest loses, and that operand from 0.001% on; *: over 1%; {...}: the worst of these layers. An "
    "operand may lose more in one product than in another, since blocks lie along the dimension that is summed over"
)
_NOISE_LEGEND = (
    "; noise, in cells without *: standard deviation of the random rounding error of the gradient, relative to the gradient's "
    "root mean square"
)
_WIDE_LEGEND = "; wide: not quantised"
_JUDGED = (
    "By range, a recipe fails where flushing to zero takes over 1% of an operand's L1 mass (the sum of magnitudes). The limit is "
    "a choice: a share just below it is hardly better than one just above. Other batches or weights may lose more or less. Not "
    "judged: rounding inside the range, the effect on other layers, the trained loss, speed, memory. cc: the least compute "
    "capability (H100: 9.0, B200: 10.0)."
)
_SEEN = (
    "Measured on the model's device: each operand of the products above, cast as the recipe would. The model itself computes in "
    "its own precision, with its weights as they are. A share is of the sums over all measured calls, not of the worst call.",
    "Weights outside the table are neither judged nor converted: convolutions, embeddings, and routers of other classes than "
    "nn.Linear.",
)
#: The verdicts on a layer, the gravest first.
_TONES: dict[str, Tone] = {
    "fails": "warning",
    "undecided": "unknown",
    "passes by range": "good",
    "nothing was measured": "",
}
#: The share of normally distributed values' L1 mass that a recipe flushes; MXFP4's depends on their scale.
NORMAL = {"mxfp4": "0.96% to 1.16%", "nvfp4": "0.39%, as weights 0.81%"}


def document(report: RecipeReport) -> Document:
    layers, batches = _subject(report), number_of(report.batches, "batch")
    return Document(
        f"Recipes for {report.model}, {layers}, {batches}",
        (
            Line(_JUDGED),
            *_judgements(report),
            *section("Change", *_change(report), *_on_other_code(report)),
            *section("Product by product", _table(report)),
            *section("Seen and not seen", Items(tuple(map(Item, _notes(report))))),
        ),
    )


def in_run(report: RecipeReport | None, session: Session) -> Iterator[Block]:
    """Yield the blocks of a section in the report of a run; none without a report of its recipes."""
    if report is None:
        return
    layers, steps = _subject(report), number_of(report.batches, "step")
    yield Line(f"Measured in {steps}, on one call of each of {layers}. {_JUDGED}")
    yield from _judgements(report)
    yield from _change(report)
    yield _table(report)
    yield Items(tuple(map(Item, _notes(report))))
    if any(_is_delayed(recipe) for recipe in report.recipes):
        yield Items(tuple(map(Item, _on_stale_scales(session))))


def _layers(report: RecipeReport) -> str:
    return number_of(len(report.layers), "layer")


def _subject(report: RecipeReport) -> str:
    """Return the measured modules in words: "16 layers and 'lm_head'"."""
    others = modules_named(name for name in report.modules if name not in report.layers)
    return _layers(report) + filled(" and {}", others)


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


def _judgements(report: RecipeReport) -> Iterator[Block]:
    if report.broken:
        yield Line(
            f"Operands of {modules_named(report.broken)} hold infinities or NaN; their blocks become NaN and are left out."
        )
    yield Items(tuple(_judgement(report, recipe) for recipe in report.recipes))


def _judgement(report: RecipeReport, recipe: TrainingRecipe) -> Item:
    """Return the verdict on one recipe: in how many layers it fails, what its kernels refuse, and the GPU that it needs."""
    states = _states(report, recipe)
    verdict, *rest = (f"{state} in {number:,}" for state, number in states.items())
    verdict = next(iter(states)) if len(states) == 1 and "fails" not in states else f"{verdict} of {_layers(report)}"
    refused = _refused_tokens(report, recipe)
    tone = "warning" if refused else _TONES[next(iter(states))]
    # Green means that the recipe can be used: layers of another class, as GPT-2's, must be made nn.Linear first.
    tone = "unknown" if tone == "good" and not report.covered(recipe) else tone
    worst = report.worst(recipe)
    share = "" if worst is None else f": at worst {_share(worst[1])}"
    text = ", ".join((verdict, *rest)) + share + filled("; its kernels refuse {}", refused)
    return Item(text, f"{recipe.title}, cc {recipe.compute_capability}", tuple(_reasons(report, recipe)), tone=tone)


def _states(report: RecipeReport, recipe: TrainingRecipe) -> dict[str, int]:
    """Return in how many layers a recipe fails, is undecided and passes, the gravest first, without zeros."""
    place, fails = report.recipes.index(recipe), {*report.unserved(recipe)}
    cells = [(row.module, row.cells[place]) for row in report.rows]
    random = {module for module, cell in cells if any(each.is_stochastic for each in cell.operands)}
    found = Counter(
        "fails" if each in fails else "undecided" if each in random else "passes by range" for each in report.layers
    )
    return {state: found[state] for state in _TONES if found[state]} or {"nothing was measured": 0}


def _reasons(report: RecipeReport, recipe: TrainingRecipe) -> Iterator[str]:
    """Yield the sentences below a verdict."""
    worst, noise = report.worst(recipe), _noise(report, recipe)
    if worst is not None and worst[1].loss.lost_l1_share >= _SMALL:
        row, operand = worst
        normal = filled("; normally distributed values lose {}", NORMAL.get(recipe.name))
        yield f"Worst: {modules_named([row.module])} ({row.product}, {operand.tensor}){normal}."
    if noise:
        yield (
            f"Gradients are rounded at random (noise up to {noise}), which is not judged: a layer whose inputs and weights pass "
            "is undecided."
        )
    unsuited = [module for module in report.unsuited(recipe) if module in report.layers]
    if unsuited:
        sizes = {size for module in unsuited for size in report.modules[module] if size % recipe.multiple}
        yield f"Its kernels refuse {modules_named(unsuited)} ({_either(sizes)} is not a multiple of {recipe.multiple})."


def _refused_tokens(report: RecipeReport, recipe: TrainingRecipe) -> str:
    """Return the tokens that the kernels refuse in these batches: "1,040 tokens in 24 layers (not a multiple of 32)"; else ""."""
    uneven = report.uneven(recipe)
    if not uneven or report.pads(recipe):
        return ""
    where = f"{_either(uneven.values())} tokens in {number_of(len(uneven), 'layer')}"
    return f"{where} (not a multiple of {recipe.token_multiple})"


def _noise(report: RecipeReport, recipe: TrainingRecipe) -> str:
    """Return the largest noise of the layers' operands rounded at random; "" without any."""
    place = report.recipes.index(recipe)
    rows = [row for row in report.rows if row.module in report.layers]
    noises = [each.loss.noise_to_signal for row in rows for each in row.cells[place].operands if each.is_stochastic]
    return percent(math.sqrt(max(noises))) if noises else ""


def _either(sizes: Iterable[int], limit: int = 3) -> str:
    """Return the least sizes in words: "16 or 1,040"."""
    return " or ".join(f"{size:,}" for size in sorted(set(sizes))[:limit])


def _change(report: RecipeReport) -> Iterator[Block]:
    recipe, of_engine = report.advised, _by_engine(report)
    yield from _of_others(report)
    if recipe is not None:
        yield Line(
            f"{_converts(report, recipe)}. {_as_many(report, recipe)}{_on_tokens(report, recipe)}Run this before FSDP and the "
            "optimizer, then torch.compile the model:"
        )
        yield Code("\n".join(report.code(recipe)))
        yield from _in_torchtitan(report, recipe)
    elif report.advised_for_experts is None:
        yield Line("As it is, the model has no layer that torchao would convert in these recipes.")
    yield from _of_heads(report)
    yield from _of_experts(report)
    if of_engine is None:
        return
    yield Line(f"{_converts(report, of_engine)}, by TransformerEngine's modules under the same names:")
    yield Code("\n".join(report.code(of_engine, TRANSFORMER_ENGINE)))
    config = report.debug_config(of_engine)
    if config:
        yield Line(
            "Or this file for its debug tools, which computes only the products that are not served in high precision:"
        )
        yield Code("\n".join(config))


def _of_heads(report: RecipeReport) -> Iterator[Block]:
    """Yield which heads and routers stay wide, and the most that a recipe takes of them."""
    names = report.heads_and_routers
    if not names:
        return
    kinds = {"Heads": any(map(is_named_head, names)), "Routers": any(map(is_named_router, names))}
    who = " and ".join(kind for kind, is_there in kinds.items() if is_there).capitalize()
    found = [(each[1], recipe) for recipe in report.recipes if (each := report.worst(recipe, names))]
    operand, recipe = max(found, key=lambda each: each[0].loss.lost_l1_share, default=(None, None))
    lost = ""
    if operand is not None and recipe is not None and operand.loss.lost_l1_share >= _SMALL:
        lost = f" (at worst {_share(operand)}, in {recipe.title})"
    yield Line(
        f"{who} are not converted, whatever they lose, as published recipes leave them in BF16: {modules_named(names)}{lost}."
    )


def _by_engine(report: RecipeReport) -> TrainingRecipe | None:
    """Return TransformerEngine's recipe that converts more layers than any of torchao's."""
    recipe, of_engine = report.advised, report.best_of(TRANSFORMER_ENGINE)
    if of_engine is None or (recipe is not None and report.converted(of_engine) <= report.converted(recipe)):
        return None
    return of_engine


def _on_other_code(report: RecipeReport) -> Iterator[Block]:
    shown = (report.advised, report.advised_for_experts)
    others = [] if report.advised is None else [each for each in _others(report, report.advised) if each not in shown]
    if others:
        yield Line(f"Code for another recipe: print('\\n'.join(report.code('{others[-1].name}'))).")


def _of_others(report: RecipeReport) -> Iterator[Block]:
    """Yield how modules that are not nn.Linear become one."""
    others = [name for name in report.not_linear if name not in (*report.experts, *report.conv1d)]
    if others:
        yield Line(
            f"Converters take torch.nn.Linear alone, and leave {modules_named(others)}. To convert one, replace it by an "
            "nn.Linear with its bias and its weight, transposed unless its shape is (outputs, inputs), and run this report again."
        )
    if report.conv1d:
        yield Line(
            f"Converters take torch.nn.Linear alone, and leave transformers' Conv1D: {modules_named(report.conv1d)}. Replace it "
            "after the weights are loaded and before the optimizer is made, and run this report again:"
        )
        yield Code("\n".join(CONV1D_CODE))


def _converts(report: RecipeReport, recipe: TrainingRecipe) -> str:
    return f"{recipe.title} covers {report.converted(recipe):,} of {_layers(report)}"


def _as_many(report: RecipeReport, recipe: TrainingRecipe) -> str:
    """Return which other recipes of torchao convert as many layers, and why this one was chosen."""
    others = [each.title for each in _others(report, recipe) if report.covered(each) == report.covered(recipe)]
    form = by_number(len(others), "{} covers as many", "{} cover as many")
    reason = f"Flushing can't rank them: this is the first one for cc {recipe.compute_capability} that was compared. "
    return filled(f"{form}. {reason}", ", ".join(others))


def _others(report: RecipeReport, recipe: TrainingRecipe) -> list[TrainingRecipe]:
    """Return the other recipes that convert a layer by torchao whose kernels take these batches."""
    return [each for each in report.recipes if each != recipe and report.code(each) and report.runnable(each)]


def _on_tokens(report: RecipeReport, recipe: TrainingRecipe) -> str:
    """Return whether torchao's code for a recipe runs with these batches; "" if the tokens are unknown."""
    uneven = report.uneven(recipe)
    if report.pads(recipe):
        return f"It pads wgrad's {_either(uneven.values())} tokens in these batches to multiples of {recipe.token_multiple}. "
    if uneven:
        return f"Its first backward raises an error until batches are padded to multiples of {recipe.token_multiple} tokens. "
    kept = {*report.kept_wide(recipe), *report.not_linear}
    counts = {tokens for module, tokens in report.tokens.items() if tokens and module not in kept}
    return filled("Its kernels take these batches (wgrad sums over {} tokens). ", _either(counts))


def _of_experts(report: RecipeReport) -> Iterator[Block]:
    """Yield how torchao converts the experts that are one parameter, by the first recipe for which it has code."""
    if not report.experts:
        return
    start = f"Converters of nn.Linear leave the experts {modules_named(report.experts)}"
    apart = next((function for function in report.functions.values() if not is_grouped(function)), None)
    if apart is not None:
        yield Line(
            f"{start}, multiplied by torch's {apart or 'unknown function'} in these batches. torchao's code for experts changes "
            "torch._grouped_mm alone. In transformers, model.set_experts_implementation('grouped_mm') selects it; then run this "
            "report again."
        )
        return
    start += ", multiplied by torch._grouped_mm in these batches"
    recipe = report.advised_for_experts
    tokens = max((report.uneven_experts(each) for each in report.recipes if each.name == "fp8-rowwise"), default=0)
    if tokens:
        start += (
            f". An expert had {tokens:,} tokens: not a multiple of 16, and torchao 0.18 can't pad them in FP8 rowwise"
        )
    if recipe is None:
        yield Line(f"{start}.")
        return
    is_padded = bool(report.uneven_experts(recipe))
    needs = {"fp8-rowwise": "9.0 or 10.0"}.get(recipe.name, recipe.compute_capability)
    code, advised = report.expert_code(recipe), report.advised
    if advised not in (None, recipe) and report.converted(recipe):
        number = report.converted(recipe) + len(report.converted_experts(recipe))
        yield Line(
            f"{start}. Without cc {needs}, stop after the code above. With cc {needs}, {recipe.title} covers {number:,} of "
            f"{_layers(report)}{', and pads the tokens of experts' * is_padded}. {_on_tokens(report, recipe)}Run this instead, "
            "before the optimizer is made:"
        )
        code = (*report.code(recipe), *code)
    else:
        yield Line(
            f"{start}. Run before the optimizer is made, this computes that product in {recipe.title} "
            f"({'padded, ' * is_padded}cc {needs}):"
        )
    yield Code("\n".join(code))


def _in_torchtitan(report: RecipeReport, recipe: TrainingRecipe) -> Iterator[Block]:
    try:
        names = report.filter_fqns(recipe)
    except ValueError as error:
        yield Line(f"For torchtitan there is no such list: {error}.")
    else:
        if names:
            yield Line(f"In torchtitan, if its modules have these names: filter_fqns={list(names)!r}.")


def _notes(report: RecipeReport) -> Iterator[str]:
    yield from _SEEN
    by_torchao = report.advised is not None or any(map(report.expert_code, report.recipes))
    uses = {"torchao 0.18": by_torchao, "TransformerEngine 2.20": _by_engine(report) is not None}
    libraries = [library for library, is_used in uses.items() if is_used]
    if libraries:
        yield (
            f'The code is for {" and ".join(libraries)}. Afterwards, the report of "mpinspect run SCRIPT" states which products '
            "are really computed in FP8 or FP4."
        )
    caveats = [f"of {recipe.title}, {', '.join(recipe.caveats)}" for recipe in report.recipes if recipe.caveats]
    if caveats:
        yield f"Not simulated: {'; '.join(caveats)}."
    if report.not_called:
        yield (
            f"Neither judged nor converted, since they were not called as modules or their outputs need no gradient: "
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
    texts = [cell.text for row in rows for cell in row]
    legend = _LEGEND + _NOISE_LEGEND * any("noise" in text for text in texts) + _WIDE_LEGEND * (_WIDE in texts)
    return Tables((Table(columns, tuple(rows), ""),), ROWS, len(rows), legend)


def _cell(cells: list[RecipeCell]) -> Cell:
    """Return the worst figures of the cells of similar modules."""
    nearest = max(
        (worst for cell in cells if (worst := cell.worst) is not None),
        key=lambda each: each.loss.lost_l1_share,
        default=None,
    )
    noises = [each.loss.noise_to_signal for cell in cells for each in cell.operands if each.is_stochastic]
    figures = [] if nearest is None else [_figure(nearest)]
    if nearest is not None and not nearest.is_served:
        return Cell(_figure(nearest), "warning")
    figures += [f"noise {percent(math.sqrt(noise))}" for noise in sorted(noises)[-1:]]
    return Cell(", ".join(figures) or _WIDE)


def _figure(operand: OperandLoss) -> str:
    if operand.loss.lost_l1_share < _SMALL:
        return _share(operand)
    return f"{_share(operand)} {operand.tensor}{'' if operand.is_served else '*'}"


def _share(operand: OperandLoss) -> str:
    share = operand.loss.lost_l1_share
    # Two digits would show a share just above the limit as the limit.
    return percent(share) if operand.is_served or share > 1.05 * LOST_L1_TOLERANCE else f"{100 * share:.3g}%"


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
