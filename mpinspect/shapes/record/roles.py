"""Which gradient a product of the backward computes, told by the product of the forward that it belongs to.

Of out = a @ b the gradient of a is grad @ b.T and that of b is a.T @ grad (torch/csrc/autograd/FunctionsManual.cpp), so the
sizes tell them apart, and where those are equal the parameter that the backward reads again is not the one whose gradient it
makes. Addresses of memory would not do: checkpointing frees activations, and others take their place. The gradient of a
parameter is a wgrad, that of an activation a dgrad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpinspect.shapes.records import Matmul


@dataclass(frozen=True, slots=True)
class Forward:
    """A product of the forward.

    Args:
        module: its id.
        sizes: m, n and k.
        a_parameter, b_parameter: names of the parameters that they are, "" for activations.
        autocast, math_path: as the record has them.
    """

    module: int
    sizes: tuple[int, int, int]
    a_parameter: str
    b_parameter: str
    autocast: bool | None
    math_path: str = ""


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

    def likeliest(self, module: int, record: Matmul, weight: str) -> Forward | None:
        """For custom Functions, whose forward's products have no nodes: by the parameter that is read, and by the sizes."""
        wanted = sorted((record.m, record.n, record.k))
        fitting = [one for one in self._by_module.get(module, {}).values() if sorted(one.sizes) == wanted]
        reading = [one for one in fitting if weight and weight in (one.a_parameter, one.b_parameter)]
        return next(iter(reading or fitting), None)


def role_and_parameter(forward: Forward | None, record: Matmul, weight: str) -> tuple[str, str]:
    """Role and parameter of a product of the backward.

    Args:
        forward: the product of the forward; None where none is known.
        record: of the backward.
        weight: the parameter that one of its factors is, "" if none.
    """
    if forward is None:
        return "dgrad", weight
    parameter = forward.a_parameter if _is_gradient_of_a(forward, record, weight) else forward.b_parameter
    return ("wgrad" if parameter else "dgrad"), parameter or forward.a_parameter or forward.b_parameter


def _is_gradient_of_a(forward: Forward, record: Matmul, weight: str) -> bool:
    # The gradient of a sums over n and is m by k, that of b sums over m and is k by n.
    m, n, k = forward.sizes
    could_be_a = record.k == n and {record.m, record.n} == {m, k}
    could_be_b = record.k == m and {record.m, record.n} == {k, n}
    if could_be_a != could_be_b:
        return could_be_a
    return weight == forward.b_parameter if weight else bool(forward.a_parameter)
