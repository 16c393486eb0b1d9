"""One room for each question: imports between rooms have no cycle, and modules that read files need no torch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import made_kernels
import pytest
import sessions
from house import Import, imports, modules, room

import mpinspect
from mpinspect.reporting import forms
from mpinspect.runtime import own_code

PACKAGE = Path(mpinspect.__file__).parent
GROUND = {"numeric", "reporting", "runtime"}

#: The rooms that each room may import, also inside functions. Imports for annotations alone are unrestricted.
LAWS = {
    "numeric": set(),
    "runtime": set(),
    "reporting": {"numeric", "runtime"},
    "counting": {"numeric", "runtime"},
    "ranges": {*GROUND, "counting"},
    "shapes": {*GROUND, "counting"},
    "kernels": {*GROUND, "shapes"},
    "training": {*GROUND, "ranges"},
    "run": {*GROUND, "ranges", "shapes", "kernels"},
    "integrations": {*GROUND, "ranges", "run"},
    "demo": {*GROUND, "ranges", "training"},
    "commands": {*GROUND, "counting", "ranges", "shapes", "kernels", "run", "demo"},
}
#: Imports that are forbidden inside rooms. An object's ``str()`` and ``to_dataframe()`` may import its report when called.
OWN_FORMS = {"mpinspect.ranges.analysis.report"}
NEVER = [
    (
        "ranges.windows",
        ("ranges.session", "ranges.store", "ranges.capture", "ranges.faults", "ranges.analysis", "ranges.report"),
    ),
    ("ranges.capture", ("ranges.faults", "ranges.analysis", "ranges.report", "ranges.store.sinks")),
    ("ranges.analysis", ("ranges.faults", "ranges.report", "ranges.capture", "ranges.store")),
    ("ranges.faults.measure", ("ranges.faults.name", "ranges.analysis", "ranges.report")),
    ("ranges.faults.name", ("ranges.faults.measure", "ranges.report", "ranges.capture", "ranges.store")),
    ("shapes.record", ("shapes.analysis", "shapes.report")),
    ("shapes.analysis", ("shapes.report", "shapes.record")),
    ("kernels.capture", ("kernels.analysis", "kernels.report")),
    ("kernels.analysis", ("kernels.report", "kernels.capture")),
]
#: Read saved sessions, traces and recordings, on machines without torch.
WITHOUT_TORCH = (
    *("numeric", "reporting", "ranges.windows", "ranges.session", "ranges.store"),
    *(
        "ranges.analysis",
        "ranges.faults.registry",
        "ranges.records",
        "ranges.faults.name",
        "ranges.report",
        "shapes.records",
        "shapes.operators",
        "shapes.analysis",
        "shapes.report",
    ),
    *("kernels.records", "kernels.trace", "kernels.names", "kernels.analysis", "kernels.report"),
    *("run.reading", "run.report", "run.diff", "commands.report", "commands.diff", "commands.kernels"),
    "integrations.tensorboard_runs",
)
TRACKERS = ("wandb", "mlflow", "trackio")
HEAVY = {"torch", "matplotlib", "tensorboard", "transformers", "pandas", "sklearn", "numba", *TRACKERS}
#: Drawing needs matplotlib, and is imported on demand.
DRAWS = ("plot", "picture")
CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}


MODULES = modules(PACKAGE)


@cache
def _imports() -> dict[str, list[Import]]:
    """Return each module's imports. Reading them takes seconds, which a process that only collects the tests saves."""
    return {name: list(imports(path, MODULES)) for name, path in MODULES.items()}


def _is_in(name: str, *places: str) -> bool:
    """Return whether a module is one of these places below the package, or inside one."""
    return any(f"{name}.".startswith(f"mpinspect.{place}.") for place in places)


def test_there_is_a_law_for_every_room_and_ls_fits_in_fifteen_lines():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(LAWS)
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 15


@pytest.mark.parametrize("here", LAWS)
def test_a_room_imports_only_what_its_law_allows(here):
    wrong = [
        (name, each.name)
        for name, found in _imports().items()
        if room(name) == here
        for each in found
        if each.name.startswith("mpinspect") and room(each.name) not in {here, *LAWS[here]}
    ]
    assert wrong == []


def test_the_laws_have_no_circle():
    below: dict[str, set[str]] = {}
    while len(below) < len(LAWS):
        ready = [each for each in LAWS if each not in below and LAWS[each] <= set(below)]
        assert ready, f"a circle among {set(LAWS) - set(below)}"
        below.update((each, LAWS[each]) for each in ready)


def test_training_knows_ranges_in_one_file():
    assert {
        name
        for name, found in _imports().items()
        if room(name) == "training" and any(room(each.name) == "ranges" for each in found)
    } == {"mpinspect.training.auto_scale"}


@pytest.mark.parametrize(("place", "never"), NEVER, ids=[place for place, _ in NEVER])
def test_inside_a_room_capture_never_analyses_and_analysis_never_formats(place, never):
    wrong = [
        (name, each.name)
        for name, found in _imports().items()
        if _is_in(name, place)
        for each in found
        if _is_in(each.name, *never) and not (each.is_lazy and name in OWN_FORMS)
    ]
    assert wrong == []


def test_modules_that_read_files_need_no_torch():
    """Follows imports transitively, except inside functions."""
    begun = [name for name in MODULES if _is_in(name, *WITHOUT_TORCH) and not name.split(".")[-1].startswith(DRAWS)]
    assert len(begun) > 100
    waiting, seen = [(name, (name,)) for name in begun], set(begun)
    while waiting:
        name, way = waiting.pop()
        for each in _imports()[name]:
            if each.is_lazy:
                continue
            assert each.name.split(".")[0] not in HEAVY, (*way, each.name)
            packages = [each.name.rsplit(".", cut)[0] for cut in range(each.name.count("."))]
            for found in packages:
                if found in MODULES and found not in seen:
                    seen.add(found)
                    waiting.append((found, (*way, found)))


def test_the_package_never_imports_its_root_or_its_command_line():
    for name, found in _imports().items():
        if name not in ("mpinspect", "mpinspect.__main__"):
            assert not any(each.name in ("mpinspect", "mpinspect.commands.cli") for each in found), name


def test_no_module_is_a_catch_all():
    assert not {name for name in MODULES if name.split(".")[-1] in CATCH_ALLS}


def test_importing_the_package_stays_light():
    """Importing mpinspect must not import torch or NumPy: scripts set their numbers of threads before importing them."""
    code = "import sys, mpinspect; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "rich", *HEAVY} & set(loaded)


def test_counting_recording_and_reading_import_no_torch(tmp_path):
    """All of it in one process, in which an attempt to import torch fails even where an ImportError would be caught."""
    sessions.word_model().save(tmp_path)
    code = """
import sys
class Refusing:
    def find_spec(self, name, *_):
        if name == "torch":
            raise SystemExit("torch is imported")
sys.meta_path.insert(0, Refusing())
folder, trace = sys.argv[1:]
import mpinspect, numpy
mpinspect.read_trace(trace)
assert "matplotlib" not in sys.modules
mpinspect.count_exponents(numpy.ones(3))
recorder = mpinspect.Recorder()
recorder.observe("x", {"a": numpy.ones(3)}, step=0)
print(recorder.report())
assert mpinspect.Session.load(folder).windows
from mpinspect.integrations.tensorboard_runs import Runs
runs = Runs({"": folder})
assert b'"map"' in runs.answer(*runs.listing().runs)
from mpinspect.commands import cli
raise SystemExit(cli.main(["report", folder]))
"""
    words = [sys.executable, "-W", "error", "-c", code, tmp_path, made_kernels.TRACES / "h100_bert_small.json.gz"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Suggested loss scale" in done.stdout


def test_names_stored_as_strings_exist():
    """Moving a module could silently break a stack check, a public name or a format."""
    named = [name for value in vars(own_code).values() if isinstance(value, tuple) for name in value]
    assert len(named) > 10
    for name in [*named, *(f"mpinspect.{where}" for where in mpinspect._WHEN_USED.values())]:
        assert importlib.util.find_spec(name), name
    for kind in forms.KINDS.values():
        assert callable(importlib.import_module(kind.document).document)
        assert callable(importlib.import_module(kind.json).to_plain)
        assert not kind.picture or callable(importlib.import_module(kind.picture).save)


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "framework_tests"])
def test_imports_of_benchmarks_and_examples_exist(folder):
    """Most of these files are not run by tests, which would miss a moved name."""
    found = [
        (path, node.module, alias.name)
        for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "mpinspect"
        for alias in node.names
    ]
    assert found
    for path, module, name in found:
        assert f"{module}.{name}" in MODULES or hasattr(importlib.import_module(module), name), (path, module, name)


def test_public_names_agree_with_the_imports_for_type_checkers():
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    told = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in mpinspect._WHEN_USED
    }
    assert told == {name: f"mpinspect.{where}" for name, where in mpinspect._WHEN_USED.items()}
    assert set(mpinspect.__all__) == {*told, "__version__"}
    for name in told:
        assert getattr(mpinspect, name) is not None


#: Constructors of torch that follow ``torch.set_default_device``; the second group ignores the default dtype.
CONSTRUCTORS = {
    *(
        "empty",
        "empty_permuted",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randn",
    ),
    *("range", "scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "zeros"),
}
WHOLE_NUMBERS = {"arange", "as_tensor", "asarray", "randint", "randperm", "tril_indices", "triu_indices"}


def test_no_tensor_is_made_on_the_users_default_device_or_of_the_default_dtype():
    without = [
        f"{name}, line {node.lineno}: torch.{node.func.attr} without {missing}"
        for name in MODULES
        for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in CONSTRUCTORS | WHOLE_NUMBERS) == ("torch", True)
        for missing in ("device", *(["dtype"] if node.func.attr not in WHOLE_NUMBERS else []))
        if missing not in {keyword.arg for keyword in node.keywords}
    ]
    assert not without


def test_the_import_reader_finds_every_form_of_import(tmp_path):
    """The helpers of this file must find every form of import, except those for annotations."""
    path = tmp_path / "bad.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import torch.nn as nn\n"
        "from mpinspect.ranges import session\n"
        "from mpinspect.ranges.session import Session\n"
        "if TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from mpinspect.ranges.report import document\n"
    )
    assert list(imports(path, MODULES)) == [
        Import("typing", False),
        Import("torch.nn", False),
        Import("mpinspect.ranges.session", False),
        Import("mpinspect.ranges.session", False),
        Import("mpinspect.ranges.report.document", True),
    ]


#: The permitted cycles of modules, each with its reason.
CIRCLES = {
    # Session.load and save import the store when called; the store reads and writes the session's records.
    "mpinspect.ranges.session": "mpinspect.ranges.store",
    # A report's str() and to_dataframe() import their code when called.
    "mpinspect.ranges.analysis.report": "mpinspect.ranges.report",
}


def test_modules_import_each_other_in_no_circle():
    imported = {name: {each.name for each in found} & set(MODULES) for name, found in _imports().items()}

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for each in imported[waiting.pop()] - seen:
                seen.add(each)
                waiting.append(each)
        return seen

    after = {name: reached(name) for name in imported}
    circular = {name for name in imported if name in after[name]}
    allowed = {
        name
        for name in circular
        for one, others in CIRCLES.items()
        if name == one or f"{name}.".startswith(f"{others}.")
    }
    assert circular == allowed
    assert all(one in circular for one in CIRCLES)
