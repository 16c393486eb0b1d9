"""The form of a fault: its id, the rule that finds it in the record of a run, its sentences, and the findings it explains."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpinspect.ranges.faults.name.case import Case, again, grouped, quoted
from mpinspect.ranges.faults.name.loop import Loop
from mpinspect.ranges.faults.name.own_names import with_own_names
from mpinspect.ranges.records import Record
from mpinspect.ranges.session import Session
from mpinspect.reporting.finding import INFERRED, MEASURED, SEVERITIES, Finding
from mpinspect.reporting.sentences import Said, Sentences, text
from mpinspect.reporting.streams import printable
from mpinspect.reporting.words import filled, with_power

#: How many names the evidence lists.
MOST_NAMES = 20
#: The steps that are computed twice, and those in which a run looks for the operator that broke it.
TWICE = "in one early step and in steps 30, 100, 1,000 and 10,000"
AFTER_BREAK = "in one early step and in the steps after the first infinity or NaN"


@dataclass(frozen=True)
class Found:
    """One occurrence of a fault.

    Args:
        says: the sentences of the message.
        evidence: the figures behind it, by name; the sentences may use them.
        words: further values for the names in the sentences.
        fix: the sentences of the change to make.
        code: the fix as code, a member for each block of lines.
        layer: name of the tensor or module; "" for the whole run.
        severity: one of SEVERITIES; "" for the fault's own.
        is_grave: whether it did more harm than usual: its severity is one above the fault's own, which must not be "error".
        is_mild: whether it did less harm than usual: its severity is one below the fault's own, which must not be "info".
        is_inferred: whether the cause was concluded from measurements, and not measured itself.
        operator: torch's name of the operator that the code computes, whose operands are taken from the script's line; "" for
            code that computes none.
        before: lines of the script whose operators lead to the one of the evidence's "line".
        step: the step in which the problem began, from 0; None if it belongs to no step.
    """

    says: Said
    evidence: Mapping[str, Any]
    words: Mapping[str, Any] = field(default_factory=dict)
    fix: Said = ()
    code: Said = ()
    layer: str = ""
    severity: str = ""
    is_grave: bool = False
    is_mild: bool = False
    is_inferred: bool = False
    operator: str = ""
    before: Sequence[str] = ()
    step: int | None = None

    @classmethod
    def of(
        cls,
        case: Case,
        records: Sequence[Record],
        says: Said,
        fix: Said = (),
        code: Said = (),
        *,
        words: Mapping[str, Any] | None = None,
        evidence: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Found:
        """Return the occurrence that records of one class show, which began with the first.

        The sentences may use the figures of the first record and these words: "again" (on the further records), "names" and
        "modules" (of the parameters), "loss_scale" (of the step; None if unknown) and "of_scale" (the same, to follow "the loss
        scale"). The evidence has the figures, the names and the number of records.

        Args:
            case: the run.
            records: at least one.
            says, fix, code: the sentences.
            words, evidence: further ones.
            more: further arguments.
        """
        first, scale = records[0], case.progress.scale_at(records[0].step)
        figures = {**first.figures, "names": list(first.names[:MOST_NAMES]), "measured_steps": len(records)}
        words = {
            "again": again(records),
            "modules": grouped(first.names),
            "loss_scale": scale,
            "of_scale": filled(" of {}", scale and with_power(scale)),
            **first.figures,
            **(words or {}),
        }
        return cls(says, {**figures, **(evidence or {})}, words, fix, code, **{"step": first.step, **more})


@dataclass(frozen=True)
class Fault:
    """A kind of finding.

    Args:
        id: the finding's id.
        severity: one of SEVERITIES, unless an occurrence has its own.
        rule: yields the occurrences in a run. Its docstring describes the fault and, after "False alarms:", the cases in
            which it is reported without harm.
        words: the sentences that it can print.
        explains: ids of the findings that are consequences of this one.
        explains_from: the least severity of an occurrence that explains them: a milder one did no harm.
        is_of_every_step: whether the loop's code has the fault, so that it explains findings from earlier steps, too.
        checked: the steps in which it is checked, if only a step computed twice can show it.
        heading: the fault in a few words, if its id as words would have to be read twice.
    """

    id: str
    severity: str
    rule: Callable[[Case], Iterable[Found]]
    words: tuple[type[Sentences], ...]
    explains: tuple[str, ...] = ()
    explains_from: str = "error"
    is_of_every_step: bool = False
    checked: str = ""
    heading: str = ""

    @property
    def about(self) -> str:
        """The description of the fault, in one line."""
        return self._documentation()[0]

    @property
    def false_alarms(self) -> str:
        """The cases in which it is reported without harm, in one line; "" if there are none."""
        return self._documentation()[1]

    def _documentation(self) -> tuple[str, str]:
        about, _, false_alarms = (inspect.getdoc(self.rule) or "").partition("\n\nFalse alarms: ")
        first, gap, more = about.partition("\n\n")
        checked = filled(" Checked under ``mpinspect run`` or ``Inspector(second=True)``, {}.", self.checked)
        return " ".join(f"{first}{checked}{gap}{more}".split()), " ".join(false_alarms.split())

    def findings(self, case: Case) -> Iterator[Finding]:
        """Yield the findings of a run."""
        return (self.finding(found, case.session) for found in self.rule(case))

    def finding(self, found: Found, session: Session) -> Finding:
        """Return the finding of one occurrence; its code begins with the lines of the script that it is about.

        "change_at" in its evidence is the line of the training loop where the code is to be inserted.
        """
        loop = Loop(session)
        figures = {
            "step": found.step,
            "device_type": _device_type(session),
            "path": quoted(found.layer),
            **loop.words(),
        }
        figures |= {**found.evidence, **found.words}
        fix, code = text(found.fix, figures), loop.in_own_words(text(found.code, figures, between="\n"))
        evidence, line = dict(found.evidence), found.evidence.get("line", "")
        sources = {each: source for each in (*found.before, line) if (source := session.source_of(each))}
        if line in sources:
            evidence["source"] = sources[line]
            code = with_own_names(code, sources[line], found.operator)
        if at := loop.line_in(code):
            evidence["change_at"] = at
        if fix:
            code = "\n".join([*(printable(f"# {each}: {source}") for each, source in sources.items()), code]).rstrip()
        return Finding(
            self.id,
            found.severity or SEVERITIES[SEVERITIES.index(self.severity) + found.is_grave - found.is_mild],
            found.layer,
            text(found.says, figures),
            evidence,
            fix,
            code,
            (MEASURED, INFERRED)[found.is_inferred],
            found.step,
        )

    def is_cause_of(self, finding: Finding, consequence: Finding) -> bool:
        """Return whether a finding of this fault explains another one: it is grave enough and began no later."""
        if consequence.id not in self.explains or not self.is_grave(finding):
            return False
        if self.is_of_every_step or consequence.step is None:
            return True
        return finding.step is not None and finding.step <= consequence.step

    def is_grave(self, finding: Finding) -> bool:
        """Return whether a finding of this fault is as severe as one that explains others."""
        return SEVERITIES.index(finding.severity) >= SEVERITIES.index(self.explains_from)


def _device_type(session: Session) -> str:
    """Return the type of the parameters' devices as code, in quotes; the name ``device_type`` if there is not exactly one."""
    types = set(re.findall(r"(?:^|, )(\w+)", session.info.devices))
    return quoted(types.pop()) if len(types) == 1 else "device_type"
