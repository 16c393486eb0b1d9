"""Why a step was skipped: the first gradient that was not finite, or the module that broke the forward.

Costs one entry in a dict for each gradient that arrives. Tensors are looked at only after a step was skipped: the gradients
at once, since a skipped step leaves its infinities in ``.grad``. A forward is gone by then, so after the first one that was
not finite the modules of the *next* forward are looked at, until one is finite again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mpinspect.training.closures import held_parameters
from mpinspect.training.forward_search import ForwardSearch
from mpinspect.training.skipped_steps import NonFinite


class ModelExplainer:
    """Finds the culprit in a model.

    Args:
        model: whose parameters and modules are named.
        stepped: the model's parameters that an optimizer steps; by default those it holds. For FP32 master weights it
            gives the parameters that they are masters of.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stepped: Callable[[torch.optim.Optimizer], Iterable[torch.Tensor]] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._stepped = stepped or held_parameters
        #: By identity: when the parameter's last gradient arrived.
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
        """The first of the optimizer's gradients, in the order the backward made them, that is not finite. Waits for the GPU."""
        parameters = [parameter for parameter in self._stepped(optimizer) if parameter.grad is not None]
        never = max(self._arrivals.values(), default=0) + 1
        parameters.sort(key=lambda parameter: self._arrivals.get(id(parameter), never))
        for parameter, finite in zip(parameters, _finite([parameter.grad for parameter in parameters]), strict=True):
            if not finite:
                name = self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                return NonFinite(_layer(name), name, _kind(parameter.grad))
        return None

    def forward(self) -> NonFinite | None:
        """Return what made the forward not finite: a weight that is not, a module seen in this forward, or not known yet."""
        model = self._model()
        if model is None:
            return None
        poisoned = _first_poisoned(model)
        if poisoned is not None:
            return poisoned
        return self._search.found() or self._search.begin()

    def step_ended(self, *, forward_finite: bool) -> None:
        """A step is over: what was seen of its forward is let go, and the search ends once a forward is finite."""
        if forward_finite:
            self._search.end()
        self._search.forget()

    def detach(self) -> None:
        """Take every hook off."""
        self._search.end()
        for handle in self._handles:
            handle.remove()


def _layer(parameter: str) -> str:
    """Return the module that a parameter belongs to; that of a parametrized one is the module it is computed for."""
    module = parameter.rpartition(".")[0]
    return f".{module}".partition(".parametrizations")[0].lstrip(".")


def _arrival(arrivals: dict[int, int], count: Iterator[int]) -> Callable[[torch.Tensor], None]:
    def gradient_arrived(parameter: torch.Tensor) -> None:
        arrivals[id(parameter)] = next(count)

    return gradient_arrived


def _first_poisoned(model: torch.nn.Module) -> NonFinite | None:
    named = [*model.named_parameters(), *model.named_buffers()]
    # FP8 has no isfinite, and weights in it are not what an optimizer steps.
    floating = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.element_size() > 1]
    for (name, tensor), finite in zip(floating, _finite([tensor for _, tensor in floating]), strict=True):
        # A mask is infinite on purpose.
        if not finite and (isinstance(tensor, torch.nn.Parameter) or tensor.isnan().any()):
            return NonFinite(_layer(name), name, _kind(tensor), f"{name!r} itself is not finite")
    return None


# -- finite or not ------------------------------------------------------------------------------------------------------


def _finite(tensors: list[Any]) -> list[bool]:
    """Return which are finite; one wait for the GPU for all."""
    flags = [torch.isfinite(_values(tensor)).all() for tensor in tensors]
    devices = {flag.device for flag in flags}
    if len(devices) > 1:
        flags = [flag.cpu() for flag in flags]
    found: list[bool] = torch.stack(flags).tolist() if flags else []
    return found


def _kind(tensor: Any) -> str:
    return "nan" if bool(torch.isnan(_values(tensor)).any()) else "inf"


def _values(tensor: torch.Tensor) -> torch.Tensor:
    # This process's part of a distributed one: a collective would hang where other ranks do not look.
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return found.coalesce().values() if found.is_sparse else found
