"""What there is to watch in a model: its layers and parameters under their dotted paths."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch.nn.parameter import is_lazy

from mpinspect.session import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    UPDATE,
    WEIGHT,
    WEIGHT_GRADIENT,
    TensorInfo,
    TensorKey,
)

#: The kinds that a parameter has, and those that a module's output has.
PARAMETER_KINDS = (WEIGHT_GRADIENT, WEIGHT, UPDATE)
OUTPUT_KINDS = (ACTIVATION_GRADIENT, ACTIVATION)

#: Layers of torch whose submodules are never called: they count as leaves themselves.
_SEALED = (torch.nn.MultiheadAttention,)


@dataclass(frozen=True)
class Layer:
    """A module that is hooked.

    ``is_leaf``: it has no submodules that are called. ``counted``: its outputs are counted where output kinds are captured.
    """

    path: str
    module: torch.nn.Module
    is_leaf: bool
    counted: bool

    def __str__(self) -> str:
        return repr(self.path) if self.path else "the model itself"

    @cached_property
    def gradient_key(self) -> TensorKey:
        """Of the gradients at its outputs; made once, since every gradient that arrives asks for it."""
        return TensorKey(self.path, ACTIVATION_GRADIENT)


@dataclass(frozen=True)
class WatchedParameter:
    """A parameter under its first name. ``counted``: whether its kinds are captured (integers have no exponents)."""

    name: str
    owner: str
    parameter: torch.nn.Parameter
    counted: bool

    def __str__(self) -> str:
        return repr(self.name)

    @cached_property
    def gradient_key(self) -> TensorKey:
        """Of its gradients; made once."""
        return TensorKey(self.name, WEIGHT_GRADIENT)


class Selection:
    """Which dotted paths are wanted: shell patterns (``encoder.*``), ``*`` matching dots too.

    Args:
        include: patterns, one string or several; None for everything.
        exclude: patterns, taken away after that.
    """

    def __init__(self, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None) -> None:
        self.include = _patterns(include)
        self.exclude = _patterns(exclude) or ()
        self._matched: set[str] = set()

    def wants(self, *names: str) -> bool:
        """Whether any of a tensor's names (its own, its module's) is included and none excluded."""
        included = self.include is None or self._matches(self.include, names)
        return included and not self._matches(self.exclude, names)

    def names_exactly(self, path: str) -> bool:
        """Whether a pattern without wildcards names this path: so a container's outputs are asked for."""
        return self.include is not None and path in self.include and not self._matches(self.exclude, (path,))

    def unmatched(self) -> list[str]:
        """Patterns that matched nothing so far."""
        return [pattern for pattern in (*(self.include or ()), *self.exclude) if pattern not in self._matched]

    def _matches(self, patterns: Collection[str], names: tuple[str, ...]) -> bool:
        hits = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        self._matched.update(hits)
        return bool(hits)


def find_layers(model: torch.nn.Module, selection: Selection) -> list[Layer]:
    """Every module once, under its first name, the model itself being ""."""
    sealed_parts = {id(part) for module in model.modules() if isinstance(module, _SEALED) for part in module.modules()}
    sealed_parts -= {id(module) for module in model.modules() if isinstance(module, _SEALED)}
    layers = []
    for path, module in model.named_modules():
        if id(module) in sealed_parts:
            continue
        is_leaf = isinstance(module, _SEALED) or next(module.children(), None) is None
        counted = (is_leaf and selection.wants(path)) or selection.names_exactly(path)
        layers.append(Layer(path, module, is_leaf, counted))
    return layers


def find_parameters(model: torch.nn.Module, selection: Selection) -> list[WatchedParameter]:
    """Every parameter once, under its first name (shared ones have several)."""
    return [
        WatchedParameter(
            name,
            owner := name.rpartition(".")[0],
            parameter,
            selection.wants(name, owner) and (parameter.is_floating_point() or parameter.is_complex()),
        )
        for name, parameter in model.named_parameters()
    ]


def describe(
    layers: Iterable[Layer], parameters: Iterable[WatchedParameter], kinds: Collection[str]
) -> list[TensorInfo]:
    """The tensors that will be counted, in the model's order."""
    layers = list(layers)
    owned: dict[str, list[WatchedParameter]] = {}
    for parameter in parameters:
        owned.setdefault(parameter.owner, []).append(parameter)
    infos: list[TensorInfo] = []
    for layer in layers:
        type_name = type(layer.module).__name__
        for parameter in owned.pop(layer.path, ()):
            infos += _of_parameter(parameter, type_name, kinds)
        if layer.counted:
            infos += [TensorInfo(layer.path, kind, layer.path, type_name) for kind in OUTPUT_KINDS if kind in kinds]
    for left in owned.values():
        for parameter in left:
            infos += _of_parameter(parameter, "", kinds)
    return infos


def _of_parameter(watched: WatchedParameter, type_name: str, kinds: Collection[str]) -> list[TensorInfo]:
    if not watched.counted:
        return []
    parameter = watched.parameter
    note = "" if parameter.requires_grad else "frozen: requires_grad is False"
    shape = () if is_lazy(parameter) else tuple(parameter.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return [
        TensorInfo(watched.name, kind, watched.owner, type_name, shape, dtype, "" if kind == WEIGHT else note)
        for kind in PARAMETER_KINDS
        if kind in kinds
    ]


def _patterns(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)
