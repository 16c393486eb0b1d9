"""Findings on infinities and NaNs: their cause, their damage, and whether a dynamic loss scale can handle them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpinspect.numeric.formats import FLOAT16, FORMATS
from mpinspect.ranges.analysis.drift import LONGEST_GROWTH_INTERVAL, SHORTEST_GROWTH_INTERVAL
from mpinspect.ranges.analysis.evidence import survived
from mpinspect.ranges.analysis.report import LossScaleAdvice
from mpinspect.ranges.kinds import ACTIVATION, GRADIENT_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.session import (
    DROPPED,
    END,
    LOSSES,
    TAKEN,
    Event,
    Progress,
    Session,
    TensorKey,
    TensorWindow,
    is_below,
    module_named,
)
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import format_name, some

#: Share of skipped steps above which a dynamic scaler is no longer just probing (its growth interval is hundreds of steps).
SKIPPED_TOLERANCE = 0.1
#: Consecutive skips that a dynamic scaler may need at the start to find its scale by halving: from 2^24 down to 1.
LONGEST_SEARCH = 24
#: Fewer skips than this are too few to call frequent.
FEWEST_SKIPS = 3

_ID = "non-finite-event"
#: How to have every step watched.
_EVERY_STEP = "watch=True without max_overhead, or mpinspect run --max-overhead none"

#: The remedy if only the weight gradients of compiled code were seen.
_SEARCH_COMPILED = (
    "Inside compiled code no module is seen: run again with eager_samples=True and every=1 (mpinspect run --eager-samples "
    "--every 1), and the event names where it arises. If it does not come then, the compiled code makes it: compile with "
    "torch._inductor.config.emulate_precision_casts = True, which rounds where eager code rounds, and leave out of torch.compile "
    "what still differs."
)


def event_findings(
    session: Session,
    totals: dict[TensorKey, TensorWindow],
    advice: LossScaleAdvice,
    *,
    is_explained: bool = False,
) -> list[Finding]:
    """Return at most one finding each on the forward and the backward, or one from the counts alone if there are no events.

    ``is_explained``: whether a diagnosis names the cause, so that none is guessed here.
    """
    events = [event for event in session.events if not event.aside]
    aside = [event for event in session.events if event.aside]
    left = [event for event in events if event.phase == END]
    harmless = [event for event in events if event.phase == "forward" and event.gradients_finite]
    forward = [
        event
        for event in events
        if event not in harmless and (event.phase == "forward" or event.forward_finite is False)
    ]
    backward = [event for event in events if event.phase == "backward" and event not in forward]
    findings = []
    if harmless:
        findings.append(_harmless(harmless))
    if aside and not backward:
        findings.append(_aside(aside))
    stepped = next((event.step for event in backward if event.story == TAKEN), None)
    if backward:
        findings.append(_backward(backward, session, advice, is_explained))
    if forward and (stepped is None or forward[0].step <= stepped):
        # The earlier event is the cause, or nearer to the cause.
        findings.insert(0 if not backward or forward[0].step <= backward[0].step else 1, _forward(forward, session))
    findings = [_left_broken(event, session, harmless) for event in left] + (findings or _from_counts(totals))
    return findings if backward else [*findings, *_unseen_skips(session)]


def _left_broken(event: Event, session: Session, harmless: Sequence[Event]) -> Finding:
    """Return the finding for weights that were non-finite when the run ended; ``harmless``: what left all gradients finite."""
    seen, steps = session.progress.watched_steps, session.progress.steps
    again = f"Run it again with the watch at every step ({_EVERY_STEP}): it names the step and the module."
    if not session.info.watch:
        why, fix = "the watch was off", again
    elif seen is not None:
        why, fix = f"the watch checked {seen} of {steps} steps, since its time was limited", again
    else:
        first = min(harmless, key=lambda event: event.step, default=None)
        but = "" if first is None else f", but in step {first.step}, where {_what(first)}"
        why = f"every value that the watch read in the steps taken was finite{but}"
        fix = "Look at what else changes the weights: the optimizer's arithmetic (learning rate, eps), or code that sets them."
    return _finding(
        event,
        "error",
        f"When the run ended {event.tensor!r} held {_value(event)}; {event.explanation}. "
        f"In which step that began is not known: {why}.",
        _evidence(event),
        fix,
    )


def _aside(events: Sequence[Event]) -> Finding:
    first, steps = events[0], len({event.step for event in events})
    return _finding(
        first,
        "info",
        f"The backward of another model's loss through this one was not finite in {_first(steps, first.step)}, where "
        f"{_what(first)}. This model's optimizer did not use these gradients.",
        {**_evidence(first), "steps": steps},
    )


def _harmless(events: Sequence[Event]) -> Finding:
    first = min(events, key=lambda event: (event.step, event.micro_batch))
    why = "they do not depend on its value" if first.what in LOSSES else "it may be intended (a mask)"
    return _finding(
        first,
        "info",
        f"In step {first.step} {_what(first)} and every gradient was finite nevertheless: {why}.",
        _evidence(first),
    )


def _forward(events: Sequence[Event], session: Session) -> Finding:
    first = min(events, key=lambda event: (event.step, event.micro_batch))
    steps = sorted({event.step for event in events})
    skipped = len({event.step for event in events if event.skipped})
    which = "each of the " if len(steps) == session.progress.steps > 1 else ""
    useless = (
        f" The loss scale was backed off for it {_times(skipped)}, which can't help: the forward does not depend on it, and"
        " every such step only halves the scale."
        if skipped
        else ""
    )
    return _finding(
        first,
        "error",
        f"The forward was not finite in {which}{_first(len(steps), first.step)}{period(steps)}, where {_what(first)}"
        f"{loss_made_by(first, session)}{_known_cause(first)}.{useless}",
        {**_evidence(first), "steps": len(steps), "skipped_steps": skipped},
        f"{look_at(first, session)} No loss scale repairs a forward.",
    )


def look_at(first: Event, session: Session) -> str:
    """Return where to look for what made a forward infinite or NaN, as a sentence."""
    if first.given:
        return f"Look at the data of step {first.step}, and at what is done to it before it reaches the model."
    if first.what in LOSSES:
        in_half = (
            f"; where a sum or product in it exceeds {FLOAT16.max_finite:g}, compute it in FP32, from outputs that are cast to "
            "FP32 before the loss"
        )
        return (
            f"Look at the loss function{loss_made_by(first, session)}, and at the targets of step {first.step}"
            f"{in_half if was_in_half(first, session) else ''}."
        )
    overflow = (
        f"; where its values exceed {FLOAT16.max_finite:g}, compute it in FP32, and also the modules after it up to where the "
        "values are below that again"
    )
    return (
        f"Look at the inputs, the weights and the arithmetic of {module_named(first.module)} at step {first.step}"
        f"{overflow if was_in_half(first, session) else ''}."
    )


def was_in_half(first: Event, session: Session) -> bool:
    """Return whether FP16 was computed in where an event arose: in the loss's own code, a module, or those within it."""
    loss = session.broken_loss(first.step) if first.what in LOSSES else None
    if loss is not None:
        return bool(loss.figures.get("in_half"))
    if first.dtype and first.dtype != FLOAT16.name:
        # A container that returns another dtype may compute in FP16 within.
        has_modules = any(is_below(info.module, first.module) for info in session.watched)
        return first.what not in LOSSES and has_modules and _has_half(session)
    return first.dtype == FLOAT16.name or _has_half(session)


def _has_half(session: Session) -> bool:
    return FLOAT16.name in (*session.precision.outputs, *session.passed_through())


def loss_made_by(first: Event, session: Session) -> str:
    """Return the operations of a loss that was not finite and their dtype, in brackets after a space; "" if not known."""
    found = session.broken_loss(first.step) if first.what in LOSSES else None
    if found is None or not found.names:
        return ""
    dtype = f", in {format_name(found.text)}" if found.text in FORMATS else ""
    return f" (autograd's {' of '.join(found.names)}{dtype})"


def _backward(events: Sequence[Event], session: Session, advice: LossScaleAdvice, is_explained: bool) -> Finding:
    first = min(events, key=lambda event: (event.step, event.micro_batch))
    steps = sorted({event.step for event in events})
    stepped = [event for event in events if event.story == TAKEN]
    # A step that was not watched may have left no event, only a count in ``skipped_steps``.
    skipped = max(len({event.step for event in events if event.skipped}), session.progress.skipped_steps)
    count = max(len(steps), skipped)
    evidence = {**_evidence(first), "steps": count, "skipped_steps": skipped}
    begin = f"The backward was not finite in {_first(count, first.step)}, where {_what(first)}"
    begin += ("" if is_explained else _scale_too_high(first)) + _never_updated(session)
    if stepped and survived(stepped[0], session):
        if _drops_by_itself(session):
            return _finding(
                first,
                "info",
                f"{begin}; the forwards after it are finite: the loop, which has more backwards than steps and seems to multiply "
                "its loss by a scale by hand, seems to drop such gradients.",
                evidence,
            )
        return _finding(
            first,
            "warning",
            f"{begin}; the optimizer stepped in step {stepped[0].step} and the forwards after it are finite: no infinity or "
            "NaN reached a weight" + ("." if is_explained else f", since it was {_stopped(stepped[0])} on its way."),
            evidence,
            _remedy(first, advice, session.progress),
        )
    if stepped:
        return _finding(
            first,
            "error",
            f"{begin}; the optimizer stepped on it in step {stepped[0].step}, so the weights are damaged, and later infinities "
            "and NaNs may come from that.",
            evidence,
            f"{_remedy(first, advice, session.progress)} Start again from a checkpoint before that step.",
        )
    if not all(event.skipped for event in events):
        return _finding(
            first,
            "warning",
            f"{begin}.",
            evidence,
            _remedy(first, advice, session.progress),
        )
    if _keeps_skipping(steps, skipped, session):
        return _finding(
            first,
            "warning",
            f"{begin}; {skipped} of {session.progress.steps} steps were skipped, more than a dynamic scaler's probing"
            f" explains.{_grows_often(session)}",
            evidence,
            _take(advice),
        )
    return _finding(
        first,
        "info",
        f"{begin}; {_who_skipped(events)} {'the step' if count == 1 else 'them all'}.",
        evidence,
    )


def _who_skipped(events: Sequence[Event]) -> str:
    """Return who discarded these events' gradients, and how, in words."""
    stories = {event.story for event in events}
    if len(stories) > 1:
        return "the scaler or the loop discarded"
    return "the loop dropped the gradients of" if stories == {DROPPED} else "the scaler skipped"


def _stopped(stepped: Event) -> str:
    """Return how a taken step can have kept an infinity or NaN from the weights; a weight's own gradient meets no ReLU."""
    return "dropped or replaced" if stepped.what == WEIGHT_GRADIENT else "masked (by a ReLU, say), dropped or replaced"


def _grows_often(session: Session) -> str:
    """Return a sentence on a scaler that doubles its scale again after a few steps; "" if none does."""
    intervals = [scaler.growth_interval for scaler in session.precision.scalers if scaler.enabled]
    short = min((each for each in intervals if each and each < SHORTEST_GROWTH_INTERVAL), default=None)
    return (
        f" The scaler doubles its scale after {short:g} steps without an overflow (growth_interval={short:g}; torch's default is "
        f"{LONGEST_GROWTH_INTERVAL}), and so overflows again and again."
        if short
        else ""
    )


def _drops_by_itself(session: Session) -> bool:
    """Return whether a loop with masters divides what they get, as by a loss scale, and has backwards without a step.

    On a CPU the watch sees whether gradients were dropped, on a GPU it would have to wait for that.
    """
    divides = any(found.what == "masters-given-smaller" for found in session.measurements)
    return divides and session.progress.backwards > session.progress.steps


def _remedy(first: Event, advice: LossScaleAdvice, progress: Progress) -> str:
    """Return advice for non-finite gradients; names the loss scale only if the scale caused them."""
    if _scale_too_high(first):
        return _take(advice)
    if first.what == WEIGHT_GRADIENT and progress.hides(first.module):
        return _SEARCH_COMPILED
    module = module_named(first.module)
    where = f"what comes after {module}, the loss first of all" if first.after else f"the backward of {module}"
    return (
        f"Look at {where}: a division by zero, a square root or logarithm at zero, an overflow. torch.amp.GradScaler would skip "
        "such steps, and mend nothing."
    )


def _scale_too_high(first: Event) -> str:
    """Return a clause saying that the loss scale was too high for a finite forward; "" if the scale was not the cause."""
    if first.value != "inf" or not first.forward_finite or (first.loss_scale is not None and first.loss_scale <= 1):
        return ""
    if first.loss_scale is not None:
        return f": the forward was finite, so a loss scale of {first.loss_scale:.15g} is too high"
    largest = max(first.last_maxima, default=0.0)
    before = f" (its largest finite magnitude in the steps before was {largest:.3g})" if largest else ""
    return f": the forward was finite, so whatever the loss is multiplied by is too high{before}"


def _never_updated(session: Session) -> str:
    """Return a clause saying that no update was ever applied; "" if one was, or if this is unknown."""
    if session.progress.weights_moved is not False or not session.progress.backwards:
        return ""
    return f"; none of {session.progress.backwards} backwards led to an update"


def _take(advice: LossScaleAdvice) -> str:
    """Return the advice on which loss scale to use, as a sentence."""
    if advice.recommended is None or (advice.needed is False and not advice.all_finite):
        # Where gradients overflowed, the finite ones alone do not show that scale 1 holds.
        return "Take a smaller loss scale; torch.amp.GradScaler, which skips such steps, finds one by itself."
    if advice.needed is False:
        return "Train without a loss scale (1): none is needed."
    return f"Take a loss scale of {advice.recommended:.17g}, or begin with it in a scaler that skips such steps."


def _keeps_skipping(steps: Sequence[int], skipped: int, session: Session) -> bool:
    """Return whether skips are too frequent, apart from the initial skips by which a dynamic scaler finds its scale.

    ``steps``: the steps seen to be non-finite, in order; ``skipped``: the number of skipped steps in the whole run.
    """
    opening = next((index for index, step in enumerate(steps) if step != index), len(steps))
    if opening > max(LONGEST_SEARCH, SKIPPED_TOLERANCE * session.progress.steps):
        return True
    if skipped >= session.progress.steps:
        scales = [event.loss_scale for event in session.events]
        # Every step so far was skipped, which cannot end unless the scale falls.
        return skipped >= FEWEST_SKIPS and len(set(scales)) == 1
    later, rest = skipped - opening, session.progress.steps - opening
    return later >= FEWEST_SKIPS and later > SKIPPED_TOLERANCE * rest


def _unseen_skips(session: Session) -> list[Finding]:
    """Return a finding on skipped steps that were not watched (the watch was off, or did not cover every step)."""
    progress, skipped = session.progress, session.progress.skipped_steps
    if not skipped or (session.info.watch and progress.watched_steps is None):
        return []
    often = skipped >= FEWEST_SKIPS and skipped > SKIPPED_TOLERANCE * progress.steps
    why = "the watch, whose time was limited, checked none of them" if session.info.watch else "the watch was off"
    return [
        Finding(
            "unwatched-skips",
            "warning" if often else "info",
            "",
            f"{skipped} of {progress.steps} steps were skipped for their gradients, and {why}: in which layer these turned "
            "infinite or NaN is not known."
            + (" That is more than a dynamic scaler's probing explains." if often else ""),
            {"skipped_steps": skipped, "steps": progress.steps},
            f"To have it named, watch every step: {_EVERY_STEP}.",
        )
    ]


def _from_counts(totals: dict[TensorKey, TensorWindow]) -> list[Finding]:
    """Return a finding on infinities and NaNs in the counts of the sampled steps, for runs without events."""
    broken = [key for key, window in totals.items() if window.histogram.infs or window.histogram.nans]
    in_forward = [key.name for key in broken if key.kind == ACTIVATION]
    names = in_forward or [key.name for key in broken if key.kind in GRADIENT_KINDS]
    if not names:
        return []
    where = "the activations" if in_forward else "gradients"
    elements = {name: sum(getattr(totals[key].histogram, name) for key in broken) for name in ("infs", "nans")}
    return [
        Finding(
            _ID,
            "error" if in_forward else "warning",
            names[0],
            f"There are {elements['infs']} infinities and {elements['nans']} NaNs in {where} of {some(names)}.",
            {**elements, "layers": len(names)},
            "Run with watch=True to learn in which step and module that begins.",
        )
    ]


def _finding(event: Event, severity: str, message: str, evidence: dict[str, object], fix: str = "") -> Finding:
    return Finding(_ID, severity, event.module, message, evidence, fix, step=None if event.phase == END else event.step)


def _value(event: Event) -> str:
    return "an inf" if event.value == "inf" else "a NaN"


def _what(event: Event) -> str:
    value = _value(event)
    rank = "" if event.rank is None else f" on rank {event.rank}"
    if event.given:
        return f"what the model was given was not finite{rank}"
    if event.of_input:
        return f"the {event.what.replace('_', ' ')} of an input of {module_named(event.tensor)} held {value}{rank}"
    if event.after:
        return f"the gradient that arrived at the output of {module_named(event.module)} held {value} already{rank}"
    return f"{event.quantity} held {value}{rank}"


def _known_cause(event: Event) -> str:
    return f" ({event.explanation})" if event.explanation else ""


def _evidence(event: Event) -> dict[str, object]:
    return {
        "step": event.step,
        "micro_batch": event.micro_batch,
        "phase": event.phase,
        "tensor": event.tensor,
        "value": event.value,
        "loss_scale": event.loss_scale,
        "last_maxima": list(event.last_maxima),
    }


def period(steps: Sequence[int]) -> str:
    """Return " and then every 5 steps" if three steps or more recur with a period of more than one; else ""."""
    gaps = {after - before for before, after in pairwise(steps)}
    return (
        f" and then every {min(gaps)} steps" if len(steps) >= FEWEST_SKIPS and len(gaps) == 1 and min(gaps) > 1 else ""
    )


def _first(count: int, step: int) -> str:
    return f"step {step}" if count == 1 else f"{count} steps: first in step {step}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
