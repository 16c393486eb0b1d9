"""Finds operations at or beyond the edge of their domain in an autograd graph, before its backward runs.

A node saves the tensors that its gradient needs: arguments (``_saved_self``) or the result. They show a logarithm of zero, the
division of a row by its own zero norm, or a softmax of a row of -inf, also in code between modules and in the loss.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.capture.graph import dtype_of, graph, numel_of, operator_of
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.records import BEYOND_FLOAT16, CONSTANT, ROUNDED_DIFFERENCE, TOO_FEW
from mpinspect.ranges.session import MOST_ROWS
from mpinspect.reporting.words import number_of
from mpinspect.runtime.outputs import leaves


class Rows(NamedTuple):
    """The positions along a tensor's first dimension with an element of a certain kind.

    Args:
        first: the first few of them.
        number: how many there are.
        of: the size of the dimension; 0 for a tensor without dimensions.
    """

    first: tuple[int, ...] = ()
    number: int = 0
    of: int = 0

    @classmethod
    def where(cls, condition: torch.Tensor) -> Rows:
        """Return the positions where any element of ``condition`` is True. Waits for the GPU."""
        if not condition.dim():
            return cls()
        found = condition.reshape(condition.shape[0], -1).any(1).nonzero().flatten()
        return cls(tuple(found[:MOST_ROWS].tolist()), len(found), condition.shape[0])


@dataclass(frozen=True)
class Singular:
    """One operation with arguments at or beyond the edge of its domain.

    Args:
        kind: "argument", "mask", "zero-row"; "target" for a loss with non-finite targets; "difference" for a non-finite
            difference from a constant, which the model's output may have caused as well.
        operator: the operation in words: "a logarithm", "a division".
        what: its argument in words: "of zero", "of a negative number".
        elements: number of such elements.
        rows: their positions along the first dimension.
        order: the node's sequence number; nodes made earlier have lower ones.
        of: for a difference, the sequence number of the node that made the minuend.
        bits: width of the result's dtype; 0 if unknown.
        by: the parameter that an infinite operand is divided by or multiplied with, if any.
        node: the node's name.
    """

    kind: str
    operator: str
    what: str
    elements: int
    rows: Rows
    order: int
    of: int | None = None
    bits: int = 0
    by: torch.Tensor | None = None
    node: str = ""


def singular(node: Any) -> Singular | None:
    """Return the singularity in a node's arguments; None if there is none or the node saved nothing. Waits for the GPU."""
    return _found(node, _FINDERS)


def earliest(found: Iterable[Singular | None]) -> Singular | None:
    """Return the operation that ran first; None without one."""
    return min(filter(None, found), key=lambda each: each.order, default=None)


def may_be_singular(node: Any) -> bool:
    """Return whether ``singular``, ``infinite_operand`` or ``applies_mask`` may find anything in a node, by its name."""
    return has_finder(node) or operator_of(node) in _MAY_MASK


def has_finder(node: Any) -> bool:
    """Return whether ``singular`` or ``infinite_operand`` may find anything in a node, by its name.

    Matrix products are left out: what breaks in them breaks the loss too, and comparing them takes long.
    """
    if operator_of(node) in MATRIX_PRODUCTS:
        return False
    return _FINDERS[node.name()] is not None or _INFINITE[node.name()] is not None


def infinite_operand(node: Any) -> Singular | None:
    """Return a product's or a division's infinite operand whose gradient may be zero; None if there is none. Waits for the GPU.

    Behind a mask's -inf the gradient is zero, and the other operand's gradient is 0 * inf.
    """
    found = _found(node, _INFINITE)
    return found and replace(found, by=_parameter(node))


def _found(node: Any, finders: _Finders) -> Singular | None:
    find = finders[node.name()]
    if find is None:
        return None
    try:
        if is_packed(node):
            return None
        found = find(node)
    except (AttributeError, RuntimeError, IndexError, TypeError):
        # The saved tensor has another name, or a backward that has already run has freed it.
        return None
    if found is None:
        return None
    kind, operator, what, where = found
    of = _minuend(node.next_functions[0][0]) if kind == "difference" else None
    rows, order = Rows.where(where), node._sequence_nr()
    return Singular(kind, operator, what, int(where.sum()), rows, order, of, _bits_of(node), node=node.name())


def _bits_of(node: Any) -> int:
    dtype = dtype_of(node)
    return 8 * dtype.itemsize if dtype is not None else 0


def overflowed(nodes: Sequence[Any]) -> Singular | None:
    """Return the first operation of a graph whose result FP16 can't hold; None if it is not known. Waits for the GPU.

    Args:
        nodes: the graph of a loss that is not finite, the nearest first.
    """
    if not nodes:
        return None
    ordered = sorted(nodes, key=lambda node: int(node._sequence_nr()))
    broken = next((node for node in ordered if not is_packed(node) and _saved_broken(node)), nodes[0])
    near = sorted(graph([broken], _NEARBY), key=lambda node: int(node._sequence_nr()))
    return next(filter(None, (_found(node, _OVERFLOWS) for node in near)), None)


def added_constant(nodes: Sequence[Any], after: int) -> Singular | None:
    """Return the only sum or difference with a constant, if by elimination the constant is infinite or NaN; None otherwise.

    The operands of other operations are saved, and all of them are finite. An operation in FP16 may have overflowed instead.
    Waits for the GPU.

    Args:
        nodes: the graph of a loss that is not finite.
        after: the sequence number of the node that made the model's output, which is finite.
    """
    own = [node for node in nodes if node._sequence_nr() > after and not hasattr(node, "variable")]
    if any(is_packed(node) or _saved_broken(node) or dtype_of(node) is torch.float16 for node in own):
        return None
    added = [node for node in own if operator_of(node) in _SUMS and numel_of(node) > 1]
    if len(added) != 1 or all(following is not None for following, _ in added[0].next_functions):
        return None
    (node,) = added
    operator, what = _SUMS[operator_of(node)], f"with {CONSTANT} that is infinite or NaN"
    order, name = node._sequence_nr(), node.name()
    return Singular("argument", operator, what, 0, Rows(), order, bits=_bits_of(node), node=name)


def _saved_broken(node: Any) -> bool:
    """Return whether a node saved an operand, or its result, with an infinity or NaN."""
    try:
        kept = [getattr(node, name, None) for name in _SAVED]
    except RuntimeError:
        # A backward that has already run has freed them.
        return False
    return any(not bool(each.isfinite().all()) for each in kept if is_plain(each))


#: Whether this torch tells that hooks have packed a saved tensor; an older one would unpack it.
KNOWS_PACKED = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "unpack_hook")


def is_packed(node: Any) -> bool:
    """Return whether hooks packed a node's saved tensors: activation checkpointing repeats a whole forward to unpack one tensor.

    Returns False if torch is too old to have this.
    """
    return any(getattr(each, "unpack_hook", None) is not None for each in _raw(node))


def overflowed_pack(node: Any) -> Singular | None:
    """Return the infinities and NaNs of a saved tensor that hooks have packed in a dtype narrower than the node's result.

    Reads the packed tensors without unpacking them. Waits for the GPU.
    """
    dtype = dtype_of(node)
    hooked = [each for each in _raw(node) if getattr(each, "unpack_hook", None) is not None]
    for kept in leaves([getattr(each, "data", None) for each in hooked]):
        if dtype is None or not isinstance(kept, torch.Tensor) or kept.dtype.itemsize >= dtype.itemsize:
            continue
        where = ~kept.float().isfinite()
        if bool(where.any()):
            what = f"that hooks packed in {dtype_name(kept.dtype)}, where it is not finite"
            operator = f"the gradient of {operator_of(node)} from a saved tensor"
            return Singular("argument", operator, what, int(where.sum()), Rows.where(where), node._sequence_nr())
    return None


def _raw(node: Any) -> list[Any]:
    """Return a node's saved tensors before any hook unpacks them."""
    return list(leaves(getattr(node, name) for name in attributes(node, "_raw_saved_")))


#: The attributes of types of nodes with a prefix.
_ATTRIBUTES: dict[tuple[type, str], tuple[str, ...]] = {}


def attributes(node: Any, prefix: str) -> tuple[str, ...]:
    """Return a node's attributes with a prefix: "_saved_", or "_raw_saved_" for tensors before hooks unpack them."""
    key = type(node), prefix
    if key not in _ATTRIBUTES:
        _ATTRIBUTES[key] = tuple(name for name in dir(key[0]) if name.startswith(prefix))
    return _ATTRIBUTES[key]


def saved_dim(node: Any) -> int:
    """Return the dimension along which a node works; autograd saves a negative dimension as an unsigned number."""
    return ctypes.c_int64(node._saved_dim).value


_Found = tuple[str, str, str, torch.Tensor] | None
_Finder = Callable[[Any], _Found]


def _argument(operator: str, what: str, where: torch.Tensor, kind: str = "argument") -> _Found:
    """Return the finding on the elements where the condition holds; None if it holds nowhere."""
    if not bool(where.any()):
        return None
    return kind, operator, what, where


def _at_edge(operator: str, saved: str, *edges: tuple[str, Callable[[torch.Tensor], torch.Tensor]]) -> _Finder:
    """Return a finder of elements of the argument, or of the result, that show an edge of an operation's domain.

    Args:
        operator: the operation in words.
        saved: the attribute of the node that holds the elements.
        edges: for each edge the words, and the function that returns where the elements show it.
    """

    def find(node: Any) -> _Found:
        kept = getattr(node, saved)
        named = ((what.replace("of zero,", f"{_zero(node)},") or _negative(node), where) for what, where in edges)
        found = (_argument(operator, what, where(kept)) for what, where in named)
        return next(filter(None, found), None)

    return find


def _log(node: Any) -> _Found:
    if getattr(node, "_saved_eps", None) is not None:
        # torch.logit clamps its argument.
        return None
    given = node._saved_self
    edge = -float(node.name().startswith("Log1p"))
    below = given < edge
    if bool(below.any()):
        return _argument("a logarithm", _negative(node), below)
    made = _maker(node)
    infinite = given == math.inf
    if made is not None and made.name().startswith("Sum") and dtype_of(made) is torch.float16 and bool(infinite.any()):
        # Infinite terms would have been found before their sum.
        return _argument("a sum", BEYOND_FLOAT16, infinite)
    what = _zero(node) + ", the result of a softmax" * (made is not None and made.name().startswith("Softmax"))
    return _argument("a logarithm", what, given == edge)


def _negative(node: Any) -> str:
    """Return a negative argument in words: it may be left of a difference, such as |a|^2 + |b|^2 - 2 ab, with rounded terms."""
    below = graph([node], _NEARBY)[1:]
    is_difference = any(each.name().startswith(_DIFFERENCES) for each in below)
    return "of a negative number" + ROUNDED_DIFFERENCE * (is_difference and any(map(_is_narrow, below)))


def _zero(node: Any, operand: int = 0) -> str:
    """Return a zero argument in words: rounding may have made it if it is a difference in 16 bits, or a product of one."""
    made = [_maker(node, operand)]
    for each in made:
        if each is not None and each.name().startswith(_PRODUCTS) and len(made) < _NEARBY:
            made += [_maker(each, place) for place in range(len(each.next_functions))]
    differences = [each for each in made if each is not None and each.name().startswith(_DIFFERENCES)]
    return "of zero" + ROUNDED_DIFFERENCE * any(map(_is_narrow, differences))


def _is_narrow(node: Any) -> bool:
    return _bits_of(node) == 16


def _maker(node: Any, operand: int = 0) -> Any:
    """Return the node that made the values of one of a node's arguments; None for a leaf."""
    node = node.next_functions[operand][0]
    while node is not None and node.name().startswith((*SAME_VALUES, *_SOME_VALUES)):
        node = node.next_functions[0][0]
    return node


def _divide(node: Any) -> _Found:
    below = node._saved_other
    if below is None:
        return None
    zero = below == 0
    if not bool(zero.any()):
        return _of_constant(node, 1, below, "a division", "by")
    above = getattr(node, "_saved_self", None)
    if above is not None and below.dim() == above.dim() and below.numel() < above.numel():
        zero_rows = zero.expand_as(above) & (above == 0)
        if bool(zero_rows.any()):
            return "zero-row", "a division", "of a row of zeros by its own zero", zero
    return "argument", "a division", _zero(node, 1).replace("of zero", "by zero"), zero


def _infinite_numerator(node: Any) -> _Found:
    return _infinities("a division", "of an infinity by a tensor that takes a gradient", node, "_saved_self", 1)


def _infinite_factor(node: Any) -> _Found:
    what = "of an infinity and a tensor that takes a gradient"
    return _infinities("a product", what, node, "_saved_self", 1) or _infinities(
        "a product", what, node, "_saved_other", 0
    )


def _infinities(operator: str, what: str, node: Any, saved: str, other: int) -> _Found:
    """Find infinities, but no NaN, in an operand that autograd saved for the gradient of the other one."""
    if _takes_no_gradient(node, other):
        return None
    kept = getattr(node, saved)
    if not is_plain(kept):
        return None
    found = _argument(operator, what, kept.isinf())
    if found and bool(kept.isnan().any()):
        return None
    return found


def _parameter(node: Any) -> torch.Tensor | None:
    """Return the parameter that is an operand of a node, directly or through casts and views; None without one."""
    for following, _ in node.next_functions:
        while following is not None and following.name().startswith(SAME_VALUES) and following.next_functions:
            following = following.next_functions[0][0]
        if following is not None and hasattr(following, "variable"):
            found: torch.Tensor = following.variable
            return found
    return None


def _too_few(node: Any) -> _Found:
    """Find a mean of nothing, or a deviation of so few elements that its divisor, their number less the correction, is zero."""
    words = next(words for prefix, words in _OF_ELEMENTS.items() if node.name().startswith(prefix))
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    sizes = node._saved_self.shape if sizes is None else sizes
    dims = getattr(node, "_saved_dim", None) or range(len(sizes))
    number = math.prod(sizes[ctypes.c_int64(dim).value] for dim in dims)
    correction = getattr(node, "_saved_correction", 0)
    if number > (1 if correction is None else correction):
        return None
    return _of_too_few(words, number)


def _of_too_few(words: str, number: int) -> _Found:
    """Return the finding on an operation of this many elements, which is 0/0 whatever they are."""
    nowhere = torch.zeros((), dtype=torch.bool, device="cpu")
    return "argument", words, f"{TOO_FEW} {number_of(number, 'element')} (0/0)", nowhere


def _ctc(node: Any) -> _Found:
    """Find targets that have more labels than their input has frames, whose CTC loss is infinite."""
    if not bool(node._saved_log_probs.isfinite().all()):
        return None
    return _argument("a CTC loss", "of a target longer than its input", node._saved_result0.isinf())


def _power(node: Any) -> _Found:
    base, exponent = node._saved_self, node._saved_exponent
    if isinstance(exponent, torch.Tensor):
        is_given = base.isfinite() & exponent.isfinite() & (base != 0)
        return _argument("a power of numbers", "too large for its result", node._saved_result.isinf() & is_given)
    if exponent > 1:
        return _difference(node)
    operator = f"a power of {exponent:g}"
    if exponent < 0:
        return _argument(operator, "of zero", base == 0)
    if exponent in (0, 1):
        return None
    return _argument(operator, _negative(node), base < 0) or _argument(
        operator, f"{_zero(node)}, where the power's derivative is infinite", base == 0
    )


def _product(node: Any) -> _Found:
    """Find a non-finite constant factor of a product."""
    is_matrix = operator_of(node) in MATRIX_PRODUCTS
    operator = "a matrix product" if is_matrix else "a product"
    places = enumerate(_factors(node), start=int(operator_of(node) == "Addmm"))
    found = (_of_constant(node, place, kept, operator, "with") for place, kept in places)
    return next(filter(None, found), None)


def _of_constant(node: Any, place: int, kept: Any, operator: str, preposition: str) -> _Found:
    if not is_plain(kept) or not _takes_no_gradient(node, place):
        return None
    # Autocast casts a batch before a matrix product: an infinity in FP16 may be that of the cast.
    may_be_cast = kept.dtype is torch.float16 and operator_of(node) in MATRIX_PRODUCTS
    where = kept.isnan() if may_be_cast else ~kept.isfinite()
    return _argument(operator, f"{preposition} {CONSTANT} that is infinite or NaN", where)


def _factors(node: Any) -> tuple[Any, Any]:
    """Return the saved operands of a product or quotient; None for one whose gradient nobody wants."""
    name = operator_of(node)
    first, second = ("_saved_mat1" if name == "Addmm" else "_saved_self"), "_saved_other"
    return getattr(node, first), getattr(node, "_saved_mat2" if name in MATRIX_PRODUCTS else second)


def _exact(node: Any, most: int) -> torch.Tensor | None:
    """Return a node's result in FP32, computed from the saved tensors of this node and of those before it; None if unknown.

    Args:
        most: the length of the longest way to a node before it.
    """
    if node is None or not most:
        return None
    name, before = operator_of(node), [each for each, _ in node.next_functions]
    if name in _UNCHANGED:
        return _exact(before[0], most - 1)
    if is_plain(leaf := getattr(node, "variable", None)):
        return leaf.detach().float()
    if name == "T":
        return None if (whole := _exact(before[0], most - 1)) is None else whole.t()
    if is_plain(kept := getattr(node, "_saved_result", None)):
        return kept.float()
    if name == "Sum":
        terms = _exact(before[0], most - 1)
        if terms is None:
            return None
        return terms.sum() if node.name().endswith("0") else terms.sum(_dims(node), node._saved_keepdim)
    if name in _INDEXED:
        kept = getattr(node, "_saved_source", None)
        terms = kept.float() if is_plain(kept) else _exact(before[1], most - 1)
        return None if terms is None else _indexed_sum(node, terms)
    if name == "Pow":
        is_known = is_plain(node._saved_self) and not isinstance(node._saved_exponent, torch.Tensor)
        return node._saved_self.float() ** node._saved_exponent if is_known else None
    if name not in _RULES:
        return None
    first = int(name == "Addmm")
    pairs = zip(_factors(node), before[first:], strict=False)
    operands = [kept.float() if is_plain(kept) else _exact(made, most - 1) for kept, made in pairs]
    known = [each for each in operands if each is not None]
    if len(known) < _OPERANDS:
        return None
    result = _RULES[name](*known)
    bias = getattr(before[0], "variable", None) if first else None
    return result + bias.float() if is_plain(bias) else result


def _indexed_sum(node: Any, terms: torch.Tensor) -> torch.Tensor:
    """Return the sum of these terms alone: what they are added to, mostly zeros, is not saved."""
    sums = torch.zeros(node._input_metadata[0].shape, dtype=terms.dtype, device=terms.device)
    add = sums.index_add_ if operator_of(node) == "IndexAdd" else sums.scatter_add_
    return add(saved_dim(node), node._saved_index, terms)


def _dims(node: Any) -> list[int]:
    """Return the dimensions that a sum is taken over; autograd saves negative ones as unsigned numbers."""
    return [ctypes.c_int64(each).value for each in node._saved_dim]


def _beyond(node: Any) -> _Found:
    """Find results in FP16 that are beyond its range, though all operands are finite."""
    exact = _exact(node, _MOST_BEFORE) if dtype_of(node) is torch.float16 else None
    if exact is None:
        return None
    operator = operator_of(node)
    words = f"a power of {node._saved_exponent:g}" if operator == "Pow" else _BEYOND[operator]
    return _argument(words, BEYOND_FLOAT16, exact.isfinite() & (exact.abs() >= FLOAT16.overflow_edge))


def _loss(node: Any) -> _Found:
    """Find a loss whose targets are all ignored, or a loss with non-finite targets or weights."""
    if node._saved_reduction == _MEAN and not node._saved_self.numel():
        return _of_too_few("a mean", 0)
    if node.name().startswith("NllLoss") and node._saved_reduction == _MEAN and bool(node._saved_total_weight == 0):
        left_out = torch.ones_like(node._saved_target, dtype=torch.bool)
        return "argument", "a mean over targets", "that are all ignored (0/0)", left_out
    target = getattr(node, "_saved_target", None)
    if isinstance(target, torch.Tensor) and target.is_floating_point() and _takes_no_gradient(node, 1):
        found = _argument("targets", "", ~target.isfinite(), "target")
        if found is not None:
            return found
    weight = getattr(node, "_saved_weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    return _argument("a weighted loss", "with a weight that is infinite or NaN", ~weight.isfinite())


def _difference(node: Any) -> _Found:
    """Find a non-finite difference from a constant, such as a target; ``node`` follows the difference and saved it."""
    kept, before = node._saved_self, node.next_functions[0][0]
    is_difference = before is not None and before.name().startswith(("Sub", "Rsub", "Add"))
    if not is_difference or not any(_takes_no_gradient(before, place) for place in range(len(before.next_functions))):
        return None
    return _argument("targets", "", ~kept.isfinite(), "difference")


def _minuend(difference: Any) -> int | None:
    """Return the sequence number of the node that made the minuend of a difference, skipping casts and views."""
    node = next((following for following, _ in difference.next_functions if following is not None), None)
    while node is not None and node.name().startswith(SAME_VALUES):
        node = node.next_functions[0][0]
    return node and int(node._sequence_nr())


def _takes_no_gradient(node: Any, place: int) -> bool:
    edges = node.next_functions
    return place < len(edges) and edges[place][0] is None


def _softmax(node: Any) -> _Found:
    whole = node._saved_result.isnan().all(saved_dim(node))
    if not bool(whole.any()):
        return None
    # A mask just before the softmax, on finite scores, explains a row of -inf; earlier NaNs have another cause.
    below = graph([node], 12)
    masking = next((each for each in below[1:4] if applies_mask(each)), None)
    if masking is None or not all(_is_finite(each) for each in below if each is not node):
        return None
    hides_others = bool((node._saved_result == 0).any())
    if operator_of(masking) not in _MASKING and not hides_others:
        # What was added may as well be noise that holds an infinity.
        return _argument("a sum", f"with {CONSTANT} that is infinite or NaN", whole)
    return "mask", "a softmax", "of a row of only -inf", whole


def applies_mask(node: Any) -> bool:
    """Return whether a node replaces scores by a constant, or adds a constant to them, as a mask does."""
    name = operator_of(node)
    if name not in _MAY_MASK:
        return False
    return name in _MASKING or any(following is None for following, _ in node.next_functions)


def _is_finite(node: Any) -> bool:
    """Return whether a node's saved arguments (``_saved_self``, or the factors of a product) are finite; of a function that the
    user has defined, whether it saved no NaN.
    """
    if is_packed(node):
        return False
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return not any(bool(each.isnan().any()) for each in node.saved_tensors if isinstance(each, torch.Tensor))
    kept = [getattr(node, name, None) for name in ("_saved_self", "_saved_mat1", "_saved_mat2")]
    return all(bool(each.isfinite().all()) for each in kept if is_plain(each))


def _attention(node: Any) -> _Found:
    mask = node._saved_attn_mask
    if mask is None:
        return None
    hidden = (mask == {torch.bool: False}.get(mask.dtype, -torch.inf)).all(-1)
    return _argument("attention", "with a row whose every key is masked", hidden, "mask")


#: By the beginning of a node's name, an operation that divides by the number of its elements.
_OF_ELEMENTS = {"Mean": "a mean", "Std": "a standard deviation", "Var": "a variance"}
#: Nodes that return their argument's values.
SAME_VALUES = (
    *("ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze"),
    *("Permute", "Transpose", "TBackward", "Expand", "Clone"),
)
#: Maximum number of nodes among which the difference is searched that left a negative number.
_NEARBY = 12
_DIFFERENCES = ("Sub", "Rsub")
#: Nodes whose result is zero if one of their arguments is.
_PRODUCTS = ("Mul", "Sqrt", "Pow", "Square", "Abs", "Neg")
#: Nodes that return some of their argument's values, or bound them.
_SOME_VALUES = ("Index", "Gather", "Select", "Slice", "Clamp")
MATRIX_PRODUCTS = ("Mm", "Bmm", "Addmm")
#: The attributes of a node with its operands and its result.
_SAVED = ("_saved_self", "_saved_other", "_saved_mat1", "_saved_mat2", "_saved_result")
#: How many operands the operations have whose results are computed again.
_OPERANDS = 2
#: Most nodes on the way to one whose result is computed again.
_MOST_BEFORE = 6
#: Sums of the terms with the same index.
_INDEXED = ("IndexAdd", "ScatterAdd")
#: The operations whose results are computed again.
_BEYOND = {
    "Mul": "a product",
    "Div": "a division",
    "Pow": "",
    "Sum": "a sum",
    **dict.fromkeys(_INDEXED, "an indexed sum"),
    **dict.fromkeys(MATRIX_PRODUCTS, "a matrix product"),
}
#: Sums and differences, which save no operand.
_SUMS = {"Add": "a sum", **dict.fromkeys(("Sub", "Rsub"), "a difference")}
#: How results follow from two operands.
_RULES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Mul": torch.mul,
    "Div": torch.div,
    # Autocast, in whose region the loop may call backward(), leaves FP64 as it is.
    **dict.fromkeys(MATRIX_PRODUCTS, lambda one, other: one.double() @ other.double()),
}
#: Nodes that return their argument as it is, but for its dtype.
_UNCHANGED = ("ToCopy", "Clone")
#: torch's number for reduction="mean".
_MEAN = 1
#: Nodes that apply a mask to scores, and these with the nodes that may add one.
_MASKING = ("MaskedFill", "Where", "MaskedScatter", "CopySlices", "IndexPut")
_MAY_MASK = frozenset((*_MASKING, "Add", "Sub"))


class _Finders(dict[str, _Finder | None]):
    """The finder for each name of a node, or None.

    Args:
        by_prefix: pairs of a prefix and its finder; the first prefix that a name begins with counts.
    """

    def __init__(self, *by_prefix: tuple[str, _Finder | None]) -> None:
        self._by_prefix = by_prefix

    def __missing__(self, name: str) -> _Finder | None:
        found = self[name] = next((find for prefix, find in self._by_prefix if name.startswith(prefix)), None)
        return found


_BEYOND_ONE = ("of a magnitude of 1 or more, where its derivative is infinite", lambda given: given.abs() >= 1)
_AT_ROOT_OF_ZERO = ("of zero, where the root's derivative is infinite", torch.logical_not)
_INFINITE = _Finders(("Mul", _infinite_factor), ("Div", _infinite_numerator))
_OVERFLOWS = _Finders(*((name, _beyond) for name in _BEYOND))
_FINDERS = _Finders(
    *((name, _softmax) for name in ("LogSoftmax", "Softmax", "SafeSoftmax")),
    # Other operations' names begin alike: logaddexp, acosh.
    *((f"{name}Backward", _log) for name in ("Log", "Log1p", "Log2", "Log10", "Logit")),
    ("Sqrt", _at_edge("a square root", "_saved_result", ("", torch.isnan), _AT_ROOT_OF_ZERO)),
    ("Rsqrt", _at_edge("1 / sqrt", "_saved_result", ("of zero or less", lambda root: ~root.isfinite()))),
    ("Reciprocal", _at_edge("1 / x", "_saved_result", ("of zero", torch.isinf))),
    ("Div", _divide),
    ("Pow", _power),
    ("Exp", _at_edge("exp", "_saved_result", ("of a number too large for its result", torch.isinf))),
    *((f"{name}Backward", _at_edge(name.lower(), "_saved_self", _BEYOND_ONE)) for name in ("Acos", "Asin", "Atanh")),
    ("ScaledDotProduct", _attention),
    *((name, _loss) for name in ("NllLoss", "BinaryCrossEntropy", "MseLoss", "SmoothL1Loss", "HuberLoss")),
    ("Abs", _difference),
    *((name, _product) for name in ("Mul", *MATRIX_PRODUCTS)),
    ("CtcLoss", _ctc),
    *((name, _too_few) for name in _OF_ELEMENTS),
)
