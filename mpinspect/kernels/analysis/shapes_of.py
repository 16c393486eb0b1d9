"""The shape rule's verdict on each product of a trace: the cause behind a kernel that is off or degraded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, KernelRow
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis import ShapeVerdict, judge
from mpinspect.shapes.records import Matmul

if TYPE_CHECKING:
    from mpinspect.shapes.analysis import ShapeReport


class ShapeRule:
    """Today's shape rule, each product and GPU judged once.

    A FP32 product that ran on Tensor Cores was allowed TF32; of one that did not, it is asked what TF32 would need.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], ShapeVerdict] = {}
        # What is known by identity must not be let go: its number could be another's then.
        self._kept: list[tuple[Matmul, Gpu]] = []

    def verdict(self, matmul: Matmul, gpu: Gpu) -> ShapeVerdict:
        key = id(matmul), id(gpu)
        if key not in self._known:
            self._known[key] = judge(matmul, gpu, tf32=True)
            self._kept.append((matmul, gpu))
        return self._known[key]


class LintedModules:
    """What a shape lint of the model said of its modules: for own profiles, whose kernels have a module's dotted path."""

    def __init__(self, shapes: ShapeReport | None) -> None:
        self._found: dict[tuple[str, str], tuple[str, str]] = {}
        for matmul in shapes.matmuls if shapes is not None else ():
            if matmul.verdict != "native":
                self._found.setdefault((matmul.module, matmul.role), (matmul.verdict, matmul.reason))

    def cause(self, row: KernelRow) -> str:
        """The lint's sentence on the module's products in that role; "" where it said nothing, or knows no such module."""
        roles = (row.matmul.role,) if row.matmul is not None else ("forward",) if row.phase == "forward" else ()
        if not row.module or not row.kernel.module_is_path:
            return ""
        for role in roles or ("dgrad", "wgrad", "backward"):
            verdict, reason = self._found.get((row.module, role), ("", ""))
            if verdict and (verdict == row.verdict or row.verdict not in ON_TENSOR_CORES):
                return reason
        return ""
