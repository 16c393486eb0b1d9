"""Measures the losses by FP8 and FP4 recipes in the products of experts whose matrices are one parameter.

No module multiplies them, so the products are found where torch's functions are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpinspect.numeric.recipes import is_grouped
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import Layer
from mpinspect.ranges.capture.operands import OperandLosses
from mpinspect.runtime.compiled_graphs import compiled_graphs
from mpinspect.runtime.guard import Guarded, entrance, guarded
from mpinspect.runtime.hooks import HandleList, ModelHook
from mpinspect.runtime.wrappers import registered

#: The rows of a tensor that one expert multiplies.
Part = int | slice
#: Yields each expert's rows and matrix, of the arguments of a product.
Split = Callable[..., Iterator[tuple[Part, torch.Tensor]]]


_COMPILED = (
    "the recipes' losses in experts that are one parameter are not measured where torch.compile has compiled code: "
    "compare_recipes measures them"
)


def has_matrices(parameter: torch.Tensor | None) -> bool:
    """Return whether a parameter may hold a matrix for each of several experts."""
    return is_plain(parameter) and parameter.dim() == 3 and parameter.shape[0] > 1 and parameter.numel() > 0


class ExpertProducts(TorchFunctionMode):
    """Measures the products with weights that hold a matrix for each expert, while active.

    Such a weight is a parameter with three dimensions. Seen are torch's linear function with one of its matrices, and batched and
    grouped products with all of them. Experts whose matrices are copied first, one for each token, are not seen.

    Args:
        parameters: by dotted path.
        measuring: receives the operands under the parameter's dotted path, expert by expert, since no block crosses experts.
        measure: calls a function with arguments; by default as it is.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        measuring: OperandLosses,
        measure: Callable[..., None] | None = None,
    ) -> None:
        super().__init__()
        self._measuring = measuring
        self._measure = measure or (lambda function, *given: function(*given))
        self._experts = {
            parameter.untyped_storage().data_ptr(): (path, parameter.requires_grad)
            for path, parameter in parameters
            if has_matrices(parameter)
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _SPLITS and isinstance(output, torch.Tensor) and output.requires_grad and len(args) > 1:
            self._measure(self._multiplied, name, output, args, kwargs or {})
        return output

    def _multiplied(self, name: str, output: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, weight = args[:2]
        path, learns = self._parameter(weight)
        if path:
            functions = self._measuring.experts
            functions[path] = min(functions.get(path, name), name, key=is_grouped)
            for part, matrix in _SPLITS[name](x, weight, *args[2:], **kwargs):
                if x[part].numel():
                    products = self._measuring.multiplied(path, matrix.detach(), learns, x[part], output)
                    hook = partial(self._measure, self._arrived, path, products, part)
                    output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _arrived(self, path: str, products: tuple[str, ...], part: Part, gradient: torch.Tensor) -> None:
        self._measuring.arrived(path, products, gradient[part])

    def _parameter(self, weight: torch.Tensor) -> tuple[str, bool]:
        """Return the path of the experts' parameter that a tensor is, views or casts, and whether it needs a gradient."""
        node = weight.grad_fn if is_plain(weight) else None
        while node is not None and node.name().startswith(_VIEWS_AND_CASTS):
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", weight)
        return self._experts.get(leaf.untyped_storage().data_ptr(), ("", False)) if is_plain(leaf) else ("", False)


#: How the names of autograd's nodes begin that lie between a parameter and the matrices of its experts.
_VIEWS_AND_CASTS = ("Select", "Transpose", "TBackward", "Permute", "ToCopy", "Unbind", "Slice", "View", "Squeeze")


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
_SPLITS: dict[str, Split] = {
    "linear": _of_linear,
    "bmm": _of_batches,
    "matmul": _of_batches,
    "grouped_mm": _of_groups,
    "_grouped_mm": _of_groups,
}


class ExpertModules(Guarded):
    """Measures the first call of each module with such parameters in chosen steps of a run.

    Only products within the call are seen, and none in a process with compiled code, which a mode would have compiled again.

    Args:
        layers: the model's modules.
        note: receives a sentence on each kind of failure.
    """

    def __init__(self, layers: Iterable[Layer], note: Callable[[str], None]) -> None:
        super().__init__(note)
        self._layers = [layer for layer in layers if _parameters(layer)]
        self._handles = HandleList()
        self._is_hooked = False
        self._measuring: OperandLosses | None = None
        #: By path: the mode while the module runs, None afterwards.
        self._modes: dict[str, ExpertProducts | None] = {}

    def begin_step(self, measuring: OperandLosses | None) -> None:
        """Have the next step measured, unless None is given. The first call adds the hooks."""
        if not self._is_hooked:
            self._is_hooked = True
            for layer in self._layers:
                enter, leave = (partial(function, layer) for function in (self._enter, self._leave))
                module = layer.module
                self._handles.add(module.register_forward_pre_hook(ModelHook(module, enter)))
                self._handles.add(module.register_forward_hook(ModelHook(module, leave), always_call=True))
        self._measuring = measuring
        self._modes.clear()

    def remove_hooks(self) -> None:
        self._measuring = None
        self._handles.remove_all()

    @guarded
    def _enter(self, layer: Layer, *_: Any) -> None:
        if self._measuring is None or layer.path in self._modes or not torch.is_grad_enabled():
            return
        if compiled_graphs():
            self._note(_COMPILED)
            return
        mode = ExpertProducts(_parameters(layer), self._measuring, self.measure)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes[layer.path] = mode

    @guarded
    def _leave(self, layer: Layer, *_: Any) -> None:
        mode = self._modes.get(layer.path)
        if mode is not None:
            self._modes[layer.path] = None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @entrance
    def measure(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function, unseen by the user's modes."""
        function(*args)


def _parameters(layer: Layer) -> list[tuple[str, torch.nn.Parameter]]:
    """Return a module's own parameters with a matrix for each expert, by dotted path."""
    own = registered(layer.module, "_parameters").items()
    return [(f"{layer.path}.{name}".lstrip("."), each) for name, each in own if has_matrices(each)]
