"""Every Python block of README.md and docs/ runs, in order, and every link to a file in the repository is valid.

A block that can't run here follows ``<!-- no-run -->`` and must still compile.

In docs/tutorials/ the shown output is compared with the real output. A Python block that begins with ``# train.py`` is that
file, and a ``diff`` block makes a new file from it. The command of a ``console`` block must print the lines below it. One of
the page's commands or its other Python blocks must print the lines of each ``text`` block, in this order.
"""

import re
import shlex
from pathlib import Path
from textwrap import indent

import pytest
import warm
from PIL import Image

import mpinspect

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *TUTORIALS]
BLOCK = re.compile(r"^(?P<skip><!-- no-run -->\n\s*)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<kind>python|console|text|diff)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (?P<name>\w+\.py)\n")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)(?P<target>[^)#\s]+)")
INEXACT = re.compile(r"\d+\.\d+|\d+(?=%)")
#: The repository's address.
(SOURCE,) = re.findall(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, bool, str]]:
    """Yield each block's first line, whether it runs, and its code."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start("code")) + 1, found["skip"] is None, found["code"])
        for found in BLOCK.finditer(text)
    ]


def script(page: Path) -> str:
    """Return the page's running blocks, without files, as one program with the page's line numbers."""
    lines: list[str] = []
    for first, runs, code in blocks(page):
        if runs and not FILE.match(code):
            lines += [""] * (first - 1 - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n"


def identity(page: Path) -> str:
    return str(page.relative_to(ROOT))


def output(words: list[str], directory: Path) -> str:
    """Run ``python WORDS...``, which must exit with 0; return the output of both streams."""
    status, printed, _ = warm.run(directory, words, {"MPLBACKEND": "agg", "COLUMNS": "88"}, is_one_stream=True)
    assert status == 0, f"{shlex.join(words)}:\n{printed[-6000:]}"
    return printed


def run_page(page: Path, directory: Path) -> str:
    program = directory / page.with_suffix(".py").name
    program.write_text(script(page), encoding="utf-8")
    cwd = directory / "cwd"
    cwd.mkdir(exist_ok=True)
    return output(["-W", "error", str(program)], cwd)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in TUTORIALS and script(page).strip()], ids=identity
)
def test_the_code_of_a_page_runs(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", TUTORIALS, ids=identity)
def test_a_tutorials_output_is_as_shown(page, tmp_path):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    (cwd / "tests").symlink_to(ROOT / "tests")
    printed = ""
    fences = [(found["kind"], found["body"]) for found in FENCE.finditer(page.read_text(encoding="utf-8"))]
    for kind, body in fences:
        if kind == "python" and (file := FILE.match(body)):
            (cwd / file["name"]).write_text(body, encoding="utf-8")
        elif kind == "diff":
            apply(body, cwd)
        elif kind == "console":
            command, _, shown = body.partition("\n")
            words = shlex.split(command.removeprefix("$ "))
            assert words[0] == "mpinspect", command
            told = output(["-m", *words], cwd)
            assert printed_as_shown(shown, told), f"{command}\n{told}"
            printed += told
    if script(page).strip():
        printed += run_page(page, tmp_path)
    for kind, body in fences:
        if kind == "text":
            shown = body.replace("\n", "\n...\n")
            assert printed_as_shown(f"...\n{shown}", printed), f"{body}\nis not in\n{printed}"


def apply(diff: str, directory: Path) -> None:
    """Apply a diff to its ``---`` file; write the result as its ``+++`` file."""
    old, new, *lines = diff.splitlines()
    text = (directory / old.removeprefix("--- ")).read_text(encoding="utf-8")
    for hunk in "\n".join(lines).split("\n@@\n"):
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if not line.startswith(sign)) for sign in "+-"
        )
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (directory / new.removeprefix("+++ ")).write_text(text, encoding="utf-8")


def printed_as_shown(shown: str, printed: str) -> bool:
    """Return whether these lines were printed. ``...`` matches any lines, or the end of a line.

    Decimals and percentages may differ by 5%: the last bit of 16-bit products depends on the processor, and training
    amplifies it.
    """
    lines = [
        r"(?:.*\n)*?"
        if line == "..."
        else r"(\d+(?:\.\d+)?)".join(map(re.escape, INEXACT.split(line.removesuffix("...").rstrip())))
        + (r".*\n" if line.endswith("...") else r" *\n")
        for line in shown.splitlines()
    ]
    found = re.fullmatch("".join(lines), printed)
    return found is not None and list(map(float, found.groups())) == pytest.approx(
        list(map(float, INEXACT.findall(shown))), rel=0.05
    )


def test_the_readme_shows_a_report_that_its_tutorial_prints():
    (shown,) = (
        found["body"] for found in FENCE.finditer((ROOT / "README.md").read_text("utf-8")) if found["kind"] == "text"
    )
    tutorial = (ROOT / "docs" / "tutorials" / "nan.md").read_text("utf-8")
    assert shown in tutorial


def test_the_picture_shows_the_run_that_the_readme_quotes():
    """``docs/pictures/report.py`` takes the picture, and writes the verdict of its run into it."""
    with Image.open(ROOT / "docs" / "pictures" / "report.png") as picture:
        words = picture.text["Description"].splitlines()
        assert picture.size == (1440, 900)
    assert len(words) == 3
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for line in words:
        assert line in readme, "take the picture again: python docs/pictures/report.py"


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_the_code_of_a_page_compiles(page):
    for first, _, code in blocks(page):
        # Some of it belongs in a training's loop or in a forward.
        compile(f"def forward():\n while True:\n{indent(code, '  ')}\n  pass", f"{page.name}:{first}", "exec")


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_every_python_block_is_found(page):
    """Fences that are indented or have an unknown marker would be skipped silently."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"```\s*(?:python|py\b)", text)) == len(blocks(page))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=identity)
def test_links_within_the_repository_have_targets(page):
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / found["target"]).exists(), f"{identity(page)} links to {found['target']}"


def test_the_readme_reads_outside_of_the_repository():
    """Relative links do not work on a package index. Links into the repository must point to existing files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not LINK.findall(text)
    raw = SOURCE.replace("github.com", "raw.githubusercontent.com")
    targets = re.findall(rf"\]\((?:{re.escape(SOURCE)}/(?:blob|tree)|{re.escape(raw)})/main/([^)#\s]+)", text)
    assert len(targets) == len(re.findall(r"\]\(https://", text)) > 10
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_reference_has_every_public_name():
    described = re.findall(r"^\.\. auto\w+:: (\S+)$", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.MULTILINE)
    assert set(mpinspect.__all__) - {"__version__"} == {name for name in described if "." not in name}


def test_every_page_is_in_the_documentations_contents():
    docs = ROOT / "docs"
    listed = re.findall(r"^[a-z0-9/-]+$", (docs / "index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(
        page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md") if page.stem != "index"
    )


def test_the_readme_names_the_targets_that_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        targets = {*re.findall(r"^make ([a-z]+)", text, re.MULTILINE), *re.findall(r"`make ([a-z-]+)`", text)}
        assert targets
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
