"""An observer of dtypes that change in a run: of an optimizer's parameters between two steps, and of its states when loaded."""

from __future__ import annotations

import weakref

import torch

from mpinspect.ranges.capture.loaded_states import CastStates, cast_states
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import NARROW, Measuring, Run
from mpinspect.ranges.records import ParametersCast, StatesCast

#: Maximum number of groups that are read in every step.
_MOST_GROUPS = 8


class DtypeChanges(Measuring):
    """Compares dtypes before each step of an optimizer; reads no tensor.

    Between measured steps only the first parameter of each group is compared, and all if one of these has changed.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._first: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[torch.dtype]] = weakref.WeakKeyDictionary()
        #: By optimizer, the dtypes of the model's parameters at the last comparison.
        self._all: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, torch.dtype]] = (
            weakref.WeakKeyDictionary()
        )
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, CastStates] = weakref.WeakKeyDictionary()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the states that were cast since the last step, and the parameters that became 16 bits wide."""
        cast = cast_states(optimizer)
        if cast is not None and self._known.get(optimizer) is not cast:
            self._known[optimizer] = cast
            names = (type(optimizer).__name__, cast.line, *cast.states)
            self._record(StatesCast(step=self._clock.step, names=names, text=f"{cast.before} {cast.after}"))
        first = [group["params"][0].dtype for group in optimizer.param_groups[:_MOST_GROUPS] if group["params"]]
        if self.at_work or self._first.get(optimizer) != first:
            self._first[optimizer] = first
            self._compare(optimizer)

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        before = self._all.get(optimizer, {})
        now = {each.name: each.parameter.dtype for each in self._optimizers.parameters(optimizer)}
        self._all[optimizer] = now
        wide = {name for name, dtype in before.items() if dtype.is_floating_point and dtype not in NARROW}
        narrower = [name for name, dtype in now.items() if name in wide and dtype in NARROW]
        if narrower:
            text = f"{dtype_name(before[narrower[0]])} {dtype_name(now[narrower[0]])}"
            found = ParametersCast(
                step=self._clock.step, names=tuple(narrower), text=text, of=len(now), count=len(narrower)
            )
            self._record_names(found)
