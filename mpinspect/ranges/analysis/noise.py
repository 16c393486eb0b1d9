"""Detects gradients that are zero in theory and hold only rounding noise, which a loss scale need not preserve.

A bias before a BatchNorm, or the key part of an attention's bias before the softmax, has no influence on the loss: the
terms of its gradient's sum cancel, and only the sum's rounding error remains. Such a bias seems to need an enormous loss scale.
It can be detected from the counts: a bias's gradient is the sum of the gradients of its layer's output, so the bias gradient's
magnitude can be compared with the sum of the *output gradients'* magnitudes.
"""

from __future__ import annotations

import math

from mpinspect.numeric.exponents import ExponentHistogram, ratio
from mpinspect.numeric.formats import floor_log2
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow

#: An FP32 sum that cancels leaves about 2^-24 of the sum of the terms' magnitudes. Measured, as averages over a run's steps
#: and elements: 2^-25 for a key bias before softmax (1,024 terms), 2^-22.6 for convolutions' biases before BatchNorm (4,096
#: terms); true bias gradients were 2^-5 and more. The smallest to expect, a million terms of random sign, is 2^-10.
FP32_NOISE_SHARE = 2.0**-16
#: Terms rounded to FP16 or BF16 carry errors of up to 2^-9 each that do not cancel: at most this share remains ...
NARROW_NOISE_SHARE = 2.0**-9
#: ... and about 2^-9/sqrt(N) if the errors have random signs. This value over sqrt(N) lies between that and 1/sqrt(N).
NARROW_NOISE_SHARE_OF_ONE_TERM = 2.0**-6
#: If the output's gradients were not captured: the largest ratio of the bias's to the weight's average gradient that counts as
#: noise. A true ratio is that small only with inputs of 2^16; noise in sums of many terms is not detected.
NOISE_SHARE_OF_WEIGHT_GRADIENT = 2.0**-16


def rounding_noise_ceilings(
    infos: dict[TensorKey, TensorInfo], totals: dict[TensorKey, TensorWindow]
) -> dict[TensorKey, float]:
    """Return, for each bias gradient that can be judged, the largest average magnitude that counts as rounding noise.

    Only one-dimensional parameters called "bias" are judged, which their module adds to its output (fused biases like
    ``in_proj_bias`` and LSTM biases are added elsewhere). Each ceiling is an estimate, averaged over the samples.
    """
    ceilings = {}
    for key, info in infos.items():
        window = totals.get(key)
        is_bias = key.kind == WEIGHT_GRADIENT and len(info.shape) == 1 and key.name.rpartition(".")[2] == "bias"
        if not is_bias or window is None or not window.samples or not info.shape[0]:
            continue
        output = totals.get(TensorKey(info.module, ACTIVATION_GRADIENT))
        ceiling = _ceiling_from_output(window, output, info.shape[0])
        if ceiling is None:
            ceiling = _ceiling_from_weight(key, totals)
        if ceiling is not None:
            ceilings[key] = ceiling
    return ceilings


def is_rounding_noise(histogram: ExponentHistogram, ceiling: float) -> bool:
    """Return whether the values' average magnitude is at most the noise ceiling; False without a non-zero value.

    The average is used rather than the maximum: if gradients shrink over a run, an early maximum far exceeds the
    average.
    """
    return 0 < _mean_abs(histogram) <= ceiling


def without_noise(histogram: ExponentHistogram, ceiling: float) -> ExponentHistogram:
    """Return the histogram without the exponents entirely below the ceiling (a fused bias is partly noise)."""
    if not len(histogram.counts) or ceiling <= 0:
        return histogram
    drop = floor_log2(ceiling) - histogram.min_exponent
    if drop <= 0:
        return histogram
    return ExponentHistogram.from_counts(
        histogram.counts[drop:],
        histogram.min_exponent + drop,
        powers_of_two=histogram.powers_of_two[drop:],
        near_top=histogram.near_top[drop:],
        zeros=histogram.zeros,
        infs=histogram.infs,
        nans=histogram.nans,
        max_abs=histogram.max_abs if len(histogram.counts) > drop else None,
    )


def _ceiling_from_output(bias: TensorWindow, output: TensorWindow | None, elements: int) -> float | None:
    """Return the noise share times the sum of |output gradient| per sample and bias element; None without output gradients."""
    if output is None or not output.histogram.nonzero:
        return None
    parts = bias.samples * elements
    terms = max(output.histogram.total / parts, 1.0)
    share = FP32_NOISE_SHARE
    if {bias.passed_through, output.passed_through} != {"float32"}:
        share = max(share, min(NARROW_NOISE_SHARE, NARROW_NOISE_SHARE_OF_ONE_TERM / math.sqrt(terms)))
    return share * output.histogram.sum_abs().estimate / parts


def _ceiling_from_weight(key: TensorKey, totals: dict[TensorKey, TensorWindow]) -> float | None:
    weight = totals.get(TensorKey(f"{key.name.removesuffix('bias')}weight", WEIGHT_GRADIENT))
    if weight is None:
        return None
    return NOISE_SHARE_OF_WEIGHT_GRADIENT * _mean_abs(weight.histogram)


def _mean_abs(histogram: ExponentHistogram) -> float:
    """Return the estimated mean magnitude of the finite elements, zeros included; 0.0 without elements."""
    elements = histogram.nonzero + histogram.zeros
    return ratio(histogram.sum_abs().estimate, elements)
