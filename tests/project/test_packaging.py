"""Packaging: an editable install that type checkers and editors can follow, and the files of a wheel."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, since building adds files next to them."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("mpinspect", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def built(source: Path, hook: str) -> zipfile.ZipFile:
    """Build a wheel with a hook of the installed setuptools, as pip does."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for setuptools >= 77")
    code = f"from setuptools import build_meta; print(build_meta.{hook}('dist-{hook}'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(source / f"dist-{hook}" / done.stdout.splitlines()[-1])


def test_an_editable_install_is_a_path_that_editors_follow(source: Path) -> None:
    """setuptools' alternative, an import hook, is code that neither mypy nor pyright runs."""
    wheel = built(source, "build_editable")
    (path,) = [name for name in wheel.namelist() if name.endswith(".pth")]
    (line,) = wheel.read(path).decode().splitlines()
    assert Path(line).samefile(source)
    assert not [name for name in wheel.namelist() if name.endswith(".py")]


def test_the_oldest_tensorboard_works_with_any_setuptools() -> None:
    """Up to 2.20, its command imports pkg_resources, which setuptools has removed."""
    (floor,) = re.findall(
        r'^ +"tensorboard>=(\d+)\.(\d+)",$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    assert (2, 21) <= tuple(map(int, floor)) <= tuple(map(int, version("tensorboard").split(".")[:2]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tensorboard.main", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == version("tensorboard"), done.stderr


def test_a_wheel_contains_only_the_package(source: Path) -> None:
    names = {name for name in built(source, "build_wheel").namelist() if ".dist-info/" not in name}
    package = {path.relative_to(source).as_posix() for path in (source / "mpinspect").rglob("*") if path.is_file()}
    assert names == package
    assert "mpinspect/py.typed" in names
