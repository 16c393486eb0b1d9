"""Faults of loss scales that are too high, too low, missing, shared or of no use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.replaced import replaced
from mpinspect.ranges.kinds import phrase
from mpinspect.ranges.records import NewScalers, StepsStopped
from mpinspect.ranges.session import SKIPPED, Event
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import and_more, filled

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
ALIKE = 0.01
#: Share of overflowing steps from which on a scale counts as never settling.
_MOST = 0.5
#: A gradient within this factor of FP16's largest number may overflow in the next step without being an outlier.
_NEAR = 4.0


class Scaler(Sentences):
    """Code that several of these faults share."""

    NEW = "# {once}\nscaler = torch.amp.GradScaler({device_type})"
    BEGINNING_AT = "# {once}\nscaler = torch.amp.GradScaler(\n    {device_type}, init_scale=2.0**{log2_start}\n)"


def skips_of(case: Case) -> list[Event]:
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


def log2_of(scale: float) -> float:
    """Return a scale as a power of two; zero as -inf."""
    return math.log2(scale) if scale > 0 else -math.inf


def _rise(case: Case, steps: int) -> float:
    """Return by how many powers of two the run's scalers can have raised their scale in a number of steps."""
    intervals = [scaler.growth_interval for scaler in case.scalers if scaler.growth_interval]
    factor = max((scaler.growth_factor for scaler in case.scalers if scaler.growth_factor), default=2.0)
    return (steps // min(intervals, default=1) + 1) * max(log2_of(factor), 0.0)


def _restarts(case: Case) -> list[int]:
    """Return the steps in which the scale was found back at its initial value, above what growth explains, and overflowed."""
    history = [change for change in case.session.scale_history() if change.scale]
    overflowed = {event.step for event in skips_of(case)}
    return [
        after.step
        for before, after in pairwise(history)
        if after.scale == history[0].scale
        and after.step in overflowed
        and log2_of(after.scale or 0) - log2_of(before.scale or 0) > _rise(case, after.step - before.step)
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
    skips, steps = skips_of(case), case.progress.steps
    opening = _opening(skips)
    first = _search_begins_at(opening)
    is_innocent = any(event.broken_phase == "backward" for event in skips)
    if first is None or is_innocent or len(_restarts(case)) > 1 or opening[0] in _periodic(case):
        # Recurring skips have a finding of their own, and backwards that no loss scale repairs.
        return
    settled = _settled(opening, case)
    again = next((event for event in skips[len(opening) :] if event.loss_scale == settled), None)
    overflows_again = again is not None
    powers = round(log2_of(first) - log2_of(settled)) + overflows_again
    skipped, advice = len(opening), case.advised.advice
    is_settled = skipped < steps
    # Where no one scale serves every layer, a scale without overflow is not a remedy.
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
            "log2_start": round(log2_of(start)),
        },
        fix.when(is_grave),
        Scaler.BEGINNING_AT.when(is_grave and is_settled),
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
    BEFORE_LOOP = "# before the loop, in place of\n# {at_scaler}\nscaler = torch.amp.GradScaler({device_type})"
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
    steps, lost = case.progress.steps, len([event for event in skips_of(case) if event.skipped])
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
    lost = max(len([event for event in skips_of(case) if event.skipped]), case.progress.skipped_steps)
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
    STOPPED = "No optimizer step followed in the last {backwards:.0f} backwards: the loop drops gradients that are not finite."
    STEPPED = "The optimizer stepped on infinities in step {stepped_in}."
    STEPPED_ON_REPLACED = (
        "The optimizer still stepped ({stepped} of {steps} steps), on gradients that had been made finite."
    )
    TAKE_REPLACEMENT_OUT = "Remove the replacement: the scaler then lowers the scale by itself."
    DYNAMIC = "Let a dynamic scaler find the scale."
    BEGIN = "Begin at {recommended:scale}, and let the scaler lower it by itself."
    SCALE_BY = "Scale by {recommended:scale}, and let a scaler skip steps that overflow."
    LOWER_FURTHER = (
        "Let the loop lower its scale after each overflow, without a lower bound, or use torch.amp.GradScaler in place of "
        "it."
    )
    HALVE = "# after each backward that overflows\nscale = scale / 2"
    UPDATE = "Call scaler.update() without an argument after each scaler.step(): it lowers the scale after an overflow."
    STEP_AND_UPDATE = "# after {at_step}\nscaler.update()"
    BACKOFF = (
        "A backoff_factor of {backoff:.12g} hardly lowers it: leave backoff_factor and growth_factor at their defaults."
    )


def _scale_too_high(case: Case) -> Iterator[Found]:
    """A scale at which most steps overflow, and that does not fall.

    False alarms: A run that ends while the scaler is still searching is reported only if its scale has not fallen.
    """
    skips, steps = skips_of(case), case.progress.steps
    over = [event for event in skips if event.value == "inf" and event.loss_scale and event.loss_scale > 1]
    if _made_anew(case) is not None or len(_restarts(case)) > 1:
        # The reason why the scale stays has a finding of its own.
        return
    stopped = next((each for each in case.recorded(StepsStopped) if over and _stays(over[-1], each)), None)
    if stopped is not None:
        over = [dataclasses.replace(over[-1], loss_scale=stopped.loss_scale)]
    elif not over or len({event.step for event in skips}) < max(_MOST * steps, 1):
        return
    first, last = over[0].loss_scale or 0.0, over[-1].loss_scale or 0.0
    stepped = [event for event in over if event.skipped is False]
    came_down = math.isfinite(first) and last <= first / 2
    if came_down or (not stepped and stopped is None and len(over) < _FEWEST_STEPS):
        return
    on_replaced = bool(stepped and replaced(case))
    wanted = _wanted(first, case)
    backoff = next((each.backoff_factor for each in case.scalers if (each.backoff_factor or 0) > _HARDLY_LOWER), None)
    fix: _High = _High.DYNAMIC
    code: _High | Scaler = Scaler.NEW
    if wanted:
        fix, code = _High.BEGIN.when(case.scalers) or _High.SCALE_BY, Scaler.BEGINNING_AT
    if stopped is not None:
        fix, code = _High.LOWER_FURTHER, _High.HALVE
    is_hidden = on_replaced and case.scalers
    outcome = _High.STEPPED_ON_REPLACED.when(on_replaced) or _High.STEPPED.when(stepped)
    outcome = outcome or _High.STOPPED.when(stopped) or _High.SKIPPED
    # A single update() after an overflow would have changed the scale.
    is_never_updated = first == last and any(each.type == "GradScaler" and each.backoff_factor for each in case.scalers)
    if is_never_updated and not stepped and not backoff:
        fix, code = _High.UPDATE, _High.STEP_AND_UPDATE
    yield Found(
        (_High.STAYS, outcome),
        {"loss_scale": first, "overflowing_steps": len(over), "steps": steps, "recommended": wanted},
        {
            "skipped": len(skips),
            "stepped": len({each.step for each in stepped}),
            "stepped_in": next((each.step for each in stepped), None),
            "backoff": backoff,
            "backwards": stopped and stopped.backwards,
            "log2_start": round(log2_of(wanted or 1.0)),
        },
        (_High.TAKE_REPLACEMENT_OUT.when(is_hidden) or fix, _High.BACKOFF.when(backoff)),
        code.when(not is_hidden),
        layer=over[0].module,
        step=over[0].step,
    )


def _stays(overflow: Event, stopped: StepsStopped) -> bool:
    """Return whether a loop's own scale hardly fell while the loop dropped each backward after this overflow."""
    if overflow.step != stopped.step or not overflow.loss_scale or not (stopped.loss_scale or 0) > 1:
        return False
    return 4 * (log2_of(overflow.loss_scale) - log2_of(stopped.loss_scale or 1.0)) < stopped.backwards


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
        "values just above the smallest that it holds."
    )
    SCALE_BY = "Scale by {wanted:scale}, or begin with it in a dynamic scaler."
    ZEROS = "The gradients of {zeros:some 3} were all zero: a large scale serves them best."


def _scale_too_low(case: Case) -> Iterator[Found]:
    """An FP16 run whose loss scale is below its gradients' need in at least nine of ten steps.

    False alarms: The need is judged by the lost share of the sum of magnitudes. If small gradients were flushed before they
    could be counted, the need is inferred.
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
    if lowest <= log2_of(known[-1]) and decision.likely_needed:
        # Values flushed before counting show by a crowd of values just above the flush edge.
        needs, lowest = decision.likely, decision.likely.log2_certain
        says, is_inferred = _Low.PROBABLY_TOO_SMALL, True
    spans = list(case.progress.scale_spans())
    below = [(scale, end - start) for scale, start, end in spans if scale and log2_of(scale) < lowest]
    if sum(steps for _, steps in below) < 0.9 * (spans[-1][2] - spans[0][1]):
        return
    used = below[-1][0]
    powers = round(lowest - log2_of(used))
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
        Scaler.BEGINNING_AT,
        layer=needs.key.name,
        is_inferred=is_inferred,
        step=scales[0].step,
    )


# -- scales that fall for another reason --------------------------------------------------------------------------------


#: By this factor a scale may fall from the first half of a run to the second, and count as steady.
_STEADY = 8


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

    False alarms: A script that lowers its scaler's scale by hand looks the same. It is reported as info if the lowest
    scale still serves this model, and is at most three powers of two below the lowest of the first half of the run, as after a
    search from a high start, also if the scaler probes again.
    """
    fell, rose, lowest, early = 0.0, 0.0, math.inf, math.inf
    moves: list[int] = []
    for before, after in pairwise(case.progress.scales):
        if before.scale and after.scale and after.scale < before.scale < math.inf:
            fell += log2_of(before.scale) - log2_of(after.scale)
            moves += before.step, after.step
            lowest = min(lowest, after.scale)
            if 2 * after.step < case.progress.steps:
                early = lowest
        elif before.scale and after.scale and before.scale < after.scale < math.inf:
            rose += log2_of(after.scale) - log2_of(before.scale)
    own = max(case.progress.skipped_steps, len(skips_of(case)))
    # A rise beyond the scaler's growth shows several scalers in turn; a fall from one to the next is not an overflow.
    if not case.scalers or fell - own < 2 or rose > _rise(case, case.progress.steps):
        return
    least = case.advised.advice.lowest
    still_serves = bool(least and lowest >= least)
    is_harmless = still_serves and _STEADY * lowest >= early
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
        "In steps {numbers} look for an outlier in the batch. It may also be a padded last batch, or another loss once a "
        "period. Clip its loss, make it smaller, or leave it out. Each such step halves the scale for all the others."
    )
    PRINT = (
        "# before {at_forward}\n"
        "# with step from 0, and its inputs\n"
        "if step in {named}:\n"
        "    print(x.abs().max(), target.abs().max())"
    )


def _overflow_recurs(case: Case) -> Iterator[Found]:
    """Overflows that recur although the scaler has not raised its scale, or at equal intervals at scales that held before.

    False alarms: An overflow in the first step after a raise is left out, since the scaler probes by it. Gradients that were
    within a factor of 4 of the overflow in the steps before are left out, too: they grow. It is an info if the second half of
    the run has no such step, or if a period ends.
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
            "named": tuple(steps[:_NAMED]),
            "when": filled(f"Every {{}} steps ({numbers})", period) or f"In steps {numbers}",
            "where": _common_place(recurring),
            "despite": _despite(scales),
            "scale_first": scales[0],
            "scale_last": scales[-1],
        },
        _Recurs.LOOK,
        _Recurs.PRINT,
        layer=recurring[0].module,
        is_mild=not goes_on and (period is not None or 2 * steps[-1] < case.progress.steps),
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
    """Return the overflows after the first search if the scale cannot have grown between most of them; [] if it can."""
    skips, intervals = skips_of(case), [scaler.growth_interval for scaler in case.scalers if scaler.growth_interval]
    later = skips[len(_opening(skips)) :]
    gaps = [after.step - before.step for before, after in pairwise(later)]
    if len(later) < _FEWEST_STEPS or len(later) > _MOST * case.progress.steps or set(gaps) == {1}:
        return []
    scales = [event.loss_scale for event in later if event.loss_scale]
    has_grown = any(after > before for before, after in pairwise(scales))
    if not intervals or len(scales) < len(later) or has_grown:
        return []
    return later if 2 * sum(gap < min(intervals) for gap in gaps) > len(gaps) else []


def _periodic(case: Case) -> list[Event]:
    """Return the overflows after the first search that recur at equal intervals; leave out those that a growth explains.

    A scaler grows after ``growth_interval`` steps without a skip, and probes in the step that follows.
    """
    skips, scalers = skips_of(case), [scaler for scaler in case.scalers if scaler.growth_interval]
    if len(scalers) != 1 or case.progress.watched_steps is not None:
        return []
    interval = int(scalers[0].growth_interval or 0)
    growth, backoff = log2_of(scalers[0].growth_factor or 2.0), log2_of(scalers[0].backoff_factor or 0.5)
    opening = len(_opening(skips))
    found = []
    for before, event in list(zip([None, *skips], skips, strict=False))[opening:]:
        taken = event.step - (before.step + 1 if before else 0)
        if event.skipped is not True or not event.loss_scale or interval < 1:
            return []
        if before is not None and before.loss_scale:
            grown = log2_of(event.loss_scale) - log2_of(before.loss_scale) - backoff
            if abs(grown - growth * (taken // interval)) > ALIKE:
                # Something else moves the scale, or the scaler is not updated once a step.
                return []
        if taken < interval or taken % interval:
            found.append(event)
    gaps = {after.step - before.step for before, after in pairwise(found)}
    if len(found) < _FEWEST_STEPS or len(gaps) > 1 or gaps == {1}:
        return []
    # The first step of the run may be the first of the period.
    return skips[: opening == 1 and gaps == {found[0].step - skips[0].step}] + found


FAULTS = (
    Fault("scaler-made-anew", "warning", _scaler_made_anew, (_Anew,), ("non-finite-event",)),
    Fault("scale-too-high", "error", _scale_too_high, (_High, Scaler), ("non-finite-event",)),
    Fault("initial-scale-too-high", "warning", _initial_scale_too_high, (_Initial, Scaler)),
    Fault("scale-too-low", "warning", _scale_too_low, (_Low, Scaler), ("gradients-all-zero",), explains_from="info"),
    # A scaler skips these steps, so that a warning explains them.
    Fault("overflow-recurs", "warning", _overflow_recurs, (_Recurs,), ("non-finite-event",), explains_from="info"),
    Fault("scaler-shared", "warning", _scaler_shared, (_Shared,)),
)
