"""The fault that a computation in FP64 shows: FP32 itself is too coarse."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpinspect.numeric.formats import FLOAT32
from mpinspect.ranges import records
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.infinities import beginning, first_event
from mpinspect.ranges.faults.name.operators import (
    CONCENTRATED,
    expression,
    found_at,
    is_log_of_softmax,
    of_learning_steps,
    origin_of,
    percent_up_to,
)
from mpinspect.reporting.sentences import Sentences

#: The steps that are computed in FP64.
_IN_FP64 = "in one early step, in step 30 and in steps after an infinity or NaN"


class _Coarse(Sentences):
    BREAKS = (
        "In step {measured}, in {place}, {operator} in FP32 is infinite or NaN in {count:count element}. The same computation in "
        "FP64 is finite, up to {largest:.3g}."
    )
    FLUSHES = (
        "In step {step}, in {place}, {operator} in FP32 is zero in all of its {count:count element}. In FP64 they are up to "
        "{largest:.2g}; FP32 flushes magnitudes below 1.4e-45."
    )
    LOGARITHMS = (
        "Compute with logarithms: torch.linalg.slogdet for a determinant, a sum of logarithms for a product. Or divide the "
        "numbers by a scale before."
    )
    SLOGDET = "sign, log = torch.slogdet(matrix)"
    GREW = "FP32's rounding errors grow most in {origin_place}, in {origin_operator}."
    FIRST = "It began in step {step}; step {measured} was computed a second time for these figures."
    OFF = (
        "In step {step}, FP32's rounding puts the gradients of the weights off by {off_by} of their size, compared with "
        "FP64. {off:.0f} of {of:.0f} are off by 10% or more."
    )
    OUTPUTS_OFF = (
        "In step {step}, FP32's rounding puts the model's outputs off by {off_by} of their size, compared with FP64."
    )
    GROWS = "The errors grow most in {place}, in {operator}."
    FP64 = (
        "Compute this line in FP64, and what makes its operands. Or change the formula: subtract a centre or a mean from large "
        "numbers before they are squared, multiplied or added up, and solve least squares by QR in place of normal equations."
    )
    ORIGIN_FP64 = (
        "Compute in FP64 from {origin_place} to {place}. Or change the formula: subtract a centre or a mean from large numbers "
        "before they are squared, multiplied or added up."
    )
    BY_DIFFERENCES = (
        "torch.cdist computes these distances from squares, |a|^2 + |b|^2 - 2ab. Subtract the points' centre before, or have the "
        "distances computed from differences."
    )
    BEYOND = "Its value exceeds FP32's largest number, 3.4e38. Bound it, or compute with its logarithm."
    NO_PRODUCT = 'exact = "donot_use_mm_for_euclid_dist"\ndistances = torch.cdist(\n    a, b, compute_mode=exact\n)'
    DOUBLE = "y = {in_fp64}\n# the result may return to FP32\ny = y.float()"


def _fp32_too_coarse(case: Case) -> Iterator[Found]:
    """FP32 arithmetic whose rounding spoils the gradients, or makes an infinity or NaN that FP64 does not have: numbers that are
    large beside their differences, ill-conditioned systems, sums of very many terms.

    False alarms: The error is measured. Gradients that cancel are small beside their rounding: a step is left out if they are
    smaller than a tenth of another step's, and if the errors grow in the backward.
    """
    broken = next(_broken_in_fp32(case), None)
    if broken is not None:
        yield broken
        return
    for flushed in case.recorded(records.FlushedInFP32):
        code = _Coarse.SLOGDET.when(flushed.names[0] == "_linalg_det")
        yield found_at(flushed, _Coarse.FLUSHES, _Coarse.LOGARITHMS, code or ())
        return
    errors = of_learning_steps(each for each in case.recorded(records.GradientsError) if each.text == FLOAT32.name)
    for off in errors:
        # Gradients that cancel, as at an optimum, are rounding error in any precision: their errors grow in the backward.
        is_of_forward = off.names[2] == "forward"
        if off.error >= records.FP32_OFF and off.share >= CONCENTRATED and is_of_forward:
            words = {"off_by": percent_up_to(off.error), "in_fp64": expression(off.names[0], ".double()")}
            is_grave, is_distance = off.error >= 1, off.names[0] == "_euclidean_dist"
            yield found_at(
                off,
                (_Coarse.OUTPUTS_OFF.when(off.of_outputs) or _Coarse.OFF, _Coarse.GROWS),
                _Coarse.BY_DIFFERENCES.when(is_distance) or _Coarse.FP64,
                _Coarse.NO_PRODUCT.when(is_distance) or _Coarse.DOUBLE,
                words,
                is_grave=is_grave,
                operator=off.names[0],
            )
            return


def _broken_in_fp32(case: Case) -> Iterator[Found]:
    """Yield infinities and NaNs that FP64 does not have, and that do harm."""
    first = first_event(case)
    broke = {event.step for event in case.events if event.forward_finite is False}
    broke |= {each.step for each in case.recorded(records.BrokenLoss)}
    in_backward = {event.step for event in case.events}
    of_softmax = {each.names[5] for each in case.recorded(records.BornInfinite) if is_log_of_softmax(each)}
    for broken in case.recorded(records.BrokenInFP32):
        if not of_softmax.isdisjoint((broken.names[1], *broken.names[5:6])):
            # log_softmax is finite in FP32.
            continue
        if case.progress.steps and broken.step not in (broke if broken.names[2] == "forward" else broke | in_backward):
            # It does no harm, as in a monitor or behind a clamp.
            continue
        is_later, layer, step = beginning(broken, first)
        is_beyond = broken.largest > FLOAT32.max_finite
        origin = None if is_beyond else origin_of(broken)
        fix = _Coarse.BEYOND.when(is_beyond) or _Coarse.ORIGIN_FP64.when(origin) or _Coarse.FP64
        source = origin or broken
        yield found_at(
            broken,
            (_Coarse.BREAKS, _Coarse.GREW.when(origin), _Coarse.FIRST.when(is_later)),
            fix,
            # In FP32 the result would be infinite again.
            _Coarse.DOUBLE.when(not is_beyond),
            {"in_fp64": expression(source.names[0], ".double()")},
            layer=layer,
            origin=origin,
            operator=source.names[0],
            is_grave=first is not None,
            step=step,
        )


class _Updates(Sentences):
    LOST = (
        "In step {step}, FP32 rounds away {lost:percent} of the effect of the updates of {weight!r}: its values are up to "
        "{largest:.3g}, where neighbouring numbers lie {unit:.2g} apart. Without rounding, they would make {share:percent} of "
        "the decrease of the loss in this step."
    )
    OFFSET = "Train the weight's distance from a fixed centre, and add the centre in FP64. Or keep the weight in FP64."
    CENTRE = (
        "# once\ncentre = weight.detach().double().clone()\noffset = torch.nn.Parameter(\n    torch.zeros_like(weight)\n)\n"
        "# where it is used\nvalue = centre + offset.double()"
    )


def _updates_lost_in_fp32(case: Case) -> Iterator[Found]:
    """Updates of a weight that FP32 rounds away, since the weight is large beside them, such as a coordinate in metres.

    False alarms: Weights below 1,024 are left out: they lose updates only once these are small. A larger one may have reached its
    optimum.
    """
    for lost in case.recorded(records.UpdatesLostInFP32):
        words = {
            # Rounding may turn an update round.
            "lost": min(1.0, 1 - lost.rounded / lost.exact),
            "weight": lost.name,
            "largest": lost.largest,
            "share": lost.share,
            "unit": 2.0 ** (math.frexp(lost.largest)[1] - 24),
        }
        yield Found.of(case, [lost], _Updates.LOST, _Updates.OFFSET, _Updates.CENTRE, words=words, layer=lost.name)
        return


FAULTS = (
    Fault(
        "fp32-too-coarse",
        "warning",
        _fp32_too_coarse,
        (_Coarse,),
        ("non-finite-event", "argument-out-of-range", "result-is-rounding-error"),
        explains_from="warning",
        checked=_IN_FP64,
        heading="FP32 is too coarse",
    ),
    Fault("updates-lost-in-fp32", "warning", _updates_lost_in_fp32, (_Updates,), checked=_IN_FP64),
)
