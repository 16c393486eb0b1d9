"""Records the lines of the training loop that call the model, the backward and the optimizer, and the names in them."""

from __future__ import annotations

import re
import sys

import torch

from mpinspect.ranges import records
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.faults.measure.measuring import Measuring, Run
from mpinspect.runtime.user_line import assignment_of, innermost_line, source_of

_NAME = r"([A-Za-z_][\w.]*)"
_SCALED, _LOSS = re.compile(rf"{_NAME}\.scale\({_NAME}\)\.backward\("), re.compile(rf"{_NAME}\.backward\(")
_SCALER_STEPS, _STEPS = re.compile(rf"{_NAME}\.step\({_NAME}"), re.compile(rf"{_NAME}\.step\(")
_MODEL = re.compile(rf"{_NAME}\.(?:named_)?parameters\(")
#: The roles without which a further measured step is read.
_WANTED = {"forward", "backward", "step"}


class LoopLines(Measuring):
    """Records each line once, in the first measured steps, if its text has the call: a trainer's own calls are left out."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        #: By role: the name and its line, as found in this step; and the roles that are recorded.
        self._found: dict[str, tuple[str, str]] = {}
        self._told: set[str] = set()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps until the main lines are known."""
        self.at_work = self._clock.measured and not self._told >= _WANTED

    def called(self, call: Call) -> None:
        """Find the line that calls the model."""
        if not call.layer.path and not call.recomputed:
            self._find("forward", "(")

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Find the line of the backward. The last one before a step counts: an earlier one may belong to another model."""
        text = self._find("backward", "backward(")
        if scaled := _SCALED.search(text):
            self._name("scaler", scaled[1], "backward")
        if loss := scaled or _LOSS.search(text):
            self._name("loss", loss[loss.re.groups], "backward")

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the line that unscales the gradients, unless the scaler's step does."""
        self._find("unscale", "unscale_(")

    def clipping(self, parameters: list[WatchedParameter], norm: torch.Tensor) -> None:
        """Find the line that clips the gradients."""
        self._find("clip", "clip")

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the line of the optimizer's step."""
        self._step(by_scaler=self._optimizers.is_guarded(optimizer))

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the line of the scaler's step."""
        self._step(by_scaler=True)

    def _step(self, by_scaler: bool) -> None:
        """Note the line of the step, and the lines that make the optimizer and the scaler."""
        if not self.at_work or "step" in self._found:
            return
        text = self._find("step", "step(")
        scaler_steps = by_scaler and _SCALER_STEPS.search(text)
        if scaler_steps:
            self._name("scaler", scaler_steps[1], "step")
        if steps := scaler_steps or _STEPS.search(text):
            self._name("optimizer", steps[steps.re.groups], "step")
            if model := _MODEL.search(source_of(self._found["optimizer"][1])):
                self._name("model", model[1], "optimizer")

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the lines that are new."""
        for role, names in self._found.items():
            if role not in self._told:
                self._told.add(role)
                self._record(records.LoopLine(step=step, names=names, text=role))
        self._found.clear()

    def run_ends(self) -> None:
        """Record the lines of an unfinished step."""
        self.end_step(self._clock.step, False)

    def _find(self, role: str, call: str) -> str:
        """Note the line that is running for a role, and return its text; "" if the text is not known or lacks the call."""
        line = innermost_line(sys._getframe())
        text = source_of(line)
        if call not in text:
            return ""
        self._found[role] = "", line
        return text

    def _name(self, role: str, name: str, of: str) -> None:
        """Note a name for a role, and the line that assigns it, in the file of another role's line."""
        self._found[role] = name, assignment_of(name, self._found[of][1])
