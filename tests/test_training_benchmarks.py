"""The benchmark of the precisions runs unattended: it says so where there is no GPU, and its toy sizes work on a CPU."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def switches_put_back() -> Iterator[None]:
    names = [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]
    names.append((torch.backends.cudnn, "benchmark"))
    before = [getattr(owner, name) for owner, name in names]
    yield
    for (owner, name), value in zip(names, before, strict=True):
        setattr(owner, name, value)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["training_modes.py", *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(BENCHMARKS / "training_modes.py"), run_name="__main__")


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--json", str(tmp_path / "results.json"))
    printed = capsys.readouterr().out
    assert printed.startswith("There is no CUDA GPU here")
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_toy_sizes_run_in_every_mode(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--tiny", "--json", str(tmp_path / "results.json"))
    document = json.loads((tmp_path / "results.json").read_text("utf-8"))
    rows = document["results"]
    assert "gpu" in document["machine"]
    assert [row["task"] for row in rows] == ["ResNet"] * 7 + ["GPT-2"] * 7 + ["LSTM"] * 7
    assert {row["mode"] for row in rows} >= {"FP32, no TF32", "FP32, TF32", "fp16-master", "bf16-amp"}
    assert all(row["step_ms"] > 0 and row["peak_memory_gib"] is None for row in rows)
    assert [row["speed_up"] for row in rows if row["mode"] == "FP32, no TF32"] == [1.0] * 3
    assert capsys.readouterr().out.count("images/s") == 7
