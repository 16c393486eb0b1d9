"""judge(): each rule on hand-written products, and the arithmetic of alignment against brute force."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shape_records import attention, convolution, gemm, linear, recording, row_major, transposed

from mpinspect.runtime.gpus import ARCHITECTURES, Gpu, named, of_device
from mpinspect.shapes.analysis import analyse_shapes, judge
from mpinspect.shapes.analysis.alignment import layout_of, up_to
from mpinspect.shapes.records import Operand

HOPPER = named("hopper")


def verdicts(products, gpu=HOPPER):
    return [judge(product, gpu).verdict for product in products]


# -- the talk's rule ------------------------------------------------------------------------------------------------


def test_the_talks_linear_layer_satisfies_both_rules():
    for product in linear(4096, 1024, 1024):
        verdict = judge(product, named("volta"))
        assert verdict.multiples_of_8 is True
        assert verdict.verdict == "native"
        assert verdict.alignment_bytes == 128


@pytest.mark.parametrize(
    ("product", "kept"),
    [
        *((gemm(row_major((m, k)), row_major((k, n))), False) for m, n, k in [(9, 8, 8), (8, 9, 8), (8, 8, 9)]),
        # INT8 needs multiples of 16; FP32 is judged by the requirements of FP16.
        (gemm(row_major((32, 24), "int8"), row_major((24, 32), "int8")), False),
        (gemm(row_major((32, 16), "int8"), row_major((16, 32), "int8")), True),
        (linear(64, 64, 64, "float32")[0], True),
        (linear(64, 60, 64, "float32")[0], False),
        # The rule does not apply to FP64, FP8 and depthwise convolutions.
        (linear(64, 64, 64, "float64")[0], None),
        (linear(64, 64, 64, "float8_e4m3fn")[0], None),
        (convolution(channels=(64, 64), groups=64), None),
        (convolution(batch=32), True),
        (convolution(batch=30), False),
        (convolution(channels=(3, 64)), False),
        (convolution(channels=(64, 21)), False),
        (convolution(channels=(64, 64), groups=8), True),
        (convolution(channels=(64, 64), groups=16), False),
        (attention(64, 512), True),
        (attention(64, 197), False),
        (attention(60, 512), False),
    ],
)
def test_which_products_obey_the_talks_rule(product, kept):
    assert judge(product, named("volta") if product.dtype == "float32" else HOPPER).multiples_of_8 is kept


# -- the stride rule ------------------------------------------------------------------------------------------------


def test_1023_inputs_degrade_all_three_products_of_the_layer():
    found = [judge(product, HOPPER) for product in linear(4096, 1023, 1024)]
    assert [verdict.verdict for verdict in found] == ["degraded"] * 3
    assert {verdict.alignment_bytes for verdict in found} == {2}
    assert found[0].stride_bytes == {"A": 2046, "B": 2046, "output": 2048}
    assert "A's rows are 2,046 bytes apart, 14 more than a multiple of 16" in found[0].reason
    assert "_align1" in found[0].reason
    assert found[1].stride_bytes == {"A": 2048, "B": 2046, "output": 2046}


#: Calls of the public H100 traces of BERT and ViT: sizes, row stride of A, and the alignment in the kernel's name.
H100_CALLS = [
    (141, 2048, 512, 512, 8),
    (141, 512, 2048, 2048, 8),
    (141, 512, 512, 512, 8),
    (141, 30522, 512, 512, 2),
    (788, 3072, 768, 768, 8),
    (788, 768, 3072, 3072, 8),
    (4, 768, 768, 151296, 8),
]


@pytest.mark.parametrize(("m", "n", "k", "stride", "elements"), H100_CALLS)
def test_the_alignment_of_real_kernels_is_predicted(m, n, k, stride, elements):
    a = Operand((m, k), (stride, 1), "bfloat16")
    verdict = judge(gemm(a, transposed(row_major((n, k), "bfloat16"))), HOPPER)
    assert verdict.verdict == ("native" if elements == 8 else "degraded")
    assert min(verdict.alignment_bytes, 16) == 2 * elements


@given(st.integers(2, 5000), st.integers(2, 300), st.integers(2, 300))
def test_m_of_a_row_major_product_is_free(m, n, k):
    first, other = (judge(gemm(row_major((rows, k)), row_major((k, n))), HOPPER) for rows in (m, 64))
    assert (first.verdict, first.alignment_bytes) == (other.verdict, other.alignment_bytes)


@given(
    st.integers(2, 64), st.integers(2, 64), st.integers(0, 40), st.integers(0, 64),
    st.sampled_from(["float16", "bfloat16", "float32", "int8", "float64"]), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_alignment_is_the_common_power_of_two_of_all_addresses(
    rows, columns, extra, offset, dtype, is_transposed, batch
):
    """Compared with the largest power of two up to 128 that divides the start address of every row."""
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "float64": 8}[dtype]
    down = columns + extra
    operand = Operand((batch, rows, columns), (rows * down, down, 1), dtype, offset)
    layout = layout_of("A", transposed(operand) if is_transposed else operand)
    addresses = [(offset + b * rows * down + r * down) * size for b in range(batch) for r in range(rows)]
    expected = max(
        power for power in (1, 2, 4, 8, 16, 32, 64, 128) if not any(address % power for address in addresses)
    )
    assert layout is not None
    assert layout.alignment_bytes == expected
    assert layout.stride_bytes == down * size
    assert layout.is_view == bool(extra or offset)


@given(st.integers(1, 200_000), st.sampled_from([4, 8, 16, 64]))
def test_padding_is_the_least_multiple_not_below(size, multiple):
    assert up_to(size, multiple) == next(found for found in range(size, size + multiple) if found % multiple == 0)


def test_the_base_pointer_counts():
    a = Operand((64, 64), (192, 1), "float16", 4)
    verdict = judge(gemm(a, row_major((64, 64))), HOPPER)
    assert verdict.verdict == "degraded"
    assert verdict.alignment_bytes == 8
    assert "starts 8 bytes into its storage" in verdict.reason
    aligned = replace(a, offset=64)
    assert judge(gemm(aligned, row_major((64, 64))), HOPPER).verdict == "native"


def test_the_batch_stride_counts():
    a = Operand((4, 8, 8), (68, 8, 1), "float16")
    verdict = judge(gemm(a, row_major((4, 8, 8))), HOPPER)
    assert verdict.verdict == "degraded"
    assert "matrices of the batch" in verdict.reason


def test_a_vector_has_no_row_stride():
    layout = layout_of("A", Operand((1, 1023), (1023, 1), "float16"))
    assert layout is not None
    assert layout.stride_bytes is None
    assert layout.is_aligned


def test_an_operand_without_stride_1_is_copied_and_judged_as_the_copy():
    a = Operand((64, 64), (128, 2), "float16")
    verdict = judge(gemm(a, row_major((64, 64))), HOPPER)
    assert verdict.verdict == "native"
    assert any("A has no dimension of stride 1: torch copies it first" in remark for remark in verdict.remarks)


def test_an_expanded_operand_is_copied():
    layout = layout_of("A", Operand((64, 64), (0, 1), "float16"))
    assert layout is not None
    assert layout.is_copied


def test_unknown_strides_are_assumed_contiguous_with_a_note():
    product = replace(linear(64, 1023, 64)[0], a=Operand((64, 1023), None, "float16"), b=None)
    verdict = judge(product, HOPPER)
    assert verdict.verdict == "degraded"
    assert "strides unknown: taken as contiguous" in verdict.remarks


def test_128_bytes_are_a_preference_of_a100_and_later():
    product = linear(64, 72, 64)[0]
    assert judge(product, HOPPER).verdict == "native"
    assert any("prefer 128" in remark for remark in judge(product, HOPPER).remarks)
    assert not judge(product, named("turing")).remarks


# -- dtypes ---------------------------------------------------------------------------------------------------------


def test_fp32_follows_the_tf32_switch():
    product = linear(64, 64, 64, "float32")[0]
    assert judge(product, HOPPER).verdict == "off"
    assert "torch's default" in judge(product, HOPPER).reason
    assert judge(product, HOPPER, tf32=True).verdict == "native"
    assert "default" not in judge(product, HOPPER, tf32=False).reason
    assert judge(product, named("volta"), tf32=True).verdict == "off"
    assert judge(linear(64, 62, 64, "float32")[0], HOPPER, tf32=True).verdict == "degraded"
    assert judge(linear(64, 60, 64, "float32")[0], HOPPER, tf32=True).verdict == "native"


def test_convolutions_use_tf32_by_default():
    assert judge(convolution(dtype="float32"), HOPPER).verdict == "native"
    assert judge(convolution(dtype="float32"), HOPPER, tf32=False).verdict == "off"
    assert judge(convolution(dtype="float32"), named("turing")).verdict == "off"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_needs_ampere(architecture):
    expected = "off" if architecture in ("volta", "turing") else "native"
    assert verdicts(linear(64, 64, 64, "bfloat16"), named(architecture)) == [expected] * 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp64_where_the_gpu_multiplies_it(architecture):
    gpu = named(architecture)
    expected = "native" if gpu.multiplies("float64") else "off"
    assert judge(linear(64, 63, 64, "float64")[0], gpu).verdict == expected


@pytest.mark.parametrize(
    ("product", "verdict"),
    [
        # FP64 needs no 16 bytes, a batch of one has no batch stride.
        (linear(64, 63, 65, "float64")[0], "native"),
        (gemm(Operand((1, 8, 8), (65, 8, 1), "float16"), row_major((1, 8, 8))), "native"),
        (linear(64, 64, 64, "int8")[0], "native"),
        (linear(64, 64, 64, "int32")[0], "off"),
        (linear(64, 64, 64, "complex64")[0], "unknown"),
        # A misaligned chunk of fused queries, keys and values.
        (attention(64, a=Operand((8, 12, 512, 64), (512 * 2308, 64, 2308, 1), "float16", 4)), "degraded"),
    ],
)
def test_verdicts(product, verdict):
    assert judge(product, HOPPER).verdict == verdict


def test_gpus_without_tensor_cores_and_unknown_ones():
    product = linear(64, 64, 64)[0]
    pascal = of_device("Quadro GP100", 6, 0)
    assert judge(product, pascal).verdict == "off"
    assert "has no Tensor Cores" in judge(product, pascal).reason
    amd = of_device("AMD Instinct MI300X", 9, 4, vendor="AMD")
    assert judge(product, amd).verdict == "unknown"
    assert judge(product, Gpu("mystery")).verdict == "unknown"


# -- thin products --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 4096), (4096, 1)])
def test_matrix_vector_products_are_memory_bound(m, n):
    verdict = judge(gemm(row_major((m, 1023)), row_major((1023, n))), HOPPER)
    assert verdict.verdict == "off"
    assert "no change expected" in verdict.reason
    assert verdict.cause == "matrix-vector"


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_an_empty_product_is_judged_as_empty(sizes):
    m, n, k = sizes
    assert judge(gemm(row_major((m, k)), row_major((k, n))), HOPPER).cause == "empty"


# -- products that raise --------------------------------------------------------------------------------------------


def fp8(m, n, k, *, b_column_major=True, a_row_major=True):
    dtype = "float8_e4m3fn"
    a = row_major((m, k), dtype) if a_row_major else transposed(row_major((k, m), dtype))
    b = transposed(row_major((n, k), dtype)) if b_column_major else row_major((k, n), dtype)
    return gemm(a, b, row_major((m, n), "bfloat16"), op="aten::_scaled_mm")


def test_fp8_products_and_when_they_raise():
    assert judge(fp8(17, 64, 64), HOPPER).verdict == "native"
    for product, what in [
        (fp8(16, 64, 72), "K a multiple of 16 (72 -> 80)"),
        (fp8(16, 72, 64), "N a multiple of 16 (72 -> 80)"),
        (fp8(16, 64, 64, b_column_major=False), "B column-major"),
        (fp8(16, 64, 64, a_row_major=False), "A row-major"),
    ]:
        verdict = judge(product, HOPPER)
        assert (verdict.verdict, verdict.cause) == ("off", "raises")
        assert "raises" in verdict.reason
        assert what in verdict.reason
    assert "which A100 does not" in judge(fp8(16, 64, 64), named("A100")).reason


def test_int_mm_raises_for_few_rows_and_odd_sizes():
    def product(m, n, k):
        return gemm(row_major((m, k), "int8"), row_major((k, n), "int8"), op="aten::_int_mm")

    assert judge(product(32, 32, 32), HOPPER).verdict == "native"
    assert "more than 16 rows" in judge(product(16, 32, 32), HOPPER).reason
    assert "K a multiple of 8 (30 -> 32)" in judge(product(32, 32, 30), HOPPER).reason


def test_grouped_products_raise_for_misaligned_strides():
    a, b = row_major((4, 16, 60), "bfloat16"), transposed(row_major((4, 64, 60), "bfloat16"))
    assert "A's row stride a multiple of 16 bytes (120)" in judge(gemm(a, b, op="aten::_grouped_mm"), HOPPER).reason


# -- convolutions ---------------------------------------------------------------------------------------------------


def test_convolutions_are_judged_by_their_channels():
    assert judge(convolution(channels=(64, 128)), HOPPER).verdict == "native"
    verdict = judge(convolution(channels=(64, 21)), HOPPER)
    assert verdict.verdict == "degraded"
    assert "C_out 21 (42 bytes)" in verdict.reason
    assert judge(convolution(batch=1), HOPPER).verdict == "native"
    assert judge(convolution(channels=(64, 60), dtype="float32"), HOPPER).verdict == "native"


def test_a_stem_is_distinguished_from_other_layers():
    verdict = judge(convolution(channels=(3, 64), kernel=7), HOPPER)
    assert (verdict.verdict, verdict.cause) == ("degraded", "stem")
    assert "first layers" in verdict.reason


def test_groups_divide_the_channels():
    assert judge(convolution(channels=(128, 128), groups=32), HOPPER).verdict == "degraded"
    assert judge(convolution(channels=(256, 256), groups=32), HOPPER).verdict == "native"
    verdict = judge(convolution(channels=(64, 64), groups=64), HOPPER)
    assert (verdict.verdict, verdict.cause) == ("off", "depthwise")


def test_nchw_is_native_with_a_note_on_its_conversions():
    verdict = judge(convolution(channels_last=False), HOPPER)
    assert verdict.verdict == "native"
    assert any("NCHW" in remark for remark in verdict.remarks)
    assert not judge(convolution(channels_last=None), HOPPER).remarks


# -- attention ------------------------------------------------------------------------------------------------------


def test_attention_asks_for_heads_in_multiples_of_8():
    assert judge(attention(64, 197), HOPPER).verdict == "native"
    verdict = judge(attention(60), HOPPER)
    assert verdict.verdict == "degraded"
    assert "head_dim 60: not a multiple of 8" in verdict.reason
    assert "value_dim 60" in judge(attention(64, value=60), HOPPER).reason


def test_a_mask_with_odd_rows_is_copied():
    odd = judge(attention(64, 197, bias=row_major((8, 1, 197, 197))), HOPPER)
    assert odd.verdict == "degraded"
    assert "mask" in odd.reason
    sliced = Operand((8, 1, 197, 197), (197 * 200, 197 * 200, 200, 1), "float16")
    assert judge(attention(64, 197, bias=sliced), HOPPER).verdict == "native"


def test_fp32_attention_is_3xtf32_from_ampere_on():
    product = attention(64, dtype="float32", backend="efficient")
    verdict = judge(product, HOPPER, tf32=False)
    assert verdict.verdict == "native"
    assert any("3xTF32" in remark for remark in verdict.remarks)
    assert judge(product, named("turing")).verdict == "off"
    assert judge(attention(64, dtype="float32", backend="math"), HOPPER, tf32=False).verdict == "off"


def test_flash_attention_ends_at_256():
    assert any("beyond flash" in remark for remark in judge(attention(320, backend=""), HOPPER).remarks)


def test_recurrent_products_follow_the_stride_rule():
    product = replace(linear(64, 100, 400)[0], kind="recurrent", op="aten::lstm", a=None, b=None, out=None)
    assert judge(product, HOPPER).verdict == "degraded"
    assert judge(replace(product, k=104), HOPPER).verdict == "native"
    fp32 = replace(product, dtype="float32")
    assert judge(fp32, HOPPER).verdict == "native"


@given(
    st.integers(0, 70), st.integers(0, 70), st.integers(0, 70),
    st.sampled_from(["float16", "float32", "int8", "float8_e4m3fn", "float64", "bool", "something"]),
    st.sampled_from(ARCHITECTURES),
)  # fmt: skip
def test_every_product_has_a_verdict(m, n, k, dtype, architecture):
    product = replace(linear(8, 8, 8)[0], m=m, n=n, k=k, dtype=dtype, a=None, b=None, out=None)
    verdict = judge(product, named(architecture))
    assert verdict.verdict in ("native", "degraded", "off", "unknown")
    assert verdict.reason


@pytest.mark.parametrize("gpu", ["volta", "turing"])
def test_there_is_no_flash_attention_before_ampere(gpu):
    record = attention(64, op="aten::_scaled_dot_product_flash_attention")
    verdict = judge(record, named(gpu))
    assert verdict.verdict == "native"
    assert verdict.reason.startswith("memory-efficient attention (torch's flash attention needs Ampere or later)")
    (row,) = analyse_shapes(recording(record), named(gpu)).matmuls
    assert (row.op, row.matmul.attention.backend) == ("aten::_scaled_dot_product_efficient_attention", "efficient")
    assert "does not take that" in judge(attention(60), named(gpu)).reason


@pytest.mark.parametrize("gpu", ["ampere", "ada", "hopper", "blackwell"])
def test_there_is_flash_attention_since_ampere(gpu):
    record = attention(64, op="aten::_scaled_dot_product_flash_attention")
    assert judge(record, named(gpu)).reason.startswith("flash attention:")
    (row,) = analyse_shapes(recording(record), named(gpu)).matmuls
    assert row.matmul == record
    assert "torch pads copies" in judge(attention(60), named(gpu)).reason
