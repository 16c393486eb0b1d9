"""Which gradient a product of the backward computes, told by the product of the forward that it belongs to.

Of out = a @ b the gradient of a is grad @ b.T and that of b is a.T @ grad (torch/csrc/autograd/FunctionsManual.cpp): the factor
that the backward reads again is not the one whose gradient it makes. The gradient of a parameter is a wgrad, that of an
activation a dgrad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mpinspect.matmuls import Matmul

#: A storage and the offset in it.
Memory = tuple[int, int]
_NONE = (0, 0)


def memory_of(tensor: Any) -> Memory:
    """Where a tensor's elements lie; the same for its transposed views."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return _NONE
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


@dataclass(frozen=True, slots=True)
class Forward:
    """A product of the forward.

    Args:
        module: its id.
        sizes: m, n and k.
        a, b: where its factors lie.
        a_parameter, b_parameter: names of the parameters that they are, "" for activations.
        autocast: as the record has it.
    """

    module: int
    sizes: tuple[int, int, int]
    a: Memory
    b: Memory
    a_parameter: str
    b_parameter: str
    autocast: bool | None


class Forwards:
    """The products of the forward by the autograd node that they made, and by module."""

    def __init__(self) -> None:
        self._by_node: dict[int, Forward] = {}
        self._by_module: dict[int, dict[tuple[Any, ...], Forward]] = {}

    def add(self, forward: Forward, node: int | None) -> None:
        """``node``: the number of its autograd node, None if it has none of its own."""
        if node is not None:
            self._by_node.setdefault(node, forward)
        self._by_module.setdefault(forward.module, {})[forward.sizes, forward.a_parameter, forward.b_parameter] = (
            forward
        )

    def of_node(self, number: int) -> Forward | None:
        """The product that made a node."""
        return self._by_node.get(number)

    def likeliest(self, module: int, record: Matmul, first: Memory, second: Memory) -> Forward | None:
        """For custom Functions, whose forward's products have no nodes: by the memory, else by the sizes."""
        known = list(self._by_module.get(module, {}).values())
        for forward in known:
            if {first, second} & {forward.a, forward.b}:
                return forward
        wanted = sorted((record.m, record.n, record.k))
        return next((forward for forward in known if sorted(forward.sizes) == wanted), None)


def role_and_parameter(
    forward: Forward | None, record: Matmul, first: Memory, second: Memory, weight: str
) -> tuple[str, str]:
    """Role and parameter of a product of the backward.

    Args:
        forward: the product of the forward; None where none is known.
        record: of the backward.
        first, second: where its factors lie.
        weight: the parameter that one of its factors is, "" if none.
    """
    if forward is None:
        return "dgrad", weight
    parameter = forward.a_parameter if _is_gradient_of_a(forward, record, first, second) else forward.b_parameter
    return ("wgrad" if parameter else "dgrad"), parameter or forward.a_parameter or forward.b_parameter


def _is_gradient_of_a(forward: Forward, record: Matmul, first: Memory, second: Memory) -> bool:
    used = {first, second} - {_NONE}
    has_a, has_b = forward.a in used, forward.b in used
    if has_a != has_b:
        return has_b
    # By the sizes: the gradient of a sums over n and is m by k, that of b sums over m and is k by n.
    m, n, k = forward.sizes
    could_be_a = record.k == n and {record.m, record.n} == {m, k}
    could_be_b = record.k == m and {record.m, record.n} == {k, n}
    return could_be_a and not could_be_b
