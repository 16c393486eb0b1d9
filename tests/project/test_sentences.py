"""The registry of faults agrees with the faults' sentences."""

import importlib
import io
import pkgutil
import textwrap
import tokenize
from pathlib import Path

import pytest
import sentences

from mpinspect.ranges.faults import name
from mpinspect.ranges.faults.registry import CONSEQUENCES, DIAGNOSES, FAULTS, FINDING_IDS, FIRST
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.sentences import Sentences, text

PAGE = Path(__file__).parents[2] / "docs" / "sentences.md"


def written() -> set[type[Sentences]]:
    """Return all enumerations of sentences in the room of the faults' rules."""
    modules = [importlib.import_module(f"{name.__name__}.{each.name}") for each in pkgutil.iter_modules(name.__path__)]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {each for each in found if issubclass(each, Sentences) and each is not Sentences}


def test_an_id_has_one_entry():
    assert len(FAULTS) == len([*FIRST, *DIAGNOSES, *CONSEQUENCES]) == len(FINDING_IDS) - 1


def test_every_sentence_belongs_to_a_finding():
    assert written() == {words for fault in FAULTS.values() for words in fault.words}


def test_the_page_has_every_sentence():
    assert PAGE.read_text("utf-8") == sentences.page()


def test_the_entries_are_complete():
    assert {severity for fault in FAULTS.values() for severity in (fault.severity, fault.explains_from)} <= set(
        SEVERITIES
    )
    texts = {id: (fault.about, fault.false_alarms, fault.words) for id, fault in FAULTS.items()}
    assert [id for id, each in texts.items() if not all(each)] == []
    assert {id for fault in FAULTS.values() for id in fault.explains} <= set(FAULTS)


class Example(Sentences):
    ALL = "{share:percent} of {names:some 1} at {scale:scale} or {scale:power}, {factor:factor}, {dtype:format}, {n:count step}"
    LITERAL = "{{{value:.2f}}}"


def test_a_sentence_prints_its_figures_in_words():
    figures = {"share": 0.5, "names": ["a", "b"], "scale": 8192.0, "factor": 128.0, "dtype": "float16", "n": 2}
    assert text(Example.ALL, figures) == "50% of 'a' and 1 more at 8192 (2^13) or 2^13, 128, FP16, 2 steps"
    assert text((Example.LITERAL, None, Example.LITERAL), {"value": 1.0}, between="\n") == "{1.00}\n{1.00}"


def test_a_figure_that_is_missing_is_named():
    with pytest.raises(KeyError, match="share"):
        text(Example.ALL, {})


#: Columns of a page's panel of code.
WIDEST = 44


class Name:
    """Stands for any figure of code: a short name, or a device type in quotes."""

    def __init__(self, shown: str) -> None:
        self.shown = shown

    def __format__(self, spec: str) -> str:
        return self.shown


class Names(dict[str, Name]):
    def __missing__(self, name: str) -> Name:
        return Name({"device_type": '"cuda"', "expression": "f(x)", "indented": "f(x)"}.get(name, "x16"))


CODE = {
    f"{words.__module__.rpartition('.')[2]}.{words.__name__}.{each.name}": text(each, Names())
    for words in sorted(written(), key=lambda words: (words.__module__, words.__name__))
    for each in words
    if not each.value.endswith((".", "}"))
}


def test_code_is_python_in_short_lines_with_comments_above():
    for title, code in CODE.items():
        compile(f"for x in y:\n    pass\n{textwrap.indent(code, '    ')}", title, "exec")
    assert [(title, line) for title, code in CODE.items() for line in code.splitlines() if len(line) > WIDEST] == []
    tokens = (token for code in CODE.values() for token in tokenize.generate_tokens(io.StringIO(code).readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    assert [each.string for each in comments if each.line.strip() != each.string] == []


def test_all_code_is_checked():
    assert len(CODE) > 90
