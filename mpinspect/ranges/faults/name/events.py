"""Infinities and NaNs: their damage, their remedy, and whether a dynamic loss scale can handle them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from mpinspect.ranges.analysis.drift import LONGEST_GROWTH_INTERVAL, SHORTEST_GROWTH_INTERVAL
from mpinspect.ranges.analysis.evidence import survived
from mpinspect.ranges.faults.name.case import Case, LayerInFP32
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.forward import Inspect, InVain, loss_made_by, period, where_to_inspect
from mpinspect.ranges.kinds import ACTIVATION, GRADIENT_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.session import DROPPED, END, LOSSES, LOWEST_USEFUL_SCALE, TAKEN, Event, Session, module_named
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import bracketed, by_number, filled

_VALUES = {"inf": "an inf", "nan": "a NaN"}
#: Share of skipped steps above which a dynamic scaler is no longer just probing (its growth interval is hundreds of steps).
SKIPPED_TOLERANCE = 0.1
#: Consecutive skips that a dynamic scaler may need at the start to find its scale by halving: from 2^24 down to 1.
LONGEST_SEARCH = 24
#: Fewer skips than this are too few to call frequent.
FEWEST_SKIPS = 3


def _non_finite(case: Case) -> Iterator[Found]:
    """Infinities and NaNs: at most one finding each on the forward and the backward, or one from the counts alone.

    False alarms: A step that a scaler skips in search of its scale is reported as info.
    """
    events = case.events
    harmless = [event for event in events if event.phase == "forward" and event.gradients_finite]
    forward = [event for event in events if event not in harmless and _is_of_forward(event, case)]
    backward = _of_backward(case)
    yield from (_left_broken(event, case.session, harmless) for event in events if event.phase == END)
    found = []
    if harmless:
        found.append(_harmless(harmless))
    aside = [event for event in case.session.events if event.aside]
    if aside and not backward:
        found.append(_aside(aside))
    stepped = next((event.step for event in backward if event.story == TAKEN), None)
    if backward:
        found.append(_backward(backward, case))
    if forward and (stepped is None or forward[0].step <= stepped):
        # The earlier event is the cause, or nearer to the cause.
        found.insert(bool(backward) and backward[0].step < forward[0].step, _forward(forward, case.session))
    yield from found or _from_counts(case)


def _of_backward(case: Case) -> list[Event]:
    """Return the events of backwards after a finite forward."""
    return [event for event in case.events if event.phase == "backward" and not _is_of_forward(event, case)]


def _is_of_forward(event: Event, case: Case) -> bool:
    """Return whether an event's forward was not finite at any loss scale.

    A gradient that is a part of the loss, such as a penalty's, may be multiplied by the loss scale: its overflow is of the
    backward if a scaler skipped the step, and the run has more steps that were finite.
    """
    if event.phase == "forward" or event.forward_finite is not False:
        return event.phase == "forward"
    steps = {each.step for each in case.events}
    return not event.skipped or 2 * len(steps) > case.progress.steps


def _earliest(events: Sequence[Event]) -> Event:
    return min(events, key=lambda event: (event.step, event.micro_batch))


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


def _place(event: Event) -> str:
    """Return in words where the value was."""
    value = _VALUES[event.value]
    rank = filled(" on rank {}", event.rank)
    if event.given:
        return f"the model's input was not finite{rank}"
    if event.of_input:
        return f"the {event.what.replace('_', ' ')} of an input of {module_named(event.tensor)} held {value}{rank}"
    if event.after:
        return f"the gradient that arrived at the output of {module_named(event.module)} held {value} already{rank}"
    return f"{event.quantity} held {value}{rank}"


def _steps(count: int, first: int) -> str:
    return f"step {first}" if count == 1 else f"{count} steps: first in step {first}"


# -- events without harm, and weights that were broken at the end -------------------------------------------------------


class _Left(Sentences):
    HELD = "When the run ended {tensor!r} held {a_value}; {explanation}."
    WATCH_OFF = "The step in which that began is not known: the watch was off."
    WATCH_LIMITED = (
        "The step in which that began is not known: the watch checked {watched} of {steps} steps, since its time was "
        "limited."
    )
    ALL_FINITE = (
        "The step in which that began is not known: every value that the watch read in the steps taken was finite."
    )
    ALL_FINITE_BUT_HARMLESS = (
        "The step in which that began is not known: every value that the watch read in the steps taken was finite, except in "
        "step {harmless_step}, where {harmless}."
    )
    RUN_AGAIN = (
        "Run it again with the watch at every step (watch=True without max_overhead, or mpinspect run --max-overhead none): it "
        "names the step and the module."
    )
    LOOK = "Look at what else changes the weights: the optimizer's arithmetic (learning rate, eps), or code that sets them."


def _left_broken(event: Event, session: Session, harmless: Sequence[Event]) -> Found:
    """Return the finding for weights that were non-finite when the run ended; ``harmless``: events with finite gradients."""
    watched = session.progress.watched_steps
    words = {
        "a_value": _VALUES[event.value],
        "explanation": event.explanation,
        "watched": watched,
        "steps": session.progress.steps,
    }
    says, fix = _Left.ALL_FINITE, _Left.LOOK
    if not session.info.watch:
        says, fix = _Left.WATCH_OFF, _Left.RUN_AGAIN
    elif watched is not None:
        says, fix = _Left.WATCH_LIMITED, _Left.RUN_AGAIN
    elif harmless:
        first = min(harmless, key=lambda event: event.step)
        says = _Left.ALL_FINITE_BUT_HARMLESS
        words |= {"harmless_step": first.step, "harmless": _place(first)}
    return Found((_Left.HELD, says), _evidence(event), words, fix, layer=event.module)


class _Harmless(Sentences):
    ASIDE = (
        "The backward of another model's loss through this one was not finite in {when}, where {place}. This model's optimizer "
        "did not use these gradients."
    )
    LOSS = "In step {step} {place} and every gradient was finite nevertheless: they do not depend on its value."
    LOOK = (
        "The training does not depend on this value, but a mean, a scheduler or a best checkpoint that reads it does. Search for "
        "a logarithm or a division that is multiplied by zero or masked afterwards: 0 * log(0) is NaN, and "
        "torch.special.xlogy(p, p) is 0."
    )
    INTENDED = "In step {step} {place} and every gradient was finite nevertheless: it may be intended (a mask)."


def _aside(events: Sequence[Event]) -> Found:
    first, steps = events[0], len({event.step for event in events})
    return Found(
        _Harmless.ASIDE,
        {**_evidence(first), "steps": steps},
        {"when": _steps(steps, first.step), "place": _place(first)},
        layer=first.module,
        severity="info",
        step=first.step,
    )


def _harmless(events: Sequence[Event]) -> Found:
    first = _earliest(events)
    # A mask may hold infinities, but no NaN.
    is_loss = first.what in LOSSES or (first.value == "nan" and not first.module)
    return Found(
        _Harmless.LOSS.when(is_loss) or _Harmless.INTENDED,
        _evidence(first),
        {"place": _place(first)},
        _Harmless.LOOK.when(is_loss),
        layer=first.module,
        severity="warning" if is_loss else "info",
        step=first.step,
    )


# -- the forward --------------------------------------------------------------------------------------------------------


class _Forward(Sentences):
    BROKE = "The forward was not finite in {when}{period}, where {place}{made_by}{cause}."
    BACKED_OFF = (
        "The loss scale was backed off for it {times}, which can't help: the forward does not depend on it, and every such step "
        "only halves the scale."
    )
    NO_SCALE_HELPS = "No loss scale repairs a forward."
    NAME_OPERATOR = "Inspector(model, second=[{step}]) computes that step twice and names the operator."


def _forward(events: Sequence[Event], session: Session) -> Found:
    first = _earliest(events)
    steps = sorted({event.step for event in events})
    skipped = len({event.step for event in events if event.skipped})
    when = _steps(len(steps), first.step)
    inspect, words = where_to_inspect(first, session)
    is_too_large = inspect is Inspect.MODULE_IN_FP16 and bool(first.module) and not first.after
    return Found(
        (_Forward.BROKE, _Forward.BACKED_OFF.when(skipped)),
        {**_evidence(first), "steps": len(steps), "skipped_steps": skipped},
        {
            **words,
            "when": f"each of the {when}" if len(steps) == session.progress.steps > 1 else when,
            "period": period(steps),
            "times": by_number(skipped, "once", f"{skipped} times"),
            "lowered": skipped,
            "place": _place(first),
            "made_by": loss_made_by(first, session),
            "cause": bracketed(first.explanation),
        },
        (
            inspect,
            _Forward.NO_SCALE_HELPS,
            InVain.NEW_SCALER.when(skipped >= FEWEST_SKIPS),
            _Forward.NAME_OPERATOR.when(is_too_large),
        ),
        LayerInFP32.of(session.precision) if is_too_large else (),
        layer=first.module,
        step=first.step,
    )


# -- the backward -------------------------------------------------------------------------------------------------------


class _Backward(Sentences):
    BROKE = "The backward was not finite in {when}, where {place}."
    SCALE_TOO_HIGH = "The forward was finite, so a loss scale of {loss_scale:.15g} is too high."
    FACTOR_TOO_HIGH = "The forward was finite, so the factor that multiplies the loss is too high{at_loss}."
    SCALE_IS_INNOCENT = (
        "It was not finite at a loss scale of {lowest:.3g} either: a still lower one is unlikely to help."
    )
    NEVER_UPDATED = "None of {backwards} backwards led to an update."

    DROPPED_BY_HAND = (
        "The forwards after it are finite: the loop, which has more backwards than steps and seems to multiply its loss by a "
        "scale by hand, seems to drop such gradients."
    )
    SURVIVED = (
        "The optimizer stepped in step {stepped} and the forwards after it are finite: no infinity or NaN reached a "
        "weight."
    )
    REPLACED = "It was dropped or replaced on its way."
    MASKED = "It was masked (by a ReLU, say), dropped or replaced on its way."
    DAMAGED = (
        "The optimizer stepped on it in step {stepped}, so the weights are damaged, and later infinities and NaNs may come from "
        "that."
    )
    SKIPS_TOO_OFTEN = (
        "{skipped_steps} of {all_steps} steps were skipped, more than a dynamic scaler's probing explains."
    )
    SKIPPED = "{skipped_steps} of {all_steps} steps were skipped."
    GROWS_OFTEN = (
        "The scaler doubles its scale after {interval:count step} without an overflow (growth_interval={interval:g}; torch's "
        "default is {default_interval}), and so overflows again and again."
    )
    SCALER_SKIPPED = "The scaler skipped {all}."
    LOOP_DROPPED = "The loop dropped the gradients of {all}."
    ONE_OF_BOTH = "The scaler or the loop discarded {all}."

    SMALLER_SCALE = "Take a smaller loss scale; torch.amp.GradScaler, which skips such steps, finds one by itself."
    BEGIN_LOWER = "Let the scaler begin at a smaller loss scale{fell_to}."
    GROW_LATER = "Let the scaler grow after more steps: its default is growth_interval={default_interval}."
    NO_SCALE = "Train without a loss scale (1): none is needed."
    TAKE_SCALE = "Take a loss scale of {recommended:.17g}, or begin with it in a scaler that skips such steps."
    SEARCH_COMPILED = (
        "Inside compiled code no module is seen: run again with eager_samples=True and every=1 (mpinspect run --eager-samples "
        "--every 1), and the event names where it arises. If no event occurs then, the compiled code makes it: compile with "
        "torch._inductor.config.emulate_precision_casts = True, which rounds where eager code rounds, and do not "
        "compile modules that still differ."
    )
    LOOK = (
        "Look at the {code}: a division by zero, a square root or logarithm at zero, an overflow. torch.amp.GradScaler would "
        "skip such steps, but not remove their cause."
    )
    RESTART = "Start again from a checkpoint before that step."


def _backward(events: Sequence[Event], case: Case) -> Found:
    session, first = case.session, _earliest(events)
    steps = sorted({event.step for event in events})
    # A step that was not watched may have left no event, only a count in ``skipped_steps``.
    for_others = {event.step for event in session.events if event.skipped}.difference(steps)
    skipped = max(
        len({event.step for event in events if event.skipped}), session.progress.skipped_steps - len(for_others)
    )
    count = max(len(steps), skipped)
    stepped = next((event for event in events if event.story == TAKEN), None)
    severity, outcome, fix = _outcome(events, case, skipped)
    interval, largest = _short_interval(session), max(first.last_maxima, default=0.0)
    lowest = _lowest_scale(events)
    lowest_left = min((change.scale for change in session.progress.scales if change.scale), default=math.inf)
    is_never = session.progress.weights_moved is False and session.progress.backwards
    return Found(
        (
            _Backward.BROKE,
            None if case.is_explained else _scale_too_high(first, events),
            _Backward.SCALE_IS_INNOCENT.when(lowest <= LOWEST_USEFUL_SCALE),
            _Backward.NEVER_UPDATED.when(is_never),
            *outcome,
            _Backward.GROWS_OFTEN.when(_Backward.SKIPS_TOO_OFTEN in outcome and interval),
        ),
        {**_evidence(first), "steps": count, "skipped_steps": skipped},
        {
            "when": _steps(count, first.step),
            "place": _place(first),
            "at_loss": filled(" (the loss's largest finite magnitude in the steps before was {:.3g})", largest or None),
            "all": by_number(count, "the step", "them all"),
            "code": _code(first),
            "lowest": lowest,
            "backwards": session.progress.backwards,
            "stepped": stepped and stepped.step,
            "all_steps": session.progress.steps,
            "interval": interval and int(interval),
            "default_interval": LONGEST_GROWTH_INTERVAL,
            "recommended": case.advised.advice.recommended,
            "fell_to": filled(", such as {:.15g}, to which it fell", lowest_left if lowest_left < lowest else None),
        },
        fix,
        layer=first.module,
        severity=severity,
        step=first.step,
    )


def _outcome(
    events: Sequence[Event], case: Case, skipped: int
) -> tuple[str, tuple[_Backward, ...], tuple[_Backward, ...]]:
    """Return the severity, the outcome of the steps, and the fix."""
    session = case.session
    stepped = next((event for event in events if event.story == TAKEN), None)
    if stepped is not None and survived(stepped, session):
        if _drops_by_itself(session):
            return "info", (_Backward.DROPPED_BY_HAND,), ()
        return "warning", _survived(stepped, case), (_remedy(events, case),)
    if stepped is not None:
        return "error", (_Backward.DAMAGED,), (_remedy(events, case), _Backward.RESTART)
    if not all(event.skipped for event in events):
        return "warning", (), (_remedy(events, case),)
    if _lowest_scale(events) <= LOWEST_USEFUL_SCALE:
        return "warning", (_Backward.SKIPPED,), (_Backward.LOOK,)
    if _keeps_skipping(sorted({event.step for event in events}), skipped, session):
        fix = _Backward.GROW_LATER.when(_short_interval(session)) or _take(case)
        return "warning", (_Backward.SKIPS_TOO_OFTEN,), (fix,)
    return "info", (_discarded(events),), ()


def _survived(stepped: Event, case: Case) -> tuple[_Backward, ...]:
    if case.is_explained:
        return (_Backward.SURVIVED,)
    # A weight's own gradient meets no ReLU.
    return _Backward.SURVIVED, _Backward.REPLACED.when(stepped.what == WEIGHT_GRADIENT) or _Backward.MASKED


def _discarded(events: Sequence[Event]) -> _Backward:
    stories = {event.story for event in events}
    if len(stories) > 1:
        return _Backward.ONE_OF_BOTH
    return _Backward.LOOP_DROPPED.when(stories == {DROPPED}) or _Backward.SCALER_SKIPPED


def _short_interval(session: Session) -> float | None:
    """Return the growth interval of a scaler that doubles its scale again after a few steps; None if none does."""
    intervals = [scaler.growth_interval for scaler in session.precision.scalers if scaler.enabled]
    return min((each for each in intervals if each and each < SHORTEST_GROWTH_INTERVAL), default=None)


def _drops_by_itself(session: Session) -> bool:
    """Return whether a loop divides its masters' gradients, as by a loss scale, and has backwards without a step.

    On a CPU the watch sees whether gradients were dropped, on a GPU it would have to wait for that.
    """
    divides = any(found.what == "masters-given-smaller" for found in session.measurements)
    return divides and session.progress.backwards > session.progress.steps


def _remedy(events: Sequence[Event], case: Case) -> _Backward:
    """Return advice for non-finite gradients; names the loss scale only if the scale caused them."""
    first = _earliest(events)
    if _scale_too_high(first, events):
        return _take(case)
    if first.what == WEIGHT_GRADIENT and case.progress.hides(first.module):
        return _Backward.SEARCH_COMPILED
    return _Backward.LOOK


def _code(first: Event) -> str:
    """Return in words the code whose gradients were not finite."""
    return ("backward of {}", "code after {}, first at the loss")[bool(first.after)].format(module_named(first.module))


def _lowest_scale(events: Sequence[Event]) -> float:
    """Return the lowest loss scale at which a backward was not finite; inf if none is known."""
    return min((event.loss_scale for event in events if event.loss_scale is not None), default=math.inf)


def _scale_too_high(first: Event, events: Sequence[Event]) -> _Backward | None:
    """Return a sentence that the loss scale was too high for a finite forward; None if the scale was not the cause."""
    is_low = (first.loss_scale is not None and first.loss_scale <= 1) or _lowest_scale(events) <= LOWEST_USEFUL_SCALE
    if first.value != "inf" or not first.forward_finite or is_low:
        return None
    if first.loss_scale is not None:
        return _Backward.SCALE_TOO_HIGH
    return _Backward.FACTOR_TOO_HIGH


def _take(case: Case) -> _Backward:
    """Return the advice on which loss scale to use."""
    advice = case.advised.advice
    if advice.recommended is None or (advice.needed is False and not advice.all_finite):
        # Where gradients overflowed, the finite ones alone do not show that scale 1 holds.
        return _Backward.BEGIN_LOWER.when(case.scalers) or _Backward.SMALLER_SCALE
    return _Backward.NO_SCALE.when(advice.needed is False) or _Backward.TAKE_SCALE


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
    later, rest = skipped - opening - _search(steps[opening:], session.progress.steps), session.progress.steps - opening
    return later >= FEWEST_SKIPS and later > SKIPPED_TOLERANCE * rest


def _search(steps: Sequence[int], of: int) -> int:
    """Return the number of skips, but for one, of the longest search for a lower scale that ended within the run: gradients may
    grow once, as at new data, and a dynamic scaler follows."""
    bursts = [[step for _, step in group] for _, group in groupby(enumerate(steps), lambda each: each[1] - each[0])]
    ended = (len(burst) for burst in bursts if len(burst) <= LONGEST_SEARCH and burst[-1] + len(burst) < of)
    return max(ended, default=1) - 1


# -- without events -----------------------------------------------------------------------------------------------------


class _Counts(Sentences):
    HELD = "There are {infs} infinities and {nans} NaNs in {what} of {names:some}."
    WATCH = "Run with watch=True to learn in which step and module that begins."


def _from_counts(case: Case) -> Iterator[Found]:
    """Yield the infinities and NaNs in the counts of the sampled steps, for runs without events."""
    broken = [key for key, window in case.totals.items() if window.histogram.infs or window.histogram.nans]
    in_forward = [key.name for key in broken if key.kind == ACTIVATION]
    names = in_forward or [key.name for key in broken if key.kind in GRADIENT_KINDS]
    if not names:
        return
    elements = {name: sum(getattr(case.totals[key].histogram, name) for key in broken) for name in ("infs", "nans")}
    yield Found(
        _Counts.HELD,
        {**elements, "layers": len(names)},
        {"names": names, "what": ("gradients", "the activations")[bool(in_forward)]},
        _Counts.WATCH,
        layer=names[0],
        is_mild=not in_forward,
    )


class _Unwatched(Sentences):
    SKIPPED = (
        "{skipped_steps} of {steps} steps were skipped for their gradients, and the watch{off}: in which layer these turned "
        "infinite or NaN is not known."
    )
    TOO_OFTEN = "That is more than a dynamic scaler's probing explains."
    WATCH = "To have it named, watch every step: watch=True without max_overhead, or mpinspect run --max-overhead none."


def _unwatched_skips(case: Case) -> Iterator[Found]:
    """Skipped steps that were not watched: the watch was off, or did not cover every step.

    False alarms: A few skips, as a scaler needs to find its scale, are reported as info.
    """
    progress, info, skipped = case.progress, case.session.info, case.progress.skipped_steps
    if _of_backward(case) or not skipped or (info.watch and progress.watched_steps is None):
        return
    is_often = skipped >= FEWEST_SKIPS and skipped > SKIPPED_TOLERANCE * progress.steps
    yield Found(
        (_Unwatched.SKIPPED, _Unwatched.TOO_OFTEN.when(is_often)),
        {"skipped_steps": skipped, "steps": progress.steps},
        {"off": (" was off", ", whose time was limited, checked none of them")[info.watch]},
        _Unwatched.WATCH,
        is_mild=not is_often,
    )


FAULTS = (
    Fault(
        "non-finite-event",
        "error",
        _non_finite,
        (_Left, _Harmless, _Forward, Inspect, InVain, LayerInFP32, _Backward, _Counts),
    ),
    Fault("unwatched-skips", "warning", _unwatched_skips, (_Unwatched,)),
)
