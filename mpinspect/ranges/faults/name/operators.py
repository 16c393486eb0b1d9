"""Words and code for operators that a second computation of a step judged, and for the places where they ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.faults.name.fault import Found
from mpinspect.ranges.records import OUTPUTS, AbsorbedOperand, AmplifiedError, GradientsError, LostSum, Record
from mpinspect.ranges.session import module_named
from mpinspect.reporting.sentences import Said, Sentences
from mpinspect.reporting.words import bracketed

#: An error of the gradients from which on rounding matters: BF16 alone makes some 1%.
MATTERS = 0.1
#: Operators that are infinite at zero.
AT_ZERO = ("div", "log", "pow", "reciprocal", "rsqrt")
#: Operators whose backward multiplies and adds up over the batch.
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "linear"})
#: The least share of the growth of errors for which a line is to blame.
CONCENTRATED = 1 / 3
#: Gradients of a smaller part of an earlier step's are those of a model that has converged.
_CONVERGED = 0.1
Placed = TypeVar("Placed", bound=Record)

_OUTSIDE = "code outside of modules"
#: The beginning of the phase of an optimizer's operators.
_STEP_OF = "step of "
#: The beginning of the phase of the operators of a backward that is Python code.
_BACKWARD_OF = "backward of "
#: Operators whose names say little.
_IN_WORDS = {
    "_to_copy": "a cast",
    "copy_": "a copy",
    "mm": "a matrix product",
    "addmm": "a linear layer",
    "bmm": "a batched matrix product",
    "_softmax": "softmax",
    "_euclidean_dist": "cdist",
    "_linalg_det": "a determinant",
    "linalg_inv_ex": "an inverse",
    "linalg_cholesky_ex": "a Cholesky decomposition",
    "_linalg_solve_ex": "the solution of a linear system",
    "sub": "a difference",
    "rsub": "a difference",
    "sigmoid_backward": "the gradient of sigmoid",
    "tanh_backward": "the gradient of tanh",
}
#: The binary operators as code.
_SIGNS = {"add": "+", "sub": "-", "rsub": "-", "mul": "*", "div": "/", **dict.fromkeys(("mm", "bmm", "mv", "dot"), "@")}
#: The methods of a tensor that operators are, as code.
_METHODS = {
    "linalg_vector_norm": "norm()",
    "linalg_inv_ex": "inverse()",
    "pow": "pow(p)",
    **{name: f"{name}(dim)" for name in ("cumsum", "log_softmax", "logsumexp", "softmax")},
    **{name: f"{name}()" for name in ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "reciprocal")},
    **{name: f"{name}()" for name in ("cos", "rsqrt", "sigmoid", "sin", "sqrt", "tan", "tanh")},
    **{name: f"{name}()" for name in ("mean", "norm", "prod", "std", "sum", "var")},
}
#: Operators that change dtypes alone.
CASTS = ("_to_copy", "copy_")


def expression(operator: str, cast: str = ".float()", other: str = "b") -> str:
    """Return an operator as code.

    Args:
        operator: its name in torch.
        cast: follows each operand.
        other: the second operand of a binary operator.
    """
    name = operator.strip("_")
    if operator in CASTS:
        return "x.float()"
    if name == "addmm":
        return f"x{cast} @ w{cast}.T + b{cast}"
    if name in _SIGNS:
        return f"a{cast} {_SIGNS[name]} {other}{cast}"
    return f"x{cast}.{_METHODS[name]}" if name in _METHODS else f"f(x{cast})"


def by_place(records: Iterable[Placed], size: str, most: float = math.inf) -> Iterator[Placed]:
    """Yield one record of each operator and line: the first, of all steps computed twice, with at least half the largest size.

    Sizes beyond ``most`` count as equal.
    """
    alike: dict[tuple[str, tuple[str, ...]], list[Placed]] = {}
    for record in records:
        alike.setdefault((record.name, record.names[:3]), []).append(record)
    for found in alike.values():
        largest = min(max(getattr(record, size) for record in found), most)
        yield next(record for record in found if getattr(record, size) >= largest / 2)


def operator_named(operator: str) -> str:
    """Return torch's name of an operator in words."""
    return _IN_WORDS.get(operator, operator.strip("_"))


def place_of(record: Record) -> dict[str, object]:
    """Return in words the operator of a record, its place and its dtype."""
    operator, line, phase = record.names[:3]
    operator = operator_named(operator)
    module = record.name and module_named(record.name)
    place = in_words(record.name, line)
    if phase == "backward":
        place = f"the backward of {module or _OUTSIDE}{bracketed(line)}"
        operator = f"the gradient of {operator}" if line else operator
    if phase.startswith(_BACKWARD_OF):
        place = f"the {phase}{bracketed(line)}"
    if optimizer := optimizer_of(record):
        place = f"{optimizer}'s step{bracketed(line)}"
    return {
        "operator": operator,
        "place": place,
        "line": line,
        "expression": expression(record.names[0]),
        "of_x": expression(record.names[0], "", "x"),
        "dtype": record.text,
        "end": FORMATS[record.text].max_finite,
    }


def in_words(path: str, line: str) -> str:
    """Return a module and a line in words, as far as they are known."""
    return (path and module_named(path) + bracketed(line)) or line or _OUTSIDE


def optimizer_of(record: Record) -> str:
    """Return the class of the optimizer in whose step an operator ran; "" for an operator outside of one."""
    return record.names[2].removeprefix(_STEP_OF) * record.names[2].startswith(_STEP_OF)


def origin_of(record: Placed) -> Placed | None:
    """Return a record of the earlier operator that a record names, at another line; None without one."""
    names = record.names[4:]
    if len(names) < len(("operator", "line", "module", "dtype")) or names[1] == record.names[1]:
        return None
    operator, line, module, dtype = names
    return replace(record, name=module, names=(operator, line, "forward"), text=dtype)


def found_at(
    record: Record,
    says: Said,
    fix: Said,
    code: Said = (),
    words: Mapping[str, object] | None = None,
    origin: Record | None = None,
    before: Sequence[str] = (),
    **more: Any,
) -> Found:
    """Return the occurrence that a record shows, at its operator; the sentences may use its figures, its place, its step
    ("measured") and the "count" of its elements.

    Args:
        origin: the earlier operator that it comes from, whose words begin with "origin"; None without one.
        before: lines that lead to it.
    """
    operator, line, phase = record.names[:3]
    evidence = {"operator": operator, "line": line, "phase": phase, "dtype": record.text, **record.figures}
    earlier: dict[str, object] = {"origin_expression": "f(z.float())"}
    if origin is not None:
        evidence |= {"origin_operator": origin.names[0], "origin_line": origin.names[1]}
        earlier = {f"origin_{name}": value for name, value in place_of(origin).items()}
        before = [origin.names[1], *before]
    count = int(record.figures.get("elements", 0))
    words = {**place_of(record), **earlier, "measured": record.step, "count": count, **(words or {})}
    more = {"layer": record.name, "step": record.step, "before": before, **more}
    return Found(says, evidence, words, fix, code, **more)


def of_learning_steps(errors: Iterable[GradientsError]) -> list[GradientsError]:
    """Return the errors of steps whose gradients are not small beside another step's, as those of a model that has converged."""
    errors = list(errors)
    least = _CONVERGED * max((each.size for each in errors), default=0.0)
    return [each for each in errors if each.size >= least]


def percent_up_to(error: float) -> str:
    """Return a relative error in words; a larger one than tenfold is no estimate of anything."""
    return f"{error:.0%}" if error < 10 else "more than 1,000%"


class LogSoftmax(Sentences):
    """The remedy for a logarithm of a softmax."""

    FIX = (
        "Take log_softmax of the logits: it is finite, and so is its gradient. A clamp would be finite too, but gives the "
        "clamped elements no gradient."
    )
    CODE = "# in place of log(x)\ny = torch.log_softmax(logits, -1)\nz = g(y)"


def is_log_of_softmax(record: Placed) -> bool:
    """Return whether a record is of a logarithm whose error begins in a softmax."""
    return record.names[0] == "log" and record.names[4:5] == ("_softmax",)


class Gradients(Sentences):
    OFF = "With all rounding of the step together, the gradient of {weight!r} is off by {gradient_off}."
    OUTPUTS_OFF = "With all rounding of the step together, the model's outputs are off by {gradient_off}."
    ALL_OFF = "With all rounding of the step together, this rank's gradients are off by {gradient_off}."


def gradients_off(record: LostSum | AbsorbedOperand | AmplifiedError) -> tuple[Gradients | None, dict[str, object]]:
    """Return the sentence on the gradients' error, if it matters, and the weight."""
    matters = record.gradients_error is not None and record.gradients_error >= MATTERS
    words: dict[str, object] = {
        "weight": "".join(record.names[3:4]),
        "gradient_off": percent_up_to(record.gradients_error or 0.0),
    }
    of_outputs = Gradients.OUTPUTS_OFF.when(words["weight"] == OUTPUTS)
    says = of_outputs or Gradients.OFF.when(words["weight"]) or Gradients.ALL_OFF
    return says.when(matters), words
