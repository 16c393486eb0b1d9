"""What is said of one product: the talk's rule beside today's."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpinspect.shapes.analysis.alignment import Layout
from mpinspect.shapes.records import Matmul

#: native: at full speed as far as shapes tell; degraded: on Tensor Cores, slower; off: not on them; unknown: can't be told.
VERDICTS = ("native", "degraded", "off", "unknown")


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """Two verdicts on one product.

    Args:
        verdict: one of VERDICTS, by today's rule (strides, dtypes) on the GPU asked about.
        reason: one sentence: why.
        multiples_of_8: the talk's rule (16 for INT8); None where it says nothing.
        stride_bytes: row stride of each operand ("A", "B", "output"); None for a vector. Empty for convolutions.
        alignment_bytes: the power of two, up to 128, that divides every base pointer and stride; None where that is no question.
        cause: a short word for what binds: "" if nothing does.
        remarks: what else is worth knowing, sentences.
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
    """Part of a verdict, as one rule gives it: the fields of ShapeVerdict that it decides."""

    verdict: str
    reason: str
    cause: str = ""
    alignment_bytes: int | None = None
    layouts: tuple[Layout, ...] = ()
    remarks: tuple[str, ...] = ()


#: The multiple by dtype. FP32's is that of the FP16 product that mixed precision would make of it.
MULTIPLES = {"float16": 8, "bfloat16": 8, "float32": 8, "int8": 16, "uint8": 16}


def multiples_of_8(matmul: Matmul) -> bool | None:
    """Whether every size that the talk names is such a multiple; None where the rule says nothing (FP64, FP8, depthwise)."""
    multiple = MULTIPLES.get(matmul.dtype)
    sizes = talk_sizes(matmul)
    if multiple is None or not sizes:
        return None
    return not any(size % multiple for size in sizes.values())


def talk_sizes(matmul: Matmul) -> dict[str, int]:
    """The sizes that the rule is about, by name: M, N, K, or batch and a group's channels; empty for depthwise convolutions."""
    convolution, attention = matmul.convolution, matmul.attention
    if convolution is not None:
        if convolution.is_depthwise:
            return {}
        groups = max(convolution.groups, 1)
        return {
            "batch": convolution.batch,
            "C_in": convolution.in_channels // groups,
            "C_out": convolution.out_channels // groups,
        }
    if attention is not None:
        return {
            "queries": attention.queries,
            "keys": attention.keys,
            "head_dim": attention.head_dim,
            "value_dim": attention.value_dim,
        }
    return {"M": matmul.m, "N": matmul.n, "K": matmul.k}


def binding_sizes(matmul: Matmul) -> dict[str, int]:
    """Those of them that break the rule."""
    multiple = MULTIPLES.get(matmul.dtype, 1)
    return {name: size for name, size in talk_sizes(matmul).items() if size % multiple}
