"""Sizes that follow from another odd size, and sizes that are several equal parts: what must be padded together.

A fused projection has 3 times the hidden size as its outputs (or 2, or 4 in a recurrent layer's gates and a transformer's
feed-forward), a head is a fraction of it. Padding each by itself would give sizes that don't fit each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mpinspect.shapes.analysis.causes import Cause
from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.records import Matmul, MatmulRecording

#: The largest multiple of a hidden size that is taken for one, and the least hidden size: coordinates and classes are fewer.
_MOST_TIMES, _LEAST_BASE = 8, 16
#: Layers whose outputs are equal parts, by their names in torch and Transformers.
_THREE = re.compile(r"(^|[._])(c_attn|in_proj|w?qkv|to_qkv|query_key_value)([._]|$)")
_TWO = re.compile(r"(^|[._])(kv|kv_proj|to_kv|gate_up|gate_up_proj|w12)([._]|$)")


def consequences_of(causes: Iterable[Cause], rows: Sequence[ShapeRow]) -> dict[Cause, Cause]:
    """Causes whose size follows from that of another, which is an odd size itself: by the one that follows."""
    causes = list(causes)
    odd = {cause.size: cause for cause in causes if cause.id == "odd-size" and cause.size}
    forward = _forward(rows)
    found: dict[Cause, Cause] = {}
    for cause in causes:
        if cause.id == "attention-head-size" and cause.size:
            whole = next((size for size in sorted(odd) if heads_in(size, cause.size, rows)), None)
            if whole is not None:
                found[cause] = odd[whole]
    # What heads make up is padded by heads, whatever it is a multiple of.
    of_heads = {base.size for base in found.values()}
    for size in sorted(odd.keys() - of_heads):
        for base in sorted((base for base in odd if _LEAST_BASE <= base < size), reverse=True):
            if size % base == 0 and size // base <= _MOST_TIMES and _follows(size, base, forward):
                found[odd[size]] = found.get(odd[base], odd[base])
                break
    return found


def heads_in(size: int, head: int, rows: Sequence[ShapeRow]) -> int:
    """How many heads of that size make up a size: those of query, or of query, key and value; 0 if they don't."""
    heads = {
        row.matmul.attention.heads
        for row in rows
        if row.matmul.attention is not None and row.matmul.attention.head_dim == head
    }
    return next((count * times for count in sorted(heads) for times in (1, 3) if count * times * head == size), 0)


def parts_of(size: int, rows: Sequence[ShapeRow], recording: MatmulRecording) -> tuple[int, bool]:
    """Into how many equal parts a layer's outputs are split (1: none, or not known), and whether the recording shows it."""
    for row in rows:
        for layout in row.judged.layouts:
            if layout.row_stride == size and 1 < layout.row_size < size and size % layout.row_size == 0:
                return size // layout.row_size, True
    if not may_be_split(size, recording):
        return 1, False
    names = [name for row in rows if row.matmul.n == size for name in (row.parameter, row.module)]
    for pattern, parts in ((_THREE, 3), (_TWO, 2)):
        if size % parts == 0 and any(pattern.search(name) for name in names):
            return parts, False
    return (3, False) if size % 3 == 0 and size // 3 in recording.sizes else (1, False)


def may_be_split(size: int, recording: MatmulRecording) -> bool:
    """Whether a size may be that of several equal parts: a layer's outputs, which no other layer takes whole."""
    forward = [matmul for matmul in recording.matmuls if matmul.role == "forward" and matmul.attention is None]
    made = any(matmul.n == size for matmul in forward)
    divisible = size >= _LEAST_BASE and (size % 2 == 0 or size % 3 == 0)
    return made and divisible and not any(matmul.k == size for matmul in forward)


def _forward(rows: Sequence[ShapeRow]) -> list[Matmul]:
    return [row.matmul for row in rows if row.role == "forward" and row.matmul.attention is None]


def _follows(size: int, base: int, forward: Sequence[Matmul]) -> bool:
    """Whether a layer makes ``size`` of ``base``, or makes it for layers that take ``base``; a head of few classes does not."""
    made = [matmul for matmul in forward if matmul.n == size]
    if any(matmul.k == base for matmul in made):
        return True
    return bool(made) and any(one.k == base for one in forward) and not any(one.k == size for one in forward)
