"""Verdicts against measured rates on a GPU: products, convolutions, attention, an LSTM and a compiled model, dtype by dtype.

    python benchmarks/tensor_cores.py [--json benchmarks/results/tensor_cores-gpu.json] [--traces DIR] [--tiny]

Each case is profiled by profile_kernels; its rate is its known FLOPs over the time of its matmul-class kernels. Verdicts are
checked against the CUDA cores' peak, which only Tensor Cores can exceed, and misaligned cases are compared with aligned ones.
--traces stores the traces (small, gzip) as test data. Without a GPU the script prints this and exits. --tiny tests the script
with toy sizes, also on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import ResultsFile, arguments
from torch import nn
from torch.nn import functional as F

import mpinspect
from mpinspect.runtime import gpus

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """``make(device, size)`` gives a step and its matmul FLOPs; ``like``: the aligned case to compare with."""

    name: str
    dtype: torch.dtype
    make: Callable[[torch.device, int, torch.dtype], tuple[Step, int]]
    tf32: bool = False
    like: str = ""


def gemm(odd: int = 0) -> Callable[[torch.device, int, torch.dtype], tuple[Step, int]]:
    """A product whose K and N are ``odd`` more than a multiple of 8."""

    def make(device: torch.device, size: int, dtype: torch.dtype) -> tuple[Step, int]:
        m, n, k = size, size + odd, size + odd
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        return lambda: a @ b, 2 * m * n * k

    return make


def convolution(
    channels_last: bool, channels: int = 64
) -> Callable[[torch.device, int, torch.dtype], tuple[Step, int]]:
    """A 3x3 convolution, forward and backward."""

    def make(device: torch.device, size: int, dtype: torch.dtype) -> tuple[Step, int]:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        side = max(8, size // 64)
        x = torch.randn(32, channels, side, side, device=device, dtype=dtype).to(memory_format=layout).requires_grad_()
        layer = nn.Conv2d(channels, 128, 3, padding=1, bias=False).to(device, dtype).to(memory_format=layout)
        flops = 3 * 2 * 32 * side * side * 128 * channels * 9
        return lambda: layer(x).sum().backward(), flops

    return make


def attention(device: torch.device, size: int, dtype: torch.dtype) -> tuple[Step, int]:
    """torch's fused attention, forward and backward: two products forward, five backward with flash attention."""
    length, heads, width = max(64, size // 4), 16, 64
    q, k, v = (torch.randn(8, heads, length, width, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    flops = (2 + 5) * 2 * 8 * heads * length * length * width
    return lambda: F.scaled_dot_product_attention(q, k, v).sum().backward(), flops


def lstm(device: torch.device, size: int, dtype: torch.dtype) -> tuple[Step, int]:
    """An LSTM forward and backward; FLOPs of its input and recurrent products, three times."""
    width, steps, batch = max(32, size // 8), 64, 64
    layer = nn.LSTM(width, width).to(device, dtype)
    x = torch.randn(steps, batch, width, device=device, dtype=dtype).requires_grad_()
    return lambda: layer(x)[0].sum().backward(), 3 * 2 * steps * batch * 8 * width * width


def compiled(device: torch.device, size: int, dtype: torch.dtype) -> tuple[Step, int]:
    """A compiled two-layer network, forward and backward."""
    model = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size)).to(device, dtype)
    faster = torch.compile(model, backend="inductor" if device.type == "cuda" else "eager")
    x = torch.randn(size, size, device=device, dtype=dtype)
    # The input needs no gradient, so five of six products run.
    return lambda: faster(x).sum().backward(), 5 * 2 * size**3


CASES = (
    Case("gemm", torch.float32, gemm()),
    Case("gemm, TF32", torch.float32, gemm(), tf32=True),
    Case("gemm", torch.float16, gemm()),
    Case("gemm", torch.bfloat16, gemm()),
    Case("gemm, odd sizes", torch.float16, gemm(1), like="gemm"),
    Case("gemm, sizes 8k + 2", torch.float16, gemm(2), like="gemm"),
    Case("gemm, sizes 8k + 4", torch.float16, gemm(4), like="gemm"),
    Case("gemm, odd sizes", torch.bfloat16, gemm(1), like="gemm"),
    Case("gemm, odd sizes, TF32", torch.float32, gemm(1), tf32=True, like="gemm, TF32"),
    Case("convolution, NCHW", torch.float32, convolution(False)),
    Case("convolution, NCHW, TF32", torch.float32, convolution(False), tf32=True),
    Case("convolution, NCHW", torch.float16, convolution(False)),
    Case("convolution, NHWC", torch.float16, convolution(True)),
    Case("convolution, NHWC, 3 channels", torch.float16, convolution(True, 3)),
    Case("attention", torch.float32, attention),
    Case("attention", torch.float16, attention),
    Case("attention", torch.bfloat16, attention),
    Case("LSTM", torch.float32, lstm),
    Case("LSTM", torch.float16, lstm),
    Case("compiled network", torch.float16, compiled),
    Case("compiled network, TF32", torch.float32, compiled, tf32=True),
)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def measure(case: Case, device: torch.device, size: int, traces: Path | None) -> dict[str, Any]:
    dtype = str(case.dtype).removeprefix("torch.")
    with tf32_allowed(case.tf32):
        step, flops = case.make(device, size, case.dtype)
        name = f"{case.name}-{dtype}".replace(", ", "_").replace(" ", "_")
        report = mpinspect.profile_kernels(step, trace=None if traces is None else traces / f"{name}.json.gz")
    time_us = report.verdict_time_us
    products_us = sum(time_us.get(verdict, 0.0) for verdict in ("native", "degraded", "off", "unknown"))
    return {
        "case": case.name,
        "dtype": dtype,
        "verdict_time_us": {verdict: round(time, 3) for verdict, time in time_us.items() if time},
        "tensor_core_fraction": report.tensor_core_fraction,
        "tflops": flops / products_us / 1e6 if products_us else None,
        "kernels": sorted(
            {(kernel.name[:120], kernel.verdict) for kernel in report.kernels if kernel.verdict != "other"}
        ),
    }


def compare_with_aligned(rows: list[dict[str, Any]]) -> None:
    """Add to each misaligned case its rate relative to the aligned case: the cost of "degraded" on this GPU."""
    rates = {(row["case"], row["dtype"]): row["tflops"] for row in rows}
    for case, row in zip(CASES, rows, strict=False):
        aligned = rates.get((case.like, row["dtype"]))
        row["rate_over_aligned"] = row["tflops"] / aligned if aligned and row["tflops"] else None


def contradictions(rows: list[dict[str, Any]], gpu: gpus.Gpu) -> list[str]:
    """Return verdicts that contradict the rates: a product above the CUDA cores' peak must have run on Tensor Cores."""
    found = []
    for row in rows:
        peak = gpu.cuda_core_tflops.get("float32" if row["dtype"] == "float32" else "float16")
        share, rate = row["tensor_core_fraction"], row["tflops"]
        if peak and rate and share is not None and rate > 1.05 * peak and share < 0.5:
            found.append(
                f"{row['case']} ({row['dtype']}): {rate:.0f} TFLOP/s, above {peak:g}, and {share:.0%} Tensor Core"
            )
    return found


def results(rows: list[dict[str, Any]], gpu: gpus.Gpu) -> dict[str, Any]:
    return {"gpu": gpu.name, "rows": rows, "contradictions": contradictions(rows, gpu)}


def line(row: dict[str, Any]) -> str:
    rate = "?" if row["tflops"] is None else f"{row['tflops']:.1f}"
    share = "?" if row["tensor_core_fraction"] is None else f"{row['tensor_core_fraction']:.0%}"
    beside = "" if row["rate_over_aligned"] is None else f", {row['rate_over_aligned']:.2f} of the aligned one"
    return f"{row['case']:32}{row['dtype']:10}{rate:>8} TFLOP/s   Tensor Cores {share}{beside}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on the CPU where there is no GPU")
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        print("There is no CUDA GPU here: nothing to measure. --tiny runs toy sizes on the CPU.")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    gpu = gpus.of_device("", None)
    if device.type == "cuda":
        gpu = gpus.of_device(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
    file = ResultsFile(options.json, rehearsal=options.tiny)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows.append(measure(case, device, 64 if options.tiny else 4096, options.traces))
        compare_with_aligned(rows)
        print(line(rows[-1]), flush=True)
        file.write(results(rows, gpu), complete=False)
    against = contradictions(rows, gpu)
    measured = any(row["tflops"] for row in rows)
    print(
        "\n".join(against) or ("No rate contradicts a verdict." if measured else "No kernel ran: nothing to compare.")
    )
    file.write(results(rows, gpu))


if __name__ == "__main__":
    main()
