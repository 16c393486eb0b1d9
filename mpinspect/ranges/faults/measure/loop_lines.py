"""Records the lines of the training loop that call the model, the backward and the optimizer, and the names in them."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress

import torch

from mpinspect.ranges import records
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Call
from mpinspect.ranges.faults.measure.measuring import Measuring, Run
from mpinspect.runtime.user_line import assignment_of, innermost_line, source_of

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
        loss, _ = _call_of("backward", self._find("backward", "backward("))
        scaler, given = _call_of("scale", loss)
        if scaler:
            self._name("scaler", scaler, "backward")
        if loss:
            self._name("loss", given or loss, "backward")

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the line that unscales the gradients, unless the scaler's step does."""
        self._find("unscale", "unscale_(")

    def clipping(self, parameters: list[WatchedParameter], limit: object, norm: torch.Tensor) -> None:
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
        optimizer, given = _call_of("step", self._find("step", "step("))
        if by_scaler and given:
            self._name("scaler", optimizer, "step")
            optimizer = given
        if optimizer:
            self._name("optimizer", optimizer, "step")
            model, _ = _call_of("parameters", source_of(self._found["optimizer"][1]))
            if model:
                self._name("model", model, "step")

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


def _call_of(method: str, text: str) -> tuple[str, str]:
    """Return the object and the first argument of a method's call in a statement, as code; "" for each that is missing."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
                return ast.unparse(node.func.value), "".join(map(ast.unparse, node.args[:1]))
    return "", ""
