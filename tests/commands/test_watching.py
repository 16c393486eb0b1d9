"""``mpinspect report --watch``: again at each change, until the run ends."""

import dataclasses
import json
import os
import platform
import sys
import time

import pytest
import sessions

from mpinspect.commands import cli, watching
from mpinspect.run.record import FILE_NAME

GONE = 2**22 + 1


@pytest.fixture
def looks(monkeypatch):
    """A list of actions that replace the sleeps of ``watch``, in order; after the last, Ctrl-C."""
    todo = []

    def sleep(seconds):
        assert seconds >= 1
        if not todo:
            raise KeyboardInterrupt
        todo.pop(0)()

    monkeypatch.setattr(watching.time, "sleep", sleep)
    return todo


def writes(path, **progress):
    made = sessions.word_model()
    path.mkdir(parents=True, exist_ok=True)
    (path / "session.mpinspect").unlink(missing_ok=True)
    dataclasses.replace(made, progress=dataclasses.replace(made.progress, **progress)).save(path)


def begun(path, outcome="running", **fields):
    path.mkdir(parents=True, exist_ok=True)
    (path / FILE_NAME).write_text(
        json.dumps({"command": "train.py", "outcome": outcome, "saw": [], "models": [], **fields})
    )


def watch(path, *options):
    return cli.main(["report", str(path), "--watch", *options])


def test_a_missing_folder_is_waited_for_and_watched_until_the_run_ends(looks, tmp_path, capsys):
    path = tmp_path / "runs" / "a"
    looks += [lambda: None, lambda: writes(path, steps=50, ended=False), lambda: None, lambda: writes(path, ended=True)]
    assert watch(path) == 0
    out, err = capsys.readouterr()
    assert err.count("nothing is recorded in") == 1
    assert out.count("WordModel against float16") == 2
    lines = [line for line in out.splitlines() if line.startswith(f"{path}: last data at ")]
    assert [line.partition(" (")[0].partition("; ")[2] for line in lines] == ["", "the run has ended"]
    assert "\x1b" not in out


def test_an_unchanged_report_is_not_shown_again_and_ctrl_c_ends_it(looks, tmp_path, capsys):
    writes(tmp_path, ended=False)
    looks += [lambda: None] * 3
    assert watch(tmp_path) == 130
    out, err = capsys.readouterr()
    assert out.count("WordModel against float16") == 1
    assert err == "mpinspect: stopped\n"


@pytest.mark.parametrize("end", ["its record", "its process", "no data"])
def test_watching_a_run_directory_ends_with_its_record_or_its_process(end, looks, tmp_path, capsys, monkeypatch):
    begun(tmp_path, process=os.getpid(), host=platform.node())
    if end != "no data":
        writes(tmp_path / "Net", ended=True)
    looks += [
        lambda: None,
        (lambda: begun(tmp_path, process=GONE, host=platform.node()))
        if end == "its process"
        else (lambda: begun(tmp_path, "ended")),
    ]
    assert watch(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("the run has ended")
    assert out.count(": last data at") == (0 if end == "no data" else 2)


def test_a_file_that_is_half_written_is_read_again_and_a_broken_one_is_an_error(looks, tmp_path, capsys):
    path = tmp_path / "session.mpinspect"
    path.write_bytes(b"mp")
    looks += [lambda: writes(tmp_path, ended=True)]
    assert watch(tmp_path) == 0
    assert watch(tmp_path, "--json") == 2
    assert capsys.readouterr().err == "mpinspect: --watch shows text: leave --json out\n"
    path.write_bytes(b"no session")
    looks += [lambda: None]
    assert watch(tmp_path) == 2
    assert capsys.readouterr().err.startswith("mpinspect: ")


def test_files_are_written_each_time_and_findings_set_the_status(looks, tmp_path, capsys):
    page, seen = tmp_path / "r.html", []
    writes(tmp_path / "a", ended=False)
    looks += [lambda: seen.append(page.read_text("utf-8")), lambda: writes(tmp_path / "a", steps=77, ended=True)]
    watch(tmp_path / "a", "--html", str(page))
    assert seen != [page.read_text("utf-8")]


def test_only_a_terminal_is_cleared(looks, tmp_path, capsys, monkeypatch):
    writes(tmp_path, ended=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for term, cleared in (("xterm", 1), ("dumb", 0)):
        monkeypatch.setenv("TERM", term)
        watch(tmp_path)
        assert capsys.readouterr().out.count("\x1b[2J") == cleared


def test_the_shown_time_is_the_last_change(looks, tmp_path, capsys, monkeypatch):
    writes(tmp_path, ended=True)
    os.utime(tmp_path / "session.mpinspect", (86400, 86400))
    watch(tmp_path)
    assert (
        f"last data at {time.strftime('%H:%M:%S', time.localtime(86400))}; the run has ended" in capsys.readouterr().out
    )
