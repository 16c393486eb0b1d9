"""Compares the matrix products of two runs: their shapes in one recorded step, their kernels in one profiled step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from mpinspect.numeric.exponents import ratio
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import duration, number_of, optional, percent

if TYPE_CHECKING:
    from mpinspect.kernels.analysis import KernelReport
    from mpinspect.shapes.analysis import ShapeReport

#: The ids of the findings on shapes and kernels that differ.
PRODUCT_DIFF_IDS = ("kernels-differ", "shapes-differ")

#: Smallest change of a module's share on Tensor Cores that is reported: the share is weighted by the times of one step.
LEAST_SHARE = 0.05
#: Smallest ratio of a module's times that is reported: a GPU's clock and its other work cause smaller ones.
LEAST_RATIO = 1.25
#: Least change of a module's time that is reported, as a share of the run's kernel time.
_LEAST_TIME = 0.01


@dataclass(frozen=True)
class Product:
    """A matrix product of one step, with the fields of its row (docs/shape-lint.md) that are compared."""

    module: str
    role: str
    op: str
    m: int
    n: int
    k: int
    batch: int
    dtype: str
    calls: int
    verdict: str

    @property
    def words(self) -> str:
        """The product in words: "64x1023x512 float16, degraded, 3 calls"."""
        words = f"{self.m}x{self.n}x{self.k} {self.dtype}, {self.verdict}"
        if self.batch != 1:
            words = f"{self.batch}x{words}"
        if self.calls != 1:
            words = f"{words}, {self.calls:,} calls"
        return words


@dataclass(frozen=True)
class ProductChange:
    """The products of a module in one role ("forward", "dgrad", "wgrad"), in either run."""

    module: str
    role: str
    first: tuple[Product, ...]
    second: tuple[Product, ...]

    @property
    def aspects(self) -> tuple[str, ...]:
        """The keys of ``_ASPECTS`` that differ between the runs; all keys if only the combination of aspects differs."""
        differ = (name for name, of in _ASPECTS.items() if sorted(map(of, self.first)) != sorted(map(of, self.second)))
        return tuple(differ) or tuple(_ASPECTS)


#: The parts of a product that are compared, by the word for each.
_ASPECTS: dict[str, Callable[[Product], tuple[str | int, ...]]] = {
    "shape": lambda product: (product.op, product.m, product.n, product.k, product.batch),
    "dtype": lambda product: (product.dtype,),
    "number of calls": lambda product: (product.calls,),
    "verdict": lambda product: (product.verdict,),
}


@dataclass(frozen=True)
class ShapesDiff:
    """The modules whose products differ; ``products`` is the number of products in the second run."""

    changes: tuple[ProductChange, ...]
    products: int

    @property
    def aspects(self) -> str:
        """The aspects that differ in any product, in words: "dtype, verdict"."""
        differ = {aspect for change in self.changes for aspect in change.aspects}
        return ", ".join(aspect for aspect in _ASPECTS if aspect in differ)

    @property
    def findings(self) -> tuple[Finding, ...]:
        if not self.changes:
            return ()
        modules = list(dict.fromkeys(change.module for change in self.changes))
        message = f"The matrix products of {number_of(len(modules), 'module')} differ in {self.aspects}."
        return (Finding("shapes-differ", "info", modules[0], message, {"modules": modules}),)


@dataclass(frozen=True)
class KernelChange:
    """A module's kernels in either run: their time, and the share of it on Tensor Cores, native or degraded."""

    module: str
    time_us: tuple[float, float]
    tensor_core_fraction: tuple[float, float]


@dataclass(frozen=True)
class KernelsDiff:
    """The differences in the kernels of one profiled step of either run.

    Args:
        time_us: time of all kernels.
        tensor_core_fraction: share of the matrix products' time on Tensor Cores; None without products.
        changes: the modules whose kernels changed, the largest change of time first.
        new, gone: findings of the second run alone, and of the first run alone.
    """

    time_us: tuple[float, float]
    tensor_core_fraction: tuple[float | None, float | None]
    changes: tuple[KernelChange, ...]
    new: tuple[Finding, ...] = ()
    gone: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        if not self.changes:
            return self.new
        one, other = (optional(share, percent, "no product") for share in self.tensor_core_fraction)
        message = (
            f"The kernels of {len(self.changes):,} modules changed; on Tensor Cores: {one} of the products' time in A, "
            f"{other} in B; {duration(self.time_us[0])} and {duration(self.time_us[1])} in all."
        )
        evidence = {"time_us": self.time_us, "tensor_core_fraction": self.tensor_core_fraction}
        return (Finding("kernels-differ", "info", self.changes[0].module, message, evidence), *self.new)


def products(report: ShapeReport) -> tuple[Product, ...]:
    """Return the matrix products of a step."""
    return tuple(Product(*(getattr(row, field.name) for field in fields(Product))) for row in report.matmuls)


def compare_shapes(first: Sequence[Product], second: Sequence[Product]) -> ShapesDiff:
    """Return the modules and roles whose products are not the same, in the second run's order."""
    one, other = _by_role(first), _by_role(second)
    changes = [
        ProductChange(*place, one.get(place, ()), other.get(place, ()))
        for place in dict.fromkeys([*other, *one])
        if sorted(one.get(place, ()), key=astuple) != sorted(other.get(place, ()), key=astuple)
    ]
    return ShapesDiff(tuple(changes), len(second))


def compare_kernels(first: KernelReport, second: KernelReport) -> KernelsDiff:
    """Return the modules whose kernel time, or its share on Tensor Cores, differs by more than between two steps of one run."""
    one, other = _by_module(first), _by_module(second)
    total = max(first.shares.kernel_time_us, second.shares.kernel_time_us)
    none = (0.0, 0.0)
    found = [
        _kernels(module, one.get(module, none), other.get(module, none)) for module in dict.fromkeys([*other, *one])
    ]
    changes = sorted((change for change in found if _counts(change, total)), key=_gap, reverse=True)
    known = [{(finding.id, finding.layer) for finding in report.findings} for report in (first, second)]
    return KernelsDiff(
        (first.shares.kernel_time_us, second.shares.kernel_time_us),
        (first.tensor_core_fraction, second.tensor_core_fraction),
        tuple(changes),
        tuple(finding for finding in second.findings if (finding.id, finding.layer) not in known[0]),
        tuple(finding for finding in first.findings if (finding.id, finding.layer) not in known[1]),
    )


def _by_role(products: Iterable[Product]) -> dict[tuple[str, str], tuple[Product, ...]]:
    found: dict[tuple[str, str], tuple[Product, ...]] = {}
    for product in products:
        place = product.module, product.role
        found[place] = (*found.get(place, ()), product)
    return found


def _by_module(report: KernelReport) -> dict[str, tuple[float, float]]:
    """Return each named module's kernel time and its time on Tensor Cores, in microseconds."""
    return {
        row.module: (row.time_us, row.verdict_time_us.get("native", 0.0) + row.verdict_time_us.get("degraded", 0.0))
        for row in report.by_module
        if row.module
    }


def _kernels(module: str, first: tuple[float, float], second: tuple[float, float]) -> KernelChange:
    return KernelChange(module, (first[0], second[0]), (ratio(first[1], first[0]), ratio(second[1], second[0])))


def _counts(change: KernelChange, total: float) -> bool:
    low, high = sorted(change.time_us)
    if high < _LEAST_TIME * total:
        return False
    one, other = change.tensor_core_fraction
    return abs(one - other) >= LEAST_SHARE or (high >= LEAST_RATIO * low and high - low >= _LEAST_TIME * total)


def _gap(change: KernelChange) -> float:
    return abs(change.time_us[0] - change.time_us[1])
