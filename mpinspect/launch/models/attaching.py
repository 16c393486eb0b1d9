"""When to attach, and to what: optimizers as they are made, the first call of what they train, or else a backward.

An optimizer names its parameters, the modules that hold them are found (owners), and each of these gets a hook before its
forward. The first of them that is called with gradients on is the outermost that the script calls: its model is inspected, and
the hooks go.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpinspect.capture.guard import Guarded, guarded
from mpinspect.capture.hooks import HandleList, ModelHook
from mpinspect.launch.models.inspected import InspectedModels
from mpinspect.launch.models.owners import Holders, living_modules
from mpinspect.launch.seen import Seen

#: Searches for modules may take this many seconds in all, or that share of the run.
_SEARCH_S, _SEARCH_SHARE = 2.0, 0.01


class PendingOptimizer:
    """An optimizer whose model has not been called yet.

    Args:
        optimizer: held weakly.
        parameters: ids of what it steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.parameters = parameters
        self.hooks = HandleList()
        self.done = False
        #: Whether any module holds its parameters.
        self.has_modules = False
        #: What to inspect if the module of this id is the first that is called; under None: without any call.
        self.targets: dict[int | None, list[weakref.ref[torch.nn.Module]]] = {}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if it is still alive."""
        return self._optimizer()

    def models(self, called: int | None) -> list[torch.nn.Module]:
        """What to inspect, as far as it is still alive."""
        references = self.targets.get(called, self.targets.get(None, []))
        return [module for reference in references if (module := reference()) is not None]

    def settle(self) -> None:
        """Nothing is to be waited for any more."""
        self.done = True
        self.hooks.remove_all()


class Attaching(Guarded):
    """Finds the models and has them inspected.

    Args:
        models: takes them.
        seen: the counts.
        attached: called after a model was attached.
    """

    def __init__(self, models: InspectedModels, seen: Seen, attached: Callable[[], None]) -> None:
        super().__init__(seen.note)
        self.models = models
        self.active = True
        self.pending: list[PendingOptimizer] = []
        self._seen = seen
        self._attached = attached
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._searched_s = 0.0

    @guarded
    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made: look for its modules, and wait for the first call of one."""
        parameters = optimizer_parameters(optimizer)
        with self._lock:
            self.pending = [each for each in self.pending if not each.done and each.optimizer is not None]
            known = self.models.holding(parameters)
            if known is not None:
                model = known.inspector.model
                if model is not None:
                    self._inspect(model, [optimizer])
                return
            waiting = PendingOptimizer(optimizer, parameters)
            self.pending.append(waiting)
            self._find_modules(waiting)

    @guarded
    def attach(self, waiting: PendingOptimizer, models: Sequence[torch.nn.Module]) -> None:
        """Inspect these models, which a pending optimizer steps, with whatever other optimizer steps the same."""
        with self._lock:
            if waiting.done or not models:
                return
            waiting.settle()
            for model in models:
                holders = Holders(waiting.parameters, [model])
                same = [each for each in self.pending if not each.done and each.parameters <= holders.held(model)]
                for each in same:
                    each.settle()
                self._inspect(model, _distinct([waiting, *same]))

    def give_up(self) -> None:
        """Take every hook off that is still waiting."""
        self.active = False
        for each in self.pending:
            each.settle()
        self.pending.clear()

    def inspect_without_optimizer(self, model: torch.nn.Module) -> None:
        """A model that a backward reaches, and that no torch optimizer is known for."""
        with self._lock:
            self._inspect(model, [])

    def _inspect(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models.inspect(model, optimizers)
        self._attached()

    def _find_modules(self, waiting: PendingOptimizer) -> None:
        began = time.monotonic()
        if self._searched_s > max(_SEARCH_S, _SEARCH_SHARE * (began - self._began)):
            self._seen.note("so many optimizers were made that the models of the later ones were not looked for")
            return
        holders = Holders(waiting.parameters, living_modules())
        waiting.has_modules = bool(holders.modules)
        if waiting.has_modules:
            self._wait_for_a_call(waiting, holders)
        self._searched_s += time.monotonic() - began

    def _wait_for_a_call(self, waiting: PendingOptimizer, holders: Holders) -> None:
        waiting.targets[None] = _weakly(holders.targets(None))
        for module in holders.modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if holders.holds_all(module):
                waiting.targets[id(module)] = _weakly(holders.targets(module))
            called = functools.partial(self._called, waiting, id(module), holders.is_top(module))
            # First of all hooks: sharding's own may exchange the parameters.
            handle = module.register_forward_pre_hook(ModelHook(module, called), prepend=True)
            waiting.hooks.add(handle)

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


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Ids of what an optimizer steps."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _distinct(waiting: Sequence[PendingOptimizer]) -> list[torch.optim.Optimizer]:
    """The living ones, of those with the very same parameters the last: one of them wraps the others and need not step itself."""
    latest = {each.parameters: optimizer for each in waiting if (optimizer := each.optimizer) is not None}
    return list(latest.values())


def _weakly(modules: Sequence[torch.nn.Module]) -> list[weakref.ref[torch.nn.Module]]:
    return [weakref.ref(module) for module in modules]
