"""The gallery of faults: its scripts, the findings that they state, and its generated page agree."""

import ast
import re
from pathlib import Path

import gallery
import pytest

from mpinspect.ranges.faults.registry import DIAGNOSES, FINDING_IDS

SCRIPTS = sorted(
    path for path in gallery.HERE.rglob("*.py") if path.stem not in ("first_screens", "gallery", "peers", "sentences")
)
PAGE = (Path(__file__).parents[2] / "docs" / "diagnoses.md").read_text("utf-8")


def test_the_scripts_have_a_docstring_and_a_source():
    texts = {script.name: script.read_text("utf-8") for script in SCRIPTS}
    assert [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []
    assert [name for name, text in texts.items() if not re.search(r"^# Thread: \S+", text, re.MULTILINE)] == []
    assert [name for name, text in texts.items() if "mpinspect" in text] == []


def test_every_script_states_its_finding_or_is_healthy():
    names = {path.relative_to(gallery.HERE).as_posix() for path in SCRIPTS}
    assert names == {fault.script for fault in gallery.FAULTS} | set(gallery.HEALTHY)
    assert len({fault.script for fault in gallery.FAULTS}) == len(gallery.FAULTS) >= 30
    assert len(gallery.HEALTHY) >= 15


def test_the_scripts_state_findings_that_exist():
    assert {fault.id for fault in gallery.FAULTS} <= set(FINDING_IDS)


@pytest.mark.parametrize("diagnosis", DIAGNOSES, ids=lambda diagnosis: diagnosis.id)
def test_the_page_has_every_diagnosis_with_its_false_alarms_and_an_example(diagnosis):
    assert f"## {diagnosis.id}\n\n{diagnosis.about}\n" in PAGE
    assert f"**False alarms.** {diagnosis.false_alarms}" in PAGE
    scripts = [fault.script for fault in gallery.FAULTS if fault.id == diagnosis.id]
    assert scripts
    assert [script for script in scripts if f"[`{script}`]" not in PAGE] == []
