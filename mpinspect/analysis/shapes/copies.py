"""The finding about copies that only change a tensor's layout."""

from __future__ import annotations

from typing import Any

from mpinspect.analysis.finding import Finding
from mpinspect.analysis.shapes.wording import count, some_modules
from mpinspect.analysis.wording import percent
from mpinspect.gpus import Gpu
from mpinspect.matmuls import MatmulRecording

#: Share of the products' estimated time from which copies are mentioned, and from which they are a warning.
_WORTH_MENTIONING, _WORTH_MENDING = 0.05, 0.2


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
    message = (
        f"copies that only change a layout ({count(evidence['calls'], 'call')}) move {moved / 1e6:,.0f} MB, most in "
        f"{some_modules(copy.module for copy in copies)}: estimated at {percent(fraction)} of the products' own time"
    )
    fix = "keep one layout: channels_last throughout, reshape instead of transpose().contiguous(), fused attention"
    severity = "warning" if fraction >= _WORTH_MENDING else "info"
    return [Finding("layout-copies", severity, "", message, evidence, fix)]
