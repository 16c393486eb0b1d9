"""Find the surroundings of each launch: its operators, module, phase and step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from mpinspect.kernels.trace.columns import Columns, Floats, Ints, Nesting
from mpinspect.kernels.trace.forwards import Forwards
from mpinspect.kernels.trace.recording import STEP_RANGE, Recording
from mpinspect.shapes.operators import PRODUCT_OPS

#: The last three call another operator that computes the product; they replace that operator if the trace lacks it.
_PRODUCTS = PRODUCT_OPS | {"aten::linear", "aten::matmul", "aten::einsum"}

#: Namespaces whose operators compute no products, except for _PRODUCTS.
_NO_PRODUCTS = ("aten::", "autograd::", "prims::", "profiler::", "c10d::")

#: The range of a node's run in autograd's engine, and the pattern of node names (torch/csrc/autograd/engine.cpp, function.h).
_ENGINE = "autograd::engine::evaluate_function"
_NODE = re.compile(r"(?:^|::)\w*Backward\d*$")


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of launches: one value per launch, in the order of the arguments, then one for the lack of a launch.

    Positions index columns, or are -1.

    Args:
        operators: position of the innermost operator.
        products: position of the innermost matrix product.
        calls: number of the product's call, in the order of calls; None without a product.
        encloses: whether the product (without one, the innermost operator) encloses another that launched kernels.
        modules: the module's name ("" for the model itself); None if unknown.
        is_path: whether all module names are dotted paths.
        phases: "forward", "backward", "optimizer" or "".
        steps: number of the profiler's step, or None.
    """

    operators: list[int]
    products: list[int]
    calls: list[int | None]
    encloses: list[bool]
    modules: list[str | None]
    is_path: bool
    phases: list[str]
    steps: list[int | None]


@dataclass(frozen=True)
class _Around:
    """The common facts of one innermost operator's launches: product, autograd node, and the operator that made the node."""

    product: int = -1
    node: int = -1
    forward: int = -1


def surroundings(recording: Recording, threads: Ints, times: Floats) -> Surroundings:
    """Return the surroundings of launches at these times on these threads."""
    nesting = Nesting(recording.operators)
    innermost = nesting.innermost(threads, times).tolist()
    ranges, is_path = _module_ranges(recording)
    forwards = Forwards(recording, nesting) if len(ranges) else None
    chains = _Chains(recording, nesting, forwards)
    around = {operator: chains.around(operator) for operator in set(innermost)}
    by_launch = [around[operator] for operator in innermost]
    modules = _Modules(recording, ranges, is_path).of(by_launch, threads, times)
    optimizing = Nesting(recording.optimizers, proper=False).innermost(threads, times).tolist()
    phases = [
        _phase(operator, launch, module, optimizer)
        for operator, launch, module, optimizer in zip(innermost, by_launch, modules, optimizing, strict=True)
    ]
    products = [launch.product for launch in by_launch]
    owners = [product if product >= 0 else operator for product, operator in zip(products, innermost, strict=True)]
    return Surroundings(
        [*innermost, -1],
        [*products, -1],
        [*_calls(recording, products), None],
        [*(owner in chains.enclosing for owner in owners), False],
        [*modules, None],
        is_path,
        [*phases, ""],
        [*_steps(recording, threads, times), None],
    )


class _Chains:
    """Walk from operators outwards. ``enclosing``: operators that may be products and enclose others that launched kernels."""

    def __init__(self, recording: Recording, nesting: Nesting, forwards: Forwards | None) -> None:
        self._name = recording.operators["name"].tolist()
        self._parents = nesting.parents.tolist()
        self._forwards = forwards
        self._is_product = [name in _PRODUCTS for name in recording.names]
        self._may_be_product = [
            name in _PRODUCTS or ("::" in name and not name.startswith(_NO_PRODUCTS)) for name in recording.names
        ]
        self.enclosing: set[int] = set()
        self._is_engine = [name.startswith(_ENGINE) for name in recording.names]
        self._is_node = [_NODE.search(name) is not None for name in recording.names]

    def around(self, operator: int) -> _Around:
        chain = []
        while operator >= 0:
            chain.append(operator)
            operator = self._parents[operator]
        self.enclosing.update([each for each in chain if self._may_be_product[self._name[each]]][1:])
        engine = self._first(chain, self._is_engine)
        node = self._first(chain, self._is_node)
        return _Around(self._first(chain, self._is_product), engine if engine >= 0 else node, self._forward(chain))

    def _first(self, chain: list[int], is_wanted: list[bool]) -> int:
        return next((operator for operator in chain if is_wanted[self._name[operator]]), -1)

    def _forward(self, chain: list[int]) -> int:
        forwards = self._forwards
        if forwards is None:
            return -1
        return next((forwards.of(operator) for operator in chain if forwards.is_backward(operator)), -1)


def _phase(operator: int, launch: _Around, module: str | None, optimizer: int) -> str:
    if launch.node >= 0:
        return "backward"
    if optimizer >= 0:
        return "optimizer"
    return "forward" if operator >= 0 or module is not None else ""


def _module_ranges(recording: Recording) -> tuple[Columns, bool]:
    """Return the ranges that name modules: this package's own if there are any, else frames of the Python stack."""
    if len(recording.modules) or len(recording.backwards):
        return recording.modules, True
    return recording.frames, False


class _Modules:
    """Find the module names of launches."""

    def __init__(self, recording: Recording, ranges: Columns, is_path: bool) -> None:
        self._recording = recording
        self._names = list(recording.names)
        self._ranges = ranges
        self._range_names = ranges["name"].tolist()
        self._is_path = is_path
        self._nesting = Nesting(ranges, proper=False)
        self._chains: dict[int, str | None] = {-1: None}

    def of(self, launches: list[_Around], threads: Ints, times: Floats) -> list[str | None]:
        """Return module names in the launches' order; in the backward, by the forward operator, else by the backward's range."""
        start = self._recording.operators.start
        forwards = np.array([launch.forward for launch in launches], dtype=np.int64)
        at_launch = self._nesting.innermost(threads, times).tolist()
        at_origin = np.full(len(launches), -1)
        known = np.flatnonzero(forwards >= 0)
        origins = forwards[known]
        at_origin[known] = self._nesting.innermost(self._recording.operators["thread"][origins], start[origins])
        backwards = Nesting(self._recording.backwards, proper=False).innermost(threads, times).tolist()
        backward_names = self._recording.backwards["name"]
        range_starts = self._ranges.start
        modules: list[str | None] = []
        for launch, here, origin, backward in zip(launches, at_launch, at_origin.tolist(), backwards, strict=True):
            if launch.node < 0 or (here >= 0 and range_starts[here] >= start[launch.node]):
                # In the forward, or in a forward within the backward (activation checkpointing).
                modules.append(self._name(here))
            elif launch.forward >= 0 or backward < 0:
                modules.append(self._name(origin))
            else:
                modules.append(str(self._names[backward_names[backward]]))
        return modules

    def _name(self, position: int) -> str | None:
        """Return the dotted path, or the chain of the frames' classes from the outermost inwards."""
        if position not in self._chains:
            name = str(self._names[self._range_names[position]])
            if not self._is_path and (outer := self._name(int(self._nesting.parents[position]))):
                name = f"{outer}/{name}"
            self._chains[position] = name
        return self._chains[position]


def _calls(recording: Recording, products: list[int]) -> list[int | None]:
    used = np.array(sorted(set(products) - {-1}), dtype=np.int64)
    order = np.lexsort((recording.operators["id"][used], recording.operators.start[used]))
    numbers: dict[int, int] = {position: number for number, position in enumerate(used[order].tolist())}
    return [numbers.get(position) for position in products]


def _steps(recording: Recording, threads: Ints, times: Floats) -> list[int | None]:
    """Return the step of each launch. A step's range is on the thread that called the profiler and applies to all threads."""
    processes: dict[object, int] = {}
    of_thread = np.array(
        [processes.setdefault(thread[0], len(processes)) for thread in recording.threads], dtype=np.int64
    )
    steps = recording.steps
    if not len(steps) or not len(times):
        return [None] * len(times)
    found = Nesting(steps, of_thread[steps["thread"]], proper=False).innermost(of_thread[threads], times)
    names = list(recording.names)
    # The last entry is for position -1, outside all steps.
    numbers = [*(_step(names[name]) for name in steps["name"].tolist()), None]
    return [numbers[position] for position in found.tolist()]


def _step(name: str) -> int | None:
    digits = name.removeprefix(STEP_RANGE)
    return int(digits) if digits.isdecimal() and len(digits) < 19 else None
