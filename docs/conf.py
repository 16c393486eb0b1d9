"""The documentation as a site: ``make docs``. It is built offline, and every warning is an error.

The pages are Markdown that reads on GitHub as it stands: links to files of the repository become links to its address here.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import mpinspect

ROOT = Path(__file__).parents[1]
(SOURCE,) = re.findall(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)

project = "mpinspect"
release = mpinspect.__version__
author = "mpinspect contributors"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"mpinspect {release}"
html_theme_options = {"source_repository": f"{SOURCE}/", "source_branch": "main", "source_directory": "docs/"}
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
# Fences of other languages than Pygments has (session files, shell transcripts) are shown as they are.
suppress_warnings = ["misc.highlighting_failure"]

#: From a page to a file of the repository that is not a page.
_OUTSIDE = re.compile(r"\]\((?:\.\./)+(?!docs/)(?P<path>[^)\s]+)\)")
#: From the README, whose links are absolute, to a page or picture.
_PAGE = re.compile(rf"{re.escape(SOURCE)}/blob/main/docs/(?P<page>[^)\s]+)")
_PICTURE = re.compile(r"https://raw\.githubusercontent\.com/[^)\s]+?/main/docs/(?P<picture>[^)\s]+)")


def _point_outside(app: Sphinx, name: str, source: list[str]) -> None:
    def link(found: re.Match[str]) -> str:
        path = Path(app.srcdir, name).parent / found[0][2:-1]
        if path.resolve().is_relative_to(Path(app.srcdir).resolve()):
            return found[0]
        return f"]({SOURCE}/blob/main/{path.resolve().relative_to(ROOT)})"

    source[0] = _OUTSIDE.sub(link, source[0])


def _point_inside(app: Sphinx, included: Path, parent: str, source: list[str]) -> None:
    source[0] = _PICTURE.sub(r"\g<picture>", _PAGE.sub(r"\g<page>", source[0]))


def setup(app: Sphinx) -> None:
    app.connect("source-read", _point_outside)
    app.connect("include-read", _point_inside)
