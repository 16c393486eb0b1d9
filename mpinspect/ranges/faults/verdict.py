"""Makes the verdict, the three to six lines at the top of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat
from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.analysis.precision import is_hidden, ledger_line, run_format
from mpinspect.ranges.analysis.ranks import ENDED_EARLY
from mpinspect.ranges.analysis.report import LossScaleAdvice, Verdict
from mpinspect.ranges.faults.name.scaling import LOG2_INITIAL
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT
from mpinspect.ranges.session import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    IN_BACKWARD,
    IN_FORWARD,
    IN_OPTIMIZER,
    Session,
    module_named,
)
from mpinspect.reporting.finding import SEVERITIES, Finding, in_counts
from mpinspect.reporting.words import as_power, format_name, lower_first, number_of, with_power

_INFO, _WARNING, _ERROR = SEVERITIES
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
    precision = f"{_computes_in(session, format)}{line}." if line else ""
    ended = _ended(session)
    if not grave:
        seen = session.progress.sampled_steps or (session.info.watch and session.progress.steps)
        counted = session.watched or not session.info.kinds
        if not session.progress.backwards or not seen or not counted or session.progress.weights_moved is False:
            return Verdict(None, precision, (_nothing_seen(session),), ended=ended)
        told = in_float16 or advice
        if ended:
            return Verdict(None, precision, (_nothing_wrong(session), *_scale(session, format, told)), ended=ended)
        sentences = (_healthy(session), *_scale(session, format, told), _next(session, format, told))
        return Verdict(True, precision, sentences)
    worst = grave[0]
    opening = "In trouble" if worst.severity == _ERROR else "To be mended"
    others = in_counts(finding for finding in findings if finding.severity == _INFO)
    more = " ".join(filter(None, (_also_grave(grave[1:]), f"Also noted: {others}." if others else "")))
    sure = "" if worst.certainty == "measured" else " (inferred)"
    return Verdict(False, precision, (f"{opening}{sure}: {worst.message}",), worst.fix, worst.code, more, ended)


def of_what_was_seen(session: Session, found: Verdict) -> Verdict:
    """Return a verdict that calls nothing healthy: something went wrong, or the run was stopped, after its record had ended."""
    if not found.healthy:
        return found
    return replace(found, healthy=None, sentences=(_nothing_wrong(session), *found.sentences[1:-1]))


#: Where an exception was raised, by the phase that was measured.
_WHERE = {
    IN_FORWARD: "in the forward of {}",
    AFTER_FORWARD: "after the forward and before the backward",
    IN_BACKWARD: "in the backward",
    AFTER_BACKWARD: "after the backward and before the optimizer's step",
    IN_OPTIMIZER: "in the optimizer's step",
}


def _ended(session: Session) -> str:
    """Return the exception that ended the run, with its step and phase; "" if none did, or a finding names the rank's."""
    error = session.ended_by
    if error is None or any(each.what == ENDED_EARLY for each in session.measurements):
        return ""
    step = (
        f"in step {error.step}"
        if error.figures.get("begun")
        else f"after step {error.step - 1}"
        if error.step
        else "before the first step"
    )
    where = _WHERE.get(error.names[0] if error.names else "", "").format(module_named(error.name))
    rank = "" if error.rank is None else f"on rank {error.rank}"
    place = ", ".join(filter(None, (step, where, rank)))
    exits = error.text.removeprefix("SystemExit: ")
    return (
        f"Ended by an exception {place}: {error.text}"
        if exits == error.text
        else f"Ended by sys.exit({exits}) {place}."
    )


#: Most further findings whose first clause the verdict gives.
_TOLD = 2


def _also_grave(findings: Sequence[Finding]) -> str:
    """Return the first clauses of the findings above "info" that the verdict does not give whole; "" for none."""
    if not findings:
        return ""
    clauses = [f"{_first_clause(finding.message)} ({finding.id})" for finding in findings[:_TOLD]]
    left = f"; and {number_of(len(findings) - _TOLD, 'finding')} more" if len(findings) > _TOLD else ""
    return f"Also to be mended: {'; '.join(clauses)}{left}."


def _first_clause(message: str) -> str:
    """Return a message up to its first colon, semicolon or full stop, without a bracket that this would leave open."""
    clause = re.split("[:;.] ", message)[0].rstrip(".")
    return clause[: clause.rindex(" (")] if clause.count("(") > clause.count(")") else clause


def _computes_in(session: Session, format: FloatFormat | None) -> str:
    """Return a lead like "Computes in BF16: ", or "Computes in FP32 and BF16: " if only some modules compute in 16 bits."""
    if format is None:
        return ""
    ledger = session.precision
    in_part = (not any(ledger.autocast) or "" in ledger.autocast) and FLOAT32.name in ledger.outputs
    return f"Computes in {'FP32 and ' if in_part and format != FLOAT32 else ''}{format_name(format.name)}: "


def _nothing_seen(session: Session) -> str:
    progress = session.progress
    if progress.steps and progress.skipped_steps == progress.steps and progress.backwards:
        first = session.events[0] if session.events else None
        broke = f" First: {first_line(first)}." if first is not None else ""
        high = (
            " The forward was finite each time: the loss scale is too high so far, as a dynamic scaler finds by itself."
            if session.events and all(event.forward_finite for event in session.events)
            else ""
        )
        return f"Not known whether it is healthy: the scaler skipped {_all_of(progress.steps)}.{broke}{high}"
    if progress.backwards and not session.watched and session.info.kinds:
        looked = "; of infinities and NaNs, which were looked for, there were none" if session.info.watch else ""
        return f"Not known whether it is healthy: no tensor was to be counted{looked}."
    if progress.weights_moved is False and progress.backwards:
        return f"Not known whether it is healthy: none of {progress.backwards:,} backwards led to an update."
    if progress.backwards:
        return f"Not known whether it is healthy: of {progress.steps} steps none was sampled or watched."
    if progress.steps or session.windows or session.precision.outputs or session.ended_by is not None:
        return "Not known whether it is healthy: no backward was seen."
    return "Nothing is known yet: no training step was seen."


def _all_of(steps: int) -> str:
    return "the only step" if steps == 1 else f"all {steps:,} steps"


def _healthy(session: Session) -> str:
    # A running or killed run is judged by its written record.
    so_far = "" if session.progress.ended else " so far"
    return f"Healthy{so_far}: {lower_first(_nothing_wrong(session))}"


def _nothing_wrong(session: Session) -> str:
    progress = session.progress
    steps = number_of(progress.steps, "step") + (
        f" of {number_of(len(session.ranks), 'rank')}" if session.ranks else ""
    )
    watched = progress.watched_steps
    if not session.info.watch:
        looked = f"; infinities and NaNs were looked for in the {progress.sampled_steps:,} sampled ones"
    elif watched is not None:
        looked = f", {watched:,} of them watched"
    else:
        looked = ""
    skipped = (
        f" The scaler skipped {number_of(progress.skipped_steps, 'step')}, as it may in search of its scale."
        if progress.skipped_steps
        else ""
    )
    return f"Nothing numerically wrong was found in {steps}{looked}.{skipped}"


def _scale(session: Session, format: FloatFormat | None, told: LossScaleAdvice) -> Iterator[str]:
    """Yield a sentence on the run's own loss scale (FP16), or on what FP16 would need (BF16 and FP32 runs), by ``told``."""
    if format == FLOAT16:
        yield from _own_scale(session, told)
        return
    if not told.available:
        return
    if told.serves_none:
        fits = "the gradients would not fit FP16: no one loss scale serves every layer"
    elif told.needed:
        fits = f"the gradients would need a loss scale in FP16: {with_power(told.recommended)}, {_window(told)}"
    elif told.needed is None:
        fits = f"whether they would need one in FP16 is not known (overflow above {as_power(told.highest)})"
    else:
        fits = f"FP16 would fit at any loss scale in the {_window(told)}{_basis(session)}"
    if format == BFLOAT16:
        # Below, gradients are subnormal in FP16, and rounded more coarsely than in BF16.
        finer = told.finer_from
        rounds = (
            ""
            if finer is None
            else f"; at scales of {as_power(finer)} or more its rounding is finer than BF16's, up to 8 times (root mean square)"
        )
        yield f"BF16 needs no loss scale; {fits}{rounds}."
    elif format == FLOAT32:
        yield f"For a change to 16 bits: {fits}; BF16 needs none."
    elif is_hidden(session):
        yield f"Whether the run computes in FP16 is not known: {fits}."


#: With fewer sampled steps the sentence gives their number.
_FEW_STEPS = 5


def _basis(session: Session) -> str:
    """Return a clause on how little a window rests on: few steps, or weight gradients alone; "" if on neither."""
    steps, kinds = session.progress.sampled_steps, {key.kind for key in session.totals()}
    parts = [f"{number_of(steps, 'step')} alone"] if steps < _FEW_STEPS else []
    if ACTIVATION_GRADIENT in session.info.kinds and ACTIVATION_GRADIENT not in kinds:
        parts.append("weight gradients alone")
    return f" (by {' and '.join(parts)})" if parts else ""


def _own_scale(session: Session, advice: LossScaleAdvice) -> Iterator[str]:
    if not advice.available:
        yield f"No window of loss scales can be given: {lower_first(advice.reason)}"
        return
    used = session.last_scale
    if used is None:
        return
    scale, highest = f"The loss scale, {with_power(used)},", as_power(advice.highest)
    if advice.needed is None or advice.lowest is None or advice.highest is None:
        where = "below" if used <= (advice.highest or math.inf) else "above"
        yield f"{scale} lies {where} {highest}, the largest that is safe."
    elif advice.lowest <= used <= advice.highest:
        where = "in" if used < advice.highest else "at the top of"
        yield f"{scale} lies {where} the {_window(advice)}."
    elif used > advice.highest:
        yield (
            f"{scale} lies above {highest}, the largest with a margin for larger gradients; a dynamic scaler may stand there."
        )


def _next(session: Session, format: FloatFormat | None, told: LossScaleAdvice) -> str:
    """Return what to do after a healthy run, in one line; ``told`` is what FP16 needs."""
    if format == BFLOAT16:
        return "Numerically nothing to do: keep BF16."
    if format == FLOAT16:
        return _next_in_float16(session, told)
    if format is None and is_hidden(session):
        return "Nothing to do in what was seen; eager_samples=True (mpinspect run --eager-samples) shows the format."
    if format != FLOAT32:
        return "Nothing to do."
    # A GradScaler takes no closure, and no step that is made by hand.
    ledger = session.precision
    by_hand = bool(ledger.weights) and not ledger.optimizers
    no_scaler = by_hand or any(optimizer.type == "LBFGS" for optimizer in ledger.optimizers)
    if no_scaler or not told.available or told.needed is None or told.serves_none:
        return "Numerically nothing to do; to train in 16 bits try BF16 autocast."
    # A GradScaler begins at 2^16 by itself.
    start = told.recommended if told.needed else min(told.highest or _INITIAL, _INITIAL)
    scale = f" from {with_power(start)}" if told.needed or start != _INITIAL else ""
    return (
        f"Numerically nothing to do; to train in 16 bits try BF16 autocast, or FP16 autocast with a GradScaler{scale}, which "
        "skips a step that overflows."
    )


def _next_in_float16(session: Session, advice: LossScaleAdvice) -> str:
    used = session.last_scale
    if not advice.available or used is None:
        return "Nothing to do in what was seen."
    if advice.needed is None or advice.lowest is None or advice.highest is None:
        return "Nothing to do; to know what FP16 flushed, count the gradients of a few batches in FP32 (autocast off)."
    if used > advice.highest:
        return f"Nothing to do with a dynamic scaler; a static one is safer at {with_power(advice.recommended)}."
    if used < advice.lowest:
        return f"Take the loss scale {with_power(advice.recommended)} at the next start."
    scaled = f"with the loss scale {with_power(used)}" if used != 1 else "without a loss scale"
    return f"Numerically nothing to do: keep FP16 {scaled}."


def _window(advice: LossScaleAdvice) -> str:
    reserve = f" (its top keeps {number_of(advice.reserve, 'power')} of two in reserve)" if advice.reserve else ""
    return f"window {as_power(advice.lowest)} .. {as_power(advice.highest)}{reserve}"
