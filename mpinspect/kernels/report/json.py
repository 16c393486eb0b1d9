"""The kernel report as JSON: strict, versioned. The schema: docs/tensor-cores.md.

Runs that are equal in all but their time stand together, with how many they are and how long they took.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.ranks import DeviceTime
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.shares import Shares
from mpinspect.reporting.json_text import lines
from mpinspect.runtime.version import __version__

if TYPE_CHECKING:
    from mpinspect.shapes.records import Matmul

SCHEMA = "mpinspect.kernels"
#: Raised when a reader of an older version would misread the file; fields can be added without.
SCHEMA_VERSION = 1


def render(report: KernelReport) -> str:
    """The report as JSON text, ASCII only; a line for each member of a list; ends with a newline."""
    return lines(document(report), 2) + "\n"


def document(report: KernelReport) -> dict[str, Any]:
    """What ``render`` writes, as plain dicts, lists, strings, numbers, booleans and None."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "mpinspect_version": __version__,
        "rules_version": report.rules_version,
        "tensor_core_fraction": report.tensor_core_fraction,
        "tensor_core_fraction_of_all": report.tensor_core_fraction_of_all,
        "tensor_core_fraction_of_compute": report.tensor_core_fraction_of_compute,
        "attributed_fraction": report.attributed_fraction,
        "phrase": report.phrase,
        "gpus": _plain(report.gpus),
        "shares": _plain(report.shares),
        "coverage": _plain(report.coverage),
        "limits": _plain(report.limits),
        "findings": _plain(report.findings),
        "losses": _plain(report.losses),
        "by_name": _plain(report.by_name),
        "by_module": _plain(report.by_module),
        "ranks": _plain(report.ranks),
        "kernels": _kernels(report),
    }


def _kernels(report: KernelReport) -> list[dict[str, Any]]:
    """Equal runs together, most time first within a trace."""
    groups: dict[tuple[object, ...], list[KernelRow]] = defaultdict(list)
    for row in report.kernels:
        groups[_identity(row)].append(row)
    ordered = sorted(groups.values(), key=lambda group: (group[0].trace, -sum(row.time_us for row in group)))
    return [_kernel(group) for group in ordered]


def _identity(row: KernelRow) -> tuple[object, ...]:
    product = row.matmul
    sizes = None if product is None else (product.m, product.n, product.k, product.batch, product.role)
    where = (row.trace, row.device, row.module, row.phase, row.kernel.unattributed, row.kernel.is_graph)
    return row.name, row.verdict, row.basis, row.op, row.dtype, sizes, row.flops, *where


def _kernel(group: list[KernelRow]) -> dict[str, Any]:
    row, times = group[0], [row.time_us for row in group]
    shape = row.shape
    return {
        "name": row.name,
        "verdict": row.verdict,
        "reason": row.reason,
        "basis": row.basis,
        "time_us": _plain(sum(times)),
        "calls": len(group),
        "min_time_us": _plain(min(times)),
        "max_time_us": _plain(max(times)),
        "op": row.op,
        "module": row.module,
        "module_is_path": row.kernel.module_is_path,
        "phase": row.phase,
        "trace": row.trace,
        "device": row.device,
        "architecture": row.architecture,
        "dtypes": list(row.dtypes),
        "dtype": row.dtype,
        "kind": row.kind,
        "rule": row.named.rule,
        "flops": _plain(row.flops),
        "tflops": _plain(
            row.flops * len(group) / sum(times) / 1e6 if row.flops is not None and sum(times) > 0 else None
        ),
        "matmul": None if row.matmul is None else _matmul(row.matmul),
        "shape_verdict": None if shape is None else shape.verdict,
        "shape_reason": None if shape is None else shape.reason,
        "multiples_of_8": None if shape is None else shape.multiples_of_8,
        "unattributed": row.kernel.unattributed,
        "is_graph": row.kernel.is_graph,
    }


def _matmul(matmul: Matmul) -> dict[str, Any]:
    names = ("op", "kind", "role", "m", "n", "k", "batch", "dtype", "flops", "bytes")
    return {name: _plain(getattr(matmul, name)) for name in names}


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: a float that is no number is a string; of unknown types their ``str``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields | {name: _plain(getattr(value, name)) for name in _DERIVED.get(type(value), ())}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)


#: Properties that stand beside the fields.
_DERIVED: dict[type, tuple[str, ...]] = {
    Shares: (
        "product_time_us",
        "tensor_core_time_us",
        "compute_time_us",
        "tensor_core_fraction",
        "tensor_core_fraction_of_all",
        "tensor_core_fraction_of_compute",
        "communication_fraction",
    ),
    Loss: ("saved_us",),
    DeviceTime: ("idle_fraction",),
}
