"""Runs a script with plain Python and under ``mpinspect run``, in separate processes, for tests that compare the two."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import warm

#: As rank 1 of 2, mpinspect writes nothing to stderr, so that stderr holds only the script's output.
SILENT = {"RANK": "1", "WORLD_SIZE": "2"}
MPINSPECT = (sys.executable, "-m", "mpinspect", "run")
RUN_DIR = "the-run"
#: Python's own settings, such as unbuffered streams, hide differences.
_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name == "PYTHONPATH" or not name.startswith("PYTHON")
}


@dataclass(frozen=True)
class Ended:
    """How a process ended. status: negative where a signal killed it."""

    status: int
    out: str
    err: str


def write(folder: Path, files: str | Mapping[str, str | bytes]) -> None:
    """Write files into a folder; a single string becomes train.py."""
    for name, content in ({"train.py": files} if isinstance(files, str) else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def run(
    folder: Path,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    interrupt: signal.Signals | None = None,
    forked: bool = False,
) -> Ended:
    """Run a command in a folder.

    Args:
        interrupt: sent a moment after the first line of output.
        forked: fork a process that has imported torch (``warm``). That takes a tenth of the time, but can't test the start of
            an interpreter or variables that it reads then.
    """
    if forked:
        return Ended(*warm.run(folder, command[1:], env, stdin))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**_ENVIRONMENT, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
    )
    first = ""
    if interrupt is not None:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(interrupt)
    out, err = process.communicate(stdin, timeout=120)
    return Ended(process.returncode, first + out, err)


def bare(folder: Path, *words: str, **how: object) -> Ended:
    """Run with plain Python."""
    return run(folder, [sys.executable, *words], **how)  # type: ignore[arg-type]


def watched(folder: Path, *words: str, options: Sequence[str] = (), **how: object) -> Ended:
    """Run under ``mpinspect run``, with the run directory next to the folder."""
    return run(folder, [*MPINSPECT, "--log-dir", str(folder.parent / RUN_DIR), *options, *words], **how)  # type: ignore[arg-type]


def silent(folder: Path, *words: str, **how: object) -> tuple[Ended, Ended]:
    """Run both ways, as rank 1 of 2."""
    how["env"] = {**SILENT, **(how.get("env") or {})}  # type: ignore[dict-item]
    return bare(folder, *words, **how), watched(folder, *words, **how)
