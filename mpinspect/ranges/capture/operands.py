"""Measures the losses by FP8 and FP4 recipes in the operands of layers' products: the input, the weight, the gradient.

A layer is a torch.nn.Linear, or any module whose output is the product of its input and its one weight, transposed or not (the
Conv1D of GPT-2 in transformers). Such modules are recognised by their values, not by name. ``capture.experts`` has experts whose
matrices are one parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from mpinspect.counting.blocks import quantization_loss
from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import (
    GRADIENT,
    INPUT,
    OPERANDS,
    PRODUCTS,
    WEIGHT,
    Quantization,
    TrainingRecipe,
    least_even,
)
from mpinspect.runtime.distributed import local_part
from mpinspect.runtime.wrappers import registered

#: How far a row of a module's output may lie from the product that it is taken for, relative to its norm. FP8 rounds by 3%, and
#: the row of another product differs by its whole norm.
_TOLERANCE = 2.0**-4
#: The products that sum over a tensor's rows, and quantise its transpose.
_TRANSPOSED = {("dgrad", WEIGHT), ("wgrad", GRADIENT), ("wgrad", INPUT)}


class OperandLosses:
    """Adds up the losses of the operands of layers' products under recipes.

    Args:
        recipes: the recipes.
    """

    def __init__(self, recipes: Sequence[TrainingRecipe]) -> None:
        self._recipes = tuple(recipes)
        #: By module, recipe, product and tensor.
        self.losses: dict[tuple[str, str, str, str], QuantizationLoss] = defaultdict(QuantizationLoss)
        #: Input and output features by module, in the order of their first calls.
        self.shapes: dict[str, tuple[int, int]] = {}
        #: The modules of other classes than torch.nn.Linear.
        self.others: list[str] = []
        #: By parameter with a matrix for each expert: the torch function that multiplied it, if possible not a grouped one.
        self.experts: dict[str, str] = {}
        #: By module, the tokens that wgrad sums over; with several calls, the number with the fewest factors of two.
        self.tokens: dict[str, int] = {}

    def called(self, path: str, module: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> tuple[str, ...]:
        """Measure a layer's input and weight, and return the products that are computed.

        Returns:
            () if the module is not a layer, or its output needs no gradient. Waits for the device unless the module is a Linear.
        """
        weight = _weight(module, x, output) if output.requires_grad else None
        if weight is None:
            return ()
        if not isinstance(module, torch.nn.Linear) and path not in self.shapes:
            self.others.append(path)
        return self.multiplied(path, weight, bool(module.weight.requires_grad), x, output)

    def multiplied(
        self, path: str, weight: torch.Tensor, learns: bool, x: torch.Tensor, output: torch.Tensor
    ) -> tuple[str, ...]:
        """Measure the input and the weight of a product, and return the products that are computed.

        Args:
            path: dotted path of the module, or of the parameter with the experts' weights.
            weight: shape (output features, input features), without gradients.
            learns: whether the weight needs a gradient.
            x: any shape whose last dimension has the input features.
            output: the product.
        """
        self.shapes[path] = (int(weight.shape[1]), int(weight.shape[0]))
        # Autograd computes a gradient only where one is needed: none of a first layer's input, nor of a frozen weight.
        needed = {"fprop": True, "dgrad": x.requires_grad, "wgrad": learns}
        products = tuple(product for product in PRODUCTS if needed[product])
        if learns:
            self.tokens[path] = least_even(self.tokens.get(path, 0), local_part(x.detach()).shape[:-1].numel())
        # Autocast casts inside the layer.
        dtype = output.dtype
        self._measure(path, INPUT, products, local_part(x.detach()).to(dtype))
        self._measure(path, WEIGHT, products, local_part(weight).to(dtype))
        return products

    def arrived(self, path: str, products: tuple[str, ...], gradient: torch.Tensor) -> None:
        """Measure the gradient at a layer's output, as an operand of these products."""
        self._measure(path, GRADIENT, products, gradient.detach())

    @torch.no_grad()
    def _measure(self, path: str, tensor: str, products: tuple[str, ...], values: torch.Tensor) -> None:
        matrix = values.reshape(-1, values.shape[-1])
        found: dict[tuple[Quantization, bool], QuantizationLoss] = {}
        for recipe in self._recipes:
            for product in products:
                quantization = recipe.quantization(product, tensor) if tensor in OPERANDS[product] else None
                if quantization is None:
                    continue
                is_transposed = (product, tensor) in _TRANSPOSED
                key = (quantization, is_transposed)
                if key not in found:
                    found[key] = quantization_loss(matrix.T if is_transposed else matrix, quantization)
                self.losses[path, recipe.name, product, tensor] += found[key]


def may_be_layer(module: torch.nn.Module) -> bool:
    """Return whether a module is a Linear, or has a weight with two dimensions that is not an embedding's."""
    if isinstance(module, torch.nn.Linear):
        return True
    weight = registered(module, "_parameters").get("weight")
    if weight is None or is_lazy(weight) or isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return False
    return bool(weight.dim() == 2)


@torch.no_grad()
def _weight(module: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """Return a layer's weight with the shape (output features, input features), without gradients; None for other modules."""
    if isinstance(module, torch.nn.Linear):
        return module.weight.detach() if output.is_floating_point() else None
    parameters = registered(module, "_parameters")
    own: list[torch.Tensor] = [
        each.detach() for name in ("weight", "bias") if (each := parameters.get(name)) is not None
    ]
    if not may_be_layer(module) or any(type(each) is not torch.Tensor for each in own) or not _are_rows(x, output):
        return None
    rows, results = x.detach().reshape(-1, x.shape[-1]), output.detach().reshape(-1, output.shape[-1])
    place = int(rows.abs().sum(1).argmax())
    row, result = rows[place].float(), results[place].float()
    for matrix in (own[0], own[0].T):
        if matrix.shape == (len(result), len(row)):
            product = torch.addmv(own[1].float(), matrix.float(), row) if own[1:] else matrix.float() @ row
            if bool((product - result).norm() <= _TOLERANCE * result.norm()):
                return matrix
    return None


def _are_rows(x: torch.Tensor, output: torch.Tensor) -> bool:
    """Return whether these are plain floating-point tensors with as many rows, at least one."""
    plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) and each.is_floating_point() for each in (x, output))
    return plain and x.dim() > 0 and x.numel() > 0 and x.shape[:-1] == output.shape[:-1]
