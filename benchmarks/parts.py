"""Runs processes one after the other within a given time. Each has a share; unused time passes to the next ones.

Uses only the standard library, so that gpu.py can use it before it has found the packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: A part with fewer seconds than this is not started: importing torch and initialising a GPU take that long.
LEAST = 10.0
#: Seconds between SIGTERM and SIGKILL.
_GRACE = 3.0
_LAST_LINES = 12


@dataclass(frozen=True)
class Part:
    """A process.

    Args:
        weight: its share of the time, relative to the other parts'.
        file: the file that it writes after its first result.
    """

    name: str
    command: tuple[str, ...]
    weight: float
    file: Path


@dataclass
class Outcome:
    """The outcome of a part.

    Args:
        state: "not begun", "running", "done" (exit status 0, its file written), "failed", "timed out", "skipped" or "stopped".
        seconds: how long it ran.
        limit: its time limit in seconds.
        file: the name of the file that it wrote, or None.
        said: the last lines of the part's output.
    """

    name: str
    state: str = "not begun"
    seconds: float = 0.0
    limit: float = 0.0
    file: str | None = None
    said: list[str] = field(default_factory=list)


def run_parts(
    parts: Sequence[Part],
    deadline: float,
    log: Path,
    environment: Mapping[str, str],
    tell: Callable[[list[Outcome]], object],
    least: float = LEAST,
) -> list[Outcome]:
    """Run the parts in order, each within its share of the time to the deadline plus the unused time of earlier parts.

    Args:
        deadline: in seconds of ``time.monotonic()``.
        log: receives the output of all parts.
        tell: called with all outcomes at every change.
        least: a part with fewer seconds than this is skipped.
    """
    outcomes = [Outcome(part.name) for part in parts]
    for part, outcome, end in zip(parts, outcomes, _ends(parts, deadline), strict=True):
        started = time.monotonic()
        outcome.limit = round(end - started, 1)
        if outcome.limit < least:
            outcome.state, outcome.said = "skipped", [f"{outcome.limit:g} s were left, fewer than {least:g}"]
            tell(outcomes)
            continue
        outcome.state = "running"
        tell(outcomes)
        begun = log.stat().st_size if log.exists() else 0
        try:
            outcome.state = _run(part, end - started, log, environment)
        except OSError as error:
            outcome.state, outcome.said = "failed", [f"could not be started: {error}"]
        except BaseException:
            outcome.state = "stopped"
            raise
        finally:
            outcome.seconds = round(time.monotonic() - started, 1)
            outcome.said = outcome.said or _last_lines(log, begun)
            outcome.file = part.file.name if part.file.exists() else None
            if outcome.state == "done" and outcome.file is None:
                outcome.state, outcome.said = "failed", [*outcome.said, f"{part.file.name} was not written"]
            tell(outcomes)
    return outcomes


def _ends(parts: Sequence[Part], deadline: float) -> list[float]:
    """Return each part's end time: the remaining time, divided by the weights."""
    now, total = time.monotonic(), sum(part.weight for part in parts)
    return [now + (deadline - now) * sum(part.weight for part in parts[: i + 1]) / total for i in range(len(parts))]


def _run(part: Part, seconds: float, log: Path, environment: Mapping[str, str]) -> str:
    """Run a part; return its state. All its processes have ended."""
    with log.open("ab") as output:
        output.write(f"\n== {part.name}: {' '.join(part.command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The log must hold the output of a terminated part.
            env={**environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            return "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    # A process that is blocked in a driver can't be killed, and must not delay the next parts.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)


def _last_lines(log: Path, begun: int) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(begun)
        lines = file.read().decode(errors="replace").strip().splitlines()
    # The first line is the heading.
    return lines[1:][-_LAST_LINES:]
