"""Find what to report about matrix products (off, degraded, unknown or contradicted by their rate), one finding per cause."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.savings import can_gain
from mpinspect.kernels.names.classify import FULL_ALIGNMENT
from mpinspect.reporting.finding import Finding, warning_if
from mpinspect.reporting.words import and_more, by_number, duration, format_name, number_of, percent, some
from mpinspect.shapes.records import ITEM_SIZES

#: Shares of all kernel time from which a loss is a warning, and from which unknown verdicts are reported.
_WORTH_A_WARNING, _WORTH_A_LINE = 0.05, 0.01
#: Maximum number of names listed in evidence, and of dtypes named in a sentence.
_MOST_LISTED, _MOST_NAMED = 20, 4

_FP16 = "torch.autocast('cuda', dtype=torch.float16) with torch.amp.GradScaler."
#: The fix for each cause, by the cause's id.
_FIXES = {
    "tf32-off-cuBLAS": "torch.set_float32_matmul_precision('high') for TF32, or torch.autocast('cuda', dtype=torch.bfloat16).",
    "tf32-off-cuDNN": "torch.backends.cudnn.allow_tf32 = True and torch.backends.cudnn.benchmark = True; or 16-bit autocast.",
    "tf32-not-chosen-cuBLAS": "Sizes and strides in multiples of 4 (16 bytes); mpinspect lint names those that are not.",
    "tf32-not-chosen-cuDNN": "torch.backends.cudnn.benchmark = True, channels_last, and channels in multiples of 4.",
    "fp32": _FP16,
    "dtype-bfloat16": _FP16,
    "rate": "mpinspect lint shows sizes and strides; a rate alone shows no cause.",
}
#: The fix as code, by the cause's id.
_CODES = {
    "tf32-off-cuBLAS": 'torch.set_float32_matmul_precision(\n    "high",\n)',
    "tf32-off-cuDNN": "torch.backends.cudnn.allow_tf32 = True\ntorch.backends.cudnn.benchmark = True",
    "tf32-not-chosen-cuDNN": "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
}


def product_findings(report: KernelReport) -> Iterator[Finding]:
    """Yield the findings about the report's matrix products."""
    yield from _unused(report)
    yield from map(_eligible, _by_cause(report.eligible))
    yield from map(_degraded, _by_cause(report.degraded))
    yield from _contradicted(report)
    yield from _unknown(report)


def _unused(report: KernelReport) -> Iterator[Finding]:
    """Yield a finding if no product used Tensor Cores, unless products of unknown verdict may have used them."""
    shares = report.shares
    if shares.product_time_us <= 0 or shares.tensor_core_time_us > 0 or shares.verdict_time_us["unknown"] > 0:
        return
    if not all(gpu.has_tensor_cores for gpu in report.gpus):
        return
    off = shares.verdict_calls["off"]
    grave, why, fix = _of_the_unused(report)
    cause = _by_cause(report.eligible)[0][0].cause_id if report.eligible else ""
    yield Finding(
        "tensor-cores-unused",
        grave,
        "",
        f"No kernel ran on Tensor Cores: {number_of(off, 'kernel')} of matrix products ran on CUDA cores, for "
        f"{duration(shares.verdict_time_us['off'])} of the {duration(shares.kernel_time_us)} of kernel time{why}.",
        {"calls": off, "time_us": shares.verdict_time_us["off"], "fraction": _of_all(report)},
        fix,
        _CODES.get(cause, ""),
    )


def _of_the_unused(report: KernelReport) -> tuple[str, str, str]:
    """Return the severity, the reason why the products are off, and the fix."""
    grave = severity(_of_all(report))
    if report.eligible:
        return grave, "", _eligible_fix(_by_cause(report.eligible)[0])
    products = [row for row in report.kernels if row.is_product]
    if all(row.kind == "gemv" or (row.shape is not None and row.shape.cause == "matrix-vector") for row in products):
        return (
            "info",
            "; they are matrix-vector products, which memory limits: Tensor Cores would not help",
            "Several requests at once, or a larger batch, make them matrix products that Tensor Cores speed up.",
        )
    if not any(map(can_gain, products)):
        return (
            "info",
            "; memory limits them, so Tensor Cores would not help",
            "No change of precision is expected to help.",
        )
    fix = "Compute in FP16 wherever its range suffices."
    if not all(row.dtype for row in products):
        fix = _to_know_more(products, "to learn their dtypes")
    return grave, f"; none is known to be eligible ({_dtypes(products)})", fix


def severity(fraction: float, warning_from: float = _WORTH_A_WARNING) -> str:
    """Return "warning" for a share (0..1) of at least ``warning_from``, else "info"."""
    return warning_if(fraction >= warning_from)


def _dtypes(products: Sequence[KernelRow]) -> str:
    names = dict.fromkeys(format_name(row.dtype) or "dtype unknown" for row in products)
    return ", ".join(list(names)[:_MOST_NAMED])


def _of_all(report: KernelReport) -> float:
    return report.shares.product_time_us / report.shares.kernel_time_us


def _by_cause(losses: Sequence[Loss]) -> list[list[Loss]]:
    """Group the losses by cause, most time first."""
    causes: dict[str, list[Loss]] = defaultdict(list)
    for loss in losses:
        causes[loss.cause_id].append(loss)
    return sorted(causes.values(), key=lambda group: -sum(loss.time_us for loss in group))


def _eligible(group: list[Loss]) -> Finding:
    return _finding("eligible-not-used", group, "did not use Tensor Cores", _eligible_fix(group))


def _eligible_fix(group: list[Loss]) -> str:
    return _FIXES.get(group[0].cause_id, "mpinspect lint shows the size, stride or dtype responsible.")


def _degraded(group: list[Loss]) -> Finding:
    first = group[0]
    where = " in ".join(filter(None, (first.op or "a kernel", first.module)))
    if first.m is not None:
        where += f" ({first.m:,} x {first.n:,} x {first.k:,})"
    fix = _FIXES.get(first.cause_id) or _alignment_fix(first)
    how = f"ran on Tensor Cores, but degraded: {where}{and_more(len(group) - 1)}"
    return _finding("used-but-degraded", group, how, fix)


def _finding(id: str, group: list[Loss], how: str, fix: str) -> Finding:
    first, fraction = group[0], sum(loss.fraction for loss in group)
    return Finding(
        id,
        severity(fraction),
        first.module,
        f"{_total(group)} {how}: {first.cause}.{_saved(group)}",
        _evidence(group),
        fix,
        _CODES.get(first.cause_id, ""),
    )


def _alignment_fix(loss: Loss) -> str:
    """Return the fix: the sizes to pad, if the product's own sizes show them."""
    step = FULL_ALIGNMENT // ITEM_SIZES.get(loss.dtype, 2) or 1
    if loss.kind == "convolution":
        return f"Make the channels multiples of {step} (16 bytes); mpinspect lint names the sizes."
    sizes = dict.fromkeys(size for size in _row_sizes(loss) if loss.kind == "gemm" and size and size % step)
    if not sizes:
        return f"Make every row stride and slice's start a multiple of 16 bytes ({step} elements); mpinspect lint names them."
    padded = ", ".join(f"{size} -> {-(-size // step) * step}" for size in sizes)
    return (
        f"Pad {padded}: a row stride that is a multiple of 16 bytes ({step} elements). mpinspect lint names the sizes."
    )


#: cuBLAS's layout in a name: of torch's second operand, then of its first, since cuBLAS computes the transposed product.
_LAYOUT = re.compile(r"(?<![a-z])([nt])([nt])(?![a-z])")


def _row_sizes(loss: Loss) -> tuple[int | None, ...]:
    """Return the uneven row strides; without strides, the sizes that are, or may be, such by the layout in the name."""
    if loss.uneven_rows is not None:
        return loss.uneven_rows
    found = _LAYOUT.search(loss.kernel)
    second_and_first = found.groups() if found is not None else ("n", "n")
    rows = [loss.n]
    if second_and_first != ("n", "t"):
        rows.append(loss.k)
    if second_and_first[1] == "t":
        rows.append(loss.m)
    return tuple(rows)


def _total(group: Sequence[Loss]) -> str:
    calls, time = sum(loss.calls for loss in group), sum(loss.time_us for loss in group)
    fraction = percent(min(1.0, sum(loss.fraction for loss in group)))
    return f"{number_of(calls, 'kernel')} of matrix products, {duration(time)}, {fraction} of all kernel time,"


def _saved(group: Sequence[Loss]) -> str:
    """Return a sentence on the savings of each way, over the losses with an estimate."""
    found: dict[str, list[float]] = defaultdict(list)
    bases: dict[str, set[str]] = defaultdict(set)
    for loss in group:
        for saving in loss.savings:
            found[saving.way].append(saving.saved_us)
            bases[saving.way].add(saving.basis)
    if not found:
        return " The cost is unknown: the trace lacks the shapes, or the GPU's rates are not known."
    words = [
        f"{way} at most {duration(sum(saved))} (by the {' and the '.join(sorted(bases[way]))})"
        for way, saved in found.items()
    ]
    judged, known = min(map(len, found.values())), " Estimated saving"
    if judged < len(group):
        known += f" for {judged} of {len(group)} products"
    return f"{known}: {', '.join(words)}."


def _evidence(group: Sequence[Loss]) -> dict[str, object]:
    ways = dict.fromkeys(saving.way for loss in group for saving in loss.savings)
    return {
        "cause": group[0].cause_id,
        "calls": sum(loss.calls for loss in group),
        "time_us": sum(loss.time_us for loss in group),
        "fraction": sum(loss.fraction for loss in group),
        "saved_us": {
            way: sum(saving.saved_us for loss in group for saving in loss.savings if saving.way == way) for way in ways
        },
        "kernels": list(dict.fromkeys(loss.kernel for loss in group))[:_MOST_LISTED],
        "modules": list(dict.fromkeys(module for loss in group for module in loss.modules))[:_MOST_LISTED],
        "products": len(group),
    }


def _contradicted(report: KernelReport) -> Iterator[Finding]:
    """Yield a finding on kernels whose names imply CUDA cores although their rates imply Tensor Cores."""
    rows = [
        row for row in report.kernels if row.basis == "rate" and row.verdict == "native" and row.named.verdict == "off"
    ]
    if not rows:
        return
    names = list(dict.fromkeys(row.name for row in rows))
    say = by_number(len(names), "kernel's name says", "names of their kernels say")
    yield Finding(
        "rate-contradicts-name",
        "info",
        rows[0].module,
        f"{were(len(rows), 'run')} faster than this GPU's CUDA cores can be, though the {say} CUDA cores "
        f"({some(names, 2)}): counted as on Tensor Cores, by an estimate.",
        {"calls": len(rows), "kernels": names[:_MOST_LISTED]},
    )


def were(count: int, thing: str) -> str:
    """Return a subject with its verb: "1 run was", "1,000 runs were"."""
    return f"{number_of(count, thing)} {by_number(count, 'was', 'were')}"


def _unknown(report: KernelReport) -> Iterator[Finding]:
    fraction = report.shares.of_products("unknown")
    names = [row.name for row in report.by_name if row.verdict == "unknown"]
    if not fraction or fraction < _WORTH_A_LINE or all(gpu.vendor == "AMD" for gpu in report.gpus):
        return
    first = next(row for row in report.by_name if row.verdict == "unknown")
    yield Finding(
        "unknown-kernels",
        "info",
        "",
        f"{percent(fraction)} of the products' time is in kernels whose names do not show whether they used Tensor Cores "
        f"({some(names, 2)}): {first.reason}.",
        {"fraction": fraction, "time_us": report.shares.verdict_time_us["unknown"], "kernels": names[:_MOST_LISTED]},
        _to_know_more([row for row in report.kernels if row.verdict == "unknown"], "to judge them by their rates"),
    )


def _to_know_more(rows: Sequence[KernelRow], why: str) -> str:
    """Return how to record again with the data that these kernels lack."""
    operators = [op for row in rows if (op := row.kernel.matmul_op or row.kernel.op) is not None]
    if any(op.shapes is None for op in operators):
        return f"Record with record_shapes=True, {why}."
    if operators:
        return "The shapes do not settle it: ncu --metrics sm__inst_executed_pipe_tensor.sum counts their mma instructions."
    if any(row.kernel.unattributed == "CUDA graph" for row in rows):
        return f"Record once without CUDA graphs, {why}."
    return f"Record with ProfilerActivity.CPU and record_shapes=True, {why}."
