"""When to attach, and to what: optimizers as they are made, the first call of what they train, or else a backward.

An optimizer names its parameters, the modules that hold them are found (owners), and each of these gets a hook before its
forward. The first of them that is called with gradients on is the outermost that the script calls: its model is inspected, and
the hooks go.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from mpinspect.run.models import variables
from mpinspect.run.models.attach_lock import Turns
from mpinspect.run.models.compiled import Compiled
from mpinspect.run.models.inspected_models import InspectedModels
from mpinspect.run.models.naming import Label, label
from mpinspect.run.models.owners import Holders, living_modules
from mpinspect.run.models.pending import PendingOptimizer, weakly
from mpinspect.run.seen import Seen
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.hooks import ModelHook
from mpinspect.runtime.wrappers import unwrapped

#: Searches for modules may take this many seconds in all, or that share of the run.
_SEARCH_S, _SEARCH_SHARE = 2.0, 0.01


class Attaching(Guarded):
    """Finds the models and has them inspected.

    Args:
        models: takes them.
        seen: the counts.
        turns: the lock around all of it.
        compiled: what no hook may be put on.
        attached: called after a model was attached.
    """

    def __init__(
        self, models: InspectedModels, seen: Seen, turns: Turns, compiled: Compiled, attached: Callable[[], None]
    ) -> None:
        super().__init__(seen.note)
        self.models = models
        self.active = True
        self.pending: list[PendingOptimizer] = []
        self._seen = seen
        self._attached = attached
        self._turns = turns
        self._compiled = compiled
        self._began = time.monotonic()
        self._searched_s = 0.0

    @guarded
    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made: look for its modules, and wait for the first call of one."""
        parameters = optimizer_parameters(optimizer)
        with self._turns.mine():
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
    def attach(self, waiting: PendingOptimizer, models: Sequence[torch.nn.Module]) -> None:
        """Inspect these models, which a pending optimizer steps, with whatever other optimizer steps the same."""
        with self._turns.mine():
            if waiting.done or not models:
                return
            waiting.settle()
            for model in models:
                holders = Holders(waiting.parameters, [model])
                same = [each for each in self.pending if not each.done and each.parameters <= holders.held(model)]
                for each in same:
                    each.settle()
                known = next((each.labels[id(model)] for each in (waiting, *same) if id(model) in each.labels), Label())
                self._inspect(model, _distinct([waiting, *same]), known)
            rest = waiting.rest_of_it()
            if rest is not None:
                self.pending.append(rest)
                self._attached()

    def attach_without_call(self, waiting: PendingOptimizer) -> None:
        """A backward reaches what this optimizer steps, and none of its modules was seen to be called."""
        called = next((id(root) for root in self._compiled.roots() if id(root) in waiting.targets), None)
        self.attach(waiting, waiting.models(called) or [waiting.own_parameters()])

    def leave_compiled(self) -> None:
        """Something was compiled: take the hooks off it."""
        for waiting in self.pending:
            modules = [module for models in waiting.held if (module := models()) is not None]
            waiting.unhook(self._compiled.among(modules))

    def give_up(self) -> None:
        """Take every hook off that is still waiting."""
        self.active = False
        for each in self.pending:
            each.settle()
        self.pending.clear()

    def inspect_without_optimizer(self, model: torch.nn.Module, known: Label) -> None:
        """A model that a backward reaches, and that no torch optimizer is known for."""
        with self._turns.mine():
            self._inspect(model, [], known)

    def _inspect(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], known: Label) -> None:
        self.models.inspect(model, optimizers, known)
        self._attached()

    def _find_modules(self, waiting: PendingOptimizer) -> None:
        began = time.monotonic()
        if self._searched_s > max(_SEARCH_S, _SEARCH_SHARE * (began - self._began)):
            self._seen.note("so many optimizers were made that the models of the later ones were not looked for")
            return
        holders = Holders(waiting.parameters, living_modules())
        waiting.has_modules = bool(holders.modules)
        waiting.loose = waiting.parameters - holders.found()
        waiting.variables = script_names(holders, waiting.loose)
        if waiting.has_modules:
            self._wait_for_a_call(waiting, holders)
        self._searched_s += time.monotonic() - began

    def _wait_for_a_call(self, waiting: PendingOptimizer, holders: Holders) -> None:
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
            # First of all hooks: sharding's own may exchange the parameters.
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
    """What the script calls the modules and some other objects, by id; a module has its wrapper's name if it has none."""
    inside = {id(module): id(unwrapped(module)) for module in holders.modules}
    found = variables.names_of(inside.keys() | set(others), (torch.nn.Module, torch.Tensor))
    return {inside.get(key, key): name for key, name in found.items()} | found


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Ids of what an optimizer steps."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _distinct(waiting: Sequence[PendingOptimizer]) -> list[torch.optim.Optimizer]:
    """The living ones, of those with the very same parameters the last: one of them wraps the others and need not step itself."""
    latest = {each.parameters: optimizer for each in waiting if (optimizer := each.optimizer) is not None}
    return list(latest.values())
