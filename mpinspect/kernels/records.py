"""The waist of kernel detection: frozen records of what ran on a GPU, read from a trace; no verdict and no torch.

Times are microseconds on the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Why a kernel has no operator: said of each kernel that has none.
UNATTRIBUTED = ("before the window", "CUDA graph", "no launch", "no op")


@dataclass(frozen=True, slots=True)
class TraceOp:
    """An operator's call, as the profiler recorded it.

    Args:
        name: as "aten::addmm".
        shapes, strides: one entry an argument, () for those that are no tensors; None where the trace has none.
        dtypes: names that the profiler wrote ("c10::BFloat16", "float"); None where the trace has none.
        scalars: "Concrete Inputs", strings as the profiler wrote them; None where the trace has none.
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
        start_us, time_us: when and how long.
        device, stream: where.
        op: the innermost operator on the launching thread that was running at the launch; None if there is none.
        matmul_op: the innermost operator around the launch that is a matrix product, or ``op`` itself
            (aten::addmm around cutlass, aten::convolution_backward around aten::copy_); None if there is none.
        module: dotted path of the module (own profiles), or the chain of classes that a foreign trace's Python stack gives
            ("BertLMHeadModel_0/BertOnlyMLMHead_0/Linear_26"); "" where unknown.
        module_is_path: whether ``module`` is a dotted path.
        phase: "forward", "backward", "optimizer" or "" where unknown.
        unattributed: one of UNATTRIBUTED where ``op`` is None, else "".
        is_graph: launched by a CUDA graph.
        step: number of the ProfilerStep it was launched in, or None.
        call: number of the call of ``matmul_op`` within its trace: kernels that one call launched have the same number, equal
            operators called twice have two; None where unknown.
        encloses: whether within that call another product's operator, or one of another library, launched kernels of its own:
            aten::_convolution around aten::cudnn_convolution, whose bias it adds.
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
    """A GPU as the trace describes it. ``vendor``: "NVIDIA", "AMD" or "" where unknown; None: not in the trace."""

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
        rank, world_size, job: from distributedInfo; None / "" where the trace does not say. ``job`` tells runs apart.
        devices: the GPUs that ran a kernel of this trace, by id (their properties may be missing: name "").
        kernels: by start time.
        copies_us: total time of memory copies and sets, which are no kernels.
        window_us: (start, end) of what was recorded; GPU idle time is judged over the kernels' own span.
        busy_us: time in which at least one kernel or copy ran, per device id.
        span_us: from the first start to the last end of a kernel or copy, per device id.
        operators: number of operators recorded; 0: a trace of the GPU alone.
        has_shapes, has_strides: whether any operator has them.
        launches: number of launches recorded.
        external_id_is_correlation: the range of torch versions whose External id is wrong; it was ignored (never used anyway).
        notes: sentences: what the trace lacks or could not be read, and what follows.
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
