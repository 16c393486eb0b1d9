"""Explains a page's terms: each where it first occurs, on hover and focus, and all of them in a list at the page's end."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from mpinspect.reporting.document import Term

#: Elements whose text is left as it is.
_LEFT = re.compile(r"pre|code|th|h[1-6]|b|button|summary|style|title|dfn|a")
_TAG = re.compile(r"(<[^>]*>)")


def explained(body: str, terms: Iterable[Term]) -> str:
    """Return the HTML of a page's body with its terms explained; the body as it is if none occurs."""
    found = [term for term in terms if re.search(term.pattern, _text(body))]
    if not found:
        return body
    return "".join(_marked(body, found)) + _listed(found)


def _text(body: str) -> str:
    return html.unescape(_TAG.sub(" ", body))


def _marked(body: str, terms: list[Term]) -> Iterator[str]:
    """Yield the parts of the body, each term marked up where its word first stands in running text."""
    waiting = {term.word.lower(): term for term in terms}
    inside: list[str] = []
    for part in _TAG.split(body):
        if part.startswith("<"):
            name = re.match(r"</?(\w+)", part)
            if name and _LEFT.fullmatch(name[1]):
                if part.startswith("</"):
                    inside.pop()
                else:
                    inside.append(name[1])
        elif not inside and waiting:
            # Ids of findings are hyphenated.
            word = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, waiting))})(?![\w-])", re.IGNORECASE)
            part = word.sub(lambda match: _explained(match[1], waiting.pop(match[1].lower(), None)), part)
        yield part


def _explained(word: str, term: Term | None) -> str:
    # A second occurrence in the same text, whose explanation was given.
    if term is None:
        return word
    meaning = html.escape(term.meaning, quote=False)
    return f'<dfn tabindex="0">{word}<span class="meaning"> ({meaning})</span></dfn>'


def _listed(terms: list[Term]) -> str:
    entries = "".join(
        f"<dt>{html.escape(term.word, quote=False)}</dt><dd>{html.escape(term.meaning, quote=False)}</dd>"
        for term in terms
    )
    return f'\n<section class="terms"><h2>Terms</h2><dl>{entries}</dl></section>'
