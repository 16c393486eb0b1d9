"""Writes the page of all sentences that findings on ranges can print, by finding.

python examples/faults/sentences.py docs/sentences.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mpinspect.ranges.faults.registry import FAULTS
from mpinspect.reporting.sentences import Sentences

_HEAD = """# Sentences of findings

Every sentence and every piece of code that a finding on ranges can print, in the order of the registry
(`mpinspect/ranges/faults/registry.py`). Names in braces are figures. The page of [diagnoses](diagnoses.md) has examples and the
cases in which a finding may be wrong. `make gallery` writes this page.
"""


def page() -> str:
    """Return the page: for each finding its severity, the findings that it explains, and its sentences."""
    parts = [_HEAD]
    for fault in FAULTS.values():
        explains = f" Explains: {', '.join(f'`{id}`' for id in fault.explains)}." if fault.explains else ""
        parts.append(f"## {fault.id}\n\n{fault.about} Usual severity: {fault.severity}.{explains}\n")
        parts += [f"{_item(sentence)}" for words in fault.words for sentence in _all(words)]
        parts.append("")
    return "\n".join(parts)


def _all(words: type[Sentences]) -> Iterator[str]:
    return (sentence.value for sentence in words)


def _item(sentence: str) -> str:
    if "\n" not in sentence:
        return f"- `{sentence}`"
    code = sentence.replace("\n", "\n  ")
    return f"-\n  ```text\n  {code}\n  ```"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
