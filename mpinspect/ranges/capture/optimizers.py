"""The optimizers of a model, with their steps in progress and their skipped steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mpinspect.ranges.capture.layers import WatchedParameter

#: Maximum number of optimizers whose weight gradients are read when they step, in one launch each.
_FEW = 8


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside a trainer's wrappers, for which torch calls its hooks; None without one."""
    for name in ("_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return plain_optimizer(inner)
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return an optimizer's states of a parameter, by name; {} if it has none, or stores them in another form."""
    state = optimizer.state.get(parameter)
    return state if isinstance(state, dict) else {}


class ModelOptimizers:
    """Tracks the optimizers of the model: the ones that the user passed, and others that step the model's parameters.

    Args:
        given: the optimizers that the user passed.
        parameters: the model's parameters.
    """

    def __init__(self, given: Iterable[torch.optim.Optimizer], parameters: Iterable[WatchedParameter]) -> None:
        self._parameters = parameters
        self._by_id = {id(watched.parameter): watched for watched in parameters}
        #: The number of optimizers and their groups when ``few_hold_all`` last compared them, and the result.
        self._compared: tuple[int, list[tuple[int, int]]] | None = None
        self._few_hold_all = False
        #: For optimizers with parameters other than the model's: the ids of each group's first parameter.
        self._foreign: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        for optimizer in given:
            self._ours[optimizer] = True
        #: Optimizers (by id) inside a scaler's step, before their own step.
        self._in_scaler_step: set[int] = set()
        #: Optimizers (by id) inside a scaler's step, until it ends.
        self._guarded: set[int] = set()
        #: Optimizers (by id) whose step is in progress.
        self._in_step: set[int] = set()
        #: Whether any of the model's optimizers has stepped, and whether a scaler's step was called for any.
        self.any_stepped = self.scaler_has_stepped = False

    @property
    def known(self) -> tuple[str, ...]:
        """The class names of the model's optimizers."""
        return tuple(type(optimizer).__name__ for optimizer in self.living())

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None:
            known = self._ours[optimizer] = next(self.parameters(optimizer), None) is not None
        return known

    def living(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are known to belong to the model and still exist."""
        return [optimizer for optimizer, ours in self._ours.items() if ours]

    def few_hold_all(self) -> bool:
        """Return whether at most _FEW optimizers hold all trained parameters (one per parameter would step in the backward)."""
        groups = [group["params"] for each in self.living() for group in each.param_groups if group["params"]]
        # Every step asks, and hundreds of parameters are compared only if a group is new.
        state = len(self.living()), [(id(group[0]), len(group)) for group in groups]
        if state != self._compared:
            self._compared = state
            held = {id(parameter) for group in groups for parameter in group}
            trained = (watched.parameter for watched in self._parameters if watched.parameter.requires_grad)
            self._few_hold_all = state[0] <= _FEW and all(id(parameter) in held for parameter in trained)
        return self._few_hold_all

    def parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[WatchedParameter]:
        """Yield the model's parameters that the optimizer holds."""
        for group in optimizer.param_groups:
            yield from self.watched(group["params"])

    def watched(self, parameters: Iterable[torch.Tensor]) -> list[WatchedParameter]:
        """Return the model's parameters among these."""
        return [self._by_id[key] for key in map(id, parameters) if key in self._by_id]

    def holds_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds parameters unknown to the model that it did not hold at the last call.

        Compares only the first parameter of each group, which is cheap enough for every step.
        """
        first = [id(group["params"][0]) for group in optimizer.param_groups if group["params"]]
        foreign = [each for each in first if each not in self._by_id]
        if not foreign or self._foreign.get(optimizer) == foreign:
            return False
        self._foreign[optimizer] = foreign
        return True

    def parameters_replaced(self) -> None:
        """Read the model's parameters again, and forget the optimizers that held only other parameters."""
        self._by_id = {id(watched.parameter): watched for watched in self._parameters}
        self._compared = None
        for optimizer in [optimizer for optimizer, ours in self._ours.items() if not ours]:
            del self._ours[optimizer]

    def begin_step(self) -> None:
        """Forget all optimizer steps in progress."""
        self._in_scaler_step.clear()
        self._in_step.clear()

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that a scaler is about to run or skip an optimizer's step."""
        if self.owns(optimizer):
            self._in_scaler_step.add(id(optimizer))
            self._guarded.add(id(optimizer))
            self.scaler_has_stepped = True

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Record that an optimizer is about to step; return whether it belongs to the model."""
        self._in_scaler_step.discard(id(optimizer))
        return self.owns(optimizer)

    def is_guarded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a scaler is running this optimizer's step."""
        return id(optimizer) in self._guarded

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that a step of an optimizer of the model has begun."""
        self._in_step.add(id(optimizer))

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Record that an optimizer has stepped; return whether it belongs to the model."""
        self._in_step.discard(id(optimizer))
        ours = self.owns(optimizer)
        self.any_stepped |= ours
        return ours

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Record that a scaler's step is over; return whether the scaler skipped the optimizer's step.

        A step that began but did not end counts as skipped: it was undone, for example because a closure overflowed when
        evaluated again.
        """
        self._guarded.discard(id(optimizer))
        skipped = id(optimizer) in self._in_scaler_step or id(optimizer) in self._in_step
        self._in_scaler_step.discard(id(optimizer))
        self._in_step.discard(id(optimizer))
        return skipped

    def states(self) -> set[int]:
        """Return the ids of the tensors in the optimizers' state, like momentum buffers."""
        return {
            id(value)
            for optimizer in self.living()
            for state in optimizer.state.values()
            if isinstance(state, dict)
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }

    @property
    def any_fused(self) -> bool:
        """Whether any optimizer of the model is fused and may skip its step on the device, unknown to the host."""
        return any(map(skips_on_device, self.living()))


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is fused: it reads found_inf and skips its step on the device, unknown to the host."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def stands_still(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every learning rate is 0: torch.distributed.checkpoint makes an optimizer's states by such a step."""
    return not any(learning_rates(optimizer) or [1.0])


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group; [] if one is on a device, or unknown."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(
        not isinstance(rate, (int, float)) and not (isinstance(rate, torch.Tensor) and rate.is_cpu) for rate in rates
    ):
        return []
    return [float(rate) for rate in rates]  # type: ignore[arg-type]
