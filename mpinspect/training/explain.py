"""Finds why a step was skipped: the first non-finite gradient, or the module that made the forward non-finite.

Each gradient costs one dict entry when it arrives. Tensors are read only after a step was skipped. Gradients are read at once,
since a skipped step leaves its infinities in ``.grad``. The forward's activations have been freed by then. After a
non-finite forward, therefore, the modules of the *next* forwards are checked, until a forward is finite again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mpinspect.runtime.distributed import local_part
from mpinspect.training.closures import held_parameters
from mpinspect.training.forward_search import ForwardSearch
from mpinspect.training.skipped_steps import NonFinite


class ModelExplainer:
    """Finds the parameter or module of a model that caused a skipped step.

    Args:
        model: the model whose parameters and modules are named.
        stepped: function that returns the model's parameters that an optimizer steps; by default those it holds. With FP32
            master weights, it returns the model parameters of these masters.
    """

    def __init__(
        self, model: torch.nn.Module, stepped: Callable[[torch.optim.Optimizer], Iterable[torch.Tensor]] | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self._stepped = stepped or held_parameters
        #: By the parameter's id: the position of its last gradient in the order of arrival.
        self._arrivals: dict[int, int] = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._search = ForwardSearch(model)
        count = itertools.count()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_arrival(self._arrivals, count))  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite | None:
        """Return the optimizer's first non-finite gradient in the order of the backward. Waits for the GPU."""
        parameters = [parameter for parameter in self._stepped(optimizer) if parameter.grad is not None]
        never = max(self._arrivals.values(), default=0) + 1
        parameters.sort(key=lambda parameter: self._arrivals.get(id(parameter), never))
        for parameter, finite in zip(parameters, _finite([parameter.grad for parameter in parameters]), strict=True):
            if not finite:
                name = self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                return NonFinite(_layer(name), name, _kind(parameter.grad))
        return None

    def forward(self) -> NonFinite | None:
        """Return the non-finite weight or module behind a non-finite forward; if unknown, begin a search for it.

        Waits for the GPU.
        """
        model = self._model()
        if model is None:
            return None
        poisoned = _first_poisoned(model)
        if poisoned is not None:
            return poisoned
        return self._search.found() or self._search.begin()

    def step_ended(self, *, forward_finite: bool) -> None:
        """Discard the step's recorded activations, and end the search if the forward was finite."""
        if forward_finite:
            self._search.end()
        self._search.forget()

    def detach(self) -> None:
        self._search.end()
        for handle in self._handles:
            handle.remove()


def _layer(parameter: str) -> str:
    """Return the path of a parameter's module; for a parametrized weight, the module that uses the weight."""
    module = parameter.rpartition(".")[0]
    return f".{module}".partition(".parametrizations")[0].lstrip(".")


def _arrival(arrivals: dict[int, int], count: Iterator[int]) -> Callable[[torch.Tensor], None]:
    def gradient_arrived(parameter: torch.Tensor) -> None:
        arrivals[id(parameter)] = next(count)

    return gradient_arrived


def _first_poisoned(model: torch.nn.Module) -> NonFinite | None:
    named = [*model.named_parameters(), *model.named_buffers()]
    # FP8 has no isfinite, and optimizers do not update FP8 weights.
    floating = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.element_size() > 1]
    for (name, tensor), finite in zip(floating, _finite([tensor for _, tensor in floating]), strict=True):
        # A buffer with infinities but no NaN is taken for a mask.
        if not finite and (isinstance(tensor, torch.nn.Parameter) or tensor.isnan().any()):
            return NonFinite(_layer(name), name, _kind(tensor), f"{name!r} itself is not finite")
    return None


# -- finite or not ------------------------------------------------------------------------------------------------------


def _finite(tensors: list[Any]) -> list[bool]:
    """Return for each tensor whether all its values are finite. Waits for the GPU once for all tensors."""
    if not tensors:
        return []
    flags = [torch.isfinite(_values(tensor)).all() for tensor in tensors]
    if len({flag.device for flag in flags}) > 1:
        flags = [flag.cpu() for flag in flags]
    found: list[bool] = torch.stack(flags).tolist()
    return found


def _kind(tensor: Any) -> str:
    return "nan" if bool(torch.isnan(_values(tensor)).any()) else "inf"


def _values(tensor: torch.Tensor) -> torch.Tensor:
    # Use only the local shard of a distributed tensor: a collective would hang if other ranks do not check.
    found = local_part(tensor).detach()
    if found.is_sparse:
        return found.coalesce().values()
    return found
