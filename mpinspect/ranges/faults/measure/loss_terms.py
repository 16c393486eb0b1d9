"""Names the operations of a loss that is not finite, of its autograd graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.graph import dtype_of, numel_of, operator_of, walk

#: Maximum number of nodes read in the loss's own code.
_MOST_NODES = 512
#: Maximum number of named operations if the loss calls no loss function.
_MOST_NAMED = 3
#: Operators that do not name a loss, unless it has no others.
_LINEAR = frozenset({"Add", "Sub", "Rsub", "Mul", "Neg"})
#: Operators that return some of their argument's values.
_MOVING = frozenset(
    {"ToCopy", "Clone", "Alias", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Select", "Slice"}
)
#: Loss functions whose names do not end in "Loss".
_FUNCTIONS = frozenset({"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "KlDiv"})


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
    # It ends at modules' outputs, except scalars.
    code = walk(starts, _MOST_NODES, lambda node: node._sequence_nr() not in ends or numel_of(node) == 1)
    nodes = [node for node in code if dtype_of(node) and node._sequence_nr() not in products]
    in_half = any(dtype_of(node) is torch.float16 for node in nodes)
    functions = [node for node in nodes if "Loss" in operator_of(node) or operator_of(node) in _FUNCTIONS]
    telling = [node for node in nodes if operator_of(node) not in _MOVING | _LINEAR]
    named = functions[:1] or telling or [node for node in nodes if operator_of(node) not in _MOVING]
    names = tuple(dict.fromkeys(map(operator_of, named)))[:_MOST_NAMED]
    return Operations(names, next(map(dtype_of, named), None), in_half)
