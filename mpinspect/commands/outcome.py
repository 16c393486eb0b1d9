"""How a command ends: the exit statuses, and the error that is one sentence on stderr."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpinspect.reporting.finding import Finding

OK, FOUND, UNUSABLE = 0, 1, 2
#: What a shell reports for a program that SIGPIPE ended: 128 + 13.
BROKEN_PIPE = 141
#: And for one that Ctrl-C ended: 128 + 2.
INTERRUPTED = 130


class UnusableError(Exception):
    """The input can't be used: one sentence, printed on stderr, exit status 2."""


def status(findings: Iterable[Finding], fail_on: Iterable[str]) -> int:
    """FOUND if ``fail_on`` names a finding by its id, its severity or a milder one, else OK."""
    return FOUND if any(_names(finding, fail_on) for finding in findings) else OK


def _names(finding: Finding, fail_on: Iterable[str]) -> bool:
    from mpinspect.reporting.finding import SEVERITIES

    named = set(fail_on)
    up_to = SEVERITIES[: SEVERITIES.index(finding.severity) + 1]
    return finding.id in named or not named.isdisjoint(up_to)
