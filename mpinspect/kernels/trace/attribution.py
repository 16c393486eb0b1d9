"""Attribute kernels: by correlation to the host call that launched them, then by nesting to its operator, module and step."""

from __future__ import annotations

import marshal
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpinspect.kernels.records import Kernel, TraceOp
from mpinspect.kernels.trace.columns import Ints
from mpinspect.kernels.trace.contexts import Surroundings, surroundings
from mpinspect.kernels.trace.recording import Recording
from mpinspect.reporting.words import optional

#: External ids are correlations if they are equal for more than this share of kernels; operator ids are for a few, by chance.
_MOST = 0.5
_STARTS_MANY = re.compile(r"GraphLaunch|MultiDevice")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Launches:
    """The launches of a recording's kernels.

    Args:
        of_kernel: for each kernel, the index of its launch in the recording, or -1.
        before_window: for each kernel, whether its launch is missing because it happened before the profiler began to record.
        ambiguous: number of kernels without a launch because launches in several processes have the kernel's correlation.
        shared: number of kernels without a launch because several kernels match one launch that can start only one.
    """

    of_kernel: NDArray[np.int64]
    before_window: NDArray[np.bool_]
    ambiguous: int = 0
    shared: int = 0


def find_launches(recording: Recording) -> Launches:
    """Match the kernels with their launches."""
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
    """Return whether each kernel shares its launch with others although the call starts one kernel only: at most one is right.

    Launches of graphs and on several devices (cudaLaunchCooperativeKernelMultiDevice) can start many kernels.
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
    """Choose among several launches with one correlation; return the number of kernels without a possible choice.

    A launch must start before its kernel; of several such launches in one process, the last one counts. The process with launches
    for most of a GPU's kernels is assumed to be that GPU's own. Other kernels are decided by elimination: a launch starts only
    one kernel.
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
            # If the clocks differ slightly, all launches can seem to be later than the kernel.
            possible[kernel] = {process[launches[0]]: int(launches[0])}
        votes[devices[kernel]].update(possible[kernel].keys())
    homes = {device: _clear_winner(counted) for device, counted in votes.items()}
    several = [kernel for kernel in candidates if len(candidates[kernel]) > 1]
    for kernel in several:
        launches_of = possible[kernel]
        of_kernel[kernel] = launches_of.get(homes[devices[kernel]], _only([*launches_of.values()]))
    taken = set(of_kernel.tolist())
    for kernel in several:
        if of_kernel[kernel] < 0:
            of_kernel[kernel] = _only([launch for launch in possible[kernel].values() if launch not in taken])
    return int(np.sum(of_kernel[several] < 0))


def _only(launches: list[int]) -> int:
    return launches[0] if len(launches) == 1 else -1


def _clear_winner(votes: Counter[object]) -> object:
    """Return the entry with most votes; on a tie, return a new object, which differs from every entry."""
    best = votes.most_common(2)
    if best and (len(best) == 1 or best[0][1] > best[1][1]):
        return best[0][0]
    return object()


def external_id_is_correlation(correlation: Ints, external: Ints) -> bool:
    """Return whether the kernels' External ids are correlations, as some torch versions write, instead of operator ids."""
    known = (external >= 0) & (correlation >= 0)
    return bool(known.any() and np.mean(external[known] == correlation[known]) > _MOST)


def attributed(recording: Recording, launches: Launches) -> tuple[Kernel, ...]:
    """Return all kernels by start time. External ids are not used (see ``external_id_is_correlation``)."""
    operators = _TraceOps(recording)
    launched = np.flatnonzero(launches.of_kernel >= 0)
    launch = launches.of_kernel[launched]
    around = surroundings(recording, recording.launches["thread"][launch], recording.launches.start[launch])
    place = np.full(len(recording.kernels), -1)
    place[launched] = np.arange(len(launched))
    made = list(_kernels(recording, launches, operators, around, place.tolist()))
    kernels = recording.kernels
    order = np.lexsort((kernels["correlation"], kernels["stream"], kernels["device"], kernels.start))
    return tuple(made[position] for position in order.tolist())


def _kernels(
    recording: Recording, launches: Launches, operators: _TraceOps, around: Surroundings, places: list[int]
) -> Iterator[Kernel]:
    names = list(recording.names)
    graph_launch = _graph_launches(recording, names)
    columns = recording.kernels
    rows = zip(
        columns["name"].tolist(),
        columns.start.tolist(),
        columns.duration.tolist(),
        columns["device"].tolist(),
        columns["stream"].tolist(),
        columns["graph"].tolist(),
        launches.of_kernel.tolist(),
        launches.before_window.tolist(),
        places,
        strict=True,
    )
    for name, start, time, device, stream, graph, launch, before, place in rows:
        is_graph = bool(graph) or (launch >= 0 and graph_launch[launch])
        module = around.modules[place]
        # A graph's kernels have no operator; the operators around the graph's launch did not choose them.
        of_operator = -1 if is_graph else place
        operator = around.operators[of_operator]
        yield Kernel(
            names[name],
            start,
            time,
            device,
            stream,
            operators.at(operator),
            operators.at(around.products[of_operator]),
            module or "",
            around.is_path and module is not None,
            around.phases[place],
            _why_none(operator, is_graph, launch, before),
            is_graph,
            around.steps[place],
            around.calls[of_operator],
            around.encloses[of_operator],
        )


def _why_none(operator: int, is_graph: bool, launch: int, before: bool) -> str:
    if operator >= 0:
        return ""
    if is_graph:
        return "CUDA graph"
    if launch >= 0:
        return "no op"
    return "before the window" if before else "no launch"


def _graph_launches(recording: Recording, names: list[str]) -> list[bool]:
    """Return, for each launch, whether it runs a whole graph (cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch)."""
    graphs = {number for number, name in enumerate(names) if "GraphLaunch" in name}
    return [name in graphs for name in recording.launches["name"].tolist()]


class _TraceOps:
    """Make TraceOps of one recording's operators; equal operators share one object."""

    def __init__(self, recording: Recording) -> None:
        self._names = list(recording.names)
        # The last place is that of an operator without arguments, whose number is -1.
        self._described = [*recording.arguments, marshal.dumps([None] * 4)]
        self._name = recording.operators["name"].tolist()
        self._arguments = recording.operators["arguments"].tolist()
        self._made: dict[tuple[int, int], TraceOp] = {}

    def at(self, operator: int) -> TraceOp | None:
        """Return the TraceOp at an index of the recording; None for -1."""
        if operator < 0:
            return None
        key = self._name[operator], self._arguments[operator]
        if key not in self._made:
            self._made[key] = _trace_op(self._names[key[0]], *marshal.loads(self._described[key[1]]))
        return self._made[key]


def _trace_op(name: str, dims: Any, strides: Any, dtypes: Any, scalars: Any) -> TraceOp:
    return TraceOp(name, _each(_sizes, dims), _each(_sizes, strides), _each(str, dtypes), _each(_text, scalars))


def _each(convert: Callable[[Any], _T], values: object) -> tuple[_T, ...] | None:
    return tuple(map(convert, values)) if isinstance(values, list) else None


def _text(value: object) -> str:
    return optional(value, str, "")


def _sizes(sizes: object) -> tuple[int, ...]:
    """Return a tensor's sizes; () for other arguments, including lists of tensors, whose sizes are nested deeper."""
    if isinstance(sizes, list) and all(type(size) is int for size in sizes):
        return tuple(sizes)
    return ()
