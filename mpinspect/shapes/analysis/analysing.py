"""From a recording to its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.attention import taken_on
from mpinspect.shapes.analysis.copies import layout_copies
from mpinspect.shapes.analysis.findings import finding_of, groups_of, in_order
from mpinspect.shapes.analysis.findings_recording import recording_findings
from mpinspect.shapes.analysis.judging import judge
from mpinspect.shapes.analysis.report import FINDING_IDS, Padding, ShapeReport, ShapeRow
from mpinspect.shapes.analysis.roofline import call_time
from mpinspect.shapes.analysis.verdict import VERDICTS
from mpinspect.shapes.records import Matmul, MatmulRecording


def analyse_shapes(recording: MatmulRecording, gpu: Gpu, *, model: str = "", notes: Sequence[str] = ()) -> ShapeReport:
    """What the shapes of a recording mean on a GPU. Every recording has a report, an empty one too.

    Args:
        model: its name for the headline.
        notes: sentences to stand before the recording's own.
    """
    rows = _rows(recording, gpu)
    total_us = _total_us(rows)
    groups = groups_of(rows, gpu, recording, total_us)
    findings = [finding_of(group) for group, _ in groups.values()]
    findings += layout_copies(recording, gpu, total_us)
    findings += recording_findings(recording, rows)
    paddings = [padding for group, _ in groups.values() for padding in group.paddings]
    flops = sum(row.flops * row.calls for row in rows)
    return ShapeReport(
        model=model,
        gpu=gpu,
        dtype=_main_dtype(rows),
        autocast_dtype=recording.autocast_dtype,
        device=recording.device,
        backward=recording.backward,
        matmuls=_with_findings(rows, [(group.cause.id, indices) for group, indices in groups.values()]),
        findings=in_order(findings),
        padding=_sorted(paddings),
        flops=flops,
        flops_by_verdict=_flops_by_verdict(rows),
        calls=sum(row.calls for row in rows),
        calls_by_talk=_calls_by_talk(rows),
        estimated_us=total_us,
        layout_copy_bytes=sum(copy.bytes for copy in recording.copies if copy.kind == "layout"),
        dtype_copy_bytes=sum(copy.bytes for copy in recording.copies if copy.kind == "dtype"),
        notes=(*notes, *recording.notes),
        complete=recording.complete,
    )


def tf32_of(matmul: Matmul, recording: MatmulRecording) -> bool | None:
    """Whether the recording says that TF32 is allowed for a product; recurrent networks follow cuDNN's switch."""
    return recording.tf32.get("matmul" if matmul.kind in ("gemm", "attention") else "convolution")


def _rows(recording: MatmulRecording, gpu: Gpu) -> list[ShapeRow]:
    total = sum(matmul.flops * matmul.calls for matmul in recording.matmuls) or 1
    rows = []
    for recorded in recording.matmuls:
        matmul = taken_on(recorded, gpu)
        verdict = judge(matmul, gpu, tf32=tf32_of(matmul, recording))
        share = matmul.flops * matmul.calls / total
        rows.append(ShapeRow(matmul, verdict, share, call_time(matmul, verdict, gpu)))
    return rows


def _total_us(rows: Sequence[ShapeRow]) -> float | None:
    """Least time of all products; None where a substantial part of the FLOPs has no estimate."""
    computed = [row for row in rows if row.judged.cause not in ("raises", "empty")]
    known = [row for row in computed if row.time is not None]
    if not known or sum(row.share for row in known) < 0.9 * sum(row.share for row in computed):
        return None
    return sum(row.time.low_us * row.calls for row in known if row.time is not None)


def _with_findings(rows: Sequence[ShapeRow], groups: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[ShapeRow, ...]:
    """The rows, each with the id of the first finding about it: root causes first."""
    by_row: dict[int, str] = {}
    for finding, indices in sorted(groups, key=lambda group: FINDING_IDS.index(group[0])):
        for index in indices:
            by_row.setdefault(index, finding)
    return tuple(replace(row, finding=by_row.get(index, "")) for index, row in enumerate(rows))


def _sorted(paddings: Sequence[Padding]) -> tuple[Padding, ...]:
    return tuple(sorted(paddings, key=lambda padding: -padding.share))


def _main_dtype(rows: Sequence[ShapeRow]) -> str:
    flops: Counter[str] = Counter()
    for row in rows:
        flops[row.dtype] += row.flops * row.calls
    return flops.most_common(1)[0][0] if flops else ""


def _flops_by_verdict(rows: Sequence[ShapeRow]) -> dict[str, int]:
    found = dict.fromkeys(VERDICTS, 0)
    for row in rows:
        found[row.verdict] += row.flops * row.calls
    return found


def _calls_by_talk(rows: Sequence[ShapeRow]) -> dict[bool | None, int]:
    found: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    for row in rows:
        found[row.multiples_of_8] += row.calls
    return found
