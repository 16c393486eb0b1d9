"""Frozen records of what ran on a GPU, as a trace has them: all that the reader hands to the analysis.

Times are microseconds on the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How names of ranges begin in this package's own profiles: around a module's forward, and around its output's backward. The
#: module's dotted path follows, "" for the model itself.
MODULE_RANGE, BACKWARD_RANGE = "mpinspect::module::", "mpinspect::backward::"

#: Reasons why a kernel has no operator.
UNATTRIBUTED = ("before the window", "CUDA graph", "no launch", "no op")


@dataclass(frozen=True, slots=True)
class TraceOp:
    """An operator's call, as the profiler recorded it.

    Args:
        name: as "aten::addmm".
        shapes, strides: an entry for each argument, () for those that are no tensors; None where the trace has none.
        dtypes: names as the profiler wrote them ("c10::BFloat16", "float"); None where the trace has none.
        scalars: "Concrete Inputs" as the profiler wrote them; None where the trace has none.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...] | None = None
    strides: tuple[tuple[int, ...], ...] | None = None
    dtypes: tuple[str, ...] | None = None
    scalars: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel.

    Args:
        name: as the profiler wrote it.
        start_us, time_us: its start and duration.
        device, stream: numbers of the GPU and of its stream.
        op: the innermost operator that was running on the launching thread at the launch; None if there is none.
        matmul_op: the innermost matrix product among ``op`` and the operators around it (aten::convolution_backward around
            aten::copy_); None if there is none.
        module: dotted path of the module (own profiles), or its chain of classes by the Python stack of another trace
            ("BertLMHeadModel_0/BertOnlyMLMHead_0/Linear_26"); "" where unknown.
        module_is_path: whether ``module`` is a dotted path.
        phase: "forward", "backward", "optimizer" or "" where unknown.
        unattributed: one of UNATTRIBUTED where ``op`` is None, else "".
        is_graph: whether a CUDA graph launched it.
        step: number of the ProfilerStep that launched it, or None.
        call: number of the call of ``matmul_op`` within its trace, the same for all kernels that the call launched; None where
            unknown.
        encloses: whether another product's operator, or another library's, launched kernels within that call
            (aten::_convolution adds the bias around aten::cudnn_convolution).
    """

    name: str
    start_us: float
    time_us: float
    device: int
    stream: int
    op: TraceOp | None = None
    matmul_op: TraceOp | None = None
    module: str = ""
    module_is_path: bool = False
    phase: str = ""
    unattributed: str = ""
    is_graph: bool = False
    step: int | None = None
    call: int | None = None
    encloses: bool = False


@dataclass(frozen=True)
class Device:
    """A GPU as the trace describes it; numbers that the trace lacks are None. ``vendor``: "NVIDIA", "AMD" or ""."""

    id: int
    name: str
    vendor: str = ""
    major: int | None = None
    minor: int | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True)
class KernelTrace:
    """One rank's trace.

    Args:
        source: the file's path; "" for a profile just taken.
        rank, world_size: of the job; None where the trace does not say.
        job: a name that tells runs apart; "" where the trace does not say.
        devices: the GPUs that ran a kernel of this trace, by id; those that the trace does not describe have no name.
        kernels: by start time.
        copies_us: total time of memory copies and sets, which are no kernels.
        window_us: (start, end) of what was recorded; GPU idle time is judged over the kernels' own span.
        busy_us: time in which at least one kernel or copy ran, by device id.
        span_us: from the first start to the last end of a kernel or copy, by device id.
        operators: number of operators recorded; 0 for a trace of the GPU alone.
        has_shapes, has_strides: whether any operator has them.
        launches: number of launches recorded.
        external_id_is_correlation: whether a version of torch wrote the kernels' External ids that writes correlations there.
        notes: sentences on what the trace lacks or could not be read, and what follows.
        cut_short: whether the file ends before its events do; the first of ``notes`` says where.
    """

    source: str
    rank: int | None
    world_size: int | None
    job: str
    devices: tuple[Device, ...]
    kernels: tuple[Kernel, ...]
    copies_us: float
    window_us: tuple[float, float]
    busy_us: dict[int, float]
    span_us: dict[int, float]
    operators: int
    has_shapes: bool
    has_strides: bool
    launches: int
    external_id_is_correlation: bool = False
    notes: tuple[str, ...] = ()
    cut_short: bool = False
