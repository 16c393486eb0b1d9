"""``analyse_shapes``: judges every product of a recording, groups them by cause and ranks the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpinspect.reporting.finding import SEVERITIES, Finding
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.causes import Cause, Symptom, in_16_bits, symptoms_of, unfused_attention
from mpinspect.shapes.analysis.group import Group
from mpinspect.shapes.analysis.judging import judge
from mpinspect.shapes.analysis.padding import consequences_of, following_padding, padding_of, parts_in
from mpinspect.shapes.analysis.report import CHANGES_NOTHING, CallTime, Padding, ShapeReport, ShapeRow
from mpinspect.shapes.analysis.roofline import call_time, gain, is_worth_it, padded_time, partial_us
from mpinspect.shapes.analysis.rules import BY_ID, FINDING_IDS, RULES, RecordingRule, cause_of
from mpinspect.shapes.analysis.todays_rule import taken_on
from mpinspect.shapes.analysis.verdict import VERDICTS
from mpinspect.shapes.records import Matmul, MatmulRecording


def analyse_shapes(recording: MatmulRecording, gpu: Gpu, *, model: str = "", notes: Sequence[str] = ()) -> ShapeReport:
    """Return the report on a recording's shapes for a GPU, also for an empty recording.

    Args:
        model: the model's name for the headline.
        notes: sentences to put before the recording's own notes.
    """
    rows = _rows(recording, gpu)
    total_us = _total_us(rows)
    groups = _groups_of(rows, gpu, recording, total_us)
    findings = [BY_ID[cause.id].finding(group) for cause, (group, _) in groups.items()]
    for rule in RULES:
        if isinstance(rule, RecordingRule) and (finding := rule.finding(recording, rows, gpu, total_us)):
            findings.append(finding)
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
        findings=tuple(sorted(findings, key=_rank)),
        padding=tuple(sorted(paddings, key=lambda padding: -padding.share)),
        flops=flops,
        flops_by_verdict=_flops_by_verdict(rows),
        calls=sum(row.calls for row in rows),
        calls_by_talk=_calls_by_talk(rows),
        estimated_us=total_us,
        estimated_partial_tiles_fraction=_partial_fraction(rows, gpu, total_us),
        layout_copy_bytes=sum(copy.bytes for copy in recording.copies if copy.kind == "layout"),
        dtype_copy_bytes=sum(copy.bytes for copy in recording.copies if copy.kind == "dtype"),
        notes=(*notes, *_of_device(recording), *recording.notes),
        complete=recording.complete,
    )


def _of_device(recording: MatmulRecording) -> Iterator[str]:
    """Yield a sentence on the dtypes that a recording from a CPU is judged in."""
    if recording.device != "cpu" or not recording.matmuls:
        return
    attention = ""
    if any(matmul.kind == "attention" for matmul in recording.matmuls):
        attention = ", and scaled_dot_product_attention by the kernel that CUDA would choose"
    yield f"recorded on a CPU: products are judged in the dtypes that the CPU computed in{attention}"


def runs_in_fp32(row: ShapeRow) -> bool:
    """Return whether a product runs in FP32 on CUDA cores, whatever its shape; in TF32 it runs on Tensor Cores."""
    return row.dtype == "float32" and row.verdict == "off"


def suiting_in_16_bits(report: ShapeReport) -> float:
    """Return the share of the FLOPs, 0..1, that would suit Tensor Cores if products in FP32 ran in 16 bits."""
    suiting = 0
    for row in report.matmuls:
        verdict = row.verdict
        if runs_in_fp32(row):
            verdict = judge(in_16_bits(row.matmul, report.autocast_dtype), report.gpu).verdict
        if verdict == "native":
            suiting += row.flops * row.calls
    return suiting / (report.flops or 1)


#: The switch that a product's TF32 follows; for recurrent layers it is cuDNN's.
_SWITCHES = {"gemm": "matmul", "attention": "matmul"}


def tf32_of(matmul: Matmul, recording: MatmulRecording) -> bool | None:
    """Return whether torch allowed TF32 for a product; None if not recorded."""
    return recording.tf32.get(_SWITCHES.get(matmul.kind, "convolution"))


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
    """Return the lower bound of all products' time; None if more than a tenth of the FLOPs has no estimate."""
    computed = [row for row in rows if row.judged.cause not in ("raises", "empty")]
    known = [row for row in computed if row.time is not None]
    if not known or sum(row.share for row in known) < 0.9 * sum(row.share for row in computed):
        return None
    return sum(row.time.low_us * row.calls for row in known if row.time is not None)


def _with_findings(rows: Sequence[ShapeRow], groups: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[ShapeRow, ...]:
    """Return the rows, each with the id of the first finding that covers it; root causes precede others."""
    by_row: dict[int, str] = {}
    for finding, indices in sorted(groups, key=lambda group: FINDING_IDS.index(group[0])):
        for index in indices:
            by_row.setdefault(index, finding)
    return tuple(replace(row, finding=by_row.get(index, "")) for index, row in enumerate(rows))


def _main_dtype(rows: Sequence[ShapeRow]) -> str:
    flops: Counter[str] = Counter()
    for row in rows:
        flops[row.dtype] += row.flops * row.calls
    return max(flops, key=flops.__getitem__, default="")


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


def _groups_of(
    rows: Sequence[ShapeRow], gpu: Gpu, recording: MatmulRecording, total_us: float | None
) -> dict[Cause, tuple[Group, tuple[int, ...]]]:
    """Return each cause's products, as a group and as indices into ``rows``."""
    members = _members(rows, recording)
    follow = consequences_of(members, rows)
    alone = {cause: tuple(rows[index] for index in members[cause]) for cause in follow}
    for cause, base in follow.items():
        members[base] = sorted({*members[base], *members.pop(cause)})
    found = {}
    for cause, indices in members.items():
        concerned = tuple(rows[index] for index in indices)
        following = {one: alone[one] for one, base in follow.items() if base == cause}
        parts = parts_in(cause, tuple(following), concerned, recording)
        padding = padding_of(cause, concerned, gpu, recording, parts.number)
        times = ((_mended(cause, row, gpu, recording.autocast_dtype, padding), row.calls) for row in concerned)
        worth = gain(times, total_us)
        share = sum(row.share for row in concerned)
        if padding is not None and padding.is_worth_it:
            padding = replace(padding, is_worth_it=is_worth_it(worth, share))
        also = following_padding(following, padding, gpu, recording)
        found[cause] = (Group(cause, concerned, worth, padding, gpu, recording, also, parts), tuple(indices))
    return found


def _members(rows: Sequence[ShapeRow], recording: MatmulRecording) -> dict[Cause, list[int]]:
    """Return the causes that make a finding, with the indices of their products."""
    unfused = unfused_attention(recording)
    members: dict[Cause, list[int]] = {}
    for index, row in enumerate(rows):
        for cause in _causes_of(row, recording, index in unfused):
            members.setdefault(cause, []).append(index)
    return {
        cause: indices
        for cause, indices in members.items()
        if sum(rows[index].share for index in indices) >= BY_ID[cause.id].least_share
    }


def _causes_of(row: ShapeRow, recording: MatmulRecording, is_unfused: bool) -> list[Cause]:
    causes = [cause_of(symptom) for symptom in symptoms_of(row, recording, is_unfused)]
    if row.verdict == "native":
        causes.append(cause_of(Symptom("native" if any(causes) else "clean", row, recording)))
    return list(dict.fromkeys(cause for cause in causes if cause is not None))


def _mended(
    cause: Cause, row: ShapeRow, gpu: Gpu, autocast_dtype: str | None, padding: Padding | None
) -> CallTime | None:
    """Return the call's times, counting only the cost of this cause, and the work that padding adds."""
    if row.time is None or gpu.bandwidth_gb_s is None:
        return row.time
    time = BY_ID[cause.id].time(row, row.time, gpu, autocast_dtype)
    if time is None or padding is None:
        return time
    return padded_time(row, time, padding.size, padding.advised)


def _partial_fraction(rows: Sequence[ShapeRow], gpu: Gpu, total_us: float | None) -> float | None:
    """Return the estimated time that tiles and waves which are not full add, as a share of ``total_us``; None if unknown."""
    if not total_us or not gpu.sms:
        return None
    on_tensor_cores = ((row, row.time) for row in rows if row.verdict in ("native", "degraded"))
    added = sum(partial_us(row.matmul, time, gpu) * row.calls for row, time in on_tensor_cores if time is not None)
    return added / total_us


def _rank(finding: Finding) -> tuple[float, ...]:
    """Return the sort key: severity, the estimated time lost (the share of the FLOPs where no time is known), root causes
    first; findings without a measurable effect last."""
    evidence = finding.evidence
    share = evidence.get("flops_fraction", float(finding.severity == "error"))
    lost = evidence.get("estimated_saved_fraction_high", share) * (CHANGES_NOTHING not in evidence)
    return (
        -SEVERITIES.index(finding.severity),
        CHANGES_NOTHING in evidence,
        -round(lost, 6),
        -round(share, 6),
        FINDING_IDS.index(finding.id),
    )
