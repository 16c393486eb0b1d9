"""Builds a precision ranking's document and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpinspect.ranges.analysis.precision_ranking import GradientErrors, PrecisionRanking, Widening
from mpinspect.reporting.document import Block, Cell, Code, Column, Document, Limit, Line, Table, Tables
from mpinspect.reporting.json_text import Layout, fields, headed, plain
from mpinspect.reporting.words import by_number, filled, number_of, percent

#: Modules and operators.
ROWS = Limit(20, 100, "more; all are in JSON")
#: The share of the errors that a module must take away, to be advised.
_MOST_OF_IT = 0.5
_LEGEND = (
    "mean: over the weights, of the gradient's difference from FP32's relative to that gradient, each counted as 100% at most; "
    "each row: measured with this module's operators in FP32, forward and backward, and all others as they are; change: of the "
    "mean. Changes do not add up, since errors of one module spoil the gradients of others. Tried were the model's modules, then "
    "the parts of the one that lowers the mean most"
)
_CODE = """\
with torch.autocast(x.device.type, enabled=False):
    x = module.float()(x.float())"""


def document(report: PrecisionRanking) -> Document:
    return Document(f"Precision of the gradients of {report.model}, one step", tuple(_blocks(report)))


def _blocks(report: PrecisionRanking) -> Iterator[Block]:
    errors, weights = report.errors, number_of(report.weights, "weight")
    if errors is None:
        yield Line(
            "Nothing was ranked: a gradient is infinite or NaN, or the copies in FP32 had no room. second_opinion names the "
            "operator that breaks.",
            "warning",
        )
        return
    if not errors.mean:
        yield Line(
            f"The gradients of {weights} equal those computed in FP32: loss_fn computes nothing in FP16 or BF16."
        )
        return
    yield Line(
        f"The gradients of {weights} are {percent(errors.mean)} from FP32's on average, and {_error(errors.worst)} in "
        f"{errors.whose!r}. Whether that harms the training is not measured."
    )
    yield from _advice(errors, report.modules, report.model)
    yield _table(report, errors)
    form = by_number(
        report.left_out, "{} candidate was left out for want of time.", "{} candidates were left out for want of time."
    )
    if report.left_out:
        yield Line(filled(form, f"{report.left_out:,}"))


def _advice(errors: GradientErrors, modules: tuple[Widening, ...], model: str) -> Iterator[Block]:
    """Yield the smallest part that takes most of the errors away."""
    parts = [each for each in modules if _taken(each, errors) >= _MOST_OF_IT]
    if not parts:
        yield Line("No module alone takes half of that away: the errors arise all over the model.")
        return
    part = max(parts, key=lambda each: (bool(each.operator), each.is_own, each.module.count("."), _taken(each, errors)))
    if any(each.module.startswith(f"{part.module}.") for each in modules if part.module):
        yield Line(f"They arise all over {part.module!r}: none of its modules alone takes half of them away.")
        return
    operators = [each for each in modules if each.operator and each.module == part.module]
    together = " Its operators do so only together." if operators and not part.operator else ""
    taken = percent(_taken(part, errors))
    yield Line(f"In FP32, {_name(part, model)} alone takes {taken} of that away.{together}", "warning")
    if part.module and not part.is_own:
        yield Code(_CODE)


def _taken(part: Widening, errors: GradientErrors) -> float:
    return 1 - part.errors.mean / errors.mean


def _change(part: Widening, errors: GradientErrors) -> str:
    change = round(-100 * _taken(part, errors))
    return f"{change:+d}%" if change else "0%"


def _name(part: Widening, model: str) -> str:
    """Return a module, its own code, or one of its operators, in words."""
    whole = part.module or f"{model}'s own code and the loss"
    if part.operator:
        return f"{part.operator} in {whole}"
    return f"{whole} (own code)" if part.is_own and part.module else whole


def _table(report: PrecisionRanking, errors: GradientErrors) -> Tables:
    columns = (
        Column("in FP32", is_name=True),
        Column("change"),
        *(Column("mean"), Column("largest"), Column("of", is_left=True, priority=1)),
    )
    rows = [(Cell("nothing, as it runs"), Cell(""), *_figures(errors))]
    for each in report.modules:
        rows.append((Cell(_name(each, report.model)), Cell(_change(each, errors)), *_figures(each.errors)))
    return Tables((Table(columns, tuple(rows)),), ROWS, len(rows), _LEGEND)


def _figures(errors: GradientErrors) -> tuple[Cell, Cell, Cell]:
    return Cell(percent(errors.mean)), Cell(_error(errors.worst)), Cell(errors.whose)


def _error(relative: float) -> str:
    """Return an error in percent, which may exceed 100."""
    return percent(relative) if relative <= 1 else f"{100 * relative:,.0f}%"


# -- JSON ---------------------------------------------------------------------------------------------------------------

LAYOUT = Layout(5, indent=1)


def to_plain(report: PrecisionRanking) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings, numbers, booleans and None."""
    return headed("mpinspect.ranking", 1, plain(fields(report)))
