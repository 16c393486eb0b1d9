"""docs/performance.md says what the committed results say: a missed promise is shown as missed, others as not yet measured."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[1]


def document(*rows):
    return {"date": "2026-01-01", "machine": {"processor": "x", "cores": 2}, "results": {"checked": list(rows)}}


def test_the_committed_page_is_what_the_committed_results_give():
    made = performance_page.page(performance_page.load(), performance_page.TEMPLATE.read_text("utf-8"))
    assert performance_page.PAGE.read_text("utf-8") == made, "run: python benchmarks/performance_page.py"


def test_without_results_every_promise_and_every_section_says_how_to_measure_it():
    made = performance_page.page({}, performance_page.TEMPLATE.read_text("utf-8"))
    assert made.count(f"| {page_tables.NOT_MEASURED} |") == len(TARGETS)
    assert made.count("Not yet measured.") == len(performance_page.SECTIONS)
    known = {benchmark.name for benchmark in run_all.BENCHMARKS}
    named = re.findall(r"`make bench ARGS=(\w+)`", made)
    assert len(named) == len(TARGETS) + len(performance_page.SECTIONS)
    assert set(named) <= known
    assert "{{" not in made


def test_a_missed_promise_is_shown_as_missed():
    documents = {"a": document(checked("counting.over_sum", 7.0), checked("counting.add_histogram", 26.0))}
    lines = page_tables.promises(documents).splitlines()
    assert "| counting 25 M float32, over sum() | at most 5x | 7x | **missed** |" in lines
    assert "| TensorBoard's add_histogram of 25 M float32, over counting | at least 25x | 26x | met |" in lines
    assert sum(page_tables.NOT_MEASURED in line for line in lines) == len(TARGETS) - 2
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
def test_figures_as_people_read_them(value, unit, text):
    assert shown(value, unit) == text


def test_the_committed_results_were_judged_by_the_promises_of_today():
    rows = page_tables.checked_rows(performance_page.load())
    assert rows
    for row in rows:
        if row["key"] in TARGETS:
            target = TARGETS[row["key"]]
            assert (row["what"], row["limit"], row["met"]) == (target.what, target.limit, target.met(row["value"]))


def test_every_results_file_tells_its_machine_its_date_and_its_device():
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
    """Stands in for the processes."""

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


def test_a_quick_run_keeps_nothing(monkeypatch, capsys):
    runs = Runs(monkeypatch)
    assert run(monkeypatch, "--quick") == 0
    assert len(runs.commands) == sum(one.quick is not None and one.device != "gpu" for one in run_all.BENCHMARKS)
    assert not any(str(RESULTS) in part for command in runs.commands for part in command)
    assert runs.pages == 0
    assert "counting 25 M float32, over sum()" in capsys.readouterr().out


def test_a_full_run_keeps_its_results_and_writes_the_page(monkeypatch):
    runs = Runs(monkeypatch)
    assert run(monkeypatch, "counting", "gpu_overhead") == 0
    assert [command[-1] for command in runs.commands] == [
        str(RESULTS / "counting-cpu.json"),
        str(RESULTS / "gpu_overhead-gpu.json"),
    ]
    assert runs.pages == 1


def test_one_that_fails_does_not_stop_the_rest(monkeypatch, capsys, tmp_path):
    runs = Runs(monkeypatch, returncode=1)
    assert run(monkeypatch, "counting", "traces", "--results", str(tmp_path)) == 1
    assert len(runs.commands) == 2
    assert runs.pages == 0
    assert "failed, or missed a bound of their own: counting, traces" in capsys.readouterr().out


def test_an_unknown_name_is_answered_with_those_there_are(monkeypatch):
    Runs(monkeypatch)
    with pytest.raises(SystemExit, match="no benchmark is called nothing; there are counting"):
        run(monkeypatch, "nothing")


def test_the_page_is_linked_to():
    for page, link in (("README.md", "docs/performance.md"), ("docs/architecture.md", "performance.md")):
        assert f"]({link})" in (ROOT / page).read_text("utf-8")
