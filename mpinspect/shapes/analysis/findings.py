"""From judged products to findings: one for each cause, the gravest first and then by share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mpinspect.reporting.finding import SEVERITIES, Finding
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis import findings_dtype, findings_size, findings_structure
from mpinspect.shapes.analysis.causes import Cause, Surroundings, causes_of, unfused_attention
from mpinspect.shapes.analysis.consequences import consequences_of, heads_in, may_be_split, parts_of
from mpinspect.shapes.analysis.group import Group, Parts, is_worth_it
from mpinspect.shapes.analysis.mending import mended
from mpinspect.shapes.analysis.padding import padding_of
from mpinspect.shapes.analysis.report import FINDING_IDS, Padding, ShapeRow
from mpinspect.shapes.analysis.roofline import gain
from mpinspect.shapes.records import MatmulRecording

#: Below this share of the FLOPs it is not said that a GPU would like 128 bytes.
_MIN_PREFERENCE_SHARE = 0.01

_MAKERS: dict[str, Callable[[Group], Finding]] = {
    "product-raises": findings_dtype.product_raises,
    "gpu-without-tensor-cores": findings_dtype.gpu_without,
    "gpu-unknown": findings_dtype.gpu_unknown,
    "float32-under-autocast": findings_dtype.float32_under_autocast,
    "tf32-off": findings_dtype.tf32_off,
    "float32": findings_dtype.float32,
    "float64": findings_dtype.float64,
    "dtype-not-multiplied": findings_dtype.dtype_not_multiplied,
    "matrix-vector": findings_structure.matrix_vector,
    "unfused-attention": findings_structure.unfused_attention,
    "not-channels-last": findings_structure.not_channels_last,
    "odd-tokens": findings_size.odd_tokens,
    "odd-vocabulary": findings_size.odd_vocabulary,
    "odd-size": findings_size.odd_size,
    "odd-channels": findings_size.odd_channels,
    "few-input-channels": findings_structure.few_input_channels,
    "misaligned-view": findings_structure.misaligned_view,
    "attention-head-size": findings_structure.attention_head_size,
    "attention-mask": findings_structure.attention_mask,
    "depthwise": findings_structure.depthwise,
    "multiples-of-8-only": findings_size.multiples_only,
    "prefers-128-bytes": findings_size.prefers_more,
}


def groups_of(
    rows: Sequence[ShapeRow], gpu: Gpu, recording: MatmulRecording, total_us: float | None
) -> dict[Cause, tuple[Group, tuple[int, ...]]]:
    """Each cause's products, as a group and as indices into ``rows``."""
    members = _members(rows, recording)
    follow = consequences_of(members, rows)
    alone = {cause: tuple(rows[index] for index in members[cause]) for cause in follow}
    for cause, base in follow.items():
        members[base] = sorted({*members[base], *members.pop(cause)})
    found = {}
    for cause, indices in members.items():
        concerned = tuple(rows[index] for index in indices)
        following = {one: alone[one] for one, base in follow.items() if base == cause}
        parts = _parts(cause, tuple(following), concerned, recording)
        worth = gain(((mended(cause, row, gpu, recording.autocast_dtype), row.calls) for row in concerned), total_us)
        share = sum(row.share for row in concerned)
        padding = padding_of(cause, concerned, gpu, recording, is_worth_it(worth, share), parts.number)
        also = _following(following, padding, gpu, recording)
        group = Group(cause, concerned, worth, padding, gpu, recording, also, parts)
        found[cause] = (group, tuple(indices))
    return found


def _parts(cause: Cause, following: Sequence[Cause], rows: Sequence[ShapeRow], recording: MatmulRecording) -> Parts:
    """What a size is several of, so that each must be padded: heads that follow from it, or parts that it is split into."""
    if cause.id != "odd-size" or cause.size is None:
        return Parts()
    for one in following:
        heads = heads_in(cause.size, one.size or 0, rows) if one.id == "attention-head-size" else 0
        if heads:
            return Parts(heads, heads=True)
    if following:
        return Parts()
    number, shown = parts_of(cause.size, rows, recording)
    return Parts(number, is_shown=shown, may_be=number == 1 and may_be_split(cause.size, recording))


def _following(
    following: Mapping[Cause, tuple[ShapeRow, ...]], base: Padding | None, gpu: Gpu, recording: MatmulRecording
) -> tuple[Padding, ...]:
    """How the sizes that follow from a padded one come out."""
    found = []
    for cause, rows in following.items():
        own = None if base is None else padding_of(cause, rows, gpu, recording, base.is_worth_it)
        if own is None or base is None:
            continue
        to, preferred = (own.size * size // base.size for size in (base.to, base.to_preferred))
        found.append(replace(own, to=to, to_preferred=preferred))
    return tuple(found)


def _members(rows: Sequence[ShapeRow], recording: MatmulRecording) -> dict[Cause, list[int]]:
    around = Surroundings(recording, unfused_attention(recording))
    members: dict[Cause, list[int]] = {}
    only, more = [], []
    for index, row in enumerate(rows):
        causes = causes_of(index, row, around)
        for cause in causes:
            members.setdefault(cause, []).append(index)
        if row.verdict == "native":
            if row.multiples_of_8 is False:
                only.append(index)
            elif not causes and any("prefer" in remark for remark in row.remarks):
                more.append(index)
    if only:
        members[Cause("multiples-of-8-only")] = only
    if sum(rows[index].share for index in more) >= _MIN_PREFERENCE_SHARE:
        members[Cause("prefers-128-bytes")] = more
    return members


def finding_of(group: Group) -> Finding:
    return _MAKERS[group.cause.id](group)


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The gravest first, what is said of the whole recording before them, then by share of the FLOPs, then root causes first."""
    return tuple(sorted(findings, key=_rank))


def _rank(finding: Finding) -> tuple[float, ...]:
    of_all = finding.id in ("recording-incomplete", "nothing-recorded")
    share = 1.0 if of_all else finding.evidence.get("flops_fraction", 0.0)
    return (-SEVERITIES.index(finding.severity), -round(share, 6), FINDING_IDS.index(finding.id))
