"""From an optimizer's parameters to the modules that hold them, and to the one that is the user's model.

Nothing hands us the model: a script gives its optimizer tensors. So modules are looked for among the objects that the garbage
collector knows. Of these only the types are read, never an attribute, so that no lazy proxy is woken; and of modules only what
torch.nn.Module itself keeps in their ``__dict__``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from mpinspect.runtime.wrappers import registered, unwrapped

#: Modules that were alive when the script froze the collector's objects, which hides them from it.
_frozen: list[weakref.ref[nn.Module]] = []


def living_modules() -> list[nn.Module]:
    """Every module alive in this process, in no particular order. Takes some 50 ms where there are a million objects."""
    found = {id(each): each for each in gc.get_objects() if issubclass(type(each), nn.Module)}
    for reference in _frozen:
        module = reference()
        if module is not None:
            found[id(module)] = module
    return list(found.values())


def remember_before_freezing() -> None:
    """Called when ``gc.freeze()`` is about to run: afterwards the collector no longer tells of what is alive now."""
    _frozen[:] = [weakref.ref(module) for module in living_modules()]


class Parameters(nn.Module):
    """Parameters that no module holds: a module that is never called.

    Args:
        parameters: leaf tensors.
        variables: what the script calls some of them, by id; the others have their numbers for names.
    """

    def __init__(self, parameters: Iterable[Any], variables: Mapping[int, str] | None = None) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            name = (variables or {}).get(id(parameter), "")
            known = name.isidentifier() and name not in self._parameters
            # Not register_parameter, which takes nn.Parameter only: a plain leaf tensor is trained just as well.
            self._parameters[name if known else str(number)] = parameter


class Holders:
    """The modules that hold any of some parameters, themselves or through their submodules.

    Args:
        wanted: ids of the parameters.
        modules: all that are alive.
    """

    def __init__(self, wanted: Collection[int], modules: Iterable[nn.Module]) -> None:
        self._wanted = frozenset(wanted)
        alive = {id(module): module for module in modules}
        self._parents: dict[int, list[int]] = {}
        for key, module in alive.items():
            for child in _children(module):
                self._parents.setdefault(id(child), []).append(key)
        owners = [key for key, module in alive.items() if not self._wanted.isdisjoint(_own_parameters(module))]
        self._modules = {key: alive[key] for key in self._upwards(owners)}
        self._held: dict[int, frozenset[int]] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """All of them, in no particular order."""
        return list(self._modules.values())

    def is_top(self, module: nn.Module) -> bool:
        """Whether no other module holds this one."""
        return not self._parents.get(id(module))

    def holds_all(self, module: nn.Module) -> bool:
        """Whether every wanted parameter that any module holds is in this one."""
        return self.found() <= self.held(module)

    def outermost(self, module: nn.Module) -> list[nn.Module]:
        """Of the modules around this one, itself among them, those that no other holds."""
        around = [self._modules[key] for key in self._upwards([id(module)]) if key in self._modules]
        return [each for each in around if self.is_top(each)]

    def held(self, module: nn.Module) -> frozenset[int]:
        """Ids of all parameters of a module, wanted or not, its submodules' among them."""
        known = self._held.get(id(module))
        if known is None:
            known = self._held[id(module)] = frozenset(parameter_ids(module))
        return known

    def targets(self, called: nn.Module | None) -> list[nn.Module]:
        """The modules to inspect, without their wrappers.

        Args:
            called: the outermost module that the script called, one of ``modules``; None where it called none.
        """
        if called is not None and self.holds_all(called):
            return [unwrapped(self._climbed(called))]
        whole = [module for module in self.modules if self.holds_all(module)]
        if whole:
            return [unwrapped(self._climbed(min(whole, key=lambda module: len(list(submodules(module))))))]
        return self._tops()

    def found(self) -> frozenset[int]:
        """Ids of the wanted parameters that any module holds."""
        return frozenset(key for module in self.modules for key in _own_parameters(module)) & self._wanted

    def _climbed(self, module: nn.Module) -> nn.Module:
        """The outermost module around this one that adds no parameter, so that names are those of the whole."""
        around = [
            each
            for each in (self._modules[key] for key in self._upwards([id(module)]))
            if self.held(each) == self.held(module)
        ]
        outermost = [
            each for each in around if not any(key in self._parents.get(id(each), ()) for key in map(id, around))
        ]
        # Two that both hold it, side by side: neither is "the" model.
        return outermost[0] if len(outermost) == 1 else module

    def _tops(self) -> list[nn.Module]:
        """Modules without a parent that together hold what is wanted; those with most of it first."""
        tops = sorted(filter(self.is_top, self.modules), key=lambda each: -len(self.held(each) & self._wanted))
        chosen: list[nn.Module] = []
        missing = set(self.found())
        for module in tops:
            if not missing.isdisjoint(self.held(module)):
                chosen.append(unwrapped(module))
                missing -= self.held(module)
        return chosen

    def _upwards(self, keys: Iterable[int]) -> list[int]:
        """These modules and all that hold them, each once."""
        reached = dict.fromkeys(keys)
        waiting = list(reached)
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in reached:
                    reached[parent] = None
                    waiting.append(parent)
        return list(reached)


def parameter_ids(module: nn.Module) -> Iterator[int]:
    """Ids of a module's parameters, its submodules' among them."""
    for each in submodules(module):
        yield from _own_parameters(each)


def submodules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all within it, each once. Not ``module.modules()``, which a user may have overridden."""
    seen = {id(module)}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        for child in _children(each):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def named_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules right below this one, with the names that it has for them."""
    return [
        (name, child) for name, child in registered(module, "_modules").items() if issubclass(type(child), nn.Module)
    ]


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for _, child in named_children(module)]


def _own_parameters(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in registered(module, "_parameters").values() if parameter is not None]
