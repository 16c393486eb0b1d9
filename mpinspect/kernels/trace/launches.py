"""Finds the call on the host that launched a kernel: by correlation, and by process where several processes share a file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpinspect.kernels.trace.columns import Ints
from mpinspect.kernels.trace.recording import Recording

#: External ids are correlations if they equal them for more than this share of kernels; ids of operators do for a few, by chance.
_MOST = 0.5
_STARTS_MANY = re.compile(r"GraphLaunch|MultiDevice")


@dataclass(frozen=True)
class Launches:
    """The launches of a recording's kernels.

    Args:
        of_kernel: for each kernel the position of its launch in the recording, or -1.
        before_window: for each kernel whether its launch is missing because it was before the profiler began to record.
        ambiguous: number of kernels without a launch because launches of several processes have their correlation.
        shared: number of kernels without a launch because other kernels have the same one, which starts a single kernel.
    """

    of_kernel: NDArray[np.int64]
    before_window: NDArray[np.bool_]
    ambiguous: int = 0
    shared: int = 0


def find_launches(recording: Recording) -> Launches:
    """Join the kernels with their launches."""
    wanted, kernel_start = recording.kernels["correlation"], recording.kernels.start
    start, correlation = recording.launches.start, recording.launches["correlation"]
    if not len(start):
        return Launches(np.full(len(wanted), -1), np.zeros(len(wanted), bool))
    order = np.lexsort((start, correlation))
    first = np.searchsorted(correlation[order], wanted)
    count = np.searchsorted(correlation[order], wanted, "right") - first
    of_kernel = np.where(count > 0, order[np.minimum(first, len(order) - 1)], -1)
    ambiguous = 0
    if np.any(count > 1):
        candidates = {
            kernel: order[first[kernel] : first[kernel] + count[kernel]] for kernel in np.flatnonzero(count).tolist()
        }
        ambiguous = _choose(recording, candidates, of_kernel)
    doubtful = _sharing(recording, of_kernel)
    of_kernel[doubtful] = -1
    earlier = (wanted > 0) & (wanted < correlation.min())
    before_window = (of_kernel < 0) & (count == 0) & (earlier | (kernel_start < start.min()))
    return Launches(of_kernel, before_window, ambiguous, int(doubtful.sum()))


def _sharing(recording: Recording, of_kernel: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns for each kernel whether others have its launch although that call starts one kernel: at most one of them is right.

    Launches of graphs and on several devices (cudaLaunchCooperativeKernelMultiDevice) start many kernels.
    """
    starts_one = np.array(
        ["launch" in name.lower() and not _STARTS_MANY.search(name) for name in recording.names], bool
    )
    known = np.flatnonzero((of_kernel >= 0) & (recording.kernels["graph"] == 0))
    runs = np.bincount(of_kernel[known], minlength=len(recording.launches))
    doubtful = np.zeros(len(of_kernel), bool)
    doubtful[known] = (runs > 1)[of_kernel[known]] & starts_one[recording.launches["name"][of_kernel[known]]]
    return doubtful


def _choose(recording: Recording, candidates: dict[int, NDArray[np.intp]], of_kernel: NDArray[np.int64]) -> int:
    """Chooses among several launches of one correlation; returns the number of kernels for which that is impossible.

    A launch must have begun before its kernel; of several in one process, the last such counts. The process that has launches
    for most of a GPU's kernels is taken as that GPU's own. Other kernels are decided by elimination: a launch starts one kernel.
    """
    pids = [thread[0] for thread in recording.threads]
    process = [pids[thread] for thread in recording.launches["thread"].tolist()]
    starts, kernel_starts = recording.launches.start, recording.kernels.start
    devices = recording.kernels["device"].tolist()
    votes: dict[int, Counter[object]] = defaultdict(Counter)
    possible: dict[int, dict[object, int]] = {}
    for kernel, launches in candidates.items():
        possible[kernel] = {
            process[launch]: int(launch) for launch in launches if starts[launch] <= kernel_starts[kernel]
        }
        if not possible[kernel] and len({process[launch] for launch in launches}) == 1:
            # Where the clocks differ a little, all launches can seem to be after the kernel.
            possible[kernel] = {process[launches[0]]: int(launches[0])}
        votes[devices[kernel]].update(possible[kernel].keys())
    homes = {device: _clear_winner(counted) for device, counted in votes.items()}
    several = [kernel for kernel in candidates if len(candidates[kernel]) > 1]
    for kernel in several:
        of_kernel[kernel] = _only(possible[kernel]) if len(possible[kernel]) == 1 else -1
        if (home := homes[devices[kernel]]) in possible[kernel]:
            of_kernel[kernel] = possible[kernel][home]
    taken = set(of_kernel.tolist())
    for kernel in several:
        if of_kernel[kernel] < 0:
            free = {pid: launch for pid, launch in possible[kernel].items() if launch not in taken}
            of_kernel[kernel] = _only(free) if len(free) == 1 else -1
    return int(np.sum(of_kernel[several] < 0))


def _only(launches: dict[object, int]) -> int:
    return next(iter(launches.values()))


def _clear_winner(votes: Counter[object]) -> object:
    """Returns the one with most votes; for a tie a fresh object, which equals nothing."""
    best = votes.most_common(2)
    return best[0][0] if best and (len(best) == 1 or best[0][1] > best[1][1]) else object()


def external_id_is_correlation(correlation: Ints, external: Ints) -> bool:
    """Whether the kernels' External ids are their correlations, as some versions of torch write, and not ids of operators."""
    known = (external >= 0) & (correlation >= 0)
    return bool(known.any() and np.mean(external[known] == correlation[known]) > _MOST)
