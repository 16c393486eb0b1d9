"""One thing worth knowing, as plain data: what every kind of report lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Severities, mildest first. "info" is no alarm; a healthy network gets nothing above it.
SEVERITIES = ("info", "warning", "error")


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
    """

    id: str
    severity: str
    layer: str
    message: str
    evidence: dict[str, Any]
    fix: str = ""

    def __str__(self) -> str:
        """As reports print it, in one line."""
        return f"{self.severity}  {self.id}  {self.message}{f'  fix: {self.fix}' if self.fix else ''}"


def gravest_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by severity, equal ones in their order."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
