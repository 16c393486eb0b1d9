"""Synthetic traces for tests of the kernel report: kernels of named families, operators with shapes, whole KernelTraces."""

import itertools
from pathlib import Path

from mpinspect.kernels.analysis import analyse_kernels
from mpinspect.kernels.records import Device, Kernel, KernelTrace, TraceOp

TRACES = Path(__file__).parent / "data" / "traces"
#: Every real trace; a folder of ranks is one trace.
REAL = (*sorted(path.name for path in TRACES.glob("*.json.gz")), "ranks")

A100 = Device(0, "NVIDIA A100-SXM4-40GB", "NVIDIA", 8, 0)
H100 = Device(0, "NVIDIA H100 80GB HBM3", "NVIDIA", 9, 0)
V100 = Device(0, "Tesla V100-SXM2-32GB", "NVIDIA", 7, 0)
GP100 = Device(0, "Quadro GP100", "NVIDIA", 6, 0)
MI300X = Device(0, "AMD Instinct MI300X", "AMD", 9, 4)
NAMELESS = Device(0, "")

#: One kernel name per verdict, on an H100 or A100 with BF16 operands.
NATIVE = "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x6_tn_align8"
DEGRADED = "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2"
SGEMM = "ampere_sgemm_128x64_tn"
HGEMM = "ampere_hgemm_128x64_tn"
TF32 = "cutlass_80_tensorop_s1688gemm_128x64_32x6_tn_align4"
V884 = "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn"
TRITON = "triton_tem_fused_addmm_0"
SPLIT_K = "void splitKreduce_kernel<32, 16, int, float, __half>(int)"
LAYOUT = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(int)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, int>(int)"
ADD_BF16 = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, int>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)"
WGRAD = "sm80_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_tensor16x8x8_execute_kernel"
DGRAD = WGRAD.replace("wgrad", "dgrad")

_calls = itertools.count()


def mm(
    m: int, n: int, k: int, dtype: str = "c10::BFloat16", strides: tuple[tuple[int, int], ...] | None = None
) -> TraceOp:
    """Return aten::mm of (m, k) by a transposed (n, k), as in a linear layer's forward."""
    return TraceOp("aten::mm", ((m, k), (k, n)), strides or ((k, 1), (1, k)), (dtype, dtype), ("", ""))


def kernel(name: str, time_us: float = 10.0, op: TraceOp | None = None, **fields) -> Kernel:
    """Return one kernel run; with ``op``, a matrix product from its own call."""
    fields.setdefault("unattributed", "" if op is not None else "no launch")
    fields.setdefault("call", next(_calls) if op is not None else None)
    return Kernel(name, fields.pop("start_us", 0.0), time_us, fields.pop("device", 0), 7, op, op, **fields)


def trace(*kernels: Kernel, device: Device = H100, **fields) -> KernelTrace:
    """Return a trace in which these kernels ran one after the other, with ``idle_us`` of idle time."""
    start, placed = 0.0, []
    for one in kernels:
        placed.append(Kernel(one.name, start, one.time_us, one.device, one.stream, *_rest(one)))
        start += one.time_us
    idle = fields.pop("idle_us", 0.0)
    numbers = sorted({one.device for one in kernels})
    busy = {number: sum(one.time_us for one in kernels if one.device == number) for number in numbers}
    values = {
        "source": "made.json",
        "rank": None,
        "world_size": None,
        "job": "",
        "devices": tuple(Device(n, device.name, device.vendor, device.major, device.minor) for n in numbers),
        "kernels": tuple(placed),
        "copies_us": 0.0,
        "busy_us": busy,
        "span_us": {number: time + idle for number, time in busy.items()},
        "operators": 3,
        "launches": len(kernels),
    }
    return KernelTrace(**(values | fields))


def _rest(one: Kernel) -> tuple:
    return (
        one.op,
        one.matmul_op,
        one.module,
        one.module_is_path,
        one.phase,
        one.unattributed,
        one.is_graph,
        one.step,
        one.call,
        one.encloses,
    )


def everything():
    """Return the report of two ranks, with a kernel of every verdict."""
    runs = [
        kernel(NATIVE, 30, mm(64, 64, 64), module="layer.0", module_is_path=True, phase="forward"),
        kernel(DEGRADED, 20, mm(128, 30522, 512), module="head", module_is_path=True),
        kernel(SGEMM, 10, mm(64, 64, 64, "float"), module="layer.1", module_is_path=True),
        kernel(TRITON, 10),
        kernel(SPLIT_K, 5, mm(64, 64, 64)),
        kernel(NCCL, 15),
        kernel(ADD_BF16, 10, unattributed="before the window"),
    ]
    return analyse_kernels([trace(*runs, rank=rank, world_size=2, source=f"{rank}.json") for rank in (0, 1)])
