"""Prepares a document for a page, which is read from its top: removes repetitions, and explains terms at first use.

A terminal shows only the end of a long report, so its renderer leaves the document as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mpinspect.reporting.document import (
    Block,
    Document,
    Findings,
    Front,
    Items,
    Line,
    Listed,
    Parts,
    Section,
    Tables,
    Term,
    lines,
    nonempty,
    with_documents,
)
from mpinspect.reporting.words import filled


def for_page(document: Document) -> Document:
    """Return the document without repetitions of its verdicts and its alarm, with lines that explain its terms."""
    return _explained(said_once(document), set())


def said_once(document: Document) -> Document:
    """Return the document without repetitions of its verdicts and its alarm."""
    return _said_once(document, ())


def _sections(blocks: Iterable[Block]) -> tuple[Section, ...]:
    """Return the blocks of a summary, which are all sections."""
    return tuple(block for block in blocks if isinstance(block, Section))


# -- repetitions ----------------------------------------------------------------------------------------------------


def _said_once(document: Document, above: tuple[str, ...]) -> Document:
    said = (*above, document.alarm, *(block.text for block in document.verdict if isinstance(block, Line)))
    return replace(
        document,
        blocks=_all_once(document.blocks, said),
        summary=_sections(_all_once(document.summary, said)),
        front=document.front and _front_once(document.front, said),
    )


def _front_once(front: Front, said: tuple[str, ...]) -> Front:
    """Return a front whose findings leave out the message, fix and code that the verdict next to them has."""
    said += tuple(block.text for block in front.verdict if isinstance(block, Line))
    listed = tuple(_listed_once(each, said) for each in front.findings)
    tabs = tuple(tab._replace(document=said_once(tab.document)) for tab in front.tabs)
    return replace(front, findings=listed, tabs=tabs)


def _listed_once(listed: Listed, said: tuple[str, ...]) -> Listed:
    if not _is_said(listed.finding.message, said):
        return listed
    return listed._replace(finding=replace(listed.finding, message="", fix="", code=""))


def _all_once(blocks: Iterable[Block], said: tuple[str, ...]) -> tuple[Block, ...]:
    return nonempty(*(_once(block, said) for block in blocks))


def _once(block: Block, said: tuple[str, ...]) -> Block:
    """Return a block without sentences that end one of ``said``; findings retain their severity and id."""
    if isinstance(block, Section):
        return replace(block, blocks=_all_once(block.blocks, said))
    if isinstance(block, Items):
        items = (
            replace(item, details=tuple(each for each in item.details if not _is_said(each, said)))
            for item in block.items
            if not _is_said(item.text, said)
        )
        return replace(block, items=tuple(items))
    if isinstance(block, Findings):
        return Findings(tuple(each for each in block.findings if not _is_said(each.message, said)))
    return with_documents(block, lambda document: _said_once(document, said))


def _is_said(text: str, said: tuple[str, ...]) -> bool:
    return bool(text) and any(each.endswith(text) for each in said)


# -- terms ------------------------------------------------------------------------------------------------------------


def _explained(document: Document, told: set[str]) -> Document:
    """Return the document with explanations at the end of each block that first uses a term; adds the terms to ``told``."""
    verdict = (*document.verdict, *_meanings(document.verdict, document.terms, told))
    # In a page's order: the first part of the summary stands above the blocks, the others below.
    first = _sections(_all_explained(document.summary[:1], document.terms, told))
    blocks = _all_explained(document.blocks, document.terms, told)
    return replace(
        document,
        verdict=verdict,
        blocks=blocks,
        summary=(*first, *_sections(_all_explained(document.summary[1:], document.terms, told))),
    )


def _all_explained(blocks: Iterable[Block], terms: tuple[Term, ...], told: set[str]) -> tuple[Block, ...]:
    found: list[Block] = []
    for block in blocks:
        if isinstance(block, Parts):
            found.append(with_documents(block, lambda document: _explained(document, told)))
            continue
        meanings = _meanings([block], terms, told)
        if isinstance(block, Section):
            found.append(replace(block, blocks=(*block.blocks, *meanings)))
        else:
            found += [block, *meanings]
    return tuple(found)


def _meanings(blocks: Iterable[Block], terms: tuple[Term, ...], told: set[str]) -> tuple[Line, ...]:
    text = "\n".join(words for block in blocks for words in _words(block))
    found = [term for term in terms if term.word not in told and re.search(term.pattern, text)]
    told.update(term.word for term in found)
    return lines(filled("{}.", "; ".join(f"{term.word}: {term.meaning}" for term in found)), tone="legend")


def _words(block: Block) -> Iterator[str]:
    """Yield a block's sentences; a table's legend explains its own headings."""
    if isinstance(block, Line):
        yield block.text
    elif isinstance(block, Items):
        for item in block.items:
            yield from (item.text, *item.details)
    elif isinstance(block, Findings):
        for finding in block.findings:
            yield from (finding.message, finding.fix)
    elif isinstance(block, Tables):
        yield block.legend
    elif isinstance(block, Section):
        for inner in block.blocks:
            yield from _words(inner)
