"""Finds the modules that hold an optimizer's parameters, and which of them is the user's model.

A script passes tensors, not the model, to its optimizer, so the search reads all objects that the garbage collector
tracks. It reads only their types, since reading an attribute could load a lazy proxy. In a module it reads only the entries
that torch.nn.Module itself stores in ``__dict__``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from mpinspect.ranges.faults.measure.masters import are_close
from mpinspect.runtime.garbage_collection import living, with_subclasses
from mpinspect.runtime.wrappers import named_children, registered, submodules, unwrapped, wrapped_by

#: Modules alive when the script called ``gc.freeze()``, which hides them from ``gc.get_objects()``.
_frozen: list[weakref.ref[nn.Module]] = []


def living_modules() -> list[nn.Module]:
    """Return every module alive in this process, in no particular order. Takes some 0.2 s for a million objects."""
    found = {id(each): each for each in living(with_subclasses(nn.Module))}
    for reference in _frozen:
        module = reference()
        if module is not None:
            found[id(module)] = module
    return list(found.values())


def remember_before_freezing() -> None:
    """Keep weak references to all modules; call this before ``gc.freeze()``, which hides modules from the search."""
    _frozen[:] = [weakref.ref(module) for module in living_modules()]


class Parameters(nn.Module):
    """A module, never called, that holds the parameters that belong to no other module.

    Args:
        parameters: leaf tensors.
        variables: the script's names for some of the parameters, by id; the others are numbered.
    """

    def __init__(self, parameters: Iterable[Any], variables: Mapping[int, str] | None = None) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            name = (variables or {}).get(id(parameter), "")
            known = name.isidentifier() and name not in self._parameters
            # register_parameter would refuse plain leaf tensors.
            self._parameters[name if known else str(number)] = parameter


class Holders:
    """The modules that hold any of the given parameters, directly or through their submodules.

    Args:
        wanted: ids of the parameters.
        modules: all living modules.
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
        """All of these modules, in no particular order."""
        return list(self._modules.values())

    def is_top(self, module: nn.Module) -> bool:
        """Return whether no other module holds this one."""
        return not self._parents.get(id(module))

    def holds_all(self, module: nn.Module) -> bool:
        """Return whether this module holds all the wanted parameters that are held by any module."""
        return self.found() <= self.held(module)

    def outermost(self, module: nn.Module) -> list[nn.Module]:
        """Return the outermost modules that contain this one, or the module itself if it is outermost."""
        around = [self._modules[key] for key in self._upwards([id(module)]) if key in self._modules]
        return [each for each in around if self.is_top(each)]

    def held(self, module: nn.Module) -> frozenset[int]:
        """Return the ids of all parameters of a module and its submodules, wanted or not."""
        known = self._held.get(id(module))
        if known is None:
            known = self._held[id(module)] = frozenset(parameter_ids(module))
        return known

    def targets(self, called: nn.Module | None) -> list[nn.Module]:
        """Return the modules to inspect, without their wrappers.

        Args:
            called: the outermost module that the script called, one of ``modules``; None if there was no call.
        """
        if called is not None and self.holds_all(called):
            return [unwrapped(self._climbed(called))]
        whole = [module for module in self.modules if self.holds_all(module)]
        if whole:
            return [unwrapped(self._climbed(min(whole, key=lambda module: len(list(submodules(module))))))]
        return self._tops()

    def found(self) -> frozenset[int]:
        """Return the ids of the wanted parameters that any module holds."""
        return frozenset(key for module in self.modules for key in _own_parameters(module)) & self._wanted

    def _climbed(self, module: nn.Module) -> nn.Module:
        """Return the outermost enclosing module with the same parameters, so that names are full paths in the model."""
        around = [
            each
            for each in (self._modules[key] for key in self._upwards([id(module)]))
            if self.held(each) == self.held(module)
        ]
        outermost = [
            each for each in around if not any(key in self._parents.get(id(each), ()) for key in map(id, around))
        ]
        # If two separate outermost modules enclose it, neither is "the" model.
        return outermost[0] if len(outermost) == 1 else module

    def _tops(self) -> list[nn.Module]:
        """Return top-level modules that together hold the wanted parameters, those with the most of them first."""
        tops = sorted(filter(self.is_top, self.modules), key=lambda each: -len(self.held(each) & self._wanted))
        chosen: list[nn.Module] = []
        missing = set(self.found())
        for module in tops:
            if not missing.isdisjoint(self.held(module)):
                chosen.append(unwrapped(module))
                missing -= self.held(module)
        return chosen

    def _upwards(self, keys: Iterable[int]) -> list[int]:
        """Return the ids of these modules and of all modules that contain them, each once."""
        reached = dict.fromkeys(keys)
        waiting = list(reached)
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in reached:
                    reached[parent] = None
                    waiting.append(parent)
        return list(reached)


def are_masters(owner: nn.Module, model: nn.Module) -> bool:
    """Return whether a module's parameters are masters of another's: equal values in other memory, in a wider dtype.

    Reads a few values of each, which waits for the device, but only if all names and shapes agree.
    """
    masters, weights = dict(_named_parameters(owner)), dict(_named_parameters(model))
    if not masters or masters.keys() != weights.keys():
        return False
    pairs = [(master, weights[name]) for name, master in masters.items()]
    if any(is_lazy(each) for pair in pairs for each in pair):
        return False
    sizes = [(master.element_size(), weight.element_size()) for master, weight in pairs]
    return (
        all(master is not weight and master.shape == weight.shape for master, weight in pairs)
        and all(wide >= narrow for wide, narrow in sizes)
        and any(wide > narrow for wide, narrow in sizes)
        and are_close(masters, weights)
    )


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module and its submodules, each once, by their names without wrappers."""
    seen = {id(module)}
    waiting = [("", module)]
    while waiting:
        prefix, each = waiting.pop()
        for name, parameter in registered(each, "_parameters").items():
            if parameter is not None:
                yield f"{prefix}{name}", parameter
        for name, child in named_children(each):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((prefix if wrapped_by(each) is child else f"{prefix}{name}.", child))


def parameter_ids(module: nn.Module) -> Iterator[int]:
    for each in submodules(module):
        yield from _own_parameters(each)


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for _, child in named_children(module)]


def _own_parameters(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in registered(module, "_parameters").values() if parameter is not None]
