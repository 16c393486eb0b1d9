"""Find the symptoms that prevent a product's full speed; ``rules`` turns each symptom into a cause.

A cause is a finding's id and, if a size of the model is to blame, that size. Grouping by cause turns hundreds of flagged
calls into a handful of findings. One product can have several causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, Layout, layouts
from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.analysis.todays_rule import is_nchw, is_stem
from mpinspect.shapes.records import ITEM_SIZES, Matmul, MatmulRecording, Operand

#: Causes of an "off" verdict by dtype: the shapes may limit the product once the dtype is fixed.
DTYPE_CAUSES = ("tf32-off", "float32")
#: Causes that apply to torch's unfused attention too; a fused kernel would fix all other causes.
_EVEN_UNFUSED = ("raises", "gpu-without", "gpu-unknown")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why products do not reach full speed.

    Args:
        id: the id of the rule and of its finding.
        size: the size to blame; None if no size is to blame.
        what: the kind of size to pad ("size", "head", ...); "" if padding does not help.
    """

    id: str
    size: int | None = None
    what: str = ""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One property of a product that a rule may explain.

    Args:
        word: the verdict's cause ("tf32-off", "channels", "head-dim", ...), or "math-path" or "unfused" (attention without a
            fused kernel), "nchw" (a converted image), "view" or "size" (a misaligned operand), "native" or "clean" (on Tensor
            Cores, with and without another cause).
        row: the product.
        recording: the recording that contains the product.
        size: the size that causes the symptom; None without such a size.
        is_unfused: whether the product is part of attention computed as separate products.
    """

    word: str
    row: ShapeRow
    recording: MatmulRecording
    size: int | None = None
    is_unfused: bool = False

    @property
    def is_of_tokens(self) -> bool:
        """Return whether the size is a number of tokens: in unfused attention, only the smallest size is a head's."""
        return self.is_unfused and (self.size or 0) > min(self.row.m, self.row.n, self.row.k)

    @property
    def is_of_vocabulary(self) -> bool:
        """Return whether the size is a vocabulary's, by name or as the number of outputs of a weight tied to an embedding."""
        row, recording = self.row, self.recording
        names = " ".join(recording.names_of(self.size or 0, row.module, row.parameter)).lower()
        if "vocab" in names or "num_embeddings" in names:
            return True
        if row.parameter not in recording.embeddings:
            return False
        outputs = {
            matmul.n for matmul in recording.matmuls if matmul.parameter == row.parameter and matmul.role == "forward"
        }
        if not outputs:
            outputs = {row.k} if row.role == "dgrad" else {max(row.m, row.n)}
        return self.size in outputs


def symptoms_of(row: ShapeRow, recording: MatmulRecording, is_unfused: bool) -> Iterator[Symptom]:
    """Yield every symptom of a product, the most severe first; some symptoms have no rule.

    Args:
        is_unfused: whether the product is part of attention computed as separate products.
    """
    word = row.judged.cause
    is_math_path = row.matmul.math_path and word not in _EVEN_UNFUSED
    if row.dtype == "float64":
        yield Symptom("float64", row, recording)
    elif is_math_path:
        yield Symptom("math-path", row, recording)
    elif word == "channels":
        yield from _odd_channels(row, row.matmul, recording)
    else:
        yield Symptom(word, row, recording, _size_of(row))
    if is_math_path:
        return
    if is_unfused:
        yield Symptom("unfused", row, recording)
    if row.matmul.block and row.k % row.matmul.block and word not in _EVEN_UNFUSED:
        yield Symptom("block", row, recording, row.k)
    if _is_converted(row):
        yield Symptom("nchw", row, recording)
    if word == "alignment" or (is_latent(row) and row.matmul.attention is None):
        yield from _misaligned(row, recording, is_unfused)


def _size_of(row: ShapeRow) -> int | None:
    """Return the size behind the verdict (a head's, or a first layer's input channels); None for other causes."""
    attention, convolution = row.matmul.attention, row.matmul.convolution
    if row.judged.cause == "head-dim" and attention is not None:
        # Values may have heads of their own size.
        odd = attention.head_dim * ITEM_SIZES.get(row.dtype, 2) % FULL_ALIGNMENT
        return attention.head_dim if odd else attention.value_dim
    if row.judged.cause == "stem" and convolution is not None:
        return convolution.in_channels
    return None


def _is_converted(row: ShapeRow) -> bool:
    """Return whether cuDNN converts a convolution's NCHW image. A stem is excluded: its image is the input, and small."""
    convolution = row.matmul.convolution
    # Tensors of one spatial dimension have no channels-last format in torch.
    if convolution is None or is_stem(convolution) or len(convolution.kernel_size) < 2 or not is_nchw(row.matmul):
        return False
    return row.verdict in ("native", "degraded")


def _odd_channels(row: ShapeRow, matmul: Matmul, recording: MatmulRecording) -> Iterator[Symptom]:
    """Yield a symptom for each number of channels whose size in bytes is not a multiple of 16."""
    item = ITEM_SIZES.get(matmul.dtype, 0)
    if matmul.convolution is not None:
        for size in matmul.convolution.group_channels.values():
            if size * item % FULL_ALIGNMENT:
                yield Symptom("channels", row, recording, size)


def _misaligned(row: ShapeRow, recording: MatmulRecording, is_unfused: bool) -> Iterator[Symptom]:
    """Yield a symptom for each misaligned operand: the size of the model that misaligns it, or that it is a view."""
    matmul = once_mended(row, recording.autocast_dtype)
    if matmul.convolution is not None:
        if not is_stem(matmul.convolution):
            yield from _odd_channels(row, matmul, recording)
        return
    for layout in row.judged.layouts or layouts(matmul):
        if not layout.is_aligned:
            size = _binding_size(layout, recording)
            yield Symptom("view" if size is None else "size", row, recording, size, is_unfused)


def _binding_size(layout: Layout, recording: MatmulRecording) -> int | None:
    """Return the size of the model that misaligns an operand; None for a view whose misalignment no size explains."""
    for stride in (layout.row_stride, *layout.batch_strides):
        # Heads side by side are one head's size apart; rows of a fused projection are the whole projection's size apart.
        if (
            stride is not None
            and _is_odd(stride, layout)
            and (stride == layout.row_size or stride in recording.size_values)
        ):
            return stride
    offset = (layout.offset_bytes or 0) // layout.item_size
    is_chunk = layout.row_size > 1 and offset % layout.row_size == 0 and _is_odd(layout.row_size, layout)
    if not is_chunk or not _is_odd(offset, layout):
        return None
    return layout.row_size


def _is_odd(elements: int, layout: Layout) -> bool:
    return elements * layout.item_size % FULL_ALIGNMENT != 0


def is_latent(row: ShapeRow) -> bool:
    """Return whether only a product's dtype excludes it from Tensor Cores, so that its sizes matter once the dtype is fixed."""
    return row.judged.cause in DTYPE_CAUSES


def once_mended(row: ShapeRow, autocast_dtype: str | None) -> Matmul:
    """Return the product as Tensor Cores would compute it: in TF32 if only the switch is missing, else in 16 bits."""
    if not is_latent(row) or (row.judged.cause == "tf32-off" and autocast_dtype is None):
        return row.matmul
    return in_16_bits(row.matmul, autocast_dtype)


def in_16_bits(matmul: Matmul, autocast_dtype: str | None) -> Matmul:
    """Return an FP32 product as it would be in autocast's dtype; without autocast in FP16."""
    return replace(
        matmul,
        dtype=autocast_dtype or "float16",
        bytes=matmul.bytes // 2,
        a=_halved(matmul.a),
        b=_halved(matmul.b),
        out=_halved(matmul.out),
    )


def _halved(operand: Operand | None) -> Operand | None:
    return operand and replace(operand, dtype="float16")


#: Scores that are fewer than the queries' and keys' elements by this factor cost little even if they leave the chip: they are
#: written and read some eight times, forward and backward.
_FEW_SCORES = 8


def unfused_attention(recording: MatmulRecording) -> frozenset[int]:
    """Return the indices of attention computed as separate products: batched q k^T, then scores times v, in one module."""
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
            if _FEW_SCORES * first.m * first.n < (first.m + first.n) * first.k:
                continue
            # The scores (queries x keys) are the second product's left operand; a head's query and value sizes are equal.
            if (first.batch, first.m, first.n, first.k) == (second.batch, second.m, second.k, second.n):
                sizes.add((first.batch, tuple(sorted((first.m, first.n, first.k)))))
    return [
        index
        for index, product in products
        if (product.batch, tuple(sorted((product.m, product.n, product.k)))) in sizes
    ]
