"""One room for each question; imports between rooms run one way, and what reads files needs no torch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from house import Import, imports, modules, room

import mpinspect
from mpinspect.reporting import forms
from mpinspect.runtime import own_code

PACKAGE = Path(mpinspect.__file__).parent
GROUND = {"numeric", "reporting", "runtime"}

#: What a room may import of the others, inside functions too. What it takes for annotations alone is free.
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
#: Inside rooms: who never imports what. An object's own ``str()`` and ``to_dataframe()`` ask its report when they are called.
OWN_FORMS = {"mpinspect.ranges.analysis.report"}
NEVER = [
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
    *("numeric", "reporting", "ranges.session", "ranges.store"),
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
#: Drawing asks for matplotlib, and is imported where a picture is asked for.
DRAWS = ("plot", "picture")
CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}


MODULES = modules(PACKAGE)
IMPORTS = {name: list(imports(path, MODULES)) for name, path in MODULES.items()}


def _is_in(name: str, *places: str) -> bool:
    """Whether a module is one of these places below the package, or in one of them."""
    return any(f"{name}.".startswith(f"mpinspect.{place}.") for place in places)


def test_there_is_a_law_for_every_room_and_ls_fits_in_fifteen_lines():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(LAWS)
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 15


@pytest.mark.parametrize("here", LAWS)
def test_a_room_imports_only_what_its_law_allows(here):
    wrong = [
        (name, each.name)
        for name, found in IMPORTS.items()
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
        for name, found in IMPORTS.items()
        if room(name) == "training" and any(room(each.name) == "ranges" for each in found)
    } == {"mpinspect.training.auto_scale"}


@pytest.mark.parametrize(("place", "never"), NEVER, ids=[place for place, _ in NEVER])
def test_inside_a_room_capture_never_analyses_and_analysis_never_formats(place, never):
    wrong = [
        (name, each.name)
        for name, found in IMPORTS.items()
        if _is_in(name, place)
        for each in found
        if _is_in(each.name, *never) and not (each.is_lazy and name in OWN_FORMS)
    ]
    assert wrong == []


def test_what_reads_files_needs_no_torch():
    """Followed through whatever is imported on the way, functions aside."""
    begun = [name for name in MODULES if _is_in(name, *WITHOUT_TORCH) and not name.split(".")[-1].startswith(DRAWS)]
    assert len(begun) > 100
    waiting, seen = [(name, (name,)) for name in begun], set(begun)
    while waiting:
        name, way = waiting.pop()
        for each in IMPORTS[name]:
            if each.is_lazy:
                continue
            assert each.name.split(".")[0] not in HEAVY, (*way, each.name)
            packages = [each.name.rsplit(".", cut)[0] for cut in range(each.name.count("."))]
            for found in packages:
                if found in MODULES and found not in seen:
                    seen.add(found)
                    waiting.append((found, (*way, found)))


def test_nobody_inside_imports_the_face_or_the_command_line():
    for name, found in IMPORTS.items():
        if name not in ("mpinspect", "mpinspect.__main__"):
            assert not any(each.name in ("mpinspect", "mpinspect.commands.cli") for each in found), name


def test_no_module_is_a_catch_all():
    assert not {name for name in MODULES if name.split(".")[-1] in CATCH_ALLS}


def test_importing_the_package_stays_light():
    """Neither torch nor NumPy: a script sets how many threads they may have before it imports them."""
    code = "import sys, mpinspect; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "rich", *HEAVY} & set(loaded)


def test_names_kept_as_strings_name_something():
    """A careless move would make a stack check match nothing, a public name fail, a form disappear, without an error."""
    named = [name for value in vars(own_code).values() if isinstance(value, tuple) for name in value]
    assert len(named) > 10
    for name in [*named, *(f"mpinspect.{where}" for where in mpinspect._WHEN_USED.values())]:
        assert importlib.util.find_spec(name), name
    for kind in forms.KINDS.values():
        assert callable(importlib.import_module(kind.document).document)
        assert callable(importlib.import_module(kind.json).to_plain)
        assert not kind.picture or callable(importlib.import_module(kind.picture).save)


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "framework_tests"])
def test_what_stands_beside_the_package_imports_what_there_is(folder):
    """Most of it runs on no test machine, so that a name that has moved away would be found by a user."""
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


def test_public_names_are_where_type_checkers_are_told_they_are():
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


#: Constructors of torch that follow ``torch.set_default_device``; of the second kind the default dtype is without effect.
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


@pytest.mark.parametrize("name", MODULES)
def test_no_tensor_is_made_on_the_users_default_device_or_of_the_default_dtype(name):
    without = [
        f"line {node.lineno}: torch.{node.func.attr} without {missing}"
        for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in CONSTRUCTORS | WHOLE_NUMBERS) == ("torch", True)
        for missing in ("device", *(["dtype"] if node.func.attr not in WHOLE_NUMBERS else []))
        if missing not in {keyword.arg for keyword in node.keywords}
    ]
    assert not without


def test_the_checks_above_see_what_they_should(tmp_path):
    """A check of this file's own eyes: every form of import is seen, annotations are not."""
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


#: Circles of modules, each with the reason for which it stands.
CIRCLES = {
    # Session.load and save, and windows made of columns, are the session's own methods; store is made of its records.
    "mpinspect.ranges.session": "mpinspect.ranges.store",
    # A report's own forms, str() and to_dataframe(), ask for the code that makes them when they are called.
    "mpinspect.ranges.analysis.report": "mpinspect.ranges.report",
}


def test_modules_import_each_other_in_no_circle():
    imported = {name: {each.name for each in found} & set(MODULES) for name, found in IMPORTS.items()}

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
