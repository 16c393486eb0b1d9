"""Report findings about a whole recording: it stopped early, it has no product to judge, or copies take much of the time.

Products missing from a recording have not been judged, so the first two findings are errors: without them, the report would
look healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpinspect.reporting.finding import Finding, warning_if
from mpinspect.reporting.words import number_of, percent
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.causes import unfused_attention
from mpinspect.shapes.analysis.report import CHANGES_NOTHING, ShapeRow
from mpinspect.shapes.analysis.todays_rule import is_nchw
from mpinspect.shapes.analysis.wording import some_modules
from mpinspect.shapes.records import LayoutCopy, MatmulRecording

#: Least share of the products' estimated time from which copies are mentioned, and from which they are a warning.
_WORTH_MENTIONING, _WORTH_MENDING = 0.05, 0.2
#: Least share of FLOPs in NCHW convolutions to advise channels_last, and least share of the copied bytes to advise any fix.
_OF_CONVOLUTIONS, _OF_BYTES = 0.2, 0.2


def recording_incomplete(recording: MatmulRecording, rows: Sequence[ShapeRow], *_: object) -> Finding | None:
    """Return a finding if the model stopped before its end, else None."""
    if not recording.stopped:
        return None
    then = "no matrix product had run until then, so its shapes can't be judged"
    if rows:
        products = number_of(sum(row.calls for row in rows), "product")
        then = f"every figure here is of the {products} that ran before"
    fix = "check that the model runs by itself with these arguments, forward and backward"
    if recording.device == "meta":
        fix = (
            "record it on the tensors themselves: lint_shapes(..., device='real'), or --real for mpinspect lint (ids and masks "
            "that are not on meta themselves may be enough); if it stops there too, the model does not run with these arguments"
        )
    return _of_recording("recording-incomplete", f"{recording.stopped}; {then}", rows, fix)


def nothing_recorded(recording: MatmulRecording, rows: Sequence[ShapeRow], *_: object) -> Finding | None:
    """Return a finding if the model ran to its end without any FLOP, else None."""
    if recording.stopped or any(row.flops for row in rows):
        return None
    if rows:
        message = (
            f"the {number_of(len(rows), 'product')} recorded multiply nothing (0 FLOP): no shape can be judged by them"
        )
        fix = "give inputs without a size of 0"
    else:
        message = "the model ran to its end and no matrix product was recorded: its shapes can't be judged"
        fix = "check that the inputs reach the layers that multiply; the notes, if there are any, list what can't be recorded"
    return _of_recording("nothing-recorded", message, rows, fix)


def _of_recording(id: str, message: str, rows: Sequence[ShapeRow], fix: str) -> Finding:
    evidence = {"calls": sum(row.calls for row in rows), "flops": sum(row.flops * row.calls for row in rows)}
    return Finding(id, "error", "", message, evidence, fix)


def layout_copies(
    recording: MatmulRecording, rows: Sequence[ShapeRow], gpu: Gpu, total_us: float | None
) -> Finding | None:
    """Return a finding if layout copies take at least 5% of the products' time, estimated from their bytes; else None."""
    copies = [copy for copy in recording.copies if copy.kind == "layout"]
    moved = sum(copy.bytes for copy in copies)
    if not moved or gpu.bandwidth_gb_s is None or not total_us:
        return None
    fraction = moved / (gpu.bandwidth_gb_s * 1e3) / total_us
    if fraction < _WORTH_MENTIONING:
        return None
    copies.sort(key=lambda copy: -copy.bytes)
    evidence: dict[str, Any] = {
        "bytes": moved,
        "calls": sum(copy.calls for copy in copies),
        "estimated_time_against_products": fraction,
        "estimated_saved_fraction_high": fraction / (1 + fraction),
        "modules": [copy.module for copy in copies[:10]],
    }
    fix = _fix(recording, copies, moved)
    message = (
        f"copies that only change a layout ({number_of(evidence['calls'], 'call')}) move {_size(moved)}, most in "
        f"{some_modules(copy.module for copy in copies)}: estimated at {percent(fraction)} of the products' own time"
    )
    if not fix:
        message += "; they split and merge heads around fused attention, no change expected"
        evidence[CHANGES_NOTHING] = True
    severity = warning_if(fix and fraction >= _WORTH_MENDING)
    return Finding("layout-copies", severity, "", message, evidence, fix)


def _fix(recording: MatmulRecording, copies: list[LayoutCopy], moved: int) -> str:
    """Return the fix that avoids the copies, depending on the modules that make them; "" if there is no simple fix."""
    unfused = {recording.matmuls[index].module for index in unfused_attention(recording)}
    attention = unfused | {matmul.module for matmul in recording.matmuls if matmul.kind == "attention"}
    flops = sum(matmul.flops * matmul.calls for matmul in recording.matmuls)
    convolved = sum(matmul.flops * matmul.calls for matmul in recording.matmuls if is_nchw(matmul))
    elsewhere = moved - _bytes_within(copies, attention)
    fixes = []
    if _bytes_within(copies, unfused) >= _OF_BYTES * moved:
        fixes.append("fused attention (torch.nn.functional.scaled_dot_product_attention)")
    if elsewhere >= _OF_BYTES * moved:
        if convolved >= _OF_CONVOLUTIONS * flops:
            fixes.append("channels_last throughout, the model and its input")
        fixes.append(
            "view or reshape instead of transpose().contiguous(), where the layout behind it allows (einsum copies, too)"
        )
    return "; ".join(fixes)


def _size(moved: int) -> str:
    if moved >= 1e6:
        return f"{moved / 1e6:,.0f} MB"
    return f"{-(-moved // 1000):,} kB"


def _bytes_within(copies: list[LayoutCopy], modules: set[str]) -> int:
    """Sum the copied bytes of these modules and their children; the model itself, "", is not treated as a parent."""
    return sum(
        copy.bytes
        for copy in copies
        if copy.module in modules or any(name and copy.module.startswith(f"{name}.") for name in modules)
    )
