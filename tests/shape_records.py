"""Hand-written matrix products, as a recorder would write them."""

import math
from dataclasses import replace

from mpinspect.runtime.gpus import named
from mpinspect.shapes.analysis import ShapeReport, analyse_shapes
from mpinspect.shapes.records import ITEM_SIZES, Attention, Convolution, Matmul, MatmulRecording, Operand


def row_major(shape: tuple[int, ...], dtype: str = "float16", offset: int = 0) -> Operand:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return Operand(shape, tuple(strides), dtype, offset)


def transposed(operand: Operand) -> Operand:
    *batch, rows, columns = operand.shape
    assert operand.strides is not None
    *steps, down, right = operand.strides
    return replace(operand, shape=(*batch, columns, rows), strides=(*steps, right, down))


def gemm(a: Operand, b: Operand, out: Operand | None = None, **fields) -> Matmul:
    """Return the product a @ b, with a new output unless given."""
    *batch, m, k = a.shape
    n = b.shape[-1]
    out = out or row_major((*batch, m, n), a.dtype)
    count = math.prod(batch)
    size = ITEM_SIZES[a.dtype]
    known = {
        "op": "aten::bmm" if batch else "aten::mm",
        "kind": "gemm",
        "role": "forward",
        "m": m,
        "n": n,
        "k": k,
        "batch": count,
        "dtype": a.dtype,
        "flops": 2 * count * m * n * k,
        "bytes": size * count * (m * k + k * n + m * n),
        "a": a,
        "b": b,
        "out": out,
    }
    return Matmul(**(known | fields))


def linear(rows: int, inputs: int, outputs: int, dtype: str = "float16", name: str = "fc", backward: bool = True):
    """Return the products of a linear layer without bias: forward, dgrad, wgrad."""
    x, weight, grad = (
        row_major((rows, inputs), dtype),
        row_major((outputs, inputs), dtype),
        row_major((rows, outputs), dtype),
    )
    where = {"module": name, "module_type": "Linear", "parameter": f"{name}.weight"}
    found = [gemm(x, transposed(weight), **where)]
    if backward:
        found.append(gemm(grad, weight, role="dgrad", **where))
        found.append(gemm(transposed(grad), x, role="wgrad", **where))
    return tuple(found)


def eager_attention(
    batch: int, queries: int, keys: int, head: int, dtype: str = "float16", name: str = "attention"
) -> tuple[Matmul, ...]:
    """Return the two products of attention without a fused kernel, forward only."""
    q, k, v = (row_major((batch, tokens, head), dtype) for tokens in (queries, keys, keys))
    scores = row_major((batch, queries, keys), dtype)
    return (gemm(q, transposed(k), scores, module=name), gemm(scores, v, module=name))


def convolution(
    batch: int = 32,
    channels: tuple[int, int] = (64, 128),
    size: int = 28,
    kernel: int = 3,
    groups: int = 1,
    dtype: str = "float16",
    channels_last: bool | None = True,
    **fields,
) -> Matmul:
    """A square convolution with padding that keeps the size."""
    into, out = channels
    geometry = Convolution(
        batch,
        into,
        out,
        groups,
        (size, size),
        (size, size),
        (kernel, kernel),
        (1, 1),
        (kernel // 2,) * 2,
        (1, 1),
        channels_last=channels_last,
    )
    m, n, k = batch * size * size, out // groups, into // groups * kernel * kernel
    known = {
        "op": "aten::convolution",
        "kind": "convolution",
        "role": "forward",
        "m": m,
        "n": n,
        "k": k,
        "batch": groups,
        "dtype": dtype,
        "flops": 2 * m * n * k * groups,
        "bytes": ITEM_SIZES[dtype] * (batch * size * size * (into + out) + n * k * groups),
        "convolution": geometry,
        "module": "conv",
        "module_type": "Conv2d",
        "parameter": "conv.weight",
    }
    return Matmul(**(known | fields))


def attention(
    head: int = 64,
    tokens: int = 512,
    dtype: str = "float16",
    value: int | None = None,
    backend: str = "flash",
    bias: Operand | None = None,
    **fields,
) -> Matmul:
    """Fused attention of 8 x 12 heads."""
    value = value or head
    geometry = Attention(8, 12, 12, tokens, tokens, head, value, backend, bias=bias)
    known = {
        "op": "aten::scaled_dot_product_attention",
        "kind": "attention",
        "role": "forward",
        "m": tokens,
        "n": tokens,
        "k": head,
        "batch": 96,
        "dtype": dtype,
        "flops": 2 * 96 * tokens * tokens * (head + value),
        "bytes": ITEM_SIZES[dtype] * 96 * tokens * 2 * (head + value),
        "attention": geometry,
        "module": "attn",
    }
    return Matmul(**(known | fields))


def recording(*matmuls: Matmul, **fields) -> MatmulRecording:
    known = {
        "matmuls": tuple(matmuls),
        "copies": (),
        "device": "meta",
        "backward": True,
        "autocast_dtype": None,
        "tf32": {"matmul": False, "convolution": True},
        "sizes": {},
        "embeddings": {},
    }
    return MatmulRecording(**(known | fields))


def small() -> ShapeReport:
    """Return a varied report: a vocabulary, layers with good shapes, a stem, attention without a fused kernel."""
    layers = [product for index in range(3) for product in linear(1576, 768, 3072, name=f"h.{index}.mlp")]
    record = recording(
        *linear(1576, 768, 50257, name="lm_head"),
        *layers,
        *eager_attention(96, 197, 197, 64, name="h.0.attn"),
        convolution(channels=(3, 64), size=112, kernel=7, module="stem"),
        attention(60, module="h.1.attn"),
        sizes={"lm_head": {50257: ("config.vocab_size", "lm_head.out_features")}},
        embeddings={"lm_head.weight": "wte.weight"},
        autocast_dtype="float16",
        notes=("the forward was recorded up to h.3",),
    )
    return analyse_shapes(record, named("hopper"), model="Small")
