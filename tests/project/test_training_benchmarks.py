"""The benchmarks that need a GPU: they print a message without one, and their toy sizes run on a CPU."""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_overhead
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def switches_put_back() -> Iterator[None]:
    names = [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]
    names.append((torch.backends.cudnn, "benchmark"))
    before = [getattr(owner, name) for owner, name in names]
    yield
    for (owner, name), value in zip(names, before, strict=True):
        setattr(owner, name, value)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


@pytest.mark.parametrize("name", ["training_modes.py", "tensor_cores.py", "gpu_overhead.py", "gpu_counting.py"])
def test_without_a_gpu_one_sentence_is_printed(monkeypatch, capsys, tmp_path, name):
    run(monkeypatch, name, "--json", str(tmp_path / "results.json"))
    printed = capsys.readouterr().out
    assert printed.startswith("There is no CUDA GPU here")
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_toy_sizes_run_in_every_mode(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "training_modes.py", "--tiny", "--json", str(tmp_path / "results.json"))
    document = json.loads((tmp_path / "results.json").read_text("utf-8"))
    rows = document["results"]
    assert "gpu" in document["machine"]
    assert [row["task"] for row in rows] == ["ResNet"] * 7 + ["GPT-2"] * 7 + ["LSTM"] * 7
    assert {row["mode"] for row in rows} >= {"FP32, no TF32", "FP32, TF32", "fp16-master", "bf16-amp"}
    assert all(row["step_ms"] > 0 and row["peak_memory_gib"] is None for row in rows)
    assert [row["speed_up"] for row in rows if row["mode"] == "FP32, no TF32"] == [1.0] * 3
    assert capsys.readouterr().out.count("images/s") == 7


def test_every_tensor_core_case_runs_without_rates_on_a_cpu(monkeypatch, capsys, tmp_path):
    run(
        monkeypatch,
        "tensor_cores.py",
        "--tiny",
        "--json",
        str(tmp_path / "results.json"),
        "--traces",
        str(tmp_path / "t"),
    )
    rows = json.loads((tmp_path / "results.json").read_text("utf-8"))["results"]["rows"]
    assert len(rows) == len({(row["case"], row["dtype"]) for row in rows}) == len(list((tmp_path / "t").iterdir()))
    assert all(row["tflops"] is None and row["tensor_core_fraction"] is None for row in rows)
    assert "nothing to compare" in capsys.readouterr().out


def test_the_inspector_runs_at_toy_sizes(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "gpu_overhead.py", "--tiny", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))["results"]
    assert [row["subject"] for row in results["rows"]] == ["ResNet"] * 6 + ["GPT-2"] * 6
    assert all(row["step_ms"] > 0 and row["added_memory_mib"] is None for row in results["rows"])
    inspected = [row for row in results["rows"] if row["name"] != "bare"]
    assert all(row["callbacks_ms"] > 0 for row in inspected)
    # Toy sizes and CPUs are not measured against targets.
    assert results["checked"] == []
    assert capsys.readouterr().out.count("in callbacks") == len(inspected)


@pytest.mark.gpu
def test_a_synchronisation_of_the_bare_loop_is_detected():
    training = gpu_overhead.Training(gpu_overhead.subjects(tiny=True)[0], "cuda")
    training.step()
    # GradScaler reads found_inf once a step.
    assert gpu_overhead.synchronisations(training, 3).total() >= 3
