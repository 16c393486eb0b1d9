"""Every Python block of README.md and docs/ runs, in order, and every link to a file in the repository leads somewhere.

A block that can't run here stands below ``<!-- no-run -->`` and must compile all the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<skip><!-- no-run -->\n\s*)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)(?P<target>[^)#\s]+)")


def blocks(page: Path) -> list[tuple[int, bool, str]]:
    """First line, whether it is to run, and code of each block."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start("code")) + 1, found["skip"] is None, found["code"])
        for found in BLOCK.finditer(text)
    ]


def script(page: Path) -> str:
    """The page's running blocks as one program whose line numbers are those of the page."""
    lines: list[str] = []
    for first, runs, code in blocks(page):
        if runs:
            lines += [""] * (first - 1 - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n"


def identity(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if script(page).strip()], ids=identity)
def test_the_code_of_a_page_runs(page, tmp_path):
    program = tmp_path / page.with_suffix(".py").name
    program.write_text(script(page), encoding="utf-8")
    (tmp_path / "cwd").mkdir()
    status, out, err = warm.run(tmp_path / "cwd", ["-W", "error", str(program)], {"MPLBACKEND": "agg"})
    assert status == 0, f"{identity(page)}:\n{out[-2000:]}\n{err[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_the_code_of_a_page_compiles(page):
    for first, _, code in blocks(page):
        compile(code, f"{page.name}:{first}", "exec")


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_every_python_block_is_found(page):
    """A fence that is indented or oddly marked would be passed over in silence."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"```\s*(?:python|py\b)", text)) == len(blocks(page))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=identity)
def test_links_within_the_repository_lead_somewhere(page):
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / found["target"]).exists(), f"{identity(page)} links to {found['target']}"


def test_the_readme_names_the_targets_that_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in set(re.findall(r"^make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
