"""Finds the module that made the first infinity or NaN of a step: a pure function of the observed tensors, in execution order.

In the forward, the culprit is the module with the first non-finite output. If its input was non-finite already and no module
made that input, the culprit is the innermost container around the module whose own input was finite, or else the data. A mask's
-inf in an input counts as finite if the output is NaN.

In the backward, the *consumers* of a module's output, observed or not, make the gradient of this output. The culprit is the
consumer with a finite output gradient and a non-finite input gradient. If that consumer can't have made an infinity or NaN from
its finite output gradient, the culprit is the other code that used the same tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import LOSSES, Event, containers, is_below, module_named

FORWARD, BACKWARD = "forward", "backward"
#: Number of stored maxima for each tensor.
RING_LENGTH = 8
#: In place of a largest magnitude: the device skipped the tensor, since every value read after it was finite.
NOT_READ = -1.0
#: The names of the loss before and after a scaler multiplies it.
LOSS, SCALED_LOSS = LOSSES


def word(largest: float) -> str:
    """Return the name of a non-finite magnitude in an event: "nan" or "inf"."""
    return "nan" if math.isnan(largest) else "inf"


@dataclass(frozen=True)
class Seen:
    """One tensor that was read.

    Args:
        phase: FORWARD or BACKWARD.
        what: a kind of tensor, LOSS or SCALED_LOSS.
        name: dotted path of the module or parameter.
        module: dotted path of the module.
        tensor: number of the tensor within the step; -1 for parameters and the loss.
        micro_batch: counted from 0.
        largest: largest magnitude; inf or NaN if it is not finite; -inf for a forward input whose only non-finite values are
            -inf.
        is_input: the tensor was read as an input of the module, because no observed module made it.
        dtype: its dtype; "" if not known.
    """

    phase: str
    what: str
    name: str
    module: str
    tensor: int
    micro_batch: int
    largest: float
    is_input: bool = False
    dtype: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.what

    @property
    def finite(self) -> bool:
        return math.isfinite(self.largest)


class History:
    """The tensors' last maxima in earlier steps, and which tensors are infinite (or NaN) on purpose, like masks."""

    def __init__(self) -> None:
        #: By name and kind: plain tuples, as ``remember`` is called for every tensor of every step.
        self._maxima: dict[tuple[str, str], deque[float]] = {}
        #: Name and kind of each harmless tensor, with True for its NaN and False for its infinity.
        self._harmless: set[tuple[tuple[str, str], bool]] = set()

    def remember(self, found: Iterable[tuple[tuple[str, str], float]]) -> None:
        """Record tensors' largest magnitudes, where they are finite."""
        maxima, isfinite = self._maxima, math.isfinite
        for key, largest in found:
            if isfinite(largest):
                if key not in maxima:
                    maxima[key] = deque(maxlen=RING_LENGTH)
                maxima[key].append(largest)

    def last_maxima(self, key: tuple[str, str]) -> tuple[float, ...]:
        """Return the finite maxima of the last steps, the oldest first."""
        return tuple(self._maxima.get(key, ()))

    def excuse_masks(self, event: Event, seen: Iterable[Seen]) -> None:
        """Mark a step's non-finite forward tensors as harmless in later steps if every gradient of the step was finite."""
        if event.phase == FORWARD and event.gradients_finite:
            broken = (look for look in seen if look.phase == FORWARD and not look.finite)
            self._harmless.update((look.key, math.isnan(look.largest)) for look in broken)

    def excuses(self, look: Seen) -> bool:
        """Return whether a tensor's infinity (or its NaN) is marked as harmless."""
        return (look.key, math.isnan(look.largest)) in self._harmless


@dataclass
class TensorStory:
    """The modules that produced and consumed a tensor of this step.

    Args:
        producers: modules that returned it: first its maker, then containers that passed it on; empty if no module did.
        consumers: modules that received it.
        altered: another hook on the tensor may have changed its gradient.
        root: a backward began at the tensor.
    """

    producers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    altered: bool = False
    root: bool = False


class CallRecord(NamedTuple):
    """One completed call of a module.

    Args:
        module: dotted path.
        given, returned: numbers of the input and output tensors; an input that is returned unchanged is in both.
        overwritten: the module changed an input in place, and the input before the change has no number.
    """

    module: str
    given: list[int]
    returned: list[int]
    overwritten: bool = False


@dataclass(frozen=True)
class Culprit:
    """The module that made the first infinity or NaN, the first non-finite tensor, and the reason for naming the module."""

    phase: str
    module: str
    first: Seen
    explanation: str
    #: Whether the infinity or NaN arose in code after the module: in the loss, or in a function.
    after: bool = False
    #: Whether it was already in the model's input.
    given: bool = False
    #: Whether it may have arisen on another rank.
    elsewhere: bool = False


def event_of(
    found: Culprit,
    seen: Sequence[Seen],
    history: History,
    *,
    step: int,
    scale: float | None,
    skipped: bool | None,
    forward_finite: bool | None,
    dropped: bool = False,
) -> Event:
    """Return the event of a step's culprit. ``seen``: all tensors observed in the step; other arguments as in ``Event``."""
    first = found.first
    return Event(
        step=step,
        micro_batch=first.micro_batch,
        phase=found.phase,
        module=found.module,
        what=first.what,
        tensor=first.name,
        value=word(first.largest),
        loss_scale=scale,
        last_maxima=history.last_maxima(first.key),
        skipped=skipped,
        forward_finite=forward_finite,
        gradients_finite=finite_gradients(seen),
        explanation=found.explanation,
        after=found.after,
        given=found.given,
        of_input=first.is_input and first.phase == BACKWARD,
        elsewhere=found.elsewhere,
        dropped=dropped,
        dtype=first.dtype,
    )


def first_broken(seen: Sequence[Seen]) -> Seen | None:
    """Return the first non-finite tensor, without modules' inputs in the forward; None if all are finite."""
    return next((look for look in seen if not look.finite and not (look.is_input and look.phase == FORWARD)), None)


def find_culprit(
    seen: Sequence[Seen],
    stories: Sequence[TensorStory],
    calls: Sequence[CallRecord],
    read: Collection[int],
    innocent: Collection[str],
) -> Culprit | None:
    """Return the module that made the first infinity or NaN of a step, or None if every observed tensor was finite.

    Args:
        seen: in execution order.
        stories: by tensor number.
        calls: in the order of their returns.
        read: numbers of the tensors whose values were read.
        innocent: modules that can't have made an infinity or NaN from their inputs (forward: the module of ``first_broken``;
            backward: consumers of its tensor).
    """
    look = first_broken(seen)
    if look is None:
        return None
    if look.phase == FORWARD:
        return _in_forward(look, seen, calls, read, innocent)
    if look.what == SCALED_LOSS:
        return Culprit(BACKWARD, "", look, "the loss was finite, but its product with the loss scale was not")
    if look.what == WEIGHT_GRADIENT:
        reason = "its weight gradient was the first that was not finite"
        if all(call.module != look.module for call in calls):
            reason += "; no call of it was seen (in torch.compile, or between samples on a GPU), so it may have arisen after it"
        return Culprit(BACKWARD, look.module, look, reason)
    return _in_backward(look, seen, stories, calls, innocent)


def _in_forward(
    look: Seen, seen: Sequence[Seen], calls: Sequence[CallRecord], read: Collection[int], innocent: Collection[str]
) -> Culprit:
    """Return the innermost call with finite inputs, searching outwards from the call that returned the non-finite tensor."""
    if look.what == LOSS:
        reason = "every output seen was finite and the loss was not: it arose in the loss function"
        return Culprit(FORWARD, "", look, reason)
    bad = {other.tensor for other in seen if other.phase == FORWARD and not other.finite}
    masks = _masks(look, seen, calls)
    bad -= masks
    at = next((i for i, call in enumerate(calls) if call.module == look.module and look.tensor in call.returned), None)
    if at is None:
        return Culprit(FORWARD, look.module, look, "its output was the first that was not finite")
    call = calls[at]
    overwritten = call.overwritten and look.module in innocent
    if not overwritten and not bad.intersection(call.given):
        return Culprit(
            FORWARD,
            look.module,
            look,
            f"its output was the first that was not finite; {_what_went_in(call, look, seen, read, masks)}",
        )
    inner, outermost = look.module, look.module == ""
    for container in containers(look.module):
        # A container's call returns after the calls inside it. A ModuleList or a Sequential that code loops over is never called.
        around = next((call for call in calls[at + 1 :] if call.module == container), None)
        if around is None:
            continue
        outermost = container == ""
        if not bad.intersection(around.given):
            return _in_container(around, inner, look, read, calls[:at])
        inner = container
    if outermost:
        reason = "it was in the data, or arose in code before the model"
        if look.module:
            reason += f"; {look.module!r} is the first module that received it"
        return Culprit(FORWARD, "", look, reason, given=True)
    reason = (
        f"it arose before {inner!r}, whose input already held an inf or NaN: in the code around it or in the data (no call "
        "around it has returned to show which)"
    )
    return Culprit(FORWARD, "", look, reason)


def _in_container(
    around: CallRecord, inner: str, look: Seen, read: Collection[int], before: Sequence[CallRecord]
) -> Culprit:
    """Return a container as the culprit: an input of a module inside it is non-finite, but none of its own inputs."""
    where = f"in {_code_of(around.module)}"
    unread = [
        repr(call.module)
        for call in before
        if is_below(call.module, around.module) and any(number not in read for number in call.returned)
    ]
    if unread:
        where += f" or in {', '.join(unread[-3:])} (whose output was not read in this step)"
    if not around.module and not around.given:
        where += " or in the data,"
    elif not read_all(around, read):
        where += f" or before it (not every tensor that {module_named(around.module)} was given was read),"
    return Culprit(
        FORWARD, around.module, look, f"an inf or NaN arose {where} before {inner!r}, whose input already held it"
    )


def _code_of(module: str) -> str:
    return f"the code of {module!r}" if module else "the model's own code"


def _masks(output: Seen, seen: Sequence[Seen], calls: Sequence[CallRecord]) -> set[int]:
    """Return the tensors that are masks with -inf: no module made them, or computes with one as its only input.

    Empty unless the output is NaN: an infinite output may come from a mask. A container may be given a mask and token ids alone.
    """
    if not math.isnan(output.largest):
        return set()
    outer = {container for call in calls for container in containers(call.module)}
    alone = {call.given[0] for call in calls if len(call.given) == 1 and call.module not in outer}
    return {look.tensor for look in seen if look.is_input and look.largest == -math.inf} - alone


def read_all(call: CallRecord, read: Collection[int]) -> bool:
    """Return whether the values of all inputs of a call were read."""
    return not call.overwritten and all(number in read for number in call.given)


def _what_went_in(call: CallRecord, made: Seen, seen: Sequence[Seen], read: Collection[int], masks: set[int]) -> str:
    if call.overwritten:
        return "it changed its input in place, so whether its input was finite is not known"
    if not read_all(call, read):
        return "whether its whole input was finite is not known, since not all of it was read"
    words = "its input was finite"
    if not masks.isdisjoint(call.given):
        words += " except -inf, as in a mask"
    largest = max((look.largest for look in seen if look.tensor in call.given), default=0.0)
    if largest > FLOAT16.max_finite and made.dtype in ("", FLOAT16.name):
        words += f", up to {largest:.3g} (beyond FP16's {FLOAT16.max_finite:g})"
    return words


def _in_backward(
    look: Seen,
    seen: Sequence[Seen],
    stories: Sequence[TensorStory],
    calls: Sequence[CallRecord],
    innocent: Collection[str],
) -> Culprit:
    story = stories[look.tensor]
    if story.altered and story.producers:
        reason = "the gradient at its output was the first that was not finite (another hook may have changed it there)"
        return Culprit(BACKWARD, story.producers[0], look, reason)
    finite_at_output = largest_at_output(seen, stories, look)
    consumers = [module for module in _innermost(story.consumers) if module not in innocent]
    suspects = [module for module in consumers if module in finite_at_output]
    if not suspects:
        return _in_code_after(look, stories, calls, finite_at_output, consumers)
    by_weight = {
        other.module for other in seen if other.what == WEIGHT_GRADIENT and other.phase == BACKWARD and not other.finite
    }
    named = [module for module in suspects if module in by_weight] or suspects
    reason = "the gradient at its output was finite, the gradient at its input was not"
    if finite_at_output[named[-1]] == NOT_READ:
        reason = "the gradient at its input was not finite, and the one at its output was not read in this step"
    others = [module for module in suspects if module != named[-1]]
    if others:
        reason += f" (that input is shared with {', '.join(others)})"
    return Culprit(BACKWARD, named[-1], look, reason)


def largest_at_output(seen: Sequence[Seen], stories: Sequence[TensorStory], until: Seen) -> dict[str, float]:
    """Return for each module the largest magnitude of its finite output gradients before ``until``, or NOT_READ."""
    largest: dict[str, float] = {}
    for look in seen:
        if look is until:
            break
        if look.phase == BACKWARD and look.what == ACTIVATION_GRADIENT and look.finite:
            for module in stories[look.tensor].producers:
                largest[module] = max(look.largest, largest.get(module, NOT_READ))
    return largest


def _in_code_after(
    look: Seen,
    stories: Sequence[TensorStory],
    calls: Sequence[CallRecord],
    finite_at_output: Mapping[str, float],
    unread: Sequence[str],
) -> Culprit:
    """Return the culprit if no consumer of the tensor made the value: a container's code around the producer, or the loss."""
    story = stories[look.tensor]
    producer = next(iter(story.producers), look.module)
    what = "input" if look.is_input else "output"
    doubt = ""
    if unread:
        doubt = f", or in {', '.join(map(repr, unread))}, at whose output no gradient was read"
    for container in containers(producer):
        returned = {number for call in calls if call.module == container for number in call.returned}
        # A module that only returns this tensor adds nothing to its gradient, which later code made.
        is_done = container in story.producers and all(stories[n].producers[0] != container for n in returned)
        if finite_at_output.get(container, NOT_READ) != NOT_READ and not is_done:
            first, second = "its output", f"the {what} of {producer!r} inside it"
            if container in story.producers:
                # The gradient at this tensor is the sum of both.
                first, second = "another output or call of it", f"the output of {producer!r}, which it returned too,"
                doubt += ", or in the code after it (the loss)"
            reason = (
                f"the gradient at {first} was finite, the one at {second} was not: the inf or NaN arose in "
                f"{_code_of(container)}{doubt}"
            )
            return Culprit(BACKWARD, container, look, reason)
    if story.root:
        reason = (
            f"the gradient passed to backward() for its {what} was not finite: it was computed elsewhere, for example in the "
            "next stage of a pipeline"
        )
    else:
        reason = (
            f"the gradient that arrived at its {what} was already not finite: it arose in the backward of the code after "
            f"this module (the loss, or a function){doubt}"
        )
    return Culprit(BACKWARD, producer, look, reason, after=True, elsewhere=story.root)


def _innermost(modules: Sequence[str]) -> list[str]:
    """Return the modules that contain no other of these modules."""
    unique = list(dict.fromkeys(modules))
    return [one for one in unique if not any(is_below(other, one) for other in unique)]


def finite_in_forward(seen: Sequence[Seen]) -> bool | None:
    """Return whether every observed output and the loss were finite; None without observations (compiled code)."""
    return are_finite(look for look in seen if look.phase == FORWARD and not look.is_input)


def finite_gradients(seen: Sequence[Seen]) -> bool | None:
    """Return whether every observed gradient was finite; None if no gradient was observed."""
    return are_finite(look for look in seen if look.phase == BACKWARD and look.what != SCALED_LOSS)


def are_finite(seen: Iterable[Seen]) -> bool | None:
    """Return whether all these tensors were finite; None if there are none."""
    finite = [look.finite for look in seen]
    return all(finite) if finite else None
