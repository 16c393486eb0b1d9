"""Many tensors' counts as NumPy columns: read, merged and written without an object for each tensor.

A window of a thousand tensors is then some twenty arrays, and merging windows takes a few array additions, most of
which release the GIL. The objects are made on the first access to a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.windows.tensors import Count, Exponent, LostUpdates, TensorKey, TensorWindow, narrowest

Column = npt.NDArray[Any]

#: Columns with one integer for each tensor.
PER_TENSOR = ("samples", "numel_max", "min_exponent", "bins", "zeros", "infs", "nans", "peaks")
#: Columns with one float for each tensor.
SIGNIFICANDS = ("min_significand", "max_significand")
#: The bins of all tensors, concatenated: ``bins`` entries for each tensor.
PER_BIN = ("counts", "powers_of_two", "near_top")
#: The peaks of all tensors, concatenated: ``peaks`` entries for each tensor.
PER_PEAK = ("peak_exponents", "peak_counts")

_INTEGER_TYPES = ("<i1", "<i2", "<i4", "<i8")


class Context(NamedTuple):
    """Fields that many tensors of a window share: as in TensorWindow."""

    dtypes: tuple[str, ...]
    passed_through: str
    floor_exponent: Exponent | None

    @classmethod
    def of(cls, tensor: TensorWindow) -> Context:
        return cls(tuple(tensor.dtypes), tensor.passed_through, tensor.floor_exponent)

    def merged(self, other: Context) -> Context:
        floors = (floor for floor in (self.floor_exponent, other.floor_exponent) if floor is not None)
        return Context(
            tuple(sorted({*self.dtypes, *other.dtypes})),
            narrowest((self.passed_through, other.passed_through)),
            max(floors, default=None),
        )


class Lost(NamedTuple):
    """The lost updates of one tensor in one format; ``position`` is the tensor's position in the window, from 0."""

    position: Count
    format: str
    lost: Count
    nonzero: Count
    measured: bool


@dataclass(frozen=True, eq=False)
class TensorColumns(Mapping[TensorKey, TensorWindow]):
    """The tensors of a window, as a mapping whose entries are all made on the first access to one of them.

    Args:
        order: the tensors' keys. Windows of the same tensors share one tuple where they can.
        columns: arrays by name: PER_TENSOR (integers, one per tensor), SIGNIFICANDS (float64), PER_BIN and PER_PEAK
            (integers, concatenated); see docs/session-format.md. Integers may have any width.
        contexts: the distinct contexts of the tensors.
        context: each tensor's position in ``contexts``.
        lost_updates: the lost updates of the tensors that have any.

    Raises:
        ValueError: the columns do not fit together.
    """

    order: tuple[TensorKey, ...]
    columns: Mapping[str, Column]
    contexts: tuple[Context, ...]
    context: Column
    lost_updates: tuple[Lost, ...] = ()

    def __post_init__(self) -> None:
        self._require(len(self.order), self.context, *(self.columns[name] for name in (*PER_TENSOR, *SIGNIFICANDS)))
        for lengths, joined in (("bins", PER_BIN), ("peaks", PER_PEAK)):
            self._require(int(self.columns[lengths].sum(dtype=np.int64)), *(self.columns[name] for name in joined))
        if len(self.context) and not 0 <= int(self.context.min()) <= int(self.context.max()) < len(self.contexts):
            raise ValueError("a window's tensor refers to a context that is not there")

    @staticmethod
    def _require(length: int, *columns: Column) -> None:
        for column in columns:
            if len(column) != length:
                raise ValueError(f"a window's column has {len(column)} entries where its tensors need {length}")

    @classmethod
    def of(cls, tensors: Mapping[TensorKey, TensorWindow]) -> TensorColumns:
        """Return the tensors as columns; a TensorColumns is returned unchanged."""
        if isinstance(tensors, cls):
            return tensors
        windows = list(tensors.values())
        histograms = [window.histogram for window in windows]
        contexts: dict[Context, int] = {}
        context = [contexts.setdefault(Context.of(window), len(contexts)) for window in windows]
        columns = {
            "samples": _integers(window.samples for window in windows),
            "numel_max": _integers(window.numel_max for window in windows),
            "min_exponent": _integers(histogram.min_exponent for histogram in histograms),
            "bins": _integers(len(histogram.counts) for histogram in histograms),
            "zeros": _integers(histogram.zeros for histogram in histograms),
            "infs": _integers(histogram.infs for histogram in histograms),
            "nans": _integers(histogram.nans for histogram in histograms),
            "min_significand": np.array([histogram.min_significand for histogram in histograms], dtype="<f8"),
            "max_significand": np.array([histogram.max_significand for histogram in histograms], dtype="<f8"),
            "peaks": _integers(len(window.peaks) for window in windows),
            "peak_exponents": _integers(exponent for window in windows for exponent in window.peaks),
            "peak_counts": _integers(count for window in windows for count in window.peaks.values()),
            "counts": _joined([histogram.counts for histogram in histograms]),
            "powers_of_two": _joined([histogram.powers_of_two for histogram in histograms]),
            "near_top": _joined([histogram.near_top for histogram in histograms]),
        }
        lost = tuple(
            Lost(position, name, updates.lost, updates.nonzero, updates.measured)
            for position, window in enumerate(windows)
            for name, updates in window.lost_updates.items()
        )
        return cls(tuple(tensors), columns, tuple(contexts), _integers(context), lost)

    def times(self, weight: int) -> TensorColumns:
        """Return the same tensors as if each sample had been counted ``weight`` times; peaks and lost updates stay."""
        names = (*PER_BIN, "samples", "zeros", "infs", "nans")
        return replace(self, columns={**self.columns, **{n: self.columns[n].astype(np.int64) * weight for n in names}})

    def once(self, keys: Collection[TensorKey], parts: Sequence[TensorColumns]) -> TensorColumns:
        """Return the same tensors, with the parts' shards of these keys counted as one sample: see ``Window.once``."""
        place = {key: number for number, key in enumerate(self.order)}
        samples, numel = (np.zeros(len(self.order), dtype=np.int64) for _ in range(2))
        for part in parts:
            at = np.array([place[key] for key in part.order], dtype=np.intp)
            samples[at] = np.maximum(samples[at], part.columns["samples"])
            numel[at] += part.columns["numel_max"]
        shared = np.array([key in keys for key in self.order], dtype=bool)
        changed = {"samples": samples, "numel_max": numel}
        return replace(
            self, columns={**self.columns, **{n: np.where(shared, c, self.columns[n]) for n, c in changed.items()}}
        )

    def only(self, wanted: Callable[[TensorKey], bool]) -> TensorColumns:
        """Return only the tensors for whose keys ``wanted`` returns True."""
        kept = np.array([wanted(key) for key in self.order], dtype=bool)
        if kept.all():
            return self
        masks = dict.fromkeys((*PER_TENSOR, *SIGNIFICANDS), kept)
        masks |= dict.fromkeys(PER_BIN, np.repeat(kept, self.columns["bins"]))
        masks |= dict.fromkeys(PER_PEAK, np.repeat(kept, self.columns["peaks"]))
        position = np.cumsum(kept) - 1
        return TensorColumns(
            tuple(key for key, keep in zip(self.order, kept.tolist(), strict=True) if keep),
            {name: self.columns[name][mask] for name, mask in masks.items()},
            self.contexts,
            self.context[kept],
            tuple(
                lost._replace(position=int(position[lost.position]))
                for lost in self.lost_updates
                if kept[lost.position]
            ),
        )

    def passed_through(self, keys: AbstractSet[TensorKey] | None = None) -> set[str]:
        """Return the formats that the values of these tensors (None: all) were rounded to before counting."""
        numbers = self.context
        if keys is not None:
            numbers = numbers[[key in keys for key in self.order]]
        return {self.contexts[number].passed_through for number in np.unique(numbers).tolist()}

    # -- as a mapping -------------------------------------------------------------------------------------------------

    def __getitem__(self, key: TensorKey) -> TensorWindow:
        return self._tensors[key]

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def each(self) -> Iterator[tuple[TensorKey, TensorWindow]]:
        """Yield every key and tensor without caching, which spares the garbage collector from scanning them."""
        lost: dict[int, dict[str, LostUpdates]] = {}
        for updates in self.lost_updates:
            found = LostUpdates(updates.lost, updates.nonzero, updates.measured)
            lost.setdefault(updates.position, {})[updates.format] = found
        figures = (column.tolist() for column in (self.context, self.columns["samples"], self.columns["numel_max"]))
        rows = zip(*figures, self._histograms(), self._peaks(), strict=True)
        for position, (context, samples, numel_max, histogram, peaks) in enumerate(rows):
            dtypes, passed_through, floor_exponent = self.contexts[context]
            yield (
                self.order[position],
                TensorWindow(
                    histogram, samples, peaks, dtypes, passed_through, floor_exponent, lost.get(position, {}), numel_max
                ),
            )

    @cached_property
    def _tensors(self) -> dict[TensorKey, TensorWindow]:
        return dict(self.each())

    def _histograms(self) -> Iterator[ExponentHistogram]:
        """Yield each tensor's histogram, made of views into arrays shared by all tensors."""
        counts, powers, tops = (self.columns[name].astype(np.int64) for name in PER_BIN)
        scalars = ("min_exponent", "zeros", "infs", "nans", *SIGNIFICANDS)
        figures = zip(*(self.columns[name].tolist() for name in scalars), strict=True)
        for span, row in zip(_spans(self.columns["bins"]), figures, strict=True):
            yield ExponentHistogram(counts[span], powers[span], tops[span], *row)

    def _peaks(self) -> Iterator[dict[int, int]]:
        pairs = zip(*(self.columns[name].tolist() for name in PER_PEAK), strict=True)
        for length in self.columns["peaks"].tolist():
            yield dict(islice(pairs, length))


def narrowed(values: Column) -> Column:
    """Return the same integers in the narrowest signed type that holds them all."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in _INTEGER_TYPES:
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype, copy=False)
    raise AssertionError("an int64 fits <i8")


def _integers(values: Iterable[int]) -> Column:
    return np.array(list(values), dtype=np.int64)


def _joined(arrays: Sequence[Column]) -> Column:
    return narrowed(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]))


def _spans(lengths: Column) -> Iterator[slice]:
    """Return the slice of each tensor's entries in a concatenated column."""
    return starmap(slice, pairwise(accumulate(lengths.tolist(), initial=0)))
