"""What a call takes before and after one cause is mended, where that is not the same for all causes. Estimates."""

from __future__ import annotations

from dataclasses import replace

from mpinspect.runtime.gpus import Gpu, rate_key
from mpinspect.shapes.analysis.causes import Cause
from mpinspect.shapes.analysis.latent import is_latent, once_mended
from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.analysis.roofline import CallTime, call_time, math_us
from mpinspect.shapes.analysis.verdict import ShapeVerdict


def mended(cause: Cause, row: ShapeRow, gpu: Gpu, autocast_dtype: str | None = None) -> CallTime | None:
    """The call's times as far as this cause is to blame for them."""
    time = row.time
    if time is None or gpu.bandwidth_gb_s is None:
        return time
    if cause.id == "not-channels-last":
        # The image and the result are each read and written once more.
        return replace(time, low_us=time.best_us, high_us=time.best_us + 2 * _memory_us(row.bytes, gpu))
    if cause.id == "unfused-attention":
        return _fused(row, time, gpu)
    if cause.id == "float32-under-autocast":
        lowered = call_time(once_mended(row, autocast_dtype), ShapeVerdict("native", ""), gpu)
        return lowered and replace(time, best_us=min(lowered.best_us, time.low_us), bound=lowered.bound)
    if is_latent(row) and cause.size is not None:
        # What the size costs once the dtype is mended, not what the dtype costs.
        return call_time(once_mended(row, autocast_dtype), ShapeVerdict("degraded", "", cause="alignment"), gpu)
    return time


def _fused(row: ShapeRow, time: CallTime, gpu: Gpu) -> CallTime:
    """In a fused kernel the scores (tokens x tokens, the largest of the three matrices) never reach memory."""
    largest = sorted((row.m, row.n, row.k))[1:]
    scores = row.batch * largest[0] * largest[1]
    elements = row.batch * (row.m * row.n + row.n * row.k + row.m * row.k)
    memory = _memory_us(row.bytes * (1 - scores / max(elements, 1)), gpu)
    math = math_us(row.flops, gpu.tensor_core_tflops.get(rate_key(row.dtype))) or 0.0
    best = min(max(math, memory), time.low_us)
    return CallTime(best, time.low_us, time.high_us, "math" if math >= memory else "memory")


def _memory_us(size: float, gpu: Gpu) -> float:
    return size / ((gpu.bandwidth_gb_s or 1.0) * 1e3)
