"""Words for the event that broke a run, in one line: the first thing to read when a run has failed."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.numeric.formats import floor_log2, is_power_of_two
from mpinspect.ranges.session import DROPPED, END, SKIPPED, Event
from mpinspect.reporting.words import filled

_VALUES = {"inf": "inf", "nan": "NaN"}
_FINITE = {True: "finite", False: "not finite"}
_STORIES = {SKIPPED: "step skipped", DROPPED: "dropped by the loop"}


def first_line(event: Event, *, is_beside_map: bool = False) -> str:
    """Return ``step 412, backward, 'decoder.3.attn', first inf, scale 65536, forward finite``, without the unknown parts.

    If there are several ranks, the line begins with the rank that saw the event. Beside a map, which marks the module and the
    skipped steps, the module is left out, and of a forward everything after the value.
    """
    rank, value = filled("rank {}", event.rank), f"first {_VALUES.get(event.value, event.value)}"
    if event.phase == END:
        return ", ".join(filter(None, (rank, f"end of the run (step {event.step})", repr(event.tensor), value)))
    parts = [rank, f"step {event.step}"]
    if event.micro_batch:
        parts.append(f"micro-batch {event.micro_batch}")
    parts += [event.phase, event.place * (not is_beside_map), value]
    if is_beside_map and event.phase == "forward":
        return ", ".join(filter(None, parts))
    # A loss that nothing scales has the scale 1.
    if event.loss_scale not in (None, 1.0):
        parts.append(f"scale {_scale(event.loss_scale)}")
    if event.phase == "backward" and event.forward_finite is not None:
        # After the last module the loss, too, may have been non-finite.
        what = "outputs" if event.after else "forward"
        parts.append(f"{what} {_FINITE[event.forward_finite]}")
    if event.aside:
        parts.append("of another model's loss")
    elif event.story in _STORIES:
        parts.append(_STORIES[event.story])
    return ", ".join(filter(None, parts))


def _scale(scale: float) -> str:
    """Return the scale as a plain number, or as "2^k" if it is a power of two below 1 or above 2^24."""
    if not is_power_of_two(scale) or 1 <= scale <= 1 << 24:
        return f"{scale:.15g}"
    return f"2^{floor_log2(scale)}"


def gravest(events: Sequence[Event]) -> Event | None:
    """Return the first harmful event that no loss scaler caught; None without one.

    A dynamic scaler finds its scale by overflowing, so a skipped step with a finite forward is normal. A non-finite forward
    with finite gradients (a mask of infinities) does no harm.
    """
    return next((event for event in events if not _is_probing(event) and not _is_harmless(event)), None)


def _is_probing(event: Event) -> bool:
    """Return whether the gradients were discarded, for example after the loss scale grew too large, or are another model's."""
    return event.aside or (bool(event.skipped) and event.phase == "backward" and event.forward_finite is not False)


def _is_harmless(event: Event) -> bool:
    return event.phase == "forward" and bool(event.gradients_finite)
