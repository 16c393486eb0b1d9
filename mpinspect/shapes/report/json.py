"""Convert the lint's report to JSON. The schema is in docs/shape-lint.md."""

from __future__ import annotations

from typing import Any

from mpinspect.reporting.json_text import Layout, headed, plain
from mpinspect.shapes.analysis.report import Padding, ShapeReport, ShapeRow

#: Each product, finding and padding has its own line.
LAYOUT = Layout(2)


def to_plain(report: ShapeReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None; floats are rounded to six digits."""
    gpu = report.gpu
    body = {
        "model": report.model,
        "gpu": {"name": gpu.name, "architecture": gpu.architecture, "has_tensor_cores": gpu.has_tensor_cores},
        "dtype": report.dtype,
        "autocast_dtype": report.autocast_dtype,
        "device": report.device,
        "backward": report.backward,
        "complete": report.complete,
        "flops": report.flops,
        "flops_by_verdict": report.flops_by_verdict,
        "calls": report.calls,
        "calls_multiples_of_8": report.calls_by_talk.get(True, 0),
        "calls_not_multiples_of_8": report.calls_by_talk.get(False, 0),
        "estimated_us": report.estimated_us,
        "layout_copy_bytes": report.layout_copy_bytes,
        "dtype_copy_bytes": report.dtype_copy_bytes,
        "findings": report.findings,
        "padding": [_padding(padding) for padding in report.padding],
        "matmuls": [_row(row) for row in report.matmuls],
        "notes": report.notes,
    }
    return headed("mpinspect.shapes", 1, plain(body, digits=6))


def _row(row: ShapeRow) -> dict[str, Any]:
    time = row.time
    return {
        "module": row.module,
        "module_type": row.module_type,
        "parameter": row.parameter,
        "role": row.role,
        "op": row.op,
        "kind": row.kind,
        "m": row.m,
        "n": row.n,
        "k": row.k,
        "batch": row.batch,
        "dtype": row.dtype,
        "calls": row.calls,
        "flops": row.flops,
        "bytes": row.bytes,
        "flops_fraction": row.share,
        "multiples_of_8": row.multiples_of_8,
        "verdict": row.verdict,
        "reason": row.reason,
        "remarks": row.remarks,
        "stride_bytes": row.stride_bytes,
        "alignment_bytes": row.alignment_bytes,
        "estimated_us": None if time is None else [time.low_us, time.high_us],
        "roofline_us": None if time is None else time.best_us,
        "finding": row.finding,
    }


def _padding(padding: Padding) -> dict[str, Any]:
    return {
        "finding": padding.finding,
        "what": padding.what,
        "names": padding.names,
        "from": padding.size,
        "to": padding.advised,
        "to_least": padding.to,
        "to_preferred": padding.to_preferred,
        "modules": padding.modules,
        "flops_fraction": padding.share,
        "worth_it": padding.is_worth_it,
    }
