"""The examples run as scripts and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, monkeypatch, capsys, steps: int) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", [name, "--steps", str(steps)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested():
    tested = {"talk_network.py", "digits_cnn.py", "transformers_gpt2.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_talk_network_tells_the_same_ranges_in_fp32_and_in_scaled_fp16(monkeypatch, capsys):
    printed = run_example("talk_network.py", monkeypatch, capsys, 10)
    fp32, fp16 = printed.split("--- FP16 with FP32 master weights, loss scale 128 ---")
    for part in (fp32, fp16):
        assert "10 steps, 10 sampled" in part
        assert "No loss scaling is needed" in part
    rows = [re.findall(r"^(weight|bias) +(\d+) .* (2\^-\d+) ", part, re.MULTILINE) for part in (fp32, fp16)]
    assert len(rows[0]) == 2
    assert rows[0] == rows[1]


def test_digits_cnn_is_healthy(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    printed = run_example("digits_cnn.py", monkeypatch, capsys, 12)
    assert "12 steps, 12 sampled" in printed
    assert "all 16 watched tensors were seen" in printed
    assert "loss scaling needed: False; scale: 1" in printed
    assert "warning" not in printed


def test_transformers_gpt2_trains_and_is_probed(monkeypatch, capsys):
    pytest.importorskip("transformers")
    printed = run_example("transformers_gpt2.py", monkeypatch, capsys, 3)
    assert "3 steps, 3 sampled" in printed
    assert "FP16 against FP32 on 1 batch" in printed
    rows = re.findall(r"^transformer\.\S+ +\S+%? .*0\.99\d+|^transformer\.\S+ .* 1\.000000 ", printed, re.MULTILINE)
    # 28 parameters, at scale 1 and, where a scale is needed, at that scale too.
    assert len(rows) in (28, 56)
