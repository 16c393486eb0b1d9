"""matmuls_of: sizes by hand, FLOPs against torch's own counter, strings as the profiler writes them, and odd input."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mpinspect.shapes.operators import PRODUCT_OPS, matmuls_of
from mpinspect.shapes.records import Matmul, Operand

aten = torch.ops.aten


def operand(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(tuple(tensor.shape), tensor.stride(), dtype, tensor.storage_offset())


def inputs(args):
    return [
        operand(value)
        if isinstance(value, torch.Tensor)
        else [operand(one) for one in value]
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor)
        else None
        for value in args
    ]


def scalars(args):
    return [None if isinstance(value, torch.Tensor) else value for value in args]


def written(value):
    """A scalar as torch.profiler writes it."""
    if value is None or isinstance(value, torch.Tensor):
        return ""
    if isinstance(value, (list, tuple)):
        return "" if value and isinstance(value[0], torch.Tensor) else str(list(value))
    return str(value)


class Calls(TorchDispatchMode):
    """Collects the products of the operators that run inside, by matmuls_of; the profiler's strings must give the same."""

    def __init__(self):
        super().__init__()
        self.matmuls: list[Matmul] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in PRODUCT_OPS:
            first = result[0] if isinstance(result, tuple) else result
            output = operand(first) if first is not None else None
            found = matmuls_of(name, inputs(args), scalars=scalars(args), output=output)
            assert found, name
            assert found == matmuls_of(name, inputs(args), scalars=[written(value) for value in args], output=output)
            # An unknown result is assumed to be allocated by torch, and must have the right size.
            for record, told in zip(matmuls_of(name, inputs(args), scalars=scalars(args)), found, strict=True):
                assert record.out.shape == told.out.shape
                assert (record.m, record.n, record.k, record.flops) == (told.m, told.n, told.k, told.flops)
            self.matmuls += found
        return result


def meta(*shape, dtype=torch.float32, grad=True):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def attention_inputs(heads=4, kv_heads=4, dtype=torch.bfloat16):
    return meta(2, heads, 32, 16, dtype=dtype), *(meta(2, kv_heads, 48, 16, dtype=dtype) for _ in "kv")


CASES = {
    "mm": lambda: meta(5, 7) @ meta(7, 3),
    "addmm": lambda: torch.addmm(meta(3), meta(5, 7), meta(7, 3)),
    "bmm": lambda: torch.bmm(meta(4, 5, 7), meta(4, 7, 3)),
    "baddbmm": lambda: torch.baddbmm(meta(4, 5, 3), meta(4, 5, 7), meta(4, 7, 3)),
    "matmul with batches": lambda: meta(2, 1, 5, 7) @ meta(3, 7, 4),
    "linear": lambda: F.linear(meta(2, 6, 7), meta(3, 7), meta(3)),
    "einsum": lambda: torch.einsum("bhqd,bhkd->bhqk", meta(2, 3, 5, 8), meta(2, 3, 6, 8)),
    "conv1d": lambda: F.conv1d(meta(2, 4, 21), meta(6, 4, 5), meta(6), stride=2, padding=1),
    "conv2d": lambda: F.conv2d(meta(2, 4, 9, 8), meta(6, 4, 3, 2), stride=(2, 1), padding=1),
    "conv2d dilated": lambda: F.conv2d(meta(2, 4, 9, 9), meta(6, 4, 3, 3), dilation=2, padding=2),
    "conv2d same": lambda: F.conv2d(meta(2, 4, 9, 9), meta(6, 4, 3, 3), padding="same"),
    "conv3d": lambda: F.conv3d(meta(1, 2, 5, 6, 7), meta(3, 2, 2, 3, 3), stride=2),
    "transposed 1d": lambda: F.conv_transpose1d(meta(2, 4, 9), meta(4, 6, 3), stride=2, output_padding=1),
    "transposed 2d": lambda: F.conv_transpose2d(meta(2, 4, 9, 9), meta(4, 6, 3, 3), stride=2, padding=1),
    "transposed 3d": lambda: F.conv_transpose3d(meta(1, 4, 3, 4, 5), meta(4, 2, 3, 3, 3), stride=2),
    "flash": lambda: aten._scaled_dot_product_flash_attention(*attention_inputs())[0],
    "flash, grouped queries": lambda: aten._scaled_dot_product_flash_attention(*attention_inputs(4, 2))[0],
    "efficient": lambda: aten._scaled_dot_product_efficient_attention(*attention_inputs(), None, True)[0],
    "math": lambda: aten._scaled_dot_product_attention_math(*attention_inputs())[0],
    "double backward": lambda: torch.autograd.grad(torch.mm(x := meta(5, 7), meta(7, 3)).sum(), x, create_graph=True)[
        0
    ].sum(),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_equal_torchs_counter_forward_and_backward(case):
    # The counter takes key and value heads from the query in the backward; torch 2.6's refuses them to differ.
    counts = nullcontext() if "grouped" in case else FlopCounterMode(display=False)
    with counts as counter, Calls() as calls:
        CASES[case]().sum().backward()
    if counter is None:
        assert {record.batch for record in calls.matmuls} == {8}
        return
    expected = counter.get_total_flops()
    assert expected > 0
    assert sum(record.flops for record in calls.matmuls) == expected


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolutions_count_the_channels_of_a_group_only(groups, transposed):
    """Torch's counter ignores groups in the backward and in transposed convolutions, so all positions are counted by hand."""
    x = meta(2, 8, 9, 9)
    with Calls() as calls:
        if transposed:
            F.conv_transpose2d(x, meta(8, 12 // groups, 3, 3), groups=groups).sum().backward()
        else:
            F.conv2d(x, meta(12, 8 // groups, 3, 3), groups=groups).sum().backward()
    positions = 81 if transposed else 49
    assert [record.role for record in calls.matmuls] == ["forward", "dgrad", "wgrad"]
    assert {record.flops for record in calls.matmuls} == {2 * 2 * positions * 9 * 8 * 12 // groups}
    assert {record.batch for record in calls.matmuls} == {groups}


# -- sizes by hand -------------------------------------------------------------------------------------------------------


def sizes(record):
    return record.batch, record.m, record.n, record.k


def test_a_product():
    (record,) = matmuls_of("aten::mm", [Operand((5, 7), (7, 1), "float16"), Operand((7, 3), (1, 7), "float16")])
    assert sizes(record) == (1, 5, 3, 7)
    assert (record.kind, record.role, record.dtype, record.calls) == ("gemm", "forward", "float16", 1)
    assert record.flops == 2 * 5 * 3 * 7
    assert record.bytes == 2 * (35 + 21 + 15)
    assert record.out == Operand((5, 3), (3, 1), "float16")
    assert (record.module, record.parameter, record.autocast) == ("", "", None)


def test_a_linear_layer_reads_its_weight_transposed():
    x, weight, bias = Operand((4, 16, 1023), None, "bfloat16"), Operand((64, 1023), (1023, 1), "bfloat16"), None
    (record,) = matmuls_of("aten::linear", [x, weight, bias])
    assert sizes(record) == (1, 64, 64, 1023)
    assert record.a.shape == (64, 1023)
    assert record.a.strides is None
    assert (record.b.shape, record.b.strides) == ((1023, 64), (1, 1023))


def test_convolution_forward_dgrad_and_wgrad_are_the_guides_implicit_gemms():
    grad, image, weight = (
        Operand(shape, None, "float16") for shape in ((8, 64, 28, 28), (8, 32, 56, 56), (64, 32, 3, 3))
    )
    geometry = ["[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    (forward,) = matmuls_of("aten::convolution", [image, weight, None], scalars=["", "", "", *geometry])
    dgrad, wgrad = matmuls_of(
        "aten::convolution_backward",
        [grad, image, weight],
        scalars=["", "", "", "[64]", *geometry, "[True, True, True]"],
    )
    assert sizes(forward) == (1, 8 * 28 * 28, 64, 32 * 9)
    assert sizes(dgrad) == (1, 8 * 56 * 56, 32, 64 * 9)
    assert sizes(wgrad) == (1, 32 * 9, 64, 8 * 28 * 28)
    assert forward.flops == dgrad.flops == wgrad.flops == 2 * 8 * 28 * 28 * 64 * 32 * 9
    assert forward.convolution == dgrad.convolution == wgrad.convolution
    assert forward.convolution.output_size == (28, 28)
    assert forward.convolution.channels_last is None  # strides are unknown


@pytest.mark.parametrize(("mask", "roles"), [([True, False, True], ["dgrad"]), ([False, True, False], ["wgrad"])])
def test_a_convolutions_backward_gives_only_the_requested_gradients(mask, roles):
    grad, image, weight = (Operand(shape, None, "float16") for shape in ((1, 2, 4, 4), (1, 3, 4, 4), (2, 3, 1, 1)))
    geometry = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask]
    found = matmuls_of("aten::convolution_backward", [grad, image, weight], scalars=[None, None, None, *geometry])
    assert [record.role for record in found] == roles


def test_depthwise_convolutions_are_known():
    image, weight = Operand((2, 32, 8, 8), None, "float16"), Operand((32, 1, 3, 3), None, "float16")
    (record,) = matmuls_of("aten::conv2d", [image, weight], scalars=["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "32"])
    assert sizes(record) == (32, 2 * 8 * 8, 1, 9)
    assert record.convolution.is_depthwise


def test_a_convolutions_unknown_stride_is_derived_from_its_result():
    image, weight = Operand((2, 32, 8, 8), None, "float16"), Operand((16, 32, 3, 3), None, "float16")
    assert matmuls_of("aten::cudnn_convolution", [image, weight]) == ()
    (record,) = matmuls_of("aten::cudnn_convolution", [image, weight], output=Operand((2, 16, 4, 4), None, "float16"))
    assert sizes(record) == (1, 2 * 16, 16, 32 * 9)
    assert record.convolution.stride == ()


def test_nhwc_is_detected():
    image = operand(torch.empty(2, 8, 5, 5).to(memory_format=torch.channels_last))
    weight = operand(torch.empty(4, 8, 3, 3))
    (record,) = matmuls_of(
        "aten::cudnn_convolution", [image, weight], scalars=["", "", "[0, 0]", "[1, 1]", "[1, 1]", "1"]
    )
    assert record.convolution.channels_last is True
    assert record.out.strides == (36, 1, 12, 4)
    row_major = operand(torch.empty(2, 8, 5, 5))
    (record,) = matmuls_of(
        "aten::cudnn_convolution", [row_major, weight], scalars=["", "", "[0, 0]", "[1, 1]", "[1, 1]", "1"]
    )
    assert record.convolution.channels_last is False


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        ("aten::mv", [(5, 7), (7,)], (1, 5, 1, 7)),
        ("aten::addmv", [(5,), (5, 7), (7,)], (1, 5, 1, 7)),
        ("aten::dot", [(7,), (7,)], (1, 1, 1, 7)),
        ("aten::addbmm", [(5, 3), (4, 5, 7), (4, 7, 3)], (4, 5, 3, 7)),
        ("aten::matmul", [(7,), (7, 3)], (1, 1, 3, 7)),
        ("aten::matmul", [(4, 5, 7), (7,)], (1, 20, 1, 7)),
        ("aten::matmul", [(2, 1, 5, 7), (3, 7, 4)], (6, 5, 4, 7)),
        ("aten::_int_mm", [(32, 16), (16, 8)], (1, 32, 8, 16)),
        ("aten::_grouped_mm", [(128, 64), (4, 64, 32), (4,)], (1, 128, 32, 64)),
        ("aten::_grouped_mm", [(4, 16, 64), (4, 64, 32)], (4, 16, 32, 64)),
        ("aten::_sparse_semi_structured_linear", [(2, 8, 64), (32, 32), (32, 4)], (1, 16, 32, 64)),
        ("aten::_weight_int8pack_mm", [(16, 64), (32, 64), (32,)], (1, 16, 32, 64)),
        ("aten::_weight_int4pack_mm", [(16, 64), (4, 4, 32, 4), (2, 32, 2)], (1, 16, 32, 64)),
        ("mkl::_mkl_linear", [(16, 64), (1,), (32, 64)], (1, 16, 32, 64)),
    ],
)
def test_operators_related_to_mm(op, shapes, expected):
    (record,) = matmuls_of(op, [Operand(shape, None, "float16") for shape in shapes])
    assert sizes(record) == expected
    assert record.flops == 2 * math.prod(expected)


def test_fp8_and_fp4_products():
    a, b = Operand((32, 64), (64, 1), "float8_e4m3fn"), Operand((64, 16), (1, 64), "float8_e4m3fn")
    (record,) = matmuls_of("aten::_scaled_mm", [a, b], scalars=[None] * 6 + ["torch.bfloat16"])
    assert sizes(record) == (1, 32, 16, 64)
    assert (record.dtype, record.out.dtype) == ("float8_e4m3fn", "bfloat16")
    packed = [Operand(shape, None, "float4_e2m1fn_x2") for shape in ((32, 64), (64, 16))]
    assert sizes(matmuls_of("aten::_scaled_mm", packed)[0]) == (1, 32, 16, 128)


def test_attention_layouts():
    """(batch, heads, length, dim) of the public operator, (batch, length, heads, dim) of the kernel below, packed sequences."""
    query, key = Operand((2, 8, 141, 64), None, "bfloat16"), Operand((2, 2, 150, 64), None, "bfloat16")
    (outer,) = matmuls_of(
        "aten::_scaled_dot_product_flash_attention", [query, key, key], scalars=["", "", "", "0.", "True"]
    )
    assert sizes(outer) == (16, 141, 150, 64)
    assert outer.flops == 2 * 2 * 16 * 141 * 150 * 64
    geometry = outer.attention
    assert (geometry.batch, geometry.heads, geometry.kv_heads, geometry.backend) == (2, 8, 2, "flash")
    assert geometry.is_causal
    query, key = Operand((2, 141, 8, 64), None, "bfloat16"), Operand((2, 150, 2, 64), None, "bfloat16")
    rest = ["", "", "", "", "", "141", "150", "0.", "True", "False"]
    (inner,) = matmuls_of("aten::_flash_attention_forward", [query, key, key], scalars=rest)
    assert sizes(inner) == sizes(outer)
    assert inner.attention == geometry
    tokens = [Operand((300, heads, 64), None, "bfloat16") for heads in (8, 2, 2)]
    starts = [Operand((4,), None, "int32")] * 2
    (packed,) = matmuls_of("aten::_flash_attention_forward", [*tokens, *starts], scalars=rest)
    assert sizes(packed) == (24, 141, 150, 64)


def test_attention_with_a_mask():
    query, mask = Operand((2, 8, 141, 64), None, "float16"), Operand((2, 8, 141, 141), (19881, 0, 141, 1), "float16")
    (record,) = matmuls_of("aten::_scaled_dot_product_efficient_attention", [query, query, query, mask])
    assert record.attention.bias == mask
    assert record.bytes == 2 * (4 * math.prod(query.shape) + 2 * 141 * 141)  # expanded operands are read once


def test_an_lstm_as_cudnn_computes_it():
    x = Operand((5, 3, 8), None, "float16")
    scalars = [None] * 6 + [2, 16, 0, 2, False, 0.0, True, True, [], None]
    found = matmuls_of("aten::_cudnn_rnn", [x], scalars=scalars)
    assert [(record.parameter, sizes(record), record.calls) for record in found[:4]] == [
        ("weight_ih_l0", (1, 15, 64, 8), 1),
        ("weight_hh_l0", (1, 3, 64, 16), 5),
        ("weight_ih_l0_reverse", (1, 15, 64, 8), 1),
        ("weight_hh_l0_reverse", (1, 3, 64, 16), 5),
    ]
    assert sizes(found[4]) == (1, 15, 64, 32)  # the second layer reads both directions
    assert len(found) == 8


@pytest.mark.parametrize(
    ("mask", "steps", "roles"),
    [
        ([True, True, True, True], 5, ["dgrad", "dgrad", "wgrad", "wgrad"]),
        ([True, False, False, False], 4, ["dgrad", "dgrad"]),
        ([False, True, True, True], 5, ["dgrad", "wgrad", "wgrad"]),
        ([False, False, False, True], 4, ["dgrad", "wgrad", "wgrad"]),
    ],
)
def test_a_recurrent_layers_backward_gives_only_the_requested_gradients(mask, steps, roles):
    scalars = [None] * 10 + [3, 16, 0, 1, False, 0.0, True, False, [], None, None, mask]
    found = matmuls_of("aten::_cudnn_rnn_backward", [Operand((5, 3, 8), None, "float16")], scalars=scalars)
    assert [record.role for record in found] == roles
    assert (sizes(found[0]), found[0].calls) == ((1, 3, 16, 48), steps)
    assert ((1, 15, 8, 48) in map(sizes, found)) == mask[0]


def test_packed_sequences_have_one_product_a_size_of_the_steps():
    scalars = [None] * 6 + [3, 16, 0, 1, False, 0.0, True, False, [4, 4, 2], None]
    found = matmuls_of("aten::_cudnn_rnn", [Operand((10, 8), None, "float16")], scalars=scalars)
    assert [(sizes(record), record.calls) for record in found] == [
        ((1, 10, 48, 8), 1),
        ((1, 4, 48, 16), 2),
        ((1, 2, 48, 16), 1),
    ]


def test_the_same_lstm_by_any_of_its_operators():
    x = Operand((5, 3, 8), None, "float32")
    weights = [Operand(shape, None, "float32") for shape in ((64, 8), (64, 16), (64,), (64,))]
    states = [Operand((1, 3, 16), None, "float32")] * 2
    flags = [None, None, None, True, 1, 0.0, True, False, False]
    outer = matmuls_of("aten::lstm", [x, states, weights], scalars=flags)
    layer = matmuls_of("aten::mkldnn_rnn_layer", [x, *weights])
    assert [(sizes(record), record.calls) for record in outer] == [((1, 15, 64, 8), 1), ((1, 3, 64, 16), 5)]
    assert [(sizes(record), record.calls) for record in layer] == [(sizes(record), record.calls) for record in outer]


# -- names and odd input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aten::mm", "aten.mm.default", "aten::mm.out", "aten.mm.dtype", "aten::mm_"])
def test_every_form_of_a_name(name):
    (record,) = matmuls_of(name, [Operand((5, 7), None, "float16"), Operand((7, 3), None, "float16")])
    assert record.op == "aten::mm"


def test_a_result_given_as_out_is_found():
    out = Operand((5, 3), (1, 5), "float16")
    (record,) = matmuls_of("aten::mm", [Operand((5, 7), None, "float16"), Operand((7, 3), None, "float16"), out])
    assert record.out == out


def test_the_stack_of_torchscripts_interpreter_is_not_a_list_of_operands():
    stack = [Operand((4, 4), None, "float16")] * 10
    assert matmuls_of("aten::mm", stack) == ()


def test_other_operators_give_no_product():
    assert matmuls_of("aten::add", [Operand((2, 2), None, "float16")] * 2) == ()
    assert matmuls_of("", []) == ()
    assert matmuls_of("mm", []) == ()


def test_sizes_that_do_not_fit_give_no_product():
    assert matmuls_of("aten::mm", [Operand((5, 7), None, "float16"), Operand((6, 3), None, "float16")]) == ()
    assert matmuls_of("aten::bmm", [Operand((2, 5, 7), None, "float16"), Operand((3, 7, 3), None, "float16")]) == ()
    assert matmuls_of("aten::mm", [None, None]) == ()


shapes = st.lists(st.integers(0, 6), max_size=5).map(tuple)
operands = st.none() | st.builds(
    Operand, shapes, st.none() | shapes, st.sampled_from(["float16", "float8_e5m2", "weird", "uint16"])
)
values = (
    st.none() | st.sampled_from(["", "1", "[1, 1]", "True", "[", "same", "[True, False]", "x" * 9]) | st.integers(-2, 3)
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(PRODUCT_OPS)),
    st.lists(operands | st.lists(operands, max_size=3), max_size=8),
    st.lists(values, max_size=14),
    operands,
)
@example("aten::_mixed_dtypes_linear", [Operand((), None, "float16"), Operand((0, 0), None, "float16")], [], None)
@example(
    "aten::_sparse_semi_structured_linear", [Operand((), None, "float16"), Operand((8, 8), None, "float16")], [], None
)
def test_odd_input_never_raises(op, given_inputs, given_scalars, output):
    found = matmuls_of(op, given_inputs, scalars=given_scalars, output=output)
    assert isinstance(found, tuple)
    assert all(record.flops >= 0 and record.bytes >= 0 for record in found)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_operands_have_their_strides_in_memory(m, n, k, batch, a_is_transposed, b_is_transposed, offset):
    """The recorded strides of transposed, sliced and folded operands address the same elements."""
    a = torch.arange(100.0 + batch * m * k)[offset : offset + batch * m * k].view(batch, m, k)
    b = torch.arange(float(n * k)).view(n, k).t() if b_is_transposed else torch.arange(float(k * n)).view(k, n)
    if a_is_transposed:
        a = a.transpose(1, 2).contiguous().transpose(1, 2)
    (record,) = matmuls_of("aten::matmul", [operand(a), operand(b)])
    folded = a.reshape(batch * m, k)
    is_view = folded.data_ptr() == a.data_ptr()
    assert record.a.shape == tuple(folded.shape)
    assert (record.m, record.n, record.k) == (batch * m, n, k)
    if is_view:
        again = torch.as_strided(a, record.a.shape, record.a.strides, record.a.offset)
        assert torch.equal(again, folded)
    assert record.b.strides == b.stride()
