"""Reading a run directory back: one process's, several ranks', an unfinished one, a damaged one."""

from __future__ import annotations

import json

import pytest
import sessions

from mpinspect.cli import main
from mpinspect.run_directory import is_run_directory, read_run
from mpinspect.session_file import FILE_NAME, SessionError


def make_run(place, *models: str, **record):
    """What a process leaves: its record, and a session for each model."""
    place.mkdir(parents=True)
    for model in models:
        (place / model).mkdir()
        sessions.word_model().save(place / model)
    (place / "run.json").write_text(json.dumps({"command": "train.py -x", "outcome": "ended"} | record))
    return place


def test_one_process_with_two_models(tmp_path):
    run = make_run(tmp_path / "run", "Generator", "Critic", saw=["2 optimizers were made"])
    assert is_run_directory(run)
    report = read_run(run)
    assert sorted(part.name for part in report.parts) == ["Critic", "Generator"]
    assert (report.command, report.outcome) == ("train.py -x", "ended")
    assert report.saw == ("2 optimizers were made",)
    assert report.parts[0].ranges.session.progress == sessions.word_model().progress


def test_ranks_are_parts_in_their_order(tmp_path):
    for rank in (10, 2, 0):
        make_run(tmp_path / f"rank{rank}", "Net", saw=["seen"])
    report = read_run(tmp_path)
    assert [part.name for part in report.parts] == ["rank0/Net", "rank2/Net", "rank10/Net"]
    assert report.saw == ("rank0: seen", "rank2: seen", "rank10: seen")


def test_a_run_that_did_not_end_says_so(tmp_path):
    assert read_run(make_run(tmp_path / "run", "Net", outcome="running")).outcome == "running still, or killed"


def test_a_damaged_part_is_named_and_the_rest_is_read(tmp_path):
    run = make_run(tmp_path / "run", "Good", "Bad")
    (run / "Bad" / FILE_NAME).write_bytes(b"no session")
    (run / "run.json").write_text("{")
    (run / "trace.json.gz").write_bytes(b"\x1f\x8bnothing")
    report = read_run(run)
    assert [part.name for part in report.parts] == ["Good"]
    assert any(sentence.startswith("Bad can't be read") for sentence in report.saw)
    assert any(sentence.startswith("the trace can't be read") for sentence in report.saw)


def test_shapes_are_where_the_run_wrote_them(tmp_path):
    run = make_run(tmp_path / "run", "Net")
    (run / "report.json").write_text(json.dumps({"shapes": {"model": "Net"}}))
    assert any("shapes were recorded too" in sentence for sentence in read_run(run).saw)


def test_what_is_no_run_directory(tmp_path):
    sessions.word_model().save(tmp_path)
    assert not is_run_directory(tmp_path)
    assert not is_run_directory(tmp_path / FILE_NAME)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SessionError, match="neither a session nor a run"):
        read_run(tmp_path / "empty")


def test_the_command_reads_it(tmp_path, capsys):
    run = make_run(tmp_path / "run", "Net")
    assert main(["report", str(run), "--md", str(tmp_path / "again.md")]) == 0
    assert "In brief" in capsys.readouterr().out
    assert (tmp_path / "again.md").read_text().startswith("# mpinspect run train.py -x")
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "mpinspect.run"
    assert main(["report", str(run), "--png", str(tmp_path / "a.png")]) == 2
    assert "one of the folders" in capsys.readouterr().err
