"""How long a product takes at least, and at most what a fix can bring: everything here is estimated, nothing measured.

The roofline: a call takes at least max(FLOPs / peak rate, bytes / peak bandwidth). A fix can at best bring the time of today's
slowest plausible kernel down to that. The figure for what misalignment costs is measured: on one H100, ``_align1`` kernels ran at
51 TFLOP/s beside siblings of the same model at 520; an ``_align2`` kernel of another model stayed within the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from mpinspect.runtime.gpus import Gpu, rate_key
from mpinspect.shapes.analysis.verdict import ShapeVerdict
from mpinspect.shapes.records import ITEM_SIZES, Matmul

#: How many times slower a misaligned kernel computes than an aligned one: 520 / 51 TFLOP/s, as above.
MISALIGNED_SLOWDOWN = 10.0


@dataclass(frozen=True, slots=True)
class CallTime:
    """Estimates for ONE call, in microseconds.

    Args:
        best_us: the roofline of the call on Tensor Cores, as a fix would leave it.
        low_us, high_us: between which it lies today.
        bound: "math" or "memory": what the roofline is at ``best_us``.
    """

    best_us: float
    low_us: float
    high_us: float
    bound: str


@dataclass(frozen=True, slots=True)
class Gain:
    """What a fix can bring, estimated; None where the GPU's rates are not known.

    Args:
        speedup_low, speedup_high: how many times faster the calls concerned become; 1.0 is no change.
        saved_fraction_high: share of the time of all products that it saves at most.
        bound: "math" or "memory", of most of the calls' time after the fix.
    """

    speedup_low: float
    speedup_high: float
    saved_fraction_high: float
    bound: str


def call_time(matmul: Matmul, verdict: ShapeVerdict, gpu: Gpu) -> CallTime | None:
    """The estimates for a product; None where the GPU's rates are not known, or it is never computed."""
    if gpu.bandwidth_gb_s is None or verdict.cause in ("raises", "empty"):
        return None
    memory = matmul.bytes / (gpu.bandwidth_gb_s * 1e3)
    if verdict.cause in ("matrix-vector", "depthwise"):
        return CallTime(memory, memory, memory, "memory")
    math = math_us(matmul.flops, gpu.tensor_core_tflops.get(rate_key(matmul.dtype)))
    cores = math_us(matmul.flops, gpu.cuda_core_tflops.get("float32"))
    best_memory = memory
    if verdict.cause in ("float32", "dtype"):
        # No TF32, no BF16, ... there: the fix is FP16.
        math = math_us(matmul.flops, gpu.tensor_core_tflops.get("float16"))
        best_memory = memory * min(1.0, 2 / ITEM_SIZES.get(matmul.dtype, 2))
    if matmul.dtype == "float64" and math is None:
        # On most cards FP64 runs at 1/32 or 1/64 of FP32 where it is not on Tensor Cores: no rate, no estimate.
        return None
    if math is None:
        math = cores
    if math is None:
        return None
    best = max(math, best_memory)
    bound = "math" if math >= best_memory else "memory"
    if verdict.verdict == "off":
        now = max(cores or math, memory)
        return CallTime(best, max(now, best), max(now, best), bound)
    if verdict.verdict == "degraded":
        return CallTime(best, best, max(best, _degraded_us(matmul, verdict, math, memory)), bound)
    return CallTime(best, best, best, bound)


def _degraded_us(matmul: Matmul, verdict: ShapeVerdict, math: float, memory: float) -> float:
    if verdict.cause == "head-dim":
        # Padded copies: the operands are read and written once more.
        return max(math, memory) + 2 * memory
    if verdict.cause == "attention-bias" and matmul.attention is not None and matmul.attention.bias is not None:
        # Only the mask is; it stays what it is in proportion to the operands.
        bias = matmul.attention.bias
        size = prod(bias.shape) * ITEM_SIZES.get(bias.dtype, 2)
        return max(math, memory) + 2 * memory * size / max(matmul.bytes, 1)
    return max(math * MISALIGNED_SLOWDOWN, memory)


def math_us(flops: int, tflops: float | None) -> float | None:
    """Microseconds at a peak rate in TFLOP/s; None where that is not known."""
    return None if not tflops else flops / (tflops * 1e6)


def gain(times: Iterable[tuple[CallTime | None, int]], total_us: float | None) -> Gain | None:
    """What bringing calls from today's time to their roofline is worth.

    Args:
        times: of each call, and how often it runs.
        total_us: of all products together.
    """
    known = [(time, calls) for time, calls in times if time is not None]
    if not known or not total_us:
        return None
    best = sum(time.best_us * calls for time, calls in known)
    low = sum(time.low_us * calls for time, calls in known)
    high = sum(time.high_us * calls for time, calls in known)
    memory = sum(time.best_us * calls for time, calls in known if time.bound == "memory")
    if best <= 0:
        return None
    return Gain(
        speedup_low=1.0,
        speedup_high=high / best,
        saved_fraction_high=max(0.0, (high - best) / max(total_us - low + high, high)),
        bound="memory" if memory > best / 2 else "math",
    )
