"""Attaches to an optimizer's model at the first call of a module that holds the optimizer's parameters.

For each new optimizer, ``owners`` finds the modules that hold its parameters, and each of them gets a forward pre-hook.
The first of these modules called with gradients enabled is the outermost that the script calls: its model is inspected,
and the hooks are removed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mpinspect.run.models.attach_lock import AttachLock
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.inspected_models import InspectedModels
from mpinspect.run.models.naming import Label, label, names_of
from mpinspect.run.models.owners import Holders, Parameters, living_modules
from mpinspect.run.outcome import Seen
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.hooks import ModelHook
from mpinspect.runtime.wrappers import unwrapped

#: Most searches for modules, some 0.03 s each, plus one for each _STEPS_A_SEARCH optimizer steps. A limit in seconds would
#: make the report depend on the machine's load.
_MOST_SEARCHES, _STEPS_A_SEARCH = 64, 256


class PendingOptimizer:
    """An optimizer whose model has not been called yet.

    Args:
        optimizer: the optimizer, held weakly.
        parameters: ids of the parameters that it steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.parameters = parameters
        #: Hooks, by the id of their module.
        self.hooks: dict[int, RemovableHandle] = {}
        self.done = False
        #: Whether any module holds its parameters.
        self.has_modules = False
        self.held: list[weakref.ref[torch.nn.Module]] = []
        #: The modules to inspect, by the id of the module called first; the entry None holds for any other call or none.
        self.targets: dict[int | None, list[weakref.ref[torch.nn.Module]]] = {}
        #: Labels of the targets, and the script's variables, by id.
        self.labels: dict[int, Label] = {}
        self.variables: Mapping[int, str] = {}
        #: Ids of the parameters that no module holds.
        self.loose: frozenset[int] = frozenset()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if it is still alive."""
        return self._optimizer()

    def models(self, called: int | None) -> list[torch.nn.Module]:
        """Return the living modules to inspect when the module with id ``called`` is called first; None means no call."""
        references = self.targets.get(called, self.targets.get(None, []))
        return [module for reference in references if (module := reference()) is not None]

    def own_parameters(self) -> Parameters:
        """Return a module made of the parameters that no other module holds."""
        every = []
        if self.optimizer is not None:
            every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return Parameters((each for each in every if id(each) in self.loose), self.variables)

    def loose_part(self) -> PendingOptimizer | None:
        """Return an entry for the parameters that no module holds, which stay pending until a backward, or None."""
        optimizer = self.optimizer
        if optimizer is None or not self.loose or self.loose == self.parameters:
            return None
        rest = PendingOptimizer(optimizer, self.loose)
        rest.loose, rest.variables, rest.has_modules = self.loose, self.variables, True
        return rest

    def unhook(self, modules: Collection[int]) -> None:
        """Remove the hooks from these modules, given by id."""
        for key in modules:
            if key in self.hooks:
                self.hooks.pop(key).remove()

    def settle(self) -> None:
        """Mark the optimizer as done and remove its hooks."""
        self.done = True
        self.unhook(list(self.hooks))


def weakly(modules: Sequence[torch.nn.Module]) -> list[weakref.ref[torch.nn.Module]]:
    """Return weak references to modules."""
    return [weakref.ref(module) for module in modules]


class Attacher(Guarded):
    """Finds the models of optimizers and has them inspected.

    Args:
        models: inspects the models.
        seen: the counts to update.
        lock: held while attaching and detaching.
        compiled: knows the modules that must not be hooked.
        attached: called after a model has been attached.
    """

    def __init__(
        self, models: InspectedModels, seen: Seen, lock: AttachLock, compiled: Compiled, attached: Callable[[], None]
    ) -> None:
        super().__init__(seen.note)
        self.models = models
        self.active = True
        self.pending: list[PendingOptimizer] = []
        self._seen, self._attached, self._lock, self._compiled = seen, attached, lock, compiled
        self._searches = 0

    @guarded
    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the modules of a new optimizer and hook them until one is called."""
        parameters = optimizer_parameters(optimizer)
        with self._lock.held():
            self.pending = [each for each in self.pending if not each.done and each.optimizer is not None]
            known = self.models.holding(parameters)
            if known is not None:
                model = known.inspector.model
                if model is not None:
                    self._inspect(model, [optimizer], known.label)
                return
            if self.models.is_full:
                self.models.note_that_it_is_full()
                return
            waiting = PendingOptimizer(optimizer, parameters)
            self.pending.append(waiting)
            self._find_modules(waiting)

    @guarded
    def attach(
        self, waiting: PendingOptimizer, models: Sequence[torch.nn.Module], others: Sequence[PendingOptimizer] = ()
    ) -> None:
        """Inspect these models, for this optimizer, ``others`` and all pending ones whose parameters they hold."""
        with self._lock.held():
            if waiting.done or not models:
                return
            waiting.settle()
            for model in models:
                held = Holders(waiting.parameters, [model]).held(model)
                pending = [each for each in self.pending if not each.done]
                same = [each for each in pending if each in others or each.parameters <= held]
                for each in same:
                    each.settle()
                known = next((each.labels[id(model)] for each in (waiting, *same) if id(model) in each.labels), Label())
                self._inspect(model, _distinct([waiting, *same]), known)
            loose = waiting.loose_part()
            if loose is not None:
                self.pending.append(loose)
                self._attached()

    def attach_without_call(self, waiting: PendingOptimizer) -> None:
        """Inspect the models of an optimizer when a backward reaches its parameters without any of our hooks having run."""
        called = next((id(root) for root in self._compiled.roots() if id(root) in waiting.targets), None)
        self.attach(waiting, waiting.models(called) or [waiting.own_parameters()])

    def leave_compiled(self) -> None:
        """Remove the hooks from modules that have just been compiled."""
        for waiting in self.pending:
            modules = [module for models in waiting.held if (module := models()) is not None]
            waiting.unhook(self._compiled.among(modules))

    def give_up(self) -> None:
        """Remove all remaining hooks and stop attaching."""
        self.active = False
        for each in self.pending:
            each.settle()
        self.pending.clear()

    def inspect_without_optimizer(self, model: torch.nn.Module, known: Label) -> None:
        """Inspect a model that a backward reaches but no known optimizer steps."""
        with self._lock.held():
            self._inspect(model, [], known)

    def inspect_inference(self, model: torch.nn.Module, before_forward: Callable[[], None]) -> None:
        """Inspect a model that the script calls without training it."""
        with self._lock.held():
            if self.models.is_full:
                self.models.note_that_it_is_full()
                return
            holders = Holders(frozenset(map(id, model.parameters())), living_modules())
            known = label(unwrapped(model), holders, script_names(holders, ()))
            self.models.inspect(unwrapped(model), [], known, before_forward)

    def _inspect(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], known: Label) -> None:
        self.models.inspect(model, optimizers, known)
        self._attached()

    def _find_modules(self, waiting: PendingOptimizer) -> None:
        if self._searches >= _MOST_SEARCHES + self._seen.steps // _STEPS_A_SEARCH:
            self._seen.note("too many optimizers were made: the models of the later ones were not searched for")
            return
        self._searches += 1
        holders = Holders(waiting.parameters, living_modules())
        waiting.has_modules = bool(holders.modules)
        waiting.loose = waiting.parameters - holders.found()
        waiting.variables = script_names(holders, waiting.loose)
        if waiting.has_modules:
            self._hook(waiting, holders)

    def _hook(self, waiting: PendingOptimizer, holders: Holders) -> None:
        waiting.held = weakly(holders.modules)
        compiled = self._compiled.among(holders.modules)
        self._note_targets(waiting, None, holders.targets(None), holders)
        for module in holders.modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if holders.holds_all(module):
                self._note_targets(waiting, id(module), holders.targets(module), holders)
            if id(module) in compiled:
                continue
            called = functools.partial(self._called, waiting, id(module), holders.is_top(module))
            # Before all other hooks: the hooks of sharding may replace the parameters.
            handle = module.register_forward_pre_hook(ModelHook(module, called), prepend=True)
            waiting.hooks[id(module)] = handle

    def _note_targets(
        self, waiting: PendingOptimizer, called: int | None, targets: Sequence[torch.nn.Module], holders: Holders
    ) -> None:
        waiting.targets[called] = weakly(targets)
        for target in targets:
            if id(target) not in waiting.labels:
                waiting.labels[id(target)] = label(target, holders, waiting.variables)

    @guarded
    def _called(self, waiting: PendingOptimizer, module: int, is_top: bool, *_: Any) -> None:
        if not self.active or waiting.done:
            return
        if not torch.is_grad_enabled():
            self._seen.forwards_without_gradient += is_top
            return
        if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        self.attach(waiting, waiting.models(module))


def script_names(holders: Holders, others: Collection[int]) -> dict[int, str]:
    """Return the script's names for modules and other objects, by id; an unnamed module gets its wrapper's name."""
    inside = {id(module): id(unwrapped(module)) for module in holders.modules}
    found = names_of(inside.keys() | set(others), (torch.nn.Module, torch.Tensor))
    return {inside.get(key, key): name for key, name in found.items()} | found


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the ids of the parameters that an optimizer steps."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _distinct(waiting: Sequence[PendingOptimizer]) -> list[torch.optim.Optimizer]:
    """Return the living optimizers; if several have the same parameters, only the last, which wraps the others."""
    latest = {each.parameters: optimizer for each in waiting if (optimizer := each.optimizer) is not None}
    return list(latest.values())
