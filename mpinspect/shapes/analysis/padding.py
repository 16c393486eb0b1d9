"""Sizes to pad: from what, to what, and what that size is called in the model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, PREFERRED_ALIGNMENT, PREFERRING_ARCHITECTURES
from mpinspect.shapes.analysis.causes import Cause
from mpinspect.shapes.analysis.latent import once_mended
from mpinspect.shapes.analysis.raising import up_to
from mpinspect.shapes.analysis.report import Padding, ShapeRow
from mpinspect.shapes.records import ITEM_SIZES, MatmulRecording

#: Names of what is counted and not multiplied: equal to a size by chance.
_COUNTS = re.compile(r"(^|[._])(groups|heads|layers|blocks|experts|depth|kernel_size|patch_size|stride)$")
_WHAT = {
    "odd-vocabulary": "vocabulary",
    "odd-size": "size",
    "odd-channels": "channels",
    "few-input-channels": "input channels",
    "attention-head-size": "head",
}


def padding_of(
    cause: Cause, rows: Sequence[ShapeRow], gpu: Gpu, recording: MatmulRecording, worth_it: bool, parts: int = 1
) -> Padding | None:
    """How a cause's size would be padded, each of its equal ``parts`` alike; None where no size of the model is to blame."""
    if cause.id not in _WHAT or cause.size is None:
        return None
    dtype = once_mended(rows[0], recording.autocast_dtype).dtype
    to, to_preferred = padded(cause.size, dtype, gpu, parts)
    if cause.id == "few-input-channels":
        # cuDNN's first-layer kernels take 4 channels (8 bytes in FP16): NVIDIA's guide.
        to = to_preferred = up_to(cause.size, 4)
    elif cause.id == "attention-head-size":
        to_preferred = to
    return Padding(
        finding=cause.id,
        what=_WHAT[cause.id],
        names=names_of(cause.size, rows, recording),
        size=cause.size,
        to=to,
        to_preferred=to_preferred,
        modules=tuple(dict.fromkeys(row.module for row in rows)),
        share=sum(row.share for row in rows),
        is_worth_it=worth_it and cause.id != "few-input-channels",
    )


def padded(size: int, dtype: str, gpu: Gpu, parts: int = 1) -> tuple[int, int]:
    """The least size with full alignment, which is a multiple of 8 too, and the least that gives what the GPU prefers; of both
    each of the equal ``parts`` is fully aligned."""
    item = ITEM_SIZES.get(dtype, 2)
    least = max(8, FULL_ALIGNMENT // item)
    # 128 bytes of 16-bit values for FP32 too: the size is the same when the model moves to 16 bits.
    preferred = max(PREFERRED_ALIGNMENT // item, PREFERRED_ALIGNMENT // 2)
    wanted = preferred if gpu.architecture in PREFERRING_ARCHITECTURES else least
    return up_to(size, parts * least), up_to(size, math.lcm(parts * least, wanted))


def names_of(size: int, rows: Sequence[ShapeRow], recording: MatmulRecording) -> tuple[str, ...]:
    """What a size is called: names of the config first; else the parameters that are multiplied."""
    sizes = [name for name in recording.sizes.get(size, ()) if not _COUNTS.search(name)]
    named = sorted(sizes, key=lambda name: not name.startswith("config."))
    return tuple(named) or tuple(dict.fromkeys(row.parameter for row in rows if row.parameter))
