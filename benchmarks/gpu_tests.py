"""Runs the tests marked ``gpu``, and stores each result at once.

    python benchmarks/gpu_tests.py [--json benchmarks/results/gpu_tests-gpu.json] [--tiny]

Unlike in ``make test``, only mpinspect's own warnings are errors: other versions of torch emit other warnings, and GPU machines
are rarely available. Without a GPU all tests are skipped with a reason, and the exit status is 1. With --tiny it is 0, since
such a run only checks that the tests can be imported and selected.
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
#: The number of final characters of a failed test's output to store.
_MOST_SAID = 4000


def files_with_gpu_tests() -> list[Path]:
    """Return the files with GPU tests, the most informative first: files of GPU tests alone."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if _MARK in path.read_text("utf-8")]
    return sorted(found, key=lambda path: (not path.name.startswith("test_gpu"), path.name))


class Recorder:
    """Writes pytest's results to a file, one by one."""

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
    parser.add_argument("--tiny", action="store_true", help="that all are skipped is not a failure")
    options = parser.parse_args()
    recorder = Recorder(ResultsFile(options.json, rehearsal=options.tiny))
    # Tests run in parallel if there are enough cores, since the compiler and the host take most of their time.
    side_by_side = find_spec("xdist") is not None and (os.cpu_count() or 1) >= 8
    status = pytest.main(
        [
            *(("-p", "xdist", "-n", "6") if side_by_side else ()),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", "gpu", "-v"),
            *("-W", "default", "-W", "error::mpinspect.MpinspectWarning", "--tb=short"),
            # A missing package affects only the files that import it.
            "--continue-on-collection-errors",
            *map(str, files_with_gpu_tests()),
        ],
        plugins=[recorder],
    )
    recorder.write(complete=True)
    return int(status) or int(not recorder.ran() and not options.tiny)


if __name__ == "__main__":
    sys.exit(main())
