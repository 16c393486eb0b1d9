"""Sum kernel time by verdict (with shares), by kernel name and by module; and count products in words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, PRODUCTS, VERDICTS, KernelRow, tflops
from mpinspect.kernels.records import UNATTRIBUTED
from mpinspect.reporting.words import and_more, bracketed


@dataclass(frozen=True)
class Shares:
    """Sums of kernel times, and their shares (None if the denominator is 0).

    Args:
        calls: number of kernels that ran.
        kernel_time_us: time of all kernels, communication included.
        communication_time_us: time of communication kernels, such as NCCL's.
        verdict_time_us, verdict_calls: time and calls by verdict; every verdict is a key.
    """

    calls: int
    kernel_time_us: float
    communication_time_us: float
    verdict_time_us: dict[str, float]
    verdict_calls: dict[str, int]

    @property
    def product_time_us(self) -> float:
        """Return the time of kernels that compute matrix products, or may do so: native, degraded, off and unknown."""
        return sum(self.verdict_time_us[verdict] for verdict in PRODUCTS)

    @property
    def tensor_core_time_us(self) -> float:
        return sum(self.verdict_time_us[verdict] for verdict in ON_TENSOR_CORES)

    @property
    def compute_time_us(self) -> float:
        """Return the kernel time without communication."""
        return max(0.0, self.kernel_time_us - self.communication_time_us)

    @property
    def tensor_core_fraction(self) -> float | None:
        return share(self.tensor_core_time_us, self.product_time_us)

    @property
    def tensor_core_fraction_of_all(self) -> float | None:
        return share(self.tensor_core_time_us, self.kernel_time_us)

    @property
    def tensor_core_fraction_of_compute(self) -> float | None:
        return share(self.tensor_core_time_us, self.compute_time_us)

    @property
    def communication_fraction(self) -> float | None:
        return share(self.communication_time_us, self.kernel_time_us)

    def of_products(self, verdict: str) -> float | None:
        """Return a verdict's share of the matrix products' time."""
        return share(self.verdict_time_us[verdict], self.product_time_us)


@dataclass(frozen=True)
class Coverage:
    """Shares of kernel time by the known properties of the kernels; None if the denominator is 0.

    Args:
        attributed_fraction: time of kernels whose operator is known.
        module_fraction: time of kernels whose module is known, as a path or as a chain of classes.
        path_fraction: time of kernels whose module's dotted path is known.
        flops_fraction: time of products whose FLOPs are known, as a share of the time of all products.
        unattributed_fractions: time of kernels without an operator, by reason (each of ``kernels.records.UNATTRIBUTED`` is a
            key).
    """

    attributed_fraction: float | None
    module_fraction: float | None
    path_fraction: float | None
    flops_fraction: float | None
    unattributed_fractions: dict[str, float]


def shares(rows: Iterable[KernelRow]) -> Shares:
    """Sum the rows' times and calls by verdict."""
    time, calls = dict.fromkeys(VERDICTS, 0.0), dict.fromkeys(VERDICTS, 0)
    communication = 0.0
    for row in rows:
        verdict, us = row.verdict, row.kernel.time_us
        time[verdict] += us
        calls[verdict] += 1
        if row.named.kind == "communication":
            communication += us
    return Shares(sum(calls.values()), sum(time.values()), communication, time, calls)


def coverage(rows: Iterable[KernelRow]) -> Coverage:
    """Sum the time of rows whose operator, module or FLOPs are known."""
    total = attributed = module = path = products = flops = 0.0
    reasons = dict.fromkeys(UNATTRIBUTED, 0.0)
    for row in rows:
        kernel = row.kernel
        time = kernel.time_us
        total += time
        if kernel.module:
            module += time
            path += time * kernel.module_is_path
        if kernel.op is not None:
            attributed += time
        else:
            reason = kernel.unattributed or "no op"
            reasons[reason] = reasons.get(reason, 0.0) + time
        if row.is_product:
            products += time
            flops += time * (row.flops is not None)
    return Coverage(
        attributed_fraction=share(attributed, total),
        module_fraction=share(module, total),
        path_fraction=share(path, total),
        flops_fraction=share(flops, products),
        unattributed_fractions={reason: share(time, total) or 0.0 for reason, time in reasons.items()},
    )


def share(part: float, whole: float) -> float | None:
    """Return part / whole, clipped to 0..1 (sums of floats can be slightly outside); None if the whole is 0."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


@dataclass(frozen=True)
class NameRow:
    """All runs of one kernel name that got the same verdict.

    Args:
        name, verdict, reason, kind, architecture: as in KernelRow.
        ops: names of the operators that launched the kernel.
        calls, time_us: number of runs, and their total time.
        fraction: their share of all kernel time.
        tflops: achieved rate over the runs whose FLOPs are known; None without such runs.
    """

    name: str
    verdict: str
    reason: str
    kind: str
    architecture: str
    ops: tuple[str, ...]
    calls: int
    time_us: float
    fraction: float
    tflops: float | None


@dataclass(frozen=True)
class ModuleRow:
    """All kernels of one module.

    Args:
        module: dotted path, or a chain of classes (``is_path`` False); "" for kernels whose module is unknown.
        calls, time_us: number of kernels, and their total time.
        fraction: their share of all kernel time.
        verdict_time_us: time by verdict.
    """

    module: str
    is_path: bool
    calls: int
    time_us: float
    fraction: float
    verdict_time_us: dict[str, float]


def by_name(rows: Sequence[KernelRow]) -> tuple[NameRow, ...]:
    """Return one row per name, verdict and basis (verdicts of one name vary by alignment, dtype, GPU), most time first."""
    groups: dict[tuple[str, str, str], list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[row.name, row.verdict, row.basis].append(row)
    total = sum(row.kernel.time_us for row in rows)
    found = [_name_row(group, total) for group in groups.values()]
    return tuple(sorted(found, key=lambda row: (-row.time_us, row.name)))


def by_module(rows: Sequence[KernelRow]) -> tuple[ModuleRow, ...]:
    """Return a row for each module, most time first; the row "" has the kernels without a module."""
    groups: dict[tuple[str, bool], list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[row.module, row.kernel.module_is_path].append(row)
    total = sum(row.kernel.time_us for row in rows)
    found = [_module_row(module, is_path, group, total) for (module, is_path), group in groups.items()]
    return tuple(sorted(found, key=lambda row: (-row.time_us, row.module)))


def _name_row(rows: list[KernelRow], total: float) -> NameRow:
    first, time = rows[0], sum(row.kernel.time_us for row in rows)
    known = [row for row in rows if row.flops is not None]
    known_time = sum(row.kernel.time_us for row in known)
    return NameRow(
        name=first.name,
        verdict=first.verdict,
        reason=first.reason,
        kind=first.kind,
        architecture=first.architecture,
        ops=tuple(filter(None, dict.fromkeys(row.op for row in rows))),
        calls=len(rows),
        time_us=time,
        fraction=share(time, total) or 0.0,
        tflops=tflops(sum(row.flops or 0.0 for row in known), known_time),
    )


def _module_row(module: str, is_path: bool, rows: list[KernelRow], total: float) -> ModuleRow:
    verdict_time_us = dict.fromkeys(VERDICTS, 0.0)
    for row in rows:
        verdict_time_us[row.verdict] += row.kernel.time_us
    time = sum(verdict_time_us.values())
    return ModuleRow(module, is_path, len(rows), time, share(time, total) or 0.0, verdict_time_us)


#: Families of Tensor Core kernels by patterns in their names; the first match counts.
_FAMILIES = tuple(
    (label, re.compile(pattern, re.IGNORECASE))
    for label, pattern in (
        ("flash attention", r"flash"),
        ("fused attention", r"fmha|sdpa"),
        ("nvjet", r"nvjet"),
        ("wmma 161616", r"161616"),
        ("16816", r"16816"),
        ("16832", r"16832"),
        ("1688", r"1688"),
        ("884", r"884"),
        ("wgmma", r"wgmma"),
        ("xmma", r"xmma"),
        ("hmma", r"hmma"),
        ("tensorop", r"tensorop"),
    )
)
_PLURALS = {"gemm": "GEMMs", "convolution": "convolutions", "attention": "attention kernels", "recurrent": "recurrent"}
#: Maximum number of families named; "..." replaces the others.
_MOST = 3


def phrase(rows: Sequence[KernelRow]) -> str:
    """Count the products that ran on Tensor Cores, as with ``grep 884``: "884 kernels: 12 of 12 GEMMs".

    Families are ordered by their time. Matrix-vector products are not counted. Returns "" without products.
    """
    products = [row for row in rows if row.is_product and row.kind != "gemv"]
    if not products:
        return ""
    on = [row for row in products if row.verdict in ON_TENSOR_CORES]
    return f"{_heading(on, products)}: {', '.join(_counts(products))}"


def _heading(on: list[KernelRow], products: list[KernelRow]) -> str:
    time: dict[str, float] = defaultdict(float)
    for row in on:
        time[_family(row.name)] += row.time_us
    # On Volta, users search for 884, even if no such kernel ran.
    if set(time) <= {"884"} and all(row.gpu.architecture == "volta" for row in products):
        return "884 kernels"
    names = [name for name in sorted(time, key=lambda name: -time[name]) if name]
    if len(names) > _MOST:
        names = [*names[:_MOST], "..."]
    return f"Tensor Core kernels{bracketed(*names)}"


def _counts(products: list[KernelRow]) -> list[str]:
    found = []
    for kind in dict.fromkeys(("gemm", "convolution", "attention", "recurrent", *(row.kind for row in products))):
        of_kind = [row for row in products if row.kind == kind]
        if of_kind:
            on = sum(row.verdict in ON_TENSOR_CORES for row in of_kind)
            rest = and_more(sum(row.verdict == "unknown" for row in of_kind), " ({:,} unknown)")
            found.append(f"{on:,} of {len(of_kind):,} {_PLURALS.get(kind, 'other products')}{rest}")
    return found


@lru_cache(maxsize=1 << 14)
def _family(name: str) -> str:
    return next((label for label, pattern in _FAMILIES if pattern.search(name)), "")
