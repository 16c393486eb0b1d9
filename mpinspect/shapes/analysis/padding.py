"""Determine the sizes to pad, their targets, their names in the model, and the sizes that must be padded together.

A fused projection has 3 times the hidden size as outputs (2 or 4 times in the gates of a recurrent layer and in a
transformer's feed-forward), and a head's size is a fraction of the hidden size. Padding each size separately would give
sizes that do not fit each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, PREFERRED_ALIGNMENT, PREFERRING_ARCHITECTURES, up_to
from mpinspect.shapes.analysis.causes import Cause, once_mended
from mpinspect.shapes.analysis.report import Padding, ShapeRow
from mpinspect.shapes.analysis.wording import grouped
from mpinspect.shapes.records import ITEM_SIZES, Matmul, MatmulRecording

#: Names of counts, which may equal a size by chance.
_COUNTS = re.compile(r"(^|[._])(groups|heads|layers|blocks|experts|depth|kernel_size|patch_size|stride)$")
#: A size up to 8 times a hidden size of at least 16 follows from it: numbers of coordinates and classes are smaller.
_MOST_TIMES, _LEAST_BASE = 8, 16
#: Layers whose outputs are equal parts, by their names in torch and Transformers.
_THREE = re.compile(r"(^|[._])(c_attn|in_proj|w?qkv|to_qkv|query_key_value)([._]|$)")
_TWO = re.compile(r"(^|[._])(kv|kv_proj|to_kv|gate_up|gate_up_proj|w12)([._]|$)")


@dataclass(frozen=True, slots=True)
class Parts:
    """The equal parts of a size.

    Args:
        number: how many parts; 1 for a size that is not split.
        heads: whether the parts are attention heads; else the layer's output is split into the parts.
        is_shown: whether the recording shows the split; else the split is guessed from names and sizes.
        may_be: whether the size may be split although neither the recording nor a name shows a split.
    """

    number: int = 1
    heads: bool = False
    is_shown: bool = False
    may_be: bool = False


def padding_of(
    cause: Cause, rows: Sequence[ShapeRow], gpu: Gpu, recording: MatmulRecording, parts: int = 1
) -> Padding | None:
    """Return how to pad a cause's size, with all its equal ``parts`` padded equally; None if padding does not help.

    Only padding of a first layer's input counts as not worth it: the gain of others is not estimated yet.
    """
    if not cause.what or cause.size is None:
        return None
    dtype = once_mended(rows[0], recording.autocast_dtype).dtype
    to, to_preferred = _padded(cause.size, dtype, gpu, parts)
    is_stem = cause.what == "input channels"
    if is_stem:
        # cuDNN's first-layer kernels need 4 channels (8 bytes in FP16): NVIDIA's guide.
        to = to_preferred = up_to(cause.size, 4)
    elif cause.what == "summed size":
        to = to_preferred = up_to(cause.size, max(row.matmul.block for row in rows))
    elif cause.what == "head":
        to_preferred = to
    if to == cause.size:
        return None
    return Padding(
        finding=cause.id,
        what=cause.what,
        names=_names_of(cause.size, rows, recording),
        size=cause.size,
        to=to,
        to_preferred=to_preferred,
        modules=tuple(dict.fromkeys(row.module for row in rows)),
        share=sum(row.share for row in rows),
        is_worth_it=not is_stem,
    )


def _padded(size: int, dtype: str, gpu: Gpu, parts: int = 1) -> tuple[int, int]:
    """Return the least fully aligned size, also a multiple of 8, and the least size with the GPU's preferred alignment;
    in both, each of the equal ``parts`` is fully aligned."""
    item = ITEM_SIZES.get(dtype, 2)
    least = max(8, FULL_ALIGNMENT // item)
    # FP32 uses 128 bytes of 16-bit values too, so that the size stays the same when the model moves to 16 bits.
    preferred = max(PREFERRED_ALIGNMENT // item, PREFERRED_ALIGNMENT // 2)
    wanted = preferred if gpu.architecture in PREFERRING_ARCHITECTURES else least
    return up_to(size, parts * least), up_to(size, math.lcm(parts * least, wanted))


def _names_of(size: int, rows: Sequence[ShapeRow], recording: MatmulRecording) -> tuple[str, ...]:
    """Return the names of a size in the products' modules, the config's first; without any, the multiplied parameters' names.

    Names that differ only in layer numbers are merged.
    """
    found = [name for row in rows for name in recording.names_of(size, row.module, row.parameter)]
    sizes = [name for name in dict.fromkeys(found) if not _COUNTS.search(name)]
    parameters = [row.parameter for row in rows if row.parameter]
    return tuple(grouped(sorted(sizes, key=lambda name: not name.startswith("config.")) or parameters))


def following_padding(
    following: Mapping[Cause, tuple[ShapeRow, ...]], base: Padding | None, gpu: Gpu, recording: MatmulRecording
) -> tuple[Padding, ...]:
    """Return the paddings of the sizes that follow from a padded size."""
    if base is None:
        return ()
    found = []
    for cause, rows in following.items():
        if (own := padding_of(cause, rows, gpu, recording)) is None:
            continue
        to, preferred = (own.size * size // base.size for size in (base.to, base.to_preferred))
        found.append(replace(own, to=to, to_preferred=preferred, is_worth_it=base.is_worth_it))
    return tuple(found)


def consequences_of(causes: Iterable[Cause], rows: Sequence[ShapeRow]) -> dict[Cause, Cause]:
    """Find odd sizes that follow from another odd size; return a map from each one's cause to the cause to blame."""
    causes = list(causes)
    odd = {cause.size: cause for cause in causes if cause.what == "size" and cause.size}
    forward = [row.matmul for row in rows if row.role == "forward" and row.matmul.attention is None]
    found: dict[Cause, Cause] = {}
    for cause in causes:
        if cause.what == "head" and cause.size:
            whole = next((size for size in sorted(odd) if _heads_in(size, cause.size, rows)), None)
            if whole is not None:
                found[cause] = odd[whole]
                grouped_heads = (size for size in odd if size != whole and _heads_in(size, cause.size, rows, keys=True))
                found |= {odd[size]: odd[whole] for size in grouped_heads}
    # A size made up of heads is padded by heads, even if it is also a multiple of another odd size.
    of_heads = {base.size for base in found.values()}
    for size in sorted(odd.keys() - of_heads):
        for base in sorted((base for base in odd if _LEAST_BASE <= base < size), reverse=True):
            if size % base == 0 and size // base <= _MOST_TIMES and _follows(size, base, forward):
                found[odd[size]] = found.get(odd[base], odd[base])
                break
    return found


def parts_in(cause: Cause, following: Sequence[Cause], rows: Sequence[ShapeRow], recording: MatmulRecording) -> Parts:
    """Return the parts of an odd size that must be padded equally: its heads, or the parts of the layer's output."""
    if cause.what != "size" or cause.size is None:
        return Parts()
    for one in following:
        if one.what == "head" and (heads := _heads_in(cause.size, one.size or 0, rows)):
            return Parts(heads, heads=True)
    if following:
        return Parts()
    number, shown = _parts_of(cause.size, rows, recording)
    return Parts(number, is_shown=shown, may_be=number == 1 and _may_be_split(cause.size, recording))


def _heads_in(size: int, head: int, rows: Sequence[ShapeRow], keys: bool = False) -> int:
    """Return how many heads make up a size (query heads, or query, key and value heads; ``keys``: key heads alone, where
    they are fewer than query heads); 0 if heads do not make it up."""
    attentions = [row.matmul.attention for row in rows if row.matmul.attention is not None]
    fitting = [one for one in attentions if one.head_dim == head]
    heads = {one.heads for one in fitting}
    if keys:
        heads = {one.kv_heads for one in fitting if one.kv_heads < one.heads}
    return next((count * times for count in sorted(heads) for times in (1, 3) if count * times * head == size), 0)


def _parts_of(size: int, rows: Sequence[ShapeRow], recording: MatmulRecording) -> tuple[int, bool]:
    """Return the number of equal parts of a layer's output (1: unsplit or unknown), and whether the recording shows them."""
    for row in rows:
        for layout in row.judged.layouts:
            if layout.row_stride == size and 1 < layout.row_size < size and size % layout.row_size == 0:
                return size // layout.row_size, True
    if not _may_be_split(size, recording):
        return 1, False
    names = [name for row in rows if row.matmul.n == size for name in (row.parameter, row.module)]
    for pattern, parts in ((_THREE, 3), (_TWO, 2)):
        if size % parts == 0 and any(pattern.search(name) for name in names):
            return parts, False
    if size % 3 == 0 and size // 3 in recording.size_values:
        return 3, False
    return 1, False


def _may_be_split(size: int, recording: MatmulRecording) -> bool:
    """Return whether a size may have equal parts: it is a layer's output, and no other layer takes all of it as input."""
    forward = [matmul for matmul in recording.matmuls if matmul.role == "forward" and matmul.attention is None]
    made = any(matmul.n == size for matmul in forward)
    divisible = size >= _LEAST_BASE and (size % 2 == 0 or size % 3 == 0)
    return made and divisible and not any(matmul.k == size for matmul in forward)


def _follows(size: int, base: int, forward: Sequence[Matmul]) -> bool:
    """Return whether a layer maps ``base`` to ``size``, or a layer's output is ``size`` and layers take only ``base``."""
    made = [matmul for matmul in forward if matmul.n == size]
    if any(matmul.k == base for matmul in made):
        return True
    return bool(made) and any(one.k == base for one in forward) and not any(one.k == size for one in forward)
