"""Find the layers and parameters of a model that can be watched, under their dotted paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch.nn.parameter import is_lazy

from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, OUTPUT_KINDS, PARAMETER_KINDS, WEIGHT, WEIGHT_GRADIENT
from mpinspect.ranges.session import FROZEN, containers
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.runtime.distributed import Held, copy_held, data_parallel, held, is_distributed, rank_and_world
from mpinspect.runtime.guard import Nameable
from mpinspect.runtime.wrappers import class_of, is_compiled_wrapper, plain_names, unwrapped

#: Torch modules that never call their submodules, and are therefore treated as leaves.
_SEALED = (torch.nn.MultiheadAttention,)


@dataclass(frozen=True)
class Layer(Nameable):
    """A module that is hooked.

    ``is_leaf``: the module calls no submodules. ``counted``: its outputs are counted if output kinds are captured.
    """

    path: str
    module: torch.nn.Module
    is_leaf: bool
    counted: bool

    def __str__(self) -> str:
        return repr(self.path) if self.path else "the model itself"

    @cached_property
    def gradient_key(self) -> TensorKey:
        """The key of the gradients at the layer's outputs; cached, since it is needed for every gradient that arrives."""
        return TensorKey(self.path, ACTIVATION_GRADIENT)


#: Maximum number of modules inside a block of an outline, and minimum number of modules of a model with an outline.
_MOST_INSIDE, _FEWEST_MODULES = 20, 32


def outline(layers: Collection[Layer]) -> frozenset[str]:
    """Return the paths of the modules that outline a model's forward: its blocks, and the modules around them.

    A small model's outline has all its modules.
    """
    if len(layers) <= _FEWEST_MODULES:
        return frozenset(layer.path for layer in layers)
    around = {layer.path: set(containers(layer.path)) for layer in layers}
    inside = Counter(container for those in around.values() for container in those)
    blocks = {
        layer.path
        for layer in layers
        if layer.path and inside[layer.path] <= _MOST_INSIDE and not is_never_called(layer.module)
    }
    return frozenset(path for path, those in around.items() if blocks.isdisjoint(those))


def is_never_called(module: torch.nn.Module) -> bool:
    """Return whether a module has no forward, like lists and dicts of modules or parameters."""
    return type(module).forward is torch.nn.Module.forward and "forward" not in vars(module)


@dataclass(eq=False)
class WatchedParameter(Nameable):
    """A parameter under its first name.

    ``counted``: whether its kinds are captured (integers have no exponents). ``parallel``: its DistributedDataParallel
    module, if any. ``parameter`` changes if the model's parameter of this name is replaced by another, as ``fully_shard`` does.
    """

    name: str
    owner: str
    parameter: torch.nn.Parameter
    counted: bool
    parallel: torch.nn.Module | None = None

    def __str__(self) -> str:
        return repr(self.name)

    @cached_property
    def gradient_key(self) -> TensorKey:
        """The key of the parameter's gradients; cached."""
        return TensorKey(self.name, WEIGHT_GRADIENT)

    def held(self, kind: str) -> Held:
        """Return how this process's tensor of a kind relates to the other ranks' (its gradient: before any all-reduce)."""
        known = held(self.parameter)
        if known.how or rank_and_world()[1] < 2:
            return known
        if kind == WEIGHT_GRADIENT:
            return Held("own")
        if self.parallel is None:
            return known
        return copy_held(self.parallel)


class Selection:
    """Selects dotted paths by shell patterns (``encoder.*``); ``*`` also matches dots.

    Args:
        include: patterns, one string or several; None for everything.
        exclude: patterns of paths to leave out, even if included.
    """

    def __init__(self, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None) -> None:
        self.include = None if include is None else several(include)
        self.exclude = several(exclude)
        self._matched: set[str] = set()

    def wants(self, *names: str) -> bool:
        """Return whether a tensor is selected: one of its names (its own, its module's) is included, and none is excluded."""
        included = self.include is None or self._matches(self.include, names)
        return included and not self._matches(self.exclude, names)

    def names_exactly(self, path: str) -> bool:
        """Return whether ``include`` lists this exact path, which is how a user selects a container's outputs."""
        if self.include is None or path not in self.include:
            return False
        self._matched.add(path)
        return not self._matches(self.exclude, (path,))

    def unmatched(self) -> list[str]:
        """Return the patterns that have not matched any name so far."""
        return [pattern for pattern in (*(self.include or ()), *self.exclude) if pattern not in self._matched]

    def _matches(self, patterns: Collection[str], names: tuple[str, ...]) -> bool:
        hits = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        self._matched.update(hits)
        return bool(hits)


def find_layers(model: torch.nn.Module, selection: Selection) -> list[Layer]:
    """Return every module once, under its first name without wrappers; the model itself is "".

    A wrapper is skipped in favour of the module inside, except torch.compile's wrapper, inside which no hook runs.
    """
    sealed_parts = {id(part) for module in model.modules() if isinstance(module, _SEALED) for part in module.modules()}
    sealed_parts -= {id(module) for module in model.modules() if isinstance(module, _SEALED)}
    names = plain_names(model)
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        path, inner = names[name], unwrapped(module)
        if id(module) in sealed_parts or path in layers or (inner is not module and not is_compiled_wrapper(module)):
            continue
        is_leaf = isinstance(inner, _SEALED) or next(inner.children(), None) is None
        wanted = is_leaf and selection.wants(path) and not _passes_on(inner)
        counted = wanted or selection.names_exactly(path)
        layers[path] = Layer(path, module, is_leaf, counted)
    return list(layers.values())


def numbered(layers: Iterable[Layer]) -> dict[str, str]:
    """Return, by path, the classes of the modules whose path ends in a number and whose outputs are not counted."""
    return {
        layer.path: class_of(layer.module).__name__
        for layer in layers
        if not layer.counted and layer.path.rpartition(".")[2].isdigit()
    }


def _passes_on(module: torch.nn.Module) -> bool:
    """Return whether a module is a dropout with p = 0, which returns its input and which many models then never call."""
    return isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p == 0


def find_parameters(model: torch.nn.Module, selection: Selection) -> list[WatchedParameter]:
    """Return every parameter once, under its first name without wrappers (shared parameters have several names)."""
    parallel = data_parallel()
    return [
        WatchedParameter(
            name,
            owner := name.rpartition(".")[0],
            parameter,
            selection.wants(name, owner) and (parameter.is_floating_point() or parameter.is_complex()),
            parallel.get(id(parameter)),
        )
        for name, parameter in named_parameters(model)
    ]


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the pairs of ``model.named_parameters()``, with the wrappers' additions removed from the names."""
    names = plain_names(model)
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        yield f"{names.get(owner, owner)}.{own}".lstrip("."), parameter


class ModelParameters:
    """Compares the watched parameters with those that their model has now: FSDP2 replaces parameters.

    Args:
        layers: the watched modules; without the model itself ("") among them there is no comparison.
        parameters: the watched parameters.
    """

    def __init__(self, layers: Iterable[Layer], parameters: Collection[WatchedParameter]) -> None:
        self._model = next((layer.module for layer in layers if not layer.path), None)
        self._parameters = parameters

    def replace(self, held: Collection[int] = ()) -> set[WatchedParameter]:
        """Watch the parameters that have replaced watched ones under their names; return the watched parameters concerned.

        Args:
            held: ids of the parameters that an optimizer holds.
        """
        replaced = self._replaced(held)
        for watched, new in replaced:
            watched.parameter = new
        return {watched for watched, _ in replaced}

    def find_wrappers(self) -> bool:
        """Look for DistributedDataParallel modules made since the parameters were found; return whether there are any."""
        alone = [each for each in self._parameters if each.parallel is None and not is_distributed(each.parameter)]
        if not alone:
            return False
        parallel = data_parallel()
        for watched in alone:
            watched.parallel = parallel.get(id(watched.parameter))
        return any(watched.parallel is not None for watched in alone)

    def unwatched(self) -> list[str]:
        """Return the names of the model's parameters that were added, or have replaced others, and are not watched."""
        if self._model is None:
            return []
        known = {key for watched in self._parameters for key in (watched.name, id(watched.parameter))}
        current = named_parameters(self._model)
        added = [name for name, each in current if name not in known and id(each) not in known]
        return added + [watched.name for watched, _ in self._replaced(())]

    def _replaced(self, held: Collection[int]) -> list[tuple[WatchedParameter, torch.nn.Parameter]]:
        """Return the parameters that are no longer the model's, each with the parameter that now has its name.

        Around a forward, FSDP2 substitutes whole parameters for its sharded ones. A substitute counts as a replacement only if
        an optimizer holds it.
        """
        if self._model is None:
            return []
        current = dict(named_parameters(self._model))
        pairs = ((watched, current.get(watched.name, watched.parameter)) for watched in self._parameters)
        return [
            (watched, new)
            for watched, new in pairs
            if new is not watched.parameter and (id(new) in held or not is_distributed(watched.parameter))
        ]


def any_in_16_bits(parameters: Iterable[WatchedParameter]) -> bool:
    """Return whether a parameter is stored in FP16 or BF16."""
    return any(watched.parameter.dtype in (torch.float16, torch.bfloat16) for watched in parameters)


def describe(
    layers: Iterable[Layer], parameters: Iterable[WatchedParameter], kinds: Collection[str]
) -> list[TensorInfo]:
    """Return the tensors that will be counted, in the model's order."""
    layers = list(layers)
    owned: dict[str, list[WatchedParameter]] = {}
    for parameter in parameters:
        owned.setdefault(parameter.owner, []).append(parameter)
    infos: list[TensorInfo] = []
    for layer in layers:
        name = class_of(layer.module).__name__
        for parameter in owned.pop(layer.path, ()):
            infos += _of_parameter(parameter, name, kinds)
        if layer.counted:
            infos += [TensorInfo(layer.path, kind, layer.path, name) for kind in OUTPUT_KINDS if kind in kinds]
    for left in owned.values():
        for parameter in left:
            infos += _of_parameter(parameter, "", kinds)
    return infos


def _of_parameter(watched: WatchedParameter, type_name: str, kinds: Collection[str]) -> list[TensorInfo]:
    if not watched.counted:
        return []
    parameter = watched.parameter
    shape = () if is_lazy(parameter) else tuple(parameter.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    infos = []
    for kind in PARAMETER_KINDS:
        if kind in kinds:
            note = ""
            if kind != WEIGHT and not parameter.requires_grad:
                note = f"{FROZEN}: requires_grad is False"
            held = watched.held(kind)
            infos.append(TensorInfo(watched.name, kind, watched.owner, type_name, shape, dtype, note, *held))
    return infos


def several(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the names or patterns that a user gave: a single string is one, None is none."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
