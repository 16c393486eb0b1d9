"""The two verdicts on one product, as data, and the rule of the GTC 2018 talk: multiples of 8 (16 for INT8).

Libraries before cuBLAS 11 and cuDNN 7.6.3 required it on every GPU: without it they did not use Tensor Cores at all (NVIDIA's
Matrix Multiplication Background guide, table 1). Later ones can always use them; there the strides decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpinspect.shapes.analysis.alignment import Layout
from mpinspect.shapes.records import Matmul

#: native: at full speed as far as shapes tell; degraded: on Tensor Cores, slower; off: not on them; unknown: can't be told.
VERDICTS = ("native", "degraded", "off", "unknown")
#: What the talk's sizes are multiples of, by dtype; for FP32 as in the FP16 product that mixed precision would make of it.
MULTIPLES = {"float16": 8, "bfloat16": 8, "float32": 8, "int8": 16, "uint8": 16}


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """Two verdicts on one product.

    Args:
        verdict: one of VERDICTS, by today's rule (strides, dtypes) on the GPU asked about.
        reason: one sentence: why.
        multiples_of_8: whether it keeps the talk's rule (16 for INT8); None where the rule does not apply.
        stride_bytes: row stride of each operand ("A", "B", "output"); None for a vector. Empty for convolutions.
        alignment_bytes: the largest power of two, up to 128, that divides every base pointer and stride; None where no operand
            has any.
        cause: a word for what limits it ("alignment", "tf32-off", ...); "" if nothing does.
        remarks: sentences on what else is worth knowing.
        layouts: the operands behind ``stride_bytes``.
    """

    verdict: str
    reason: str
    multiples_of_8: bool | None = None
    stride_bytes: dict[str, int | None] = field(default_factory=dict, hash=False)
    alignment_bytes: int | None = None
    cause: str = ""
    remarks: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a ShapeVerdict that one of today's rules decides."""

    verdict: str
    reason: str
    cause: str = ""
    alignment_bytes: int | None = None
    layouts: tuple[Layout, ...] = ()
    remarks: tuple[str, ...] = ()


def multiples_of_8(matmul: Matmul) -> bool | None:
    """Return whether a product keeps the talk's rule; None where the rule does not apply (FP64, FP8, depthwise)."""
    multiple = MULTIPLES.get(matmul.dtype)
    sizes = talk_sizes(matmul)
    if multiple is None or not sizes:
        return None
    return not any(size % multiple for size in sizes.values())


def talk_sizes(matmul: Matmul) -> dict[str, int]:
    """Return the sizes that the talk's rule names: M, N, K, or batch and a group's channels; none of depthwise convolutions."""
    convolution, attention = matmul.convolution, matmul.attention
    if convolution is not None:
        if convolution.is_depthwise:
            return {}
        return {"batch": convolution.batch, **convolution.group_channels}
    if attention is not None:
        return {
            "queries": attention.queries,
            "keys": attention.keys,
            "head_dim": attention.head_dim,
            "value_dim": attention.value_dim,
        }
    return {"M": matmul.m, "N": matmul.n, "K": matmul.k}


def binding_sizes(matmul: Matmul) -> dict[str, int]:
    """Return the sizes that break the talk's rule, by name."""
    multiple = MULTIPLES.get(matmul.dtype, 1)
    return {name: size for name, size in talk_sizes(matmul).items() if size % multiple}
