"""Which module made the first infinity or NaN of a step: a pure function of what was seen, in execution order.

What is observed are tensors; what the user wants is a module. In the forward, the module whose output is the first to
be not finite is named, unless its own input already was and no module made that input: then the code between modules,
in the container around it, did. In the backward, the gradient at a module's output is made by the *consumers* of that
output: the module named is the one whose output gradient was still finite and whose input gradient is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpinspect.session import ACTIVATION_GRADIENT, LOSSES, WEIGHT_GRADIENT

FORWARD, BACKWARD = "forward", "backward"
#: What is seen of the loss itself where a scaler multiplies it: before and after.
LOSS, SCALED_LOSS = LOSSES


@dataclass(frozen=True)
class Seen:
    """One look at one tensor.

    Args:
        phase: FORWARD or BACKWARD.
        what: a kind of tensor, LOSS or SCALED_LOSS.
        name: dotted path of the module or parameter.
        module: dotted path of the module.
        tensor: number of the tensor within the step; -1 for parameters and the loss.
        micro_batch: counted from 0.
        largest: largest magnitude; inf or NaN if it is not finite.
        is_input: seen as an input of the module, because no module was seen to make it.
    """

    phase: str
    what: str
    name: str
    module: str
    tensor: int
    micro_batch: int
    largest: float
    is_input: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.largest)

    @property
    def is_nan(self) -> bool:
        return math.isnan(self.largest)


@dataclass
class TensorStory:
    """Where a tensor of this step came from and where it went.

    Args:
        producers: modules that returned it, the maker first, then containers that passed it on; none if no module made it.
        consumers: modules that were given it.
        altered: somebody else's hook on it may have changed its gradient.
    """

    producers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    altered: bool = False


@dataclass(frozen=True)
class Culprit:
    """The answer: the module, what was first seen not finite, and how it is known."""

    phase: str
    module: str
    first: Seen
    explanation: str
    #: It arose after the module: in the loss, or in a function.
    after: bool = False


def find_culprit(
    seen: Sequence[Seen], stories: Sequence[TensorStory], inputs: dict[str, set[int]], leaves: set[str]
) -> Culprit | None:
    """The module in which the first infinity or NaN of a step arose, or None if everything seen was finite.

    Args:
        seen: in execution order.
        stories: by tensor number.
        inputs: by module, the numbers of the tensors it was given.
        leaves: modules without submodules.
    """
    for index, look in enumerate(seen):
        if look.finite or (look.is_input and look.phase == FORWARD):
            continue
        if look.phase == FORWARD:
            return _in_forward(look, seen, inputs, leaves)
        if look.what == SCALED_LOSS:
            return Culprit(BACKWARD, "", look, "the loss was finite, and multiplied by the loss scale it was not")
        if look.what == WEIGHT_GRADIENT:
            return Culprit(BACKWARD, look.module, look, "its weight gradient was the first that was not finite")
        return _in_backward(look, index, seen, stories)
    return None


def _in_forward(look: Seen, seen: Sequence[Seen], inputs: dict[str, set[int]], leaves: set[str]) -> Culprit:
    if look.what == LOSS:
        reason = "every output seen was finite and the loss was not: it arose in the loss function"
        return Culprit(FORWARD, "", look, reason)
    bad_inputs = {
        other.tensor for other in seen if other.is_input and other.phase == FORWARD and not other.finite
    } & inputs.get(look.module, set())
    if look.module in leaves and bad_inputs:
        parent = look.module.rpartition(".")[0]
        where = f"in the code of {parent!r}" if parent else "in the model's own code or in the data,"
        return Culprit(
            FORWARD, parent, look, f"it arose {where} before {look.module!r}, whose input was not finite already"
        )
    return Culprit(FORWARD, look.module, look, "its output was the first that was not finite; what went in was finite")


def _in_backward(look: Seen, index: int, seen: Sequence[Seen], stories: Sequence[TensorStory]) -> Culprit:
    story = stories[look.tensor]
    if story.altered and story.producers:
        reason = "the gradient at its output was the first that was not finite (another hook may have changed it there)"
        return Culprit(BACKWARD, story.producers[0], look, reason)
    finite_at_output = {
        module
        for other in seen[:index]
        if other.phase == BACKWARD and other.what == ACTIVATION_GRADIENT and other.finite
        for module in stories[other.tensor].producers
    }
    suspects = [module for module in _innermost(story.consumers) if module in finite_at_output]
    if not suspects:
        return _in_code_after(look, story.producers[0] if story.producers else look.module, finite_at_output)
    by_weight = {
        other.module for other in seen if other.what == WEIGHT_GRADIENT and other.phase == BACKWARD and not other.finite
    }
    named = [module for module in suspects if module in by_weight] or suspects
    reason = "the gradient at its output was finite, the gradient at its input was not"
    others = [module for module in suspects if module != named[-1]]
    if others:
        reason += f" (that input is shared with {', '.join(others)})"
    return Culprit(BACKWARD, named[-1], look, reason)


def _in_code_after(look: Seen, producer: str, finite_at_output: set[str]) -> Culprit:
    """No module took that tensor: the code of a container around its producer did, or the loss."""
    for container in _containers(producer):
        if container in finite_at_output:
            reason = f"the gradient at its output was finite, the one at {producer!r} inside it was not: it arose in its own code"
            return Culprit(BACKWARD, container, look, reason)
    reason = (
        "the gradient arriving at its output was not finite: it arose in the code after it (the loss, or a function)"
    )
    return Culprit(BACKWARD, producer, look, reason, after=True)


def _containers(module: str) -> list[str]:
    """The modules around this one, innermost first; the model itself, "", is the last."""
    parts = module.split(".")[:-1] if module else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)] + ([""] if module else [])


def _innermost(modules: Sequence[str]) -> list[str]:
    """The modules that do not contain another of them."""
    unique = list(dict.fromkeys(modules))
    return [
        one
        for one in unique
        if not any(other != one and (one == "" or other.startswith(one + ".")) for other in unique)
    ]


def finite_in_forward(seen: Sequence[Seen]) -> bool:
    """Whether every output seen was finite, and the loss."""
    return all(look.finite for look in seen if look.phase == FORWARD and not look.is_input)


def finite_gradients(seen: Sequence[Seen]) -> bool | None:
    """Whether every gradient seen was finite; None if none was seen."""
    gradients = [look.finite for look in seen if look.phase == BACKWARD and look.what != SCALED_LOSS]
    return all(gradients) if gradients else None
