"""Imports flow one way: cli -> inspector -> reports -> analysis -> session -> exponents -> formats."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpinspect
from mpinspect import reports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpinspect"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: What a room (a module or folder right below the package) may import of the others. Lazy imports count too.
ALLOWED = {
    "formats": set(),
    "exponents": {"formats"},
    "decoding": set(),
    "appending": set(),
    "session": {"decoding", "exponents", "formats", "session_file", "tensor_columns"},
    "tensor_columns": {"exponents", "session"},
    "session_file": {"appending", "decoding", "session", "exponents", "formats", "tensor_columns"},
    "background": set(),
    "garbage_collection": set(),
    "gpus": set(),
    "matmuls": set(),
    "kernels": set(),
    "matmul_ops": {"matmuls"},
    "trace_file": {"decoding", "garbage_collection", "kernels", "matmul_ops"},
    "analysis": {
        *("session", "exponents", "formats", "gpus", "matmuls", "kernels", "matmul_ops", "reports"),
        "garbage_collection",
    },
    "reports": {
        *("analysis", "appending", "background", "session", "exponents", "formats", "matmuls", "streams"),
        *("tensor_columns", "version"),
    },
    "user_line": set(),
    "workers": set(),
    "wrappers": set(),
    "counting": {"exponents", "formats", "workers"},
    "emulation": {"workers"},
    "capture": {
        *("background", "counting", "emulation", "session", "exponents", "formats", "matmuls", "matmul_ops"),
        *("appending", "streams", "tensor_columns", "user_line", "wrappers"),
    },
    "training": {"emulation", "formats", "user_line"},
    "auto_scale": {"analysis", "inspector", "training"},
    "mixed_precision": {"auto_scale", "emulation", "training", "user_line"},
    "session_sinks": {"capture", "reports", "session", "session_file"},
    "streams": set(),
    "last_words": {"analysis", "streams"},
    "recorder": {"analysis", "capture", "last_words", "session", "session_sinks", "version"},
    "inspector": {"analysis", "capture", "last_words", "session", "session_sinks", "version", "wrappers"},
    "integrations": {"analysis", "capture", "inspector", "last_words", "session"},
    "run_directory": {"analysis", "decoding", "kernel_profile", "launch", "session_file", "trace_file"},
    "launch": {
        *(
            "analysis",
            "capture",
            "decoding",
            "inspector",
            "kernel_profile",
            "matmuls",
            "reports",
            "session",
            "session_file",
        ),
        *("shape_lint", "streams", "version", "wrappers"),
    },
    "shape_lint": {"analysis", "capture", "gpus"},
    "kernel_profile": {"analysis", "capture", "gpus", "trace_file"},
}
#: An object's __str__ and save() reach the reports in this one place; a session's load and save reach the file likewise.
#: Merging likewise reaches the columns that windows may be kept as.
LAZY_ONLY = {
    ("analysis", "reports"): {"rendering.py", "report.py"},
    ("session", "session_file"): {"session.py"},
    ("session", "tensor_columns"): {"session.py"},
}

#: Rooms that work on saved sessions, on machines without torch.
CORE = (
    *("decoding", "formats", "exponents", "session", "tensor_columns", "session_file", "analysis"),
    *("gpus", "matmuls", "kernels", "matmul_ops", "trace_file"),
)
HEAVY = ("torch", "matplotlib", "tensorboard", "transformers", "pandas", "sklearn", "wandb", "numba", "triton")

CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}


def room(path: Path) -> str:
    """The module or folder right below the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Dotted names that a file imports, and whether it does so inside a function. Imports for annotations only are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {node for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for node in ast.walk(outer)}
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            # "from mpinspect import session" imports the module mpinspect.session.
            yield from ((f"{base}.{alias.name}" if base == "mpinspect" else base, node in lazy) for alias in node.names)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = ["mpinspect", *path.relative_to(PACKAGE).parts[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def module_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in MODULES if room(path) in ALLOWED], ids=module_path)
def test_a_room_imports_only_what_lies_below_it(path):
    here = room(path)
    for name, lazy in imports(path):
        parts = name.split(".")
        if parts[0] != "mpinspect" or len(parts) == 1 or parts[1] == here:
            continue
        assert parts[1] in ALLOWED[here], f"{module_path(path)} imports {name}"
        if (here, parts[1]) in LAZY_ONLY:
            assert lazy, f"{module_path(path)} imports {name} at its top"
            assert path.name in LAZY_ONLY[here, parts[1]], f"{module_path(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=module_path)
def test_nobody_inside_imports_the_face_or_the_command_line(path):
    if room(path) in ("__init__", "__main__"):
        return
    for name, _ in imports(path):
        assert name != "mpinspect", f"{module_path(path)} imports the package's face"
        assert not name.startswith("mpinspect.cli"), f"{module_path(path)} imports {name}"


def test_reports_do_not_import_each_other():
    """But for their registry, __init__, and what the text of several shares: table.py, which renders no report itself."""
    siblings = {path.stem for path in (PACKAGE / "reports").glob("*.py")} - {"__init__"}
    doors = {path.stem for path in (PACKAGE / "reports").glob("*.py") if "def render(" in path.read_text("utf-8")}
    for path in (PACKAGE / "reports").glob("*.py"):
        if path.stem == "__init__":
            continue
        for name, _ in imports(path):
            parts = name.split(".")
            if parts[:2] == ["mpinspect", "reports"] and len(parts) > 2 and parts[2] in siblings:
                assert parts[2] not in doors, f"{module_path(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=module_path)
def test_no_module_is_a_catch_all(path):
    assert path.stem not in CATCH_ALLS


@pytest.mark.parametrize("path", [path for path in MODULES if room(path) in CORE], ids=module_path)
def test_the_core_needs_neither_torch_nor_matplotlib(path):
    for name, _ in imports(path):
        assert name.split(".")[0] not in HEAVY, f"{module_path(path)} imports {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if room(path) == "capture"], ids=module_path)
def test_capture_knows_no_analysis(path):
    assert not any(name.startswith(("mpinspect.analysis", "mpinspect.reports")) for name, _ in imports(path))


def test_importing_the_package_stays_light():
    """Optional and slow packages are imported where they are used."""
    code = "import sys, mpinspect; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    for name in ("matplotlib", "tensorboard", "transformers", "pandas", "sklearn", "rich"):
        assert name not in loaded


def test_the_checks_above_see_what_they_should(tmp_path, monkeypatch):
    """A check of this file's own eyes: every form of import is seen, annotations are not."""
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "analysis").mkdir()
    path = tmp_path / "analysis" / "bad.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import torch.nn as nn\n"
        "from mpinspect import capture\n"
        "from . import ranges\n"
        "from .. import cli\n"
        "if TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from mpinspect.reports import text\n"
    )
    assert dict(imports(path)) == {
        "typing": False,
        "torch.nn": False,
        "mpinspect.capture": False,
        "mpinspect.analysis": False,
        "mpinspect.cli": False,
        "mpinspect.reports": True,
    }


def test_names_kept_as_strings_name_something():
    """A careless move would make a stack check match nothing, a public name fail, a form disappear, without an error."""
    from mpinspect import own_code

    named = [name for value in vars(own_code).values() if isinstance(value, tuple) for name in value]
    assert len(named) > 10
    for name in [*named, *(f"mpinspect.{where}" for where in mpinspect._WHEN_USED.values())]:
        assert importlib.util.find_spec(name), name
    for kind, forms in reports.FORMS.items():
        for suffix in forms:
            module = reports.form(kind, suffix)
            assert hasattr(module, "render") or hasattr(module, "save"), module


def test_public_names_are_found_where_the_type_checker_is_told_they_are():
    for name in mpinspect._WHEN_USED:
        assert getattr(mpinspect, name).__name__ if not name.isupper() else getattr(mpinspect, name)
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    told = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "mpinspect.version"
        for alias in node.names
    }
    lazily = {name: f"mpinspect.{where}" for name, where in mpinspect._WHEN_USED.items()}
    assert lazily == {name: where for name, where in told.items() if name in lazily}
