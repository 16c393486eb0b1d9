"""Where Tensor Cores were eligible but not used, or used but degraded: equal products together, each with its cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mpinspect.kernels.analysis.causes import Cause, Causes
from mpinspect.kernels.analysis.rates import SiblingRates
from mpinspect.kernels.analysis.records import Loss
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.savings import can_gain, savings, ways
from mpinspect.kernels.analysis.shapes_of import LintedModules
from mpinspect.kernels.analysis.shares import share
from mpinspect.kernels.names.classify import FULL_ALIGNMENT


def losses(rows: Sequence[KernelRow], linted: LintedModules) -> tuple[Loss, ...]:
    """Most time first. ``linted``: what a shape lint said of the modules, if there was one."""
    total = sum(row.time_us for row in rows)
    groups: dict[tuple[object, ...], list[KernelRow]] = defaultdict(list)
    for row in rows:
        if row.verdict == "degraded" or (row.verdict == "off" and is_eligible(row)):
            groups[_key(row)].append(row)
    siblings, causes = SiblingRates(rows), Causes(rows)
    found = [_loss(group, total, siblings, causes.of(group[0]), linted.cause(group[0])) for group in groups.values()]
    return tuple(sorted(found, key=lambda loss: -loss.time_us))


def is_eligible(row: KernelRow) -> bool:
    """Whether a product that ran on CUDA cores could run on this GPU's Tensor Cores, in its dtype or a narrower one, and gain.

    False where it is not known: dtype or GPU unknown, complex numbers. False for matrix-vector products and their like.
    """
    return can_gain(row) and any(True for _ in ways(row))


def _key(row: KernelRow) -> tuple[object, ...]:
    product = row.matmul
    size = None if product is None else (product.m, product.n, product.k, product.batch, product.role)
    return row.verdict, row.basis, row.name, row.op, row.phase, row.dtype, row.gpu.name, row.trace, size


def _loss(rows: list[KernelRow], total: float, siblings: SiblingRates, cause: Cause, linted: str) -> Loss:
    first, product = rows[0], rows[0].matmul
    time = sum(row.time_us for row in rows)
    flops = None if any(row.flops is None for row in rows) else sum(row.flops or 0.0 for row in rows)
    return Loss(
        verdict=first.verdict,
        kernel=first.name,
        op=first.op,
        modules=_modules(rows),
        phase=first.phase,
        kind=first.kind,
        dtype=first.dtype,
        m=product.m if product is not None else None,
        n=product.n if product is not None else None,
        k=product.k if product is not None else None,
        batch=product.batch if product is not None else None,
        cause="; ".join(filter(None, (cause.sentence, f"shape lint: {linted}" if linted else ""))),
        cause_id=cause.id,
        calls=len(rows),
        time_us=time,
        fraction=share(time, total) or 0.0,
        tflops=flops / time / 1e6 if flops is not None and time > 0 else None,
        savings=savings(rows, siblings),
        uneven_rows=_uneven_rows(first),
    )


def _uneven_rows(row: KernelRow) -> tuple[int, ...] | None:
    """What padding can mend; a view's rows are another tensor's, and a vector has none."""
    layouts = row.shape.layouts if row.shape is not None else ()
    if not layouts or any(layout.is_assumed for layout in layouts):
        return None
    found = [layout for layout in layouts if layout.row_stride and not layout.is_view]
    return tuple(
        dict.fromkeys(
            layout.row_stride or 0 for layout in found if (layout.row_stride or 0) * layout.item_size % FULL_ALIGNMENT
        )
    )


def _modules(rows: list[KernelRow]) -> tuple[str, ...]:
    """Most time first; without those that are unknown."""
    time: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.module:
            time[row.module] += row.time_us
    return tuple(sorted(time, key=lambda module: -time[module]))
