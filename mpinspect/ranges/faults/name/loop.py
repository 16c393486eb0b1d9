"""Names the lines of the training loop at which a finding's code goes, and writes the loop's own names into the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from mpinspect.ranges.records import LoopLine, recorded
from mpinspect.ranges.session import Session
from mpinspect.reporting.streams import printable
from mpinspect.runtime.briefly import first_line_of

#: The words of lines that are not known, by role.
_UNKNOWN = {
    "forward": "the forward",
    "backward": "backward()",
    "clip": "clip_grad_norm_()",
    "unscale": "unscale_()",
    "step": "step()",
    "optimizer": "the line that makes the optimizer",
    "scaler": "the line that makes the scaler",
}
#: The roles of assignments.
_ASSIGNED = ("model", "optimizer", "scaler", "loss")
#: Most characters of a line that code quotes: the whole line stands in the script.
_QUOTED = 36
#: Backwards per step, on average, that count as several micro-batches.
_SEVERAL = 1.5


class Loop:
    """The lines of a run's training loop.

    Args:
        session: the record of the run.
    """

    def __init__(self, session: Session) -> None:
        lines = [each for each in recorded(session.measurements, LoopLine) if len(each.names) == 2]
        found = {each.text: each.names for each in reversed(lines)}
        self._own = {role: name for role, (name, _) in found.items() if name}
        #: By role: its line with its text.
        self._lines = {role: line for role, (_, line) in found.items() if session.source_of(line)}
        self._texts = {role: session.source_of(line) for role, line in self._lines.items()}
        self._words = {
            role: f"{line}: {first_line_of(printable(self._texts[role]), _QUOTED)}"
            for role, line in self._lines.items()
        }
        progress = session.progress
        self._has_micro_batches = progress.backwards >= _SEVERAL * progress.steps > 0
        self._has_scaler = any(scaler.enabled for scaler in session.precision.scalers)

    def words(self) -> Mapping[str, str]:
        """Return words for the loop's lines.

        These are "at_backward", ..., each a line with its text; "last_backward" of a step; "once", the place of a new scaler;
        "forward_at", the line alone; and "forward", its statement.
        """
        words = {f"at_{role}": self._words.get(role, unknown) for role, unknown in _UNKNOWN.items()}
        once = "once, before the loop"
        if "scaler" in self._words:
            once = f"in place of {words['at_scaler']}"
        elif "optimizer" in self._words and not self._has_scaler:
            once = f"after {words['at_optimizer']}"
        forward = self._texts.get("forward", "")
        return {
            **words,
            "last_backward": f"{words['at_backward']}{', the last of a step' * self._has_micro_batches}",
            "once": once,
            "forward_at": self._lines.get("forward", _UNKNOWN["forward"]),
            "forward": forward if _is_statement(forward) else "output = model(x)",
        }

    def in_own_words(self, code: str) -> str:
        """Return code with the loop's names of the model, optimizer, scaler and scaled loss; comments and its own lines stay."""
        code = code.replace("scaler.scale(loss)", f"scaler.scale({self._own.get('loss', 'loss')})")
        names = re.compile(r"(?<![\w.\"])(model|optimizer|scaler)\b")
        kept = set(self._texts.values())
        lines = (
            line
            if line.lstrip().startswith("#") or line.strip() in kept
            else names.sub(lambda found: self._own.get(found[1], found[1]), line)
            for line in code.split("\n")
        )
        return "\n".join(lines)

    def line_in(self, code: str) -> str:
        """Return the first of the loop's lines that code names, a call rather than an assignment; "" if it names none."""
        places = ((role, line, re.search(rf"{re.escape(line)}\b", code)) for role, line in self._lines.items())
        found = [(role in _ASSIGNED, place.start(), line) for role, line, place in places if place]
        return min(found, default=(False, 0, ""))[2]


def _is_statement(text: str) -> bool:
    """Return whether a line's text is a whole statement."""
    try:
        return len(ast.parse(text).body) == 1
    except (SyntaxError, ValueError):
        return False
