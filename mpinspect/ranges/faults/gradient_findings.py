"""Findings on the ranges of gradients: flushing, flushing before counting, overflow, conflicting layers and drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from mpinspect.numeric.formats import FLOAT16, FLOAT32, FloatFormat, floor_log2
from mpinspect.ranges.analysis.drift import moved
from mpinspect.ranges.analysis.precision import damped_by_epsilon, holds_without_scale
from mpinspect.ranges.analysis.report import LayerReport, LossScaleAdvice
from mpinspect.ranges.analysis.scale_advice import Advised, Decision, Loss
from mpinspect.ranges.analysis.scale_window import HEADROOM
from mpinspect.ranges.analysis.scale_words import in_steps
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT_GRADIENT, phrase
from mpinspect.ranges.session import Session
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import format_name, percent, scale_of, some, steps_named, with_power

#: How many layers the evidence lists.
MOST_LAYERS_LISTED = 20


def gradient_findings(session: Session, layers: Sequence[LayerReport], advised: Advised) -> list[Finding]:
    """Return all findings on gradients, made from the layers' reports and the decision on the loss scale."""
    advice, decision = advised.advice, advised.decision
    gradients = [layer for layer in layers if layer.kind in GRADIENT_KINDS and layer.range_offset is not None]
    found: list[Finding | None] = [] if session.progress.scale_known else [_scale_unknown(advice)]
    if advised.diverged:
        found.append(_diverged(session, advice))
    if not session.progress.scale_known:
        found.append(_flushed_on_arrival(gradients))
    if decision is not None:
        found += [
            _window_empty(session, decision),
            _flushed(session, decision),
            _weights_fine(decision),
            _already_flushed(gradients, decision),
            _overflow(session, gradients, decision),
            # Where FP32's range holds them there is no scale to move.
            _drift(advice) if decision.rules.format.exponent_bits < FLOAT32.exponent_bits else None,
        ]
    if not advised.diverged:
        found.append(_noise(gradients))
    return [finding for finding in found if finding is not None]


def _flushed(session: Session, decision: Decision) -> Finding | None:
    if not decision.suffering:
        return None
    worst, *more = decision.suffering
    needed = max(loss.log2_lowest for loss in decision.suffering)
    spared = why_no_alarm(session, worst, needed, several=bool(more))
    limit = percent(decision.rules.tolerance)
    where = ", over the run or in a part of it" if any(loss.steps for loss in decision.suffering) else ""
    verb = "tensor loses" if len(more) == 1 else "tensors lose"
    others = f" {len(more)} more {verb} more than {limit}{where}." if more else ""
    return Finding(
        "gradients-flushed",
        # That no scale serves all is what there is to mend.
        "info" if spared or decision.window.is_empty else "warning",
        worst.key.name,
        f"Without loss scaling {format_name(decision.rules.format.name)} would flush {percent(worst.flushed_fraction)} of the "
        f"non-zero elements of {phrase(*worst.key)}{in_steps(worst.steps)}, about {percent(worst.lost_l1_share)} of their sum of "
        f"magnitudes.{others}" + (f" {spared}" if spared else ""),
        {
            "kind": worst.key.kind,
            "flushed_fraction": worst.flushed_fraction,
            "lost_l1_share": worst.lost_l1_share,
            "log2_scale_needed": needed,
            "steps": list(worst.steps) if worst.steps else None,
            "layers": {loss.key.name: loss.lost_l1_share for loss in decision.suffering[:MOST_LAYERS_LISTED]},
            "layers_count": len(decision.suffering),
        },
        "" if spared else _scale_fix(decision),
    )


def _scale_fix(decision: Decision) -> str:
    """Return how to apply the recommended loss scale; "" if no scale serves every layer, which another finding says."""
    if decision.window.is_empty:
        return ""
    return (
        f"Multiply the loss by {scale_of(decision.log2_scale):.17g}, or begin with that in a dynamic scaler. The batch size is "
        "part of it: a mean over twice as many samples needs twice the scale."
    )


def why_no_alarm(session: Session, worst: Loss, needed: int, *, several: bool = False) -> str:
    """Return why this run needs no warning about a layer (or ``several``) that flushes at scale 1; "" if one is due."""
    if runs_at_least(session, needed):
        return f"The run's own loss scale serves {'them' if several else 'it'}."
    return holds_without_scale(session, [worst.key])


def runs_at_least(session: Session, log2_scale: int) -> bool:
    """Return whether the run's loss scale was known and at least 2^log2_scale in at least 90% of the steps."""
    spans = list(session.progress.scale_spans())
    enough = sum(end - start for scale, start, end in spans if scale and math.log2(scale) >= log2_scale)
    return bool(spans) and enough >= 0.9 * (spans[-1][2] - spans[0][1])


def _weights_fine(decision: Decision) -> Finding | None:
    weights = [loss for loss in decision.losses if loss.key.kind == WEIGHT_GRADIENT]
    others = [loss for loss in decision.suffering if loss.key.kind == ACTIVATION_GRADIENT]
    if not weights or not others or weights[0].log2_lowest > 0:
        return None
    worst, worst_weight, format = others[0], weights[0], format_name(decision.rules.format.name)
    return Finding(
        "weight-gradients-fine",
        "info",
        worst.key.name,
        f"The weight gradients are fine without loss scaling ({format} loses {percent(worst_weight.lost_l1_share)} of the sum of "
        f"magnitudes in the worst); it is {phrase(*worst.key)} that would flush.",
        {
            "worst_weight_gradient": worst_weight.key.name,
            "lost_l1_share": worst_weight.lost_l1_share,
            "flushed_fraction": worst.flushed_fraction,
        },
    )


def _flushed_on_arrival(gradients: Sequence[LayerReport]) -> Finding | None:
    """Return a finding if gradients whose loss scale is not known likely lost too much before counting."""
    hiding = {
        layer.key: Visibility(layer.histogram, layer.floor_exponent)
        for layer in gradients
        if layer.histogram is not None and layer.floor_exponent is not None and not layer.rounding_noise
    }
    likely = {key: seen for key, seen in hiding.items() if seen.likely_hidden_l1_share() > LOST_L1_TOLERANCE}
    if not likely:
        return None
    key = max(likely, key=lambda key: likely[key].likely_hidden_l1_share())
    layer = next(layer for layer in gradients if layer.key == key)
    return _were_flushed(
        layer,
        likely[key],
        FLOAT16,
        True,
        len(likely),
        "Take the gradients of a few batches in FP32 to see them, or scale the loss.",
    )


def _already_flushed(gradients: Sequence[LayerReport], decision: Decision) -> Finding | None:
    """Return a finding if values flushed before counting may need a larger scale than the counted ones; a warning if likely."""
    if not decision.hides:
        return None
    layers = {layer.key: layer for layer in gradients}
    doubtful = [loss for loss in decision.losses if loss.log2_certain > max(loss.log2_lowest, 0) and loss.key in layers]
    if not doubtful:
        return None
    worst = max(doubtful, key=lambda loss: (loss.gradient.seen.likely_hidden_l1_share(), loss.log2_certain))
    seen = worst.gradient.seen
    larger = (
        f", or run at a loss scale of at least 2^{worst.log2_certain}."
        if worst.log2_certain <= decision.window.log2_highest
        else "."
    )
    return _were_flushed(
        layers[worst.key],
        seen,
        decision.rules.format,
        seen.likely_hidden_l1_share() > decision.rules.tolerance,
        len(doubtful),
        f"Take the gradients of a few batches in FP32 (autocast off, scale 1) to see them{larger}",
    )


def _were_flushed(
    layer: LayerReport, seen: Visibility, format: FloatFormat, alarm: bool, layers: int, fix: str
) -> Finding:
    """Return the finding on the worst of the layers whose values may have been flushed before counting."""
    share = layer.already_flushed_fraction.high if layer.already_flushed_fraction else 0.0
    return Finding(
        "gradients-already-flushed",
        "warning" if alarm else "info",
        layer.name,
        f"Of {phrase(layer.name, layer.kind)} up to {percent(share)} were flushed before they could be counted, being no "
        f"larger than 2^{layer.floor_exponent}; "
        + (
            "the counts crowd just above that, so some of the zeros were values."
            if alarm
            else "how many of them is not known."
        ),
        {
            "floor_exponent": layer.floor_exponent,
            "already_flushed_fraction_high": share,
            "lost_l1_share_high": seen.lost_l1_share(format).high,
            "lost_l1_share_likely": seen.likely_hidden_l1_share(),
            "layers_count": layers,
        },
        fix,
    )


def _overflow(session: Session, gradients: Sequence[LayerReport], decision: Decision) -> Finding | None:
    judged = {loss.key for loss in decision.losses}
    over = [layer for layer in gradients if layer.overflowed and layer.key in judged]
    if not over or not decision.overflows_unscaled:
        # A small share of overflowing steps is normal under a dynamic scaler; the layers' reports still show them.
        return None
    format = decision.rules.format
    worst = max(over, key=lambda layer: layer.histogram.max_abs if layer.histogram else 0.0)
    finite = " finite one seen" if worst.histogram and worst.histogram.nonfinite else ""
    others = f" So would {len(over) - 1} more." if len(over) > 1 else ""
    spared = holds_without_scale(session, [layer.key for layer in over])
    last = session.last_scale
    if not spared and last is not None and 0 < last <= scale_of(decision.window.log2_highest):
        spared = f"The run's last loss scale, {with_power(last)}, is small enough."
    fix = (
        "Make the loss smaller (a mean in place of a sum), begin a GradScaler at "
        f"{scale_of(decision.log2_scale):.17g}, clip these gradients where they arise, or use BF16."
    )
    return Finding(
        "gradients-overflow",
        "info" if spared else "warning",
        worst.name,
        f"Without loss scaling {phrase(worst.name, worst.kind)} would overflow {format_name(format.name)}: the largest"
        f"{finite} is {worst.histogram.max_abs if worst.histogram else 0:.3g}, the format ends at {format.max_finite:g}.{others}"
        + (f" {spared}" if spared else ""),
        {
            "overflowed": worst.overflowed,
            "max_log2_scale": worst.max_log2_scale,
            "layers": [layer.name for layer in over[:MOST_LAYERS_LISTED]],
            "layers_count": len(over),
        },
        "" if spared or decision.window.is_empty else fix,
    )


def _window_empty(session: Session, decision: Decision) -> Finding | None:
    if not decision.window.is_empty:
        return None
    large, small, lowest, highest = _at_odds(decision)
    overflow, whom = (f"{small!r} overflows", "both") if small else ("gradients overflow", "the whole run")
    spared = holds_without_scale(session, [loss.key for loss in (*decision.needing_more, *decision.overflowing_first)])
    return Finding(
        "scale-window-empty",
        "info" if spared else "warning",
        large,
        f"In {format_name(decision.rules.format.name)} {large!r} needs a loss scale of at least 2^{lowest}, but {overflow} above "
        f"2^{highest}: no one loss scale serves {whom}."
        + (f" {spared}" if spared else _at_last_scale(session, decision)),
        {"conflicts": [asdict(conflict) for conflict in decision.conflicts]},
        "" if spared else _ways_out(session, decision),
    )


def _at_last_scale(session: Session, decision: Decision) -> str:
    """Return a sentence on what the gradient that needs the largest scale loses at the run's last one; "" if that is unknown."""
    needs, scale = decision.neediest, session.last_scale
    if not scale:
        return ""
    flushed = needs.gradient.histogram.flushed_fraction(decision.rules.format, floor_log2(scale))
    which = f"the non-zero elements of {phrase(*needs.key)}"
    return f" At the run's last scale, {with_power(scale)}, {percent(flushed)} of {which} are flushed."


def _ways_out(session: Session, decision: Decision) -> str:
    """Return the alternatives to take if no loss scale serves every layer."""
    damped = damped_by_epsilon(session, decision.neediest.gradient.histogram.max_abs or math.inf)
    large, small = (_modules(losses) for losses in (decision.needing_more, decision.overflowing_first))
    instead = f" (or {small} instead)" if small and small != large else ""
    return (
        f"Compute {large} in FP32{instead}, clip the large gradients where they arise, scale each branch by itself, or use "
        "BF16, which needs no scale."
        + (f" In any case let the part of the loss that trains {large} weigh more: {damped}." if damped else "")
    )


def _modules(losses: Sequence[Loss]) -> str:
    """Return the modules of these gradients in words."""
    names = (loss.key.name.rpartition(".")[0] if loss.key.kind == WEIGHT_GRADIENT else loss.key.name for loss in losses)
    return some([name or "(the model itself)" for name in dict.fromkeys(names)])


def _at_odds(decision: Decision) -> tuple[str, str, int, int]:
    """Return the layer that needs a large scale, the one that overflows at it ("": same or unknown), and their two limits."""
    if decision.conflicts:
        pair = decision.conflicts[0]
        small = "" if pair.needs_large == pair.needs_small else pair.needs_small
        return pair.needs_large, small, pair.log2_lowest, pair.log2_highest
    needs = decision.neediest
    return needs.key.name, "", needs.log2_lowest, decision.window.log2_highest


def _scale_unknown(advice: LossScaleAdvice) -> Finding:
    return Finding(
        "scale-unknown",
        "warning",
        "",
        "The loss scale of a backward is not known: the gradients' ranges are those of the gradients as they arrived.",
        {"reason": advice.reason},
        "Give the inspector the scaler (scalers=...) or, where the loop scales by hand, the scale (loss_scale=...).",
    )


def _diverged(session: Session, advice: LossScaleAdvice) -> Finding:
    has_grown = any(each.what == "weight-growth" for each in session.measurements)
    first = (
        ""
        if has_grown
        else "The weights have not grown beyond measure: look first at the data of the steps where it begins. "
    )
    return Finding(
        "training-diverged",
        "warning",
        "",
        advice.reason,
        {},
        f"{first}Train at a lower learning rate, with a warm-up or with clipped gradients.",
    )


def _drift(advice: LossScaleAdvice) -> Finding | None:
    blocks, powers_moved = advice.blocks, moved(advice.blocks)
    if powers_moved <= HEADROOM:
        return None
    known = [(block, block.log2_highest) for block in blocks if block.log2_highest is not None]
    (low, lowest), (high, highest) = min(known, key=lambda b: b[1]), max(known, key=lambda b: b[1])
    return Finding(
        "scale-window-moves",
        "info",
        "",
        f"The largest safe loss scale moves by {powers_moved} powers of two: {with_power(2.0**lowest)} in "
        f"{steps_named(low.first_step, low.last_step)}, {with_power(2.0**highest)} in "
        f"{steps_named(high.first_step, high.last_step)}.",
        {"powers_of_two": powers_moved, "static_scale": advice.static_scale},
        "A dynamic loss scale follows it; a static one must fit the steps with the largest gradients.",
    )


def _noise(gradients: Sequence[LayerReport]) -> Finding | None:
    names = [layer.name for layer in gradients if layer.rounding_noise]
    if not names:
        return None
    has, it = ("has", "it") if len(names) == 1 else ("have", "them")
    cancels = f"a normalisation, a softmax or a difference that follows cancels {it}"
    all_biases = all(name.rpartition(".")[2] == "bias" for name in names)
    return Finding(
        "rounding-noise",
        "info",
        names[0],
        f"The gradients of {some(names)} look like the rounding noise of gradients that are zero in theory: ignore them "
        "when choosing a loss scale.",
        {"layers": names[:MOST_LAYERS_LISTED], "layers_count": len(names)},
        f"{some(names)} {has} no effect ({cancels}): leave {it} out (bias=False)."
        if all_biases
        else f"Nothing needs to be done. A bias among them has no effect ({cancels}) and can be left out.",
    )
