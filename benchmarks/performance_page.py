"""Makes docs/performance.md from the results in benchmarks/results/ and the text in benchmarks/performance_template.md.

    python benchmarks/performance_page.py

All figures on the page are from the newest results. A section of the template whose results are missing is omitted and named in
the last section, "Not yet measured". A test compares the committed page with the committed results.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page_tables
from machine import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TEMPLATE = Path(__file__).with_name("performance_template.md")

#: Placeholder in the template -> its results file (without ``.json``) and the function that formats it.
SECTIONS = {
    "counting": ("counting-cpu", page_tables.counting),
    "blocks": ("blocks-cpu", page_tables.anything),
    "overhead": ("overhead-cpu", page_tables.overhead),
    "where_it_goes": ("where_it_goes-cpu", page_tables.where_it_goes),
    "gpu_tests": ("gpu_tests-gpu", page_tables.gpu_tests),
    "cold_starts": ("cold_starts-cpu", page_tables.anything),
    "gpu_counting": ("gpu_counting-gpu", page_tables.anything),
    "device_reads": ("device_reads-cpu", page_tables.anything),
    "gpu_overhead": ("gpu_overhead-gpu", page_tables.gpu_overhead),
    "training_modes": ("training_modes-gpu", page_tables.anything),
    "tensor_cores": ("tensor_cores-gpu", page_tables.anything),
    "session": ("session-cpu", page_tables.session),
    "ranks": ("ranks-cpu", page_tables.anything),
    "page": ("page-cpu", page_tables.anything),
    "rank_kills": ("rank_kills-cpu", page_tables.anything),
    "traces": ("traces-cpu", page_tables.traces),
    "shape_lint": ("shape_lint-cpu", page_tables.anything),
    "kernel_names": ("kernel_names-cpu", page_tables.anything),
    "training_speed": ("training_speed-cpu", page_tables.anything),
}
_PLACEHOLDER = re.compile(r"\{\{(?P<name>\w+)\}\}")


@dataclass(frozen=True)
class Section:
    """A heading of the template, and the text up to the next heading, with its placeholders for results."""

    heading: str
    text: str

    @property
    def depth(self) -> int:
        return len(self.heading) - len(self.heading.lstrip("#"))

    @property
    def files(self) -> list[str]:
        return [SECTIONS[found["name"]][0] for found in _PLACEHOLDER.finditer(self.text) if found["name"] in SECTIONS]


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Return every results file of a folder (date, machine, results), by its name without ``.json``."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: document for name, document in found.items() if not document.get("rehearsal")}


def page(documents: dict[str, Any], template: str) -> str:
    """Return the page's text.

    Raises:
        KeyError: the template has an unknown placeholder.
    """

    def fill(found: re.Match[str]) -> str:
        name = found["name"]
        if name == "promises":
            return page_tables.promises(documents)
        if name == "machines":
            return page_tables.machines(documents, {file for file, _ in SECTIONS.values()})
        if name == "not_yet_measured":
            return page_tables.not_yet_measured(documents, left_out)
        file, draw = SECTIONS[name]
        drawn = draw(documents[file]["results"])
        return drawn if documents[file].get("complete", True) else f"{drawn}\n\n{page_tables.CUT_SHORT}"

    shown, left_out = _parted(sections(template), documents)
    return _PLACEHOLDER.sub(fill, "".join(section.heading + section.text for section in shown))


def sections(template: str) -> list[Section]:
    """Split the template before each heading. Code blocks must not contain lines that look like headings."""
    pieces = re.split(r"^(#+ .*\n)", template, flags=re.MULTILINE)
    return [Section(*pair) for pair in zip(pieces[1::2], pieces[2::2], strict=True)]


def _parted(several: list[Section], documents: dict[str, Any]) -> tuple[list[Section], dict[str, str]]:
    """Return the sections to show, and the titles of the others by the name of their missing results file.

    A heading without text is omitted if all sections below it are; the closing section, if every result is measured.
    """
    left_out: dict[str, str] = {}
    shown: list[Section] = []
    for section in several:
        missing = [file for file in section.files if file not in documents]
        left_out |= dict.fromkeys(missing, section.heading.strip("# \n"))
        if not missing:
            shown.append(section)
    all_measured = not left_out and not page_tables.unanswered(documents)
    kept: list[Section] = []
    for section in reversed(shown):
        has_below = bool(kept) and kept[-1].depth > section.depth
        if (section.text.strip() or has_below) and not ("not_yet_measured" in section.text and all_measured):
            kept.append(section)
    return kept[::-1], left_out


def write() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(load(), TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
