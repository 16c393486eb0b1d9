"""The lint's report as JSON: strict, ASCII, versioned. The schema: docs/shape-lint.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.json_text import lines
from mpinspect.runtime.version import __version__
from mpinspect.shapes.analysis.report import Padding, ShapeReport, ShapeRow

SCHEMA = "mpinspect.shapes"
#: Raised when a reader of an older version would misread the file; fields can be added without.
SCHEMA_VERSION = 1


def render(report: ShapeReport) -> str:
    """The report as JSON text, ASCII only; products, findings and paddings a line each; ends with a newline."""
    return lines(document(report), 2) + "\n"


def document(report: ShapeReport) -> dict[str, Any]:
    """What ``render`` writes, as plain dicts, lists, strings, numbers, booleans and None."""
    gpu = report.gpu
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "mpinspect_version": __version__,
        "model": report.model,
        "gpu": {"name": gpu.name, "architecture": gpu.architecture, "has_tensor_cores": gpu.has_tensor_cores},
        "dtype": report.dtype,
        "autocast_dtype": report.autocast_dtype,
        "device": report.device,
        "backward": report.backward,
        "complete": report.complete,
        "flops": report.flops,
        "flops_by_verdict": dict(report.flops_by_verdict),
        "calls": report.calls,
        "calls_multiples_of_8": report.calls_by_talk.get(True, 0),
        "calls_not_multiples_of_8": report.calls_by_talk.get(False, 0),
        "estimated_us": _plain(report.estimated_us),
        "layout_copy_bytes": report.layout_copy_bytes,
        "dtype_copy_bytes": report.dtype_copy_bytes,
        "findings": [_finding(finding) for finding in report.findings],
        "padding": [_padding(padding) for padding in report.padding],
        "matmuls": [_row(row) for row in report.matmuls],
        "notes": list(report.notes),
    }


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
        "flops_fraction": _plain(row.share),
        "multiples_of_8": row.multiples_of_8,
        "verdict": row.verdict,
        "reason": row.reason,
        "remarks": list(row.remarks),
        "stride_bytes": dict(row.stride_bytes),
        "alignment_bytes": row.alignment_bytes,
        "estimated_us": None if time is None else _plain([time.low_us, time.high_us]),
        "roofline_us": None if time is None else _plain(time.best_us),
        "finding": row.finding,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "layer": finding.layer,
        "message": finding.message,
        "evidence": _plain(finding.evidence),
        "fix": finding.fix,
    }


def _padding(padding: Padding) -> dict[str, Any]:
    return {
        "finding": padding.finding,
        "what": padding.what,
        "names": list(padding.names),
        "from": padding.size,
        "to": padding.advised,
        "to_least": padding.to,
        "to_preferred": padding.to_preferred,
        "modules": list(padding.modules),
        "flops_fraction": _plain(padding.share),
        "worth_it": padding.is_worth_it,
    }


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it; floats with six digits, for they are estimates and shares."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)
