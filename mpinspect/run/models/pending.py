"""Optimizers whose models have not been called yet: what is waited for, and what is inspected when it comes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from mpinspect.run.models.naming import Label
from mpinspect.run.models.owners import Parameters


class PendingOptimizer:
    """An optimizer whose model has not been called yet.

    Args:
        optimizer: held weakly.
        parameters: ids of what it steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.parameters = parameters
        #: Hooks by the id of their module.
        self.hooks: dict[int, RemovableHandle] = {}
        self.done = False
        #: Whether any module holds its parameters.
        self.has_modules = False
        self.held: list[weakref.ref[torch.nn.Module]] = []
        #: What to inspect if the module of this id is the first that is called; under None: without any call.
        self.targets: dict[int | None, list[weakref.ref[torch.nn.Module]]] = {}
        #: What the targets are called, by their ids, and what the script calls any of its objects.
        self.labels: dict[int, Label] = {}
        self.variables: Mapping[int, str] = {}
        #: Of its parameters those that no module holds.
        self.loose: frozenset[int] = frozenset()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if it is still alive."""
        return self._optimizer()

    def models(self, called: int | None) -> list[torch.nn.Module]:
        """What to inspect, as far as it is still alive."""
        references = self.targets.get(called, self.targets.get(None, []))
        return [module for reference in references if (module := reference()) is not None]

    def own_parameters(self) -> Parameters:
        """A module of those that no module holds."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        every = [parameter for group in groups for parameter in group["params"]]
        return Parameters((each for each in every if id(each) in self.loose), self.variables)

    def rest_of_it(self) -> PendingOptimizer | None:
        """What is still to be waited for once the modules are attached to: their backward, since they are never called."""
        optimizer = self.optimizer
        if optimizer is None or not self.loose or self.loose == self.parameters:
            return None
        rest = PendingOptimizer(optimizer, self.loose)
        rest.loose, rest.variables, rest.has_modules = self.loose, self.variables, True
        return rest

    def unhook(self, modules: Collection[int]) -> None:
        """Take the hooks off these modules, by id."""
        for key in modules:
            if key in self.hooks:
                self.hooks.pop(key).remove()

    def settle(self) -> None:
        """Nothing is to be waited for any more."""
        self.done = True
        self.unhook(list(self.hooks))


def weakly(modules: Sequence[torch.nn.Module]) -> list[weakref.ref[torch.nn.Module]]:
    """References that keep none of them alive."""
    return [weakref.ref(module) for module in modules]
