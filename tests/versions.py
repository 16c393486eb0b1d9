"""Runs the suite on the oldest and the newest torch and Python that are supported: ``make test-versions``.

    python tests/versions.py [--only NAME] [PYTEST_ARGUMENT ...]

Each of ``ROWS`` has its own environment, ``.venv-NAME``, which is rebuilt when the row or pyproject.toml changes. If a row's
Python is missing, the row uses the Python that runs this file, and a line reports it. The output ends with a table of results.
The exit status is 0 if every row's tests passed, else 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
#: Run by the row's Python, whose version may differ from the requested one.
_VERSIONS = "import platform, torch; print(f'{platform.python_version():<10}{torch.__version__:<16}', end='')"


class Row(NamedTuple):
    """A Python to test on, and the torch to install, as a pip requirement."""

    name: str
    python: str
    torch: str


#: The oldest torch that pyproject.toml allows, and the newest that pip offers.
ROWS = (Row("oldest", "3.10", "torch==2.6.0"), Row("newest", "3.13", "torch"))


def main() -> int:
    """Test every row, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], usage="%(prog)s [--only NAME] [PYTEST_ARGUMENT ...]"
    )
    parser.add_argument("--only", choices=[row.name for row in ROWS], help="test this row alone")
    options, arguments = parser.parse_known_args()
    rows = [row for row in ROWS if options.only in (None, row.name)]
    results = {row.name: _tested(row, arguments) for row in rows}
    print(f"\n{'':<8}{'Python':<10}{'torch':<16}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for name, (line, _) in results.items():
        print(f"{name:<8}{line}")
    return int(not all(passed for _, passed in results.values()))


def _tested(row: Row, arguments: list[str]) -> tuple[str, bool]:
    """Run the suite on a row; return its line of the table, and whether every test passed."""
    try:
        python = _environment(row)
    except subprocess.CalledProcessError as error:
        return f"not tested: no environment could be made ({error})", False
    results = ROOT / "build" / f"versions-{row.name}.xml"
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", f"--junitxml={results}", *arguments]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    line = subprocess.check_output([python, "-c", _VERSIONS], text=True)
    if not results.exists():
        return f"{line}pytest ended with status {status}", False
    suite = ElementTree.parse(results).getroot()[0]
    total, failures, errors, skipped = (int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return f"{line}{total - failed - skipped:>8}{failed:>8}{skipped:>8}", status == 0


def _environment(row: Row) -> str:
    """Return the Python of a row's environment; create the environment first if needed."""
    folder = ROOT / f".venv-{row.name}"
    python, stamp = str(folder / "bin" / "python"), folder / ".ready"
    made_for = f"{row}\n{(ROOT / 'pyproject.toml').read_text()}"
    if stamp.exists() and stamp.read_text() == made_for:
        return python
    print(f"installing {row.torch} and what the tests need into {folder.name} (this takes a few minutes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([_interpreter(row), "-m", "venv", folder], env=_environ(row), check=True)
    install = [python, "-m", "pip", "install", "--no-compile", "--quiet", "--no-input", "--disable-pip-version-check"]
    subprocess.run([*install, row.torch, "-e", f"{ROOT}[test]"], check=True)
    stamp.write_text(made_for)
    return python


def _interpreter(row: Row) -> str:
    """Return the row's Python; if it is missing, print a line and return the Python that runs this file."""
    name = f"python{row.python}"
    if shutil.which(name) and not subprocess.run([name, "-c", ""], env=_environ(row), capture_output=True).returncode:
        return name
    print(
        f"{name} is not on this machine: the row '{row.name}' is tested with Python {sys.version.split()[0]}",
        flush=True,
    )
    return sys.executable


def _environ(row: Row) -> dict[str, str]:
    """Return the environment variables, with the row's Python version for pyenv."""
    return os.environ | {"PYENV_VERSION": row.python}


if __name__ == "__main__":
    sys.exit(main())
