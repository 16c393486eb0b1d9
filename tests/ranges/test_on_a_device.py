"""mpinspect on a device that works asynchronously: a stand-in, which counts what would wait, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in_device

TRAININGS = (
    "defaults",
    "all kinds",
    "scaler",
    "masters",
    "averages",
    "accumulation",
    "gan",
    "every=10",
    "budget",
    "late events",
)
CHECKS = (*(f"never waits: {name}" for name in TRAININGS), "counts", "culprits", "default device", "moved", "capture")


@pytest.fixture(scope="module")
def told() -> str:
    """What the checks say: all in one process, since torch can rename this kind of device once a process."""
    reason = stand_in_device.why_not()
    if reason:
        pytest.skip(reason)
    stand_in_device.built()
    script = Path(__file__).parents[1] / "trainings_on_a_device.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    return done.stdout + done.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_on_the_stand_in_holds(told: str, check: str) -> None:
    assert f"held: {check}\n" in told, told[-3000:]
