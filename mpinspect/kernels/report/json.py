"""Convert the kernel report to JSON. The schema is in docs/tensor-cores.md.

Runs that differ only in time form one entry, with their number and total time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.ranks import DeviceTime
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.rows import KernelRow, tflops
from mpinspect.kernels.analysis.shares import Shares
from mpinspect.reporting.json_text import Layout, Special, fields, headed, named, plain

#: Each member of a list has its own line.
LAYOUT = Layout(2)


def to_plain(report: KernelReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None."""
    body = named(
        report,
        "rules_version tensor_core_fraction tensor_core_fraction_of_all tensor_core_fraction_of_compute attributed_fraction "
        "phrase gpus shares coverage limits findings losses by_name by_module ranks",
    )
    return headed("mpinspect.kernels", 1, plain(body | {"kernels": _kernels(report)}, _SPECIAL))


def _kernels(report: KernelReport) -> list[dict[str, Any]]:
    """Return one entry for each set of equal runs, most time first within a trace."""
    groups: dict[tuple[object, ...], list[KernelRow]] = defaultdict(list)
    for row in report.kernels:
        groups[_identity(row)].append(row)
    ordered = sorted(groups.values(), key=lambda group: (group[0].trace, -sum(row.time_us for row in group)))
    return [_kernel(group) for group in ordered]


def _identity(row: KernelRow) -> tuple[object, ...]:
    where = (row.trace, row.device, row.module, row.phase, row.kernel.unattributed, row.kernel.is_graph)
    return row.name, row.verdict, row.basis, row.op, row.dtype, row.product, row.flops, *where


def _kernel(group: list[KernelRow]) -> dict[str, Any]:
    row, times = group[0], [row.time_us for row in group]
    flops = row.flops and row.flops * len(group)
    return {
        **named(row, "name verdict reason basis"),
        "time_us": sum(times),
        "calls": len(group),
        "min_time_us": min(times),
        "max_time_us": max(times),
        **named(row, "op module"),
        "module_is_path": row.kernel.module_is_path,
        **named(row, "phase trace device architecture dtypes dtype kind"),
        "rule": row.named.rule,
        "flops": row.flops,
        "tflops": tflops(flops, sum(times)),
        "matmul": row.matmul and named(row.matmul, "op kind role m n k batch dtype flops bytes"),
        "shape_verdict": getattr(row.shape, "verdict", None),
        "shape_reason": getattr(row.shape, "reason", None),
        "multiples_of_8": getattr(row.shape, "multiples_of_8", None),
        **named(row.kernel, "unattributed is_graph"),
    }


_SHARES = (
    *("product_time_us", "tensor_core_time_us", "compute_time_us", "tensor_core_fraction"),
    *("tensor_core_fraction_of_all", "tensor_core_fraction_of_compute", "communication_fraction"),
)
#: Properties that are written in addition to the fields.
_SPECIAL: Special = {
    Shares: lambda shares: fields(shares, also=_SHARES),
    Loss: lambda loss: fields(loss, also=("saved_us",)),
    DeviceTime: lambda device: fields(device, also=("idle_fraction",)),
}
