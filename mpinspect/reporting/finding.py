"""Findings as plain data; every kind of report lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from mpinspect.reporting.words import filled, number_of
from mpinspect.runtime.decoding import OneOf

#: Text of several lines, such as code: escaping preserves its line ends.
Lines: TypeAlias = str

#: Severities, mildest first. "info" is not an alarm: a healthy network gets only "info".
SEVERITIES = ("info", "warning", "error")
#: The same words in every report, explained.
SEVERITIES_EXPLAINED = (
    "an error breaks the training, or makes it do something other than its code says; a warning costs accuracy, steps or time; "
    "an info asks for no change; a healthy run has neither errors nor warnings"
)


def warning_if(is_grave: object) -> str:
    """Return the severity "warning" if the condition holds, else "info"."""
    return "warning" if is_grave else "info"


#: How certain a finding's cause is.
MEASURED, INFERRED = "measured", "inferred"


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a run.

    Args:
        id: one of the ids that its kind of report lists (FINDING_IDS for ranges, and so on).
        severity: one of SEVERITIES.
        layer: name of the tensor or module it is about; "" for the whole run or model.
        message: one sentence on the evidence.
        evidence: the figures behind it, by name.
        fix: the change to make, one sentence; "" without one.
        code: the fix as code, a line or a few; "" without one.
        certainty: "measured" if the cause was measured, "inferred" if it was concluded from measurements.
        step: the step in which the problem began, from 0; None if it is not tied to a step.
    """

    id: str
    severity: Annotated[str, OneOf(SEVERITIES)]
    layer: str
    message: str
    evidence: dict[str, Any]
    fix: str = ""
    code: Lines = ""
    certainty: str = MEASURED
    step: int | None = None

    @property
    def is_alarm(self) -> bool:
        """Whether the finding asks for a change: it is graver than "info"."""
        return self.severity != SEVERITIES[0]

    def __str__(self) -> str:
        """Return the finding in one line."""
        return f"{self.severity}  {self.id}  {self.message}{filled('  fix: {}', self.fix)}"


def inferred(finding: Finding) -> str:
    """Return the words after a finding's id, " (inferred)"; "" if its cause was measured."""
    return "" if finding.certainty == MEASURED else f" ({finding.certainty})"


def in_counts(findings: Iterable[Finding]) -> str:
    """Return the number of findings of each severity in words, the gravest first: "1 error, 2 warnings, 3 info"; else ""."""
    found = Counter(finding.severity for finding in findings)
    # "info" has no plural.
    return ", ".join(
        f"{found[name]} info" if name == "info" else number_of(found[name], name)
        for name in reversed(SEVERITIES)
        if found[name]
    )


def gravest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings sorted by severity, most severe first; the sort is stable."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
