"""Words the sentences on data that a trace lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpinspect.kernels.records import Device
    from mpinspect.kernels.trace.attribution import Launches
    from mpinspect.kernels.trace.events import EventStream
    from mpinspect.kernels.trace.recording import Recording

_NOT_THAT_FAR = (
    "The readable part has no GPU kernels: the profiler writes most of them after the operators, so they are lost."
)


def notes(
    stream: EventStream, recording: Recording, launches: Launches, devices: tuple[Device, ...], wrong_ids: bool
) -> tuple[str, ...]:
    """Return sentences on missing parts of a trace and the consequences, the most important first."""
    return (*_of_the_file(stream, recording), *_of_kernels(stream, recording, launches, devices, wrong_ids))


def _of_the_file(stream: EventStream, recording: Recording) -> Iterator[str]:
    if stream.problem:
        yield stream.problem
    if stream.header_problem:
        yield stream.header_problem
    if left_out := stream.damaged + recording.unreadable:
        yield f"{left_out:,} events are left out because they are not valid JSON or not events of a trace."
    if recording.pairs:
        yield (
            f"{recording.pairs:,} events are halves of begin and end pairs (phases B and E), which torch.profiler does not "
            "write: they are left out, so that kernels may lack their operators."
        )
    if recording.without_duration:
        yield f"{recording.without_duration:,} events have no duration or a negative one: it is taken as 0."


def _of_kernels(
    stream: EventStream, recording: Recording, launches: Launches, devices: tuple[Device, ...], wrong_ids: bool
) -> Iterator[str]:
    if not len(recording.kernels):
        if recording.producer() is not None:
            return
        yield _no_kernels(recording, stream)
        return
    if not len(recording.operators):
        yield (
            "The trace has no operators, only the GPU's side: profile with ProfilerActivity.CPU too, so that kernels can be "
            "attributed."
        )
    elif not recording.has_shapes:
        yield "The operators have no shapes: profile with record_shapes=True to learn why a kernel is slow."
    if wrong_ids:
        yield (
            "The kernels' External id equals their correlation, as some versions of torch write it. It identifies no operator, "
            "so it is not used."
        )
    if launches.ambiguous:
        yield (
            f"{launches.ambiguous:,} kernels can't be matched with a launch: several processes share this file, and their "
            "launches have the same correlation. Read each rank's own trace."
        )
    if launches.shared:
        yield (
            f"{launches.shared:,} kernels have a correlation that others have too, though one launch starts one kernel (the "
            "trace was edited, or merged of several): which of them it started is unknown, and so are their operators."
        )
    if any(not device.vendor and not device.name for device in devices):
        yield "The trace does not describe its GPU (no deviceProperties): name the GPU to get verdicts that depend on it."
    if any(device.vendor == "AMD" for device in devices):
        yield "The GPU is AMD's: it has matrix cores, not Tensor Cores, and kernel names of their own."


def _no_kernels(recording: Recording, stream: EventStream) -> str:
    if stream.is_cut:
        return _NOT_THAT_FAR
    if any(len(columns) for columns in (recording.copies, recording.launches)):
        return (
            "The trace has no GPU kernels, though it has launches: the profiler's window ended before they ran (end it after "
            "torch.cuda.synchronize()), or GPU activity could not be collected (another profiler at work, or no permission)."
        )
    if len(recording.operators):
        return "The trace has no GPU activity at all: the run was on a CPU, or it was profiled without ProfilerActivity.CUDA."
    return "The trace has neither operators nor GPU activity: nothing ran while the profiler recorded, or another tool wrote it."
