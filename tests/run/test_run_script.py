"""``mpinspect run`` runs a script exactly as Python does: both are run in new processes and compared byte for byte."""

import json
import math
import signal
import subprocess
import sys

import launched
import pytest
from launched import RUN_DIR, bare, silent, watched, write

from mpinspect.commands import cli
from mpinspect.commands import run as run_command
from mpinspect.ranges import session
from mpinspect.ranges.kinds import KINDS
from mpinspect.run.options import LaunchOptions

FACTS = """
import os, sys
print(list(globals()), [type(value).__name__ for value in globals().values()])
print(sys.argv, sys.path, os.getcwd(), sys.flags)
print(__name__, __file__, __spec__ and __spec__.name, __package__, __cached__, __doc__)
print(type(__loader__).__name__, __loader__.name, __loader__.path, type(__builtins__).__name__)
print(sys.modules["__main__"].__dict__ is globals(), sys.excepthook is sys.__excepthook__)
number: int = 3
print(__annotations__)
def typed(a: 1 + 1): ...
print(typed.__annotations__)
print("torch" in sys.modules, "numpy" in sys.modules)
"""

PICKLES = """
import pickle
class Kept: ...
text = pickle.dumps(Kept())
print(text, type(pickle.loads(text)) is Kept)
"""

EXIT_HANDLERS = """
import atexit, sys, threading, time
def late():
    time.sleep(0.2)
    print("thread", "__file__" in globals())
class Dies:
    def __init__(self, name): self.name = name
    def __del__(self): print("gone", self.name)
first, second = Dies("first"), Dies("second")
sys.kept = Dies("in sys")
atexit.register(lambda: print("handler", "__file__" in globals()))
threading.Thread(target=late).start()
unclosed = open("unclosed.txt", "w")
unclosed.write("kept")
print("end of the script")
"""

HOOK = """
import sys
def hook(kind, error, trace):
    print(kind, error, trace.tb_frame.f_code.co_name, trace.tb_next, sys.excepthook is hook, __file__)
    {body}
sys.excepthook = hook
1 / 0
"""

CHAIN = """
def fail(text):
    raise ValueError(text)
try:
    fail("one\\ntwo \u00e9")
except ValueError as error:
    raise RuntimeError("three") from error
"""

#: Scripts whose stdout, stderr and exit status must equal plain Python's.
SCRIPTS = {
    "facts": FACTS,
    "docstring": '"""doc"""\nprint(__doc__)',
    "empty": "",
    "exception": CHAIN,
    "exception in a handler": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    int('x')",
    "base exception": "class Mine(BaseException): ...\nraise Mine('x')",
    "exception without words": "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "syntax error": "print(1)\nx = = 2\n",
    "indentation error": "if 1:\nx = 2\n",
    "import error": "import nothing_of_that_name",
    "excepthook": HOOK.format(body=""),
    "excepthook that fails": HOOK.format(body="raise KeyError"),
    "excepthook that exits": HOOK.format(body="sys.exit(7)"),
    "no excepthook": "import sys\ndel sys.excepthook\n1 / 0",
    "handlers and threads": EXIT_HANDLERS,
    "handlers after an exception": EXIT_HANDLERS + "1 / 0",
    "handlers after an exit": EXIT_HANDLERS + "sys.exit(2)",
    "pickling": PICKLES,
    "stdout closed": "import sys\nprint(1)\nsys.stdout.close()",
    "stdout unflushed, then closed below": "import os\nprint(1)\nos.close(1)",
    "no streams": "import sys\nprint(1)\nsys.stdout = sys.stderr = None\n1 / 0",
    "another directory": "import os\nos.mkdir('x')\nos.chdir('x')\nprint(os.getcwd())\nos.rmdir('../x')",
    "signals": "import signal\nprint([signal.getsignal(s) for s in sorted(signal.valid_signals())])",
    "warnings": "import warnings\nwarnings.warn('x')\nwarnings.warn('y', DeprecationWarning)\nprint(warnings.filters)",
    "file descriptors": "import os\nprint(sorted(os.listdir('/proc/self/fd')))",
    "no __main__": "import sys\nsys.modules['__main__'] = None\nprint(1)",
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "work"


def same(folder, files, *words, **how):
    """Run the files with Python and with the command; assert that both end alike and return the command's end."""
    write(folder, files)
    alone, with_us = silent(folder, *words, **how)
    assert with_us == alone
    return with_us


@pytest.mark.parametrize("name", SCRIPTS)
def test_output_and_status_are_pythons(name, folder):
    same(folder, SCRIPTS[name], "train.py", "--every", "-m", "--", "--lint", "x y")
    if "unclosed" in SCRIPTS[name]:
        assert (folder / "unclosed.txt").read_text() == "kept"


def test_a_file_next_to_the_script_may_shadow_a_module_that_mpinspect_uses(folder):
    """The script must import the file next to it, as under Python."""
    look = "import argparse, shlex\nprint(argparse.__file__, shlex.__file__)"
    with_us = same(folder, {"src/train.py": look, "src/argparse.py": "", "src/shlex/__init__.py": ""}, "src/train.py")
    assert with_us.out.split() == [str(folder / "src" / "argparse.py"), str(folder / "src" / "shlex" / "__init__.py")]


@pytest.mark.parametrize("code", ["", "3", "'words'", "True", "-1"])
def test_exit_statuses_are_pythons(code, folder):
    same(folder, f"import sys\nprint(1)\nsys.exit({code})", "train.py")


def test_stdin_is_the_scripts(folder):
    with_us = same(folder, "import sys\nprint(input('name? '), sys.stdin.read())", "train.py", stdin="a\nb\n")
    assert with_us.out == "name? a b\n\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_command_as_they_end_a_script(number, folder):
    with_us = same(folder, "import time\nprint('begun', flush=True)\ntime.sleep(60)", "train.py", interrupt=number)
    assert with_us.status == -number


def test_ctrl_c_is_reported(folder, tmp_path):
    write(folder, "import time\nprint('begun', flush=True)\ntime.sleep(60)")
    ended = watched(folder, "train.py", interrupt=signal.SIGINT)
    assert ended.status == -signal.SIGINT
    assert "stopped by Ctrl-C" in ended.err
    record = json.loads((tmp_path / RUN_DIR / "run.json").read_text())
    assert (record["outcome"], record["status"]) == ("stopped by Ctrl-C", None)


#: Other ways to name the program: files, and the arguments after the options.
PROGRAMS = {
    "module": (
        {"package/__init__.py": "import sys; print(sys.argv)", "package/train.py": FACTS},
        ["-m", "package.train"],
    ),
    "module in one word": ({"train.py": FACTS + "1 / 0"}, ["-mtrain"]),
    "package": ({"package/__init__.py": "", "package/__main__.py": FACTS + "1 / 0"}, ["-m", "package"]),
    "module that is missing": ({"train.py": ""}, ["-m", "nothing.train"]),
    "module whose package fails": ({"package/__init__.py": "1 / 0", "package/train.py": ""}, ["-m", "package.train"]),
    "directory": ({"folder/__main__.py": FACTS + "1 / 0", "folder/beside.py": ""}, ["folder"]),
    "directory without __main__": ({"folder/train.py": ""}, ["folder"]),
    "path with dots": ({"folder/train.py": FACTS + "1 / 0"}, ["./folder/../folder/train.py"]),
    "no suffix": ({"train": FACTS}, ["train"]),
    "a space": ({"my train.py": FACTS + "1 / 0"}, ["my train.py"]),
    "not UTF-8": ({"train\udcff.py": "import sys\nprint(ascii(sys.argv), ascii(__file__))\n1 / 0"}, ["train\udcff.py"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_every_form(name, folder):
    files, words = PROGRAMS[name]
    same(folder, files, *words, "-m", "--steps", "3")


@pytest.mark.parametrize(
    ("name", "stdin"),
    [
        *(("facts", False), ("facts", True), ("exception", False), ("exception", True), ("syntax error", False)),
        *(("handlers after an exception", True), ("pickling", False), ("another directory", True)),
    ],
)
def test_programs_from_an_argument_or_stdin(name, stdin, folder):
    # The working directory is first on the path.
    write(folder, {"beside.py": "print('beside')"})
    code = f"import beside\n{SCRIPTS[name]}\n"
    words, how = (["-"], {"stdin": code}) if stdin else (["-c", code], {})
    alone, with_us = silent(folder, *words, "--every", "-c", "x y", **how)
    assert with_us == alone


def test_code_as_an_argument_is_recorded_by_its_beginning(tmp_path):
    (tmp_path / "work").mkdir()
    code = "import sys\n" + "sys.stdin.read()\n" * 20 + "print(sys.stdin is None)"
    ended = watched(tmp_path / "work", f"-c{code}", "a", stdin="x")
    assert (ended.status, ended.out) == (0, "False\n")
    record = json.loads((tmp_path / RUN_DIR / "run.json").read_text())
    assert (record["target"], record["is_code"], record["arguments"]) == (code, True, ["a"])
    assert record["command"] == "-c 'import sys sys.stdin.read() sys.stdin.read() sys.stdin.read(...' a"
    assert [LaunchOptions("x", is_code=True).stem, LaunchOptions("-").stem] == ["code", "stdin"]


def test_a_compiled_script(folder):
    import py_compile

    write(folder, FACTS)
    py_compile.compile(str(folder / "train.py"), cfile=str(folder / "train.pyc"))
    alone, with_us = silent(folder, "train.pyc")
    assert with_us == alone


@pytest.mark.parametrize("mode", ["PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONOPTIMIZE"])
def test_pythons_own_modes_reach_the_script(mode, folder):
    same(folder, FACTS + "assert sys.argv == 0, 'optimised away?'", "train.py", env={mode: "1"})


def test_a_closed_stdout(folder, tmp_path):
    """As with ``| head``, Python's error message and exit status are preserved."""
    write(folder, "for i in range(100_000): print(i)")
    outcomes = []
    for command in (["train.py"], ["-m", "mpinspect", "run", "--log-dir", str(tmp_path / RUN_DIR), "train.py"]):
        line = f"set -o pipefail; RANK=1 WORLD_SIZE=2 '{sys.executable}' {' '.join(command)} | head -n 1"
        outcomes.append(subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False))
    alone, with_us = outcomes
    assert (with_us.returncode, with_us.stdout, with_us.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert "BrokenPipeError" in with_us.stderr


def test_a_failing_import_of_torch_prints_the_same_traceback(tmp_path):
    for number, torch in enumerate(
        ["def load():\n    raise OSError('no library')\nload()", "import nothing", "x = = 2"]
    ):
        folder = tmp_path / str(number) / "work"
        write(folder, {"train.py": "import torch", "torch.py": torch})
        alone, with_us = silent(folder, "train.py")
        assert with_us == alone


def test_imported_modules_equal_pythons(folder):
    look = "import sys, torch\nprint(torch.__spec__.loader is torch.__loader__, vars(torch.__loader__), len(sys.meta_path))"
    write(
        folder,
        {"train.py": look + "\nimport multiprocessing.process\nprint(len(sys.meta_path))", "torch.py": "print(1)"},
    )
    alone, with_us = silent(folder, "train.py")
    # The import hook removes itself once its module is imported.
    assert with_us.out.splitlines()[-1] == alone.out.splitlines()[-1]
    assert with_us.out.splitlines()[0] == "1"
    assert with_us.out.split("} ")[0] == alone.out.split("} ")[0]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        (["a.py"], ["--", "a.py"], []),
        (["a.py", "--every", "3", "--", "-m"], ["--", "a.py"], ["--every", "3", "--", "-m"]),
        (["--every", "3", "--lint", "a.py", "--lint"], ["--every", "3", "--lint", "--", "a.py"], ["--lint"]),
        (["--every=3", "a.py", "b"], ["--every=3", "--", "a.py"], ["b"]),
        (["--lin", "a.py"], ["--lin", "--", "a.py"], []),
        (["-m", "a.b", "-m", "c"], ["-m", "--", "a.b"], ["-m", "c"]),
        (["--lint", "-c", "1", "-c", "2"], ["--lint", "-c", "--", "1"], ["-c", "2"]),
        (["-c1", "x"], ["-c", "--", "1"], ["x"]),
        (["-", "--every"], ["--", "-"], ["--every"]),
        (["-ma.b", "x"], ["-m", "--", "a.b"], ["x"]),
        (["--kernels", "--", "-a.py", "--", "b"], ["--kernels", "--", "-a.py"], ["--", "b"]),
        (["--log-dir", "-m", "a.py"], ["--log-dir", "-m", "--", "a.py"], []),
        (["-o", "log", "a.py", "-o"], ["-o", "log", "--", "a.py"], ["-o"]),
        (["-olog", "a.py"], ["-olog", "--", "a.py"], []),
        (["-m"], ["-m", "--"], []),
        ([], [], []),
    ],
)
def test_arguments_after_the_script_belong_to_the_script(words, ours, theirs):
    assert run_command.split(words) == (ours, theirs)


def test_options_without_a_value_are_known():
    import argparse

    parser = argparse.ArgumentParser()
    run_command.add_options(parser)
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    assert flags - {"-m", "-c"} == set(run_command.FLAGS)


def test_options_reach_the_launch(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    asked = []
    monkeypatch.setattr("mpinspect.run.launch", asked.append)
    words = "--every 5 --dense 0 --steps 7 --kinds weight,update --include a.* --include b --exclude c --log-dir d --no-watch"
    assert cli.main(["run", *words.split(), "--lint", "--kernels", "--gpu", "Hopper", str(script), "--every", "x"]) == 0
    (given,) = asked
    assert given == LaunchOptions(
        target=str(script),
        arguments=("--every", "x"),
        log_dir="d",
        kinds=("weight", "update"),
        include=("a.*", "b"),
        exclude=("c",),
        every=5,
        dense=0,
        steps=7,
        lint=True,
        kernels=True,
        gpu="Hopper",
        watch=False,
    )


@pytest.mark.parametrize(
    ("words", "every", "share"),
    [
        ("", 10, None),
        ("--max-overhead 0.02", 1, 0.02),
        ("--every 5 --max-overhead=0.02", 5, 0.02),
        ("--max-overhead none", 10, math.inf),
    ],
)
def test_every_is_the_least_interval_of_a_budget(words, every, share, monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    asked = []
    monkeypatch.setattr("mpinspect.run.launch", asked.append)
    assert cli.main(["run", *words.split(), str(script)]) == 0
    assert (asked[0].every, asked[0].max_overhead) == (every, share)


def test_the_kinds_are_the_sessions():
    assert KINDS == session.KINDS


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-m"],
        ["--every", "0", "a.py"],
        ["--max-overhead", "2%", "a.py"],
        ["--max-overhead", "1", "a.py"],
        ["--max-overhead", "nan", "a.py"],
        ["--kinds", "gradients", "a.py"],
        ["--gpu", "nothing", "a.py"],
        ["--bogus", "a.py"],
        ["--bogus=1", "a.py"],
    ],
)
def test_wrong_usage_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", *words])
    assert stop.value.code == 2
    assert "usage: mpinspect run [options] (SCRIPT | -m MODULE | -c CODE | -)" in capsys.readouterr().err


def test_a_script_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "nothing.py"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "mpinspect: can't open file 'nothing.py': there is no such script\n")
    assert list(tmp_path.iterdir()) == []


# -- the run directory ------------------------------------------------------------------------------------------------


def test_the_run_directory_records_the_command_and_its_outcome(tmp_path):
    write(tmp_path, "print('out')\nraise ValueError('one\\ntwo')")
    ended = launched.run(tmp_path, [*launched.MPINSPECT, "train.py", "a b"])
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith("train-20")
    assert ended.out == "out\n"
    assert ended.err.splitlines()[0] == (
        f"mpinspect: recording into runs/{directory.name} (mpinspect report reads it back, even if the run is killed)"
    )
    assert {path.name for path in directory.iterdir()} == {"run.json", "report.md", "report.json", "report.html"}
    record = json.loads((directory / "run.json").read_text())
    assert (record["command"], record["outcome"], record["status"]) == ("train.py 'a b'", "ValueError: one", 1)
    assert record["saw"] == ["torch was never imported: there was nothing to inspect"]


def test_a_run_never_writes_into_another(folder, tmp_path):
    write(folder, "")
    for expected in (RUN_DIR, f"{RUN_DIR}-2", f"{RUN_DIR}-3"):
        ended = watched(folder, "train.py")
        assert (tmp_path / expected / "report.json").exists()
    assert f"{RUN_DIR} holds another run already: recording into" in ended.err


@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_default_directory_that_can_not_be_made(rank, folder, tmp_path):
    write(folder, {"train.py": "print(1)", "runs": "a file"})
    (tmp_path / "temporary").mkdir()
    ended = launched.run(folder, [*launched.MPINSPECT, "train.py"], env={"TMPDIR": str(tmp_path / "temporary"), **rank})
    assert (ended.status, ended.out) == (0, "1\n")
    (directory,) = (tmp_path / "temporary").iterdir()
    assert f"can't be used (Not a directory): recording into {directory} instead" in ended.err
    assert (directory / ("rank0" if rank else "") / "report.md").exists()


@pytest.mark.parametrize(("wanted", "why"), [("file", "it is not a folder"), ("file/x", "Not a directory")])
def test_a_directory_that_was_asked_for_and_can_not_be_made(wanted, why, tmp_path):
    write(tmp_path, {"train.py": "print(1)", "file": "kept"})
    ended = launched.run(tmp_path, [*launched.MPINSPECT, "--log-dir", wanted, "train.py"])
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == f"mpinspect: --log-dir {wanted} can't be used: {why}\n"
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("words", [["-m", "no.such.mod"], ["folder"]])
def test_a_program_that_python_does_not_find(words, folder, tmp_path):
    write(folder, {"folder/train.py": ""})
    alone, ended = bare(folder, *words), watched(folder, *words)
    assert (ended.status, ended.out) == (alone.status, "")
    lines = ended.err.splitlines()
    assert lines[1:-1] == alone.err.splitlines()
    assert lines[-1].startswith("mpinspect: the script could not be started: nothing was recorded (")
    directory = tmp_path / RUN_DIR
    assert [path.name for path in directory.iterdir()] == ["run.json"]
    record = json.loads((directory / "run.json").read_text())
    assert record["status"] == 1
    assert record["outcome"].startswith("exit status 1: ")


def test_a_module_that_exits_by_itself_was_started(folder):
    write(
        folder,
        {"train.py": "import runpy, sys\nrunpy._run_module_as_main('beside')", "beside.py": "raise SystemExit(3)"},
    )
    assert "could not be started" not in watched(folder, "-m", "train").err


def test_a_directory_that_the_script_removes(folder, tmp_path):
    write(folder, f"import shutil\nshutil.rmtree({str(tmp_path / RUN_DIR)!r})\nprint(1)")
    ended = watched(folder, "train.py")
    assert (ended.status, ended.out) == (0, "1\n")
    assert json.loads((tmp_path / RUN_DIR / "run.json").read_text())["outcome"] == "ended"


def test_a_script_that_can_not_be_compiled_leaves_no_run(tmp_path):
    write(tmp_path, "x = = 2")
    ended = launched.run(tmp_path, [*launched.MPINSPECT, "train.py"])
    assert ended.status == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_internal_error_at_the_end_is_reported_in_one_line(folder, tmp_path):
    write(folder, "import sys\nsys.modules['mpinspect.run.report'] = None\nprint(1)\nsys.exit(3)")
    ended = watched(folder, "train.py")
    assert (ended.status, ended.out) == (3, "1\n")
    assert [line[:40] for line in ended.err.splitlines()] == [
        f"mpinspect: recording into {tmp_path}"[:40],
        "mpinspect: the report could not be made ",
    ]


# -- with torch -------------------------------------------------------------------------------------------------------

TRAINS = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
import atexit, torch
atexit.register(print, "handler")
class Net(torch.nn.Linear): ...
print(torch.get_num_threads())
torch.manual_seed(0)
model = Net(8, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    loss = (model(torch.randn(2, 8)) * 1e-9).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item().hex(), torch.rand(1).item())
open("open.txt", "w").write("kept")
sys.exit(int(sys.argv[1]))
"""


def test_a_forked_process_behaves_like_a_new_one(folder):
    write(
        folder,
        """
import atexit, os, sys, threading, time, warnings
atexit.register(print, "handler")
threading.Thread(target=lambda: time.sleep(0.1) or print("thread")).start()
print(__name__, __file__, sys.argv, sys.path, os.getcwd(), os.environ["ASKED"], sys.stdin.read())
print(sys.modules["__main__"].__dict__ is globals(), sorted(set(globals()) - {"__cached__"}), warnings.filters[0][0])
raise ValueError("the end")
""",
    )
    words, given = ["-W", "error", "train.py", "-m", "a b"], {"env": {"ASKED": "1"}, "stdin": "x"}
    own, forked = bare(folder, *words, **given), bare(folder, *words, **given, forked=True)
    assert (forked.status, forked.out) == (own.status, own.out)
    assert forked.err.splitlines()[-1] == own.err.splitlines()[-1] == "ValueError: the end"


def test_a_training_script_is_watched_from_its_import_of_torch_on(folder, tmp_path):
    write(folder, TRAINS)
    ended = watched(folder, "train.py", "0", env={"OMP_NUM_THREADS": "2"})
    threads, *out = ended.out.splitlines()
    # The script sets the number before it imports torch.
    assert threads == "1"
    assert (ended.status, out) == (0, bare(folder, "train.py", "0", forked=True).out.splitlines()[1:])
    assert "mpinspect run train.py" in ended.err
    assert (tmp_path / RUN_DIR / "Net" / "session.mpinspect").exists()
    assert json.loads((tmp_path / RUN_DIR / "run.json").read_text())["models"][0]["name"] == "Net"


@pytest.mark.parametrize(
    ("what", "own", "status"), [("gradients-flushed", 0, 1), ("warning", 0, 0), ("gradients-flushed", 3, 3)]
)
def test_fail_on(what, own, status, folder):
    """The gradients are far below FP16's range, but the script does not use FP16: a finding, but no warning."""
    write(folder, TRAINS)
    ended = watched(folder, "train.py", str(own), options=["--fail-on", what], forked=True)
    assert (ended.status, ended.out.splitlines()[-1]) == (status, "handler")
    assert (folder / "open.txt").read_text() == "kept"


def test_a_pattern_without_a_match_is_reported_first(folder, tmp_path):
    write(folder, TRAINS)
    watched(folder, "train.py", "0", options=["--include", "encodre.*", "--include", "*"], forked=True)
    saw = json.loads((tmp_path / RUN_DIR / "run.json").read_text())["saw"]
    assert saw[0].startswith("the pattern 'encodre.*' matches no module")
