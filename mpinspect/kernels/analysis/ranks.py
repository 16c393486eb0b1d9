"""Report on each trace separately, and check whether several traces are ranks of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.shares import Coverage, Shares, coverage, shares
from mpinspect.kernels.records import KernelTrace
from mpinspect.reporting.json_text import named


@dataclass(frozen=True)
class DeviceTime:
    """The busy time of a GPU. ``span_us``: from the first start to the last end of a kernel or copy."""

    device: int
    name: str
    kernels: int
    busy_us: float
    span_us: float

    @property
    def idle_fraction(self) -> float | None:
        """Return the idle share of the span; None if the span is empty."""
        return max(0.0, 1 - self.busy_us / self.span_us) if self.span_us > 0 else None


@dataclass(frozen=True)
class RankReport:
    """The part of a report on one trace.

    Args:
        label: the trace's name in reports: "rank 3", or its file if ranks are unknown or not unique.
        source, rank, world_size, job, operators, launches, copies_us, notes, cut_short, accelerator: as in KernelTrace.
        shares, coverage: figures over the trace's kernels.
        devices: the trace's GPUs, by id.
    """

    label: str
    source: str
    rank: int | None
    world_size: int | None
    job: str
    operators: int
    launches: int
    shares: Shares
    coverage: Coverage
    copies_us: float
    devices: tuple[DeviceTime, ...]
    notes: tuple[str, ...] = ()
    cut_short: bool = False
    accelerator: str = ""

    @property
    def has_gpu_work(self) -> bool:
        """Return whether a GPU did anything in this trace, or may have in the missing part of a truncated trace."""
        on_gpu = self.shares.calls or self.launches or any(device.span_us > 0 for device in self.devices)
        return bool(on_gpu or self.cut_short)


#: Least share of kernel names (of the rank with fewer names) that ranks of one job have in common, since they run the same code.
#: Two ranks of a sharded recommender share 90% and more; unrelated models share torch's elementwise kernels.
_SAME_CODE = 0.5


def rank_reports(traces: Sequence[KernelTrace], rows: Sequence[KernelRow]) -> tuple[RankReport, ...]:
    """Return a report for each trace, in order. ``rows``: the rows of all traces."""
    by_trace: list[list[KernelRow]] = [[] for _ in traces]
    for row in rows:
        by_trace[row.trace].append(row)
    return tuple(
        _rank_report(trace, of_trace, label)
        for trace, of_trace, label in zip(traces, by_trace, labels(traces), strict=True)
    )


def labels(traces: Sequence[KernelTrace]) -> list[str]:
    """Return a label for each trace: "rank 3" if ranks are unique, else the file's name; "this profile" without a file."""
    ranks = [trace.rank for trace in traces]
    if len(traces) > 1 and None not in ranks and len(set(ranks)) == len(ranks):
        return [f"rank {rank}" for rank in ranks]
    files = [PurePath(trace.source).name for trace in traces]
    if len(set(files)) < len(files):
        files = [trace.source for trace in traces]
    return [name or "this profile" for name in files]


def differences(traces: Sequence[KernelTrace]) -> list[str]:
    """Return clauses on why the traces are not ranks of one job; [] without a reason."""
    found = []
    jobs = sorted({trace.job for trace in traces if trace.job})
    if len(jobs) > 1:
        found.append("they name different jobs")
    sizes = sorted({trace.world_size for trace in traces if trace.world_size is not None})
    if len(sizes) > 1:
        found.append(f"their world sizes are {', '.join(map(str, sizes))}")
    ranks = [trace.rank for trace in traces if trace.rank is not None]
    if len(set(ranks)) < len(ranks):
        found.append("a rank occurs twice")
    gpus = sorted({device.name for trace in traces for device in trace.devices if device.name})
    if len(gpus) > 1:
        found.append(f"they ran on {' and '.join(gpus)}")
    if _run_different_code(traces):
        found.append("they share few kernels")
    return found


def _run_different_code(traces: Sequence[KernelTrace]) -> bool:
    names = [names for trace in traces if (names := {kernel.name for kernel in trace.kernels})]
    return any(len(names[0] & other) < _SAME_CODE * min(len(names[0]), len(other)) for other in names[1:])


def _rank_report(trace: KernelTrace, rows: Sequence[KernelRow], label: str) -> RankReport:
    devices = sorted({device.id for device in trace.devices} | set(trace.span_us) | set(trace.busy_us))
    return RankReport(
        label=label,
        shares=shares(rows),
        coverage=coverage(rows),
        devices=tuple(_device(trace, rows, number) for number in devices),
        **named(trace, "source rank world_size job operators launches copies_us notes cut_short accelerator"),
    )


def _device(trace: KernelTrace, rows: Sequence[KernelRow], number: int) -> DeviceTime:
    name = next((device.name for device in trace.devices if device.id == number), "")
    return DeviceTime(
        device=number,
        name=name,
        kernels=sum(row.device == number for row in rows),
        busy_us=trace.busy_us.get(number, 0.0),
        span_us=trace.span_us.get(number, 0.0),
    )
