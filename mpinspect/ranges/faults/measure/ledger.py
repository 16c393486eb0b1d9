"""The ledger: an observer that records the dtypes of the run's storage and computation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.capture.optimizers import states_of
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.compensation import Compensation
from mpinspect.ranges.faults.measure.converted import asked_for, converted_layers
from mpinspect.ranges.faults.measure.measuring import Measuring, Run
from mpinspect.ranges.session import LayersRecord, OptimizerRecord, Precision, ScalerRecord
from mpinspect.runtime.device import random_state
from mpinspect.runtime.distributed import data_parallel, local_part, sharded_sum_in, summed_in
from mpinspect.runtime.storages import storage_key

#: The recorded settings of an optimizer's parameter group, if they are numbers.
_SETTINGS = ("lr", "weight_decay", "eps", "momentum")


class Ledger(Measuring):
    """Records dtypes in measured steps. Reads no tensor values, except a few elements of the states of 16-bit weights."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        #: The layers with products, read once, when an optimizer is about to step: recipes and gradients are known by then.
        self._products: tuple[LayersRecord, ...] | None = None
        self._asked: tuple[str, ...] = ()
        #: The last leaf that was called, with the storages of its outputs, and those whose outputs the model returned.
        self._last: tuple[str, set[int]] = "", set()
        self._heads: set[str] = set()
        #: Found at the end of the first measured step, when the hooks that sum gradients are in place.
        self._summed_in: tuple[str, ...] | None = None
        self._gradients: Counter[str] = Counter()
        #: As of the last measured step: a model whose training is over may be cast, to be a frozen part of another one.
        self._weights: Counter[str] = Counter()
        #: Dtypes in the order of observation (dicts as ordered sets).
        self._autocast: dict[str, None] = {}
        self._outputs: dict[str, None] = {}
        self._losses: dict[str, None] = {}
        self._unseen: dict[str, None] = {}
        #: By the object's id; if Python reuses the id, the new optimizer replaces the old one.
        self._stepped: dict[int, OptimizerRecord] = {}
        self._scalers: dict[int, ScalerRecord] = {}
        #: The states of the random generators before each optimizer's step, by its id; discarded if a closure calls the model.
        self._generators: dict[int, list[torch.Tensor]] = {}
        #: Whether every recorded step of an optimizer drew random numbers, by its id. In a single one other code may have drawn
        #: them.
        self._draws: dict[int, bool] = {}
        self._compensation = Compensation()

    def called(self, call: Call) -> None:
        """Record the autocast dtype around a training forward, and the dtypes of its outputs."""
        if call.recomputed:
            return
        self._generators.clear()
        self._follow(call)
        for output in call.outputs:
            if output.is_floating_point():
                self._outputs[dtype_name(output.dtype)] = None
                device = output.device.type
                is_on = torch.is_autocast_enabled(device)
                # A container may enter autocast inside its own forward.
                if is_on or call.layer.is_leaf:
                    self._autocast[dtype_name(torch.get_autocast_dtype(device)) if is_on else ""] = None

    def _follow(self, call: Call) -> None:
        """Remember the leaf whose output is the model's."""
        storages = {storage_key(each) for each in call.outputs if is_plain(each)}
        if call.layer.is_leaf:
            self._last = call.layer.path, storages
        elif not call.layer.path and storages & self._last[1]:
            self._heads.add(self._last[0])

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Record the dtypes of the losses."""
        self._losses.update(dict.fromkeys(dtype_name(loss.dtype) for loss in losses))

    def graph_read(self, formats: list[str]) -> None:
        """Record the dtypes of the values in the losses' graph."""
        self._unseen.update(dict.fromkeys(formats))

    def scaler_used(self, scaler: Any) -> None:
        """Record a scaler that scales a loss."""
        if id(scaler) not in self._scalers:
            self._scalers[id(scaler)] = _scaler(scaler)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the dtypes of the gradients that the optimizer receives."""
        if self.at_work:
            self._read_products()
            given = _elements(parameter.grad for parameter in _stepped_by(optimizer) if parameter.grad is not None)
            self._gradients.update({dtype: count for dtype, count in given.items() if dtype not in self._gradients})
            self._generators[id(optimizer)] = _generators(optimizer)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer's settings, and the dtypes of its parameters and of its states, which exist after its step."""
        if self.at_work:
            before = self._generators.pop(id(optimizer), None)
            if before is not None:
                drew = not all(map(torch.equal, before, _generators(optimizer)))
                self._draws[id(optimizer)] = drew and self._draws.get(id(optimizer), True)
            self._compensation.look(optimizer)
            self._stepped[id(optimizer)] = self._optimizer(optimizer)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer whose step was skipped; it may not have made its states yet."""
        if self.at_work and id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = self._optimizer(optimizer)

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the ledger as far as it is known."""
        if self.at_work:
            self._weights = _elements(watched.parameter for watched in self._parameters)
            self._tell()

    def run_ends(self) -> None:
        """Record the final ledger: a run may break off within a step, and values from a device may have arrived since."""
        self._compensation.settle()
        for optimizer in self._optimizers.living():
            record = self._stepped.get(id(optimizer))
            if record is not None:
                self._stepped[id(optimizer)] = replace(record, compensation=self._compensation.of(optimizer))
        self._tell()

    def _tell(self) -> None:
        self._recording.dtypes(
            Precision(
                self._weights or _elements(watched.parameter for watched in self._parameters),
                dict(self._gradients),
                tuple(self._autocast),
                tuple(self._outputs),
                tuple(self._losses),
                tuple(self._stepped.values()),
                tuple(self._scalers.values()),
                self._reduced(),
                tuple(self._unseen),
                self._read_products(),
                self._asked,
            )
        )

    def _read_products(self) -> tuple[LayersRecord, ...]:
        """Return how the layers' products are computed, read at the first call."""
        if self._products is None:
            self._products = converted_layers(self._layers, self._heads)
            self._asked = asked_for(self._products)
        return self._products

    def _reduced(self) -> tuple[str, ...]:
        """Return the dtypes of the sums of the ranks' gradients, if the model's wrappers have them."""
        if self._summed_in is None:
            # A group of one process sums nothing, but its compressing hook casts.
            wrappers = data_parallel(least_ranks=1)
            of_copies = (summed_in(each.parameter, wrappers.get(id(each.parameter))) for each in self._parameters)
            dtypes = (*of_copies, *map(sharded_sum_in, (layer.module for layer in self._layers)))
            self._summed_in = tuple({dtype_name(dtype): None for dtype in dtypes if dtype is not None})
        return self._summed_in

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        stepped = list(_stepped_by(optimizer))
        ours = {id(watched.parameter) for watched in self._parameters}
        foreign = sum(parameter.numel() for parameter in stepped if id(parameter) not in ours)
        # An optimizer of this model's parameters may also hold another network's, so only tensors that match a weight are
        # masters.
        of_ours = next(self._optimizers.parameters(optimizer), None) is not None
        return OptimizerRecord(
            type(optimizer).__name__,
            _settings(optimizer),
            _elements(stepped),
            _states(optimizer, stepped),
            sum(master.parameter.numel() for master in self._masters.of(optimizer)) if of_ours else foreign,
            self._draws.get(id(optimizer), False),
            self._compensation.of(optimizer),
        )


def _stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _generators(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the states of the random generators of the CPU, of the parameters' devices, of the optimizer itself and of its
    class's Python module.

    Never waits for a device.
    """
    devices = {parameter.device for parameter in _stepped_by(optimizer) if not parameter.is_cpu}
    states = (torch.get_rng_state(), *map(random_state, sorted(devices, key=str)))
    module = sys.modules.get(type(optimizer).__module__)
    held = (*vars(optimizer).values(), *(() if module is None else tuple(vars(module).values())))
    own = [each.get_state() for each in held if type(each) is torch.Generator]
    return [*(state for state in states if state is not None), *own]


def _elements(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """Return the number of elements of each dtype in this process's part of the tensors; lazy parameters are left out."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        part = local_part(tensor)
        found[dtype_name(part.dtype)] += part.numel()
    return found


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numeric settings of the first parameter group; settings that are tensors are left out, to avoid waiting."""
    group = next(iter(optimizer.param_groups), {})
    betas = group.get("betas")
    named = {f"beta{number}": beta for number, beta in enumerate(betas, 1)} if isinstance(betas, (tuple, list)) else {}
    named |= {name: group.get(name) for name in _SETTINGS}
    return {name: float(value) for name, value in named.items() if isinstance(value, (int, float))}


def _states(optimizer: torch.optim.Optimizer, stepped: Sequence[torch.Tensor]) -> dict[str, str]:
    """Return, by name, the dtypes of the states with the same shape as their parameter."""
    found: dict[str, dict[str, None]] = {}
    for parameter in stepped:
        for name, value in states_of(optimizer, parameter).items():
            # The step count is a state too, and has the same shape as a scalar parameter.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and name != "step":
                found.setdefault(name, {})[dtype_name(value.dtype)] = None
    return {name: ", ".join(dtypes) for name, dtypes in found.items()}


def _scaler(scaler: Any) -> ScalerRecord:
    is_enabled = getattr(scaler, "is_enabled", None)
    names = ("init_scale", "growth_interval", "growth_factor", "backoff_factor")
    settings = ((name, getattr(scaler, f"_{name}", None)) for name in names)
    return ScalerRecord(
        type(scaler).__name__,
        bool(is_enabled()) if callable(is_enabled) else True,
        device=str(getattr(scaler, "_device", "")),
        **{
            name: float(each)
            for name, each in settings
            if isinstance(each, (int, float)) and not isinstance(each, bool)
        },
    )
