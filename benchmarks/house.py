"""Figures on the structure of a checkout's package: rooms, imports between them, cycles, files and lines.

    python benchmarks/house.py [FOLDER ...]

A room is a file or a folder right below the package; an arrow is an import from one room to another, inside functions too, but
not for annotations alone. Two checkouts are compared. tests/project/test_architecture.py reads imports by the same functions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """``name``: dotted, a module's own where one is imported from its package. ``is_lazy``: inside a function."""

    name: str
    is_lazy: bool


def modules(package: Path) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""

    def name(path: Path) -> str:
        parts = path.relative_to(package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    return {name(path): path for path in sorted(package.rglob("*.py"))}


def room(name: str) -> str:
    """Return the room of a module; "" for the package's ``__init__``."""
    return name.split(".")[1] if "." in name else ""


def imports(path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Yield the imports of a file, without those for annotations only. ``known``: the package's modules."""
    for node, is_lazy in _running(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield Import(inside if inside in known else str(node.module), is_lazy)


def _running(node: ast.AST, is_lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every statement below a node, and whether it is inside a function; skip the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            continue
        yield child, is_lazy
        yield from _running(child, is_lazy or isinstance(child, ast.FunctionDef))


def arrows(package: Path) -> set[tuple[str, str]]:
    """Return (from, to) for each pair of rooms with an import."""
    known = modules(package)
    found = {
        (room(name), room(each.name))
        for name, path in known.items()
        for each in imports(path, known)
        if each.name.startswith(f"{package.name}.") and room(name)
    }
    return {(one, other) for one, other in found if one != other}


def circles(found: set[tuple[str, str]]) -> int:
    """Return the number of pairs of rooms that reach each other."""
    reach = {one: {other for first, other in found if first == one} for one, _ in found}
    for _ in reach:
        for one in reach:
            reach[one] |= {far for near in reach[one] for far in reach.get(near, ())}
    return sum(one in reach.get(other, ()) for one in reach for other in reach[one] if one < other)


def main() -> None:
    for folder in sys.argv[1:] or ["."]:
        package = Path(folder).resolve() / "mpinspect"
        files = list(package.rglob("*.py"))
        found = arrows(package)
        rooms = {room(name) for name in modules(package)} - {"", "__main__"}
        lines = sum(path.read_text("utf-8").count("\n") for path in files)
        short = sum(path.read_text("utf-8").count("\n") < 60 for path in files)
        names = [path.name for path in files if path.name != "__init__.py"]
        twice = sum(names.count(name) > 1 for name in set(names))
        print(f"{folder}: {len(rooms)} rooms, {len(found)} arrows, {circles(found)} pairs of rooms in circles;")
        print(
            f"  {len(files)} files, {lines:,} lines; {short} files under 60 lines, {twice} names of two files or more"
        )


if __name__ == "__main__":
    main()
