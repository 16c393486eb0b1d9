"""The command line: exit statuses, messages on stderr, and written files."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types

import pytest
import sessions

import mpinspect.demo
from mpinspect.commands import cli


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    sessions.word_model().save(path)
    return path


def test_report_prints_text(run_dir, capsys):
    assert cli.main(["report", str(run_dir)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("WordModel against float16\n")
    assert "Suggested loss scale" in out
    assert err == ""


def test_report_prints_only_json(run_dir, capsys):
    assert cli.main(["report", str(run_dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mpinspect.report"
    assert document["loss_scale"]["available"] is True


def test_report_writes_the_files_asked_for(run_dir, tmp_path, capsys):
    png, md = tmp_path / "a" / "r.png", tmp_path / "b" / "r.md"
    assert cli.main(["report", str(run_dir), "--png", str(png), "--md", str(md)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert md.read_text("utf-8").startswith("# WordModel against float16")


@pytest.mark.parametrize(
    ("severity", "fail_on", "status"),
    [
        ("info", [], 0),
        ("error", [], 0),
        ("info", ["warning"], 0),
        ("warning", ["warning"], 1),
        ("error", ["warning"], 1),
        ("warning", ["error"], 0),
        ("error", ["error"], 1),
        ("info", ["updates-lost"], 1),
        ("warning", ["never-fired"], 0),
        ("info", ["never-fired", "updates-lost"], 1),
    ],
)
def test_fail_on(severity, fail_on, status, run_dir, monkeypatch, capsys):
    report = sessions.report_by_hand(sessions.word_model())
    finding = dataclasses.replace(report.findings[0], id="updates-lost", severity=severity)
    planted = dataclasses.replace(report, findings=(finding,))
    monkeypatch.setattr("mpinspect.ranges.analyse.analyse", lambda session, format: planted)
    options = [part for name in fail_on for part in ("--fail-on", name)]
    assert cli.main(["report", str(run_dir), *options]) == status


@pytest.mark.parametrize("make", ["nothing", "empty directory", "foreign file"])
def test_unreadable_input_is_a_sentence_and_status_2(make, tmp_path, capsys):
    path = tmp_path / "run"
    if make == "empty directory":
        path.mkdir()
    elif make == "foreign file":
        path.write_bytes(b"PK\x03\x04 not ours")
    assert cli.main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mpinspect: ")
    assert err.count("\n") == 1
    assert str(path) in err


def test_a_run_that_was_killed_in_the_middle_of_a_write(run_dir, capsys):
    (file,) = run_dir.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: -len(data) // 4])
    assert cli.main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "ends within a record" in " ".join(out.split())


def test_a_file_that_can_not_be_written_is_status_2(run_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["report", str(run_dir), "--md", str(tmp_path / "file" / "r.md")]) == 2
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["report"],
        ["unknown"],
        ["report", "x", "--png", "x.jpg"],
        ["report", "x", "--html", "x"],
        ["demo", "--steps", "0"],
        ["demo", "--curves", "--seeds", "0"],
        ["kernels"],
        ["kernels", "x", "--png", "x.jpg"],
        ["kernels", "x", "--gpu", "3dfx"],
        *(
            ["kernels", "x", "--fail-on", condition]
            for condition in (
                "tensor-core share",
                "tensor-core share = 60%",
                "tensor-core share < 60 percent",
                "tensor-core share < 160%",
                "tensor-core share < 60",
                "share < 60%",
                "tensor-core share < 1e1",
                "tensor-core share < 1e",
                "tensor-core share < 1e400",
            )
        ),
    ],
)
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: mpinspect" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"mpinspect {mpinspect.__version__}\n"


def test_demo_passes_its_options_on(tmp_path, monkeypatch, capsys):
    seen = {}

    def run(**options):
        seen.update(options)
        return sessions.report_by_hand(sessions.word_model())

    fake = types.ModuleType("mpinspect.demo.demo")
    fake.run = run
    monkeypatch.setitem(sys.modules, "mpinspect.demo.demo", fake)
    monkeypatch.setattr(mpinspect.demo, "demo", fake, raising=False)
    assert cli.main(["demo", "--log-dir", str(tmp_path), "--steps", "7", "--seed", "3", "--json"]) == 0
    assert seen == {"log_dir": str(tmp_path), "steps": 7, "seed": 3, "quiet": True}
    assert json.loads(capsys.readouterr().out)["format"] == "float16"
    seen.clear()
    assert cli.main(["demo", "--quiet"]) == 0
    assert seen == {"log_dir": "runs/demo", "seed": 0, "quiet": True}


def test_the_help_names_the_demos_number_of_steps(capsys):
    import inspect

    from mpinspect.demo import curves as demo_curves
    from mpinspect.demo import demo

    alone, curves = inspect.signature(demo.run).parameters["steps"].default, demo_curves.Setting().steps
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert f"training steps of a run ({alone}; with --curves {curves})" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def curves(monkeypatch):
    """A stand-in for mpinspect.demo.curves that records its arguments, and returns or raises ``outcome``."""
    fake = types.ModuleType("mpinspect.demo.curves")
    report = sessions.report_by_hand(sessions.word_model())
    fake.outcome = types.SimpleNamespace(report=report, to_json=lambda: '{"report": 1, "curves": 2}\n')

    def run(**options):
        fake.seen = options
        if isinstance(fake.outcome, BaseException):
            raise fake.outcome
        return fake.outcome

    fake.run, fake.Setting = run, lambda **options: options
    monkeypatch.setitem(sys.modules, "mpinspect.demo.curves", fake)
    monkeypatch.setattr(mpinspect.demo, "curves", fake, raising=False)
    return fake


def test_demo_with_curves_passes_its_options_on(curves, tmp_path, capsys):
    assert (
        cli.main(["demo", "--curves", "--log-dir", str(tmp_path), "--steps", "7", "--seed", "3", "--seeds", "2"]) == 0
    )
    assert curves.seen == {"log_dir": str(tmp_path), "setting": {"steps": 7}, "seeds": range(3, 5), "quiet": False}
    assert capsys.readouterr() == ("", "")
    assert cli.main(["demo", "--curves", "--quiet", "--fail-on", "info"]) == 1
    assert curves.seen["setting"] == {}
    assert curves.seen["seeds"] == range(1)
    assert curves.seen["quiet"] is True


def test_demo_with_curves_prints_one_json_document(curves, capsys):
    assert cli.main(["demo", "--curves", "--json"]) == 0
    assert curves.seen["quiet"] is True
    assert json.loads(capsys.readouterr().out) == {"report": 1, "curves": 2}


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (KeyboardInterrupt("2 of 4 runs were finished"), "mpinspect: stopped: 2 of 4 runs were finished\n"),
        (KeyboardInterrupt(), "mpinspect: stopped\n"),
    ],
)
def test_a_stopped_demo_prints_a_message_without_a_traceback(stop, words, curves, capsys):
    curves.outcome = stop
    assert cli.main(["demo", "--curves", "--json"]) == 130
    assert capsys.readouterr() == ("", words)


def test_several_seeds_are_for_curves(capsys):
    assert cli.main(["demo", "--seeds", "3"]) == 2
    assert capsys.readouterr().err == (
        "mpinspect: --seeds is for --curves: give both, or --seed for the one seed of the demo alone\n"
    )


def test_names_that_the_terminal_can_not_print_do_not_end_the_report(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    sessions.all_sessions()["hostile"].save(path)
    command, env = [sys.executable, "-m", "mpinspect", "report", path], os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert b"schicht.gr\\xf6\\xdfe" in done.stdout.replace(b"\n", b"")


def test_a_closed_pipe_is_not_an_error(run_dir):
    command = f"{sys.executable} -m mpinspect report {run_dir} --json | head -c 20; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert done.stdout == b'{\n  "schema": "mpins'
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("command", "term"),
    [
        ("report", "xterm-256color"),
        ("report", "dumb"),
        ("report", ""),
        ("report of a run", "dumb"),
        ("kernels", "dumb"),
    ],
)
def test_force_color_applies_to_pipes_and_no_color_has_priority(command, term, run_dir, tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": []}')
    (tmp_path / "run.json").write_text('{"command": "train.py", "outcome": "ended", "saw": [], "models": []}')
    words = {
        "report": ["report", str(run_dir)],
        "report of a run": ["report", str(tmp_path)],
        "kernels": ["kernels", str(trace)],
    }[command]
    printed = []
    for force, no in (("1", ""), ("1", "1"), ("", "")):
        for name, value in {"TERM": term, "FORCE_COLOR": force, "NO_COLOR": no}.items():
            monkeypatch.setenv(name, value)
        cli.main(words)
        printed.append(capsys.readouterr().out)
    forced, both, neither = printed
    assert "\x1b[1m" in forced
    assert "\x1b" not in both + neither
    assert both == neither
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", forced).splitlines()]
    # A run's parts have an empty line between them in plain text.
    assert list(filter(None, lines)) == list(filter(None, both.splitlines()))


def test_compile_completes_the_cache(capsys):
    """The loops may already be compiled."""
    pytest.importorskip("numba")
    assert cli.main(["compile"]) == 0
    assert "are compiled" in capsys.readouterr().out


def test_compile_without_numba_names_the_package_to_install(monkeypatch, capsys):
    from mpinspect.counting import fastest

    monkeypatch.setattr(fastest, "warm_up", lambda compile_here: [])
    monkeypatch.setattr(fastest, "cpu_counter", lambda: None)
    assert cli.main(["compile"]) == 2
    assert "pip install 'mpinspect[cpu]'" in capsys.readouterr().err


def test_help_names_every_command_and_the_statuses(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, help in cli.COMMANDS.items():
        assert name in shown
        assert help in shown
    assert "exit status: 0 fine, 1 a finding that --fail-on names, 2 wrong usage or unreadable input" in shown


def test_help_and_the_package_import_little():
    """Commands' modules are imported only when called, and of the standard library only argparse's dependencies."""
    program = """
import sys
import argparse
before = set(sys.modules)
import {module}
try:
    {call}
except SystemExit:
    pass
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""

    def imported(module, call):
        code = program.format(module=module, call=call)
        return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.split())

    ours = {"mpinspect", "mpinspect.commands", "mpinspect.commands.cli", "mpinspect.commands.output"}
    ours |= {"mpinspect.reporting", "mpinspect.reporting.streams", "mpinspect.runtime", "mpinspect.runtime.version"}
    shown = imported("mpinspect.commands.cli", "mpinspect.commands.cli.main(['--help'])")
    assert {name for name in shown if name.startswith("mpinspect")} == ours
    heavy = {"typing", "dataclasses", "inspect", "json", "pathlib", "subprocess", "importlib.metadata"}
    assert not heavy & shown
    assert not heavy & imported("mpinspect", "mpinspect.__version__")
    called = imported("mpinspect.commands.cli", "mpinspect.commands.cli.main(['kernels', '--help'])")
    assert {name for name in called if name.startswith("mpinspect.commands.")} == {
        *(f"mpinspect.commands.{name}" for name in ("cli", "output", "kernels"))
    }


@pytest.mark.parametrize(
    ("command", "rest"),
    [("report", ["x"]), ("diff", ["x", "y"]), ("demo", []), ("lint", ["a:b"]), ("kernels", ["x"]), ("run", ["a.py"])],
)
def test_fail_on_refuses_unknown_findings(command, rest, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--fail-on", "warnings", *rest])
    assert stopped.value.code == 2
    assert "'warnings' is neither a severity nor a finding" in capsys.readouterr().err


def test_every_finding_is_listed():
    import re
    from pathlib import Path

    from mpinspect import ranges
    from mpinspect.ranges.analysis.comparison import RANGE_DIFF_IDS
    from mpinspect.ranges.faults.registry import FINDING_IDS

    texts = [
        path.read_text("utf-8")
        for room in ("analysis", "faults")
        for path in (Path(ranges.__file__).parent / room).rglob("*.py")
        if path.name != "report.py"
    ]
    made = {name for text in texts for name in re.findall(r'(?:Finding|Fault|_checked_twice)\(\s*"([a-z0-9-]+)"', text)}
    assert made == {*FINDING_IDS, *RANGE_DIFF_IDS}


def test_ctrl_c_ends_any_command_with_one_word(monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("mpinspect.ranges.store.read_session", interrupted)
    assert cli.main(["report", "runs/x"]) == 130
    assert capsys.readouterr().err == "mpinspect: stopped\n"


def ends(words, capsys):
    """The status with which wrong usage ends, and what it prints to stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "--evry", "5", "train.py"], "did you mean --every?"),
        (["report", "--jsn", "x"], "did you mean --json?"),
        (["diff", "--zzz=x", "a", "b"], ""),
        (["run", "--output", "runs", "train.py"], ""),
        (["repport"], "did you mean report?"),
        (["zzz"], "there are report, diff, demo"),
    ],
)
def test_a_misspelt_option_or_command_gets_a_suggestion(words, meant, capsys):
    status, said = ends(words, capsys)
    assert status == 2
    assert meant in said
    assert ("did you mean" in said) == meant.startswith("did")


def test_without_a_command_the_help_is_shown(capsys):
    status, said = ends([], capsys)
    assert status == 2
    assert all(help.split(":")[0][:30] in " ".join(said.split()) for help in cli.COMMANDS.values())
