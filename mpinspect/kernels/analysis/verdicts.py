"""Judge kernels by their names, or by the operators that launched them if a name is inconclusive or cannot be right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from mpinspect.kernels.analysis.products import Products, call_key, dtypes_of
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.names import GUESSES, UNFAMILIAR, KernelVerdict, by_words, classify_kernel
from mpinspect.kernels.records import Kernel, KernelTrace, TraceOp
from mpinspect.runtime.gpus import Gpu, of_device
from mpinspect.shapes.operators import product_name


def rows_by_name(traces: Sequence[KernelTrace], gpu: Gpu | None = None) -> list[KernelRow]:
    """Return a row for each kernel of the traces, judged by its name alone. ``gpu`` overrides the GPUs in the traces."""
    judge, unknown, rows = _cached(), Gpu("", vendor=""), []
    for index, trace in enumerate(traces):
        described = _gpus(trace)
        rows += [judge(kernel, gpu or described.get(kernel.device, unknown), index) for kernel in trace.kernels]
    return rows


def gpus_of(traces: Iterable[KernelTrace], gpu: Gpu | None = None) -> tuple[Gpu, ...]:
    """Return the distinct GPUs that the traces' kernels ran on, in order of appearance; only ``gpu`` if it is given."""
    if gpu is not None:
        return (gpu,)
    found: dict[tuple[str, str], Gpu] = {}
    for trace in traces:
        for one in _gpus(trace).values():
            found.setdefault((one.name, one.architecture), one)
    return tuple(found.values())


def _gpus(trace: KernelTrace) -> dict[int, Gpu]:
    return {device.id: of_device(device.name, device.major, device.minor, device.vendor) for device in trace.devices}


def _cached() -> Callable[[Kernel, Gpu, int], KernelRow]:
    """Return a judge that caches its verdict on each name, dtype and GPU: a trace has many kernels but few names."""
    known: dict[tuple[str, str, int], tuple[KernelVerdict, str]] = {}
    # Keyed by identity: hashing an operator's shapes takes longer than all the rest. Traces and rows reference the operators.
    dtypes: dict[int, str] = {}

    def judge(kernel: Kernel, gpu: Gpu, trace: int) -> KernelRow:
        op = kernel.matmul_op or kernel.op
        if id(op) not in dtypes:
            dtypes[id(op)] = next(iter(dtypes_of(op)), "")
        dtype = dtypes[id(op)]
        key = (kernel.name, dtype, id(gpu))
        if key not in known:
            named = classify_kernel(kernel.name, gpu, dtype or None)
            known[key] = named, dtype or _stored(named)
        named, dtype = known[key]
        return KernelRow(kernel, named, gpu, trace, named.verdict, named.reason, "name", dtype)

    return judge


def _stored(named: KernelVerdict) -> str:
    """Return the dtype of the operands in memory, by the kernel's name; "" if the name has no dtype or several."""
    if len(set(named.dtypes)) != 1:
        return ""
    return named.dtypes[0].replace("tfloat32", "float32")


#: The namespace of torch's own operators.
_TORCH = "aten::"

_remembered = lru_cache(maxsize=1 << 12)


def judged_by_operator(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """Return the rows in the same order, with the verdicts that follow from their operators' calls.

    At least one of the kernels that a product's call launched must compute the product. If no kernel is a product by name,
    the longest one becomes "unknown"; kernels of known families retain their verdicts. If one is a product by name, shorter
    kernels with unfamiliar names become helpers. A kernel with an unfamiliar name becomes "other" if its operator computes no
    product.
    """
    found, calls = list(rows), defaultdict[tuple[int, bool, int], list[int]](list)
    for index, row in enumerate(rows):
        product = _product(row)
        if product is not None and not row.is_communication:
            calls[call_key(row, product)].append(index)
        elif row.named.rule == UNFAMILIAR.id and row.kernel.op is not None and _computes_none(row.kernel.op.name):
            found[index] = _with(row, "other", f"launched by {row.kernel.op.name}, which computes no matrix product")
    products = Products()
    for indices in calls.values():
        _judge(found, indices, products)
    return found


def _product(row: KernelRow) -> TraceOp | None:
    """Return the product whose call launched the kernel: torch's, or another library's operator with a product's name."""
    op = row.kernel.matmul_op or row.kernel.op
    return op if op is not None and _is_product(op.name) else None


@_remembered
def _is_product(name: str) -> bool:
    rule = by_words(name.lower())
    return bool(product_name(name)) or ("::" in name and rule is not None and rule.verdict == "unknown")


@_remembered
def _computes_none(name: str) -> bool:
    rule = by_words(name.lower())
    if rule is None:
        return name.startswith(_TORCH)
    return rule.verdict in ("other", "helper")


def _judge(rows: list[KernelRow], indices: list[int], products: Products) -> None:
    """Judge the kernels of one call by comparing them; if calls have no numbers, the kernels of all the operator's calls."""
    by_name = [rows[index] for index in indices if rows[index].is_product and rows[index].named.rule != UNFAMILIAR.id]
    guessed = [rows[index] for index in indices if rows[index].named.rule in GUESSES]
    longest = max(guessed, key=lambda row: row.time_us, default=None)
    if longest is None:
        return
    if by_name:
        most = max(row.time_us for row in by_name)
        for index in indices:
            row = rows[index]
            if row.named.rule == UNFAMILIAR.id and row.time_us < most:
                rows[index] = _with(row, "helper", f"launched by {row.op} together with a longer product")
    elif not longest.kernel.encloses and not longest.is_product and not _is_empty(products, longest.kernel.matmul_op):
        op = longest.kernel.matmul_op or longest.kernel.op
        assert op is not None, "the kernels of one call have its operator"
        why = f"the longest kernel of {op.name}, a product, whose kernels have no product's name"
        for index in indices:
            if rows[index].name == longest.name:
                rows[index] = _with(rows[index], "unknown", why)


def _is_empty(products: Products, op: TraceOp | None) -> bool:
    """Return whether the product has no elements to multiply, so that its kernels only fill the result."""
    of_call = products.of(op)
    return bool(of_call) and not any(product.flops for product in of_call)


def _with(row: KernelRow, verdict: str, reason: str) -> KernelRow:
    return replace(row, verdict=verdict, reason=reason, basis="operator")
