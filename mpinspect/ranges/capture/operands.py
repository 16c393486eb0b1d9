"""Measures the losses by FP8 and FP4 recipes in the operands of layers' products: the input, the weight, the gradient.

A layer is a torch.nn.Linear, or any module whose output is the product of its input and its one weight, transposed or not (the
Conv1D of GPT-2 in transformers). Such modules are recognised by their values, not by name. Experts whose matrices are
one parameter have no such modules: ``ExpertProducts`` finds their products where torch's functions are called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from mpinspect.counting.blocks import quantization_loss
from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.recipes import GRADIENT, INPUT, OPERANDS, PRODUCTS, WEIGHT, Quantization, TrainingRecipe
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Backward, Call, Observer, OutputGradient
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.session import OperandRecord
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
        #: The modules that are no torch.nn.Linear.
        self.others: list[str] = []
        #: The parameters that hold a matrix for each expert.
        self.experts: list[str] = []

    def called(self, path: str, module: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> tuple[str, ...]:
        """Measure a layer's input and weight, and return the products that are computed.

        Returns:
            () if the module is no layer, or its output needs no gradient. Waits for the device of a module that is no Linear.
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
    """Return whether a module is a Linear, or has a weight with two dimensions that is no embedding's."""
    if isinstance(module, torch.nn.Linear):
        return True
    weight = registered(module, "_parameters").get("weight")
    if weight is None or is_lazy(weight) or isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return False
    return bool(weight.dim() == 2)


@torch.no_grad()
def _weight(module: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """Return a layer's weight with the shape (output features, input features), without gradients; None of another module."""
    if isinstance(module, torch.nn.Linear):
        return module.weight.detach()
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


class ExpertProducts(TorchFunctionMode):
    """Measures the products with weights that hold a matrix for each expert, while active.

    Such a weight is a parameter with three dimensions. Seen are torch's linear function with one of its matrices, and batched and
    grouped products with all of them. Experts whose matrices are copied first, one for each token, are not seen.

    Args:
        model: the model.
        measuring: receives the operands under the parameter's dotted path, expert by expert, since no block crosses experts.
    """

    def __init__(self, model: torch.nn.Module, measuring: OperandLosses) -> None:
        super().__init__()
        self._measuring = measuring
        self._experts = {
            parameter.untyped_storage().data_ptr(): (path, parameter.requires_grad)
            for path, parameter in model.named_parameters()
            if is_plain(parameter) and parameter.dim() == 3 and parameter.numel()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        split = _SPLITS.get(getattr(func, "__name__", ""))
        if split is None or not isinstance(output, torch.Tensor) or not output.requires_grad or len(args) < 2:
            return output
        x, weight = args[:2]
        path, learns = self._parameter(weight)
        if path:
            if path not in self._measuring.experts:
                self._measuring.experts.append(path)
            for part, matrix in split(x, weight, *args[2:], **(kwargs or {})):
                self._multiplied(path, matrix.detach(), learns, x, output, part)
        return output

    def _parameter(self, weight: torch.Tensor) -> tuple[str, bool]:
        """Return the path of the experts' parameter of which a tensor is a view or a cast, and whether it needs a gradient."""
        node = weight.grad_fn if is_plain(weight) else None
        while node is not None and node.name().startswith(_VIEWS_AND_CASTS):
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", weight)
        return self._experts.get(leaf.untyped_storage().data_ptr(), ("", False)) if is_plain(leaf) else ("", False)

    def _multiplied(
        self, path: str, matrix: torch.Tensor, learns: bool, x: torch.Tensor, output: torch.Tensor, part: Part
    ) -> None:
        if x[part].numel():
            products = self._measuring.multiplied(path, matrix, learns, x[part], output)
            output.register_hook(lambda gradient: self._measuring.arrived(path, products, gradient[part]))  # type: ignore[no-untyped-call]


#: How the names of autograd's nodes begin that lie between a parameter and the matrices of its experts.
_VIEWS_AND_CASTS = ("Select", "Transpose", "TBackward", "Permute", "ToCopy", "Unbind", "Slice", "View", "Squeeze")


#: The rows of a tensor that one expert multiplies.
Part = int | slice


def _of_linear(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Iterator[tuple[Part, torch.Tensor]]:
    if weight.dim() == 2:
        yield slice(None), weight


def _of_batches(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Iterator[tuple[Part, torch.Tensor]]:
    if x.dim() == weight.dim() == 3 and len(x) == len(weight):
        yield from ((place, matrix.T) for place, matrix in enumerate(weight))


def _of_groups(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, **_: Any
) -> Iterator[tuple[Part, torch.Tensor]]:
    if weight.dim() == 3 and offs is not None:
        ends = offs.tolist()
        for begin, end, matrix in zip([0, *ends], ends, weight, strict=False):
            yield slice(begin, end), matrix.T


#: How torch's functions divide their rows among experts, by the functions' names.
_SPLITS: dict[str, Callable[..., Iterator[tuple[Part, torch.Tensor]]]] = {
    "linear": _of_linear,
    "bmm": _of_batches,
    "matmul": _of_batches,
    "grouped_mm": _of_groups,
    "_grouped_mm": _of_groups,
}


class RecipeLosses(Observer):
    """Measures one call of every layer in the first, second, fourth, eighth, ... sampled step. Waits for the GPU there.

    Args:
        recipes: the recipes.
        recording: receives the sums of each such step.
    """

    def __init__(self, recipes: Sequence[TrainingRecipe], recording: Recording) -> None:
        self._recipes, self._recording = recipes, recording
        self._sampled_steps = 0
        self._begin()

    def _begin(self) -> None:
        self._losses = OperandLosses(self._recipes)
        #: The products of the layers that were called in this step.
        self._products: dict[str, tuple[str, ...]] = {}
        self._arrived: set[str] = set()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer if the number of sampled steps becomes a power of two."""
        self._sampled_steps += sampled
        self.at_work = sampled and self._sampled_steps & (self._sampled_steps - 1) == 0
        self._begin()

    def called(self, call: Call) -> None:
        """Measure the input and weight at a layer's first call that needs a gradient, and request that gradient."""
        path, module = call.layer.path, call.layer.module
        if not call.layer.counted or path in self._products or not may_be_layer(module):
            return
        if call.inputs() and call.outputs:
            products = self._losses.called(path, module, call.inputs()[0], call.outputs[0])
            if products:
                self._products[path] = products
                call.wants_gradients = True

    def output_gradient(self, gradient: OutputGradient, backward: Backward) -> None:
        """Measure the first gradient at the output of each layer."""
        path = gradient.layer.path
        if gradient.is_input or path not in self._products or path in self._arrived:
            return
        self._arrived.add(path)
        self._losses.arrived(path, self._products[path], gradient.values)

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the sums, unless the step was dropped."""
        if self.at_work and sampled and self._losses.losses:
            shapes, others = self._losses.shapes, set(self._losses.others)
            self._recording.operands(
                tuple(
                    OperandRecord(*key, shapes[key[0]], loss, is_linear=key[0] not in others)
                    for key, loss in self._losses.losses.items()
                )
            )
        self._begin()
