"""Define frozen records of the matrix products that a model computes or that a trace contains.

``record`` makes them from a model, ``operators`` from the shapes of one call, and ``analysis`` judges them. They contain
shapes and strides, but no tensors and no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from mpinspect.runtime.decoding import Between, OneOf

#: A size or a number of things, in records that are read from files.
Size = Annotated[int, Between(0, (1 << 63) - 1)]
#: A number of operations or bytes, whose sums over a step are divided by each other.
Work = Annotated[int, Between(0, 1 << 100)]

#: The purpose of a product; "backward" if one kernel computes all gradients (attention, recurrent networks).
ROLES = ("forward", "dgrad", "wgrad", "backward")
#: The kind of operator that multiplies.
KINDS = ("gemm", "convolution", "attention", "recurrent")

#: The reasons why scaled_dot_product_attention did not use a fused kernel.
MATH_PATHS = ("dimensions", "shapes", "strides", "dtype", "head-size", "disabled")

#: Bytes per element, by torch's name of the dtype without "torch.".
ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float4_e2m1fn_x2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One matrix, or batch of matrices, or image tensor, as a product reads or writes it.

    Args:
        shape: sizes.
        strides: elements between neighbours along each dimension; None if unknown (older traces), then assumed contiguous.
        dtype: name of the dtype, a key of ITEM_SIZES.
        offset: elements from the start of the storage, which torch's allocators align to at least 64 bytes; None if unknown.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    offset: int | None = 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements; an empty dimension counts as 1, as in torch."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Convolution:
    """The geometry of a convolution's forward, also used in the records of its dgrad and wgrad.

    Args:
        batch, in_channels, out_channels, groups: as in torch's convolutions; in_channels counts all groups.
        input_size, output_size, kernel_size, stride, padding, dilation: one entry for each spatial dimension.
        transposed: whether the convolution is transposed.
        channels_last: whether the input is stored NHWC (NDHWC); None if unknown.
    """

    batch: Size
    in_channels: Size
    out_channels: Size
    groups: Size
    input_size: tuple[Size, ...]
    output_size: tuple[Size, ...]
    kernel_size: tuple[Size, ...]
    stride: tuple[Size, ...]
    padding: tuple[Size, ...]
    dilation: tuple[Size, ...]
    transposed: bool = False
    channels_last: bool | None = None

    @property
    def is_depthwise(self) -> bool:
        """Return whether each input channel is a group of its own, which leaves no matrix product for Tensor Cores."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def group_channels(self) -> dict[str, int]:
        """Return the input and output channels of one group, as "C_in" and "C_out"."""
        groups = max(self.groups, 1)
        return {"C_in": self.in_channels // groups, "C_out": self.out_channels // groups}


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled dot-product attention computed by one operator.

    Args:
        batch, heads, kv_heads: sizes; kv_heads < heads means grouped-query attention.
        queries, keys: sequence lengths.
        head_dim, value_dim: sizes of a head.
        backend: "flash", "efficient", "cudnn" or "math"; "" if unknown.
        is_causal: whether a causal mask hides half of the scores.
        bias: the additive mask, or None.
    """

    batch: Size
    heads: Size
    kv_heads: Size
    queries: Size
    keys: Size
    head_dim: Size
    value_dim: Size
    backend: str = ""
    is_causal: bool = False
    bias: Operand | None = None


@dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix product, or ``calls`` equal products of one module.

    Computes out[batch, m, n] = a[batch, m, k] @ b[batch, k, n]. For a convolution, m, n, k are the sizes of one group's implicit
    GEMM (forward: m = batch x output positions, n = out_channels / groups, k = in_channels / groups x kernel positions) and
    ``batch`` is the number of groups. For attention, m, n, k are queries, keys, head_dim, and ``batch`` is batch x heads.

    Args:
        op: the operator, as "aten::addmm".
        kind: one of KINDS.
        role: one of ROLES.
        m, n, k, batch: sizes.
        a, b, out: the operands' memory layouts, a and b already transposed as the product reads them; None if unknown.
        dtype: dtype of a and b in the computation, after autocast.
        flops: floating-point operations of one call over all ``batch`` products; each multiply-add counts as 2.
        bytes: least memory traffic of one call: every operand read once, the output written once.
        module: dotted path of the innermost module whose forward called the operator; "" for the model itself or if unknown.
        module_type: class of that module.
        parameter: dotted name of the parameter that is an operand (or whose gradient is computed), or "".
        convolution, attention: geometry, for those kinds.
        calls: number of equal calls that this record covers.
        autocast: True if autocast applied to this call; False if the model ran under autocast but this call did not (autocast
            was off around the call or does not cast its dtype); None without autocast.
        recomputed: whether this is a forward that activation checkpointing repeats in the backward.
        raises: torch's error message if torch refuses this product's operands, else "".
        block: number of values along K that share a scale in a block-scaled format (MX 32, NVFP4 16, FP8 in blocks 128), or 0.
        math_path: one of MATH_PATHS if the product is part of torch's unfused attention ("math") in
            scaled_dot_product_attention; else "".
    """

    op: str
    kind: str
    role: Annotated[str, OneOf(ROLES)]
    m: Size
    n: Size
    k: Size
    batch: Size
    dtype: str
    flops: Work
    bytes: Work
    a: Operand | None = None
    b: Operand | None = None
    out: Operand | None = None
    module: str = ""
    module_type: str = ""
    parameter: str = ""
    convolution: Convolution | None = None
    attention: Attention | None = None
    calls: Size = 1
    autocast: bool | None = None
    recomputed: bool = False
    raises: str = ""
    math_path: str = ""
    block: Size = 0


@dataclass(frozen=True, slots=True)
class LayoutCopy:
    """A module's copies that only change a tensor's layout or dtype; ``kind`` is "layout" or "dtype"."""

    module: str
    kind: str
    bytes: int
    calls: int


@dataclass(frozen=True)
class MatmulRecording:
    """All matrix products of one forward (and backward).

    Args:
        matmuls: the products, in the order of their first call.
        copies: layout and dtype copies, in the order of their first call.
        device: "meta", "cpu", "cuda": where the model ran.
        backward: whether a backward was recorded.
        autocast_dtype: dtype of the autocast around the model; None without autocast.
        tf32: whether torch allows TF32 for FP32 products ("matmul" and "convolution" -> bool).
        sizes: names of the sizes that a user can change, by module and value: {"lm_head": {30522: ("config.vocab_size",)}, ...}.
        embeddings: weights of other modules that are tied to an embedding's weight: {"lm_head.weight": "wte.weight"}.
        compiled: whether the model is compiled (torch.compile), so that Inductor may pad by itself.
        notes: sentences on unrecorded parts, with the reasons.
        stopped: where the forward or backward stopped and why; "" if both finished.
    """

    matmuls: tuple[Matmul, ...]
    copies: tuple[LayoutCopy, ...]
    device: str
    backward: bool
    autocast_dtype: str | None
    tf32: dict[str, bool]
    sizes: dict[str, dict[int, tuple[str, ...]]]
    embeddings: dict[str, str]
    compiled: bool = False
    notes: tuple[str, ...] = ()
    stopped: str = ""

    @cached_property
    def size_values(self) -> frozenset[int]:
        """Return the values of all modules' sizes."""
        return frozenset(value for sizes in self.sizes.values() for value in sizes)

    def names_of(self, size: int, module: str, parameter: str = "") -> tuple[str, ...]:
        """Return the names of a size in a product's module and in the module that owns the product's parameter."""
        owners = dict.fromkeys((parameter.rpartition(".")[0], module) if parameter else (module,))
        found = (name for owner in owners for name in self.sizes.get(owner, {}).get(size, ()))
        return tuple(dict.fromkeys(found))

    @property
    def complete(self) -> bool:
        """Return whether the model ran to its end."""
        return not self.stopped
