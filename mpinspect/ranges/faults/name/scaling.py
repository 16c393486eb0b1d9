"""Diagnoses of loss scales that are too high, too low, missing, shared or of no use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32
from mpinspect.ranges.analysis.evidence import survived
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.scale_window import HEADROOM
from mpinspect.ranges.faults.event_findings import look_at, loss_made_by, period, was_in_half
from mpinspect.ranges.faults.name.case import Case, Diagnosis, fp32_weights
from mpinspect.ranges.faults.name.handed_over import replaced
from mpinspect.ranges.kinds import GRADIENT_KINDS, phrase
from mpinspect.ranges.session import DROPPED, LOSSES, SKIPPED, TAKEN, Event, Measurement, module_named
from mpinspect.reporting.finding import INFERRED, MEASURED, Finding
from mpinspect.reporting.words import format_name, number_or_power, some, with_power

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


def initial_scale_too_high(case: Case) -> Iterator[Finding]:
    """A dynamic scaler whose first steps were all skipped until it had come down.

    False alarms: Every dynamic scaler may skip a few steps at first: up to two steps, or a tenth of the run, are only
    "info".
    """
    skips, steps = _skips(case), case.progress.steps
    opening = _opening(skips)
    first = opening[0].loss_scale if opening else None
    last = opening[-1].loss_scale if opening else None
    if not first or not math.isfinite(first) or not last or (len(opening) > 1 and last > first / 2):
        return
    if len(_restarts(case)) > 1 or opening[0] in _periodic(case):
        # Recurring skips have a finding of their own.
        return
    # The last of these scales overflowed too. The next one is known to hold only if a step was taken at it.
    history = case.session.scale_history()
    after = next((each.scale for each in history if each.step > opening[-1].step and each.scale), None)
    settled = min(after or last / 2, last / 2)
    again = next((event for event in skips[len(opening) :] if event.loss_scale == settled), None)
    too_high = round(_powers(first) - _powers(settled)) + (again is not None)
    skipped, share = len(opening), len(opening) / steps
    is_settled = skipped < steps
    # Where no one scale serves every layer, the scale at which nothing overflows is no remedy.
    is_grave = skipped >= _FEWEST_STEPS and share > _SEARCH_TOLERANCE and not _serves_none(case)
    advice = case.advised.advice
    recommended, highest = advice.recommended, advice.highest or settled
    or_lower = " or lower" if advice.needed is False else ""
    start = min(
        settled / 2 if again else settled,
        highest,
        recommended if recommended and advice.needed else 2.0**LOG2_INITIAL,
    )
    held = f"; step {again.step} overflowed at that too" if again else ""
    conflicts = advice.conflicts if _serves_none(case) else ()
    opened = f"the first of {steps} steps was" if skipped == 1 else f"the first {skipped} of {steps} steps were"
    fate = (
        f"{opened} skipped until the scaler had come down to {with_power(settled)}{held}"
        if is_settled
        else f"{'its only step was' if steps == 1 else f'all {steps} steps were'} skipped, so the scale is at most "
        f"{with_power(settled)}, and not settled"
    )
    fix = (
        f"Begin at {with_power(start)}{or_lower}."
        if is_settled
        else "Run on until the scaler takes a step: only then is a scale known that holds."
    )
    whom = f" for {conflicts[0].needs_small!r}" if conflicts else ""
    yield Finding(
        "initial-scale-too-high",
        "warning" if is_grave else "info",
        opening[0].module,
        f"The initial loss scale, {with_power(first)}, is at least {2**too_high} times ({too_high} powers of two) too large"
        f"{whom}: {fate}.",
        {
            "init_scale": first,
            "settled": settled if is_settled else None,
            "at_most": settled,
            "powers_of_two": too_high,
            "skipped_steps": skipped,
            "steps": steps,
        },
        fix if is_grave else "",
        f"scaler = torch.amp.GradScaler(device_type, init_scale=2.0**{round(_powers(start))})"
        if is_grave and is_settled
        else "",
        step=opening[0].step,
    )


def _made_anew(case: Case) -> Measurement | None:
    """Return the last count of steps with a new scaler, if most steps have one and the scale never changed."""
    found = list(case.measured("new-scalers"))
    if run_format(case.session) in (BFLOAT16, FLOAT32):
        # There no scale is of use.
        return None
    if not found or found[-1].figures["new"] <= _MOST * found[-1].figures["steps"]:
        return None
    # A new scaler that loads the state of the last one continues with its scale.
    scales = {change.scale for change in case.session.scale_history()}
    return found[-1] if len(scales) == 1 and None not in scales else None


def scaler_made_anew(case: Case) -> Iterator[Finding]:
    """A scaler that is made again for each step, or each epoch or job, so that its scale is the initial one again.

    False alarms: A new scaler now and then (for each epoch, after a checkpoint) is reported only if the initial scale overflows
    each time and more than a tenth of the steps are skipped. One that continues with the state of the last is not reported.
    """
    found = _made_anew(case)
    if found is None:
        yield from _search_repeated(case)
        return
    skips, steps = _skips(case), case.progress.steps
    lost = len([event for event in skips if event.skipped])
    scale = case.session.scale_history()[0].scale
    count, of = int(found.figures["new"]), int(found.figures["steps"])
    where = f"{count} in {'the first ' if of < steps else ''}{of} steps"
    outcome = f", at which the gradients overflow: {lost} of {steps} steps were skipped" if lost else ""
    yield Finding(
        "scaler-made-anew",
        "error" if lost >= max(_MOST * steps, _FEWEST_STEPS) else "warning",
        "",
        f"A new GradScaler is made for each step ({where}): what it learnt from an overflow is thrown away, and the loss scale "
        f"stays at {with_power(scale)}{outcome}.",
        {**found.figures, "loss_scale": scale, "skipped_steps": lost},
        "Make the scaler once, before the loop.",
        "scaler = torch.amp.GradScaler(device_type)\nfor batch in loader:\n    train_step(model, optimizer, scaler, batch)",
        step=found.step,
    )


def _search_repeated(case: Case) -> Iterator[Finding]:
    """Yield the finding on a loss scale that begins again at its initial value, as where a checkpoint lacks the scaler."""
    restarts, steps = _restarts(case), case.progress.steps
    lost = max(len([event for event in _skips(case) if event.skipped]), case.progress.skipped_steps)
    if len(restarts) < 2 or lost < _FEWEST_STEPS or lost <= _SEARCH_TOLERANCE * steps:
        return
    gaps = {after - before for before, after in pairwise([0, *restarts])}
    period = gaps.pop() if len(gaps) == 1 else None
    scale = next(change.scale for change in case.session.scale_history() if change.scale)
    yield Finding(
        "scaler-made-anew",
        "error" if lost >= _MOST * steps else "warning",
        "",
        f"The loss scale began again at {with_power(scale)} {f'every {period} steps' if period else 'several times'} (steps "
        f"{_numbered(restarts)}), as with a new GradScaler, and its search was repeated each time: {lost} of {steps} steps were "
        "skipped.",
        {"loss_scale": scale, "restarts": restarts, "period": period, "skipped_steps": lost, "steps": steps},
        "Make one scaler for the run. Where a job continues from a checkpoint, save and load the scaler's state with it, or "
        "begin at a lower scale.",
        'checkpoint["scaler"] = scaler.state_dict()\nscaler.load_state_dict(checkpoint["scaler"])',
        INFERRED,
        restarts[0],
    )


def _numbered(steps: Sequence[int]) -> str:
    """Return the numbers of the first steps of a list, in words."""
    return ", ".join([*map(str, steps[:_NAMED]), *(["..."] if len(steps) > _NAMED else [])])


def scale_too_high(case: Case) -> Iterator[Finding]:
    """A scale at which most steps overflow, and that does not come down.

    False alarms: A run that ends while the scaler is still searching is reported only if its scale has not fallen.
    """
    skips, steps = _skips(case), case.progress.steps
    over = [event for event in skips if event.value == "inf" and event.loss_scale and event.loss_scale > 1]
    if _made_anew(case) is not None or len(_restarts(case)) > 1:
        # Why the scale stays has a finding of its own.
        return
    if not over or len({event.step for event in skips}) < max(_MOST * steps, 1):
        return
    first, last = over[0].loss_scale or 0.0, over[-1].loss_scale or 0.0
    stepped = [event for event in over if event.skipped is False]
    came_down = math.isfinite(first) and last <= first / 2
    if came_down or (not stepped and len(over) < _FEWEST_STEPS):
        return
    outcome = (
        f"the optimizer stepped all the same ({len({each.step for each in stepped})} of {steps} steps), on gradients that had "
        "been made finite"
        if stepped and replaced(case)
        else f"the optimizer stepped on infinities in step {stepped[0].step}"
        if stepped
        else f"{len(skips)} of {steps} steps were skipped and nothing was learned in them"
    )
    # How far a gradient overflowed is not known: a scaler finds out, where the finite ones need no scale.
    recommended = None if case.scalers and case.advised.advice.needed is False else case.advised.advice.recommended
    wanted = recommended if recommended and recommended < first else None
    factors = [scaler.backoff_factor for scaler in case.scalers if (scaler.backoff_factor or 0) > _HARDLY_LOWER]
    static = (
        f" A backoff_factor of {factors[0]:.12g} hardly lowers it: leave backoff_factor and growth_factor at their defaults."
        if factors
        else ""
    )
    is_hidden = bool(stepped and replaced(case) and case.scalers)
    code = (
        f"scaler = torch.amp.GradScaler(device_type{f', init_scale=2.0**{round(_powers(wanted))}' if wanted else ''})"
    )
    yield Finding(
        "scale-too-high",
        "error",
        over[0].module,
        f"The loss scale stays at {with_power(first)}, at which the gradients overflow from step {over[0].step} on while the "
        f"forward is finite: {outcome}.",
        {"loss_scale": first, "overflowing_steps": len(over), "steps": steps, "recommended": wanted},
        (
            "Take the replacement out: the scaler then lowers the scale by itself."
            if is_hidden
            else "Let a dynamic scaler find the scale."
            if not wanted
            else f"Begin at {with_power(wanted)}, and let the scaler lower it by itself."
            if case.scalers
            else f"Scale by {with_power(wanted)}, and let a scaler skip what overflows."
        )
        + static,
        "" if is_hidden else code,
        step=over[0].step,
    )


def scale_too_low(case: Case) -> Iterator[Finding]:
    """An FP16 run whose loss scale is below what its gradients need in at least nine of ten steps.

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
    needs = decision.neediest
    lowest, certainty = decision.window.log2_lowest, MEASURED
    if lowest <= _powers(known[-1]) and decision.likely_needed:
        # Values flushed before counting show by a crowd of values just above the flush edge.
        needs, lowest, certainty = decision.likely, decision.likely.log2_certain, INFERRED
    spans = list(case.progress.scale_spans())
    below = [(scale, end - start) for scale, start, end in spans if scale and _powers(scale) < lowest]
    if sum(steps for _, steps in below) < 0.9 * (spans[-1][2] - spans[0][1]):
        return
    used = below[-1][0]
    powers = round(lowest - _powers(used))
    wanted = min(max(lowest, decision.log2_scale), max(decision.window.log2_highest, lowest))
    yield Finding(
        "scale-too-low",
        "warning",
        needs.key.name,
        f"The loss scale, {with_power(used)}, is {'probably ' if certainty == INFERRED else ''}too small: FP16 flushes too "
        f"much of {phrase(*needs.key)}, "
        + (
            "judging by the many values just above the smallest that it keeps; "
            f"{with_power(2.0**lowest)} would keep all but 1% of the sum of magnitudes, whatever was flushed."
            if certainty == INFERRED
            else f"whose values need one {2**powers} times ({powers} powers of two) larger, at least {with_power(2.0**lowest)}."
        ),
        {"loss_scale": used, "log2_lowest": lowest, "log2_recommended": wanted, "powers_of_two": powers},
        f"Scale by {with_power(2.0**wanted)}, or begin with it in a dynamic scaler."
        + (
            f" The gradients of {some(list(decision.zeros), 3)} were all zero: a large scale serves them best."
            if decision.zeros
            else ""
        ),
        f"scaler = torch.amp.GradScaler(device_type, init_scale=2.0**{wanted})",
        certainty,
        scales[0].step,
    )


def scaler_shared(case: Case) -> Iterator[Finding]:
    """A loss scale that falls more often than this model's steps overflow, since another loss that uses the scaler overflows.

    False alarms: A script that lowers its scaler's scale by hand looks the same. It is reported as information if the lowest
    scale still serves this model and was reached in the first half of the run, as after a search from a high start.
    """
    fell, rose, first, last, lowest = 0.0, 0.0, None, 0, math.inf
    for before, after in pairwise(case.progress.scales):
        if before.scale and after.scale and after.scale < before.scale < math.inf:
            fell += _powers(before.scale) - _powers(after.scale)
            first, last = before.step if first is None else first, after.step
            lowest = min(lowest, after.scale)
        elif before.scale and after.scale and before.scale < after.scale < math.inf:
            rose += _powers(after.scale) - _powers(before.scale)
    own = max(case.progress.skipped_steps, len(_skips(case)))
    # A scale that rises by more than growth explains is that of several scalers by turns, and its falls are no overflows.
    if not case.scalers or fell - own < 2 or rose > _rise(case, case.progress.steps):
        return
    least = case.advised.advice.lowest
    still_serves = bool(least and lowest >= least)
    is_harmless = still_serves and 2 * last < case.progress.steps
    yet = "" if is_harmless else " yet"
    harmless = (
        f" It lost nothing by that{yet}: {with_power(lowest)}, the lowest, still serves it." if still_serves else ""
    )
    yield Finding(
        "scaler-shared",
        "info" if is_harmless else "warning",
        "",
        f"The loss scale fell by {fell:.0f} powers of two, and {f'only {own}' if own else 'none'} of this model's steps "
        "overflowed: another loss or optimizer that uses the same GradScaler overflows and drags the scale of this one down."
        f"{harmless}",
        {"powers_of_two": fell, "own_overflows": own},
        "" if is_harmless else "Give each network (each loss with an optimizer of its own) a scaler of its own.",
        ""
        if is_harmless
        else "scaler = torch.amp.GradScaler(device_type)  # one that scales this network's loss alone",
        INFERRED,
        first,
    )


def overflow_recurs(case: Case) -> Iterator[Finding]:
    """Overflows that recur although the scaler has not raised its scale, or at equal intervals at scales that held before.

    False alarms: A scaler that overflows in the first step after it has raised its scale is left out, since that is how it
    probes.
    """
    recurring = _periodic(case) or _without_growth(case)
    if not recurring:
        return
    steps, scales = [event.step for event in recurring], [event.loss_scale or 0.0 for event in recurring]
    gaps = {after - before for before, after in pairwise(steps)}
    period = gaps.pop() if len(gaps) == 1 else None
    numbers = _numbered(steps)
    when = f"Every {period} steps ({numbers})" if period else f"In steps {numbers}"
    falls = all(after < before for before, after in pairwise(scales))
    rises = any(after > before for before, after in pairwise(scales))
    despite = "the steps before had not" if rises else f"the scale {'fell each time' if falls else 'never grew'}"
    places = {(event.module, event.after) for event in recurring}
    module, is_after = places.pop() if len(places) == 1 else ("", False)
    where = f" {'after' if is_after else 'in'} {module!r}" if module else ""
    is_going_on = period is not None and steps[-1] + period >= case.progress.steps
    never = (
        " The scaler skips each of these steps, so whatever the loop does in them alone (a regulariser, another loss) never acts."
        if is_going_on and all(event.story == SKIPPED for event in recurring)
        else ""
    )
    yield Finding(
        "overflow-recurs",
        "warning" if is_going_on or period is None else "info",
        recurring[0].module,
        f"{when} the gradients overflow{where}, although {despite}: it was {with_power(scales[0])} at the first and "
        f"{with_power(scales[-1])} at the last. The gradients of these steps are far larger than the others'.{never}",
        {"steps": steps, "period": period, "scales": scales},
        f"Look at the batches of steps {numbers}: an outlier, a padded last batch, a sample or another loss once a period. Clip "
        "its loss, make it smaller, or leave it out; each such step halves the scale for all the others.",
        certainty=INFERRED,
        step=steps[0],
    )


def _without_growth(case: Case) -> list[Event]:
    """Return the overflows after the first search if the scale cannot have grown between them; [] if it can."""
    skips, intervals = _skips(case), [scaler.growth_interval for scaler in case.scalers if scaler.growth_interval]
    later = skips[len(_opening(skips)) :]
    gaps = [after.step - before.step for before, after in pairwise(later)]
    if len(later) < _FEWEST_STEPS or len(later) > _MOST * case.progress.steps or set(gaps) == {1}:
        return []
    scales = [event.loss_scale for event in later if event.loss_scale]
    if not intervals or min(gaps) >= min(intervals) or len(scales) < len(later):
        return []
    return later if all(after <= before for before, after in pairwise(scales)) else []


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
    for place, event in enumerate(skips[opening:], start=opening):
        before = skips[place - 1] if place else None
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


def scale_falls_for_forward(case: Case) -> Iterator[Finding]:
    """A scaler that lowers its scale because of a non-finite forward, which no scale mends.

    False alarms: It is reported from three skipped steps on; a single bad batch only gives a non-finite event.
    """
    broken = [event for event in case.events if event.skipped and event.forward_finite is False]
    steps = sorted({event.step for event in broken})
    if len(steps) < _FEWEST_STEPS:
        return
    first = min(broken, key=lambda event: event.step)
    is_loss, made_by = first.what in LOSSES, loss_made_by(first, case.session)
    place = f"the loss function{made_by}" if is_loss else f"the forward of {module_named(first.module)}"
    what = f"loss itself{made_by}" if is_loss else "forward itself"
    mend, code = look_at(first, case.session), ""
    if run_format(case.session) == FLOAT16 and was_in_half(first, case.session):
        after = (
            "from outputs in FP32"
            if is_loss
            else "and the modules that take its result until the values are below that again"
        )
        mend = (
            f"Find what exceeds {FLOAT16.max_finite:g} in {place}; compute it in FP32, {after}; or compute the whole model in "
            "BF16, without a scaler."
        )
        code = (
            "loss = loss_fn(output.float(), target)"
            if is_loss
            else "with torch.autocast(x.device.type, enabled=False):\n    y = f(x.float())"
        )
    yield Finding(
        "scale-falls-for-forward",
        "error",
        first.module,
        f"The scaler backed off in {len(steps)} steps because the {what} was not finite, from step {steps[0]} on"
        f"{period(steps)}: the loss scale is not the cause, and every such step halves it.",
        {"steps": len(steps), "first_step": steps[0]},
        f"{mend} In FP16 begin with a new scaler, since this one's scale was lowered without need.",
        code,
        step=steps[0],
    )


def scaler_of_no_use(case: Case) -> Iterator[Finding]:
    """An enabled scaler in a run whose range is FP32's.

    False alarms: A scaler that is kept for a switch to FP16 is reported unless it is disabled.
    """
    format = run_format(case.session)
    if not case.scalers or format not in (BFLOAT16, FLOAT32):
        return
    name, skipped = format_name(format.name), case.progress.skipped_steps
    yield Finding(
        "scaler-in-bfloat16",
        "warning" if format == BFLOAT16 else "info",
        "",
        f"The run computes in {name}, whose range is FP32's, and multiplies its loss by a scale that it does not need"
        + (
            f"; the scaler skipped {skipped} steps, so that infinities and NaNs went unnoticed."
            if skipped
            else "; if something became infinite or NaN, the scaler would silently skip that step."
        ),
        {"format": format.name, "skipped_steps": skipped},
        "Take the scaler out, or switch it off.",
        "scaler = torch.amp.GradScaler(enabled=False)",
    )


def _room(case: Case) -> int | None:
    """Return the largest k such that no gradient, as it arrived, overflows FP16 when multiplied by 2^k; None without any."""
    gradients = [window.histogram for key, window in case.totals.items() if key.kind in GRADIENT_KINDS]
    highest = [k for histogram in gradients if (k := histogram.max_log2_scale(FLOAT16)) is not None]
    return min(highest, default=None)


def _is_power(number: float) -> bool:
    """Return whether a positive number is a power of two, up to rounding."""
    return abs(math.log2(number) - round(math.log2(number))) <= _ALIKE


def _divisors(case: Case) -> tuple[float, float] | None:
    """Return the least and largest number by which all gradients were divided on their way to the optimizer, as by a scale.

    None if they were not. A scale is a power of two or stays the same; clipping divides by other numbers in each step, and
    averaging by the number of a step's backwards.
    """
    of_masters = next(case.measured("masters-given-smaller"), None)
    if of_masters is not None:
        return of_masters.figures["least"], of_masters.figures["most"]
    found = [each.figures for each in case.measured("changed-before-step") if "masters" not in each.figures]
    divisors = [1 / each["factor"] for each in found if each["is_uniform"] and 0 < each["factor"] < 1]
    if len(divisors) < max(len(found), 2):
        return None
    least, most = min(divisors), max(divisors)
    is_one = most - least <= _ALIKE * least
    are_powers = all(map(_is_power, divisors))
    batches = math.ceil(case.progress.backwards / max(case.progress.steps, 1))
    return (least, most) if (is_one or are_powers) and least > batches * (1 + _ALIKE) else None


def scaler_missing(case: Case) -> Iterator[Finding]:
    """An FP16 run in which no scaled loss was seen.

    False alarms: A loop that scales by hand looks the same until the inspector is given the scale. Where gradients reach the
    optimizer or its masters made smaller, all alike, the finding is information.
    """
    if not case.precision.weights or run_format(case.session) != FLOAT16 or not case.progress.backwards or case.scalers:
        return
    if any(change.scale not in (1.0, None) for change in case.progress.scales):
        # The loop scales by hand, and the inspector was given the scale.
        return
    recommended = case.advised.advice.recommended
    in_half = FLOAT16.name in case.precision.weights
    evidence = {"backwards": case.progress.backwards, "recommended": recommended}
    overflowed = [event for event in _skips(case) if event.value == "inf" and event.forward_finite]
    dropped = [event for event in overflowed if event.story == DROPPED]
    divided = _divisors(case)
    if divided is not None:
        exact = [2.0 ** round(math.log2(end)) if _is_power(end) else float(f"{end:.4g}") for end in divided]
        least, most = map(number_or_power, exact)
        times = least if least == most else f"{least} to {most}"
        clips = "" if least == most else ", which it changes" if all(map(_is_power, divided)) else ", and may clip"
        whose = "its masters get" if case.precision.has_masters else "its optimizer gets"
        skips = "" if dropped else ", nor whether the loop skips steps that overflow"
        yield Finding(
            "scaler-missing-in-float16",
            "info",
            "",
            f"The run computes in FP16 and no GradScaler was seen; the gradients that {whose} are {times} times smaller than the "
            f"backward's, as in a loop that multiplies its loss by a scale by hand{clips}: the scale is not known{skips}.",
            {"backwards": case.progress.backwards, "least": divided[0], "most": divided[1]},
            "Give the inspector the scale (loss_scale=; mpinspect run: --loss-scale).",
        )
        return
    if overflowed and not dropped:
        first = next((event for event in overflowed if event.story == TAKEN), overflowed[0])
        is_stepped = first.story == TAKEN and not survived(first, case.session)
        yield Finding(
            "scaler-missing-in-float16",
            "warning",
            "",
            "The run computes in FP16 and no GradScaler was seen: "
            + (
                f"nothing skips a step that overflows, as step {first.step} did."
                if is_stepped
                else f"step {first.step} overflowed, and whether the loop skips such steps is not known."
            ),
            evidence,
            f"{'Keep FP32 weights, and compute' if in_half else 'Compute'} in BF16, where such gradients are finite and "
            "nothing has to be scaled.",
            fp32_weights() if in_half else "with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = ...",
        )
        return
    highest = _room(case)
    log2 = round(_powers(recommended)) if recommended else max((highest or 0) - HEADROOM, 0)
    wanted = f", init_scale=2.0**{log2}" if log2 and (recommended or log2 < LOG2_INITIAL) else ""
    room = (
        f" (begin at 2^{log2}, {HEADROOM} powers of two below the largest at which nothing seen overflows; less may do)"
        if wanted and not recommended
        else ""
    )
    code = (
        (f"{fp32_weights(FLOAT16.name)}\n" if in_half else "")
        + f"scaler = torch.amp.GradScaler(device_type{wanted})\n"
        + "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    )
    by_hand = "give the inspector the scale (loss_scale=; mpinspect run: --loss-scale)"
    weights = "Keep FP32 weights (GradScaler refuses FP16 gradients), and scale" if in_half else "Scale"
    fix = f"{weights} the loss{room}; if the loop does so by hand, {by_hand}."
    if case.precision.has_masters:
        # Such loops scale by hand: a GradScaler would unscale the gradients of the masters.
        fix, code = (
            f"If the loop scales the loss by hand, {by_hand}, and let the loop skip steps that are not finite.",
            "",
        )
    yield Finding(
        "scaler-missing-in-float16",
        "warning",
        "",
        "The run computes in FP16 and no GradScaler was seen: gradients of 2^-25 and below become zero, "
        + (
            f"and the loop itself drops gradients that overflow, as those of step {dropped[0].step}."
            if dropped
            else "and no scaler skips a step that overflows."
        ),
        evidence,
        fix,
        code,
    )


DIAGNOSES: tuple[Diagnosis, ...] = (
    scale_falls_for_forward,
    scaler_made_anew,
    scale_too_high,
    initial_scale_too_high,
    scaler_missing,
    scale_too_low,
    overflow_recurs,
    scaler_shared,
    scaler_of_no_use,
)
