"""Every kernel's verdict by its name, for its GPU and the dtype of its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mpinspect.kernels.analysis.operands import dtype_of
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.names import KernelVerdict, classify_kernel
from mpinspect.kernels.records import Kernel, KernelTrace
from mpinspect.runtime.gpus import Gpu, of_device


def rows_by_name(traces: Sequence[KernelTrace], gpu: Gpu | None = None) -> list[KernelRow]:
    """A row for each kernel of the traces, judged by its name alone. ``gpu`` overrides what the traces say."""
    judge = _cached()
    return [
        judge(kernel, found, index)
        for index, trace in enumerate(traces)
        for kernel, found in _on_their_gpus(trace, gpu)
    ]


def gpus_of(traces: Iterable[KernelTrace], gpu: Gpu | None = None) -> tuple[Gpu, ...]:
    """The distinct GPUs that the traces' kernels ran on, in order; the caller's only, if named."""
    if gpu is not None:
        return (gpu,)
    found: dict[tuple[str, str], Gpu] = {}
    for trace in traces:
        for one in _gpus(trace).values():
            found.setdefault((one.name, one.architecture), one)
    return tuple(found.values())


def gpu_of(trace: KernelTrace, device: int) -> Gpu:
    """The GPU of a device's number; one without a name where the trace does not describe it."""
    return _gpus(trace).get(device, Gpu("", vendor=""))


def _gpus(trace: KernelTrace) -> dict[int, Gpu]:
    return {device.id: of_device(device.name, device.major, device.minor, device.vendor) for device in trace.devices}


def _on_their_gpus(trace: KernelTrace, gpu: Gpu | None) -> Iterable[tuple[Kernel, Gpu]]:
    gpus, unknown = _gpus(trace), Gpu("", vendor="")
    for kernel in trace.kernels:
        yield kernel, gpu or gpus.get(kernel.device, unknown)


def _cached() -> Callable[[Kernel, Gpu, int], KernelRow]:
    """A judge that looks at each name, dtype and GPU once: a trace has many kernels of few names."""
    known: dict[tuple[str, str, int], tuple[KernelVerdict, str]] = {}
    # By identity, for hashing an operator with its shapes takes longer than all the rest; traces and rows keep them alive.
    dtypes: dict[int, str] = {}

    def judge(kernel: Kernel, gpu: Gpu, trace: int) -> KernelRow:
        op = kernel.matmul_op or kernel.op
        if id(op) not in dtypes:
            dtypes[id(op)] = dtype_of(op)
        dtype = dtypes[id(op)]
        key = (kernel.name, dtype, id(gpu))
        if key not in known:
            named = classify_kernel(kernel.name, gpu, dtype or None)
            known[key] = named, dtype or _stored(named)
        named, dtype = known[key]
        return KernelRow(kernel, named, gpu, trace, named.verdict, named.reason, "name", dtype)

    return judge


def _stored(named: KernelVerdict) -> str:
    """The dtype of the operands in memory by the kernel's name; "" where it tells none or several."""
    if len(set(named.dtypes)) != 1:
        return ""
    return "float32" if named.dtypes[0] == "tfloat32" else named.dtypes[0]
