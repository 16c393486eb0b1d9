"""Reading run directories: of one process, of several ranks, unfinished, damaged."""

import dataclasses
import html
import json
import os
import platform
import re
import subprocess
import sys

import made_sessions as made
import pytest
import sessions
import shape_records

from mpinspect.commands.cli import main
from mpinspect.ranges import session as s
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.session import Session
from mpinspect.ranges.store import FILE_NAME, SessionError, read_session
from mpinspect.reporting.forms import render
from mpinspect.run.directory import claim
from mpinspect.run.options import LaunchOptions, Rank
from mpinspect.run.reading import is_run_directory, read_run
from mpinspect.run.record import first_record
from mpinspect.run.report import ModelPart, RunReport
from mpinspect.runtime import gpus
from mpinspect.shapes.analysis import analyse_shapes


def make_run(place, *models: str, **record):
    """Write a process's run directory: its record, and a session for each model."""
    place.mkdir(parents=True)
    for model in models:
        (place / model).mkdir()
        sessions.word_model().save(place / model)
    (place / "run.json").write_text(
        json.dumps({"command": "train.py -x", "outcome": "ended", "saw": [], "models": []} | record)
    )
    return place


def test_one_process_with_two_models(tmp_path):
    run = make_run(tmp_path / "run", "Generator", "Critic", saw=["2 optimizers were made"])
    assert is_run_directory(run)
    report = read_run(run)
    assert sorted(part.name for part in report.parts) == ["Critic", "Generator"]
    assert (report.command, report.outcome) == ("train.py -x", "ended")
    assert report.saw == ("2 optimizers were made",)
    assert report.parts[0].ranges.session.progress == sessions.word_model().progress


def test_ranks_add_up_or_are_parts_in_their_order(tmp_path):
    for rank in (10, 2, 0):
        make_run(tmp_path / f"rank{rank}", "Net", saw=["seen", *(["here"] if rank == 2 else [])], world_size=11)
    (part,) = read_run(tmp_path).parts
    assert part.name == "Net"
    alone, merged = sessions.word_model().totals(), part.ranges.session.totals()
    assert {key: 3 * window.histogram.total for key, window in alone.items()} == {
        key: window.histogram.total for key, window in merged.items()
    }
    absent = "ranks 1 and 3-9 of 11 left no record that can be added: no folder here"
    assert read_run(tmp_path).saw == (absent, "seen", "rank2: here")
    report = read_run(tmp_path, each_rank=True)
    assert [part.name for part in report.parts] == ["rank0/Net", "rank2/Net", "rank10/Net"]
    assert (report.saw, report.first_line) == ((absent, "seen", "rank2: here"), "")


@pytest.mark.parametrize("without", [0, 1])
def test_ranks_are_added_up_although_one_lacks_its_record(without, tmp_path):
    for rank in range(2):
        make_run(tmp_path / f"rank{rank}", "Net", world_size=2, job="one")
    (tmp_path / f"rank{without}" / "run.json").unlink()
    report = read_run(tmp_path)
    assert [part.name for part in report.parts] == ["Net"]
    assert any("run.json is missing" in sentence for sentence in report.saw)
    make_run(tmp_path / "rank2", "Net", world_size=3, job="another")
    assert any("another run" in sentence for sentence in read_run(tmp_path).saw)


def test_the_page_of_a_job_has_a_switch_to_each_rank_and_marks_those_that_differ(tmp_path):
    odd = s.Event(4, 0, "backward", "fc", "weight_gradient", "fc.weight", "inf", skipped=False)
    for rank in range(12):
        model = make_run(tmp_path / f"rank{rank}", world_size=12) / "Net"
        model.mkdir()
        session = sessions.word_model()
        info = dataclasses.replace(session.info, rank=rank, world_size=12)
        events = (odd,) if rank in (7, 11) else ()
        dataclasses.replace(session, info=info, events=events).save(model)
    report = read_run(tmp_path, for_page=True)
    # Ranks that differ come first where not all have room.
    assert [(part.name, part.differs) for part in report.ranks] == [
        *((f"rank {rank}", "") for rank in range(6)),
        ("rank 7", "differs in events"),
        ("rank 11", "differs in events"),
    ]
    assert report.ranks[6].ranges.session.events == (odd,)
    page = render(report, ".html")
    (names,) = re.findall(r"data-names='?\"?(\[.*?\])", page)
    assert json.loads(html.unescape(names))[:2] == ["all ranks", "rank 0"]
    assert "rank 7, differs in events" in html.unescape(names)
    assert 'data-of="Rank"' in page
    assert "<span>rank 7 differs in events</span>" in page
    # Other forms have the sum alone.
    for suffix in (".txt", ".md", ".json"):
        assert render(report, suffix) == render(dataclasses.replace(report, ranks=()), suffix)
    assert read_run(tmp_path, each_rank=True, for_page=True).ranks == read_run(tmp_path).ranks == ()
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text("utf-8") == page


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".json"])
def test_every_form_names_the_rank(suffix, tmp_path):
    event = s.Event(4, 0, "backward", "fc", "weight_gradient", "fc.weight", "inf", skipped=False)
    for rank in range(2):
        model = make_run(tmp_path / f"rank{rank}", world_size=2) / "Net"
        model.mkdir()
        info = dataclasses.replace(sessions.word_model().info, rank=rank, world_size=2)
        dataclasses.replace(sessions.word_model(), info=info, events=(event,) if rank else ()).save(model)
    text = render(read_run(tmp_path), suffix)
    assert "rank 1, step 4, backward, " in text
    assert "rank-events-differ" in text


def test_ranks_of_two_runs_or_two_models_are_not_added_up(tmp_path):
    for rank, job in enumerate(("a", "b", "a")):
        make_run(tmp_path / f"rank{rank}", "Net", world_size=3, job=job)
    report = read_run(tmp_path)
    assert [part.name for part in report.parts] == ["Net", "rank1/Net"]
    assert [rank.info.rank for rank in report.parts[0].ranges.session.ranks] == [0, 2]
    assert (
        report.saw[0]
        == "rank1/Net is shown separately: it belongs to another run: two runs share one folder, so move one away"
    )


def test_a_restarted_job_shares_no_folder_with_the_previous_attempt(tmp_path, monkeypatch):
    """Rank 1 of the first attempt died before it made its folder, so the name is free in the second attempt."""
    options = LaunchOptions("train.py", log_dir=str(tmp_path / "run"))
    folders = []
    for attempt, ranks in ((0, (0,)), (1, (1, 0))):
        for rank in ranks:
            for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("TORCHELASTIC_RESTART_COUNT", attempt)):
                monkeypatch.setenv(name, str(value))
            here = Rank.of_environment()
            folders.append(claim(options, here, first_record(options, here))[0].name)
    assert folders == ["run", "run-2", "run-2"]


def test_a_rank_of_another_run_is_named_for_any_model_name(tmp_path):
    for rank, model in enumerate(("Net", "Other")):
        make_run(tmp_path / f"rank{rank}", model, world_size=2, job=model)
    report = read_run(tmp_path)
    assert [part.name for part in report.parts] == ["Net", "rank1/Other"]
    assert report.saw[0].startswith("rank1/Other is shown separately: it belongs to another run")


def test_pipeline_stages_are_separate_models_and_no_rank_is_missing(tmp_path):
    for rank, model in enumerate(("First", "Second")):
        make_run(tmp_path / f"rank{rank}", model, world_size=2)
    report = read_run(tmp_path)
    assert [part.name for part in report.parts] == ["First", "Second"]
    assert not any(finding.id == "rank-missing" for finding in report.findings)
    assert report.saw == ()


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html"])
def test_the_verdict_leads_with_a_rank_that_died(suffix, tmp_path):
    for rank, ended in enumerate(
        (
            {"outcome": "RuntimeError: Connection closed by peer", "by_error": True},
            running(pid_of_nobody()),
            {"outcome": "ended"},
        )
    ):
        make_run(tmp_path / f"rank{rank}", "Net", world_size=3, **ended)
    report = read_run(tmp_path)
    (part,) = report.parts
    killed = "without a report (killed, or it crashed)"
    # A collective's error on a surviving rank is a consequence.
    said = f"Rank 1 ended in step 40 {killed}. Then rank 0 ended in step 40 by RuntimeError in a collective."
    assert part.ranges.verdict.sentences[0] == f"Error: {said}"
    text = render(report, suffix, **({"width": 300} if suffix == ".txt" else {}))
    text = re.sub("<[^>]*>", "", text)
    assert text.index("Error: Rank 1 ended") < text.index("decoder")
    said = f"Rank 1 ended {killed}. Then rank 0 ended by RuntimeError in a collective."
    assert read_run(tmp_path, each_rank=True).first_line == said


def test_a_rank_that_died_is_named_once_for_several_models(tmp_path):
    for rank, outcome in enumerate(("ended", "exit status 3")):
        make_run(tmp_path / f"rank{rank}", "Generator", "Critic", world_size=2, outcome=outcome)
    text = render(read_run(tmp_path), ".txt", width=300)
    assert "\nGenerator, Critic: Error: Rank 1 ended in step 40 with exit status 3.\n" in text


def test_a_rank_that_died_before_any_model_existed_leads_the_report(tmp_path):
    failed = {"outcome": "RuntimeError: CUDA out of memory", "by_error": True}
    for rank, ended in enumerate((running(pid_of_nobody()), failed)):
        make_run(tmp_path / f"rank{rank}", world_size=2, **ended)
    killed = "rank 0 ended without a report (killed, or it crashed)"
    said = f"Rank 1 ended by RuntimeError: CUDA out of memory. Then {killed}."
    report = read_run(tmp_path)
    assert report.first_line == said
    assert render(report, ".txt", width=300).startswith(said)


def test_a_missing_report_is_noted_with_its_lost_shapes(tmp_path):
    run = make_run(tmp_path / "run", "Net", models=[{"name": "Net", "log_dir": "Net"}])
    gone = "report.json is missing, and with it the shapes of one step's matrix products"
    assert gone in read_run(run).saw
    (run / "report.md").write_text("")
    assert f"{gone}; report.md may hold them" in read_run(run).saw
    (run / "report.json").write_text(json.dumps({"shapes": None}))
    assert not any(sentence.startswith(gone) for sentence in read_run(run).saw)


def test_inspectors_with_a_log_dir_for_each_rank_are_added_up(tmp_path):
    for rank in range(2):
        info = dataclasses.replace(sessions.word_model().info, rank=rank, world_size=2)
        (tmp_path / f"of-{rank}").mkdir()
        dataclasses.replace(sessions.word_model(), info=info).save(tmp_path / f"of-{rank}")
    (part,) = read_run(tmp_path).parts
    assert part.name == "WordModel"
    assert len(part.ranges.session.ranks) == 2


def running(process, **record):
    return {"outcome": "running", "host": platform.node(), "process": process} | record


def pid_of_nobody():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_an_unfinished_run_is_reported_as_such(tmp_path):
    report = read_run(make_run(tmp_path / "run", "Net", **running(os.getpid())))
    assert report.outcome == "still running, or killed"
    assert any("no report has been written yet" in sentence for sentence in report.saw)


def test_a_killed_run_is_distinguished_from_a_running_one(tmp_path):
    gone = pid_of_nobody()
    report = read_run(make_run(tmp_path / "here", "Net", **running(gone)))
    assert report.outcome == "ended without a report (killed, or it crashed)"
    # Processes of another machine can't be checked.
    assert "still running" in read_run(make_run(tmp_path / "there", "Net", **running(gone, host="another"))).outcome
    for number, process in enumerate((None, "12", True, 0, -1, 10**30, 1.5)):
        assert "still running" in read_run(make_run(tmp_path / str(number), **running(process))).outcome


def test_a_cut_off_session_points_to_the_report(tmp_path):
    run = make_run(tmp_path / "run", "Net", "Empty", models=[{"name": "Gone", "log_dir": "elsewhere/Gone"}])
    for name, kept in (("Net", -40), ("Empty", 3)):
        file = run / name / FILE_NAME
        file.write_bytes(file.read_bytes()[:kept])
    assert not any("hold the whole" in sentence for sentence in read_run(run).saw)
    (run / "report.json").write_text(json.dumps({"saw": ["2 models were inspected"]}))
    saw = read_run(run).saw
    whole = [sentence for sentence in saw if f"{run / 'report.md'} and report.json hold the whole" in sentence]
    assert {sentence.split()[0] for sentence in whole} == {"Net", "Empty", "Gone"}
    # run.json has no "saw" here, so it is read from report.json.
    assert "2 models were inspected" in saw


@pytest.mark.parametrize("record", ["", "{", "[]", "3", "null", '"text"', "[" * 100_000, b"\xff\xfe", "{}"])
def test_a_damaged_record_is_noted_and_the_models_are_read(record, tmp_path, capsys):
    run = make_run(tmp_path / "run", "Net")
    (run / "run.json").write_bytes(record if isinstance(record, bytes) else record.encode())
    report = read_run(run)
    assert [part.name for part in report.parts] == ["Net"]
    assert any(sentence.startswith("run.json is damaged") for sentence in report.saw)
    assert (report.command, report.outcome) == ("run", "unknown")
    assert main(["report", str(run)]) == 0
    assert "run.json is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, 3, {}, [None], [3], "text", [[]]])
def test_a_record_with_wrong_types_is_noted(value, tmp_path):
    names = ("command", "outcome", "saw", "models", "process", "host", "status")
    run = make_run(tmp_path / "run", "Net", **dict.fromkeys(names, value))
    report = read_run(run)
    assert [part.name for part in report.parts] == ["Net"]
    assert any(sentence.startswith("run.json is damaged: ") for sentence in report.saw)
    assert all(isinstance(sentence, str) for sentence in report.saw)


def test_a_run_without_a_record_is_read_with_a_note(tmp_path, capsys):
    run = make_run(tmp_path / "run", "Critic", "Net")
    (run / "run.json").unlink()
    make_run(run / "another")
    assert is_run_directory(run)
    report = read_run(run)
    assert {part.name for part in report.parts} == {"Critic", "Net"}
    assert any(sentence.startswith("run.json is missing") for sentence in report.saw)
    assert any("is shown as one run: " in sentence for sentence in report.saw)
    assert "separate runs inside it are left out: another" in report.saw
    assert main(["report", str(run)]) == 0
    assert "run.json is missing" in capsys.readouterr().out


def test_a_folder_of_runs_is_not_read_as_a_run(tmp_path, capsys):
    for name in ("train-1", "train-2"):
        make_run(tmp_path / name, "Net")
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "is a folder of 2 runs: " in err
    assert str(tmp_path / "train-2") in err


def test_a_rank_without_its_record_and_a_ranks_own_children(tmp_path):
    make_run(tmp_path / "rank0", "Net", saw=[])
    make_run(tmp_path / "rank0" / "process-0", "Net", saw=[], outcome="ValueError: 3")
    (make_run(tmp_path / "rank1", "Net") / "run.json").unlink()
    report = read_run(tmp_path)
    assert [part.name for part in report.parts] == ["Net", "rank0/process-0/Net"]
    assert "rank0/process-0: ValueError: 3" in report.saw
    assert any(sentence.startswith("rank1: run.json is missing") for sentence in report.saw)


def test_a_damaged_part_is_named_and_the_rest_is_read(tmp_path):
    run = make_run(tmp_path / "run", "Good", "Bad")
    (run / "Bad" / FILE_NAME).write_bytes(b"no session")
    (run / "run.json").write_text("{")
    (run / "trace.json.gz").write_bytes(b"\x1f\x8bnothing")
    report = read_run(run)
    assert [part.name for part in report.parts] == ["Good"]
    assert any(sentence.startswith("Bad can't be read") for sentence in report.saw)
    assert any(sentence.startswith("the trace can't be read") for sentence in report.saw)


def shapes_of(*products):
    return analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net", notes=("a note",))


SHAPES = (
    *shape_records.linear(64, 1023, 4096, name="hidden"),
    *shape_records.linear(64, 4096, 512, name="head", dtype="float32"),
    shape_records.convolution(),
    shape_records.attention(60),
    *shape_records.eager_attention(8, 33, 65, 60),
)


@pytest.mark.parametrize("lint", [True, None])
@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".json"])
def test_a_run_read_back_renders_as_its_original_report(suffix, lint, tmp_path):
    run = make_run(tmp_path / "run", "Net", saw=["1 model"], lint=lint)
    part = ModelPart("Net", analyse(Session.load(run / "Net")))
    own = RunReport("train.py -x", "ended", (part,), shapes_of(*SHAPES), None, ("1 model",), str(run), not lint)
    own.save(run / "report.json")
    read = read_run(run)
    assert read.shapes.flops_by_verdict == own.shapes.flops_by_verdict
    assert render(read, suffix) == render(own, suffix)


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("gpu",), "hopper"),
        (("matmuls", 0, "verdict"), "fine"),
        (("matmuls", 0, "m"), -1),
        (("matmuls", 0, "flops"), 10**40),
        (("matmuls", 2, "roofline_us"), "soon"),
        (("findings", 0, "severity"), "fatal"),
        (("findings", 0, "evidence"), []),
        (("flops_by_verdict",), []),
        (("notes",), "text"),
        (("schema_version",), 2),
    ],
)
def test_shapes_of_a_damaged_report_are_omitted_with_a_note(names, value, tmp_path):
    run = make_run(tmp_path / "run", "Net")
    report = json.loads(shapes_of(*SHAPES).to_json())
    place = report
    for name in names[:-1]:
        place = place[name]
    place[names[-1]] = value
    (run / "report.json").write_text(json.dumps({"shapes": report}))
    read = read_run(run)
    assert read.shapes is None
    assert [part.name for part in read.parts] == ["Net"]
    (said,) = [
        sentence for sentence in read.saw if "the shapes can't be read: report.json is damaged (shapes." in sentence
    ]
    assert str(names[-1]) in said
    (run / "report.json").write_text("{")
    assert any(sentence.startswith("report.json is damaged") for sentence in read_run(run).saw)


def test_evidence_of_any_type_is_accepted(tmp_path):
    run = make_run(tmp_path / "run", "Net")
    report = json.loads(shapes_of(*SHAPES).to_json())
    for finding in report["findings"]:
        finding["evidence"] = {"parameters": 3}
    (run / "report.json").write_text(json.dumps({"shapes": report}))
    assert "Products, worst first" in render(read_run(run), ".md")


@pytest.mark.parametrize("how", ["cut off", "gone", "empty"])
def test_fail_on_fails_for_unreadable_sessions(how, tmp_path, capsys):
    models = [{"name": name, "log_dir": name} for name in ("Generator", "Critic")]
    run = make_run(tmp_path / "run", "Generator", "Critic", models=models)
    assert main(["report", str(run), "--fail-on", "error"]) == 0
    session = run / "Critic" / FILE_NAME
    if how == "gone":
        session.unlink()
    else:
        session.write_bytes(session.read_bytes()[: 40 if how == "cut off" else 0])
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run), "--fail-on", "error"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("mpinspect: --fail-on could judge only a part: ")
    assert "Critic" in said


def test_a_run_without_a_readable_session_is_unusable(tmp_path, capsys):
    run = make_run(tmp_path / "run", "Net", models=[{"name": "Net", "log_dir": "Net"}])
    (run / "Net" / FILE_NAME).write_bytes(b"")
    assert main(["report", str(run)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "Net" in said


def test_other_folders_and_files_are_not_run_directories(tmp_path):
    sessions.word_model().save(tmp_path)
    assert not is_run_directory(tmp_path)
    assert not is_run_directory(tmp_path / FILE_NAME)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SessionError, match="neither a session nor a run"):
        read_run(tmp_path / "empty")


def test_the_report_command_reads_a_run_directory(tmp_path, capsys):
    run = make_run(tmp_path / "run", "Net")
    assert main(["report", str(run), "--md", str(tmp_path / "again.md")]) == 0
    assert "In brief" in capsys.readouterr().out
    assert (tmp_path / "again.md").read_text().startswith("# mpinspect run train.py -x")
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "mpinspect.run"


def test_the_picture_of_a_run_of_one_model_is_that_models(tmp_path, capsys):
    run, picture = make_run(tmp_path / "run" / "rank0", "Net"), tmp_path / "new" / "a.png"
    assert main(["report", str(tmp_path / "run"), "--png", str(picture)]) == 0
    assert "In brief" in capsys.readouterr().out
    analyse(Session.load(run / "Net")).save(tmp_path / "model.png")
    assert picture.read_bytes() == (tmp_path / "model.png").read_bytes()
    assert read_run(tmp_path / "run").save(tmp_path / "again.png").read_bytes() == picture.read_bytes()


def test_a_picture_needs_exactly_one_model(tmp_path, capsys):
    run = make_run(tmp_path / "run", "Generator", "Critic")
    assert main(["report", str(run), "--png", str(tmp_path / "a.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert str(run / "Critic") in err
    assert str(run / "Generator") in err
    assert main(["report", str(make_run(tmp_path / "other")), "--png", str(tmp_path / "a.png")]) == 2
    assert "this run has none" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_a_rank_killed_before_it_wrote_its_progress_is_shown_from_its_windows(tmp_path):
    run = make_run(tmp_path / "run" / "rank0", "Net")
    session = made.full_session()
    rank = tmp_path / "run" / "rank1" / "Net"
    rank.mkdir(parents=True)
    session = dataclasses.replace(session, info=s.RunInfo("Net"), ranks=())
    dataclasses.replace(session, progress=s.Progress()).save(rank)
    assert read_session(rank).progress == s.Progress()
    report = read_run(run.parent, each_rank=True)
    told = {part.name: part.ranges.session.progress for part in report.parts}["rank1/Net"]
    assert (told.steps, told.sampled_steps) == (91, 9)
    for suffix in (".txt", ".md"):
        text = render(report, suffix)
        assert not re.search(r"\b0 steps", text)
        assert "91 steps" in text
    # The recorded progress of a killed run may lag behind its windows.
    behind = dataclasses.replace(session, progress=s.Progress(60, 5, 1))
    assert (behind.reached().steps, behind.reached().sampled_steps, behind.reached().skipped_steps) == (91, 9, 1)
    assert session.reached() == session.progress
    assert s.Session().reached() == s.Progress()


# -- the default directory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("--output_dir out/gpt2 --lr 1", "out/gpt2-mpinspect"),
        ("train --out-dir=out", "out-mpinspect"),
        ("--lr 1 -logdir out/ --output_dir other", "out-mpinspect"),
        ("--OUTPUT-DIR new", "new-mpinspect"),
        ("--save_dir ../elsewhere", "../elsewhere-mpinspect"),
        # The script creates the parent folder, and the working directory is not an output folder.
        ("--output_dir deep/er", None),
        ("", None),
        ("--output_dir .", None),
        ("--output_dir ..", None),
        ("--output_dir=", None),
        ("--output_dir", None),
        ("--output_dir --lr 1", None),
        ("--output_dir s3://bucket/out", None),
        ("output_dir out --output_directory out", None),
    ],
)
def test_the_default_directory_lies_next_to_the_scripts_output(words, beside, tmp_path, monkeypatch):
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    monkeypatch.chdir(work)
    path, trouble = claim(LaunchOptions("train.py", arguments=tuple(words.split())), Rank(), {})
    assert trouble == ""
    if beside is None:
        assert path.parent == work / "runs"
    else:
        assert path == (work / beside).resolve()
        again, trouble = claim(LaunchOptions("train.py", arguments=tuple(words.split())), Rank(), {})
        assert (again, trouble) == (path.with_name(f"{path.name}-2"), "")


def test_the_ranks_of_a_job_share_the_directory_next_to_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = LaunchOptions("train.py", arguments=("--output_dir", "out"))
    found = {claim(options, Rank(number, 2, "job"), {"job": "job"})[0] for number in (0, 1)}
    assert found == {tmp_path / "out-mpinspect"}
    assert claim(options, Rank(0, 2, "another"), {"job": "another"})[0] == tmp_path / "out-mpinspect-2"
