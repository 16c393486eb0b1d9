"""All products that one cause concerns, and their figures together: what a finding is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import percent
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.causes import Cause
from mpinspect.shapes.analysis.report import Padding, ShapeRow
from mpinspect.shapes.analysis.roofline import Gain
from mpinspect.shapes.analysis.wording import (
    NEGLIGIBLE,
    count,
    gain_words,
    grouped,
    promises_nothing,
    some_modules,
)
from mpinspect.shapes.records import MatmulRecording

#: Modules that evidence lists: all groups of a large model fit.
MAX_MODULES = 50


def is_worth_it(gain: Gain | None, share: float) -> bool:
    """Whether mending may bring something; where that is not known, whether it is about more than a trifle."""
    return share >= NEGLIGIBLE if gain is None else not promises_nothing(gain)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a size is made of: ``number`` equal parts (``heads``, or parts that the layer's output is split into).

    Args:
        is_shown: the recording shows it; else a name tells.
        may_be: nothing tells, and it may yet be split.
    """

    number: int = 1
    heads: bool = False
    is_shown: bool = False
    may_be: bool = False


@dataclass(frozen=True)
class Group:
    """``rows`` have ``cause``; ``gain`` is what mending it brings, ``padding`` how its size would be padded, ``also`` how those
    that follow from it come out."""

    cause: Cause
    rows: tuple[ShapeRow, ...]
    gain: Gain | None
    padding: Padding | None
    gpu: Gpu
    recording: MatmulRecording
    also: tuple[Padding, ...] = ()
    parts: Parts = Parts()

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """All sizes to pad, the one to blame first."""
        return () if self.padding is None else (self.padding, *self.also)

    @property
    def share(self) -> float:
        return sum(row.share for row in self.rows)

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def layer(self) -> str:
        """The module, if it is one; the parameter's size has a name of its own in the evidence."""
        modules = {row.module for row in self.rows}
        return modules.pop() if len(modules) == 1 else ""

    @property
    def where(self) -> str:
        return some_modules(row.module for row in self.rows)

    @property
    def products(self) -> str:
        """ "12 products (3.1% of the FLOPs)"."""
        return f"{count(self.calls, 'product')} ({percent(self.share)} of the FLOPs)"

    @property
    def are(self) -> str:
        """The verb after ``products``."""
        return "is" if self.calls == 1 else "are"

    @property
    def have(self) -> str:
        return "has" if self.calls == 1 else "have"

    def verb(self, plural: str) -> str:
        """Any other verb after ``products``: "break", or "breaks" of one."""
        return f"{plural}s" if self.calls == 1 else plural

    @property
    def is_worth_it(self) -> bool:
        return is_worth_it(self.gain, self.share)

    def finding(self, message: str, fix: str, severity: str | None = None, **evidence: Any) -> Finding:
        """A finding with the figures that every finding has; its severity follows from the gain unless given."""
        if severity is None:
            severity = "warning" if self.is_worth_it else "info"
        return Finding(self.cause.id, severity, self.layer, message, self.evidence() | evidence, fix)

    def evidence(self) -> dict[str, Any]:
        talk = Counter[bool | None]()
        verdicts: Counter[str] = Counter()
        for row in self.rows:
            talk[row.multiples_of_8] += row.calls
            verdicts[row.verdict] += row.calls
        found: dict[str, Any] = {
            "flops_fraction": self.share,
            "calls": self.calls,
            "modules": grouped(row.module for row in self.rows)[:MAX_MODULES],
            "parameters": list(dict.fromkeys(row.parameter for row in self.rows if row.parameter))[:MAX_MODULES],
            "verdicts": dict(verdicts),
            "talk_rule_kept": talk[True],
            "talk_rule_broken": talk[False],
        }
        if self.padding is not None:
            found |= {
                "size": self.padding.size,
                "size_names": list(self.padding.names),
                "padded": self.padding.to,
                "padded_preferred": self.padding.to_preferred,
            }
        if self.also:
            found["consequent_sizes"] = [padding.size for padding in self.also]
        if self.gain is not None:
            found |= {
                "estimated_speedup_low": self.gain.speedup_low,
                "estimated_speedup_high": self.gain.speedup_high,
                "estimated_saved_fraction_high": self.gain.saved_fraction_high,
                "roofline_bound": self.gain.bound,
            }
        return found

    @property
    def gain_words(self) -> str:
        return gain_words(self.gain, by_padding=self.cause.size is not None)

    @property
    def talk_words(self) -> str:
        """What the talk's rule says of these products."""
        broken = sum(row.calls for row in self.rows if row.multiples_of_8 is False)
        if not broken:
            return "the rule of multiples of 8 has nothing against them"
        return f"the rule of multiples of 8 flags {'them too' if broken == self.calls else f'{broken:,} of them too'}"
