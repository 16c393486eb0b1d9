"""A window of steps: the counts of its tensors, and how neighbouring windows merge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from types import MappingProxyType

from mpinspect.ranges.windows.columns import TensorColumns
from mpinspect.ranges.windows.merging import merge_columns
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow, add_counts

#: Maximum number of windows of a run. Drift is detected between eighths of the run, which then have at least 8 windows each.
WINDOW_LIMIT = 128
#: Maximum number of histograms in all windows, at about 1.5 kB of memory each: twice as many load in about a second.
TENSOR_WINDOW_LIMIT = 1 << 16
#: Smallest limit on the number of windows, however many tensors there are: fewer windows would blur drift over the run.
LEAST_WINDOW_LIMIT = 16


@dataclass(frozen=True)
class Window:
    """All counts of the sampled steps from first_step to last_step, both included.

    ``tensors`` may be passed as any mapping and is stored as ``columns``. ``gradient_peaks`` maps the peak exponent over
    *all* gradients of a step to the number of sampled steps with that peak.
    """

    first_step: int
    last_step: int
    sampled_steps: int
    tensors: Mapping[TensorKey, TensorWindow]
    gradient_peaks: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", self.columns())

    def columns(self) -> TensorColumns:
        """Return the tensors as NumPy columns; ``tensors`` makes the objects on the first access."""
        return TensorColumns.of(self.tensors)

    def times(self, weight: int) -> Window:
        """Return the window as if each sample had been counted ``weight`` times; its steps and peaks are unchanged."""
        return replace(self, tensors=self.columns().times(weight))

    def of_kinds(self, kinds: Collection[str]) -> Window:
        """Return the window with only the tensors of these kinds."""
        return self._only(lambda key: key.kind in kinds)

    def without(self, keys: Collection[TensorKey]) -> Window:
        """Return the window without these tensors."""
        return self._only(lambda key: key not in keys) if keys else self

    def once(self, keys: Collection[TensorKey], parts: Sequence[Window]) -> Window:
        """Return this window, merged from ``parts``, with the shards of each of these tensors counted as one sample.

        ``samples`` becomes the largest of any part, ``numel_max`` the sum over the parts. The peaks stay the shards' peaks.
        """
        if not keys or not any(key in keys for key in self.tensors):
            return self
        return replace(self, tensors=self.columns().once(keys, [part.columns() for part in parts]))

    def _only(self, wanted: Callable[[TensorKey], bool]) -> Window:
        return replace(self, tensors=self.columns().only(wanted))


def merge_windows(first: Window, *others: Window) -> Window:
    """Merge neighbouring windows into one. The operation is associative."""
    if not others:
        return first
    windows = (first, *others)
    return Window(
        min(window.first_step for window in windows),
        max(window.last_step for window in windows),
        sum(window.sampled_steps for window in windows),
        merge_columns([window.columns() for window in windows]),
        add_counts(window.gradient_peaks for window in windows),
    )


def coarsen(windows: Sequence[Window], limit: int, before: int = 0) -> tuple[Window, ...]:
    """Merge neighbouring windows until at most ``limit`` are left, in step order; every total stays exact.

    The windows become about equally long (in sampled steps), even if old windows are coarsened repeatedly with new ones.
    ``before``: the number of sampled steps before them. Windows that overlap those of another rank lie in the same stretch of the
    longest length.

    Raises:
        ValueError: limit < 1.
    """
    groups = coarsen_plan([window.sampled_steps for window in windows], limit, before)
    return tuple(merge_windows(*(windows[index] for index in group)) for group in groups)


def window_limit(tensors: int) -> int:
    """Return the maximum number of windows of a run with this many tensors: 128; beyond 512 tensors fewer, but at least 16."""
    return max(LEAST_WINDOW_LIMIT, min(WINDOW_LIMIT, TENSOR_WINDOW_LIMIT // max(tensors, 1)))


def coarsen_plan(sampled_steps: Sequence[int], limit: int, before: int = 0) -> list[range]:
    """Return the groups of neighbours that ``coarsen`` merges: at most ``limit`` ranges of indices, in order.

    New windows are merged to the length of the old ones; the length, a power of two, is doubled only if too many windows are
    left. Groups begin at multiples of their length, counted in sampled steps from the start of the run.
    """
    if limit < 1:
        raise ValueError(f"windows can't be coarsened to {limit}: at least 1 must stay")
    if len(sampled_steps) <= limit:
        return [range(index, index + 1) for index in range(len(sampled_steps))]
    length = 2
    while length < max(sampled_steps):
        length *= 2
    # A window without samples counts as one; otherwise one group could take any number of empty windows.
    begins = list(accumulate((max(size, 1) for size in sampled_steps), initial=before))[:-1]
    while len({begin // length for begin in begins}) > limit:
        length *= 2
    blocks = [begin // length for begin in begins]
    groups = [list(group) for _, group in groupby(range(len(blocks)), blocks.__getitem__)]
    return [range(group[0], group[-1] + 1) for group in groups]
