"""The tests marked ``gpu``, each result kept as soon as it is there.

    python benchmarks/gpu_tests.py [--json benchmarks/results/gpu_tests-gpu.json] [--tiny]

In ``make test`` warnings are errors; here only mpinspect's own are, since another torch brings warnings of its own, and each
would cost a test on a machine that is rarely at hand. Without a GPU all tests are skipped with their reason, and the script ends
with 1; not so with --tiny, since such a machine can only tell whether the tests can be imported and chosen.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from machine import ResultsFile, arguments

ROOT = Path(__file__).parents[1]
_MARK = "pytest.mark.gpu"
#: Of what a failed test says, the last of it.
_MOST_SAID = 4000


def files_with_gpu_tests() -> list[Path]:
    """Those made for a GPU alone first: they are the most telling."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if _MARK in path.read_text("utf-8")]
    return sorted(found, key=lambda path: (not path.name.startswith("test_gpu"), path.name))


class Recorder:
    """Tells pytest's results to a file, one by one."""

    def __init__(self, file: ResultsFile) -> None:
        self._file = file
        self._rows: list[dict[str, Any]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report.nodeid, "not imported", 0.0, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._add(report.nodeid, report.outcome, report.duration, said)

    def _add(self, test: str, outcome: str, seconds: float, said: str) -> None:
        self._rows.append({"test": test, "outcome": outcome, "seconds": round(seconds, 2), "said": said[-_MOST_SAID:]})
        self.write(complete=False)

    def write(self, complete: bool) -> None:
        outcomes = Counter(row["outcome"] for row in self._rows)
        self._file.write({"outcomes": dict(outcomes), "rows": self._rows}, complete)

    def ran(self) -> bool:
        return any(row["outcome"] != "skipped" for row in self._rows)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="that all are skipped is no failure")
    options = parser.parse_args()
    recorder = Recorder(ResultsFile(options.json, rehearsal=options.tiny))
    # Where the cores allow it, side by side: most of their time is the compiler's and the host's.
    side_by_side = find_spec("xdist") is not None and (os.cpu_count() or 1) >= 8
    status = pytest.main(
        [
            *(("-p", "xdist", "-n", "6") if side_by_side else ()),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", "gpu", "-v"),
            *("-W", "default", "-W", "error::mpinspect.MpinspectWarning", "--tb=short"),
            # A package that is missing costs the files that import it, and no others.
            "--continue-on-collection-errors",
            *map(str, files_with_gpu_tests()),
        ],
        plugins=[recorder],
    )
    recorder.write(complete=True)
    return int(status) or int(not recorder.ran() and not options.tiny)


if __name__ == "__main__":
    sys.exit(main())
