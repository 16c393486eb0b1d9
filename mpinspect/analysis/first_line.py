"""What broke, in one line: the first thing to read when a run has failed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpinspect.session import Event

_VALUES = {"inf": "inf", "nan": "NaN"}


def first_line(event: Event) -> str:
    """``step 412, backward, decoder.3.attn, first inf, scale 65536, forward finite``; what is not known is left out."""
    parts = [f"step {event.step}"]
    if event.micro_batch:
        parts.append(f"micro-batch {event.micro_batch}")
    parts += [event.phase, event.place, f"first {_VALUES.get(event.value, event.value)}"]
    if event.loss_scale is not None:
        parts.append(f"scale {_scale(event.loss_scale)}")
    if event.phase == "backward" and event.forward_finite is not None:
        parts.append("forward finite" if event.forward_finite else "forward not finite")
    if event.skipped:
        parts.append("step skipped")
    return ", ".join(parts)


def _scale(scale: float) -> str:
    """A number that one has heard of, or the power of two that it is."""
    mantissa, exponent = math.frexp(scale)
    is_known = mantissa != 0.5 or 0 <= exponent - 1 <= 24
    return f"{scale:.15g}" if is_known else f"2^{exponent - 1}"


def gravest(events: Sequence[Event]) -> Event | None:
    """The event that a run failed by: the first that no loss scaler caught and that did harm; else the first; None without any.

    A dynamic loss scale is found by overflowing: a skipped step with a finite forward is how it probes. A forward that is not
    finite while every gradient is, as with a mask of infinities, does no harm.
    """
    harmful = (event for event in events if not _is_probing(event) and not _is_harmless(event))
    return next(harmful, events[0] if events else None)


def _is_probing(event: Event) -> bool:
    return bool(event.skipped) and event.phase == "backward" and event.forward_finite is not False


def _is_harmless(event: Event) -> bool:
    return event.phase == "forward" and bool(event.gradients_finite)
