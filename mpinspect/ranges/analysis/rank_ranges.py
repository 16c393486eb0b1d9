"""Finds ranks whose ranges differ from the other ranks' by more than chance, from a few numbers for each rank and tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mpinspect.ranges.kinds import ACTIVATION, GRADIENT_KINDS
from mpinspect.ranges.session import Measurement, Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import Window
from mpinspect.runtime.background import give_way

Floats = npt.NDArray[np.float64]

#: Names of the measurements made here: a rank whose ranges differ, and one whose replicas differ from the first rank's.
DIFFERS, UNEQUAL = "rank-ranges-differ", "rank-replicas-unequal"
#: A rank's tensor differs if the mean exponent of its elements is off by this many powers of two beyond the allowance. Ranks
#: with batches from one data set differ by tenths.
LEAST_POWERS = 1.0
#: The allowance is this multiple of the largest change between neighbouring windows of a rank, as in ``parting``,
_OF_NEIGHBOURS = 2.0
#: or this many standard deviations of a mean of independent exponents, each with the standard deviation _SCATTER.
_OF_CHANCE, _SCATTER = 3.0, 3.0
#: Minimum number of windows for an estimate of a tensor's usual variation.
_LEAST_WINDOWS = 4
#: Maximum number of stretches with a mean of their own: enough for changes between neighbours.
_MOST_WINDOWS = 16


class RankRanges:
    """The mean exponents of each rank's tensors over the run. Memory: 24 bytes for each rank and tensor."""

    def __init__(self) -> None:
        self._keys: dict[TensorKey, int] = {}
        #: By rank: each tensor's mean exponent, its largest change between neighbours, and its elements; NaN: not counted.
        self._found: dict[int, npt.NDArray[np.float64]] = {}
        self._shards: set[TensorKey] = set()
        #: By rank: mean exponents of replicas, and the numbers of steps and of sampled steps.
        self._replicas: dict[int, tuple[dict[TensorKey, float], tuple[int, int]]] = {}

    def add(self, session: Session) -> None:
        windows = session.windows
        if not windows:
            return
        orders = {id(order): order for order in (window.columns().order for window in windows)}
        at = {each: [self._keys.setdefault(key, len(self._keys)) for key in order] for each, order in orders.items()}
        # Neighbouring windows are added up to at most _MOST_WINDOWS stretches.
        size = -(-len(windows) // _MOST_WINDOWS)
        elements, sums = np.zeros((2, -(-len(windows) // size), len(self._keys)))
        for number, window in enumerate(windows):
            give_way()
            place = number // size, at[id(window.columns().order)]
            counted, exponents = _sums(window)
            elements[place] += counted
            sums[place] += exponents
        self._shards.update(info.key for info in session.watched if info.held == "shard")
        total = elements.sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            means, mean = sums / elements, sums.sum(axis=0) / total
        changes = np.abs(np.diff(means, axis=0))
        by_itself = np.where(np.isnan(changes), 0, changes).max(axis=0, initial=0)
        if len(means) < _LEAST_WINDOWS:
            by_itself[:] = np.inf
        found = np.stack([mean, by_itself, total])
        # The same as for tensors that appear with a later rank, so that the order of the ranks does not matter.
        found[:, total == 0] = np.nan
        self._found[session.info.rank] = found
        copies = [info.key for info in session.watched if info.held == "replica" and info.key in self._keys]
        reached = session.reached()
        self._replicas[session.info.rank] = (
            {key: float(mean[self._keys[key]]) for key in copies},
            (reached.steps, reached.sampled_steps),
        )

    def differing(self) -> Iterator[Measurement]:
        """Yield a measurement for each rank whose gradients or activations use other exponents than most ranks'."""
        yield from self._unequal()
        ranks = sorted(self._found)
        if len(ranks) < 2:
            return
        table = np.full((len(ranks), 3, len(self._keys)), np.nan)
        for row, rank in enumerate(ranks):
            table[row, :, : self._found[rank].shape[1]] = self._found[rank]
        means, by_itself, elements = table[:, 0], table[:, 1], table[:, 2]
        # Shards (different elements) and replicas (equal elements) carry no information on the rank's own data.
        own = np.array(
            [key.kind in (*GRADIENT_KINDS, ACTIVATION) and key not in self._shards for key in self._keys], dtype=bool
        )
        # Compare with the median of all ranks, which one deviating rank does not move. With two ranks, compare them directly.
        middle = _median(means), _median(by_itself), _median(elements)
        for row, rank in enumerate(ranks):
            mean, change, number = middle if len(ranks) > 2 else (means[1 - row], by_itself[1 - row], elements[1 - row])
            with np.errstate(invalid="ignore", divide="ignore"):
                apart = means[row] - mean
                changes = np.fmin(by_itself[row], change)
                chance = _SCATTER * np.sqrt(1 / elements[row] + 1 / number)
                beyond = np.abs(apart) - np.fmax(_OF_NEIGHBOURS * changes, _OF_CHANCE * chance)
            hit = own & (beyond > LEAST_POWERS)
            # With two ranks it is unclear which one is wrong: name the rank with the larger values.
            if not hit.any() or (len(ranks) == 2 and np.nanmedian(apart[hit]) < 0):
                continue
            keys = list(self._keys)
            # In a tie take the first by name, since the order of the keys depends on the order of the ranks.
            worst = min(np.flatnonzero(hit).tolist(), key=lambda place: (-round(float(beyond[place]), 9), keys[place]))
            key = keys[worst]
            figures = {"powers": float(apart[worst]), "beyond": float(beyond[worst]), "tensors": float(hit.sum())}
            yield Measurement(DIFFERS, key.name, 0, figures | {"of": float(own.sum())}, text=key.kind, rank=rank)

    def _unequal(self) -> Iterator[Measurement]:
        """Yield a measurement for each rank whose replicas differ from the first rank's, where both sampled the same steps."""
        ranks = sorted(self._replicas)
        for rank in ranks[1:]:
            (first, steps), (own, own_steps) = self._replicas[ranks[0]], self._replicas[rank]
            other = [key for key, mean in own.items() if key in first and abs(mean - first[key]) > 1e-9]
            if other and steps == own_steps:
                yield Measurement(
                    UNEQUAL,
                    other[0].name,
                    0,
                    {"tensors": float(len(other)), "of": float(len(own))},
                    text=other[0].kind,
                    rank=rank,
                )


def _median(rows: Floats) -> Floats:
    """Return the median over the ranks; NaN, without NumPy's warning, where all ranks lack a value."""
    known = ~np.isnan(rows).all(axis=0)
    found = np.full(rows.shape[1], np.nan)
    found[known] = np.nanmedian(rows[:, known], axis=0)
    return found


def _sums(window: Window) -> tuple[Floats, Floats]:
    """Return the number of each tensor's finite non-zero elements, and the sum of their exponents."""
    columns = window.columns().columns
    bins = columns["bins"].astype(np.int64)
    counts = columns["counts"].astype(np.float64)
    owners = np.repeat(np.arange(len(bins)), bins)
    starts = np.cumsum(bins) - bins
    exponents = np.arange(len(counts)) - np.repeat(starts - columns["min_exponent"], bins)
    elements, sums = (
        np.bincount(owners, weights=weights, minlength=len(bins)).astype(np.float64)
        for weights in (counts, counts * exponents)
    )
    return elements, sums
