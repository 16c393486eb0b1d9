"""The parts of a kernel report, as plain data: rows of its tables, losses, limits, ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.kernels.analysis.shares import Coverage, Shares


@dataclass(frozen=True)
class NameRow:
    """All runs of one kernel name that got the same verdict.

    Args:
        name, verdict, reason, kind, architecture: as in KernelRow.
        ops: names of the operators that launched it.
        calls, time_us: how often, and how long in all.
        fraction: of all kernel time.
        tflops: achieved rate over the runs whose FLOPs are known; None if there are none.
    """

    name: str
    verdict: str
    reason: str
    kind: str
    architecture: str
    ops: tuple[str, ...]
    calls: int
    time_us: float
    fraction: float
    tflops: float | None


@dataclass(frozen=True)
class ModuleRow:
    """All kernels of one module.

    Args:
        module: dotted path, or a chain of classes (``is_path`` False); "" for the kernels whose module is unknown.
        calls, time_us: how many kernels, and how long in all.
        fraction: of all kernel time.
        verdict_time_us: time by verdict.
    """

    module: str
    is_path: bool
    calls: int
    time_us: float
    fraction: float
    verdict_time_us: dict[str, float]


@dataclass(frozen=True)
class Saving:
    """Time that a change could save, an *estimate* with its basis.

    Args:
        way: the change: "TF32", "FP16 or BF16", "aligned rows" ...
        saved_us: over all runs; never below 0.
        basis: "sibling kernels" (the median rate of native products of the same trace, of the same kind, dtype and similar
            size) or "roofline" (what no kernel can be faster than: the saving is the most there is).
        limited_by: what limits the product after the change: "math" or "memory".
    """

    way: str
    saved_us: float
    basis: str
    limited_by: str


@dataclass(frozen=True)
class Loss:
    """Equal products whose kernels did not use Tensor Cores, though they could, or used them badly.

    Args:
        verdict: "off" or "degraded".
        kernel, op, phase, kind, dtype: of the runs.
        modules: where they ran, most time first; () where unknown.
        m, n, k, batch: the product; None where the trace has no shapes.
        cause: why, a sentence.
        cause_id: the finding's key: losses of one cause make one finding.
        calls, time_us, fraction: how often, how long in all, of all kernel time.
        tflops: achieved; None without shapes.
        savings: what could be saved, by way; empty where that is unknown.
        uneven_rows: row strides of its operands, in elements, that are no multiple of 16 bytes and are not a view's; None where
            the trace has no strides.
    """

    verdict: str
    kernel: str
    op: str
    modules: tuple[str, ...]
    phase: str
    kind: str
    dtype: str
    m: int | None
    n: int | None
    k: int | None
    batch: int | None
    cause: str
    cause_id: str
    calls: int
    time_us: float
    fraction: float
    tflops: float | None
    savings: tuple[Saving, ...]
    uneven_rows: tuple[int, ...] | None = None

    @property
    def module(self) -> str:
        """The module that took most of the time; "" where unknown."""
        return self.modules[0] if self.modules else ""

    @property
    def saved_us(self) -> float | None:
        """The largest of the savings; None where none is known."""
        return max((saving.saved_us for saving in self.savings), default=None)


@dataclass(frozen=True)
class Limits:
    """What limits the kernels, and the most that mixed precision and Tensor Cores can still bring (Amdahl's law).

    Kernel times are sums over kernels: kernels that run beside each other on two streams count twice.

    Args:
        span_us: from the first start to the last end on the GPU, summed over devices.
        idle_us: of it, time in which neither a kernel nor a copy ran; a lower precision does not fill it.
        copies_us: memory copies and sets.
        communication_us: kernels of NCCL and its like.
        math_limited_us: matrix products that the roofline of the units they ran on calls compute-bound.
        memory_limited_us: other matrix products, and every kernel that is none (an assumption: elementwise, normalisation,
            reduction, copy kernels).
        unknown_us: matrix products without known FLOPs, or on a GPU without known rates.
        saved_at_most_us: bound of what can still be saved, by its cause.
        speedup_at_most: span / (span - all of that), a bound; None where nothing ran or the rest is unknown (inf).
        kernel_speedup_at_most: the same of kernel time alone, as if the GPU never idled.
        assumptions: sentences.
    """

    span_us: float
    idle_us: float
    copies_us: float
    communication_us: float
    math_limited_us: float
    memory_limited_us: float
    unknown_us: float
    saved_at_most_us: dict[str, float]
    speedup_at_most: float | None
    kernel_speedup_at_most: float | None
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class DeviceTime:
    """How busy a GPU was. ``idle_fraction``: of its span; None where nothing ran."""

    device: int
    name: str
    kernels: int
    busy_us: float
    span_us: float

    @property
    def idle_fraction(self) -> float | None:
        return max(0.0, 1 - self.busy_us / self.span_us) if self.span_us > 0 else None


@dataclass(frozen=True)
class RankReport:
    """One trace's part. ``label`` names it in reports: "rank 3", or its file where ranks are unknown or not unique.

    ``cut_short``: its file ends before its events do.
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

    @property
    def has_gpu_work(self) -> bool:
        """Whether there is anything to say of a GPU, be it that its kernels could not be traced."""
        on_gpu = self.shares.calls or self.launches or any(device.span_us > 0 for device in self.devices)
        return bool(on_gpu or self.cut_short)
