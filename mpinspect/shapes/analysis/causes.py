"""Which cause a product's trouble has: what turns hundreds of flagged calls into a handful of findings.

A cause is a finding's id and, where a size of the model is to blame, that size. A product can have several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, Layout, layouts
from mpinspect.shapes.analysis.convolution import group_channels, is_nchw, is_stem
from mpinspect.shapes.analysis.latent import is_latent, once_mended
from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.records import ITEM_SIZES, Matmul, MatmulRecording

_BY_WORD = {
    "raises": "product-raises",
    "gpu-without": "gpu-without-tensor-cores",
    "gpu-unknown": "gpu-unknown",
    "tf32-off": "tf32-off",
    "float32": "float32",
    "float64": "float64",
    "dtype": "dtype-not-multiplied",
    "matrix-vector": "matrix-vector",
    "depthwise": "depthwise",
    "stem": "few-input-channels",
    "head-dim": "attention-head-size",
    "attention-bias": "attention-mask",
}
#: Causes beside which no other counts.
_BEFORE_ALL = ("raises", "gpu-without", "gpu-unknown")


@dataclass(frozen=True, slots=True)
class Cause:
    """``id``: one of FINDING_IDS; ``size``: the size to blame, None where none is."""

    id: str
    size: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """What tells causes apart beside the product itself.

    Args:
        recording: what was recorded.
        unfused: indices of the products that make up attention computed without a fused kernel.
    """

    recording: MatmulRecording
    unfused: frozenset[int]


def causes_of(index: int, row: ShapeRow, around: Surroundings) -> tuple[Cause, ...]:
    """Every cause that a product has, the gravest first; () for a healthy one."""
    found = dict.fromkeys(_causes(index, row, around))
    return tuple(found)


def _causes(index: int, row: ShapeRow, around: Surroundings) -> Iterator[Cause]:
    word = row.judged.cause
    if row.matmul.math_path and word not in _BEFORE_ALL:
        # Its own dtypes and sizes are no matter once a fused kernel takes its place.
        yield Cause("float64" if row.dtype == "float64" else "unfused-attention")
        return
    if row.dtype == "float64":
        yield Cause("float64")
    elif is_latent(row) and around.recording.autocast_dtype is not None:
        yield Cause("float32-under-autocast")
    elif word == "channels":
        yield from _channel_causes(row.matmul)
    elif word in _BY_WORD:
        yield Cause(_BY_WORD[word], _size_of(row))
    if index in around.unfused:
        yield Cause("unfused-attention")
    if _is_converted(row):
        yield Cause("not-channels-last")
    if word == "alignment" or (is_latent(row) and row.matmul.attention is None):
        yield from _size_causes(index, row, around)


def _size_of(row: ShapeRow) -> int | None:
    """The size behind a cause that has one at most."""
    attention, convolution = row.matmul.attention, row.matmul.convolution
    if row.judged.cause == "head-dim" and attention is not None:
        return attention.head_dim
    return convolution.in_channels if row.judged.cause == "stem" and convolution is not None else None


def _is_converted(row: ShapeRow) -> bool:
    """A convolution on Tensor Cores whose image is NCHW; that of a stem is the network's input and small."""
    convolution = row.matmul.convolution
    # Tensors of one spatial dimension have no channels-last format in torch.
    if convolution is None or is_stem(convolution) or len(convolution.kernel_size) < 2 or not is_nchw(row.matmul):
        return False
    return row.verdict in ("native", "degraded")


def _channel_causes(matmul: Matmul) -> Iterator[Cause]:
    """A cause for each odd number of channels."""
    item = ITEM_SIZES.get(matmul.dtype, 0)
    if matmul.convolution is not None:
        for size in group_channels(matmul.convolution).values():
            if size * item % FULL_ALIGNMENT:
                yield Cause("odd-channels", size)


def _size_causes(index: int, row: ShapeRow, around: Surroundings) -> Iterator[Cause]:
    """What makes an operand misaligned: the number of tokens, a named size, or that it is a view of something else."""
    matmul = once_mended(row, around.recording.autocast_dtype)
    if matmul.convolution is not None:
        if not is_stem(matmul.convolution):
            yield from _channel_causes(matmul)
        return
    for layout in row.judged.layouts or layouts(matmul):
        if layout.is_aligned:
            continue
        size = _binding_size(layout, around.recording)
        if size is None:
            yield Cause("misaligned-view")
        elif index in around.unfused and size > min(matmul.m, matmul.n, matmul.k):
            # The smallest of the three is a head's size, the others are tokens.
            yield Cause("odd-tokens", size)
        elif is_vocabulary(size, row, around.recording):
            yield Cause("odd-vocabulary", size)
        else:
            yield Cause("odd-size", size)


def _binding_size(layout: Layout, recording: MatmulRecording) -> int | None:
    """The size of the model that makes an operand odd; None where it is a view, whatever the sizes."""
    for stride in (layout.row_stride, *layout.batch_strides):
        # Heads side by side are a head's size apart, rows of a fused projection the whole projection's.
        if stride is not None and _is_odd(stride, layout) and (stride == layout.row_size or stride in recording.sizes):
            return stride
    offset = (layout.offset_bytes or 0) // layout.item_size
    is_chunk = layout.row_size > 1 and offset % layout.row_size == 0 and _is_odd(layout.row_size, layout)
    return layout.row_size if offset and is_chunk and _is_odd(offset, layout) else None


def _is_odd(elements: int, layout: Layout) -> bool:
    return elements * layout.item_size % FULL_ALIGNMENT != 0


def is_vocabulary(size: int, row: ShapeRow, recording: MatmulRecording) -> bool:
    """Whether a size is a vocabulary's: by its name, or as the rows of a weight that is tied to an embedding's, which are the
    outputs of its product; the weight's other size is the embedding's width."""
    names = " ".join(recording.sizes.get(size, ())).lower()
    if "vocab" in names or "num_embeddings" in names:
        return True
    if row.parameter not in recording.embeddings:
        return False
    outputs = {
        matmul.n for matmul in recording.matmuls if matmul.parameter == row.parameter and matmul.role == "forward"
    }
    return size in (outputs or {row.matmul.k if row.role == "dgrad" else max(row.m, row.n)})


def unfused_attention(recording: MatmulRecording) -> frozenset[int]:
    """Indices of batched products that look like attention without a fused kernel: q k^T, then (its result) v, in one module."""
    by_module: dict[str, list[int]] = {}
    for index, matmul in enumerate(recording.matmuls):
        if matmul.kind == "gemm" and matmul.batch > 1 and matmul.convolution is None:
            by_module.setdefault(matmul.module, []).append(index)
    return frozenset(index for indices in by_module.values() for index in _pairs(indices, recording))


def _pairs(indices: list[int], recording: MatmulRecording) -> Iterable[int]:
    products = [(index, recording.matmuls[index]) for index in indices]
    forward = [(index, product) for index, product in products if product.role == "forward"]
    sizes: set[tuple[int, tuple[int, ...]]] = set()
    for place, (_, first) in enumerate(forward):
        for _, second in forward[place + 1 :]:
            # The scores (queries x keys) are the second product's left side; a head's query and value size are alike.
            if (first.batch, first.m, first.n, first.k) == (second.batch, second.m, second.k, second.n):
                sizes.add((first.batch, tuple(sorted((first.m, first.n, first.k)))))
    return [
        index
        for index, product in products
        if (product.batch, tuple(sorted((product.m, product.n, product.k)))) in sizes
    ]
