"""Faults of gradients in FP16 without a scaler, and of scalers that are of no use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32
from mpinspect.ranges.analysis.evidence import survived
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.scale_window import HEADROOM
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility, always_zero
from mpinspect.ranges.faults.name.case import Case, FP32Weights, grouped, is_power_of_two
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.scaling import ALIKE, LOG2_INITIAL, Scaler, log2_of, skips_of
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.records import ChangedBeforeStep, DividedInHalf, MastersGivenSmaller
from mpinspect.ranges.session import DROPPED, TAKEN, Event
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import number_or_power


class _OfNoUse(Sentences):
    NOT_NEEDED = (
        "The run computes in {format:format}, whose range is FP32's, and multiplies its loss by a scale that it does "
        "not need."
    )
    MAY_SKIP = "If something became infinite or NaN, the scaler would silently skip that step."
    SKIPPED = "The scaler skipped {skipped_steps} steps, so that infinities and NaNs went unnoticed."
    TAKE_OUT = "Take the scaler out, or switch it off."
    DISABLED = "# {once}\nscaler = torch.amp.GradScaler(enabled=False)"


def _scaler_of_no_use(case: Case) -> Iterator[Found]:
    """An enabled scaler in a run whose range is FP32's.

    False alarms: A scaler that waits for a switch to FP16 is reported unless it is disabled.
    """
    format = run_format(case.session)
    if not case.scalers or format not in (BFLOAT16, FLOAT32):
        return
    skipped = case.progress.skipped_steps
    yield Found(
        (_OfNoUse.NOT_NEEDED, _OfNoUse.SKIPPED.when(skipped) or _OfNoUse.MAY_SKIP),
        {"format": format.name, "skipped_steps": skipped},
        fix=_OfNoUse.TAKE_OUT,
        code=_OfNoUse.DISABLED,
        is_mild=format != BFLOAT16,
    )


class _Missing(Sentences):
    NO_SCALER = "The run computes in FP16 and no GradScaler was seen."
    DISABLED_ELSEWHERE = (
        "The run computes in FP16 and its {scaler} is disabled: it was made for {made_for}{unless_given}, and the model is on "
        "{devices}. PyTorch disables a scaler whose device is not available, and its scale() returns the loss as it is."
    )
    DISABLED = "The run computes in FP16 and its {scaler} is disabled: its scale() returns the loss as it is."
    BY_HAND = (
        "The gradients that its optimizer gets are {times} times smaller than the backward's, as in a loop that multiplies its "
        "loss by a scale by hand{clips}: the scale is not known{nor_skips}."
    )
    STEPPED_ON_OVERFLOW = "Nothing skips a step that overflows, as step {broken_step} did."
    OVERFLOWED = "Step {broken_step} overflowed, and whether the loop skips such steps is not known."
    FLUSHES_AND_DROPS = (
        "Gradients of 2^-25 and below become zero, and the loop itself drops gradients that overflow, as in step "
        "{broken_step}."
    )
    FLUSHES = "Gradients of 2^-25 and below become zero, and no scaler skips a step that overflows."
    ZEROS = "The weight gradients of {zeros} were zero in all sampled steps."
    CROWD = "Gradients of {crowd:some 3} crowd just above 2^-25, so that some of the zeros are flushed values."
    GIVE_SCALE = "Give the inspector the scale (loss_scale=; mpinspect run: --loss-scale)."
    FP32_WEIGHTS = "Keep FP32 weights."
    IN_BF16 = "Compute in BF16, where such gradients are finite and nothing has to be scaled."
    SKIP_BY_HAND = (
        "If the loop scales the loss by hand, give the inspector the scale (loss_scale=; mpinspect run: --loss-scale), and let "
        "the loop skip steps that are not finite."
    )
    SCALE = "Scale the loss."
    ROOM = "The scale 2^{log2_start} is {headroom} powers of two below the largest at which nothing seen overflows; less may do."
    IF_BY_HAND = "If the loop does so by hand, give the inspector the scale (loss_scale=; mpinspect run: --loss-scale)."
    FOR_SCALER = "Keep FP32 weights: GradScaler refuses FP16 gradients."
    FOR_DEVICE = "Make the scaler for the device of the model."
    ENABLE = "Make the scaler with enabled=True."
    ENABLED = "# {once}\nscaler = torch.amp.GradScaler(\n    {device_type}, enabled=True\n)"
    ENABLED_AT = (
        "# {once}\n"
        "scaler = torch.amp.GradScaler(\n    {device_type},\n    init_scale=2.0**{log2_start},\n    enabled=True,\n)"
    )
    SCALED_STEP = (
        "# in place of {at_backward}\n"
        "scaler.scale(loss).backward()\n"
        "# in place of {at_step}\n"
        "scaler.step(optimizer)\n"
        "scaler.update()"
    )


#: By the sentence on the scaler: the change, and the line that makes the scaler, without and with an initial scale.
_MADE: dict[_Missing, tuple[_Missing, _Missing | Scaler, _Missing | Scaler]] = {
    _Missing.NO_SCALER: (_Missing.SCALE, Scaler.NEW, Scaler.BEGINNING_AT),
    _Missing.DISABLED_ELSEWHERE: (_Missing.FOR_DEVICE, Scaler.NEW, Scaler.BEGINNING_AT),
    _Missing.DISABLED: (_Missing.ENABLE, _Missing.ENABLED, _Missing.ENABLED_AT),
}


def _scaler_missing(case: Case) -> Iterator[Found]:
    """An FP16 run in which no scaled loss was seen, or whose scaler is disabled.

    False alarms: A loop that scales by hand is recognised by a loss that it multiplies by a power of two of at least 128 (of at
    least 2 if weights are FP16). With other factors it looks the same until the inspector is given the scale. If all gradients
    reach the optimizer or its masters divided by one factor, the severity is info.
    """
    if not case.precision.weights or run_format(case.session) != FLOAT16 or not case.progress.backwards or case.scalers:
        return
    if any(change.scale not in (1.0, None) for change in case.progress.scales):
        # The loop scales by hand.
        return
    overflowed = [event for event in skips_of(case) if event.value == "inf" and event.forward_finite]
    dropped = next((event for event in overflowed if event.story == DROPPED), None)
    by_hand = divisors(case)
    if by_hand is not None:
        yield _scaled_by_hand(by_hand, dropped, case)
    elif overflowed and dropped is None:
        yield _unskipped(overflowed, case)
    else:
        yield _unscaled(dropped, case)


def _disabled(case: Case) -> tuple[_Missing, dict[str, object]]:
    """Return the sentence on the missing scaler, and its words: the scaler may be there and disabled."""
    scaler = next(iter(case.precision.scalers), None)
    if scaler is None:
        return _Missing.NO_SCALER, {}
    devices = case.session.info.devices
    is_elsewhere = bool(scaler.device and devices) and scaler.device not in devices
    unless = ", the default of torch.amp.GradScaler()" * (scaler.device == "cuda")
    words: dict[str, object] = {"scaler": scaler.type, "made_for": scaler.device, "devices": devices}
    return _Missing.DISABLED_ELSEWHERE.when(is_elsewhere) or _Missing.DISABLED, {**words, "unless_given": unless}


def crowded(gradients: Iterable[LayerReport]) -> dict[TensorKey, Visibility]:
    """Return the gradients, as they arrived, whose counts crowd just above the flush edge: they likely lost too much."""
    hiding = {
        layer.key: Visibility(layer.histogram, layer.floor_exponent)
        for layer in gradients
        if layer.kind in GRADIENT_KINDS
        and layer.histogram is not None
        and layer.floor_exponent is not None
        and not layer.rounding_noise
    }
    return {key: seen for key, seen in hiding.items() if seen.likely_hidden_l1_share() > LOST_L1_TOLERANCE}


def _evidence(case: Case) -> dict[str, object]:
    return {"backwards": case.progress.backwards, "recommended": case.advised.advice.recommended}


def _scaled_by_hand(divisors: tuple[float, float], dropped: Event | None, case: Case) -> Found:
    least, most = (number_or_power(_rounded(divisor)) for divisor in divisors)
    times, clips = least, ""
    if least != most:
        times = f"{least} to {most}"
        clips = ", which it changes" if all(map(is_power_of_two, divisors)) else ", and may clip"
    no_scaler, words = _disabled(case)
    return Found(
        (no_scaler, _Missing.BY_HAND),
        {"backwards": case.progress.backwards, "least": divisors[0], "most": divisors[1]},
        {
            **words,
            "times": times,
            "clips": clips,
            "nor_skips": ", nor whether the loop skips steps that overflow" * (not dropped),
        },
        _Missing.GIVE_SCALE,
        is_mild=True,
    )


def _rounded(divisor: float) -> float:
    """Return the nearest power of two if the number is one up to rounding, else four significant digits of it."""
    if is_power_of_two(divisor):
        return 2.0 ** round(math.log2(divisor))
    return float(f"{divisor:.4g}")


def _unskipped(overflowed: Sequence[Event], case: Case) -> Found:
    first = next((event for event in overflowed if event.story == TAKEN), overflowed[0])
    is_stepped = first.story == TAKEN and not survived(first, case.session)
    in_half = FLOAT16.name in case.precision.weights
    no_scaler, words = _disabled(case)
    return Found(
        (no_scaler, _Missing.STEPPED_ON_OVERFLOW.when(is_stepped) or _Missing.OVERFLOWED),
        _evidence(case),
        {**words, "broken_step": first.step},
        (_Missing.FP32_WEIGHTS.when(in_half), _Missing.IN_BF16),
        FP32Weights.in_bf16(case.precision),
    )


def _unscaled(dropped: Event | None, case: Case) -> Found:
    zeros, crowd = always_zero(case.totals), [key.name for key in crowded(case.layers)]
    no_scaler, words = _disabled(case)
    says = (
        no_scaler,
        _Missing.FLUSHES_AND_DROPS.when(dropped) or _Missing.FLUSHES,
        _Missing.ZEROS.when(zeros),
        _Missing.CROWD.when(crowd),
    )
    words |= {"broken_step": dropped and dropped.step, "zeros": grouped(zeros), "crowd": crowd}
    if case.precision.has_masters:
        # Such loops scale by hand: a GradScaler would unscale the gradients of the masters.
        return Found(says, _evidence(case), words, _Missing.SKIP_BY_HAND)
    recommended = case.advised.advice.recommended
    log2 = round(log2_of(recommended or 1.0))
    has_start = log2 != 0
    if not recommended:
        log2 = max((_room(case) or 0) - HEADROOM, 0)
        has_start = 0 < log2 < LOG2_INITIAL or (log2 > LOG2_INITIAL and bool(zeros or crowd))
    in_half = FLOAT16.name in case.precision.weights
    fix, new, begin = _MADE[no_scaler]
    return Found(
        says,
        _evidence(case),
        {**words, "log2_start": log2, "headroom": HEADROOM},
        (
            _Missing.FOR_SCALER.when(in_half),
            fix,
            _Missing.ROOM.when(has_start and not recommended),
            _Missing.IF_BY_HAND.when(fix is _Missing.SCALE),
        ),
        (
            FP32Weights.IN_FP16.when(in_half),
            begin.when(has_start) or new,
            _Missing.SCALED_STEP.when(fix is _Missing.SCALE),
        ),
    )


def _room(case: Case) -> int | None:
    """Return the largest k such that no gradient, as it arrived, overflows FP16 when multiplied by 2^k; None without any."""
    gradients = [window.histogram for key, window in case.totals.items() if key.kind in GRADIENT_KINDS]
    highest = [k for histogram in gradients if (k := histogram.max_log2_scale(FLOAT16)) is not None]
    return min(highest, default=None)


def divisors(case: Case) -> tuple[float, float] | None:
    """Return the least and largest number by which all gradients were divided on their way to the optimizer, as by a scale.

    None if they were not. A scale is a power of two or stays the same; clipping divides by other numbers in each step, and
    averaging by the number of a step's backwards.
    """
    of_masters = next(case.recorded(MastersGivenSmaller), None)
    if of_masters is not None:
        return of_masters.least, of_masters.most
    in_half = next(case.recorded(DividedInHalf), None)
    if in_half is not None and in_half.factor:
        return 1 / in_half.factor, 1 / in_half.factor
    found = [each for each in case.recorded(ChangedBeforeStep) if not each.masters]
    shared = [1 / each.factor for each in found if each.is_uniform and 0 < each.factor < 1]
    if len(shared) < max(len(found), 2):
        return None
    least, most = min(shared), max(shared)
    is_one = most - least <= ALIKE * least
    are_powers = all(map(is_power_of_two, shared))
    batches = math.ceil(case.progress.backwards / max(case.progress.steps, 1))
    if least <= batches * (1 + ALIKE) or not (is_one or are_powers):
        return None
    return least, most


FAULTS = (
    Fault(
        "scaler-missing-in-float16",
        "warning",
        _scaler_missing,
        (_Missing, Scaler, FP32Weights),
        ("scale-unknown", "gradients-all-zero", "gradients-already-flushed", "asked-gradients-flushed"),
        explains_from="warning",
        is_of_every_step=True,
    ),
    Fault("scaler-in-bfloat16", "warning", _scaler_of_no_use, (_OfNoUse,)),
)
