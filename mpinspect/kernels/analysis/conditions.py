"""Parse and check conditions on a report's shares, as written in CI: "tensor-core share < 60%"."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.shares import Shares
from mpinspect.reporting.words import percent

#: The bounds of a share, which differ if some verdicts are unknown; None if the total that the share refers to is 0.
Range = tuple[float, float] | None


def _exactly(value: float | None) -> Range:
    return None if value is None else (value, value)


def _idle(report: KernelReport) -> Range:
    limits = report.limits
    return _exactly(limits.idle_us / limits.span_us) if limits.span_us > 0 else None


def _on_tensor_cores(whole: Callable[[Shares], float]) -> Callable[[KernelReport], Range]:
    """Return a measure of the share on Tensor Cores: its range without and with products of unknown verdict."""

    def measured(report: KernelReport) -> Range:
        total, known = whole(report.shares), report.shares.tensor_core_time_us
        unknown = report.shares.verdict_time_us["unknown"]
        return (known / total, min(1.0, (known + unknown) / total)) if total > 0 else None

    return measured


def _verdict(verdict: str) -> Callable[[KernelReport], Range]:
    """Return a measure of a verdict's share of the products' time: its range without and with products of unknown verdict."""

    def measured(report: KernelReport) -> Range:
        known, unknown = report.shares.of_products(verdict), report.shares.of_products("unknown")
        return None if known is None or unknown is None else (known, min(1.0, known + unknown))

    return measured


_PRODUCTS, _ALL = "the matrix products' time", "all kernel time"

#: By the name of a share: its measure, and in words the total that the share refers to.
QUANTITIES: dict[str, tuple[Callable[[KernelReport], Range], str]] = {
    "tensor-core share": (_on_tensor_cores(lambda shares: shares.product_time_us), _PRODUCTS),
    "tensor-core share of all": (_on_tensor_cores(lambda shares: shares.kernel_time_us), _ALL),
    "tensor-core share of compute": (
        _on_tensor_cores(lambda shares: shares.compute_time_us),
        "kernel time without communication",
    ),
    "native share": (_verdict("native"), _PRODUCTS),
    "degraded share": (_verdict("degraded"), _PRODUCTS),
    "off share": (_verdict("off"), _PRODUCTS),
    "unknown share": (lambda report: _exactly(report.shares.of_products("unknown")), _PRODUCTS),
    "communication share": (lambda report: _exactly(report.shares.communication_fraction), _ALL),
    "attributed share": (lambda report: _exactly(report.attributed_fraction), _ALL),
    "idle share": (_idle, "the GPUs' time from first to last kernel"),
}
#: An example for messages and help.
EXAMPLE = "tensor-core share < 60%"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FORM = re.compile(
    r"(?P<name>[a-z][a-z -]*?)\s*(?P<sign><=|>=|<|>)\s*(?P<value>(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)\s*(?P<percent>%?)"
)


@dataclass(frozen=True)
class Condition:
    """A comparison of a share with a bound (0..1); ``text`` is the user's spelling."""

    text: str
    name: str
    sign: str
    bound: float

    def range(self, report: KernelReport) -> Range:
        """Return the lowest and highest possible value of the report's share; None if the share's total is 0."""
        return QUANTITIES[self.name][0](report)

    def holds(self, report: KernelReport) -> bool | None:
        """Return whether the condition holds; None if the share is unknown, or its range lies on both sides of the bound."""
        found = self.range(report)
        answers = {_COMPARISONS[self.sign](value, self.bound) for value in found} if found is not None else set()
        return answers.pop() if len(answers) == 1 else None

    def doubt(self, report: KernelReport) -> str:
        """Return why ``holds`` returned None, as the second half of a sentence."""
        found = self.range(report)
        if found is None:
            return f"the traces lack the total that it is a share of ({QUANTITIES[self.name][1]})"
        low, high = map(percent, found)
        return f"it lies between {low} and {high}, since it is unknown whether some kernels used Tensor Cores"


def parse(text: str) -> Condition:
    """Return the condition in a text: a name of QUANTITIES, one of < <= > >=, and a share as "60%" or "0.6".

    Raises:
        ValueError: the text has another form; the message lists the names of shares.
    """
    found = _FORM.fullmatch(" ".join(text.lower().split()))
    if found is None or found["name"] not in QUANTITIES:
        raise ValueError(f"{text!r} names no known share; known shares: {', '.join(QUANTITIES)}; as in {EXAMPLE!r}")
    bound = float(found["value"]) / (100 if found["percent"] else 1)
    if bound > 1:
        raise ValueError(f"{text!r}: a share is at most 100%, or 1 without the percent sign")
    return Condition(text, found["name"], found["sign"], bound)
