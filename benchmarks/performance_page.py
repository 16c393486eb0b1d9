"""Make docs/performance.md of the results in benchmarks/results/ and of the prose in benchmarks/performance_template.md.

    python benchmarks/performance_page.py

The page holds no figure of its own: what it says is what the newest results say, and what has no results is "not yet measured".
A test holds the committed page to the committed results.
"""

from __future__ import annotations

import json
import re
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
    "cold_starts": ("cold_starts-cpu", page_tables.anything),
    "gpu_counting": ("gpu_counting-gpu", page_tables.anything),
    "gpu_overhead": ("gpu_overhead-gpu", page_tables.gpu_overhead),
    "training_modes": ("training_modes-gpu", page_tables.anything),
    "tensor_cores": ("tensor_cores-gpu", page_tables.anything),
    "session": ("session-cpu", page_tables.session),
    "traces": ("traces-cpu", page_tables.traces),
    "shape_lint": ("shape_lint-cpu", page_tables.anything),
    "kernel_names": ("kernel_names-cpu", page_tables.anything),
    "training_speed": ("training_speed-cpu", page_tables.anything),
}


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Every results file of a folder, by its name without ``.json``: date, machine, results."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


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
        file, draw = SECTIONS[name]
        return draw(documents[file]["results"]) if file in documents else page_tables.not_measured(file)

    return re.sub(r"\{\{(?P<name>\w+)\}\}", fill, template)


def write() -> None:
    """Write the page anew."""
    PAGE.write_text(page(load(), TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
