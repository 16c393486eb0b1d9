"""The kernel report: shares, FLOPs of calls, rates, losses, limits, ranks."""

import dataclasses
import gc
import statistics

import made_kernels as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_kernels import kernel, mm, trace

from mpinspect.kernels.analysis import analyse_kernels
from mpinspect.kernels.analysis.products import dtype_name, products_of
from mpinspect.kernels.analysis.rates import SIMILAR, SiblingRates
from mpinspect.kernels.analysis.rows import VERDICTS
from mpinspect.kernels.records import TraceOp
from mpinspect.reporting.words import duration, time_taken
from mpinspect.runtime import gpus

#: 2 x 4096^3 operations take 139 us at an H100's BF16 peak of 989.4 TFLOP/s.
LARGE = mm(4096, 4096, 4096)
LARGE_FLOPS = 2 * 4096**3


def report_of(*kernels, **options):
    """Return the report of one trace."""
    return analyse_kernels([trace(*kernels, **options)])


def rows_of(*kernels, **options):
    return report_of(*kernels, **options).kernels


def verdicts_of(report):
    return [row.verdict for row in report.kernels]


def verdicts(*kernels, **options):
    return verdicts_of(report_of(*kernels, **options))


# -- shares ---------------------------------------------------------------------------------------------------------


def test_each_share_has_its_own_denominator():
    report = report_of(
        kernel(made.NATIVE, 30, mm(64, 64, 64)),
        kernel(made.DEGRADED, 10, mm(64, 62, 64)),
        kernel(made.SGEMM, 20),
        kernel(made.TRITON, 20),
        kernel(made.SPLIT_K, 5),
        kernel(made.ADD_BF16, 15),
        kernel(made.NCCL, 100),
    )
    assert report.tensor_core_fraction == 40 / 80
    assert report.tensor_core_fraction_of_all == 40 / 200
    assert report.tensor_core_fraction_of_compute == 40 / 100
    times = {"native": 30, "degraded": 10, "off": 20, "unknown": 20, "helper": 5, "other": 115}
    assert report.verdict_time_us == times
    assert report.shares.communication_time_us == 100
    assert report.attributed_fraction == 40 / 200


def test_without_products_the_share_of_products_is_unknown_and_not_0():
    report = report_of(kernel(made.ADD, 5))
    assert report.tensor_core_fraction is None
    assert report.tensor_core_fraction_of_all == 0
    assert report.phrase == ""


@pytest.mark.parametrize("traces", [[], [trace()]])
def test_empty_traces_have_a_report(traces):
    report = analyse_kernels(traces)
    assert (report.tensor_core_fraction, report.tensor_core_fraction_of_all) == (None, None)
    assert report.attributed_fraction is None
    assert report.verdict_time_us == dict.fromkeys(VERDICTS, 0)
    assert report.limits.speedup_at_most is None


_NAMES = (
    *(made.NATIVE, made.DEGRADED, made.SGEMM, made.TF32, made.TRITON, made.SPLIT_K, made.LAYOUT, made.ADD, made.NCCL),
    *("gemv2T_kernel_val<int, float>", "", "\x1b[31m|x|"),
)
_ops = st.none() | st.builds(mm, *[st.integers(0, 4096)] * 3, st.sampled_from(["float", "c10::BFloat16", "odd"]))
_kernels = st.builds(
    kernel,
    st.sampled_from(_NAMES),
    st.floats(0, 1e9),
    _ops,
    module=st.sampled_from(["", "a.b"]),
    device=st.integers(0, 1),
    phase=st.sampled_from(["", "forward", "optimizer"]),
)
_traces = st.builds(
    lambda kernels, device: trace(*kernels, device=device),
    st.lists(_kernels, max_size=8),
    st.sampled_from([made.H100, made.A100, made.V100, made.GP100, made.MI300X, made.NAMELESS]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_traces, max_size=3))
def test_sums_and_shares_hold_for_any_trace(traces):
    report = analyse_kernels(traces)
    total = sum(kernel.time_us for one in traces for kernel in one.kernels)
    assert sum(report.verdict_time_us.values()) == pytest.approx(total)
    assert sum(row.time_us for row in report.by_name) == pytest.approx(total)
    assert sum(row.time_us for row in report.by_module) == pytest.approx(total)
    assert sum(sum(row.verdict_time_us.values()) for row in report.by_module) == pytest.approx(total)
    assert len(report.kernels) == sum(row.calls for row in report.by_name) == report.shares.calls
    limits = report.limits
    split = limits.math_limited_us + limits.memory_limited_us + limits.unknown_us + limits.communication_us
    assert split == pytest.approx(total)
    fractions = [report.tensor_core_fraction, report.tensor_core_fraction_of_all, report.attributed_fraction]
    fractions += [report.tensor_core_fraction_of_compute, report.coverage.flops_fraction]
    fractions += [row.fraction for row in (*report.by_name, *report.by_module, *report.losses)]
    assert all(fraction is None or 0 <= fraction <= 1 for fraction in fractions)
    assert (report.tensor_core_fraction is None) == (report.shares.product_time_us == 0)
    assert all(0 <= saving.saved_us <= loss.time_us + 1e-6 for loss in report.losses for saving in loss.savings)
    assert all(0 <= saved <= total * (1 + 1e-9) for saved in limits.saved_at_most_us.values())
    assert limits.speedup_at_most is None or limits.speedup_at_most >= 1
    assert str(report)
    assert report.to_json()


# -- operators and FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("c10::BFloat16", "bfloat16"),
        ("c10::Half", "float16"),
        ("float", "float32"),
        ("double", "float64"),
        ("long int", "int64"),
        ("long", "int64"),
        ("signed char", "int8"),
        ("unsigned char", "uint8"),
        ("c10::Float8_e4m3fn", "float8_e4m3fn"),
        ("c10::Float8_e5m2", "float8_e5m2"),
        ("c10::complex<float>", "complex64"),
        ("c10::complex<double>", "complex128"),
        ("bool", "bool"),
        ("Scalar", ""),
        ("ScalarList", ""),
        ("TensorList", ""),
        ("", ""),
    ],
)
def test_dtypes_as_the_profiler_writes_them(written, name):
    assert dtype_name(written) == name


def test_a_product_is_derived_from_its_operator():
    (product,) = products_of(mm(8, 24, 16))
    assert (product.m, product.n, product.k, product.dtype, product.flops) == (8, 24, 16, "bfloat16", 2 * 8 * 24 * 16)


@pytest.mark.parametrize(
    "op",
    [
        TraceOp("aten::mm"),
        TraceOp("aten::mm", ((2, 3),), None, ("float",)),
        TraceOp("aten::mm", ((2, 3), (4, 5)), None, ("float", "float")),
        TraceOp("aten::mm", ((), ()), ((), ()), ("Scalar", "")),
        TraceOp("aten::mm", ((2, 3), (3, 4)), ((1,), (1, 3)), ("odd", "odder")),
        TraceOp("aten::convolution_backward", ((1,), (2, 3), ()), None, ("float", "float", "")),
        TraceOp("aten::relu", ((2, 3),), ((3, 1),), ("float",)),
    ],
)
def test_an_odd_operator_loses_its_flops_but_not_the_report(op):
    report = report_of(kernel(made.NATIVE, 10, op))
    assert report.kernels[0].flops is None
    assert report.kernels[0].verdict == "native"


def large(name, time, call=1, op=LARGE):
    return kernel(name, time, op, call=call)


@pytest.mark.parametrize(
    ("kernels", "shares"),
    [
        ([large(made.NATIVE, 200), large(made.SPLIT_K, 5)], [1, None]),
        ([kernel(made.NATIVE, 200, LARGE), kernel(made.NATIVE, 200, LARGE)], [1, 1]),
        ([large(made.NATIVE, 150), large(made.NATIVE, 50)], [3 / 4, 1 / 4]),
        ([large(made.NATIVE, 150), large(made.SGEMM, 50)], [None, None]),
        ([large(made.NATIVE, 200, None, op) for op in (LARGE, LARGE, mm(4096, 4096, 4096))], [None, None, 1]),
    ],
    ids=["a helper", "two calls", "equal kernels", "unlike kernels", "no numbers of calls"],
)
def test_the_flops_of_a_call_are_shared_by_its_products_in_proportion_to_their_time(kernels, shares):
    rows = rows_of(*kernels)
    assert [row.flops for row in rows] == [None if share is None else share * LARGE_FLOPS for share in shares]
    for row, share in zip(rows, shares, strict=True):
        assert share is None or row.tflops == pytest.approx(share * LARGE_FLOPS / row.time_us / 1e6)


def convolution_backward():
    shapes = ((8, 64, 16, 16), (8, 32, 16, 16), (64, 32, 3, 3), (), (), (), (), (), (), (), ())
    dtypes = ("float",) * 3 + ("ScalarList",) * 4 + ("Scalar",) * 4
    scalars = ("", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]")
    return TraceOp("aten::convolution_backward", shapes, None, dtypes, scalars)


def test_the_gradients_of_a_convolution_are_distinguished_by_kernel_name():
    op = convolution_backward()
    names = (made.DGRAD, made.WGRAD, made.TF32)
    rows = rows_of(*(kernel(name, 100, op, call=1) for name in names), device=made.A100)
    assert [row.matmul.role if row.matmul else None for row in rows] == ["dgrad", "wgrad", None]
    assert rows[0].flops == rows[1].flops == 2 * 8 * 16 * 16 * 64 * 32 * 9
    assert rows[2].flops is None


# -- rates ----------------------------------------------------------------------------------------------------------


def test_above_the_cuda_cores_peak_an_unknown_kernel_ran_on_tensor_cores():
    report = report_of(kernel(made.TRITON, 300, LARGE))
    (row,) = report.kernels
    assert (row.verdict, row.basis) == ("native", "rate")
    assert "458 TFLOP/s" in row.reason
    assert report.tensor_core_fraction == 1


def test_a_rate_just_above_the_peak_is_not_proof():
    # 133.8 TFLOP/s is the peak of an H100's CUDA cores in 16 bits; a card's clock can be above the data sheet's.
    at_peak_us = LARGE_FLOPS / 133.8e6
    rows = rows_of(kernel(made.TRITON, at_peak_us / 1.15, LARGE))
    assert rows[0].verdict == "unknown"


def test_a_rate_that_contradicts_the_name_is_reported():
    report = report_of(kernel(made.HGEMM, 200, mm(4096, 4096, 4096, "c10::Half")))
    (row,) = report.kernels
    assert (row.verdict, row.named.verdict, row.basis) == ("native", "off", "rate")
    assert "though its name says otherwise" in row.reason
    assert "rate-contradicts-name" in {finding.id for finding in report.findings}


def test_flops_beyond_the_tensor_cores_peak_are_not_attributed():
    rows = rows_of(kernel(made.TRITON, 50, LARGE), kernel(made.NATIVE, 50, LARGE))
    assert [row.flops for row in rows] == [None, None]
    assert [row.verdict for row in rows] == ["unknown", "native"]


def test_a_winograd_convolution_may_exceed_the_peak():
    shapes = ((32, 256, 56, 56), (256, 256, 3, 3), (), (), (), (), (), (), ())
    dtypes = ("float", "float", "") + ("ScalarList",) * 3 + ("Scalar",) * 3
    scalars = ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    op = TraceOp("aten::convolution", shapes, None, dtypes, scalars)
    flops = 2 * 32 * 56 * 56 * 256 * 256 * 9
    # Twice the FP32 peak of an A100's CUDA cores.
    time = flops / 39e6
    rows = rows_of(kernel("void cudnn::winograd_nonfused::x<float>()", time, op), device=made.A100)
    assert rows[0].flops == flops
    assert rows[0].verdict == "off"


LIKE, SLOW = [kernel(made.NATIVE, 250, LARGE) for _ in range(3)], "nvjet_tst_128x128_64x4_1x2_h_bz_NNT"


def test_far_under_its_like_a_native_kernel_is_degraded():
    report = report_of(*LIKE, kernel(SLOW, 1100, LARGE))
    assert verdicts_of(report) == ["native"] * 3 + ["degraded"]
    row = report.kernels[-1]
    assert row.basis == "rate"
    assert "similar products in this trace reach 550" in row.reason
    (loss,) = report.degraded
    (saving,) = loss.savings
    assert saving.basis == "sibling kernels"
    assert saving.saved_us == pytest.approx(850)


def test_a_rate_within_a_factor_of_4_is_not_degraded():
    assert verdicts(*LIKE, kernel(SLOW, 950, LARGE)) == ["native"] * 4


def test_one_slow_run_of_many_equal_ones_is_not_degraded():
    runs = [kernel(made.NATIVE, 250, LARGE) for _ in range(4)] + [kernel(made.NATIVE, 9000, LARGE)]
    assert verdicts(*runs) == ["native"] * 5


def test_far_under_the_roofline_a_large_product_is_degraded_without_siblings():
    slow, fast = 13 * LARGE_FLOPS / 989.4e6, 11 * LARGE_FLOPS / 989.4e6
    assert verdicts(kernel(made.NATIVE, slow, LARGE)) == ["degraded"]
    assert verdicts(kernel(made.NATIVE, fast, LARGE)) == ["native"]


def test_small_and_memory_bound_products_are_not_judged_by_rate():
    small, thin = mm(64, 64, 64), mm(1 << 22, 8, 8)
    report = report_of(kernel(made.NATIVE, 19, small), kernel(made.NATIVE, 5000, thin))
    assert verdicts_of(report) == ["native", "native"]


def test_a_smaller_tile_or_an_older_generation_alone_is_not_evidence():
    wmma = "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8"
    assert verdicts(kernel(wmma, 6, mm(128, 512, 512))) == ["native"]


# -- losses ---------------------------------------------------------------------------------------------------------


def test_fp32_on_an_a100_is_eligible_with_its_roofline():
    op = mm(4096, 4096, 4096, "float")
    report = report_of(kernel(made.SGEMM, 8000, op, module="head"), device=made.A100)
    (loss,) = report.eligible
    assert (loss.dtype, loss.module, loss.m, loss.calls) == ("float32", "head", 4096, 1)
    assert loss.cause_id == "tf32-off-cuBLAS"
    by_way = {saving.way: saving for saving in loss.savings}
    assert by_way["TF32"].saved_us == pytest.approx(8000 - LARGE_FLOPS / 156e6)
    assert by_way["FP16 or BF16"].saved_us == pytest.approx(8000 - LARGE_FLOPS / 312e6)
    assert {saving.basis for saving in loss.savings} == {"roofline"}
    assert by_way["TF32"].limited_by == "math"


def test_fp32_next_to_tf32_means_tf32_was_allowed_but_not_chosen():
    report = report_of(
        kernel(made.TF32, 100, mm(512, 512, 512, "float")),
        kernel(made.SGEMM, 100, mm(512, 511, 512, "float")),
        device=made.A100,
    )
    (loss,) = report.eligible
    assert loss.cause_id == "tf32-not-chosen-cuBLAS"


def test_fp32_on_volta_can_only_go_to_fp16():
    report = report_of(kernel("volta_sgemm_128x64_nn", 100, mm(512, 512, 512, "float")), device=made.V100)
    (loss,) = report.eligible
    assert [saving.way for saving in loss.savings] == ["FP16"]
    assert loss.cause_id == "fp32"


def test_fp16_on_cuda_cores_is_joined_with_the_shape_rule():
    op = mm(512, 511, 512, "c10::Half")
    report = report_of(kernel(made.HGEMM, 100, op), device=made.A100)
    (loss,) = report.eligible
    assert "output's rows are 1,022 bytes apart" in loss.cause


@pytest.mark.parametrize(
    ("name", "op", "device"),
    [
        ("gemv2T_kernel_val<int, float>", mm(1, 512, 512, "float"), made.A100),
        (made.SGEMM, mm(1, 512, 512, "float"), made.A100),
        ("ampere_zgemm_64x64_nn", None, made.A100),
        (made.SGEMM, mm(512, 512, 512, "float"), made.GP100),
        (made.SGEMM, mm(512, 512, 512, "float"), made.NAMELESS),
    ],
)
def test_products_that_are_not_eligible(name, op, device):
    report = report_of(kernel(name, 100, op), device=device)
    assert verdicts_of(report) == ["off"]
    assert report.losses == ()


def test_equal_products_of_several_modules_are_one_loss():
    op = mm(512, 512, 512, "float")
    runs = [kernel(made.SGEMM, time, op, module=f"layer.{time}") for time in (5, 20, 10)]
    (loss,) = report_of(*runs, device=made.A100).losses
    assert loss.modules == ("layer.20", "layer.10", "layer.5")
    assert (loss.calls, loss.time_us, loss.fraction) == (3, 35, 1)


def test_a_saving_is_never_below_0():
    # Already at the roofline, so there is no saving.
    op = mm(4096, 4094, 4096)
    (saving,) = report_of(kernel(made.DEGRADED, 130, op)).degraded[0].savings
    assert saving.saved_us == 0


def test_a_lint_of_the_model_gives_the_cause_for_its_module():
    class Row:
        module, role, verdict, reason = "head", "forward", "degraded", "N 30,522 is odd"

    class Lint:
        matmuls = (Row(),)

    def loss(module, is_path=True):
        run = kernel(made.DEGRADED, 40, mm(128, 30522, 512), module=module, module_is_path=is_path)
        return analyse_kernels([trace(run)], shapes=Lint()).losses[0]

    assert "shape lint: N 30,522 is odd" in loss("head").cause
    assert "shape lint" not in loss("tail").cause
    assert "shape lint" not in loss("head", is_path=False).cause


# -- limits ---------------------------------------------------------------------------------------------------------


def test_math_limited_memory_limited_and_the_bound():
    runs = (
        kernel(made.SGEMM, 8000, mm(4096, 4096, 4096, "float")),
        kernel(made.ADD, 1000),
        kernel(made.ADD_BF16, 400),
        kernel(made.LAYOUT, 300),
        kernel(made.NCCL, 200),
        kernel(made.ADD, 100, phase="optimizer"),
    )
    limits = report_of(*runs, device=made.A100, idle_us=500).limits
    assert (limits.math_limited_us, limits.memory_limited_us, limits.communication_us) == (8000, 1800, 200)
    assert limits.idle_us == 500
    least = LARGE_FLOPS / 312e6
    assert limits.saved_at_most_us["products off Tensor Cores"] == pytest.approx(8000 - least)
    assert limits.saved_at_most_us["other FP32 kernels in 16 bits"] == 500
    assert limits.saved_at_most_us["layout conversions"] == 300
    left = 10500 - (8000 - least) - 500 - 300
    assert limits.speedup_at_most == pytest.approx(10500 / left)
    assert limits.kernel_speedup_at_most == pytest.approx(10000 / (left - 500))


def test_native_tf32_can_still_go_to_16_bits():
    limits = report_of(kernel(made.TF32, 100, mm(512, 512, 512, "float")), device=made.A100).limits
    assert limits.saved_at_most_us["native TF32 products in 16 bits"] == pytest.approx(50)


def test_native_16_bit_products_have_no_gain():
    limits = report_of(kernel(made.NATIVE, 100, LARGE)).limits
    assert limits.speedup_at_most == 1


@pytest.mark.parametrize("device", [made.GP100, made.MI300X, made.NAMELESS])
def test_without_known_tensor_cores_there_is_no_bound(device):
    limits = report_of(kernel(made.SGEMM, 100), device=device).limits
    assert (limits.speedup_at_most, limits.kernel_speedup_at_most) == (None, None)


# -- GPUs -----------------------------------------------------------------------------------------------------------


def test_the_named_gpu_overrides_the_traces():
    traces = [trace(kernel(made.SGEMM, 100, mm(512, 512, 512, "float")), device=made.NAMELESS)]
    assert analyse_kernels(traces).losses == ()
    report = analyse_kernels(traces, gpus.named("A100"))
    assert [gpu.name for gpu in report.gpus] == ["A100"]
    assert len(report.losses) == 1


# -- the count that grep gives --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "device", "phrase"),
    [
        ([made.V884] * 12, made.V100, "884 kernels: 12 of 12 GEMMs"),
        (["volta_sgemm_128x64_nn"] * 2, made.V100, "884 kernels: 0 of 2 GEMMs"),
        (
            *([made.V884, "volta_scudnn_128x64_relu_small_nn_v1"], made.V100),
            "884 kernels: 1 of 1 GEMMs, 0 of 1 convolutions",
        ),
        ([made.NATIVE, made.SGEMM], made.A100, "Tensor Core kernels (16816): 1 of 2 GEMMs"),
        ([made.SGEMM], made.A100, "Tensor Core kernels: 0 of 1 GEMMs"),
        (["gemv2T_kernel_val<int, float>"], made.A100, ""),
        ([made.ADD], made.A100, ""),
    ],
)
def test_phrase(names, device, phrase):
    assert report_of(*(kernel(name) for name in names), device=device).phrase == phrase


# -- ranks ----------------------------------------------------------------------------------------------------------


def test_ranks_are_shown_separately_and_together():
    first = trace(kernel(made.NATIVE, 30), rank=0, world_size=2)
    second = trace(kernel(made.NATIVE, 10), kernel(made.TRITON, 30), rank=1, world_size=2)
    report = analyse_kernels([first, second])
    assert [rank.label for rank in report.ranks] == ["rank 0", "rank 1"]
    assert [rank.shares.tensor_core_fraction for rank in report.ranks] == [1, 0.25]
    assert report.tensor_core_fraction == 40 / 70
    (finding,) = [finding for finding in report.findings if finding.id == "ranks-differ"]
    assert "rank 1 has 25%, rank 0 100%" in finding.message


def test_labels_where_ranks_are_not_unique():
    one = trace(kernel(made.NATIVE), rank=0, source="a/x.json")
    report = analyse_kernels([one, dataclasses.replace(one, source="b/x.json"), dataclasses.replace(one, source="")])
    assert [rank.label for rank in report.ranks] == ["a/x.json", "b/x.json", "this profile"]


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (0, "0.00 us"),
        (0.85, "0.85 us"),
        (9.996, "10.0 us"),
        (41.27, "41.3 us"),
        (99.96, "100 us"),
        (999.4, "999 us"),
        (999.6, "1.00 ms"),
        (12_617, "12.6 ms"),
        (3.2e6, "3.20 s"),
        (4e9, "4,000 s"),
    ],
)
def test_durations_have_three_digits(us, words):
    assert duration(us) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.25, "250 ms"),
        (41.27, "41.3 s"),
        (60, "1 min 0 s"),
        (725.6, "12 min 6 s"),
        (3599.6, "1 h 0 min"),
        (9e4, "25 h 0 min"),
    ],
)
def test_the_time_of_a_run_has_its_two_largest_units(seconds, words):
    assert time_taken(seconds) == words


FP32, UNKNOWN = "other FP32 kernels in 16 bits", "other kernels of unknown dtype, were they FP32"


@pytest.mark.parametrize(
    ("cause", "name", "op"),
    [
        (FP32, made.ADD, None),
        (None, made.ADD_BF16, None),
        (UNKNOWN, "triton_poi_fused_add_cos_sin_0", None),
        (FP32, "triton_poi_fused_add_cos_sin_0", mm(1, 1, 1, "float")),
        (None, "triton_poi_fused_add_cos_sin_0", mm(1, 1, 1, "long int")),
        (
            None,
            "void reduce_kernel<512, 1, ReduceOp<bool, func_wrapper_t<bool, and_kernel>, unsigned int, bool, 4> >",
            None,
        ),
        (FP32, "void reduce_kernel<512, 1, ReduceOp<float, func_wrapper_t<bool, or_>, int, bool, 4> >", None),
        (None, "void vectorized_elementwise_kernel<4, FillFunctor<long>, at::detail::Array<char*, 1> >(int)", None),
        (
            None,
            "void vectorized_elementwise_kernel<4, FillFunctor<unsigned char>, at::detail::Array<char*, 1> >(int)",
            None,
        ),
        (None, "void vectorized_elementwise_kernel<4, CUDAFunctorOnSelf_add<int>, Array<char*, 2> >(int)", None),
        # An index type and a flag are not evidence of the values' dtype.
        (UNKNOWN, "void indexing_kernel<OpaqueType<4>, long, (bool)1>(int)", None),
    ],
)
def test_the_saving_of_16_bits_is_listed_by_dtype(cause, name, op):
    saved = report_of(kernel(name, 10, op)).limits.saved_at_most_us
    assert {key: time for key, time in saved.items() if time} == ({cause: 5} if cause else {})


def test_sizes_that_no_tensor_has_cost_the_flops_and_not_the_report():
    huge = 10**200
    op = TraceOp("aten::mm", ((huge, huge), (huge, huge)), None, ("float", "float"), ("", ""))
    wide = TraceOp("aten::mm", ((2**60, 2**60), (2**60, 2**60)), None, ("float", "float"), ("", ""))
    report = report_of(kernel(made.SGEMM, 10, op), kernel(made.NATIVE, 10, wide))
    assert [(row.matmul, row.flops, row.tflops) for row in report.kernels] == [(None, None, None)] * 2
    assert "10000000000" not in report.to_json()
    assert str(report)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_settings_are_unchanged(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        report_of(kernel(made.NATIVE, 10, LARGE))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


# -- verdicts by the operator ---------------------------------------------------------------------------------------


ATTENTION = TraceOp("aten::_flash_attention_forward")


@pytest.mark.parametrize(
    "op", [mm(512, 512, 512), ATTENTION, TraceOp("aten::_scaled_mm"), TraceOp("vllm::unified_attention")]
)
@pytest.mark.parametrize("name", ["acme_kernel", "attn_fwd", "acme_reduce_rows", "acme_copy"])
def test_a_product_without_a_product_by_name_is_unknown(name, op):
    """The only kernel of a product computes that product, whatever its name."""
    (row,) = rows_of(kernel(name, 50, op))
    assert (row.verdict, row.op) == ("unknown", op.name)


def test_only_the_longest_kernel_of_such_a_call_is_unknown():
    runs = [("acme_copy", 5), ("acme_reduce_rows", 50), (made.ADD, 90), (made.NCCL, 99)]
    rows = rows_of(*(kernel(name, time, ATTENTION, call=1) for name, time in runs))
    assert [row.verdict for row in rows] == ["other", "unknown", "other", "other"]
    assert rows[1].basis == "operator"
    assert "aten::_flash_attention_forward" in rows[1].reason


def test_an_unfamiliar_kernel_next_to_a_known_product_is_a_helper_unless_it_is_longer():
    rows = rows_of(
        *(kernel(name, time, LARGE, call=1) for name, time in [(made.NATIVE, 200), ("acme", 20), ("acme_2", 300)])
    )
    assert [(row.verdict, row.basis) for row in rows] == [
        ("native", "name"),
        ("helper", "operator"),
        ("unknown", "name"),
    ]


@pytest.mark.parametrize("op", ["aten::add_", "aten::native_layer_norm", "aten::upsample_linear1d", "_C::rms_norm"])
def test_an_unfamiliar_kernel_of_another_operator_is_not_a_product(op):
    (row,) = rows_of(kernel("acme", 50, TraceOp(op)))
    assert (row.verdict, row.basis) == ("other", "operator")


def test_an_operator_that_encloses_a_product_is_not_judged_by_its_own_kernels():
    """aten::_convolution only adds the bias around cudnn_convolution, and an empty product only fills its result."""
    rows = rows_of(
        kernel("acme_copy", 50, TraceOp("aten::_convolution"), encloses=True), kernel("acme_fill", 5, mm(8, 8, 0))
    )
    assert [row.verdict for row in rows] == ["other", "other"]


def test_each_size_of_product_is_compared_with_the_median_of_similar_sizes():
    sizes = [(64 * (1 + n % 80), 64 * (1 + n // 80), 4096) for n in range(4000)]
    products = [mm(*size) for size in sizes]
    # Between 300 and 390 TFLOP/s on an H100.
    times = [2 * m * n * k / (3e8 + 3e7 * (place % 4)) for place, (m, n, k) in enumerate(sizes)]
    runs = (kernel(made.NATIVE, times[place % 4000], products[place % 4000]) for place in range(20_000))
    rows = rows_of(*runs)
    rates = SiblingRates(rows)
    found = {row.flops: rates.of(row) for row in rows}
    flops = rows[0].flops
    alike = [row.tflops for row in rows if flops / SIMILAR <= row.flops <= flops * SIMILAR]
    assert found[flops] == statistics.median(alike)
