"""Make docs/performance.md of the results in benchmarks/results/ and of the prose in benchmarks/performance_template.md.

    python benchmarks/performance_page.py

The page holds no figure of its own: what it says is what the newest results say. A section of the template whose results are
missing is left out of its place and named in the last one, "Not yet measured". A test holds the committed page to the committed
results.
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

#: Placeholder in the template -> the file that answers it (without ``.json``) and what draws it.
SECTIONS = {
    "counting": ("counting-cpu", page_tables.counting),
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
    """A heading of the template, the text under it up to the next one, and the placeholders in that text which results fill."""

    heading: str
    text: str

    @property
    def depth(self) -> int:
        return len(self.heading) - len(self.heading.lstrip("#"))

    @property
    def files(self) -> list[str]:
        return [SECTIONS[found["name"]][0] for found in _PLACEHOLDER.finditer(self.text) if found["name"] in SECTIONS]


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Every results file of a folder, by its name without ``.json``: date, machine, results."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: document for name, document in found.items() if not document.get("rehearsal")}


def page(documents: dict[str, Any], template: str) -> str:
    """The page's text.

    Raises:
        KeyError: the template has a placeholder that nothing answers.
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
    """The template, cut before each heading; code blocks have none."""
    pieces = re.split(r"^(#+ .*\n)", template, flags=re.MULTILINE)
    return [Section(*pair) for pair in zip(pieces[1::2], pieces[2::2], strict=True)]


def _parted(several: list[Section], documents: dict[str, Any]) -> tuple[list[Section], dict[str, str]]:
    """The sections to show, and the titles of the others by the name of the results file that they lack.

    A heading with nothing of its own goes with the last section below it; the closing one, with the last thing to be measured.
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
    """Write the page anew."""
    PAGE.write_text(page(load(), TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
