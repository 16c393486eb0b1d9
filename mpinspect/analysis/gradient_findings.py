"""What the ranges of the gradients say: flushed, flushed already, overflowing, at odds, moving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from mpinspect.analysis.drift import moved
from mpinspect.analysis.finding import Finding
from mpinspect.analysis.report import LayerReport, LossScaleAdvice
from mpinspect.analysis.scale_window import HEADROOM
from mpinspect.analysis.serving import ALARMING_L1_SHARE, LOST_L1_TOLERANCE
from mpinspect.analysis.visibility import Visibility
from mpinspect.analysis.wording import format_name, percent, power, some, tensor
from mpinspect.formats import FloatFormat
from mpinspect.session import ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT_GRADIENT, Session, TensorKey

#: How many layers the evidence lists.
MOST_LAYERS_LISTED = 20


def gradient_findings(
    session: Session, layers: Sequence[LayerReport], advice: LossScaleAdvice, format: FloatFormat
) -> list[Finding]:
    """All findings about gradients, from the layers' reports and the advice."""
    gradients = [layer for layer in layers if layer.kind in GRADIENT_KINDS and layer.range_offset is not None]
    served = [layer for layer in gradients if not layer.rounding_noise]
    if not session.progress.scale_known:
        return [_scale_unknown(advice)]
    found = (
        _flushed(session, served, advice, format),
        _weights_fine(served, format),
        _already_flushed(served, format),
        _overflow(session, gradients, format),
        _window_empty(advice),
        _drift(advice),
        _noise(gradients),
    )
    return [finding for finding in found if finding is not None]


def _lost(layer: LayerReport) -> float:
    return layer.lost_l1_share.estimate if layer.lost_l1_share else 0.0


def _flushed_fraction(layer: LayerReport) -> float:
    return layer.flushed_fraction.estimate if layer.flushed_fraction else 0.0


def _flushed(
    session: Session, served: Sequence[LayerReport], advice: LossScaleAdvice, format: FloatFormat
) -> Finding | None:
    suffering = sorted((layer for layer in served if _lost(layer) > LOST_L1_TOLERANCE), key=_lost, reverse=True)
    if not suffering:
        return None
    worst = suffering[0]
    needed = max(layer.log2_scale_needed or 0 for layer in suffering)
    spared = why_no_alarm(session, worst, needed)
    others = f" {len(suffering) - 1} more layers lose more than {percent(LOST_L1_TOLERANCE)}." if suffering[1:] else ""
    return Finding(
        "gradients-flushed",
        "info" if spared else "warning",
        worst.name,
        f"Without loss scaling {format_name(format.name)} would flush {percent(_flushed_fraction(worst))} of the non-zero "
        f"elements of {tensor(worst.name, worst.kind)}, {percent(_lost(worst))} of their sum of magnitudes.{others}"
        + (f" {spared}" if spared else ""),
        {
            "kind": worst.kind,
            "flushed_fraction": _flushed_fraction(worst),
            "lost_l1_share": _lost(worst),
            "log2_scale_needed": needed,
            "layers": {layer.name: _lost(layer) for layer in suffering[:MOST_LAYERS_LISTED]},
            "layers_count": len(suffering),
        },
        "" if spared else _scale_fix(advice),
    )


def _scale_fix(advice: LossScaleAdvice) -> str:
    if not advice.available or advice.recommended is None:
        return advice.reason
    dynamic = advice.dynamic
    by_itself = (
        f", or a dynamic scaler with init_scale={dynamic.init_scale:g} and growth_interval={dynamic.growth_interval}"
        if dynamic
        else ""
    )
    return (
        f"Multiply the loss by {advice.recommended:g}{by_itself}. The batch size is part of it: a mean over twice as many "
        "samples needs twice the scale."
    )


def why_no_alarm(session: Session, worst: LayerReport, needed: int) -> str:
    """Why a layer that scale 1 fails is no alarm in this run; "" if it is one."""
    if runs_at_least(session, needed):
        return "The run's own loss scale serves it."
    if runs_in_bfloat16(session, [worst]):
        return "The run uses BF16, which holds them without."
    if _lost(worst) < ALARMING_L1_SHARE:
        return "So little has not been seen to change a training; a loss scale would keep it."
    return ""


def runs_in_bfloat16(session: Session, layers: Sequence[LayerReport]) -> bool:
    """Whether the run holds these tensors in BF16, whose range is FP32's."""
    return session.passed_through({TensorKey(layer.name, layer.kind) for layer in layers}) == {"bfloat16"}


def runs_at_least(session: Session, log2_scale: int) -> bool:
    """Whether the run's known loss scale was at least 2^log2_scale in nine steps of ten."""
    changes = session.progress.scales
    if not changes:
        return False
    end = max(session.progress.steps, changes[-1].step + 1)
    ends = [change.step for change in changes[1:]] + [end]
    enough = sum(
        stop - change.step
        for change, stop in zip(changes, ends, strict=True)
        if change.scale and math.log2(change.scale) >= log2_scale
    )
    return enough >= 0.9 * (end - changes[0].step)


def _weights_fine(served: Sequence[LayerReport], format: FloatFormat) -> Finding | None:
    weights = [layer for layer in served if layer.kind == WEIGHT_GRADIENT]
    others = [layer for layer in served if layer.kind == ACTIVATION_GRADIENT and _lost(layer) > LOST_L1_TOLERANCE]
    if not weights or not others or any(_lost(layer) > LOST_L1_TOLERANCE for layer in weights):
        return None
    worst, worst_weight = max(others, key=_lost), max(weights, key=_lost)
    return Finding(
        "weight-gradients-fine",
        "info",
        worst.name,
        f"The weight gradients are fine without loss scaling ({format_name(format.name)} loses "
        f"{percent(_lost(worst_weight))} of the sum of magnitudes in the worst); it is {tensor(worst.name, worst.kind)} "
        "that would flush.",
        {
            "worst_weight_gradient": worst_weight.name,
            "lost_l1_share": _lost(worst_weight),
            "flushed_fraction": _flushed_fraction(worst_weight),
        },
    )


def _already_flushed(served: Sequence[LayerReport], format: FloatFormat) -> Finding | None:
    """Where values flushed before counting may weigh more than the tolerance; a warning where they very likely do."""
    seen = [(layer, Visibility(layer.histogram, layer.floor_exponent)) for layer in served if layer.histogram]
    doubtful = [(layer, view) for layer, view in seen if _hidden_bound(layer, view, format) > LOST_L1_TOLERANCE]
    if not doubtful:
        return None
    worst, view = max(
        doubtful, key=lambda pair: (pair[1].likely_hidden_l1_share(), _hidden_bound(pair[0], pair[1], format))
    )
    likely, bound = view.likely_hidden_l1_share(), _hidden_bound(worst, view, format)
    alarm = likely > LOST_L1_TOLERANCE
    share = worst.already_flushed_fraction.high if worst.already_flushed_fraction else 0.0
    return Finding(
        "gradients-already-flushed",
        "warning" if alarm else "info",
        worst.name,
        f"Of {tensor(worst.name, worst.kind)} up to {percent(share)} were flushed before they could be counted, being no "
        f"larger than 2^{worst.floor_exponent}; "
        + ("the counts crowd just above that, so very likely many." if alarm else "how many of them is not known."),
        {
            "floor_exponent": worst.floor_exponent,
            "already_flushed_fraction_high": share,
            "lost_l1_share_high": bound,
            "lost_l1_share_likely": likely,
            "layers_count": len(doubtful),
        },
        "Take the gradients of a few batches in FP32 (autocast off, scale 1) to see them, or run with a larger loss scale.",
    )


def _hidden_bound(layer: LayerReport, view: Visibility, format: FloatFormat) -> float:
    """Upper bound of the L1 share that the values flushed before counting can have held."""
    if not view.hidden or layer.lost_l1_share is None or layer.histogram is None:
        return 0.0
    return view.lost_l1_share(format).high - layer.histogram.lost_l1_share(format).high


def _overflow(session: Session, gradients: Sequence[LayerReport], format: FloatFormat) -> Finding | None:
    over = [layer for layer in gradients if layer.overflowed]
    if not over:
        return None
    worst = min(over, key=lambda layer: layer.max_log2_scale or 0)
    return Finding(
        "gradients-overflow",
        "info" if runs_in_bfloat16(session, over) else "warning",
        worst.name,
        f"Without loss scaling {tensor(worst.name, worst.kind)} would overflow {format_name(format.name)}: the largest "
        f"is {worst.histogram.max_abs if worst.histogram else 0:.3g}, the format ends at {format.max_finite:g}.",
        {
            "overflowed": worst.overflowed,
            "max_log2_scale": worst.max_log2_scale,
            "layers": [layer.name for layer in over[:MOST_LAYERS_LISTED]],
            "layers_count": len(over),
        },
        "Clip where they arise, divide the loss (a scale below 1; no floor of 1 must stand in its way), or use BF16.",
    )


def _window_empty(advice: LossScaleAdvice) -> Finding | None:
    if not advice.conflicts:
        return None
    worst = advice.conflicts[0]
    same = worst.needs_large == worst.needs_small
    pair = f"{worst.needs_large!r} alone" if same else f"{worst.needs_large!r} and {worst.needs_small!r}"
    return Finding(
        "scale-window-empty",
        "warning",
        worst.needs_large,
        f"No one loss scale serves {pair}: at least 2^{worst.log2_lowest} is needed, above 2^{worst.log2_highest} it overflows.",
        {"conflicts": [asdict(conflict) for conflict in advice.conflicts]},
        f"Compute {worst.needs_large!r} in FP32"
        + ("" if same else f" (or {worst.needs_small!r})")
        + ", clip the large "
        "gradients where they arise, scale the layer by itself, or use BF16, which needs no scale.",
    )


def _scale_unknown(advice: LossScaleAdvice) -> Finding:
    return Finding(
        "scale-unknown",
        "warning",
        "",
        "The loss scale of a backward is not known, so the gradients' ranges may be those of scaled gradients.",
        {"reason": advice.reason},
        "Give the inspector the scaler (scalers=...) or, where the loop scales by hand, the scale (loss_scale=...).",
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
        f"The largest safe loss scale moves by {powers_moved} powers of two: {power(lowest)} in steps {low.first_step}-"
        f"{low.last_step}, {power(highest)} in steps {high.first_step}-{high.last_step}.",
        {"powers_of_two": powers_moved, "static_scale": advice.static_scale},
        "A dynamic loss scale follows it; a static one must fit the steps with the largest gradients.",
    )


def _noise(gradients: Sequence[LayerReport]) -> Finding | None:
    names = [layer.name for layer in gradients if layer.rounding_noise]
    if not names:
        return None
    return Finding(
        "rounding-noise",
        "info",
        names[0],
        f"The gradients of {some(names)} look like rounding noise, as those do that are zero in theory: no scale need serve "
        "them.",
        {"layers": names[:MOST_LAYERS_LISTED], "layers_count": len(names)},
        "A bias before a normalisation or a softmax has no effect and can be left out.",
    )
