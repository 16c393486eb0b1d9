"""Knows the modules that torch.compile has compiled. A hook of ours would not run there, and removing it would recompile them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeGuard

from torch import nn

from mpinspect.run.models.owners import submodules


class Compiled:
    """The modules given to torch.compile, and the functions, which compile the modules that they call; all held weakly."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._functions: list[weakref.ref[FunctionType]] = []
        self._owners: list[weakref.ref[Any]] = []

    def add(self, given: object) -> None:
        """Keep what was given to ``torch.compile``: a module, a method of one, or any function."""
        owner = given.__self__ if isinstance(given, MethodType) else None
        function = given.__func__ if isinstance(given, MethodType) else given
        module = given if _is_module(given) else owner
        if _is_module(module):
            self._modules[id(module)] = weakref.ref(module)
        elif isinstance(function, FunctionType):
            self._functions.append(weakref.ref(function))
            if owner is not None and hasattr(type(owner), "__weakref__"):
                self._owners.append(weakref.ref(owner))

    def roots(self) -> list[nn.Module]:
        """Return the outermost compiled modules that are still alive, as far as calls of torch.compile show them."""
        self._modules = {key: reference for key, reference in self._modules.items() if reference() is not None}
        living = [module for reference in self._modules.values() if (module := reference()) is not None]
        return [*living, *self._called_by_functions()]

    def among(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Return the ids of those that are compiled, themselves or within a compiled module."""
        modules = list(modules)
        tops = [*self.roots(), *(module for module in modules if _is_marked(module))]
        covered = {id(part) for top in tops for part in submodules(top)}
        return frozenset(id(module) for module in modules if id(module) in covered)

    def _called_by_functions(self) -> Iterator[nn.Module]:
        owners = [owner for reference in self._owners if (owner := reference()) is not None]
        for reference in self._functions:
            function = reference()
            if function is not None:
                yield from filter(_is_module, _named_in(function, owners))


def _named_in(function: FunctionType, owners: list[Any]) -> Iterator[Any]:
    """Yield the present values of a function's names: closed over, global, or attributes of the object whose method it is."""
    names = function.__code__.co_names
    for name in names:
        yield function.__globals__.get(name)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        if getattr(type(owner), function.__name__, None) is function and isinstance(attributes, dict):
            yield from (attributes.get(name) for name in names)


def _is_module(value: object) -> TypeGuard[nn.Module]:
    return issubclass(type(value), nn.Module)


def _is_marked(module: nn.Module) -> bool:
    """Whether a module bears the mark of ``module.compile()``, or is the wrapper that ``torch.compile(module)`` returns."""
    attributes = object.__getattribute__(module, "__dict__")
    return attributes.get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule"
