"""Tracks the modules compiled by torch.compile: hooks do not run inside them, and removing a hook recompiles them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeGuard

from torch import nn

from mpinspect.runtime.hooks import compiler_is_off
from mpinspect.runtime.wrappers import compiled_functions, submodules


class Compiled:
    """The modules and functions passed to torch.compile, held weakly; a function compiles the modules that it calls."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._functions: list[weakref.ref[FunctionType]] = []
        self._owners: list[weakref.ref[Any]] = []

    def add(self, given: object) -> None:
        """Record the argument of ``torch.compile``: a module, a method of an object, or a function."""
        owner, function = None, given
        if isinstance(given, MethodType):
            owner, function = given.__self__, given.__func__
        module = given if _is_module(given) else owner
        if _is_module(module):
            self._modules[id(module)] = weakref.ref(module)
        elif isinstance(function, FunctionType):
            self._functions.append(weakref.ref(function))
            if owner is not None and hasattr(type(owner), "__weakref__"):
                self._owners.append(weakref.ref(owner))

    def roots(self) -> list[nn.Module]:
        """Return the living modules passed to torch.compile, and those that the compiled functions refer to."""
        self._modules = {key: reference for key, reference in self._modules.items() if reference() is not None}
        living = [module for reference in self._modules.values() if (module := reference()) is not None]
        return [*living, *self._called_by_functions()]

    def among(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Return the ids of the given modules that are compiled or are inside a compiled module, as they would run now."""
        if compiler_is_off():
            return frozenset()
        modules = list(modules)
        tops = [*self.roots(), *(module for module in modules if compiled_functions(module))]
        covered = {id(part) for top in tops for part in submodules(top)}
        return frozenset(id(module) for module in modules if id(module) in covered)

    def _called_by_functions(self) -> Iterator[nn.Module]:
        owners = [owner for reference in self._owners if (owner := reference()) is not None]
        for reference in self._functions:
            function = reference()
            if function is not None:
                yield from filter(_is_module, _named_in(function, owners))


def _named_in(function: FunctionType, owners: list[Any]) -> Iterator[Any]:
    """Yield the current values of the globals, closure variables and ``self`` attributes that a function refers to."""
    names = function.__code__.co_names
    for name in names:
        yield function.__globals__.get(name)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable is not bound yet
            continue
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        if getattr(type(owner), function.__name__, None) is function and isinstance(attributes, dict):
            yield from (attributes.get(name) for name in names)


def _is_module(value: object) -> TypeGuard[nn.Module]:
    return issubclass(type(value), nn.Module)
