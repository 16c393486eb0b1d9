"""Products that are off for their dtype: how they would be laid out once that is mended."""

from __future__ import annotations

from dataclasses import replace

from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.records import Matmul, Operand

#: Causes of an "off" verdict that say nothing against the shapes: these may bind once the dtype is mended.
DTYPE_CAUSES = ("tf32-off", "float32")


def is_latent(row: ShapeRow) -> bool:
    return row.judged.cause in DTYPE_CAUSES


def once_mended(row: ShapeRow, autocast_dtype: str | None) -> Matmul:
    """The product as it would be on Tensor Cores: in TF32 where a switch is all it lacks, else in 16 bits."""
    matmul = row.matmul
    if not is_latent(row) or (row.judged.cause == "tf32-off" and autocast_dtype is None):
        return matmul
    return replace(
        matmul,
        dtype=autocast_dtype or "float16",
        bytes=matmul.bytes // 2,
        a=_halved(matmul.a),
        b=_halved(matmul.b),
        out=_halved(matmul.out),
    )


def _halved(operand: Operand | None) -> Operand | None:
    return None if operand is None else replace(operand, dtype="float16")
