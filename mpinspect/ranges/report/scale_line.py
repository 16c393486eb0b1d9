"""One-line summaries of a run's steps, its events and the advice on its loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.session import DROPPED, END, LOSSES, Event, Progress, module_named
from mpinspect.reporting.words import (
    UNKNOWN,
    as_power,
    filled,
    format_name,
    lower_first,
    number_of,
    optional,
    powers_of_two,
    steps_named,
    with_power,
)

_FINITE = {True: "finite", False: "not finite"}


def steps_and_samples(progress: Progress, state: str = "") -> str:
    """Return the counts in words: "1,000 steps, 100 of them sampled, 3 updates skipped, 4,000 backwards".

    Backwards are named only if there are more than steps.

    Args:
        state: words to put after "steps".
    """
    # A step that never ended counts as a sample if there is no other.
    sampled = "begun and sampled" if progress.sampled_steps > progress.steps else "sampled"
    if progress.sampled_steps < progress.steps:
        sampled = "of them sampled"
    words = [f"{number_of(progress.steps, 'step')}{state}", f"{progress.sampled_steps:,} {sampled}"]
    if progress.eager_steps is not None and (progress.compiled or progress.eager_steps):
        words[-1] += f" ({progress.eager_steps:,} of them run eagerly instead of compiled)"
    if progress.skipped_steps:
        words.append(f"{number_of(progress.skipped_steps, 'update')} skipped")
    if progress.backwards > progress.steps + 1:
        words.append(f"{progress.backwards:,} backwards")
    return ", ".join(words)


def event_maxima(event: Event) -> str:
    """Return the largest magnitudes of an event's tensor in the steps before, in words; "" if none are known."""
    if not event.last_maxima:
        return ""
    quantity = event.quantity
    if event.phase == "backward" and event.loss_scale not in (None, 1.0):
        quantity += ", times the loss scale,"
    largest = ", ".join(f"{value:.3g}" for value in event.last_maxima)
    return f"the largest magnitudes of {quantity} in the steps before, oldest first: {largest}"


def scale_line(advice: LossScaleAdvice) -> str:
    """Return the suggested loss scale, its window and the headroom in words, or a sentence that no scale fits."""
    if not advice.available:
        return "No window of loss scales can be given"
    if advice.serves_none:
        ends = f"at least {as_power(advice.lowest)} is needed, {as_power(advice.highest)} the largest"
        return f"No loss scale to suggest; no scale serves all: {ends}"
    if advice.needed is False:
        suggested, finer = "Scale 1 will do" if advice.all_finite else "Scale 1 would do", advice.finer_from
        if finer and finer > 1:
            suggested += (
                f" for the range (from a loss scale of {with_power(finer)} on FP16 also rounds finer than BF16)"
            )
        return f"{suggested}; {scale_window(advice)}"
    suggested = f"Suggested loss scale: {with_power(advice.recommended)}"
    if not advice.needed:
        suggested += " (if one is needed)"
    return f"{suggested}; {scale_window(advice)}; headroom {optional(advice.headroom, powers_of_two, UNKNOWN)}"


def scale_in_brief(report: RangeReport) -> str:
    """Return a report's ``scale_line``; for a run in BF16 that needs no loss scale, a sentence on that and on FP16's need."""
    if report.session.info.inference:
        return "No backward ran: no loss scale is needed"
    if report.in_float16 is None or report.loss_scale.needed is not False:
        return scale_line(report.loss_scale)
    return f"{format_name(report.format)} needs no loss scale. In FP16: {lower_first(scale_line(report.in_float16))}"


def reserve_line(advice: LossScaleAdvice, used: float | None = None) -> str:
    """Return how many powers of two lie between the ends of the window and the suggested scale, and the scale in use if known.

    Return "" if the window is empty or its lower end is not known.
    """
    if advice.needed is None or not advice.available or advice.recommended is None:
        return ""
    if advice.lowest is None or advice.highest is None or advice.serves_none:
        return ""
    ends = math.log2(advice.lowest), math.log2(advice.highest)
    best = f"the suggested scale, {as_power(advice.recommended)}," if advice.needed else "the scale 1, which is enough,"
    words = [_reserve(best, advice.recommended, ends)]
    if used is not None and 0 < used < math.inf and used != advice.recommended:
        words.append(_reserve(f"the run's last, {as_power(used)},", used, ends))
    return f"Room in the window, in powers of two: {'; '.join(words)}."


def _reserve(named: str, scale: float, ends: tuple[float, float]) -> str:
    below, above = math.log2(scale) - ends[0], ends[1] - math.log2(scale)
    if below < 0:
        return f"{named} lies {-below:.3g} below the window"
    if above < 0:
        return f"{named} lies {-above:.3g} above the window"
    return f"{named} has {below:.3g} below and {above:.3g} above"


def scale_window(advice: LossScaleAdvice) -> str:
    """Return the window in words: "window 2^3 .. 2^16"; the lower end is "?" if the need for scaling is unknown."""
    lowest = UNKNOWN if advice.needed is None else as_power(advice.lowest)
    window = f"window {lowest} .. {as_power(advice.highest)}"
    return window if advice.all_finite else f"{window} of the finite gradients"


def event_facts(event: Event) -> Iterator[str]:
    """Yield the facts about an event's step: its loss scale, which values were finite, and whether it was skipped."""
    if event.phase == END:
        yield "no step reported it"
    elif event.loss_scale or event.gradients_finite is not None:
        yield f"loss scale {optional(event.loss_scale or None, with_power, 'unknown')}"
    if event.what == LOSSES[0]:
        yield "every output seen was finite, the loss was not"
    elif event.forward_finite is not None:
        yield f"the model's forward was {_FINITE[event.forward_finite]}"
    if event.gradients_finite is not None:
        yield f"the gradients were {_FINITE[event.gradients_finite]}"
    if event.story == DROPPED:
        yield "the loop dropped the gradients"
    elif event.story:
        yield f"the optimizer's step was {event.story}"


def event_line(event: Event) -> str:
    """Return an event's rank, step, place, value and tensor in words."""
    batch = filled(", micro-batch {}", event.micro_batch or None)
    return f"{_rank(event)}step {event.step}{batch}, {_happened(event)}"


def in_same_places(events: Sequence[Event]) -> list[tuple[Event, ...]]:
    """Return the events in groups of neighbours with the same value in the same place."""
    return [tuple(group) for _, group in groupby(events, lambda event: (_rank(event), _happened(event)))]


def events_line(events: Sequence[Event]) -> str:
    """Return one line for events in the same place: "steps 25-59, 35 times, forward, 'fc': nan in the activation of 'fc'"."""
    first, last = events[0], events[-1]
    if len(events) == 1 or first.step == last.step:
        return event_line(first)
    return f"{_rank(first)}{steps_named(first.step, last.step)}, {len(events):,} times, {_happened(first)}"


def _rank(event: Event) -> str:
    return filled("rank {}, ", event.rank)


def _happened(event: Event) -> str:
    """Return the phase, place, value and tensor of an event in words."""
    what = f"in the {event.what.replace('_', ' ')}"
    if event.given:
        what = f"seen {what}"
    if event.of_input:
        what += f" of an input of {module_named(event.tensor)}"
    elif event.tensor not in ("", event.module):
        what += f" of {event.tensor!r}"
    return f"{event.phase}, {event.place}: {event.value} {what}"
