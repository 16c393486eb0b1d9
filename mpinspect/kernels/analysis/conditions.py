"""Parse and check conditions on a report's shares, as written in CI: "tensor-core share < 60%"."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.shares import Shares, share
from mpinspect.reporting.words import percent

#: The bounds of a share, which differ if some verdicts are unknown; None if the total that the share refers to is 0.
Range = tuple[float, float] | None


def _between(low: float | None, high: float | None) -> Range:
    return None if low is None or high is None else (low, high)


def _exactly(value: float | None) -> Range:
    return _between(value, value)


def _with_unknown(known_us: float, shares: Shares, total_us: float) -> Range:
    """Return the range of a share of the total, without and with products of unknown verdict."""
    return _between(share(known_us, total_us), share(known_us + shares.verdict_time_us["unknown"], total_us))


def _on_tensor_cores(whole: Callable[[Shares], float]) -> Callable[[KernelReport], Range]:
    return lambda report: _with_unknown(report.shares.tensor_core_time_us, report.shares, whole(report.shares))


def _verdict(verdict: str) -> Callable[[KernelReport], Range]:
    return lambda report: _with_unknown(
        report.shares.verdict_time_us[verdict], report.shares, report.shares.product_time_us
    )


_PRODUCTS, _ALL = "the matrix products' time", "all kernel time"

#: By the name of a share: its measure, and the words for its denominator.
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
    "idle share": (lambda report: _exactly(report.limits.idle_fraction), "the GPUs' time from first to last kernel"),
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
        answers = {_COMPARISONS[self.sign](value, self.bound) for value in self.range(report) or ()}
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
    bound = float(found["value"])
    if found["percent"]:
        bound /= 100
    if bound > 1:
        raise ValueError(f"{text!r}: a share is at most 100%, or 1 without the percent sign")
    return Condition(text, found["name"], found["sign"], bound)
