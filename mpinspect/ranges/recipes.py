"""compare_recipes: runs batches, and measures the loss by each FP8 and FP4 recipe in every layer's products."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from mpinspect.numeric.recipes import TrainingRecipe, as_recipes
from mpinspect.ranges.analysis.recipe_comparison import RecipeReport, product_rows
from mpinspect.ranges.capture.experts import ExpertProducts
from mpinspect.ranges.capture.operands import OperandLosses, may_be_layer
from mpinspect.ranges.capture.passes import LossFunction, materialised, require_loss, require_step
from mpinspect.runtime.untouched import ModelState, RandomState
from mpinspect.runtime.wrappers import class_of, compiled_modules_eager

#: The recipes compared by default: those that torchao and TransformerEngine train.
USUAL = ("fp8-tensorwise", "fp8-rowwise", "mxfp8", "fp8-block", "mxfp4", "nvfp4")


def compare_recipes(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    recipes: Iterable[str | TrainingRecipe] = USUAL,
) -> RecipeReport:
    """Run batches forward and backward, and measure the loss by each recipe in every layer's operands.

    A layer is a ``torch.nn.Linear``, or another module whose output is the product of its input and its weight, such as
    ``transformers``' Conv1D. The report names the latter, which converters leave as they are. Judged too are experts that are one
    parameter with three dimensions, where their matrices are multiplied by torch's linear, batched or grouped products.

    Every operand (input, weight and the gradient at the output, in the orientation of each product) is quantised as the recipe
    does, in FP32 arithmetic, and compared with itself. So flushed and clipped values are measured, not estimated. The run itself
    computes as it is: the effect of one layer's loss on the next is not simulated, nor are a recipe's steps before it quantises
    (``TrainingRecipe.caveats``). Under autocast the operands have autocast's dtype.

    Afterwards, even after an error, the model (parameters, buffers, ``.grad``, requires_grad, train/eval flags) and the random
    generators of torch, Python and NumPy are restored. Nothing is trained. Compiled modules run eagerly.

    Args:
        model: any module with such layers, in the mode (train or eval) to be judged.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, unscaled, computed as in training, with its autocast.
        batches: an iterable of batches, which are all held in memory: limit a long one with ``itertools.islice(loader, 4)``.
        recipes: names (``numeric.recipes.RECIPES``) or recipes.

    Takes several times as long as the batches' training steps. Synchronises the device.

    Raises:
        TypeError: model is not a Module, loss_fn is not callable, the loss is not a tensor, batches is not an iterable, or
            recipes are neither names nor recipes.
        ValueError: no batches, no or an unknown recipe, no called layer, a loss that is not one number or has no graph.
    """
    require_step(model, loss_fn)
    chosen = as_recipes(recipes)
    if not chosen:
        raise ValueError("recipes is empty: name at least one, such as 'mxfp8'")
    layers = {path: module for path, module in model.named_modules() if may_be_layer(module)}
    if not layers and all(parameter.dim() != 3 for parameter in model.parameters()):
        raise ValueError("the model has no torch.nn.Linear, nor another module with a matrix as its weight")
    measuring = OperandLosses(chosen)
    number = _run(model, loss_fn, batches, layers, measuring)
    if not measuring.shapes:
        raise ValueError(
            "no batch called a torch.nn.Linear as a module, nor another that multiplies its input by its weight: there is no "
            "product to judge"
        )
    return _report(model, chosen, layers, measuring, number)


def _report(
    model: torch.nn.Module,
    recipes: tuple[TrainingRecipe, ...],
    layers: dict[str, torch.nn.Module],
    measuring: OperandLosses,
    batches: int,
) -> RecipeReport:
    losses = measuring.losses
    return RecipeReport(
        type(model).__name__,
        recipes,
        product_rows(losses, measuring.shapes, recipes),
        batches,
        tuple(dict.fromkeys(module for (module, *_), found in losses.items() if found.broken)),
        tuple(
            path for path, each in layers.items() if isinstance(each, torch.nn.Linear) and path not in measuring.shapes
        ),
        (*measuring.others, *measuring.experts),
        tuple(measuring.experts),
        tuple(path for path in measuring.others if class_of(layers[path]).__name__ == "Conv1D"),
        measuring.tokens,
        measuring.experts,
    )


def _run(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    layers: dict[str, torch.nn.Module],
    measuring: OperandLosses,
) -> int:
    """Run the batches with the layers measured; restore the model, and return the number of batches."""
    random, state = RandomState.now(), ModelState(model)
    experts = ExpertProducts(model.named_parameters(), measuring)
    handles = [layer.register_forward_hook(partial(_called, measuring, path)) for path, layer in layers.items()]
    try:
        given = materialised(batches)
        for number, batch in enumerate(given):
            for parameter in model.parameters():
                parameter.grad = None
            with compiled_modules_eager(), torch.enable_grad(), experts:
                loss = loss_fn(model, batch)
                require_loss(loss, number, finite=False)
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        state.restore()
        random.restore()
    return len(given)


def _called(measuring: OperandLosses, path: str, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not (args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor)):
        return
    products = measuring.called(path, module, args[0], output)
    if products:
        output.register_hook(partial(measuring.arrived, path, products))  # type: ignore[no-untyped-call]
