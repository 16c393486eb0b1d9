"""Describes the inspector's measured cost under a budget, in words."""

from __future__ import annotations

from mpinspect.ranges.session import Session
from mpinspect.reporting.words import filled

#: Ratio of cost to budget above which the report explains why the budget was exceeded.
_CLEARLY_ABOVE = 1.25


def overhead_line(session: Session) -> str:
    """Return a sentence on the measured cost and on the steps sampled and watched; "" without a budget.

    The cost is the time in the inspector's callbacks (and in its kernels on a CUDA device) divided by the bare steps' time.
    """
    most, progress = session.info.max_overhead, session.progress
    if most is None and progress.overhead is None:
        return ""
    asked = filled(" (max_overhead {:.3g})", most)
    if progress.overhead is None:
        cost = f"the cost is not measured yet{asked}"
    else:
        cost = (
            f"measured cost {progress.overhead:.2%} of the bare steps{asked}: {progress.own_s:.3g} s to "
            f"{progress.bare_s:.3g} s over {progress.measured_steps:,} steps"
        )
        if most is not None and progress.overhead > _CLEARLY_ABOVE * most:
            cost += (
                ", more than requested: the first two steps are sampled at any cost, and in very short steps the hooks alone "
                "exceed the budget"
            )
    parts = [cost]
    if session.info.kinds:
        parts.append(f"sampled {_share(progress.sampled_steps, progress.steps)}")
    if session.info.watch and progress.watched_steps is not None:
        watched = f"the watch checked {_share(progress.watched_steps, progress.steps)}"
        if progress.watched_steps < progress.steps:
            watched += ": infinities and NaNs in the other steps were not seen"
        parts.append(watched)
    return "; ".join(parts)


def _share(number: int, steps: int) -> str:
    if not steps:
        return "none so far"
    if number >= steps:
        return f"all {steps:,} steps"
    if not number:
        return f"none of {steps:,} steps"
    interval = steps / number
    return f"{number:,} of {steps:,} steps, about 1 in {interval:,.{int(interval < 10)}f}"
