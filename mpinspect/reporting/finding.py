"""One thing worth knowing, as plain data: what every kind of report lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

#: Text of several lines, code: its line ends stay where others are escaped.
Lines: TypeAlias = str

#: Severities, mildest first. "info" is no alarm; a healthy network gets nothing above it.
SEVERITIES = ("info", "warning", "error")
#: How sure a finding is of its cause.
MEASURED, INFERRED = "measured", "inferred"


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing.

    Args:
        id: one that its report lists (FINDING_IDS of the ranges, and so on).
        severity: one of SEVERITIES.
        layer: name of the tensor or module it is about; "" for the whole run or model.
        message: one sentence: what was found.
        evidence: the figures behind it, by name.
        fix: what to do, one sentence; "" if nothing.
        code: the fix as code, a line or a few; "" where there is none.
        certainty: how sure the cause is: "measured", or "inferred" from what was measured.
        step: the step in which it began, from 0; None where it belongs to no step.
    """

    id: str
    severity: str
    layer: str
    message: str
    evidence: dict[str, Any]
    fix: str = ""
    code: Lines = ""
    certainty: str = MEASURED
    step: int | None = None

    def __str__(self) -> str:
        """As reports print it, in one line."""
        return f"{self.severity}  {self.id}  {self.message}{f'  fix: {self.fix}' if self.fix else ''}"


def inferred(finding: Finding) -> str:
    """Return what stands behind a finding's id where its cause is not measured."""
    return "" if finding.certainty == MEASURED else f" ({finding.certainty})"


def gravest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings by severity, equal ones in their order."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
