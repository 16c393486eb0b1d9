"""Find what to report about traces and about kernels that are not products; ``findings`` orders all findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mpinspect.kernels.analysis.limits import is_layout_conversion, is_wide
from mpinspect.kernels.analysis.product_findings import product_findings, severity, were
from mpinspect.kernels.analysis.ranks import RankReport
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.shares import share
from mpinspect.reporting.finding import Finding, gravest_first
from mpinspect.reporting.words import duration, percent, some
from mpinspect.runtime.gpus import Gpu

#: Shares of kernel time from which layout conversions are an info or a warning; below the first, changing the layout gains less
#: than the noise of a clock.
_WORTH_A_LINE, _WORTH_A_WARNING = 0.01, 0.05
#: Share of kernel time from which communication is reported.
_MUCH_COMMUNICATION = 0.1
#: Share of the GPU's span from which idle time is reported; short gaps between kernels are normal.
_MUCH_IDLE = 0.1
#: Share from which idle time is a warning: no change to a kernel can gain as much.
_MOSTLY_IDLE = 0.5
#: Mean time in us of a kernel below which launching it in eager mode, some 10 us on the CPU with its operator, may take longer.
_SHORT_US = 20.0
#: If the operator is known for a smaller share of the kernel time, tables by operator and module are unreliable.
_LOW_ATTRIBUTION = 0.5
#: Ranks differ if their shares of Tensor Core time differ by at least this much (0..1).
_FAR_APART = 0.05


def findings(report: KernelReport, differences: Sequence[str]) -> tuple[Finding, ...]:
    """Return all findings by severity (error, warning, info), within one severity by the time that they cost.

    ``differences``: reasons why the traces are not ranks of one job (``ranks.differences``).
    """
    found = [
        *_cut_short(report),
        *_empty(report),
        *_gpus(report),
        *_attribution(report),
        *_between_ranks(report, differences),
        *_notes(report),
        *product_findings(report),
        *_layout_conversions(report),
        *_communication(report),
        *_idle(report),
    ]
    return tuple(gravest_first(sorted(found, key=_cost, reverse=True)))


def _cost(finding: Finding) -> float:
    """Return the time by which a finding is ordered. Warnings without a time question the figures, so they rank first."""
    time = cost_us(finding)
    if time is not None:
        return time
    return 0.0 if finding.severity == "info" else math.inf


def cost_us(finding: Finding) -> float | None:
    """Return the time in us that a finding's cause costs: measured, or the most that a change saves; None if unknown."""
    saved = finding.evidence.get("saved_us")
    if isinstance(saved, dict) and saved:
        return float(max(saved.values()))
    time = finding.evidence.get("idle_us", finding.evidence.get("time_us"))
    return float(time) if isinstance(time, (int, float)) else None


def _layout_conversions(report: KernelReport) -> Iterator[Finding]:
    rows = [row for row in report.by_name if is_layout_conversion(row.name) and row.verdict == "helper"]
    time, calls = sum(row.time_us for row in rows), sum(row.calls for row in rows)
    fraction = share(time, report.shares.kernel_time_us)
    if fraction is None or fraction < _WORTH_A_LINE:
        return
    taken = f"{duration(time)}, {percent(fraction)} of all kernel time ({duration(report.shares.kernel_time_us)})"
    if report.shares.product_time_us > 0:
        taken += f", against {duration(report.shares.product_time_us)} of products"
    yield Finding(
        "layout-conversions",
        severity(fraction, _WORTH_A_WARNING),
        "",
        f"{calls:,} conversions between NCHW and NHWC take {taken}: "
        "Tensor Core convolutions work on NHWC, and the model's tensors are NCHW.",
        {"calls": calls, "time_us": time, "fraction": fraction, "kernels": [row.name for row in rows]},
        "model.to(memory_format=torch.channels_last), and the same for the input.",
        "model = model.to(memory_format=torch.channels_last)\nx = x.to(memory_format=torch.channels_last)",
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
        _communication_fix(report),
    )


def _communication_fix(report: KernelReport) -> str:
    """Return the fix by the dtype of most communication, as kernels' names and operators give it."""
    time: dict[bool | None, float] = dict.fromkeys((True, False, None), 0.0)
    for row in report.kernels:
        if row.is_communication:
            time[is_wide(row)] += row.time_us
    if time[False] > max(time[True], time[None]):
        return "It is sent in 16 bits already: synchronise less often (no_sync() while gradients accumulate), or overlap more."
    fix = "DDP's bf16_compress_hook (torch.distributed.algorithms.ddp_comm_hooks.default_hooks) halves the bytes sent."
    return fix if time[True] else f"If gradients are sent in FP32: {fix}"


def _idle(report: KernelReport) -> Iterator[Finding]:
    limits, fraction = report.limits, report.limits.idle_fraction
    if fraction is None or fraction < _MUCH_IDLE:
        return
    yield Finding(
        "gpu-idle",
        severity(fraction, _MOSTLY_IDLE),
        "",
        f"The GPU was idle {percent(fraction)} of the time from its first to its last kernel (a profiler's own overhead "
        "adds to that): faster kernels alone only make it wait longer.",
        {"idle_us": limits.idle_us, "span_us": limits.span_us, "fraction": fraction},
        *_idle_fix(report),
    )


def _idle_fix(report: KernelReport) -> tuple[str, str]:
    """Return the fix with its code, the preferred one first: fewer launches for short kernels, fewer waits for long ones."""
    mean = report.shares.kernel_time_us / report.shares.calls
    if mean < _SHORT_US:
        return (
            "First torch.compile(model, mode='reduce-overhead'): it replays launches as a CUDA graph, and a kernel here takes "
            f"only {duration(mean)} on average. Then larger batches; look for .item() and other synchronisations.",
            'model = torch.compile(model, mode="reduce-overhead")',
        )
    return (
        "First look for .item(), other synchronisations and a data loader that the GPU waits for. Then larger batches or "
        "torch.compile(model, mode='reduce-overhead').",
        'torch.cuda.set_sync_debug_mode("warn")  # warns at each operator that waits for the GPU',
    )


def _cut_short(report: KernelReport) -> Iterator[Finding]:
    """Yield a finding for each file that ends early. Kernels are last in a file, so they are the first to be lost."""
    for rank in report.ranks:
        if not rank.cut_short:
            continue
        calls = rank.shares.calls
        grave, lost = "error", "No kernel was read, so there is no data on the GPU."
        if calls:
            grave, lost = "warning", f"{were(calls, 'kernel')} read; the shares here cover only these."
        why = next(iter(rank.notes), "The file is cut short or damaged.")
        yield Finding(
            "trace-cut-short",
            grave,
            "",
            f"{rank.label}: {why} {lost}",
            {"kernels": calls, "operators": rank.operators, "source": rank.source},
            "Copy or download the file again and compare its size; if the original is short too, record again with room on the "
            "disk, and let export_chrome_trace return before the process ends.",
        )


def _empty(report: KernelReport) -> Iterator[Finding]:
    """Yield a finding for each trace without kernels: CPU work only, or launches whose kernels were not recorded."""
    for rank in report.ranks:
        if rank.shares.calls or rank.cut_short:
            continue
        if rank.launches or any(device.span_us > 0 for device in rank.devices):
            yield Finding(
                "no-kernels",
                "error",
                "",
                f"{rank.label}: {rank.launches:,} launches were recorded but no kernel: the profiler could not trace the GPU "
                "(missing permission for its counters, another profiler attached, or a window that was too short).",
                {"launches": rank.launches, "operators": rank.operators},
                "Record again after a warm-up step, and end the window with torch.cuda.synchronize().",
            )
        else:
            where = "there is no GPU in this trace"
            if rank.accelerator:
                where = f"it ran {rank.accelerator}, whose kernels are not judged here"
            yield Finding(
                "no-gpu-activity",
                "error",
                "",
                f"{rank.label}: {where}: {rank.operators:,} operators, no GPU kernel and no launch.",
                {"operators": rank.operators},
                "Run on a GPU and record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
            )


def _gpus(report: KernelReport) -> Iterator[Finding]:
    if not report.kernels:
        return
    for gpu in report.gpus:
        name = gpu.name or "The GPU"
        if gpu.vendor == "AMD":
            yield Finding(
                "not-nvidia",
                "info",
                "",
                f"{name} is AMD's: the names and rules here are NVIDIA's, so verdicts on its products are unknown, not off.",
                {"gpu": gpu.name},
            )
        elif gpu.has_tensor_cores is False:
            yield Finding("no-tensor-cores", "info", "", f"{name}: this GPU has none.", {"gpu": gpu.name})
        elif gpu.has_tensor_cores is None:
            yield _unknown_gpu(gpu)


def _unknown_gpu(gpu: Gpu) -> Finding:
    """Return the finding that a trace names no GPU, or one that the table of GPUs lacks."""
    if not gpu.name:
        message = "The trace does not name its GPU"
        fix = "Name it: --gpu H100, or gpu=... in code."
    else:
        message = f"The trace is of {gpu.name}, which is unknown here: its rates and its units' dtypes are unknown, too"
        fix = "A newer mpinspect may know it; --gpu NAME (gpu=... in code) judges it as another card, with that card's rates."
    return Finding(
        "unknown-gpu",
        "info",
        "",
        f"{message}. Verdicts are by kernels' names alone, without rooflines; no product is called eligible.",
        {"gpu": gpu.name},
        fix,
    )


def _attribution(report: KernelReport) -> Iterator[Finding]:
    covered = report.coverage
    fraction = covered.attributed_fraction
    if not report.kernels or fraction is None or fraction >= _LOW_ATTRIBUTION:
        return
    reasons = {reason: share for reason, share in covered.unattributed_fractions.items() if share > 0}
    worst = max(reasons, key=reasons.__getitem__, default="no op")
    words = ", ".join(f"{percent(share)} {reason}" for reason, share in reasons.items())
    yield Finding(
        "low-attribution",
        "info",
        "",
        f"The operator is known for {percent(fraction)} of kernel time only ({words}).",
        {"attributed_fraction": fraction, "unattributed_fractions": reasons},
        _attribution_fix(worst, report),
    )


_ATTRIBUTION_FIXES = {
    "before the window": "Start the window with torch.cuda.synchronize(): its first kernels were launched before it.",
    "CUDA graph": "Profile once without CUDA graphs (torch.compile without mode='reduce-overhead', vLLM's enforce_eager=True).",
    "no launch": "Other launches are in the trace. If the trace was merged, read each rank's; else record a longer window.",
    "no op": "Code outside operators launched these kernels: wrap it in torch.library.triton_op or custom_op.",
}


def _attribution_fix(reason: str, report: KernelReport) -> str:
    has_events = {
        "no launch": any(rank.launches for rank in report.ranks),
        "no op": any(rank.operators for rank in report.ranks),
    }
    if has_events.get(reason, True):
        return _ATTRIBUTION_FIXES[reason]
    return "Record with ProfilerActivity.CPU too: operators and launches are events of the CPU."


def _between_ranks(report: KernelReport, differences: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding if traces are not of one job, or if ranks of one job use Tensor Cores unequally."""
    if len(report.ranks) > 1 and differences:
        yield _different_jobs(report, differences)
    elif len(report.ranks) > 1:
        yield from _ranks_differ(report)


def _different_jobs(report: KernelReport, differences: Sequence[str]) -> Finding:
    labels = [rank.label for rank in report.ranks]
    return Finding(
        "different-jobs",
        "warning",
        "",
        f"These traces do not look like ranks of one job: {'; '.join(differences)}. Each is listed separately below; "
        f"figures over all of them together ({some(labels)}) mean little.",
        {"traces": labels, "differences": list(differences)},
        "Give the traces of one job at a time.",
    )


def _ranks_differ(report: KernelReport) -> Iterator[Finding]:
    known = [rank for rank in report.ranks if rank.shares.tensor_core_fraction is not None]
    if not known:
        return
    worst, best = min(known, key=_fraction), max(known, key=_fraction)
    if _fraction(best) - _fraction(worst) < _FAR_APART:
        return
    yield Finding(
        "ranks-differ",
        "info",
        "",
        f"Ranks differ in the share of their products' time on Tensor Cores: {worst.label} has {percent(_fraction(worst))}, "
        f"{best.label} {percent(_fraction(best))}.",
        {rank.label: rank.shares.tensor_core_fraction for rank in known},
    )


def _fraction(rank: RankReport) -> float:
    return rank.shares.tensor_core_fraction or 0.0


def _notes(report: KernelReport) -> Iterator[Finding]:
    """Yield a finding for each distinct note on reading, with the traces that have the note."""
    about: dict[str, list[str]] = {}
    for rank in report.ranks:
        # The first note of a truncated file is already part of trace-cut-short.
        for note in rank.notes[int(rank.cut_short) :]:
            about.setdefault(note, []).append(rank.label)
    for note, labels in about.items():
        message = note
        if len(report.ranks) > 1:
            message = f"{some(labels)}: {note}"
        yield Finding("trace-note", "info", "", message, {"traces": labels})
