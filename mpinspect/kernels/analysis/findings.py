"""All findings about the kernels of traces, the gravest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpinspect.kernels.analysis.product_findings import product_findings
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.trace_findings import trace_findings
from mpinspect.kernels.analysis.widths import is_layout_conversion
from mpinspect.kernels.analysis.words import duration
from mpinspect.reporting.finding import SEVERITIES, Finding
from mpinspect.reporting.words import percent

#: Shares of kernel time from which layout conversions and communication are worth a line; below, padding a model or another
#: layout changes less than a clock's noise.
_WORTH_A_LINE, _WORTH_A_WARNING = 0.01, 0.05
_MUCH_COMMUNICATION = 0.1
#: Share of the GPU's span; short gaps between kernels are normal.
_MUCH_IDLE = 0.1


def findings(report: KernelReport, differences: Sequence[str]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then information; within one severity in order of finding."""
    found = [
        *trace_findings(report, differences),
        *product_findings(report),
        *_layout_conversions(report),
        *_communication(report),
        *_idle(report),
    ]
    return tuple(sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)))


def _layout_conversions(report: KernelReport) -> Iterator[Finding]:
    rows = [row for row in report.by_name if is_layout_conversion(row.name) and row.verdict == "helper"]
    time, calls = sum(row.time_us for row in rows), sum(row.calls for row in rows)
    fraction = time / report.shares.kernel_time_us if time > 0 else 0.0
    if fraction < _WORTH_A_LINE:
        return
    products = report.shares.product_time_us
    beside = f", beside {duration(products)} of products" if products > 0 else ""
    yield Finding(
        "layout-conversions",
        "warning" if fraction >= _WORTH_A_WARNING else "info",
        "",
        f"{calls:,} conversions between NCHW and NHWC take {duration(time)}, {percent(fraction)} of all kernel time{beside}: "
        "Tensor Core convolutions work on NHWC, and the model's tensors are NCHW.",
        {"calls": calls, "time_us": time, "fraction": fraction, "kernels": [row.name for row in rows]},
        "model.to(memory_format=torch.channels_last), and the input likewise.",
    )


def _communication(report: KernelReport) -> Iterator[Finding]:
    fraction = report.shares.communication_fraction
    if fraction is None or fraction < _MUCH_COMMUNICATION:
        return
    yield Finding(
        "communication",
        "info",
        "",
        f"Communication takes {percent(fraction)} of all kernel time, waiting for other ranks included; no precision of "
        "products changes it.",
        {"time_us": report.shares.communication_time_us, "fraction": fraction},
        "Gradients in 16 bits (torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook) halve what is sent.",
    )


def _idle(report: KernelReport) -> Iterator[Finding]:
    limits = report.limits
    if limits.span_us <= 0 or limits.idle_us < _MUCH_IDLE * limits.span_us:
        return
    fraction = limits.idle_us / limits.span_us
    yield Finding(
        "gpu-idle",
        "info",
        "",
        f"The GPU was idle {percent(fraction)} of the time from its first to its last kernel (a profiler's own overhead "
        "adds to that): faster kernels alone only make it wait longer.",
        {"idle_us": limits.idle_us, "span_us": limits.span_us, "fraction": fraction},
        "Larger batches, torch.compile(mode='reduce-overhead') or CUDA graphs; look for .item() and other synchronisations.",
    )
