"""No function of the package is longer than a screen, and few have many branches."""

import ast
from pathlib import Path

import mpinspect

PACKAGE = Path(mpinspect.__file__).parent


def test_no_function_is_longer_than_a_screen():
    lengths = {
        f"{path.relative_to(PACKAGE)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert len(lengths) > 4000
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}
