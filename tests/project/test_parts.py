"""``make gpu`` without a GPU: parts share the time, results survive, packages are unpacked, and a rehearsal runs."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import gpu
import gpu_python
import gpu_tests
import machine
import pytest
import run_all
import whole_file
from parts import Part, run_parts

ROOT = Path(__file__).parents[2]
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{}'); print('written'); "
#: A part that ignores SIGTERM and starts a process that would write a second later.
CLINGS = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "late = 'import sys, time; time.sleep(3); open(sys.argv[1], \"w\")'; "
    "subprocess.Popen([sys.executable, '-c', late, sys.argv[1] + '.late']); "
    "time.sleep(60)"
)


def part(folder, name, code, weight=1.0):
    file = folder / f"{name}.json"
    return Part(name, (sys.executable, "-c", code, str(file)), weight, file)


def ran(folder, *parts, seconds=60.0, least=0.0):
    told = []
    outcomes = run_parts(
        parts,
        time.monotonic() + seconds,
        folder / "log",
        os.environ,
        lambda all_of_them: told.append([one.state for one in all_of_them]),
        least,
    )
    return outcomes, told


def test_a_part_that_fails_costs_itself_alone(tmp_path):
    parts = [
        part(tmp_path, "first", WRITES),
        part(tmp_path, "second", WRITES + "raise SystemExit('it broke')"),
        Part("third", (str(tmp_path / "nothing"),), 1.0, tmp_path / "third.json"),
        part(tmp_path, "fourth", "print('no file')"),
    ]
    outcomes, told = ran(tmp_path, *parts)
    assert [one.state for one in outcomes] == ["done", "failed", "failed", "failed"]
    assert [one.file for one in outcomes] == ["first.json", "second.json", None, None]
    assert outcomes[1].said == ["written", "it broke"]
    assert "could not be started" in outcomes[2].said[0]
    assert outcomes[3].said == ["no file", "fourth.json was not written"]
    assert told[0] == ["running", *["not begun"] * 3]
    assert told[1] == ["done", *["not begun"] * 3]
    log = (tmp_path / "log").read_text("utf-8")
    assert re.findall(r"^== (\w+)", log, re.MULTILINE) == ["first", "second", "third", "fourth"]
    assert "it broke" in log


def test_a_part_that_hangs_is_ended_with_all_it_started_and_its_results_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("parts._GRACE", 0.5)
    parts = [part(tmp_path, "hangs", WRITES + CLINGS, 1.0), part(tmp_path, "next", WRITES, 9.0)]
    outcomes, _ = ran(tmp_path, *parts, seconds=20)
    assert [(one.state, one.file) for one in outcomes] == [("timed out", "hangs.json"), ("done", "next.json")]
    assert outcomes[0].said == ["written"]
    time.sleep(3)
    assert not (tmp_path / "hangs.json.late").exists()


def test_the_next_part_may_use_unused_time(tmp_path):
    first, second = ran(tmp_path, part(tmp_path, "a", "", 1.0), part(tmp_path, "b", "", 3.0), seconds=1000)[0]
    assert first.limit == pytest.approx(250, abs=1)
    assert second.limit > 900


def test_a_part_with_too_little_time_is_skipped_with_a_note(tmp_path):
    outcomes, told = ran(tmp_path, part(tmp_path, "a", WRITES), seconds=5, least=10)
    assert [(one.state, one.file, one.seconds) for one in outcomes] == [("skipped", None, 0.0)]
    assert "fewer than 10" in outcomes[0].said[0]
    assert told == [["skipped"]]


def test_a_stopped_run_has_reported_its_progress(tmp_path):
    told = []

    def tell(outcomes):
        told.append([one.state for one in outcomes])
        if len(told) == 2:
            raise SystemExit

    parts = [part(tmp_path, name, WRITES) for name in "ab"]
    with pytest.raises(SystemExit):
        run_parts(parts, time.monotonic() + 60, tmp_path / "log", os.environ, tell, 0.0)
    assert told[-1] == ["done", "not begun"]


# -- files --------------------------------------------------------------------------------------------------------------


def test_a_results_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    file = machine.ResultsFile(path, rehearsal=True)
    file.write([1], complete=False)
    found = json.loads(path.read_text("utf-8"))
    assert (found["results"], found["complete"], found["rehearsal"]) == ([1], False, True)
    monkeypatch.setattr(whole_file.Path, "replace", lambda *arguments: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        file.write([1, 2])
    assert json.loads(path.read_text("utf-8")) == found
    assert [one.name for one in tmp_path.glob("*.json")] == ["results.json"]
    monkeypatch.undo()
    machine.write_results(path, [1, 2])
    assert not {"complete", "rehearsal"} & set(json.loads(path.read_text("utf-8")))


def test_an_earlier_runs_file_does_not_pass_for_this_ones(tmp_path):
    old = tmp_path / "gpu_counting-gpu.json"
    old.write_text("{}")
    (made,) = gpu.parts(["gpu_counting"], "python", tmp_path, tmp_path, rehearse=False)
    assert made.file == old
    assert not old.exists()


def test_traces_become_one_file(tmp_path):
    gpu.keep_traces(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "gemm.json.gz").write_bytes(b"x")
    gpu.keep_traces(tmp_path, tmp_path)
    with tarfile.open(tmp_path / "tensor_cores-traces.tar") as archive:
        assert archive.getnames() == ["gemm.json.gz"]


# -- the Python and its packages ----------------------------------------------------------------------------------------


THERE = gpu_python.Interpreter(
    "/opt/x/bin/python3", "3.12.3", "2.11.0", "13.0", "NVIDIA H100", "", True, {"rich": "15.0"}
)


def brought(folder, *names):
    for name in names:
        with zipfile.ZipFile(folder / name, "w") as wheel:
            module = name.partition("-")[0]
            wheel.writestr(f"{module}/__init__.py", f"NAME = {module!r}")
            wheel.writestr(f"{name.rsplit('-', 3)[0]}.data/purelib/{module}/aside.py", "")
    return gpu_python.wheels(folder)


def test_only_missing_packages_are_unpacked_and_never_torch(tmp_path):
    wheels = brought(
        tmp_path,
        "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl",
        "nvidia_cublas-13-py3-none-any.whl",
        "rich-15.0-py3-none-any.whl",
        "pluggy-1.7.0-py3-none-any.whl",
        "sortedcontainers-2.4.0-py2.py3-none-any.whl",
        "ml_dtypes-0.6.0-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        "hypothesis-6.1-cp313-cp313-manylinux_2_28_x86_64.whl",
    )
    assert sorted(wheels) == ["hypothesis", "ml-dtypes", "pluggy", "rich", "sortedcontainers"]
    into = tmp_path / "packages"
    said = gpu_python.unpack(wheels, THERE, into)
    assert sorted(path.name for path in into.iterdir() if path.suffix != ".data") == [
        "ml_dtypes",
        "pluggy",
        "sortedcontainers",
    ]
    assert (into / "pluggy" / "aside.py").exists()
    assert "lacks: ml-dtypes, pluggy, sortedcontainers" in said[0]
    assert said[1].endswith("another Python than 3.12.3: hypothesis")


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp310-abi3-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_wheels_are_known_by_their_tags(wheel, fits):
    assert gpu_python.fits(Path(wheel), "3.12.3") is fits


def test_this_python_is_found_and_asked(tmp_path, monkeypatch):
    without = tmp_path / "python3"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYTHON", raising=False)
    assert list(gpu_python.candidates(str(without)))[:2] == [str(without), sys.executable]
    assert gpu_python.probe(str(without)) is None
    found, said = gpu_python.find(str(without), ["numpy", "no-such-package"], gpu=False)
    assert found is not None
    assert found.path == sys.executable
    assert found.versions["numpy"]
    assert found.versions["no-such-package"] is None
    assert said == []


def test_a_torch_without_a_gpu_is_reported_and_not_used(monkeypatch):
    monkeypatch.setattr(gpu_python, "candidates", lambda first: iter(["/a", "/b", "/c", "/d"]))
    known = {
        "/a": replace(THERE, path="/a", cuda=None, gpu=None),
        "/b": replace(THERE, path="/b", gpu=None, why="no driver"),
        "/c": None,
        "/d": THERE,
    }
    monkeypatch.setattr(gpu_python, "probe", lambda path, names: known[path])
    found, said = gpu_python.find()
    assert found is THERE
    assert said == [
        "/a: Python 3.12.3, torch 2.11.0: not made for CUDA",
        "/b: Python 3.12.3, torch 2.11.0: no CUDA device (no driver)",
    ]


def test_the_parts_import_this_tree_first_and_unpacked_packages_last(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("HOME", "/nowhere")
    found = gpu.environment(tmp_path, rehearse=False)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/theirs", str(tmp_path / "packages")]
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in found
    assert "CUDA_VISIBLE_DEVICES" not in found or "CUDA_VISIBLE_DEVICES" in os.environ
    assert all(
        value.startswith(str(tmp_path)) for name, value in found.items() if "CACHE" in name and "mpinspect-" in value
    )
    assert gpu.environment(tmp_path, rehearse=True)["CUDA_VISIBLE_DEVICES"] == ""


# -- the whole ----------------------------------------------------------------------------------------------------------


def test_every_benchmark_of_a_gpu_is_a_part_and_the_parts_take_nine_minutes():
    assert list(gpu.WEIGHTS) == ["gpu_tests", *(one.name for one in run_all.BENCHMARKS if one.device == "gpu")]
    assert sum(gpu.WEIGHTS.values()) + gpu._RESERVE == 540


def test_every_gpu_test_is_in_a_file_that_is_chosen():
    marked = {path.name for path in (ROOT / "tests").rglob("test_*.py") if ".mark.gpu" in path.read_text("utf-8")}
    chosen = [path.name for path in gpu_tests.files_with_gpu_tests()]
    assert set(chosen) == marked - {Path(__file__).name}
    assert chosen[:2] == ["test_gpu.py", "test_gpu_kernels.py"]


def test_without_a_gpu_a_message_is_printed_and_no_file_written(tmp_path):
    (tmp_path / "torch.py").write_text(
        "__version__ = '2.11.0'\n"
        "class version: cuda = '13.0'\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
        "    @staticmethod\n"
        "    def init(): raise RuntimeError('no driver')\n"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("No Python was found here whose torch reaches a CUDA GPU")
    assert "torch 2.11.0: no CUDA device (no driver)" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_refuses_to_write_to_the_results_folder():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--out", str(machine.RESULTS)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "a rehearsal measures nothing" in done.stderr


@pytest.mark.slow
def test_a_rehearsal_of_the_tests_and_of_counting(tmp_path):
    """The other parts run their toy sizes in test_training_benchmarks.py."""
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--out", str(tmp_path)),
            *("gpu_tests", "gpu_counting"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "HOME": str(tmp_path / "nowhere")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    documents = {path.stem: json.loads(path.read_text("utf-8")) for path in tmp_path.glob("*.json")}
    assert set(documents) == {"gpu_parts-cpu", "gpu_tests-cpu", "gpu_counting-cpu"}
    assert all(document["rehearsal"] is True for document in documents.values())
    assert not any("complete" in document for document in documents.values())
    states = [(one["name"], one["state"]) for one in documents["gpu_parts-cpu"]["results"]["parts"]]
    assert states == [("gpu_tests", "done"), ("gpu_counting", "done")]
    tests = documents["gpu_tests-cpu"]["results"]
    assert tests["outcomes"] == {"skipped": len(tests["rows"])}
    assert {Path(row["test"].partition("::")[0]).name for row in tests["rows"]} == {
        path.name for path in gpu_tests.files_with_gpu_tests()
    }
    counted = documents["gpu_counting-cpu"]["results"]
    assert counted["checked"] == []
    assert [row["count_us"] > 0 for row in counted["rows"]] == [True] * 3
    assert re.findall(r"^== (\w+)", (tmp_path / "gpu.log").read_text("utf-8"), re.MULTILINE) == [
        "gpu_tests",
        "gpu_counting",
    ]
