"""Makes the verdict, the three to six lines at the top of a report."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat
from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.analysis.precision import is_hidden, ledger_line, run_format
from mpinspect.ranges.analysis.products import layers_line
from mpinspect.ranges.analysis.ranks import ENDED_EARLY
from mpinspect.ranges.analysis.report import LossScaleAdvice, Verdict
from mpinspect.ranges.faults.name.operators import of_learning_steps
from mpinspect.ranges.faults.name.scaling import LOG2_INITIAL
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, KINDS
from mpinspect.ranges.records import CastToFP8, GradientsError, recorded
from mpinspect.ranges.session import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    IN_BACKWARD,
    IN_FORWARD,
    IN_OPTIMIZER,
    Session,
    module_named,
)
from mpinspect.reporting.finding import SEVERITIES, Finding, in_counts, inferred
from mpinspect.reporting.sentences import Said, Sentences, text
from mpinspect.reporting.words import (
    as_power,
    by_number,
    filled,
    format_name,
    lower_first,
    number_of,
    some,
    upper_first,
    with_power,
)

_INFO = SEVERITIES[0]
_INITIAL = 2.0**LOG2_INITIAL


def verdict(
    session: Session, findings: Sequence[Finding], advice: LossScaleAdvice, in_float16: LossScaleAdvice | None
) -> Verdict:
    """Return the verdict on a run.

    Args:
        session: the record of the run.
        findings: all findings, the gravest first.
        advice: the loss scale advice for the format in which the run is judged.
        in_float16: the advice for FP16 if the run is judged in another format, else None.
    """
    grave = [finding for finding in findings if finding.severity != _INFO]
    format = run_format(session)
    line = ledger_line(session)
    precision = line and f"{_computes_in(session, format)}{line}."
    ended = _ended(session)
    if not grave:
        seen = session.progress.sampled_steps or (session.info.watch and session.progress.steps)
        counted = session.watched or not session.info.kinds
        is_trained = session.progress.backwards and session.progress.weights_moved is not False
        if not (is_trained or session.info.inference) or not seen or not counted:
            return Verdict(None, precision, (_nothing_seen(session),), ended=ended)
        fp16 = in_float16 or advice
        if ended:
            return Verdict(None, precision, (_nothing_wrong(session), *_scale(session, format, fp16)), ended=ended)
        sentences = (_healthy(session, format, fp16), _nothing_wrong(session), *_scale(session, format, fp16))
        return Verdict(True, precision, sentences)
    worst, *others = grave
    rest = [finding for finding in findings[1:] if finding not in others]
    more = " ".join(filter(None, (_also_grave(others), filled("Also in the report: {}.", in_counts(rest)))))
    sentence = f"{upper_first(worst.severity)}{inferred(worst)}: {worst.message}"
    return Verdict(False, precision, (sentence,), worst.fix, worst.code, more, ended)


def of_what_was_seen(session: Session, found: Verdict) -> Verdict:
    """Return a verdict without a claim of health, for a run that failed or was stopped after its record had ended."""
    if not found.healthy:
        return found
    return replace(found, healthy=None, sentences=found.sentences[1:])


#: Where an exception was raised, by the phase that was measured.
_WHERE = {
    IN_FORWARD: "in the forward of {}",
    AFTER_FORWARD: "after the forward and before the backward",
    IN_BACKWARD: "in the backward",
    AFTER_BACKWARD: "after the backward and before the optimizer's step",
    IN_OPTIMIZER: "in the optimizer's step",
}
_EXIT = "SystemExit: "


def _ended(session: Session) -> str:
    """Return the exception that ended the run, with its step and phase; "" without one, or if a finding names it."""
    error, where = session.ended_by, _WHERE
    if session.info.inference:
        where = dict.fromkeys(_WHERE, "")
    if error is None or any(each.what == ENDED_EARLY for each in session.measurements):
        return ""
    step = "before the first step"
    if error.figures.get("begun"):
        step = f"in step {error.step}"
    elif error.step:
        step = f"after step {error.step - 1}"
    named = session.with_classes(where.get(next(iter(error.names), ""), "").format(module_named(error.name)))
    place = ", ".join(filter(None, (step, named, filled("on rank {}", error.rank))))
    if error.text.startswith(_EXIT):
        return f"Ended by sys.exit({error.text.removeprefix(_EXIT)}) {place}."
    return f"Ended by an exception {place}: {error.text}"


#: Maximum number of further findings whose first clause the verdict quotes.
_TOLD = 2


def _also_grave(findings: Sequence[Finding]) -> str:
    """Return the first clauses of the further findings above "info"; "" if there are none."""
    if not findings:
        return ""
    clauses = [f"{_first_clause(finding.message)} ({finding.id})" for finding in findings[:_TOLD]]
    if len(findings) > _TOLD:
        clauses.append(f"and {number_of(len(findings) - _TOLD, 'finding')} more")
    return f"Also to fix: {'; '.join(clauses)}."


def _first_clause(message: str) -> str:
    """Return a message up to its first colon, semicolon or full stop, without a bracket that this would leave open.

    An ellipsis is no full stop.
    """
    clause = re.split(r"[:;] |(?<!\.)\. ", message)[0].rstrip(".")
    return clause[: clause.rindex(" (")] if clause.count("(") > clause.count(")") else clause


def _computes_in(session: Session, format: FloatFormat | None) -> str:
    """Return a lead like "Computes in BF16: ", or "Computes in FP32 and BF16: " if only some modules compute in 16 bits.

    If layers are converted to FP8 or FP4, their number: "81 of 113 Linear in FP8 tensorwise, 32 in BF16: ".
    """
    ledger = session.precision
    name = format_name(format.name) if format is not None else ""
    narrow = layers_line(ledger, name)
    if narrow:
        return f"{narrow}: "
    in_part = (not any(ledger.autocast) or "" in ledger.autocast) and FLOAT32.name in ledger.outputs
    if name and in_part and format != FLOAT32:
        name = f"FP32 and {name}"
    casts = " with casts to FP8" * _casts_to_fp8(session)
    return filled(f"Computes in {{}}{casts}: ", name)


def _casts_to_fp8(session: Session) -> bool:
    return any(each.what == CastToFP8.kind for each in session.measurements)


class _Unknown(Sentences):
    """The verdict on a run with too few observations."""

    SKIPPED_ONLY_STEP = "Health unknown: the scaler skipped the only step."
    SKIPPED_ALL = "Health unknown: the scaler skipped all {steps:,} steps."
    FIRST_EVENT = "First: {first_event}."
    SCALE_TOO_HIGH = (
        "The forward was finite each time: the loss scale is still too high. A dynamic scaler lowers it by itself."
    )
    NOTHING_TO_COUNT = "Health unknown: no tensor was selected for counting."
    NOTHING_TO_COUNT_ALL_FINITE = (
        "Health unknown: no tensor was selected for counting. The watch found no infinities or NaNs."
    )
    NO_UPDATE = "Health unknown: none of {backwards:,} backwards led to an update."
    NOT_SAMPLED = "Health unknown: none of {steps} steps was sampled or watched."
    NO_BACKWARD = "Health unknown: no backward was seen."
    NO_STEP = "Health unknown: no training step was seen yet."
    NO_FORWARD = "Health unknown: no forward was seen."
    NO_OUTPUT = "Health unknown: no output of the model was counted or searched for infinities and NaNs."


def _nothing_seen(session: Session) -> str:
    first = next(iter(session.events), None)
    figures = {
        "steps": session.progress.steps,
        "backwards": session.progress.backwards,
        "first_event": first and first_line(first),
    }
    return text(_why_unknown(session), figures)


def _why_unknown(session: Session) -> Said:
    progress, events = session.progress, session.events
    if session.info.inference:
        return _Unknown.NO_OUTPUT.when(progress.steps) or _Unknown.NO_FORWARD
    if progress.steps and progress.skipped_steps == progress.steps and progress.backwards:
        is_scale = bool(events) and all(event.forward_finite for event in events)
        return (
            by_number(progress.steps, _Unknown.SKIPPED_ONLY_STEP, _Unknown.SKIPPED_ALL),
            _Unknown.FIRST_EVENT.when(events),
            _Unknown.SCALE_TOO_HIGH.when(is_scale),
        )
    if progress.backwards and not session.watched and session.info.kinds:
        return _Unknown.NOTHING_TO_COUNT_ALL_FINITE.when(session.info.watch) or _Unknown.NOTHING_TO_COUNT
    if progress.weights_moved is False and progress.backwards:
        return _Unknown.NO_UPDATE
    if progress.backwards:
        return _Unknown.NOT_SAMPLED
    if progress.steps or session.windows or session.precision.outputs or session.ended_by is not None:
        return _Unknown.NO_BACKWARD
    return _Unknown.NO_STEP


class _Nothing(Sentences):
    """The record of a run without findings: its length, and the checks."""

    WRONG = "No numerical problem was found in {seen}."
    UNEXPLAINED = "No finding explains it: start from its traceback."
    UNEXPLAINED_EXIT = "No finding explains it."
    WRONG_BEFORE_END = "No numerical problem was found in {seen} before it."
    ALL_SEARCHED = "Every step was searched for infinities and NaNs{counted}."
    SAMPLES_SEARCHED = "Only the {sampled:,} sampled ones were searched for infinities and NaNs{counted}."
    WATCHED_SEARCHED = "{watched:,} of them were searched for infinities and NaNs{counted}."
    TWICE_OUTPUTS = (
        "In {twice:count forward} computed twice, rounding put the outputs off by at most {off:percent} of their size."
    )
    TWICE = (
        "In {twice:count step} computed twice, rounding put the gradients off by at most {off:percent} of their size."
    )
    SKIPPED = "The scaler skipped {skipped:count step}, which is normal in the search for its scale."


def _nothing_wrong(session: Session) -> str:
    progress, seen = session.progress, number_of(session.progress.steps, "step")
    searched = _Nothing.ALL_SEARCHED
    if not session.info.watch:
        searched = _Nothing.SAMPLES_SEARCHED
    elif progress.watched_steps is not None:
        searched = _Nothing.WATCHED_SEARCHED
    if session.ranks:
        seen += f" of {number_of(len(session.ranks), 'rank')}"
    figures: dict[str, object] = {
        "seen": seen,
        "counted": _counted(session),
        "sampled": progress.sampled_steps,
        "watched": progress.watched_steps,
        "skipped": progress.skipped_steps,
    }
    errors = of_learning_steps(
        each for each in recorded(session.measurements, GradientsError) if each.text != FLOAT32.name
    )
    figures |= {"twice": len(errors), "off": max((each.error for each in errors), default=0.0)}
    # A finding says more of larger errors.
    is_close = 0 < max((each.error for each in errors), default=0.0) < _CLOSE
    twice = _Nothing.TWICE_OUTPUTS.when(session.info.inference) or _Nothing.TWICE
    begins: tuple[_Nothing, ...] = (_Nothing.WRONG,)
    if (error := session.ended_by) is not None:
        is_exit = error.text.startswith(_EXIT)
        begins = (_Nothing.UNEXPLAINED_EXIT.when(is_exit) or _Nothing.UNEXPLAINED, _Nothing.WRONG_BEFORE_END)
    return text((*begins, searched, twice.when(is_close), _Nothing.SKIPPED.when(progress.skipped_steps)), figures)


def _counted(session: Session) -> str:
    """Return a clause on the tensors whose ranges were counted; "" without any."""
    tensors = Counter(key.kind for key in session.totals())
    named = " and ".join(number_of(tensors[kind], kind.replace("_", " ")) for kind in KINDS if tensors[kind])
    sampled = session.progress.sampled_steps
    steps = "each" if sampled >= session.progress.steps else f"{sampled:,} of them"
    return named and f"; in {steps} the ranges of {named} were counted"


class _In16Bits(Sentences):
    """What FP16 would need, in a run that computes in another format."""

    BF16 = "BF16 needs no loss scale; {fits}."
    BF16_FINER = (
        "BF16 needs no loss scale; {fits}; at scales of {finer:power} or more FP16 rounds more finely than BF16, by up to 8x "
        "(RMS)."
    )
    FP32 = "In 16 bits: {fits}; BF16 needs no loss scale."
    HIDDEN = "Whether the run computes in FP16 is not known: {fits}."


class _Fits(Sentences):
    """Clauses on the gradients in FP16, for the sentences above."""

    NO_SCALE = "the gradients would not fit FP16: no one loss scale serves every layer"
    NEEDS = "the gradients would need a loss scale in FP16: {recommended:scale}, {window}"
    UNKNOWN = "whether they would need one in FP16 is not known (overflow above {highest:power})"
    ANY_SCALE = "FP16 would fit at any loss scale in the {window}{basis}"


def _scale(session: Session, format: FloatFormat | None, fp16: LossScaleAdvice) -> Iterator[str]:
    """Yield a sentence on the run's own loss scale (FP16), or on FP16's need (BF16 and FP32 runs), by the advice for FP16."""
    if session.info.inference:
        return
    if format == FLOAT16:
        yield from _own_scale(session, fp16)
        return
    if not fp16.available:
        return
    says = None
    if format == BFLOAT16:
        # Below, gradients are subnormal in FP16, and rounded more coarsely than in BF16.
        says = _In16Bits.BF16_FINER.when(fp16.finer_from) or _In16Bits.BF16
    elif format == FLOAT32:
        says = _In16Bits.FP32
    elif is_hidden(session):
        says = _In16Bits.HIDDEN
    if says is not None:
        yield text(says, {"fits": _fits(session, fp16), "finer": fp16.finer_from})


def _fits(session: Session, fp16: LossScaleAdvice) -> str:
    says = (
        _Fits.NO_SCALE.when(fp16.serves_none)
        or _Fits.NEEDS.when(fp16.needed)
        or _Fits.UNKNOWN.when(fp16.needed is None)
        or _Fits.ANY_SCALE
    )
    figures = {
        "recommended": fp16.recommended,
        "highest": fp16.highest,
        "window": _window(fp16),
        "basis": _basis(session),
    }
    return text(says, figures)


#: Errors of all gradients together from which on the verdict does not call them a bound.
_CLOSE = 0.5
#: The sentence mentions a smaller number of sampled steps.
_FEW_STEPS = 5


def _basis(session: Session) -> str:
    """Return a clause on a window's weak basis (few steps, or weight gradients alone); "" for a sound basis."""
    steps, kinds = session.progress.sampled_steps, {key.kind for key in session.totals()}
    parts = []
    if steps < _FEW_STEPS:
        parts.append(f"{number_of(steps, 'step')} alone")
    if ACTIVATION_GRADIENT in session.info.kinds and ACTIVATION_GRADIENT not in kinds:
        parts.append("weight gradients alone")
    return filled(" (by {})", " and ".join(parts))


class _Own(Sentences):
    """The run's own loss scale, in FP16."""

    NO_WINDOW = "No window of loss scales can be given: {reason}"
    BELOW_HIGHEST = "The loss scale, {used:scale}, lies below {highest:power}, the largest safe scale."
    ABOVE_HIGHEST = "The loss scale, {used:scale}, lies above {highest:power}, the largest safe scale."
    IN_WINDOW = "The loss scale, {used:scale}, lies in the {window}."
    AT_TOP = "The loss scale, {used:scale}, lies at the top of the {window}."
    ABOVE_MARGIN = (
        "The loss scale, {used:scale}, leaves little room for larger gradients. "
        "Scales up to {highest:power} leave enough."
    )


def _own_scale(session: Session, advice: LossScaleAdvice) -> Iterator[str]:
    says = _place_of(session.last_scale, advice)
    if says is not None:
        figures = {
            "reason": lower_first(advice.reason),
            "used": session.last_scale,
            "highest": advice.highest,
            "window": _window(advice),
        }
        yield text(says, figures)


def _place_of(used: float | None, advice: LossScaleAdvice) -> _Own | None:
    """Return the sentence on the scale's place in the window; None if it is unknown, or below, which findings report."""
    if not advice.available:
        return _Own.NO_WINDOW
    if used is None:
        return None
    if advice.needed is None or advice.lowest is None or advice.highest is None:
        return _Own.BELOW_HIGHEST.when(used <= (advice.highest or math.inf)) or _Own.ABOVE_HIGHEST
    if used > advice.highest:
        return _Own.ABOVE_MARGIN
    if used < advice.lowest:
        return None
    return _Own.AT_TOP.when(used == advice.highest) or _Own.IN_WINDOW


class _Healthy(Sentences):
    """The verdict on a healthy run, and the next thing to do."""

    INFERENCE = "{healthy}: the outputs need no other precision."
    INFERENCE_FINITE = "{healthy}: no output that was searched is infinite or NaN."
    INFERENCE_FITS = "In FP16, no counted activation would overflow: the largest magnitude is {largest:.3g}."
    INFERENCE_OVERFLOWS = (
        "In FP16, the activations of {layers} would overflow: their magnitudes are up to {largest:.3g}. Keep these modules in "
        "FP32 or BF16 there."
    )

    KEEP_BF16 = "{healthy}: the precision needs no change. Keep BF16."
    SHOW_FORMAT = (
        "{healthy}: the precision needs no change in the observed part. eager_samples=True (mpinspect run --eager-samples) "
        "shows the format."
    )
    NOTHING = "{healthy}: the precision needs no change."
    TRY_BF16 = "{healthy}: the precision needs no change. To train in 16 bits, try BF16 autocast."
    TRY_EITHER = (
        "{healthy}: the precision needs no change. To train in 16 bits, try BF16 autocast, or FP16 autocast with a "
        "GradScaler{start_at}."
    )
    IN_WHAT_WAS_SEEN = "{healthy}: the precision needs no change in the observed part."
    COUNT_IN_FP32 = (
        "{healthy}: the precision needs no change. To measure the values that FP16 flushed, count a few batches' gradients in "
        "FP32 (autocast off)."
    )
    KEEP_SCALER = (
        "{healthy}: the precision needs no change. Keep the scaler: it skips steps that overflow, and lowers the scale."
    )
    KEEP_OWN = "{healthy}: the precision needs no change. Keep the loss scale that the loop changes by itself."
    STATIC_LOWER = (
        "{healthy}. Take the loss scale {recommended:scale} next, or a GradScaler, which skips a step that overflows."
    )
    RAISE = "{healthy}. Start the next run with the loss scale {recommended:scale}."
    KEEP_SCALE = "{healthy}: the precision needs no change. Keep FP16 and this loss scale."
    KEEP_WITHOUT = "{healthy}: the precision needs no change. Keep FP16 without a loss scale."


def _healthy(session: Session, format: FloatFormat | None, fp16: LossScaleAdvice) -> str:
    """Return the first sentences on a healthy run; ``fp16``: the advice for FP16."""
    # A GradScaler begins at 2^16 by itself.
    start = (fp16.needed and fp16.recommended) or min(fp16.highest or _INITIAL, _INITIAL)
    start_at = f" from {with_power(start)}" * bool(fp16.needed or start != _INITIAL)
    # A running or killed run is judged by its written record.
    healthy = "Healthy" + " so far" * (not session.progress.ended)
    figures: dict[str, object] = {"healthy": healthy, "recommended": fp16.recommended, "start_at": start_at}
    if session.info.inference:
        is_compared = any(recorded(session.measurements, GradientsError))
        says = _Healthy.INFERENCE.when(is_compared) or _Healthy.INFERENCE_FINITE
        return text((says, *_activations_in_float16(session, format, figures)), figures)
    if format == FLOAT16:
        return text(_next_in_float16(session, fp16), figures)
    says = _Healthy.NOTHING
    if _casts_to_fp8(session):
        return text(says, figures)
    if format == BFLOAT16:
        says = _Healthy.KEEP_BF16
    elif format is None and is_hidden(session):
        says = _Healthy.SHOW_FORMAT
    elif format == FLOAT32:
        says = _Healthy.TRY_EITHER
        if not _takes_scaler(session) or not fp16.available or fp16.needed is None or fp16.serves_none:
            says = _Healthy.TRY_BF16
    return text(says, figures)


def _activations_in_float16(
    session: Session, format: FloatFormat | None, figures: dict[str, object]
) -> Iterator[_Healthy]:
    """Yield the sentence on an inference's activations in FP16, if it computes in another format; add its figures."""
    counted = {key.name: each.histogram for key, each in session.totals().items() if key.kind == ACTIVATION}
    largest = max((each.max_abs for each in counted.values() if each.nonzero), default=None)
    if format == FLOAT16 or largest is None:
        return
    over = [path for path, each in counted.items() if each.overflowed_bounds(FLOAT16)[1]]
    figures |= {"largest": largest, "layers": some(over)}
    yield _Healthy.INFERENCE_OVERFLOWS.when(over) or _Healthy.INFERENCE_FITS


def _takes_scaler(session: Session) -> bool:
    """Return whether a GradScaler could step the optimizers: it supports neither closures nor hand-written updates."""
    ledger = session.precision
    by_hand = bool(ledger.weights) and not ledger.optimizers
    return not by_hand and not any(optimizer.type == "LBFGS" for optimizer in ledger.optimizers)


def _next_in_float16(session: Session, advice: LossScaleAdvice) -> _Healthy:
    used = session.last_scale
    if not advice.available or used is None:
        return _Healthy.IN_WHAT_WAS_SEEN
    if advice.needed is None or advice.lowest is None or advice.highest is None:
        return _Healthy.COUNT_IN_FP32
    if used > advice.highest:
        lowers = any(scaler.enabled and scaler.backoff_factor for scaler in session.precision.scalers)
        changes = len({change.scale for change in session.progress.scales} - {None}) > 1
        return _Healthy.KEEP_SCALER.when(lowers) or _Healthy.KEEP_OWN.when(changes) or _Healthy.STATIC_LOWER
    if used < advice.lowest:
        return _Healthy.RAISE
    return _Healthy.KEEP_WITHOUT.when(used == 1) or _Healthy.KEEP_SCALE


def _window(advice: LossScaleAdvice) -> str:
    window = f"window {as_power(advice.lowest)} .. {as_power(advice.highest)}"
    if not advice.reserve:
        return window
    return f"{window} (with {number_of(advice.reserve, 'power')} of two in reserve at the top)"
