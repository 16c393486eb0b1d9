"""Which scalars of single tensors TensorBoard gets: the worst tensors', each from its first change on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.windows.tensors import TensorKey

#: Number of tensors of each kind that have curves, by default.
MOST_CURVES = 20
#: Difference of two shares that is always large: 10 percentage points.
_CLEARLY = 0.1


def check_curves(curves: object) -> None:
    """Raise ValueError unless ``curves`` is a whole number of 0 or more, or None."""
    if curves is not None and (isinstance(curves, bool) or not isinstance(curves, int) or curves < 0):
        raise ValueError(f"curves={curves!r}: give a whole number of tensors, 0 or more, or None for all")


class Worst:
    """The tensors of one kind that have lost the largest share of their elements to flushing, in any window so far.

    A chosen tensor is replaced only by one whose share is clearly larger: similar tensors would replace each other in every
    window.

    Args:
        most: number of tensors that are chosen; None: all.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._shares: dict[TensorKey, float] = {}
        self.chosen: set[TensorKey] = set()

    def add(self, shares: Mapping[TensorKey, float]) -> None:
        """Take one window's shares into account, 0..1."""
        for key, share in shares.items():
            self._shares[key] = max(share, self._shares.get(key, 0.0))
        for key in sorted(self._shares, key=self._share, reverse=True)[: self._most]:
            if self._most is not None and len(self.chosen) >= self._most and key not in self.chosen:
                least = min(self.chosen, key=self._share)
                share = self._share(least)
                if self._share(key) <= share + min(max(share, LOST_L1_TOLERANCE), _CLEARLY):
                    return
                self.chosen.remove(least)
            self.chosen.add(key)

    def _share(self, key: TensorKey) -> float:
        return self._shares[key]


class Curves:
    """Holds back each group of scalars while all its values are constant, so that no chart shows a flat line."""

    def __init__(self) -> None:
        #: By group: first and last step of the constant values, and the values; None once the group has changed.
        self._held: dict[str, tuple[int, int, Mapping[str, float]] | None] = {}

    def points(self, group: str, step: int, values: Mapping[str, float]) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield the points to write at this step: none, this one, or also the ends of the constant part before it."""
        held = self._held.setdefault(group, (step, step, values))
        if held is not None and held[2] == values:
            self._held[group] = (held[0], step, values)
            return
        if held is not None:
            first, last, before = held
            self._held[group] = None
            for each in sorted({first, last}):
                yield each, before
        yield step, values
