"""Attributes kernels to operator, module, phase and step: by correlation to a launch, by nesting to what is around that."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpinspect.kernels.records import Kernel
from mpinspect.kernels.trace.contexts import Operators, Surroundings, surroundings
from mpinspect.kernels.trace.launches import Launches
from mpinspect.kernels.trace.recording import Recording


def attributed(recording: Recording, launches: Launches) -> tuple[Kernel, ...]:
    """Return all kernels by start time. External ids are not used (see ``launches.external_id_is_correlation``)."""
    operators = Operators(recording)
    launched = np.flatnonzero(launches.of_kernel >= 0)
    launch = launches.of_kernel[launched]
    around = surroundings(recording, operators, recording.launches["thread"][launch], recording.launches.start[launch])
    place = np.full(len(recording.kernels), -1)
    place[launched] = np.arange(len(launched))
    made = list(_kernels(recording, launches, operators, around, place.tolist()))
    kernels = recording.kernels
    order = np.lexsort((kernels["correlation"], kernels["stream"], kernels["device"], kernels.start))
    return tuple(made[position] for position in order.tolist())


def _kernels(
    recording: Recording, launches: Launches, operators: Operators, around: Surroundings, places: list[int]
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
        operator = -1 if is_graph or place < 0 else around.operators[place]
        module = around.modules[place] if place >= 0 else None
        yield Kernel(
            names[name],
            start,
            time,
            device,
            stream,
            operators.record(operator),
            operators.record(around.products[place]) if operator >= 0 else None,
            module or "",
            around.is_path and module is not None,
            around.phases[place] if place >= 0 else "",
            "" if operator >= 0 else _why_none(is_graph, launch, before),
            is_graph,
            around.steps[place] if place >= 0 else None,
            around.calls[place] if operator >= 0 else None,
            operator >= 0 and around.encloses[place],
        )


def _why_none(is_graph: bool, launch: int, before: bool) -> str:
    if is_graph:
        return "CUDA graph"
    if launch >= 0:
        return "no op"
    return "before the window" if before else "no launch"


def _graph_launches(recording: Recording, names: list[str]) -> list[bool]:
    """Returns for each launch whether it runs a whole graph (cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch)."""
    graphs = {number for number, name in enumerate(names) if "GraphLaunch" in name}
    return [name in graphs for name in recording.launches["name"].tolist()]
