"""Work out how an operand lies in memory: its row stride in bytes and the alignment of its addresses.

A Tensor Core kernel loads 16 bytes at a time, which needs a base pointer, a row stride (the leading dimension of BLAS) and a
batch stride in multiples of 16 bytes. Else a variant with smaller loads runs, whose name gives the *elements* that a load
takes (``_align4``, ``_align2``, ``_align1``). Sources: NVIDIA's Matrix Multiplication Background guide; CUTLASS' alignment
constraints; the kernels' names in traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpinspect.shapes.records import ITEM_SIZES, Matmul, Operand, contiguous_strides

#: Bytes that one load of a full-speed kernel takes.
FULL_ALIGNMENT = 16
#: Multiples of this many bytes are fastest on A100 and later (NVIDIA's guide: 64 FP16, 32 TF32, 128 INT8, 16 FP64).
PREFERRED_ALIGNMENT = 128
PREFERRING_ARCHITECTURES = ("ampere", "ada", "hopper", "blackwell")


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of one operand as a kernel addresses it.

    Args:
        name: "A", "B" or "output".
        row_stride: elements between its rows (or columns, where it is stored transposed); None for a vector.
        row_size: elements in a row; differs from ``row_stride`` in a view.
        stride_bytes: ``row_stride`` in bytes.
        alignment_bytes: the power of two, up to 128, that divides all its addresses.
        offset_bytes: offset of the base pointer; None if unknown, and then assumed to be aligned.
        is_copied: whether torch copies the operand first because neither of its last two strides is 1; the other fields then
            describe the copy.
        is_assumed: whether the strides are unknown; the other fields then describe a contiguous tensor.
        item_size: bytes of an element.
        batch_strides: elements between the matrices of a batch, for dimensions larger than 1.
    """

    name: str
    row_stride: int | None
    row_size: int
    stride_bytes: int | None
    alignment_bytes: int
    offset_bytes: int | None = 0
    is_copied: bool = False
    is_assumed: bool = False
    item_size: int = 1
    batch_strides: tuple[int, ...] = ()

    @property
    def is_aligned(self) -> bool:
        return self.alignment_bytes >= FULL_ALIGNMENT

    @property
    def is_view(self) -> bool:
        """Return whether the operand's rows are parts of longer rows, or the operand starts inside another tensor."""
        return bool(self.offset_bytes) or (self.row_stride is not None and self.row_stride != self.row_size)


def layouts(matmul: Matmul) -> tuple[Layout, ...]:
    """Return the layouts of A, B and the output; an unknown operand is assumed to be contiguous."""
    shapes = {"A": (matmul.m, matmul.k), "B": (matmul.k, matmul.n), "output": (matmul.m, matmul.n)}
    operands = {"A": matmul.a, "B": matmul.b, "output": matmul.out}
    found = []
    for name, operand in operands.items():
        if operand is None:
            operand = Operand((matmul.batch, *shapes[name]), None, matmul.dtype, None)
        layout = layout_of(name, operand)
        if layout is not None:
            found.append(layout)
    return tuple(found)


def layout_of(name: str, operand: Operand) -> Layout | None:
    """Return the memory layout of one operand; None for a vector, an empty tensor or an unknown dtype."""
    item = ITEM_SIZES.get(operand.dtype)
    if item is None or len(operand.shape) < 2 or 0 in operand.shape:
        return None
    strides, offset, is_assumed = operand.strides, operand.offset, False
    if strides is None or len(strides) != len(operand.shape):
        strides, is_assumed = contiguous_strides(operand.shape), True
    is_copied = not _is_addressable(operand.shape, strides)
    if is_copied:
        strides, offset = contiguous_strides(operand.shape), 0
    row_stride, row_size = _rows(operand.shape, strides)
    batch = tuple(stride for size, stride in zip(operand.shape[:-2], strides[:-2], strict=True) if size > 1)
    steps = (*batch, row_stride or 0, offset or 0)
    return Layout(
        name=name,
        row_stride=row_stride,
        row_size=row_size,
        stride_bytes=row_stride and row_stride * item,
        alignment_bytes=math.gcd(PREFERRED_ALIGNMENT, *(step * item for step in steps)),
        offset_bytes=offset and offset * item,
        is_copied=is_copied,
        is_assumed=is_assumed,
        item_size=item,
        batch_strides=batch,
    )


def _is_addressable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether BLAS can read the last two dimensions without a copy (torch: aten/src/ATen/native/cuda/Blas.cpp)."""
    (rows, columns), (down, right) = shape[-2:], strides[-2:]
    if rows == 1 or columns == 1:
        # A vector: any step between its elements can be a row stride.
        return True
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int | None, int]:
    (rows, columns), (down, right) = shape[-2:], strides[-2:]
    if rows == 1 or columns == 1:
        return None, max(rows, columns)
    return (down, columns) if right == 1 else (right, rows)


def up_to(size: int, multiple: int) -> int:
    """Round ``size`` up to a multiple."""
    return -(-size // multiple) * multiple
