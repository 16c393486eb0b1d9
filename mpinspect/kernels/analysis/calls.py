"""Which product a kernel computed, and its FLOPs: kernels of one operator's call are looked at together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from mpinspect.kernels.analysis.operands import Products
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.shapes_of import ShapeRule
from mpinspect.shapes.records import Matmul

#: How kernels' names tell the gradients of a convolution apart (cuDNN, CUTLASS; also mangled: Conv2dDgrad).
_GRADIENTS = (("dgrad", re.compile(r"dgrad", re.IGNORECASE)), ("wgrad", re.compile(r"wgrad", re.IGNORECASE)))


def with_products(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """The rows with their product, its FLOPs and the shape rule's verdict where these follow, in the same order.

    Kernels of one call belong together. FLOPs belong to those of them that compute products; helpers beside them (split-K
    reductions, layout conversions) get none. Where the call's number is unknown, so are the FLOPs of kernels that share
    an operator's object: it may stand for one call or for many.
    """
    calls: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        number, op = row.kernel.call, row.kernel.matmul_op
        if op is not None and row.is_product:
            calls[row.trace, number is None, id(op) if number is None else number].append(index)
    found, products, rule = list(rows), Products(), ShapeRule()
    for indices in calls.values():
        of_call = products.of(rows[indices[0]].kernel.matmul_op)
        if of_call:
            for index, row in zip(indices, _assigned([rows[i] for i in indices], of_call, rule), strict=True):
                found[index] = row
    return found


def _assigned(rows: list[KernelRow], products: tuple[Matmul, ...], rule: ShapeRule) -> list[KernelRow]:
    """The rows of one call, each with its product."""
    if len(rows) == len(products) == 1:
        return [_with(rows[0], products[0], rows, rule)]
    by_product: dict[int, list[KernelRow]] = defaultdict(list)
    chosen = [_product_of(row.name, products) for row in rows]
    for row, product in zip(rows, chosen, strict=True):
        if product is not None:
            by_product[id(product)].append(row)
    return [
        row if product is None else _with(row, product, by_product[id(product)], rule)
        for row, product in zip(rows, chosen, strict=True)
    ]


def _with(row: KernelRow, product: Matmul, together: list[KernelRow], rule: ShapeRule) -> KernelRow:
    # dataclasses.replace takes twice as long, and a trace has hundreds of thousands of rows.
    return KernelRow(
        row.kernel,
        row.named,
        row.gpu,
        row.trace,
        row.verdict,
        row.reason,
        row.basis,
        product.dtype or row.dtype,
        product,
        _flops(row, together, product),
        rule.verdict(product, row.gpu),
    )


def _product_of(name: str, products: tuple[Matmul, ...]) -> Matmul | None:
    """The product that a kernel computes: the only one, or the one whose role its name tells."""
    if len(products) == 1:
        return products[0]
    for role, pattern in _GRADIENTS:
        if pattern.search(name):
            of_role = [product for product in products if product.role == role]
            return of_role[0] if len(of_role) == 1 else None
    return None


def _flops(row: KernelRow, together: list[KernelRow], product: Matmul) -> float | None:
    """The product's FLOPs, shared by time among equal kernels; None where unlike kernels compute it (Winograd's parts)."""
    if len(together) == 1:
        return float(product.flops)
    if len({other.name for other in together}) > 1 or row.kernel.call is None:
        return None
    total = sum(other.time_us for other in together)
    return product.flops * row.time_us / total if total > 0 else None
