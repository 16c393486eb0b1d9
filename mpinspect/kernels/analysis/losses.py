"""Group equal products that could have used Tensor Cores but did not, or used them badly; find each group's cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpinspect.kernels.analysis.rates import SiblingRates
from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, KernelRow, tflops
from mpinspect.kernels.analysis.savings import Saving, can_gain, savings, ways
from mpinspect.kernels.analysis.shares import share
from mpinspect.kernels.names.classify import FULL_ALIGNMENT
from mpinspect.reporting.words import format_name

if TYPE_CHECKING:
    from mpinspect.shapes.analysis import ShapeReport


#: Whether a library that was not allowed TF32 has torch's default.
_TF32_OFF = {"cuBLAS": "torch's default for matrix products", "cuDNN": "against torch's default"}


@dataclass(frozen=True)
class Loss:
    """Equal products whose kernels could have used Tensor Cores and did not, or used them badly.

    Args:
        verdict: "off" or "degraded".
        kernel, op, phase, kind, dtype: common to all runs.
        modules: the modules that launched the runs, most time first; () if unknown.
        m, n, k, batch: sizes of the product; None if the trace has no shapes.
        cause: the cause as a clause.
        cause_id: key of the cause; all losses of one cause make one finding.
        calls, time_us, fraction: number of runs, their total time, and its share of all kernel time.
        tflops: achieved rate; None without shapes.
        savings: estimates for each way; empty if unknown.
        uneven_rows: row strides of its operands, in elements, that are not a multiple of 16 bytes, excluding views; None if the
            trace has no strides.
    """

    verdict: str
    kernel: str
    op: str
    modules: tuple[str, ...]
    phase: str
    kind: str
    dtype: str
    m: int | None
    n: int | None
    k: int | None
    batch: int | None
    cause: str
    cause_id: str
    calls: int
    time_us: float
    fraction: float
    tflops: float | None
    savings: tuple[Saving, ...]
    uneven_rows: tuple[int, ...] | None = None

    @property
    def module(self) -> str:
        """Return the module that took most of the time; "" if unknown."""
        return next(iter(self.modules), "")

    @property
    def saved_us(self) -> float | None:
        """Return the largest saving; None if no saving is known."""
        return max((saving.saved_us for saving in self.savings), default=None)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why products are off Tensor Cores or degraded: ``id`` is a key ("tf32-off-cuBLAS"), ``sentence`` has no full stop."""

    id: str
    sentence: str


class Causes:
    """Find the causes of rows; whether a library was allowed TF32 is derived from all rows."""

    def __init__(self, rows: Iterable[KernelRow]) -> None:
        # If a FP32 product ran on Tensor Cores, its library was allowed TF32 in that trace.
        self._tf32 = {
            (row.trace, library(row)) for row in rows if row.verdict in ON_TENSOR_CORES and row.dtype == "float32"
        }

    def of(self, row: KernelRow) -> Cause:
        """Return the cause of a row that is off or degraded."""
        if row.verdict == "degraded":
            return _of_degraded(row)
        if row.dtype == "float32":
            return self._of_float32(row)
        gpu, name = row.gpu.name or "this GPU", format_name(row.dtype)
        if row.gpu.multiplies(row.dtype) is False:
            return Cause(f"dtype-{row.dtype}", f"{name}: {gpu}'s Tensor Cores multiply FP16 instead")
        sentence = f"{name} on CUDA cores, though {gpu}'s Tensor Cores multiply it"
        if row.shape is not None and row.shape.verdict != "native":
            sentence += f": {row.shape.reason}"
        return Cause(f"cuda-cores-{row.dtype}", sentence)

    def _of_float32(self, row: KernelRow) -> Cause:
        gpu, owner = row.gpu.name or "this GPU", library(row)
        if not row.gpu.multiplies("float32"):
            return Cause("fp32", f"FP32: {gpu}'s Tensor Cores multiply FP16, not FP32")
        though = f"FP32 on CUDA cores, though {gpu} multiplies TF32"
        if (row.trace, owner) in self._tf32:
            return Cause(f"tf32-not-chosen-{owner}", f"{though}, and did so for others: {owner} chose another kernel")
        not_allowed = f"it was not allowed ({_TF32_OFF[owner]}), or {owner} chose another kernel"
        return Cause(f"tf32-off-{owner}", f"{though}: {not_allowed}")


def library(row: KernelRow) -> str:
    """Return the library that chose the kernel and has its own TF32 switch: cuDNN for convolutions and recurrent networks."""
    if row.kind in ("convolution", "recurrent") or "conv" in row.op or "cudnn" in row.op:
        return "cuDNN"
    return "cuBLAS"


def _of_degraded(row: KernelRow) -> Cause:
    if row.basis != "rate":
        # The shape rule names the operand and its stride; a kernel's name has at most the resulting alignment.
        return Cause("alignment", row.held_back or row.reason)
    if row.held_back:
        # The rate shows that the kernel was slow, the shape rule why: nvjet's names (Hopper, Blackwell) contain no alignment.
        return Cause("rate-alignment", f"{row.reason}; {row.held_back}")
    return Cause("rate", row.reason)


class LintedModules:
    """A shape lint's verdicts by module path; only traces of this package's own profiles contain such paths."""

    def __init__(self, shapes: ShapeReport | None) -> None:
        self._found: dict[tuple[str, str], tuple[str, str]] = {}
        for matmul in getattr(shapes, "matmuls", ()):
            if matmul.verdict != "native":
                self._found.setdefault((matmul.module, matmul.role), (matmul.verdict, matmul.reason))

    def cause(self, row: KernelRow) -> str:
        """Return the lint's sentence on the module's products in the row's role; "" without one."""
        if not row.module or not row.kernel.module_is_path:
            return ""
        for role in _roles(row):
            verdict, reason = self._found.get((row.module, role), ("", ""))
            if verdict and (verdict == row.verdict or row.verdict not in ON_TENSOR_CORES):
                return reason
        return ""


def _roles(row: KernelRow) -> tuple[str, ...]:
    """Return the roles that the row's product may have."""
    if row.matmul is not None:
        return (row.matmul.role,)
    if row.phase == "forward":
        return ("forward",)
    return ("dgrad", "wgrad", "backward")


def losses(rows: Sequence[KernelRow], linted: LintedModules) -> tuple[Loss, ...]:
    """Return the losses among the rows, most time first. ``linted``: the shape lint's verdicts on the modules."""
    total = sum(row.time_us for row in rows)
    groups: dict[tuple[object, ...], list[KernelRow]] = defaultdict(list)
    causes = Causes(rows)
    for row in rows:
        if row.verdict == "degraded" or (row.verdict == "off" and is_eligible(row)):
            groups[_key(row, causes.of(row))].append(row)
    siblings = SiblingRates(rows)
    found = [_loss(group, total, siblings, causes.of(group[0]), linted.cause(group[0])) for group in groups.values()]
    return tuple(sorted(found, key=lambda loss: -loss.time_us))


def is_eligible(row: KernelRow) -> bool:
    """Return whether a product that ran on CUDA cores would gain on this GPU's Tensor Cores, in its dtype or a narrower one.

    The result is False if that is unknown (dtype or GPU unknown, complex numbers), and for matrix-vector products and the like.
    """
    return can_gain(row) and any(True for _ in ways(row))


def _key(row: KernelRow, cause: Cause) -> tuple[object, ...]:
    # Equal products of several ranks are one.
    return row.verdict, row.basis, row.name, row.op, row.phase, row.dtype, row.gpu.name, row.product, cause.id


def _loss(rows: list[KernelRow], total: float, siblings: SiblingRates, cause: Cause, linted: str) -> Loss:
    first = rows[0]
    m, n, k, batch, _ = first.product
    time = sum(row.time_us for row in rows)
    flops = [row.flops for row in rows if row.flops is not None]
    because = cause.sentence
    if linted:
        because = f"{because}; shape lint: {linted}"
    return Loss(
        verdict=first.verdict,
        kernel=first.name,
        op=first.op,
        modules=_modules(rows),
        phase=first.phase,
        kind=first.kind,
        dtype=first.dtype,
        m=m,
        n=n,
        k=k,
        batch=batch,
        cause=because,
        cause_id=cause.id,
        calls=len(rows),
        time_us=time,
        fraction=share(time, total) or 0.0,
        tflops=tflops(sum(flops), time) if len(flops) == len(rows) else None,
        savings=savings(rows, siblings),
        uneven_rows=_uneven_rows(first),
    )


def _uneven_rows(row: KernelRow) -> tuple[int, ...] | None:
    """Return the row strides that padding can fix; views (whose rows belong to another tensor) and vectors are excluded."""
    if row.shape is None or not row.shape.layouts or any(layout.is_assumed for layout in row.shape.layouts):
        return None
    strides = [(layout.row_stride or 0, layout.item_size) for layout in row.shape.layouts if not layout.is_view]
    return tuple(dict.fromkeys(stride for stride, size in strides if stride * size % FULL_ALIGNMENT))


def _modules(rows: list[KernelRow]) -> tuple[str, ...]:
    """Return the known modules, most time first."""
    time: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.module:
            time[row.module] += row.time_us
    return tuple(sorted(time, key=lambda module: -time[module]))
