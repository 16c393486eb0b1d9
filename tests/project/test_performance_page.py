"""docs/performance.md agrees with the committed results, including missed targets and unmeasured ones."""

import re
import subprocess
import sys
from pathlib import Path

import page_tables
import performance_page
import pytest
import run_all
import torch
from machine import RESULTS
from targets import TARGETS, checked, shown

ROOT = Path(__file__).parents[2]


def document(*rows):
    return {"date": "2026-01-01", "machine": {"processor": "x", "cores": 2}, "results": {"checked": list(rows)}}


def test_the_committed_page_equals_the_page_of_the_committed_results():
    made = performance_page.page(performance_page.load(), performance_page.TEMPLATE.read_text("utf-8"))
    assert performance_page.PAGE.read_text("utf-8") == made, "run: python benchmarks/performance_page.py"


TEMPLATE = """# Page

{{promises}}

## On a GPU

### Counting

Prose on counting.

{{gpu_counting}}

### Modes

{{training_modes}}

## Machines

{{machines}}

## Not yet measured

{{not_yet_measured}}
"""


def test_without_results_the_last_section_names_everything_and_how_to_measure_it():
    made = performance_page.page({}, performance_page.TEMPLATE.read_text("utf-8"))
    shown, _, last = made.partition("\n## Not yet measured\n")
    assert "\n## " not in last
    assert "make gpu`" not in shown
    assert "On a CUDA GPU" not in shown
    known = {benchmark.name for benchmark in run_all.BENCHMARKS if benchmark.device != "gpu"}
    named = re.findall(r"`make bench ARGS=(\w+)`", last)
    assert set(named) <= known
    assert len(named) + last.count("`make gpu`") == len(TARGETS) + len(performance_page.SECTIONS)
    assert all(target.what in last for target in TARGETS.values())
    assert "{{" not in made


def test_measured_results_are_in_their_section_and_the_rest_are_listed_last():
    documents = {"gpu_counting-gpu": document(checked("gpu.count_over_read", 1.1))}
    documents["gpu_counting-gpu"]["results"]["rows"] = [{"case": "1 GiB"}]
    made = performance_page.page(documents, TEMPLATE)
    assert re.findall(r"^#+ .*", made, re.MULTILINE) == [
        "# Page",
        "## On a GPU",
        "### Counting",
        "## Machines",
        "## Not yet measured",
    ]
    assert "1 GiB" in made
    assert "- Modes: `make gpu`" in made
    shown, _, last = made.partition("## Not yet measured")
    assert TARGETS["gpu.count_over_read"].what in shown
    assert TARGETS["gpu.count_over_read"].what not in last
    assert TARGETS["gpu.count_many"].what in last


def test_without_missing_results_there_is_no_last_section():
    rows = [checked(key, target.limit) for key, target in TARGETS.items()]
    documents = {"gpu_counting-gpu": document(*rows), "training_modes-gpu": document()}
    assert "Not yet measured" not in performance_page.page(documents, TEMPLATE)


def test_incomplete_results_are_marked():
    documents = {"training_modes-gpu": {**document(), "results": [{"task": "LSTM"}], "complete": False}}
    assert performance_page.page(documents, TEMPLATE).count(page_tables.CUT_SHORT) == 1
    documents["training_modes-gpu"].pop("complete")
    assert page_tables.CUT_SHORT not in performance_page.page(documents, TEMPLATE)


def test_rehearsals_are_not_read_as_results(tmp_path):
    (tmp_path / "a-gpu.json").write_text('{"rehearsal": true}')
    (tmp_path / "b-gpu.json").write_text("{}")
    assert list(performance_page.load(tmp_path)) == ["b-gpu"]


def test_gpu_tests_that_did_not_pass_are_named():
    rows = [
        {"test": "test_a", "outcome": "passed", "said": ""},
        {"test": "test_b", "outcome": "failed", "said": "line 1\nE  assert 1 == 2\n"},
    ]
    drawn = page_tables.gpu_tests({"outcomes": {"passed": 1, "failed": 1}, "rows": rows})
    assert drawn.startswith("1 passed, 1 failed.")
    assert "| `test_b` | failed | E  assert 1 == 2 |" in drawn
    assert "test_a" not in drawn
    assert page_tables.gpu_tests({"outcomes": {"passed": 1}, "rows": rows[:1]}) == "1 passed."


def test_a_missed_promise_is_shown_as_missed():
    documents = {"a": document(checked("counting.over_sum", 7.0), checked("counting.add_histogram", 26.0))}
    lines = page_tables.promises(documents).splitlines()
    assert "| counting 25 M float32, over sum() | at most 5x | 7x | **missed** |" in lines
    assert "| TensorBoard's add_histogram of 25 M float32, over counting | at least 25x | 26x | met |" in lines
    assert not any(page_tables.NOT_MEASURED in line for line in lines)
    assert len(page_tables.unanswered(documents)) == len(TARGETS) - 2
    text = page_tables.promises_text(documents)
    assert re.search(r"over sum\(\) +7x +at most 5x +MISSED", text)
    assert text.count(page_tables.NOT_MEASURED) == len(TARGETS) - 2


@pytest.mark.parametrize(
    ("key", "value", "met"),
    [
        ("overhead.default", 0.04, True),
        ("overhead.default", 0.0401, False),
        ("counting.add_histogram", 25.0, True),
        ("counting.add_histogram", 24.9, False),
        ("gpu.synchronisations", 0.0, True),
        ("gpu.synchronisations", 0.05, False),
    ],
)
def test_bounds(key, value, met):
    assert checked(key, value)["met"] is met


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.04, "%", "4%"),
        (0.0123, "%", "1.23%"),
        (5.0, "x", "5x"),
        (1.234, "us", "1.23 us"),
        (12345.6, "ns", "12,346 ns"),
        (0.0, "", "0"),
    ],
)
def test_figures_are_rounded_for_readers(value, unit, text):
    assert shown(value, unit) == text


def test_the_committed_results_were_judged_by_the_promises_of_today():
    rows = page_tables.checked_rows(performance_page.load())
    assert rows
    for row in rows:
        if row["key"] in TARGETS:
            target = TARGETS[row["key"]]
            assert (row["what"], row["limit"], row["met"]) == (target.what, target.limit, target.met(row["value"]))


def test_every_results_file_has_its_machine_date_and_device():
    for path in RESULTS.glob("*.json"):
        assert path.stem.endswith(("-cpu", "-gpu")), path.name
        found = performance_page.load()[path.stem]
        assert {"date", "machine", "results"} <= set(found)
        assert found["machine"]["gpu"] or path.stem.endswith("-cpu")


def test_results_of_any_form_become_tables():
    results = {"steps": 3, "note": None, "rows": [{"a": 1, "b": 2.5}, {"a": 2}], "inner": {"x": 0.125}, "checked": [{}]}
    assert page_tables.anything(results) == (
        "|  |  |\n| --- | ---: |\n| steps | 3 |\n| note | - |\n\n"
        "| a | b |\n| --- | ---: |\n| 1 | 2.5 |\n| 2 | - |\n\n"
        "inner:\n\n|  |  |\n| --- | ---: |\n| x | 0.125 |"
    )


def test_every_promise_names_a_benchmark_that_is_run():
    known = {benchmark.name: benchmark for benchmark in run_all.BENCHMARKS}
    assert {target.benchmark for target in TARGETS.values()} <= set(known)
    assert all(known[target.benchmark].device == target.device for target in TARGETS.values())


class Runs:
    """Replaces the benchmarks' processes."""

    def __init__(self, monkeypatch, returncode=0):
        self.commands = []
        self.returncode = returncode
        monkeypatch.setattr(run_all.subprocess, "run", self)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(performance_page, "write", self.written)
        self.pages = 0

    def __call__(self, command, check):
        self.commands.append(command)
        return subprocess.CompletedProcess(command, self.returncode)

    def written(self):
        self.pages += 1


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run_all.py", *arguments])
    return run_all.main()


def test_a_quick_run_stores_no_results(monkeypatch, capsys):
    runs = Runs(monkeypatch)
    assert run(monkeypatch, "--quick") == 0
    assert len(runs.commands) == sum(one.quick is not None and one.device != "gpu" for one in run_all.BENCHMARKS)
    assert not any(str(RESULTS) in part for command in runs.commands for part in command)
    assert runs.pages == 0
    assert "counting 25 M float32, over sum()" in capsys.readouterr().out


def test_a_full_run_stores_its_results_and_writes_the_page(monkeypatch):
    runs = Runs(monkeypatch)
    assert run(monkeypatch, "counting", "gpu_overhead") == 0
    assert [command[-1] for command in runs.commands] == [
        str(RESULTS / "counting-cpu.json"),
        str(RESULTS / "gpu_overhead-gpu.json"),
    ]
    assert runs.pages == 1


def test_a_failing_benchmark_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    runs = Runs(monkeypatch, returncode=1)
    assert run(monkeypatch, "counting", "traces", "--results", str(tmp_path)) == 1
    assert len(runs.commands) == 2
    assert runs.pages == 0
    assert "failed, or missed a bound of their own: counting, traces" in capsys.readouterr().out


def test_the_error_for_an_unknown_name_lists_the_known_ones(monkeypatch):
    Runs(monkeypatch)
    with pytest.raises(SystemExit, match="no benchmark is called nothing; there are counting"):
        run(monkeypatch, "nothing")


def test_the_page_is_linked_to():
    for page, link in (("README.md", "/docs/performance.md"), ("docs/architecture.md", "(performance.md")):
        assert f"{link})" in (ROOT / page).read_text("utf-8")
