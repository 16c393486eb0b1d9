"""second_opinion: computes a training step twice, once in FP32, and names the operators whose results differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.capture.passes import LossFunction, require_loss, require_step
from mpinspect.ranges.faults.measure.in_fp64 import InFP64
from mpinspect.ranges.faults.measure.recomputation import Recomputation
from mpinspect.ranges.faults.measure.second import SecondComputation
from mpinspect.ranges.faults.measure.second_steps import RunningModules, Twice
from mpinspect.ranges.faults.registry import OF_SECOND
from mpinspect.ranges.session import RunInfo, Session
from mpinspect.reporting.finding import Finding
from mpinspect.runtime.untouched import ModelState, RandomState
from mpinspect.runtime.wrappers import compiled_modules_eager

Computations = TypeVar("Computations", bound=Sequence[Recomputation])


def second_opinion(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, *, fp64: bool = True
) -> tuple[Finding, ...]:
    """Compute one forward and backward as the training does, and every operator again: on FP32 copies of 16-bit tensors and, with
    ``fp64``, on FP64 copies of all.

    The findings name operators with their module and line of code: an infinity or NaN that the exact computation does not have,
    one that it has as well (then no precision helps), a sum that loses terms, an addition that changes nothing, and a result that
    is mostly the rounding error of its inputs; and what FP32's own rounding spoils. ``docs/sentences.md`` lists their sentences.

    Afterwards, even after an error, the model (parameters, buffers, ``.grad``, requires_grad, train/eval flags) and the random
    generators of torch, Python and NumPy are restored. Nothing is trained. Compiled modules run eagerly.

    Args:
        model: any module, in the mode (train or eval) to be judged.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, computed as in training, with its autocast. A loss that a loop
            scales is scaled here, too.
        batch: the argument of ``loss_fn``.
        fp64: whether FP32's own rounding is judged as well.

    Returns:
        The findings, the gravest first; none if every operator's exact result is the run's but for rounding.

    On a CPU it takes three to four times as long as the step, with ``fp64`` some six times, and memory for FP32 copies of its
    16-bit tensors and FP64 copies of all, 2 GiB of each at most; after 20 s, of FP64 after 5 s, the rest is left out.
    Synchronises the device.

    Raises:
        TypeError: model is not a Module, loss_fn is not callable, or the loss is not a tensor.
        ValueError: the loss is not one number, or has no graph.
    """
    require_step(model, loss_fn)
    random, state = RandomState.now(), ModelState(model)
    try:
        second = run_twice(model, loss_fn, batch, partial(_computations, model, fp64))
        # That in FP64 reads the FP32 copies, which the first one's records end.
        measurements = tuple(record.measurement() for each in reversed(second) for record in each.records())
    finally:
        state.restore()
        random.restore()
    session = Session(RunInfo(type(model).__name__, watch=False), measurements=measurements)
    ids = {"positions-collapse", "router-ties", *(fault.id for fault in OF_SECOND)}
    return tuple(finding for finding in analyse(session).findings if finding.id in ids)


def _computations(model: torch.nn.Module, fp64: bool, running: Callable[[], str]) -> Sequence[Recomputation]:
    second = SecondComputation(running, model.named_parameters(), model.named_buffers())
    return [second, InFP64(running, model.named_parameters(), second)][: 1 + fp64]


def run_twice(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, computations: Callable[[Callable[[], str]], Computations]
) -> Computations:
    """Run one forward and backward, and compute its operators a second time; compiled modules run eagerly.

    The weights' gradients are those of this step alone. Random generators, buffers and gradients are not restored.

    Args:
        model, loss_fn, batch: as of ``second_opinion``.
        computations: makes what computes the operators again, given a function that returns the running module's dotted path.

    Returns:
        The computations, whose records are not made yet.

    Raises:
        TypeError, ValueError: the loss is not one number with a graph; whatever the user's code raises.
    """
    running = RunningModules()
    made = computations(running.path)
    for parameter in model.parameters():
        parameter.grad = None
    running.follow(model)
    try:
        with compiled_modules_eager(), torch.enable_grad(), Twice(made, running):
            loss = loss_fn(model, batch)
            require_loss(loss, 0, finite=False)
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        running.unfollow()
    return made
