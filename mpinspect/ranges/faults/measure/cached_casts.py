"""Finds forwards that take the cast of a weight out of autocast's cache although the weight has changed since."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpinspect.ranges.faults.measure.operands import has_numbers
from mpinspect.ranges.faults.measure.twins import NARROW, Marks
from mpinspect.runtime.outputs import leaves

#: Number of elements of a weight that are compared if no operator has counted as a write to it.
_SAMPLE = 1 << 12


class CachedCasts:
    """Compares the cached cast of a weight with the weight, wherever an operator of a forward takes it."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        # Autocast keeps no cast of a view or of a frozen weight.
        self._names = {id(each): name for name, each in parameters if has_numbers(each) and each.requires_grad}
        #: The weight of a cast, its version then, and the cast's strides.
        self._sources: Marks[tuple[torch.Tensor, int, tuple[int, ...]]] = Marks()

    def made(self, source: torch.Tensor, cast: torch.Tensor) -> None:
        """Remember the weight of a cast that autocast makes and keeps until its outermost region ends."""
        is_of_autocast = _is_in_region() and not torch.is_autocast_enabled(source.device.type)
        if is_of_autocast and torch.is_autocast_cache_enabled() and id(source) in self._names:
            self._sources.put(cast, (source, source._version, cast.stride()))

    def outdated(self, args: tuple[object, ...]) -> str:
        """Return the name of a weight that has changed since its cast among the arguments was made; "" without one."""
        for each in leaves(args):
            if isinstance(each, torch.Tensor) and each.dtype in NARROW and has_numbers(each):
                weight, version, strides = self._sources.of(each) or (None, 0, ())
                if weight is None:
                    continue
                # Writes through .data leave the version as it is, and change nearly all elements.
                sparse = max(1, weight.numel() // _SAMPLE) if weight._version == version else 1
                cast = each.as_strided(weight.shape, strides, 0)
                if not _are_same(*(tensor.detach().flatten()[::sparse] for tensor in (cast, weight))):
                    return self._names[id(weight)]
        return ""


def _are_same(cast: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a cast has the values of its weight, which may be NaN."""
    return torch.allclose(cast, weight.to(cast.dtype), rtol=0, atol=0, equal_nan=True)


def _is_in_region() -> bool:
    """Return whether an autocast region is open; autocast itself is off while one of its casts runs."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())
