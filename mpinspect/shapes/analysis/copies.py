"""The finding about copies that only change a tensor's layout."""

from __future__ import annotations

from typing import Any

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import percent
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.causes import unfused_attention
from mpinspect.shapes.analysis.wording import count, some_modules
from mpinspect.shapes.records import LayoutCopy, MatmulRecording

#: Share of the products' estimated time from which copies are mentioned, and from which they are a warning.
_WORTH_MENTIONING, _WORTH_MENDING = 0.05, 0.2
#: Share of the FLOPs from which a model is one of convolutions, and share of the copied bytes from which they have a cause.
_OF_CONVOLUTIONS, _OF_BYTES = 0.2, 0.2


def layout_copies(recording: MatmulRecording, gpu: Gpu, total_us: float | None) -> list[Finding]:
    """One finding where copies take a substantial time beside the products, estimated from their bytes; else none."""
    copies = [copy for copy in recording.copies if copy.kind == "layout"]
    moved = sum(copy.bytes for copy in copies)
    if not moved or gpu.bandwidth_gb_s is None or not total_us:
        return []
    fraction = moved / (gpu.bandwidth_gb_s * 1e3) / total_us
    if fraction < _WORTH_MENTIONING:
        return []
    copies.sort(key=lambda copy: -copy.bytes)
    evidence: dict[str, Any] = {
        "bytes": moved,
        "calls": sum(copy.calls for copy in copies),
        "estimated_time_against_products": fraction,
        "modules": [copy.module for copy in copies[:10]],
    }
    fix = _fix(recording, copies, moved)
    message = (
        f"copies that only change a layout ({count(evidence['calls'], 'call')}) move {moved / 1e6:,.0f} MB, most in "
        f"{some_modules(copy.module for copy in copies)}: estimated at {percent(fraction)} of the products' own time"
    )
    if not fix:
        message += "; they split and merge heads around fused attention, no change expected"
    severity = "warning" if fix and fraction >= _WORTH_MENDING else "info"
    return [Finding("layout-copies", severity, "", message, evidence, fix)]


def _fix(recording: MatmulRecording, copies: list[LayoutCopy], moved: int) -> str:
    """What may spare the copies, by where they are made; "" where nothing simple does."""
    unfused = {recording.matmuls[index].module for index in unfused_attention(recording)}
    attention = unfused | {matmul.module for matmul in recording.matmuls if matmul.kind == "attention"}
    flops = sum(matmul.flops * matmul.calls for matmul in recording.matmuls)
    convolved = sum(matmul.flops * matmul.calls for matmul in recording.matmuls if matmul.kind == "convolution")
    elsewhere = moved - _bytes_within(copies, attention)
    fixes = []
    if _bytes_within(copies, unfused) >= _OF_BYTES * moved:
        fixes.append("fused attention (torch.nn.functional.scaled_dot_product_attention)")
    if elsewhere >= _OF_BYTES * moved:
        if convolved >= _OF_CONVOLUTIONS * flops:
            fixes.append("channels_last throughout, the model and its input")
        fixes.append("view or reshape instead of transpose().contiguous(), where the layout behind it allows")
    return "; ".join(fixes)


def _bytes_within(copies: list[LayoutCopy], modules: set[str]) -> int:
    """Of the copies that these modules and their children make. The model itself, "", is no parent of all others here."""
    return sum(
        copy.bytes
        for copy in copies
        if copy.module in modules or any(name and copy.module.startswith(f"{name}.") for name in modules)
    )
