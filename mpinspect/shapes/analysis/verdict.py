"""Hold the two verdicts on one product as data, and apply the rule of the GTC 2018 talk: multiples of 8 (16 for INT8).

Before cuBLAS 11 and cuDNN 7.6.3, the libraries used Tensor Cores only for products that obey this rule, on every GPU (NVIDIA's
Matrix Multiplication Background guide, table 1). Later versions can always use Tensor Cores; their speed depends on strides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mpinspect.runtime.decoding import OneOf
from mpinspect.shapes.analysis.alignment import Layout
from mpinspect.shapes.records import Matmul

#: native: full speed as far as shapes determine it; degraded: on Tensor Cores, but slower; off: not on them; unknown: unknown.
VERDICTS = ("native", "degraded", "off", "unknown")
#: The talk's multiple for each dtype; FP32 has the same as FP16, which mixed precision would use.
MULTIPLES = {"float16": 8, "bfloat16": 8, "float32": 8, "int8": 16, "uint8": 16}


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """The two verdicts on one product.

    Args:
        verdict: one of VERDICTS, by today's rule (strides, dtypes) on the GPU being judged for.
        reason: the verdict's reason in one sentence.
        cause: a word for the limit of the product ("alignment", "tf32-off", ...); "" without a limit.
        multiples_of_8: whether the product obeys the talk's rule (16 for INT8); None if the rule does not apply.
        stride_bytes: row stride of each operand ("A", "B", "output"); None for a vector. Empty for convolutions.
        alignment_bytes: the largest power of two, up to 128, that divides every base pointer and stride; None if no operand
            has any.
        remarks: further sentences on the product.
        layouts: the layouts of the operands in ``stride_bytes``.
    """

    verdict: Annotated[str, OneOf(VERDICTS)]
    reason: str
    cause: str = ""
    multiples_of_8: bool | None = None
    stride_bytes: dict[str, int | None] = field(default_factory=dict, hash=False)
    alignment_bytes: int | None = None
    remarks: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()


def multiples_of_8(matmul: Matmul) -> bool | None:
    """Return whether a product obeys the talk's rule; None if the rule does not apply (FP64, FP8, depthwise)."""
    multiple = MULTIPLES.get(matmul.dtype)
    sizes = talk_sizes(matmul)
    if multiple is None or not sizes:
        return None
    return not any(size % multiple for size in sizes.values())


def talk_sizes(matmul: Matmul) -> dict[str, int]:
    """Return the sizes that the multiples-of-8 rule covers: M, N, K, or batch and channels per group; {} if depthwise."""
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
