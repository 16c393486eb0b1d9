"""The rule of the GTC 2018 talk: sizes that are multiples of 8 (16 for INT8).

It was a requirement of the libraries before cuBLAS 11 and cuDNN 7.6.3, whatever the GPU: without it they did not use Tensor Cores
at all (NVIDIA's Matrix Multiplication Background guide, table 1). Libraries since then can always use them; there the
strides decide.
"""

from __future__ import annotations

from mpinspect.shapes.records import Matmul

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
