"""Ranges of gradients: flushing, flushing before counting, overflow, conflicting layers and drift."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import FLOAT16, FLOAT32, FloatFormat, floor_log2
from mpinspect.ranges.analysis.drift import moved
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.precision import damped_by_epsilon, holds_without_scale
from mpinspect.ranges.analysis.scale_advice import Decision, Loss
from mpinspect.ranges.analysis.scale_window import HEADROOM
from mpinspect.ranges.analysis.scale_words import in_steps
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.faults.name.case import MOST_LAYERS_LISTED, Case, FP32Weights
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.scaler_missing import crowded, divisors
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT_GRADIENT, phrase
from mpinspect.ranges.records import WeightGrowth
from mpinspect.ranges.session import Session
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import by_number, filled, scale_of, some, steps_named, with_power


class _Spared(Sentences):
    """The reason why a run needs no warning."""

    HOLDS = "{holds}"
    OWN_SCALE_SERVES = "The run's own loss scale serves it."
    OWN_SCALE_SERVES_MANY = "The run's own loss scale serves them."
    LAST_SCALE_SERVES = "The run's last loss scale, {last_scale:scale}, is small enough."


def _gradients(case: Case) -> list[LayerReport]:
    """Return the reports of the gradients that have a finite value other than zero."""
    return [layer for layer in case.layers if layer.kind in GRADIENT_KINDS and layer.range_offset is not None]


# -- without a known scale ----------------------------------------------------------------------------------------------


class _Unknown(Sentences):
    AS_THEY_ARRIVED = (
        "The loss scale of a backward is not known: the gradients' ranges are of the values as they arrived."
    )
    GIVE = "Give the inspector the scaler (scalers=...) or, where the loop scales by hand, the scale (loss_scale=...)."


def _scale_unknown(case: Case) -> Iterator[Found]:
    """A loss scale that is not known.

    False alarms: A loop that scales by hand is reported until the inspector is given the scale.
    """
    if not case.progress.scale_known:
        # Other backwards of the run have a scaler, or a loop by hand has a finding of its own.
        is_known_elsewhere = bool(case.scalers) and any(change.scale for change in case.progress.scales)
        is_mild = is_known_elsewhere or divisors(case) is not None
        reason = {"reason": case.advised.advice.reason}
        yield Found(_Unknown.AS_THEY_ARRIVED, reason, fix=_Unknown.GIVE.when(not is_mild), is_mild=is_mild)


class _Diverged(Sentences):
    REASON = "{reason}"
    NOT_GROWN = (
        "The weights have not grown beyond measure: look first at the data of the steps where it begins. Train at a lower "
        "learning rate, with a warm-up or with clipped gradients."
    )
    LOWER_RATE = "Train at a lower learning rate, with a warm-up or with clipped gradients."


def _training_diverged(case: Case) -> Iterator[Found]:
    """Gradients that grew without bound.

    False alarms: A training that recovers later is reported until its gradients are small again.
    """
    if case.advised.diverged:
        yield Found(
            _Diverged.REASON,
            {},
            {"reason": case.advised.advice.reason},
            _Diverged.LOWER_RATE.when(case.has(WeightGrowth)) or _Diverged.NOT_GROWN,
        )


# -- too small ----------------------------------------------------------------------------------------------------------


class _Flushed(Sentences):
    WORST = (
        "Without loss scaling {format:format} would flush {flushed_fraction:percent} of the non-zero elements of "
        "{tensor}{in_steps}, about {lost_l1_share:percent} of their sum of magnitudes."
    )
    ONE_MORE = "1 more tensor loses more than {limit:percent}{where}."
    MORE = "{more} more tensors lose more than {limit:percent}{where}."
    MULTIPLY = (
        "Multiply the loss by {wanted:.17g}, or begin with that in a dynamic scaler. It depends on the batch size: a mean over "
        "twice as many samples needs twice the scale."
    )


def _gradients_flushed(case: Case) -> Iterator[Found]:
    """Gradients that the format would flush to zero without loss scaling.

    False alarms: A run whose own loss scale serves them, or that holds them in a wider format, is reported as info.
    """
    decision = case.advised.decision
    if decision is None or not decision.suffering:
        return
    worst, *more = decision.suffering
    needed = max(loss.log2_lowest for loss in decision.suffering)
    spared, words = _why_no_alarm(case.session, worst, needed, several=bool(more))
    # If no scale serves every layer, another finding has the fix.
    is_mild = bool(spared) or decision.window.is_empty
    yield Found(
        (_Flushed.WORST, by_number(len(more), _Flushed.ONE_MORE, _Flushed.MORE).when(more), spared),
        {
            "kind": worst.key.kind,
            "flushed_fraction": worst.flushed_fraction,
            "lost_l1_share": worst.lost_l1_share,
            "log2_scale_needed": needed,
            "steps": worst.steps and list(worst.steps),
            "layers": {loss.key.name: loss.lost_l1_share for loss in decision.suffering[:MOST_LAYERS_LISTED]},
            "layers_count": len(decision.suffering),
        },
        {
            **words,
            "format": decision.rules.format.name,
            "tensor": phrase(*worst.key),
            "in_steps": in_steps(worst.steps),
            "more": len(more),
            "limit": decision.rules.tolerance,
            "where": ", over the run or in a part of it" * any(loss.steps for loss in decision.suffering),
            "wanted": scale_of(decision.log2_scale),
        },
        _Flushed.MULTIPLY.when(not is_mild),
        layer=worst.key.name,
        is_mild=is_mild,
    )


def _why_no_alarm(
    session: Session, worst: Loss, needed: int, *, several: bool = False
) -> tuple[_Spared | None, dict[str, object]]:
    """Return why this run needs no warning about a layer (or ``several``) that flushes at scale 1, and the figures.

    None if a warning is due.
    """
    if _runs_at_least(session, needed):
        return _Spared.OWN_SCALE_SERVES_MANY.when(several) or _Spared.OWN_SCALE_SERVES, {}
    return _held_without_scale(session, [worst])


def _held_without_scale(
    session: Session, losses: Sequence[Loss | LayerReport]
) -> tuple[_Spared | None, dict[str, object]]:
    holds = holds_without_scale(session, [loss.key for loss in losses])
    return _Spared.HOLDS.when(holds), {"holds": holds}


def _runs_at_least(session: Session, log2_scale: int) -> bool:
    """Return whether the run's loss scale was known and at least 2^log2_scale in at least 90% of the steps."""
    spans = list(session.progress.scale_spans())
    enough = sum(end - start for scale, start, end in spans if scale and math.log2(scale) >= log2_scale)
    return bool(spans) and enough >= 0.9 * (spans[-1][2] - spans[0][1])


class _Fine(Sentences):
    WEIGHTS = (
        "The weight gradients are fine without loss scaling ({format:format} loses {lost_l1_share:percent} of the sum of "
        "magnitudes in the worst); it is {tensor} that would flush."
    )


def _weight_gradients_fine(case: Case) -> Iterator[Found]:
    """Weight gradients that need no loss scale, while gradients of activations do.

    False alarms: None: it asks for no change.
    """
    decision = case.advised.decision
    if decision is None:
        return
    weights = [loss for loss in decision.losses if loss.key.kind == WEIGHT_GRADIENT]
    others = [loss for loss in decision.suffering if loss.key.kind == ACTIVATION_GRADIENT]
    if not weights or not others or weights[0].log2_lowest > 0:
        return
    yield Found(
        _Fine.WEIGHTS,
        {
            "worst_weight_gradient": weights[0].key.name,
            "lost_l1_share": weights[0].lost_l1_share,
            "flushed_fraction": others[0].flushed_fraction,
        },
        {"format": decision.rules.format.name, "tensor": phrase(*others[0].key)},
        layer=others[0].key.name,
    )


class _Before(Sentences):
    FLUSHED = (
        "Up to {already_flushed_fraction_high:percent} of {tensor} were flushed before they could be counted, being no larger "
        "than 2^{floor_exponent}."
    )
    SOME_WERE_VALUES = "The counts crowd just above that, so some of the zeros are flushed values."
    UNKNOWN = "How many of the zeros are flushed values is not known."
    TAKE_OR_SCALE = "Take the gradients of a few batches in FP32 to see them, or scale the loss."
    TAKE = "Take the gradients of a few batches in FP32 (autocast off, scale 1) to see them."
    TAKE_OR_RUN_AT = (
        "Take the gradients of a few batches in FP32 (autocast off, scale 1) to see them, or run at a loss scale of at least "
        "2^{log2_certain}."
    )


def _already_flushed(case: Case) -> Iterator[Found]:
    """Values flushed before counting that may need a larger scale than the counted ones; a warning if that is likely.

    False alarms: That values were flushed is inferred from the crowd of values just above the flush edge.
    """
    layers = {layer.key: layer for layer in _gradients(case)}
    if not case.progress.scale_known:
        yield from _flushed_on_arrival(layers.values())
    decision = case.advised.decision
    if decision is None or not decision.hides:
        return
    doubtful = [loss for loss in decision.losses if loss.log2_certain > max(loss.log2_lowest, 0) and loss.key in layers]
    if not doubtful:
        return
    worst = max(doubtful, key=lambda loss: (loss.gradient.seen.likely_hidden_l1_share(), loss.log2_certain))
    seen, is_in_window = worst.gradient.seen, worst.log2_certain <= decision.window.log2_highest
    is_likely = seen.likely_hidden_l1_share() > decision.rules.tolerance
    fix = _Before.TAKE_OR_RUN_AT.when(is_in_window) or _Before.TAKE
    found = _were_flushed(layers[worst.key], seen, decision.rules.format, is_likely, len(doubtful), fix)
    yield replace(found, words={**found.words, "log2_certain": worst.log2_certain})


def _flushed_on_arrival(gradients: Collection[LayerReport]) -> Iterator[Found]:
    """Yield a finding if gradients whose loss scale is not known likely lost too much before counting."""
    if likely := crowded(gradients):
        key = max(likely, key=lambda key: likely[key].likely_hidden_l1_share())
        layer = next(layer for layer in gradients if layer.key == key)
        yield _were_flushed(layer, likely[key], FLOAT16, True, len(likely), _Before.TAKE_OR_SCALE)


def _were_flushed(
    layer: LayerReport, seen: Visibility, format: FloatFormat, is_likely: bool, layers: int, fix: _Before
) -> Found:
    """Return the finding on the worst of the layers whose values may have been flushed before counting."""
    return Found(
        (_Before.FLUSHED, _Before.SOME_WERE_VALUES.when(is_likely) or _Before.UNKNOWN),
        {
            "floor_exponent": layer.floor_exponent,
            "already_flushed_fraction_high": (layer.already_flushed_fraction or Interval(0.0, 0.0, 0.0)).high,
            "lost_l1_share_high": seen.lost_l1_share(format).high,
            "lost_l1_share_likely": seen.likely_hidden_l1_share(),
            "layers_count": layers,
        },
        {"tensor": phrase(layer.name, layer.kind)},
        fix,
        layer=layer.name,
        is_mild=not is_likely,
    )


# -- too large ----------------------------------------------------------------------------------------------------------


class _Overflow(Sentences):
    LARGEST = (
        "Without loss scaling {tensor} would overflow {format:format}: the largest{seen} is {largest:.3g}, the format's maximum "
        "is {end:g}."
    )
    MORE = "So would {more} more."
    SMALLER_LOSS = (
        "Make the loss smaller (a mean in place of a sum), begin a GradScaler at {wanted:.17g}, clip these gradients where they "
        "arise, or use BF16."
    )


def _gradients_overflow(case: Case) -> Iterator[Found]:
    """Gradients that overflow the format without loss scaling.

    False alarms: A small share of overflowing steps is normal under a dynamic scaler and is not reported.
    """
    decision = case.advised.decision
    if decision is None or not decision.overflows_unscaled:
        return
    judged = {loss.key for loss in decision.losses}
    over = [layer for layer in _gradients(case) if layer.overflowed and layer.key in judged]
    if not over:
        return
    worst = max(over, key=_largest)
    has_broken = worst.histogram is not None and worst.histogram.nonfinite > 0
    spared, words = _spared_by(decision, over, case)
    yield Found(
        (_Overflow.LARGEST, _Overflow.MORE.when(len(over) > 1), spared),
        {
            "overflowed": worst.overflowed,
            "max_log2_scale": worst.max_log2_scale,
            "layers": [layer.name for layer in over[:MOST_LAYERS_LISTED]],
            "layers_count": len(over),
        },
        {
            **words,
            "tensor": phrase(worst.name, worst.kind),
            "format": decision.rules.format.name,
            "largest": _largest(worst),
            "seen": " finite value seen" * has_broken,
            "end": decision.rules.format.max_finite,
            "more": len(over) - 1,
            "wanted": scale_of(decision.log2_scale),
        },
        _Overflow.SMALLER_LOSS.when(not spared and not decision.window.is_empty),
        layer=worst.name,
        is_mild=bool(spared),
    )


def _largest(layer: LayerReport) -> float:
    return layer.histogram.max_abs if layer.histogram else 0.0


def _spared_by(decision: Decision, over: Sequence[LayerReport], case: Case) -> tuple[_Spared | None, dict[str, object]]:
    spared, words = _held_without_scale(case.session, over)
    last = case.session.last_scale
    if spared is None and last is not None and 0 < last <= scale_of(decision.window.log2_highest):
        return _Spared.LAST_SCALE_SERVES, {"last_scale": last}
    return spared, words


# -- no scale serves all ------------------------------------------------------------------------------------------------


class _Window(Sentences):
    NONE_SERVES = (
        "In {format:format} {large!r} needs a loss scale of at least 2^{lowest}, but {small} above 2^{highest}: no one loss "
        "scale serves {all}."
    )
    AT_LAST_SCALE = (
        "At the run's last scale, {last_scale:scale}, {flushed:percent} of the non-zero elements of "
        "{neediest} are flushed."
    )
    IN_BF16 = (
        "Compute in BF16, which needs no loss scale. If you stay in FP16, compute {needing} in FP32{or_others}, clip the large "
        "gradients where they arise, or scale each branch by itself."
    )
    WEIGH_MORE = "In any case let the part of the loss that trains {needing} weigh more: {damped}."


def _scale_window_empty(case: Case) -> Iterator[Found]:
    """A layer that needs a larger loss scale than another layer can take without overflow.

    False alarms: A run that holds the values of these layers in a wider format is reported as info.
    """
    decision, session = case.advised.decision, case.session
    if decision is None or not decision.window.is_empty:
        return
    large, small, lowest, highest = _at_odds(decision)
    spared, words = _held_without_scale(session, (*decision.needing_more, *decision.overflowing_first))
    needs, scale = decision.neediest, session.last_scale
    damped = damped_by_epsilon(session, needs.gradient.histogram.max_abs or math.inf)
    needing, overflowing = _modules(decision.needing_more), _modules(decision.overflowing_first)
    others = overflowing * (overflowing != needing)
    whose, whom = "gradients overflow", "the whole run"
    if small != large:
        whose, whom = f"{small!r} overflows", "both"
    yield Found(
        (_Window.NONE_SERVES, spared or _Window.AT_LAST_SCALE.when(scale)),
        {"conflicts": [asdict(conflict) for conflict in decision.conflicts]},
        {
            **words,
            "format": decision.rules.format.name,
            "large": large,
            "small": whose,
            "all": whom,
            "lowest": lowest,
            "highest": highest,
            "last_scale": scale,
            "flushed": needs.gradient.histogram.flushed_fraction(decision.rules.format, floor_log2(scale or 1.0)),
            "neediest": phrase(*needs.key),
            "needing": needing,
            "or_others": filled(" (or {} instead)", others),
            "damped": damped,
        },
        (_Window.IN_BF16.when(not spared), _Window.WEIGH_MORE.when(damped and not spared)),
        FP32Weights.in_bf16(case.precision).when(not spared),
        layer=large,
        is_mild=bool(spared),
    )


def _modules(losses: Sequence[Loss]) -> str:
    """Return the modules of these gradients in words."""
    names = (loss.key.name.rpartition(".")[0] if loss.key.kind == WEIGHT_GRADIENT else loss.key.name for loss in losses)
    return some([name or "(the model itself)" for name in dict.fromkeys(names)])


def _at_odds(decision: Decision) -> tuple[str, str, int, int]:
    """Return the layer that needs a large scale, the one that overflows at it (the same if unknown), and their two limits."""
    if decision.conflicts:
        pair = decision.conflicts[0]
        return pair.needs_large, pair.needs_small, pair.log2_lowest, pair.log2_highest
    needs = decision.neediest
    return needs.key.name, needs.key.name, needs.log2_lowest, decision.window.log2_highest


class _Moves(Sentences):
    BY_POWERS = (
        "The largest safe loss scale moves by {powers_of_two} powers of two: {lowest} in {lowest_steps}, {highest} in "
        "{highest_steps}."
    )
    DYNAMIC = "A dynamic loss scale follows it; a static one must fit the steps with the largest gradients."


def _scale_window_moves(case: Case) -> Iterator[Found]:
    """A largest safe loss scale that moves over the run by more than the headroom.

    False alarms: The severity is info.
    """
    decision, advice = case.advised.decision, case.advised.advice
    if decision is None or decision.rules.format.exponent_bits >= FLOAT32.exponent_bits:
        # FP32's range holds them: there is no scale to move.
        return
    powers = moved(advice.blocks)
    if powers <= HEADROOM:
        return
    known = [(block, block.log2_highest) for block in advice.blocks if block.log2_highest is not None]
    (low, lowest), (high, highest) = min(known, key=lambda b: b[1]), max(known, key=lambda b: b[1])
    yield Found(
        _Moves.BY_POWERS,
        {"powers_of_two": powers, "static_scale": advice.static_scale},
        {
            "lowest": with_power(2.0**lowest),
            "lowest_steps": steps_named(low.first_step, low.last_step),
            "highest": with_power(2.0**highest),
            "highest_steps": steps_named(high.first_step, high.last_step),
        },
        _Moves.DYNAMIC,
    )


# -- noise --------------------------------------------------------------------------------------------------------------


class _Noise(Sentences):
    LIKE_NOISE = (
        "The gradients of {names:some} look like the rounding noise of gradients that are zero in theory: ignore them when "
        "choosing a loss scale."
    )
    BIASES = (
        "{names:some} {have} no effect (a normalisation, a softmax or a difference that follows cancels {it}): leave {it} out "
        "(bias=False)."
    )
    MAY_BE_BIASES = (
        "Nothing needs to be done. A bias among them has no effect (a normalisation, a softmax or a difference that follows "
        "cancels it) and can be left out."
    )


def _rounding_noise(case: Case) -> Iterator[Found]:
    """Gradients that are zero in theory, and rounding noise in fact.

    False alarms: The severity is info.
    """
    names = [layer.name for layer in _gradients(case) if layer.rounding_noise]
    if not names or case.advised.diverged:
        return
    are_biases, number = all(name.rpartition(".")[2] == "bias" for name in names), len(names)
    yield Found(
        _Noise.LIKE_NOISE,
        {"layers": names[:MOST_LAYERS_LISTED], "layers_count": len(names)},
        {"names": names, "have": by_number(number, "has", "have"), "it": by_number(number, "it", "them")},
        _Noise.BIASES.when(are_biases) or _Noise.MAY_BE_BIASES,
        layer=names[0],
    )


FAULTS = (
    Fault("scale-unknown", "warning", _scale_unknown, (_Unknown,)),
    Fault("training-diverged", "warning", _training_diverged, (_Diverged,)),
    Fault("scale-window-empty", "warning", _scale_window_empty, (_Window, _Spared)),
    Fault("gradients-flushed", "warning", _gradients_flushed, (_Flushed, _Spared)),
    Fault("weight-gradients-fine", "info", _weight_gradients_fine, (_Fine,)),
    Fault("gradients-already-flushed", "warning", _already_flushed, (_Before,)),
    Fault("gradients-overflow", "warning", _gradients_overflow, (_Overflow, _Spared)),
    Fault("scale-window-moves", "info", _scale_window_moves, (_Moves,)),
    Fault("rounding-noise", "info", _rounding_noise, (_Noise,)),
)
