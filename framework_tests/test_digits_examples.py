"""Each framework's example runs unmodified, and its session's histograms equal NumPy's counts of the same arrays."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import agrees

from mpinspect import Session
from mpinspect.ranges.windows.tensors import TensorKey

EXAMPLES = Path(__file__).parents[1] / "examples" / "frameworks"
STEPS = 24
RUNS = [
    ("tensorflow", "--precision=float32"),
    ("tensorflow", "--precision=mixed_float16"),
    ("jax", "--dtype=float32"),
    ("jax", "--dtype=float16"),
    ("jax", "--dtype=bfloat16"),
    ("paddle", "--dtype=float32"),
    ("paddle", "--dtype=float16"),
    ("paddle", "--dtype=bfloat16"),
]


@pytest.mark.parametrize(("framework", "precision"), RUNS)
def test_recorded_histograms_equal_numpys_counts(framework, precision, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    saved = tmp_path / "arrays.npz"
    command = [sys.executable, str(EXAMPLES / f"{framework}_digits.py"), precision, f"--steps={STEPS}"]
    printed = subprocess.run(
        [*command, f"--log-dir={tmp_path / 'run'}", f"--check={saved}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "MpinspectWarning" not in printed.stderr
    assert f"{STEPS} steps, {STEPS} sampled" in printed.stdout
    assert float(re.search(r"loss of the last batch: (\S+)", printed.stdout)[1]) < 2.25

    session = Session.load(tmp_path / "run")
    truth = unscaled(saved)
    totals = session.totals()
    assert set(totals) == set(truth)
    for key, window in totals.items():
        assert agrees(window.histogram, truth[key]), key
        assert window.samples == STEPS
    assert all("not recorded" not in note for note in session.notes)
    half = precision.partition("=")[2].removeprefix("mixed_")
    assert {window.passed_through for window in totals.values()} == {half}
    assert list((tmp_path / "run").glob("events.out.tfevents.*")), "TensorBoard's log"


def unscaled(saved: Path) -> dict[TensorKey, np.ndarray]:
    """Return all values of each tensor over the run, unscaled."""
    parts: dict[TensorKey, list[np.ndarray]] = {}
    for label, values in np.load(saved).items():
        _, kind, name, scale = label.split("|")
        parts.setdefault(TensorKey(name, kind), []).append(values.reshape(-1) / float(scale))
    return {key: np.concatenate(arrays) for key, arrays in parts.items()}


def test_an_overflowing_scale_is_recorded_as_an_event(tmp_path):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    command = [sys.executable, str(EXAMPLES / "jax_digits.py"), "--dtype=float16", "--scale=67108864", "--steps=12"]
    subprocess.run([*command, f"--log-dir={tmp_path}"], capture_output=True, check=True, timeout=300)
    session = Session.load(tmp_path)
    skipped = [event for event in session.events if event.skipped]
    assert [event.step for event in skipped] == list(range(len(skipped)))
    assert len(skipped) == session.progress.skipped_steps > 2
    assert [event.loss_scale for event in skipped] == [2.0 ** (26 - step) for step in range(len(skipped))]
    assert {event.phase for event in skipped} == {"backward"}
    assert session.progress.scales[0].scale == 2.0**26
