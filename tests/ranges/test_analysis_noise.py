"""Gradients that are zero in theory: biases before BatchNorm or softmax."""

import pytest
from analysis_sessions import activation, session_of, spread, weight, window_of

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.noise import without_noise
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey

STEPS, ROWS, CHANNELS = 100, 4096, 32
BIAS = TensorInfo("conv.bias", "weight_gradient", "conv", "Conv2d", (CHANNELS,), "float32")
#: The gradient of a convolution's output: 4,096 positions x 32 channels per step, with magnitudes near 2^-13. One bias
#: element sums 4,096 of these magnitudes, about 2^-13 * 1.5 * 4,096 = 0.75.
OUTPUT = spread(
    {-14: STEPS * ROWS * CHANNELS // 4, -13: STEPS * ROWS * CHANNELS // 2, -12: STEPS * ROWS * CHANNELS // 4}
)
KERNEL = spread({-8: STEPS * CHANNELS * 288})


def bias_at(exponent: int):
    return spread(
        {exponent - 1: STEPS * CHANNELS // 4, exponent: STEPS * CHANNELS // 2, exponent + 1: STEPS * CHANNELS // 4}
    )


def report_on(tensors, infos=(BIAS,)):
    return analyse(session_of(tensors, steps=STEPS, infos=infos))


def layer(report, name):
    return next(layer for layer in report.layers if layer.name == name)


@pytest.mark.parametrize(("exponent", "is_noise"), [(-24, True), (-22, True), (-14, False), (-7, False)])
def test_a_bias_gradient_far_below_the_sum_of_its_terms_is_noise(exponent, is_noise):
    # Rounding errors in FP32 are about 2^-24; terms of random sign would sum to 0.75 / sqrt(4096) = 2^-6.4.
    report = report_on(
        {activation("conv"): OUTPUT, weight("conv.weight"): KERNEL, weight("conv.bias"): bias_at(exponent)}
    )
    assert layer(report, "conv.bias").rounding_noise == is_noise
    assert not layer(report, "conv.weight").rounding_noise
    assert not layer(report, "conv").rounding_noise


def test_noise_changes_neither_the_window_nor_the_severity():
    noisy = report_on({activation("conv"): OUTPUT, weight("conv.weight"): KERNEL, weight("conv.bias"): bias_at(-27)})
    without = report_on({activation("conv"): OUTPUT, weight("conv.weight"): KERNEL}, infos=())
    assert layer(noisy, "conv.bias").flushed_fraction.estimate > 0.5
    assert noisy.loss_scale.needed is False
    assert (noisy.loss_scale.lowest, noisy.loss_scale.highest) == (
        without.loss_scale.lowest,
        without.loss_scale.highest,
    )
    assert [finding.severity for finding in noisy.findings] == ["info"]
    assert noisy.findings[0].id == "rounding-noise"
    verdicts = {(verdict.format, verdict.kind): verdict for verdict in noisy.formats}
    assert verdicts["float16", "weight_gradient"].fits


def test_leaving_out_a_bias_without_effect_is_suggested():
    report = report_on({activation("conv"): OUTPUT, weight("conv.weight"): KERNEL, weight("conv.bias"): bias_at(-27)})
    finding = report.findings[0]
    assert finding.message.endswith("ignore them when choosing a loss scale.")
    assert finding.fix.startswith("'conv.bias' has no effect (")
    assert finding.fix.endswith("leave it out (bias=False).")
    assert "serves every gradient seen, rounding noise apart, without overflow" in report.loss_scale.reason


def test_noise_makes_no_conflict():
    # The scale that the noise would need overflows the activation gradients of another layer.
    report = report_on(
        {activation("conv"): OUTPUT, weight("conv.bias"): bias_at(-40), activation("head"): spread({10: 1000})}
    )
    assert report.loss_scale.conflicts == ()


def test_terms_rounded_to_fp16_leave_larger_noise():
    # The rule on the output's gradient decides, since there are no counts of the kernel's.
    for exponent, is_noise in ((-16, True), (-7, False)):
        tensors = {
            activation("conv"): window_of(OUTPUT, STEPS, passed_through="float16", floor_exponent=-41),
            weight("conv.bias"): window_of(bias_at(exponent), STEPS, passed_through="float16", floor_exponent=-41),
        }
        assert layer(report_on(tensors), "conv.bias").rounding_noise == is_noise


def test_a_bias_is_compared_with_the_weight_if_the_outputs_gradient_is_unknown():
    for exponent, is_noise in ((-30, True), (-20, False)):
        report = report_on({weight("conv.weight"): KERNEL, weight("conv.bias"): bias_at(exponent)})
        assert layer(report, "conv.bias").rounding_noise == is_noise
    assert not layer(report_on({weight("conv.bias"): bias_at(-40)}), "conv.bias").rounding_noise


def test_only_plain_biases_can_be_noise():
    """A fused bias of another name is not added at the output, and a matrix is not a sum over the output."""
    for name, shape in (
        ("conv.bias_ih_l0", (CHANNELS,)),
        ("conv.in_proj_bias", (CHANNELS,)),
        ("conv.bias", (CHANNELS, 1)),
    ):
        info = TensorInfo(name, "weight_gradient", "conv", "LSTM", shape, "float32")
        report = report_on({activation("conv"): OUTPUT, weight(name): bias_at(-30)}, infos=(info,))
        assert not layer(report, name).rounding_noise


def test_noise_in_a_third_of_a_fused_bias_does_not_raise_the_scale():
    """The query and value parts are 2^-7, and the key part is noise of 2^-35."""
    fused = spread({-35: STEPS * CHANNELS // 3, -7: STEPS * CHANNELS * 2 // 3})
    needy = spread({-26: 10**6, -25: 10**6})
    tensors = {activation("conv"): OUTPUT, weight("conv.bias"): fused, activation("out"): needy}
    report = report_on(tensors)
    assert not layer(report, "conv.bias").rounding_noise
    assert report.loss_scale.needed
    # 2^1 serves "out"; the key part alone would need 2^10.
    assert report.loss_scale.recommended == 2.0


def test_without_noise_removes_counts_below_the_ceiling():
    histogram = spread({-35: 10, -7: 20}, zeros=3, nans=1)
    kept = without_noise(histogram, 2.0**-20)
    assert (kept.nonzero, kept.zeros, kept.nans, kept.min_exponent, kept.max_abs) == (20, 3, 1, -7, histogram.max_abs)
    assert without_noise(histogram, 0.0) is histogram
    assert without_noise(histogram, 1.0).nonzero == 0


def test_a_bias_gradient_of_zeros_is_not_noise():
    report = report_on({activation("conv"): OUTPUT, weight("conv.bias"): spread({}, zeros=STEPS * CHANNELS)})
    assert not layer(report, "conv.bias").rounding_noise
    assert TensorKey("conv.bias", "weight_gradient") == BIAS.key
