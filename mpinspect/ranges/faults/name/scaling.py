"""Faults of loss scales that are too high, too low, missing, shared or of no use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32
from mpinspect.ranges.analysis.evidence import survived
from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.scale_window import HEADROOM
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.analysis.visibility import Visibility, always_zero
from mpinspect.ranges.faults.name.case import Case, FP32Weights, LayerInFP32, grouped, is_power_of_two
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.forward import Inspect, period, was_in_half, where_to_inspect
from mpinspect.ranges.faults.name.replaced import replaced
from mpinspect.ranges.kinds import GRADIENT_KINDS, phrase
from mpinspect.ranges.records import ChangedBeforeStep, DividedInHalf, MastersGivenSmaller, NewScalers
from mpinspect.ranges.session import DROPPED, LOSSES, SKIPPED, TAKEN, Event, TensorKey, module_named
from mpinspect.reporting.sentences import Said, Sentences
from mpinspect.reporting.words import and_more, filled, number_or_power

#: A scaler's initial search is worth a warning if it takes more than this share of the run, and at least three steps.
_SEARCH_TOLERANCE = 0.1
_FEWEST_STEPS = 3
#: torch.amp.GradScaler's default initial scale, as a power of two.
LOG2_INITIAL = 16
#: How many of the steps that overflow a sentence names.
_NAMED = 3
#: A scaler whose backoff factor is larger hardly lowers its scale: torch's default is 0.5.
_HARDLY_LOWER = 0.99
#: Powers of two by which scales may differ and count as equal.
_ALIKE = 0.01
#: Share of overflowing steps from which on a scale counts as never settling.
_MOST = 0.5
#: A gradient within this factor of FP16's largest number may overflow in the next step without being an outlier.
_NEAR = 4.0


class _Scaler(Sentences):
    """Code that several of these faults share."""

    NEW = "# once, before the loop\nscaler = torch.amp.GradScaler({device_type})"
    BEGINNING_AT = (
        "# once, before the loop\nscaler = torch.amp.GradScaler(\n    {device_type}, init_scale=2.0**{log2_start}\n)"
    )


def _skips(case: Case) -> list[Event]:
    """Return the first event of each step that overflowed in the backward while the forward was finite."""
    by_step = {
        event.step: event
        for event in reversed(case.events)
        if event.phase == "backward" and event.forward_finite is not False
    }
    return [by_step[step] for step in sorted(by_step)]


def _opening(skips: Sequence[Event]) -> list[Event]:
    """Return the skipped steps with which the run begins."""
    return [event for place, event in enumerate(skips) if event.step == place and event.skipped]


def _serves_none(case: Case) -> bool:
    """Return whether no one loss scale serves every layer."""
    return case.advised.decision is not None and case.advised.decision.window.is_empty


def _powers(scale: float) -> float:
    return math.log2(scale) if scale > 0 else -math.inf


def _rise(case: Case, steps: int) -> float:
    """Return by how many powers of two the run's scalers can have raised their scale in a number of steps."""
    intervals = [scaler.growth_interval for scaler in case.scalers if scaler.growth_interval]
    factor = max((scaler.growth_factor for scaler in case.scalers if scaler.growth_factor), default=2.0)
    return (steps // min(intervals, default=1) + 1) * max(_powers(factor), 0.0)


def _restarts(case: Case) -> list[int]:
    """Return the steps in which the scale was found back at its initial value, above what growth explains, and overflowed."""
    history = [change for change in case.session.scale_history() if change.scale]
    overflowed = {event.step for event in _skips(case)}
    return [
        after.step
        for before, after in pairwise(history)
        if after.scale == history[0].scale
        and after.step in overflowed
        and _powers(after.scale or 0) - _powers(before.scale or 0) > _rise(case, after.step - before.step)
    ]


def _numbered(steps: Sequence[int]) -> str:
    """Return the numbers of the first steps of a list, in words."""
    return ", ".join(map(str, steps[:_NAMED])) + and_more(len(steps) - _NAMED, ", ...")


# -- the first search ---------------------------------------------------------------------------------------------------


class _Initial(Sentences):
    TOO_LARGE = (
        "The initial loss scale, {init_scale:scale}, is at least {times} times ({powers_of_two} powers of two) too large{whom}: "
        "{opened} skipped."
    )
    SETTLED = "By then the scaler had lowered the scale to {at_most:scale}."
    SETTLED_TOO_HIGH = (
        "By then the scaler had lowered the scale to {at_most:scale}; step {again} overflowed at that too."
    )
    NOT_SETTLED = "The scale is at most {at_most:scale}, and not settled."
    BEGIN = "Begin at {start:scale}."
    BEGIN_OR_LOWER = "Begin at {start:scale} or lower."
    RUN_ON = "Continue until the scaler takes a step: that scale works."


def _initial_scale_too_high(case: Case) -> Iterator[Found]:
    """A dynamic scaler that skipped all its first steps until its scale was low enough.

    False alarms: Every dynamic scaler may skip a few steps at first: up to two steps, or a tenth of the run, are only
    "info".
    """
    skips, steps = _skips(case), case.progress.steps
    opening = _opening(skips)
    first = _search_begins_at(opening)
    is_innocent = any(event.broken_phase == "backward" for event in skips)
    if first is None or is_innocent or len(_restarts(case)) > 1 or opening[0] in _periodic(case):
        # Recurring skips have a finding of their own, and backwards that no loss scale repairs.
        return
    settled = _settled(opening, case)
    again = next((event for event in skips[len(opening) :] if event.loss_scale == settled), None)
    overflows_again = again is not None
    powers = round(_powers(first) - _powers(settled)) + overflows_again
    skipped, advice = len(opening), case.advised.advice
    is_settled = skipped < steps
    # Where no one scale serves every layer, a scale without overflow is no remedy.
    is_grave = skipped >= _FEWEST_STEPS and skipped > _SEARCH_TOLERANCE * steps and not _serves_none(case)
    needed = (advice.needed and advice.recommended) or 2.0**LOG2_INITIAL
    start = min(settled / 2**overflows_again, advice.highest or settled, needed)
    says, fix = _Initial.NOT_SETTLED, _Initial.RUN_ON
    if is_settled:
        says = _Initial.SETTLED_TOO_HIGH.when(overflows_again) or _Initial.SETTLED
        fix = _Initial.BEGIN_OR_LOWER.when(advice.needed is False) or _Initial.BEGIN
    yield Found(
        (_Initial.TOO_LARGE, says),
        {
            "init_scale": first,
            "settled": settled if is_settled else None,
            "at_most": settled,
            "powers_of_two": powers,
            "skipped_steps": skipped,
            "steps": steps,
        },
        {
            "times": 2**powers,
            "whom": _whom(case),
            "opened": _opened(skipped, steps),
            "again": again and again.step,
            "start": start,
            "log2_start": round(_powers(start)),
        },
        fix.when(is_grave),
        _Scaler.BEGINNING_AT.when(is_grave and is_settled),
        layer=opening[0].module,
        is_mild=not is_grave,
        step=opening[0].step,
    )


def _search_begins_at(opening: Sequence[Event]) -> float | None:
    """Return the initial scale of a search by skipped steps; None without a search, or if the scale did not fall."""
    if not opening:
        return None
    first, last = opening[0].loss_scale, opening[-1].loss_scale
    if not first or not math.isfinite(first) or not last or (len(opening) > 1 and last > first / 2):
        return None
    return first


def _settled(opening: Sequence[Event], case: Case) -> float:
    """Return the scale after the search. The last of its scales overflowed too; the next one holds if a step was taken at it."""
    halved = (opening[-1].loss_scale or 0.0) / 2
    history = case.session.scale_history()
    after = next((each.scale for each in history if each.step > opening[-1].step and each.scale), None)
    return min(after or halved, halved)


def _whom(case: Case) -> str:
    """Return the layer for which the scale is too large, if another one needs it; else ""."""
    overflowing = (conflict.needs_small for conflict in case.advised.advice.conflicts if _serves_none(case))
    return filled(" for {!r}", next(overflowing, None))


def _opened(skipped: int, steps: int) -> str:
    """Return in words the steps with which the run begins, with their verb."""
    if steps == 1:
        return "its only step was"
    if skipped >= steps:
        return f"all {steps} steps were"
    if skipped == 1:
        return f"the first of {steps} steps was"
    return f"the first {skipped} of {steps} steps were"


# -- scalers that are made again ----------------------------------------------------------------------------------------


class _Anew(Sentences):
    EACH_STEP = (
        "A new GradScaler is made for each step ({new:.0f} in the first {steps:.0f} steps): its reaction to an overflow is "
        "lost, and the loss scale stays at {loss_scale:scale}."
    )
    OVERFLOWS = "At that scale the gradients overflow: {skipped_steps} of {all_steps} steps were skipped."
    SEVERAL_TIMES = (
        "The loss scale began again at {loss_scale:scale} {often} (steps {numbers}), as with a new GradScaler, and its search "
        "was repeated each time: {skipped_steps} of {steps} steps were skipped."
    )
    ONCE_BEFORE_LOOP = "Make the scaler once, before the loop."
    ONE_FOR_RUN = (
        "Make one scaler for the run. Where a job continues from a checkpoint, save and load the scaler's state with it, or "
        "begin at a lower scale."
    )
    BEFORE_LOOP = "scaler = torch.amp.GradScaler({device_type})\nfor batch in loader:\n    train_step(batch, scaler)"
    SAVE_AND_LOAD = 'checkpoint["scaler"] = scaler.state_dict()\nscaler.load_state_dict(checkpoint["scaler"])'


def _made_anew(case: Case) -> NewScalers | None:
    """Return the last count of steps with a new scaler, if most steps have one and the scale never changed."""
    found = list(case.recorded(NewScalers))
    if run_format(case.session) in (BFLOAT16, FLOAT32):
        # There no scale is of use.
        return None
    # A new scaler that loads the state of the last one continues with its scale.
    scales = {change.scale for change in case.session.scale_history()}
    if not found or found[-1].new <= _MOST * found[-1].steps or len(scales) != 1 or None in scales:
        return None
    return found[-1]


def _scaler_made_anew(case: Case) -> Iterator[Found]:
    """A scaler that is made again for each step, or each epoch or job, so that its scale is the initial one again.

    False alarms: A new scaler now and then (for each epoch, after a checkpoint) is reported only if the initial scale overflows
    each time and more than a tenth of the steps are skipped. One that continues with the state of the last is not reported.
    """
    made = _made_anew(case)
    if made is None:
        yield from _search_repeated(case)
        return
    steps, lost = case.progress.steps, len([event for event in _skips(case) if event.skipped])
    yield Found(
        (_Anew.EACH_STEP, _Anew.OVERFLOWS.when(lost)),
        {**made.figures, "loss_scale": case.session.scale_history()[0].scale, "skipped_steps": lost},
        {"all_steps": steps},
        _Anew.ONCE_BEFORE_LOOP,
        _Anew.BEFORE_LOOP,
        is_grave=lost >= max(_MOST * steps, _FEWEST_STEPS),
        step=made.step,
    )


def _search_repeated(case: Case) -> Iterator[Found]:
    """Yield a loss scale that begins again at its initial value, as where a checkpoint lacks the scaler."""
    restarts, steps = _restarts(case), case.progress.steps
    lost = max(len([event for event in _skips(case) if event.skipped]), case.progress.skipped_steps)
    if len(restarts) < 2 or lost < _FEWEST_STEPS or lost <= _SEARCH_TOLERANCE * steps:
        return
    period = _only([after - before for before, after in pairwise([0, *restarts])])
    scale = next(change.scale for change in case.session.scale_history() if change.scale)
    yield Found(
        _Anew.SEVERAL_TIMES,
        {"loss_scale": scale, "restarts": restarts, "period": period, "skipped_steps": lost, "steps": steps},
        {"numbers": _numbered(restarts), "often": filled("every {} steps", period) or "several times"},
        _Anew.ONE_FOR_RUN,
        _Anew.SAVE_AND_LOAD,
        is_grave=lost >= _MOST * steps,
        is_inferred=True,
        step=restarts[0],
    )


def _only(gaps: Sequence[int]) -> int | None:
    """Return the one value of all gaps; None if they differ, or for an empty list."""
    if len(set(gaps)) != 1:
        return None
    return gaps[0]


# -- scales that stay too high or too low -------------------------------------------------------------------------------


class _High(Sentences):
    STAYS = (
        "The loss scale stays at {loss_scale:scale}, at which the gradients overflow from step {step} on while the forward is "
        "finite."
    )
    SKIPPED = "{skipped} of {steps} steps were skipped, without any update."
    STEPPED = "The optimizer stepped on infinities in step {stepped_in}."
    STEPPED_ON_REPLACED = (
        "The optimizer still stepped ({stepped} of {steps} steps), on gradients that had been made finite."
    )
    TAKE_REPLACEMENT_OUT = "Remove the replacement: the scaler then lowers the scale by itself."
    DYNAMIC = "Let a dynamic scaler find the scale."
    BEGIN = "Begin at {recommended:scale}, and let the scaler lower it by itself."
    SCALE_BY = "Scale by {recommended:scale}, and let a scaler skip steps that overflow."
    UPDATE = "Call scaler.update() without an argument after each scaler.step(): it lowers the scale after an overflow."
    STEP_AND_UPDATE = "scaler.step(optimizer)\nscaler.update()"
    BACKOFF = (
        "A backoff_factor of {backoff:.12g} hardly lowers it: leave backoff_factor and growth_factor at their defaults."
    )


def _scale_too_high(case: Case) -> Iterator[Found]:
    """A scale at which most steps overflow, and that does not fall.

    False alarms: A run that ends while the scaler is still searching is reported only if its scale has not fallen.
    """
    skips, steps = _skips(case), case.progress.steps
    over = [event for event in skips if event.value == "inf" and event.loss_scale and event.loss_scale > 1]
    if _made_anew(case) is not None or len(_restarts(case)) > 1:
        # The reason why the scale stays has a finding of its own.
        return
    if not over or len({event.step for event in skips}) < max(_MOST * steps, 1):
        return
    first, last = over[0].loss_scale or 0.0, over[-1].loss_scale or 0.0
    stepped = [event for event in over if event.skipped is False]
    came_down = math.isfinite(first) and last <= first / 2
    if came_down or (not stepped and len(over) < _FEWEST_STEPS):
        return
    on_replaced = bool(stepped and replaced(case))
    wanted = _wanted(first, case)
    backoff = next((each.backoff_factor for each in case.scalers if (each.backoff_factor or 0) > _HARDLY_LOWER), None)
    fix: _High = _High.DYNAMIC
    code: _High | _Scaler = _Scaler.NEW
    if wanted:
        fix, code = _High.BEGIN.when(case.scalers) or _High.SCALE_BY, _Scaler.BEGINNING_AT
    is_hidden = on_replaced and case.scalers
    # A single update() after an overflow would have changed the scale.
    is_never_updated = first == last and any(each.type == "GradScaler" and each.backoff_factor for each in case.scalers)
    if is_never_updated and not stepped and not backoff:
        fix, code = _High.UPDATE, _High.STEP_AND_UPDATE
    yield Found(
        (_High.STAYS, _High.STEPPED_ON_REPLACED.when(on_replaced) or _High.STEPPED.when(stepped) or _High.SKIPPED),
        {"loss_scale": first, "overflowing_steps": len(over), "steps": steps, "recommended": wanted},
        {
            "skipped": len(skips),
            "stepped": len({each.step for each in stepped}),
            "stepped_in": next((each.step for each in stepped), None),
            "backoff": backoff,
            "log2_start": round(_powers(wanted or 1.0)),
        },
        (_High.TAKE_REPLACEMENT_OUT.when(is_hidden) or fix, _High.BACKOFF.when(backoff)),
        code.when(not is_hidden),
        layer=over[0].module,
        step=over[0].step,
    )


def _wanted(first: float, case: Case) -> float | None:
    """Return a scale to begin at, below the run's; None if a scaler has to find it.

    It is not known how far a gradient overflowed: a scaler finds out, where the finite ones need no scale.
    """
    advice = case.advised.advice
    is_unneeded = case.scalers and advice.needed is False
    if is_unneeded or not advice.recommended or advice.recommended >= first:
        return None
    return advice.recommended


class _Low(Sentences):
    TOO_SMALL = (
        "The loss scale, {loss_scale:scale}, is too small: FP16 flushes too much of {tensor}, whose values need one {times} "
        "times ({powers_of_two} powers of two) larger, at least {lowest:scale}."
    )
    PROBABLY_TOO_SMALL = (
        "The loss scale, {loss_scale:scale}, is probably too small: FP16 flushes too much of {tensor}, judging by the many "
        "values just above the smallest that it holds; {lowest:scale} would preserve all but 1% of the sum of magnitudes, "
        "however much was flushed."
    )
    SCALE_BY = "Scale by {wanted:scale}, or begin with it in a dynamic scaler."
    ZEROS = "The gradients of {zeros:some 3} were all zero: a large scale serves them best."


def _scale_too_low(case: Case) -> Iterator[Found]:
    """An FP16 run whose loss scale is below its gradients' need in at least nine of ten steps.

    False alarms: The need is judged by the lost share of the sum of magnitudes. If small gradients were flushed before they
    could be counted, it is inferred.
    """
    decision, scales = case.advised.decision, case.progress.scales
    known = [change.scale for change in scales if change.scale]
    if run_format(case.session) != FLOAT16 or decision is None or not known or len(known) < len(scales):
        return
    # Other findings cover a script that does not scale at all, and gradients that no scale serves.
    if _serves_none(case) or not case.precision.weights or (not case.scalers and set(known) == {1.0}):
        return
    needs, lowest = decision.neediest, decision.window.log2_lowest
    says, is_inferred = _Low.TOO_SMALL, False
    if lowest <= _powers(known[-1]) and decision.likely_needed:
        # Values flushed before counting show by a crowd of values just above the flush edge.
        needs, lowest = decision.likely, decision.likely.log2_certain
        says, is_inferred = _Low.PROBABLY_TOO_SMALL, True
    spans = list(case.progress.scale_spans())
    below = [(scale, end - start) for scale, start, end in spans if scale and _powers(scale) < lowest]
    if sum(steps for _, steps in below) < 0.9 * (spans[-1][2] - spans[0][1]):
        return
    used = below[-1][0]
    powers = round(lowest - _powers(used))
    wanted = min(max(lowest, decision.log2_scale), max(decision.window.log2_highest, lowest))
    yield Found(
        says,
        {"loss_scale": used, "log2_lowest": lowest, "log2_recommended": wanted, "powers_of_two": powers},
        {
            "tensor": phrase(*needs.key),
            "times": 2**powers,
            "lowest": 2.0**lowest,
            "wanted": 2.0**wanted,
            "zeros": decision.zeros,
            "log2_start": wanted,
        },
        (_Low.SCALE_BY, _Low.ZEROS.when(decision.zeros)),
        _Scaler.BEGINNING_AT,
        layer=needs.key.name,
        is_inferred=is_inferred,
        step=scales[0].step,
    )


# -- scales that fall for another reason --------------------------------------------------------------------------------


class _Shared(Sentences):
    FELL = (
        "The loss scale fell by {powers_of_two:.0f} powers of two, and {own} of this model's steps overflowed: another loss or "
        "optimizer that uses the same GradScaler overflows and lowers the scale for this one."
    )
    NOTHING_LOST = "This did no harm{so_far}: {lowest:scale}, the lowest, still serves it."
    ONE_EACH = "Give each network (each loss with an optimizer of its own) a scaler of its own."
    OF_ITS_OWN = "# one that scales this network's loss alone\nscaler = torch.amp.GradScaler({device_type})"


def _scaler_shared(case: Case) -> Iterator[Found]:
    """A loss scale that falls more often than this model's steps overflow, since another loss that uses the scaler overflows.

    False alarms: A script that lowers its scaler's scale by hand looks the same. It is reported as information if the lowest
    scale still serves this model and was reached in the first half of the run, as after a search from a high start.
    """
    fell, rose, lowest = 0.0, 0.0, math.inf
    moves: list[int] = []
    for before, after in pairwise(case.progress.scales):
        if before.scale and after.scale and after.scale < before.scale < math.inf:
            fell += _powers(before.scale) - _powers(after.scale)
            moves += before.step, after.step
            lowest = min(lowest, after.scale)
        elif before.scale and after.scale and before.scale < after.scale < math.inf:
            rose += _powers(after.scale) - _powers(before.scale)
    own = max(case.progress.skipped_steps, len(_skips(case)))
    # A rise beyond what growth explains shows several scalers by turns, whose falls are no overflows.
    if not case.scalers or fell - own < 2 or rose > _rise(case, case.progress.steps):
        return
    least = case.advised.advice.lowest
    still_serves = bool(least and lowest >= least)
    is_harmless = still_serves and 2 * moves[-1] < case.progress.steps
    yield Found(
        (_Shared.FELL, _Shared.NOTHING_LOST.when(still_serves)),
        {"powers_of_two": fell, "own_overflows": own},
        {"lowest": lowest, "so_far": " so far" * (not is_harmless), "own": (own and f"only {own}") or "none"},
        _Shared.ONE_EACH.when(not is_harmless),
        _Shared.OF_ITS_OWN.when(not is_harmless),
        is_mild=is_harmless,
        is_inferred=True,
        step=moves[0],
    )


class _Recurs(Sentences):
    OVERFLOWS = (
        "{when} the gradients overflow{where}, although {despite}: it was {scale_first:scale} at the first and "
        "{scale_last:scale} at the last. The gradients of these steps are larger than in the steps between."
    )
    NEVER_ACTS = (
        "The scaler skips each of these steps, so whatever the loop does in them alone (a regulariser, another loss) never "
        "acts."
    )
    LOOK = (
        "Look at the batches of steps {numbers}: an outlier, a padded last batch, a sample or another loss once a period. Clip "
        "its loss, make it smaller, or leave it out; each such step halves the scale for all the others."
    )


def _overflow_recurs(case: Case) -> Iterator[Found]:
    """Overflows that recur although the scaler has not raised its scale, or at equal intervals at scales that held before.

    False alarms: A scaler that overflows in the first step after it has raised its scale is left out, since that is how it
    probes. So are gradients of which the steps before were within a factor of 4 of the overflow: they grow.
    """
    recurring = _periodic(case) or _without_growth(case)
    if not recurring or _are_near_the_end(recurring):
        return
    steps = [event.step for event in recurring]
    scales = [event.loss_scale or 0.0 for event in recurring]
    period = _only([after - before for before, after in pairwise(steps)])
    goes_on = period is not None and steps[-1] + period >= case.progress.steps
    numbers = _numbered(steps)
    never_acts = goes_on and all(event.story == SKIPPED for event in recurring)
    yield Found(
        (_Recurs.OVERFLOWS, _Recurs.NEVER_ACTS.when(never_acts)),
        {"steps": steps, "period": period, "scales": scales},
        {
            "numbers": numbers,
            "when": filled(f"Every {{}} steps ({numbers})", period) or f"In steps {numbers}",
            "where": _common_place(recurring),
            "despite": _despite(scales),
            "scale_first": scales[0],
            "scale_last": scales[-1],
        },
        _Recurs.LOOK,
        layer=recurring[0].module,
        is_mild=period is not None and not goes_on,
        is_inferred=True,
        step=steps[0],
    )


def _are_near_the_end(events: Sequence[Event]) -> bool:
    """Return whether most gradients nearly overflowed in the steps before: all of them grow, and no step is an outlier."""
    largest = [max(event.last_maxima) for event in events if event.last_maxima]
    near = [each for each in largest if each * _NEAR >= FLOAT16.max_finite]
    return 2 * len(near) > len(events)


def _common_place(events: Sequence[Event]) -> str:
    """Return in words the module in which all of them began; "" if they differ."""
    places = {(event.module, event.after) for event in events}
    module, is_after = places.pop()
    if places or not module:
        return ""
    return f" in the code after {module!r}" if is_after else f" in {module!r}"


def _despite(scales: Sequence[float]) -> str:
    """Return a clause on how the scale moved between the overflows."""
    pairs = list(pairwise(scales))
    if any(after > before for before, after in pairs):
        return "the steps before had not"
    if all(after < before for before, after in pairs):
        return "the scale fell each time"
    return "the scale never grew"


def _without_growth(case: Case) -> list[Event]:
    """Return the overflows after the first search if the scale cannot have grown between them; [] if it can."""
    skips, intervals = _skips(case), [scaler.growth_interval for scaler in case.scalers if scaler.growth_interval]
    later = skips[len(_opening(skips)) :]
    gaps = [after.step - before.step for before, after in pairwise(later)]
    if len(later) < _FEWEST_STEPS or len(later) > _MOST * case.progress.steps or set(gaps) == {1}:
        return []
    scales = [event.loss_scale for event in later if event.loss_scale]
    has_grown = any(after > before for before, after in pairwise(scales))
    if not intervals or min(gaps) >= min(intervals) or len(scales) < len(later) or has_grown:
        return []
    return later


def _periodic(case: Case) -> list[Event]:
    """Return the overflows after the first search that recur at equal intervals; leave out those that a growth explains.

    A scaler grows after ``growth_interval`` steps without a skip, and probes in the step that follows.
    """
    skips, scalers = _skips(case), [scaler for scaler in case.scalers if scaler.growth_interval]
    if len(scalers) != 1 or case.progress.watched_steps is not None:
        return []
    interval = int(scalers[0].growth_interval or 0)
    growth, backoff = _powers(scalers[0].growth_factor or 2.0), _powers(scalers[0].backoff_factor or 0.5)
    opening = len(_opening(skips))
    found = []
    for before, event in list(zip([None, *skips], skips, strict=False))[opening:]:
        taken = event.step - (before.step + 1 if before else 0)
        if event.skipped is not True or not event.loss_scale or interval < 1:
            return []
        if before is not None and before.loss_scale:
            grown = _powers(event.loss_scale) - _powers(before.loss_scale) - backoff
            if abs(grown - growth * (taken // interval)) > _ALIKE:
                # Something else moves the scale, or the scaler is not updated once a step.
                return []
        if taken < interval or taken % interval:
            found.append(event)
    gaps = {after.step - before.step for before, after in pairwise(found)}
    if len(found) < _FEWEST_STEPS or len(gaps) > 1 or gaps == {1}:
        return []
    # The first step of the run may be the first of the period.
    return skips[: opening == 1 and gaps == {found[0].step - skips[0].step}] + found


class _ForForward(Sentences):
    BACKED_OFF = (
        "The scaler backed off in {steps} steps because {what} itself{made_by} was not finite, from step {first_step} "
        "on{period}: the loss scale is not the cause, and every such step halves it."
    )
    LOSS_IN_FP32 = (
        "Something in the loss function{made_by} exceeds 65504, FP16's maximum. Compute it in FP32, from outputs in FP32, or "
        "train in BF16, without a scaler."
    )
    FORWARD_IN_FP32 = (
        "Something in the forward of {module} exceeds 65504, FP16's maximum. Run it and the modules that take its result in "
        "FP32, or train in BF16, without a scaler."
    )
    NEW_SCALER = (
        "If you stay in FP16, make a new GradScaler: the scale of this one was lowered {steps} times for nothing."
    )
    CAST_OUTPUT = "loss = loss_fn(output.float(), target)"
    WITHOUT_AUTOCAST = "with torch.autocast({device_type}, enabled=False):\n    y = layer(x.float())"


def _scale_falls_for_forward(case: Case) -> Iterator[Found]:
    """A scaler that lowers its scale because of a non-finite forward, which no scale repairs.

    False alarms: It is reported from three skipped steps on; a single bad batch only gives a non-finite event.
    """
    broken = [event for event in case.events if event.skipped and event.forward_finite is False]
    steps = sorted({event.step for event in broken})
    if len(steps) < _FEWEST_STEPS:
        return
    first = min(broken, key=lambda event: event.step)
    what, in_fp32 = "the forward", _ForForward.FORWARD_IN_FP32
    code: Said = _ForForward.WITHOUT_AUTOCAST
    if first.module and not first.after:
        code = LayerInFP32.of(case.precision)
    if first.what in LOSSES:
        what, in_fp32, code = "the loss", _ForForward.LOSS_IN_FP32, _ForForward.CAST_OUTPUT
    inspect, words = where_to_inspect(first, case.session)
    is_too_large = run_format(case.session) == FLOAT16 and was_in_half(first, case.session)
    if not is_too_large:
        code = ()
    yield Found(
        _ForForward.BACKED_OFF,
        {"steps": len(steps), "first_step": steps[0]},
        {**words, "what": what, "module": module_named(first.module), "period": period(steps)},
        (in_fp32.when(is_too_large) or inspect, _ForForward.NEW_SCALER),
        code,
        layer=first.module,
        step=steps[0],
    )


# -- a scale that is not needed, or missing -------------------------------------------------------------------------------


class _OfNoUse(Sentences):
    NOT_NEEDED = (
        "The run computes in {format:format}, whose range is FP32's, and multiplies its loss by a scale that it does "
        "not need."
    )
    MAY_SKIP = "If something became infinite or NaN, the scaler would silently skip that step."
    SKIPPED = "The scaler skipped {skipped_steps} steps, so that infinities and NaNs went unnoticed."
    TAKE_OUT = "Take the scaler out, or switch it off."
    DISABLED = "scaler = torch.amp.GradScaler(enabled=False)"


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
    CROWD = "Gradients of {crowd:some 3} crowd just above 2^-25, so that some of the zeros were values."
    GIVE_SCALE = "Give the inspector the scale (loss_scale=; mpinspect run: --loss-scale)."
    FP32_WEIGHTS = "Keep FP32 weights."
    IN_BF16 = "Compute in BF16, where such gradients are finite and nothing has to be scaled."
    SKIP_BY_HAND = (
        "If the loop scales the loss by hand, give the inspector the scale (loss_scale=; mpinspect run: --loss-scale), and let "
        "the loop skip steps that are not finite."
    )
    SCALE = (
        "Scale the loss{room}; if the loop does so by hand, give the inspector the scale (loss_scale=; mpinspect run: "
        "--loss-scale)."
    )
    FOR_SCALER = "Keep FP32 weights: GradScaler refuses FP16 gradients."
    AUTOCAST_BF16 = "with torch.autocast({device_type}, torch.bfloat16):\n    loss = loss_fn(model(x), target)"
    FOR_DEVICE = "Make the scaler for the device of the model{room}."
    ENABLE = "Make the scaler with enabled=True{room}."
    ENABLED = "# once, before the loop\nscaler = torch.amp.GradScaler(\n    {device_type}, enabled=True\n)"
    ENABLED_AT = (
        "# once, before the loop\n"
        "scaler = torch.amp.GradScaler(\n    {device_type},\n    init_scale=2.0**{log2_start},\n    enabled=True,\n)"
    )
    SCALED_STEP = "# in the loop\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"


#: By the sentence on the scaler: the change, and the line that makes the scaler, without and with an initial scale.
_MADE: dict[_Missing, tuple[_Missing, _Missing | _Scaler, _Missing | _Scaler]] = {
    _Missing.NO_SCALER: (_Missing.SCALE, _Scaler.NEW, _Scaler.BEGINNING_AT),
    _Missing.DISABLED_ELSEWHERE: (_Missing.FOR_DEVICE, _Scaler.NEW, _Scaler.BEGINNING_AT),
    _Missing.DISABLED: (_Missing.ENABLE, _Missing.ENABLED, _Missing.ENABLED_AT),
}


def _scaler_missing(case: Case) -> Iterator[Found]:
    """An FP16 run in which no scaled loss was seen, or whose scaler is disabled.

    False alarms: A loop that scales by hand looks the same until the inspector is given the scale. If all gradients reach the
    optimizer or its masters divided by one factor, the finding is information.
    """
    if not case.precision.weights or run_format(case.session) != FLOAT16 or not case.progress.backwards or case.scalers:
        return
    if any(change.scale not in (1.0, None) for change in case.progress.scales):
        # The loop scales by hand, and the inspector was given the scale.
        return
    overflowed = [event for event in _skips(case) if event.value == "inf" and event.forward_finite]
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
        FP32Weights.IN_BF16.when(in_half) or _Missing.AUTOCAST_BF16,
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
    log2, room = round(_powers(recommended or 1.0)), ""
    has_start = log2 != 0
    if not recommended:
        log2 = max((_room(case) or 0) - HEADROOM, 0)
        has_start = 0 < log2 < LOG2_INITIAL or (log2 > LOG2_INITIAL and bool(zeros or crowd))
        below = f"{HEADROOM} powers of two below the largest at which nothing seen overflows; less may do"
        room = f" (begin at 2^{log2}, {below})" * has_start
    in_half = FLOAT16.name in case.precision.weights
    fix, new, begin = _MADE[no_scaler]
    return Found(
        says,
        _evidence(case),
        {**words, "room": room, "log2_start": log2},
        (_Missing.FOR_SCALER.when(in_half), fix),
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
    is_one = most - least <= _ALIKE * least
    are_powers = all(map(is_power_of_two, shared))
    batches = math.ceil(case.progress.backwards / max(case.progress.steps, 1))
    if least <= batches * (1 + _ALIKE) or not (is_one or are_powers):
        return None
    return least, most


FAULTS = (
    Fault(
        "scale-falls-for-forward",
        "error",
        _scale_falls_for_forward,
        (_ForForward, LayerInFP32, Inspect),
        ("non-finite-event",),
    ),
    Fault("scaler-made-anew", "warning", _scaler_made_anew, (_Anew,), ("non-finite-event",)),
    Fault("scale-too-high", "error", _scale_too_high, (_High, _Scaler), ("non-finite-event",)),
    Fault("initial-scale-too-high", "warning", _initial_scale_too_high, (_Initial, _Scaler)),
    Fault(
        "scaler-missing-in-float16",
        "warning",
        _scaler_missing,
        (_Missing, _Scaler, FP32Weights),
        ("scale-unknown", "gradients-all-zero", "gradients-already-flushed", "asked-gradients-flushed"),
        explains_from="warning",
        is_of_every_step=True,
    ),
    Fault("scale-too-low", "warning", _scale_too_low, (_Low, _Scaler), ("gradients-all-zero",), explains_from="info"),
    # A scaler skips these steps, so that a warning explains them.
    Fault("overflow-recurs", "warning", _overflow_recurs, (_Recurs,), ("non-finite-event",), explains_from="info"),
    Fault("scaler-shared", "warning", _scaler_shared, (_Shared,)),
    Fault("scaler-in-bfloat16", "warning", _scaler_of_no_use, (_OfNoUse,)),
)
