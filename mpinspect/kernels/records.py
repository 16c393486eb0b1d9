"""Define frozen records of a GPU's activity, as in a trace: the reader passes only these to the analysis.

All times are microseconds on the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Prefixes of range names in this package's own profiles: around a module's forward, and around its output's backward. The
#: module's dotted path follows, "" for the model itself.
MODULE_RANGE, BACKWARD_RANGE = "mpinspect::module::", "mpinspect::backward::"

#: Reasons why a kernel has no operator.
UNATTRIBUTED = ("before the window", "CUDA graph", "no launch", "no op")


@dataclass(frozen=True, slots=True)
class TraceOp:
    """One call of an operator, as the profiler recorded it.

    Args:
        name: the operator's name, "aten::addmm".
        shapes, strides: one entry per argument, () for arguments that are not tensors; None if missing from the trace.
        dtypes: names as the profiler wrote them ("c10::BFloat16", "float"); None if missing from the trace.
        scalars: "Concrete Inputs" as the profiler wrote them; None if missing from the trace.
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
        name: the kernel's name as the profiler wrote it.
        start_us, time_us: its start and duration.
        device, stream: ids of the GPU and of its stream.
        op: the innermost operator that was running on the launching thread at the launch; None without one.
        matmul_op: the innermost matrix product among ``op`` and the operators around it (aten::convolution_backward around
            aten::copy_); None without one.
        module: dotted path of the module (own profiles), or its chain of classes from another trace's Python stack
            ("BertLMHeadModel_0/BertOnlyMLMHead_0/Linear_26"); "" if unknown.
        module_is_path: whether ``module`` is a dotted path.
        phase: "forward", "backward", "optimizer"; "" if unknown.
        unattributed: one of UNATTRIBUTED if ``op`` is None, else "".
        is_graph: whether a CUDA graph launched the kernel.
        step: number of the ProfilerStep that launched the kernel, or None.
        call: number of the call of ``matmul_op`` within its trace, equal for all kernels that the call launched; None if unknown.
        encloses: whether another product's operator, or another library's operator, launched kernels within that call
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
    """A GPU as described in the trace; numbers missing from the trace are None. ``vendor``: "NVIDIA", "AMD" or ""."""

    id: int
    name: str
    vendor: str = ""
    major: int | None = None
    minor: int | None = None


@dataclass(frozen=True)
class KernelTrace:
    """One rank's trace.

    Args:
        source: the file's path; "" for a profile just recorded.
        rank, world_size: the job's; None if missing from the trace.
        job: a name that distinguishes runs; "" if missing from the trace.
        devices: the GPUs that ran a kernel of this trace, by id; a GPU that the trace does not describe has no name.
        kernels: the kernels, by start time.
        copies_us: total time of memory copies and memsets, which do not count as kernels.
        busy_us: time with at least one kernel or copy running, by device id.
        span_us: from the first start to the last end of a kernel or copy, by device id.
        operators: number of operators recorded; 0 for a trace of the GPU alone.
        launches: number of launches recorded.
        notes: sentences on missing or unreadable parts of the trace, and the consequences.
        cut_short: whether the file ends before its events do; the first of ``notes`` gives the place.
        accelerator: words for the accelerator that torch used, if it is not a GPU; else "".
    """

    source: str
    rank: int | None
    world_size: int | None
    job: str
    devices: tuple[Device, ...]
    kernels: tuple[Kernel, ...]
    copies_us: float
    busy_us: dict[int, float]
    span_us: dict[int, float]
    operators: int
    launches: int
    notes: tuple[str, ...] = ()
    cut_short: bool = False
    accelerator: str = ""
