"""The ledger, an observer: in which dtypes the run keeps and computes things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Call, Observer
from mpinspect.ranges.capture.optimizers import ModelOptimizers
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.session import OptimizerRecord, Precision, ScalerRecord
from mpinspect.runtime.distributed import local_part

#: Settings of an optimizer's group that are recorded, where they are numbers.
_SETTINGS = ("lr", "weight_decay", "eps", "momentum")


class Ledger(Observer):
    """Records dtypes in measured steps. Reads no tensor's values.

    Args:
        parameters: the model's.
        optimizers: those that step them.
        clock: the run's.
        recording: takes the ledger.
    """

    def __init__(
        self,
        parameters: Sequence[WatchedParameter],
        optimizers: ModelOptimizers,
        clock: StepClock,
        recording: Recording,
    ) -> None:
        self._clock, self._optimizers, self._recording = clock, optimizers, recording
        self._ids = {id(watched.parameter) for watched in parameters}
        self._parameters = parameters
        self._gradients: Counter[str] = Counter()
        #: In the order in which they were seen.
        self._autocast: dict[str, None] = {}
        self._outputs: dict[str, None] = {}
        self._losses: dict[str, None] = {}
        #: By id, which may be given to another: then that one takes its place.
        self._stepped: dict[int, OptimizerRecord] = {}
        self._scalers: dict[int, ScalerRecord] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Be at work in a measured step."""
        self.at_work = self._clock.measured

    def called(self, call: Call) -> None:
        """Take the autocast around a training forward, and the dtypes of what it returned."""
        if call.recomputed:
            return
        for output in call.outputs:
            if output.is_floating_point():
                self._outputs[dtype_name(output.dtype)] = None
                device = output.device.type
                is_on = torch.is_autocast_enabled(device)
                self._autocast[dtype_name(torch.get_autocast_dtype(device)) if is_on else ""] = None

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Take the dtypes of the losses."""
        self._losses.update(dict.fromkeys(dtype_name(loss.dtype) for loss in losses))

    def scaler_used(self, scaler: Any) -> None:
        """Take a scaler that is about to multiply a loss."""
        if id(scaler) not in self._scalers:
            self._scalers[id(scaler)] = _scaler(scaler)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the dtypes of the gradients that the optimizer is given."""
        if self.at_work:
            given = _elements(parameter.grad for parameter in _stepped_by(optimizer) if parameter.grad is not None)
            self._gradients.update({dtype: count for dtype, count in given.items() if dtype not in self._gradients})

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the settings of the optimizer, what it steps and its states, which it has made by now."""
        if self.at_work:
            self._stepped[id(optimizer)] = self._optimizer(optimizer)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer without the states that it has not made yet."""
        if self.at_work and id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = self._optimizer(optimizer)

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the ledger as far as it is known."""
        if self.at_work:
            self._record()

    def run_ends(self) -> None:
        """Record it once more, for a run that broke off within a step."""
        self._record()

    def _record(self) -> None:
        self._recording.dtypes(
            Precision(
                _elements(watched.parameter for watched in self._parameters),
                dict(self._gradients),
                tuple(self._autocast),
                tuple(self._outputs),
                tuple(self._losses),
                tuple(self._stepped.values()),
                tuple(self._scalers.values()),
            )
        )

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        stepped = list(_stepped_by(optimizer))
        masters = sum(parameter.numel() for parameter in stepped if id(parameter) not in self._ids)
        # Another network's parameters in the same optimizer are no masters.
        of_ours = next(self._optimizers.parameters(optimizer), None) is not None
        return OptimizerRecord(
            type(optimizer).__name__,
            _settings(optimizer),
            _elements(stepped),
            _states(optimizer, stepped),
            0 if of_ours else masters,
        )


def _stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _elements(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """Return how many elements there are of each dtype, this process's part of them; lazy parameters have none yet."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        part = local_part(tensor)
        found[dtype_name(part.dtype)] += part.numel()
    return found


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers among the settings of the first group; a tensor's value is left on its device."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    betas = group.get("betas")
    named = {f"beta{number}": beta for number, beta in enumerate(betas, 1)} if isinstance(betas, (tuple, list)) else {}
    named |= {name: group.get(name) for name in _SETTINGS}
    return {name: float(value) for name, value in named.items() if isinstance(value, (int, float))}


def _states(optimizer: torch.optim.Optimizer, stepped: Sequence[torch.Tensor]) -> dict[str, str]:
    """Return by name the dtypes of the states that have an element for each of their parameter's."""
    found: dict[str, dict[str, None]] = {}
    for parameter in stepped:
        state = optimizer.state.get(parameter)
        for name, value in state.items() if isinstance(state, dict) else ():
            # The number of steps is a state too, for a parameter that is a scalar just as large.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and name != "step":
                found.setdefault(name, {})[dtype_name(value.dtype)] = None
    return {name: ", ".join(dtypes) for name, dtypes in found.items()}


def _scaler(scaler: Any) -> ScalerRecord:
    is_enabled = getattr(scaler, "is_enabled", None)
    interval = getattr(scaler, "_growth_interval", None)
    return ScalerRecord(
        type(scaler).__name__,
        bool(is_enabled()) if callable(is_enabled) else True,
        _number(getattr(scaler, "_init_scale", None)),
        _number(interval),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
