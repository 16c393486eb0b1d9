"""Finds master weights: copies of the model's weights, mostly in FP32, that an optimizer steps in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from mpinspect.ranges.capture.host_rows import Arrivals, HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.optimizers import ModelOptimizers

#: Maximum number of searches for one optimizer's masters: copies that were rounded differently are never found.
_MOST_SEARCHES = 8
#: Maximum number of elements read from one tensor.
_MOST_ELEMENTS = 64
#: Twice the largest relative error of a directed rounding to BF16, and FP16's smallest number.
_ROUNDING, _FLUSHED = 2.0**-6, 2.0**-24

_Optimizer = torch.optim.Optimizer


class Samples(NamedTuple):
    """A few elements of each tensor, being copied to the host.

    Args:
        names: the tensors' names, one list for each device.
        sizes: the number of elements of each.
        copies: the elements in FP32, one copy for each device.
    """

    names: list[list[str]]
    sizes: list[list[int]]
    copies: list[HostCopy]

    def read(self) -> dict[str, torch.Tensor]:
        """Return the elements by name, in FP64. Waits for the device if the copies are not complete."""
        found: dict[str, torch.Tensor] = {}
        for names, sizes, copy in zip(self.names, self.sizes, self.copies, strict=True):
            found.update(zip(names, torch.split(torch.from_numpy(copy.values()).double(), sizes), strict=True))
        return found


@torch.no_grad()
def samples(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> Samples:
    """Return a copy of a few elements of each plain tensor, at places that depend only on its shape; never waits."""
    groups: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in tensors:
        if tensor is not None and is_plain(tensor):
            names, parts = groups.setdefault(tensor.device, ([], []))
            names.append(name)
            parts.append(_spread(tensor).float())
    return Samples(
        [names for names, _ in groups.values()],
        [[part.numel() for part in parts] for _, parts in groups.values()],
        [HostCopy(torch.cat(parts)) for _, parts in groups.values()],
    )


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most ``_MOST_ELEMENTS`` elements, spread over every dimension, in the same order for any strides."""
    each = max(int(_MOST_ELEMENTS ** (1 / max(tensor.dim(), 1))), 1)
    return tensor.detach()[tuple(slice(None, None, -(-size // each) or 1) for size in tensor.shape)].reshape(-1)


def are_close(masters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a few values of each tensor agree up to a rounding in either direction. Waits for the device."""
    one, other = samples(masters.items()).read(), samples(weights.items()).read()
    if not one or one.keys() != other.keys():
        return False
    return all(bool(agree(one[name], other[name]).all()) for name in one)


def agree(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return, element by element, whether the values agree up to a rounding in either direction."""
    return torch.isclose(master, weight, rtol=_ROUNDING, atol=_FLUSHED)


class Masters:
    """Matches the master weights in the model's optimizers to the model's weights.

    A master has its weight's shape, and a few of its values, rounded to the weight's dtype, equal the weight's values. If
    several weights match (normalisations begin with ones), they are taken in order.

    Args:
        parameters: the model's parameters.
        optimizers: the model's optimizers.
    """

    def __init__(self, parameters: Sequence[WatchedParameter], optimizers: ModelOptimizers) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        #: The weights by the id of their master.
        self._found: weakref.WeakKeyDictionary[_Optimizer, dict[int, WatchedParameter]] = weakref.WeakKeyDictionary()
        #: The ids of foreign tensors (not the model's) that had a gradient when an optimizer stepped.
        self._stepped: set[int] = set()
        #: By optimizer's id, how many foreign tensors had never had a gradient at its last step.
        self._idle: dict[int, int] = {}
        #: The places of foreign tensors' gradients when an optimizer began to step.
        self._places: weakref.WeakKeyDictionary[_Optimizer, list[tuple[int, int] | None]] = weakref.WeakKeyDictionary()
        self._searches: weakref.WeakKeyDictionary[_Optimizer, int] = weakref.WeakKeyDictionary()
        #: The searches whose values are still being copied to the host, and the ids of their optimizers.
        self._arrivals = Arrivals()
        self._searching: set[int] = set()

    def find_all(self) -> None:
        """Complete earlier searches whose values have arrived, and search every optimizer of the model."""
        self._arrivals.take()
        for optimizer in self._optimizers.living():
            self.find(optimizer)

    def settle(self) -> None:
        """Complete all searches; waits for the device."""
        self._arrivals.take(wait=True)

    def find(self, optimizer: _Optimizer) -> None:
        """Search an optimizer for unknown masters. On a device the search is completed later."""
        if id(optimizer) in self._searching:
            return
        found = self._found.setdefault(optimizer, {})
        foreign = [each for each in self._foreign(optimizer) if id(each) not in found and is_plain(each)]
        if not foreign or self._searches.get(optimizer, 0) >= _MOST_SEARCHES:
            return
        weights = self._without_master()
        if not weights:
            return
        self._searches[optimizer] = self._searches.get(optimizer, 0) + 1
        values = samples((str(number), each) for number, each in enumerate(foreign))
        stored = samples((each.name, each.parameter) for each in weights)
        self._searching.add(id(optimizer))
        compare = partial(self._compare, optimizer, foreign, values, weights, stored)
        self._arrivals.call(values.copies + stored.copies, compare)

    def _compare(
        self,
        optimizer: _Optimizer,
        foreign: Sequence[torch.nn.Parameter],
        values_of: Samples,
        weights: Sequence[WatchedParameter],
        stored_of: Samples,
    ) -> None:
        """Match foreign tensors to the weights that had the same values."""
        self._searching.discard(id(optimizer))
        found = self._found.setdefault(optimizer, {})
        values, stored = values_of.read(), stored_of.read()
        # Another optimizer's search may have found their masters meanwhile.
        known = {watched.name for watched in self.weights()}
        weights = [watched for watched in weights if watched.name not in known]
        waiting: dict[object, list[WatchedParameter]] = {}
        for watched in reversed(weights):
            waiting.setdefault(_key(watched.parameter, stored[watched.name], watched.parameter.dtype), []).append(
                watched
            )
        dtypes = {watched.parameter.dtype for watched in weights}
        for number, each in enumerate(foreign):
            # Without a gradient, a tensor of the weights' dtype is not their copy but their source, as under weight_norm.
            may_be = (dtype for dtype in dtypes if dtype != each.dtype or id(each) in self._stepped)
            same = (waiting.get(_key(each, values[str(number)], dtype)) for dtype in may_be)
            agreeing = next((weights for weights in same if weights), None)
            if agreeing:
                found[id(each)] = agreeing.pop()

    def of(self, optimizer: _Optimizer) -> Iterator[WatchedParameter]:
        """Yield an optimizer's masters, each under the name of its weight."""
        found = self._found.get(optimizer)
        if not found:
            return
        for each in self._foreign(optimizer):
            watched = found.get(id(each))
            if watched is not None and each.shape == watched.parameter.shape:
                yield WatchedParameter(watched.name, watched.owner, each, watched.counted)

    def all(self) -> Iterator[WatchedParameter]:
        """Yield the masters of all optimizers of the model."""
        for optimizer in self._optimizers.living():
            yield from self.of(optimizer)

    def weights(self) -> list[WatchedParameter]:
        """Return the weights that have a master."""
        return [watched for found in self._found.values() for watched in found.values()]

    def optimizer_steps(self, optimizer: _Optimizer) -> None:
        """Remember which foreign tensors have a gradient; the tensors of a replaced layer have none."""
        foreign = [*self._foreign(optimizer)]
        self._stepped.update(id(each) for each in foreign if each.grad is not None)
        self._places[optimizer] = _gradients_places(foreign)
        # Kept beyond the optimizer's life, which may end with the function that trains.
        self._idle[id(optimizer)] = sum(id(each) not in self._stepped for each in foreign)

    def writes_gradients(self, optimizer: _Optimizer) -> bool:
        """Return whether an optimizer has written gradients of foreign tensors within its step: it used no earlier ones."""
        before = self._places.get(optimizer)
        # Most optimizers have no foreign tensors, and this is asked at every step.
        if not before:
            return False
        pairs = zip(before, _gradients_places(self._foreign(optimizer)), strict=False)
        return any(now is not None and now != then for then, now in pairs)

    def idle(self) -> int:
        """Return the number of foreign tensors in the optimizers that never had a gradient at a step."""
        return sum(self._idle.values())

    def may_be_of(self, weights: Sequence[WatchedParameter]) -> bool:
        """Return whether a foreign tensor in an optimizer may be a master of one of these weights, or of all, flattened."""
        shapes = {watched.parameter.shape for watched in weights}
        whole = sum(watched.parameter.numel() for watched in weights)
        return any(
            id(each) in self._stepped
            and id(each) not in self._found.get(optimizer, ())
            and (each.shape in shapes or (each.dim() == 1 and each.numel() >= whole))
            for optimizer in self._optimizers.living()
            for each in self._foreign(optimizer)
        )

    def unmatched(self, optimizer: _Optimizer) -> tuple[Samples, Samples]:
        """Return elements of an optimizer's foreign tensors, by their ids, and of the weights that no optimizer steps."""
        foreign = samples((str(id(each)), each) for each in self._foreign(optimizer))
        return foreign, samples((watched.name, watched.parameter) for watched in self._without_master())

    def _foreign(self, optimizer: _Optimizer) -> Iterator[torch.nn.Parameter]:
        own = {id(watched.parameter) for watched in self._optimizers.parameters(optimizer)}
        for group in optimizer.param_groups:
            yield from (each for each in group["params"] if id(each) not in own)

    def _without_master(self) -> list[WatchedParameter]:
        """Return the trained weights that no optimizer of the model steps, directly or through a master."""
        known = {watched.name for watched in self.weights()}
        for optimizer in self._optimizers.living():
            known.update(watched.name for watched in self._optimizers.parameters(optimizer))
        return [
            watched
            for watched in self._parameters
            if watched.name not in known and watched.parameter.requires_grad and is_plain(watched.parameter)
        ]


def _key(tensor: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> object:
    """Return the key that a master and its weight share: the shape, and values rounded to the weight's dtype."""
    return tuple(tensor.shape), dtype, tuple(values.to(dtype).tolist())


def _gradients_places(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int] | None]:
    """Return the id and the version of each tensor's gradient; None without one."""
    gradients = (each.grad for each in tensors)
    return [None if grad is None else (id(grad), grad._version) for grad in gradients]
