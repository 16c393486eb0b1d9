"""Finds, in an autograd graph, a term of the loss that is computed in 16 bits although the loss itself may not be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.graph import dtype_of, numel_of, operator_of, receivers, walk
from mpinspect.runtime.emulation.autocast_lists import FLOAT32, FLOAT32_BY_DEFAULT

#: Maximum number of nodes read in the loss's own code, and in one term.
_MOST_NODES, _MOST_OF_A_TERM = 512, 24
#: Maximum number of named operations if the loss calls no loss function.
_MOST_NAMED = 3
_DTYPES = (torch.float16, torch.bfloat16)


class Term(NamedTuple):
    """A term of a loss: its 16-bit dtype, its operators in that dtype, the last one first, and whether they may cancel.

    ``is_wide_on_cuda``: see the function of this name.
    """

    dtype: torch.dtype
    operators: tuple[str, ...]
    cancels: bool
    is_wide_on_cuda: bool = False


def narrow_term(starts: Iterable[Any], ends: Collection[int]) -> Term | None:
    """Return a term that is computed in 16 bits, one whose operators may cancel if there is one. Reads no values.

    A term is a reduction to a scalar that the loss adds to others, or a difference of log-probabilities anywhere in the loss.

    Args:
        starts: the nodes of the losses.
        ends: the sequence numbers of the nodes that made modules' outputs, where the loss's own code ends.
    """
    given = [node for node in starts if node is not None]
    terms = [_term(node, ends) for node in _summed(given)]
    terms += [term for node in _code(given, ends, _MOST_NODES) if (term := _log_ratio(node)) is not None]
    return max(terms, key=lambda term: term.cancels, default=None)


class Operations(NamedTuple):
    """The operations of a loss's own code: the loss function alone, or the last few except sums and products.

    ``dtype``: the first operation's. ``in_half``: whether any operation of that code is in FP16.
    """

    names: tuple[str, ...]
    dtype: torch.dtype | None
    in_half: bool


def operations(starts: Iterable[Any], ends: Collection[int], products: Collection[int] = ()) -> Operations:
    """Return the operations of the losses' own code. Reads no values.

    Args:
        starts: the nodes of the losses.
        ends: the sequence numbers of the nodes that made modules' outputs.
        products: the sequence numbers of the nodes that multiplied losses by a scale, which are left out.
    """
    code = _code([each for each in starts if each is not None], ends, _MOST_NODES)
    nodes = [node for node in code if dtype_of(node) and node._sequence_nr() not in products]
    in_half = any(dtype_of(node) is torch.float16 for node in nodes)
    functions = [node for node in nodes if "Loss" in operator_of(node) or operator_of(node) in _FUNCTIONS]
    telling = [node for node in nodes if operator_of(node) not in _MOVING | _LINEAR]
    named = functions[:1] or telling or [node for node in nodes if operator_of(node) not in _MOVING]
    names = tuple(dict.fromkeys(map(operator_of, named)))[:_MOST_NAMED]
    return Operations(names, next(map(dtype_of, named), None), in_half)


def is_wide_on_cuda(start: Any) -> bool:
    """Return whether CUDA's autocast would compute a 16-bit result in FP32.

    It would if a 16-bit operator before the result, after the last matrix product or cast, is on CUDA's list of FP32 operators.
    A CPU's list is shorter: log_softmax, pow, exp and sum stay in 16 bits there.
    """
    queue = list(filter(None, [start]))
    for node in queue:
        if dtype_of(node) not in _DTYPES or operator_of(node) in _NARROWING:
            continue
        if operator_of(node).lower() in _wide_operators():
            return True
        queue += [each for each, _ in node.next_functions if each not in (None, *queue)][: _MOST_OF_A_TERM - len(queue)]
    return False


@cache
def _wide_operators() -> frozenset[str]:
    """Return the operators on CUDA's FP32 lists, in lower case without underscores, as autograd's nodes are named."""
    names = [name.partition(".")[0] for name in (FLOAT32 + FLOAT32_BY_DEFAULT).split()]
    return frozenset(name.replace("_", "") for name in names)


def _summed(starts: list[Any]) -> Iterator[Any]:
    """Yield the 16-bit reductions whose scalar results the loss adds up."""
    queue = list(dict.fromkeys(starts))
    seen = set(queue)
    for node in queue:
        if numel_of(node) != 1:
            continue
        name = operator_of(node)
        below = list(receivers(node))
        is_collected = name in ("Sum", "Mean") and all(operator_of(each) in _COLLECTING for each in below)
        if name in _REDUCING and not is_collected:
            if dtype_of(node) in _DTYPES:
                yield node
        elif name in _PASSING or is_collected:
            # A stack of scalars is no scalar.
            for each in below:
                parts = [part for part, _ in each.next_functions] if operator_of(each) in _COLLECTING else [each]
                for part in parts:
                    if part is not None and part not in seen and len(seen) < _MOST_NODES:
                        seen.add(part)
                        queue.append(part)


def _term(node: Any, ends: Collection[int]) -> Term:
    operators = _operators(node, ends)
    cancels = "NllLoss" not in operators and not _CANCELLING.isdisjoint(operators)
    return Term(dtype_of(node), operators, cancels, is_wide_on_cuda(node))


def _operators(node: Any, ends: Collection[int]) -> tuple[str, ...]:
    below = _code([node], ends, _MOST_OF_A_TERM)
    return tuple(operator_of(each) for each in below if dtype_of(each) in _DTYPES)


def _code(starts: list[Any], ends: Collection[int], most: int) -> list[Any]:
    """Return at most ``most`` nodes of the loss's own code, the nearest first. It ends at modules' outputs, except scalars."""
    return list(walk(starts, most, lambda node: node._sequence_nr() not in ends or numel_of(node) == 1))


def _log_ratio(node: Any) -> Term | None:
    """Return a difference of two log-probabilities that were rounded to 16 bits, or of one and a constant, in any dtype."""
    name = operator_of(node)
    if name not in ("Sub", "Rsub") or len(node.next_functions) < 2:
        return None
    rounded: list[torch.dtype] = []
    for side in (following for following, _ in node.next_functions[:2] if following is not None):
        way = _way_to_source(side)
        narrow = [dtype for each in way if (dtype := dtype_of(each)) in _DTYPES]
        if operator_of(way[-1]) != "LogSoftmax" or not narrow:
            return None
        rounded.append(narrow[-1])
    # Both sides are log-softmaxes, which are on CUDA's list.
    return next((Term(dtype, (name, "LogSoftmax"), True, True) for dtype in rounded), None)


def _way_to_source(node: Any) -> list[Any]:
    """Return the nodes that select, move or add up values, and the node that computed them last."""
    way = [node]
    while len(way) <= 8 and operator_of(way[-1]) in _SELECTING:
        following = way[-1].next_functions[0][0]
        if following is None:
            break
        way.append(following)
    return way


#: Operators with 16-bit results under CUDA's autocast, for any input: matrix products and casts.
_NARROWING = frozenset({"ToCopy", "Addmm", "Mm", "Addbmm", "Baddbmm", "Bmm", "Addmv", "Mv", "Linear", "Convolution"})
#: Operators whose scalar results are sums of others' scalars.
_ARITHMETIC = frozenset({"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "NanToNum", "Where"})
#: Operators that do not name a loss, unless it has no others.
_LINEAR = frozenset({"Add", "Sub", "Rsub", "Mul", "Neg"})
#: Operators that return some of their argument's values.
_MOVING = frozenset(
    {"ToCopy", "Clone", "Alias", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Select", "Slice"}
)
_PASSING = _ARITHMETIC | _MOVING | {"Unbind"}
_SELECTING = _MOVING | {"Permute", "Transpose", "T", "Gather", "Index", "IndexSelect", "Sum"}
_COLLECTING = frozenset({"Stack", "Cat"})
_LOSSES = frozenset({"KlDiv", "MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss", "NllLoss2D", "SoftMarginLoss"})
#: Loss functions whose names do not end in "Loss".
_FUNCTIONS = frozenset({"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "KlDiv"})
_REDUCING = _LOSSES | {
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
    *("Dot", "LinalgVectorNorm", "Logsumexp", "Mean", "Nansum", "Norm", "Sum"),
}
#: Operators whose results may cancel in a sum. A product with a constant does not: its gradient is the constant.
_CANCELLING = frozenset({"Sub", "Rsub", "KlDiv", "MseLoss", "SmoothL1Loss", "HuberLoss"})
