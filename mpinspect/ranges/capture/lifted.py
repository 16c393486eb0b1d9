"""Hooks that are off while nothing is to be seen: one that returns at once costs a microsecond a call and more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch


class LiftedHooks:
    """Takes hooks off their modules and parameters, and puts them back under the same numbers."""

    def __init__(self) -> None:
        self._modules: list[tuple[torch.nn.Module, int, Any]] = []
        self._parameters: list[tuple[torch.Tensor, int, Any]] = []

    def lift_modules(self, hooks: Iterable[tuple[torch.nn.Module, int]]) -> None:
        """Take forward hooks off."""
        for module, number in hooks:
            hook = module._forward_hooks.pop(number, None)
            if hook is not None:
                module._forward_hooks_with_kwargs.pop(number, None)
                self._modules.append((module, number, hook))

    def lift_parameters(self, hooks: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Take gradient hooks off those that have no other: among others a hook keeps its place."""
        for parameter, number in hooks:
            known: Any = parameter._backward_hooks
            if known is not None and len(known) == 1 and number in known:
                self._parameters.append((parameter, number, known.pop(number)))

    def put_back(self) -> None:
        """Put all of them back: on modules behind the hooks that came since, on parameters before them."""
        modules, self._modules = self._modules, []
        for module, number, hook in modules:
            module._forward_hooks[number] = hook
            module._forward_hooks_with_kwargs[number] = True
        parameters, self._parameters = self._parameters, []
        for parameter, number, hook in parameters:
            known: Any = parameter._backward_hooks
            if known is not None:
                # Autograd calls them in the order in which they came into the dictionary, whatever that calls its order.
                since = list(known.items())
                known.clear()
                known[number] = hook
                known.update(since)

    def forget(self, modules: Collection[int] | None = None) -> None:
        """Leave those of these modules, by id, off for good; None: all."""
        if modules is None:
            self._modules.clear()
            self._parameters.clear()
        else:
            self._modules = [each for each in self._modules if id(each[0]) not in modules]
