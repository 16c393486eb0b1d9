"""Estimate the least time of a product and the largest gain of a fix.

The roofline: a call takes at least max(FLOPs / peak rate, bytes / peak bandwidth). A fix can at best bring the time of
today's slowest plausible kernel down to the roofline. Only the cost of misalignment is measured: on one H100, ``_align1``
kernels ran at 51 TFLOP/s and aligned kernels of the same model at 520; an ``_align2`` kernel of another model stayed within
the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from mpinspect.reporting.words import percent
from mpinspect.runtime.gpus import Gpu, rate_key
from mpinspect.shapes.analysis.alignment import up_to
from mpinspect.shapes.analysis.causes import is_latent, once_mended
from mpinspect.shapes.analysis.report import CallTime, ShapeRow
from mpinspect.shapes.analysis.verdict import ShapeVerdict
from mpinspect.shapes.records import ITEM_SIZES, Matmul

#: How many times slower a misaligned kernel computes than an aligned one: 520 / 51 TFLOP/s, as above.
MISALIGNED_SLOWDOWN = 10.0
#: Gains below this share of all products' estimated time are reported as no change.
NEGLIGIBLE = 0.01


def call_time(matmul: Matmul, verdict: ShapeVerdict, gpu: Gpu) -> CallTime | None:
    """Return the estimated times of one call; None if the GPU's rates are not known, or the product is never computed."""
    if gpu.bandwidth_gb_s is None or verdict.cause in ("raises", "empty"):
        return None
    memory = matmul.bytes / (gpu.bandwidth_gb_s * 1e3)
    if verdict.cause in ("matrix-vector", "depthwise"):
        return CallTime(memory, memory, memory, "memory")
    math = math_us(matmul.flops, gpu.tensor_core_tflops.get(rate_key(matmul.dtype)))
    cores = math_us(matmul.flops, gpu.cuda_core_tflops.get("float32"))
    best_memory = memory
    if verdict.cause in ("float32", "dtype"):
        # The GPU lacks TF32, BF16, ...: the fix is FP16.
        math = math_us(matmul.flops, gpu.tensor_core_tflops.get("float16"))
        best_memory = memory * min(1.0, 2 / ITEM_SIZES.get(matmul.dtype, 2))
    if matmul.dtype == "float64" and math is None:
        # Most cards run FP64 at 1/32 or 1/64 of FP32's rate if not on Tensor Cores: no rate is known, so no estimate.
        return None
    if math is None:
        math = cores
    if math is None:
        return None
    best = low = high = max(math, best_memory)
    if verdict.verdict == "off":
        low = high = max(cores or math, memory, best)
    elif verdict.verdict == "degraded":
        high = max(best, _degraded_us(matmul, verdict, math, memory))
    return CallTime(best, low, high, _bound(math, best_memory))


def _bound(math_us: float, memory_us: float) -> str:
    return "math" if math_us >= memory_us else "memory"


def _degraded_us(matmul: Matmul, verdict: ShapeVerdict, math: float, memory: float) -> float:
    if verdict.cause == "head-dim":
        # torch makes padded copies: the operands are read and written once more.
        return max(math, memory) + 2 * memory
    if verdict.cause == "attention-bias" and matmul.attention is not None and matmul.attention.bias is not None:
        # Only the mask is padded and copied; its share of the traffic is its size relative to the operands.
        bias = matmul.attention.bias
        size = prod(bias.shape) * ITEM_SIZES.get(bias.dtype, 2)
        return max(math, memory) + 2 * memory * size / max(matmul.bytes, 1)
    return max(math * MISALIGNED_SLOWDOWN, memory)


def math_us(flops: int, tflops: float | None) -> float | None:
    """Return microseconds at a peak rate in TFLOP/s; None where the rate is not known."""
    return flops / (tflops * 1e6) if tflops else None


#: Rows and columns of the output tiles of usual Tensor Core kernels (NVIDIA's Matrix Multiplication Background guide).
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


#: Kernels are taken to split the summed dimension into as many as 16 parts of at least this many values, where that fills waves.
LEAST_PART = 512


def partial_tiles(m: int, n: int, k: int, batch: int, sms: int | None) -> float:
    """Return how many times more output the tiles compute than the product has, at the best of the usual tile sizes.

    Tiles at the edges are not full, and with ``sms`` known neither is the last wave of tiles. An estimate: small tiles
    compute more slowly, and how a library splits the summed dimension is not known.
    """
    best = float("inf")
    splits = [parts for parts in (1, 2, 4, 8, 16) if parts == 1 or k >= parts * LEAST_PART]
    for rows, columns in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = min(up_to(tiles * parts, sms or 1) / parts for parts in splits)
        best = min(best, waves * rows * columns / max(batch * m * n, 1))
    return best


def partial_us(matmul: Matmul, time: CallTime, gpu: Gpu) -> float:
    """Return the estimated microseconds that tiles and waves which are not full add to a call on Tensor Cores."""
    math = math_us(matmul.flops, gpu.tensor_core_tflops.get(rate_key(matmul.dtype)))
    if matmul.kind not in ("gemm", "convolution") or not gpu.sms or math is None or 0 in (matmul.m, matmul.n):
        return 0.0
    return max(math * partial_tiles(matmul.m, matmul.n, matmul.k, matmul.batch, gpu.sms) - time.low_us, 0.0)


def padded_time(row: ShapeRow, time: CallTime, size: int, to: int) -> CallTime:
    """Return the times with the work that padding adds; tiles that were full before may not be once padded.

    Fused attention is returned unchanged: its kernels work on padded heads already.
    """
    if row.matmul.attention is not None:
        return time
    m, n, k = (to if one == size else one for one in (row.m, row.n, row.k))
    growth = m * n * k / max(row.m * row.n * row.k, 1)
    tiles = partial_tiles(m, n, k, row.batch, None) / partial_tiles(row.m, row.n, row.k, row.batch, None)
    return replace(time, best_us=time.best_us * growth, fixed_us=time.best_us * growth * max(tiles, 1.0))


def nhwc_time(row: ShapeRow, time: CallTime, gpu: Gpu, autocast_dtype: str | None) -> CallTime:
    """Return the times with the cost of a convolution's NCHW image: image and result are each read and written once more."""
    return replace(time, low_us=time.best_us, high_us=time.best_us + 2 * _memory_us(row.bytes, gpu))


def lowered_time(row: ShapeRow, time: CallTime, gpu: Gpu, autocast_dtype: str | None) -> CallTime | None:
    """Return the times with the cost of running in FP32: at best the product takes its time in autocast's dtype."""
    lowered = call_time(once_mended(row, autocast_dtype), ShapeVerdict("native", ""), gpu)
    return lowered and replace(time, best_us=min(lowered.best_us, time.low_us), bound=lowered.bound)


def size_time(row: ShapeRow, time: CallTime, gpu: Gpu, autocast_dtype: str | None) -> CallTime | None:
    """Return the times with the cost of a size; for a product in a slow dtype, the size's cost once the dtype is fixed."""
    if not is_latent(row):
        return time
    return call_time(once_mended(row, autocast_dtype), ShapeVerdict("degraded", "", "alignment"), gpu)


def fused_time(row: ShapeRow, time: CallTime, gpu: Gpu, autocast_dtype: str | None) -> CallTime:
    """Return the times of separate products; a fused kernel leaves the scores (tokens x tokens, the largest matrix) on chip."""
    largest = sorted((row.m, row.n, row.k))[1:]
    scores = row.batch * largest[0] * largest[1]
    elements = row.batch * (row.m * row.n + row.n * row.k + row.m * row.k)
    memory = _memory_us(row.bytes * (1 - scores / max(elements, 1)), gpu)
    math = math_us(row.flops, gpu.tensor_core_tflops.get(rate_key(row.dtype))) or 0.0
    best = min(max(math, memory), time.low_us)
    return CallTime(best, time.low_us, time.high_us, _bound(math, memory))


def _memory_us(size: float, gpu: Gpu) -> float:
    return size / ((gpu.bandwidth_gb_s or 1.0) * 1e3)


# -- gains -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gain:
    """The estimated gain of a fix.

    Args:
        speedup_low, speedup_high: how many times faster the calls become; 1.0 is no change.
        saved_fraction_high: the largest share of all products' time that the fix saves, 0..1.
        bound: "math" or "memory": the limit of most of the calls' time after the fix.
    """

    speedup_low: float
    speedup_high: float
    saved_fraction_high: float
    bound: str


def gain(times: Iterable[tuple[CallTime | None, int]], total_us: float | None) -> Gain | None:
    """Return the estimated gain of bringing calls from today's time to their roofline; None without estimates.

    Args:
        times: the estimates of each call, and how often it runs.
        total_us: the time of all products together.
    """
    known = [(time, calls) for time, calls in times if time is not None]
    if not known or not total_us:
        return None
    best = sum(time.best_us * calls for time, calls in known)
    low = sum(time.low_us * calls for time, calls in known)
    fixed = sum(max(time.fixed_us, time.best_us) * calls for time, calls in known)
    high = sum(time.high_us * calls for time, calls in known)
    memory = sum(time.best_us * calls for time, calls in known if time.bound == "memory")
    if best <= 0:
        return None
    return Gain(
        speedup_low=min(low / fixed, 1.0),
        speedup_high=high / best,
        saved_fraction_high=max(0.0, (high - best) / max(total_us - low + high, high)),
        bound=_bound(best - memory, memory),
    )


def is_worth_it(gain: Gain | None, share: float) -> bool:
    """Return whether a fix may save time; if the gain is unknown, whether the products are at least 1% of the FLOPs."""
    if gain is None:
        return share >= NEGLIGIBLE
    return not promises_nothing(gain)


def promises_nothing(gain: Gain) -> bool:
    """Return whether a gain is below 1% of all products' time, or rounds to "x1.0 to x1"."""
    return gain.saved_fraction_high < NEGLIGIBLE or float(f"{gain.speedup_high:.2g}") <= 1.0


def gain_words(gain: Gain | None, *, by_padding: bool) -> str:
    """Return a fix's gain in words, marked as an estimate: a range, or that no change is expected."""
    if gain is None:
        return "gain unknown: no rates of this GPU are known"
    saved, doubt = percent(gain.saved_fraction_high), ""
    if promises_nothing(gain):
        if by_padding:
            doubt = "; it may be slower"
        return f"no change expected (estimated: at most {saved} of the products' time{doubt})"
    if by_padding and gain.bound == "memory":
        doubt = "; memory-bound, so padding may be slower"
    elif by_padding and float(f"{gain.speedup_low:.1f}") < 1:
        doubt = "; it adds work, so padding may be slower"
    return (
        f"estimated gain: x{gain.speedup_low:.1f} to x{gain.speedup_high:.2g} on these products, at most {saved} of the time "
        f"of all{doubt}"
    )
