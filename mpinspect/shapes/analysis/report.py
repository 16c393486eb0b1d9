"""The result of the shape lint as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from mpinspect.reporting.finding import Finding
from mpinspect.reporting.rendering import RendersItself
from mpinspect.runtime.decoding import Between
from mpinspect.runtime.gpus import ASSUMED, Gpu
from mpinspect.shapes.analysis.verdict import ShapeVerdict
from mpinspect.shapes.records import Matmul, Size, Work

#: The evidence of a finding whose fix has no measurable effect: a report counts such findings and does not list them.
CHANGES_NOTHING = "changes_nothing"
#: An estimated time in microseconds, or a share of one, in reports that are read from files.
Estimate = Annotated[float, Between(0, 1e30)]


@dataclass(frozen=True, slots=True)
class CallTime:
    """Estimated times of one call, in microseconds.

    Args:
        best_us: the roofline of the call on Tensor Cores, once the call is fixed.
        low_us, high_us: the bounds of the call's current time.
        bound: "math" or "memory": the limit of the call at ``best_us``.
        fixed_us: the slowest estimate of the call once it is fixed, if it is above ``best_us``.
    """

    best_us: float
    low_us: float
    high_us: float
    bound: str
    fixed_us: float = 0.0


@dataclass(frozen=True, slots=True)
class ShapeRow:
    """One product of one module, with its verdict.

    Args:
        matmul: the record; its fields are also attributes of the row.
        judged: the verdicts of both rules.
        share: share of all recorded FLOPs, all its calls together; 0..1.
        time: estimates for one call; None where the GPU's rates are not known.
        finding: id of the first finding that covers the product; "" without one.
    """

    matmul: Matmul
    judged: ShapeVerdict
    share: float
    time: CallTime | None = None
    finding: str = ""

    @property
    def module(self) -> str:
        return self.matmul.module

    @property
    def module_type(self) -> str:
        return self.matmul.module_type

    @property
    def parameter(self) -> str:
        return self.matmul.parameter

    @property
    def role(self) -> str:
        return self.matmul.role

    @property
    def op(self) -> str:
        return self.matmul.op

    @property
    def kind(self) -> str:
        return self.matmul.kind

    @property
    def m(self) -> int:
        return self.matmul.m

    @property
    def n(self) -> int:
        return self.matmul.n

    @property
    def k(self) -> int:
        return self.matmul.k

    @property
    def batch(self) -> int:
        return self.matmul.batch

    @property
    def dtype(self) -> str:
        return self.matmul.dtype

    @property
    def calls(self) -> int:
        return self.matmul.calls

    @property
    def flops(self) -> int:
        """Return the floating-point operations of one call."""
        return self.matmul.flops

    @property
    def bytes(self) -> int:
        """Return the least memory traffic of one call in bytes."""
        return self.matmul.bytes

    @property
    def multiples_of_8(self) -> bool | None:
        """Return whether the product obeys the talk's rule; None if the rule does not apply."""
        return self.judged.multiples_of_8

    @property
    def verdict(self) -> str:
        """Return the verdict by today's rule: "native", "degraded", "off" or "unknown"."""
        return self.judged.verdict

    @property
    def reason(self) -> str:
        return self.judged.reason

    @property
    def remarks(self) -> tuple[str, ...]:
        return self.judged.remarks

    @property
    def stride_bytes(self) -> dict[str, int | None]:
        return self.judged.stride_bytes

    @property
    def alignment_bytes(self) -> int | None:
        return self.judged.alignment_bytes


@dataclass(frozen=True, slots=True)
class Padding:
    """A size of the model that could be padded.

    Args:
        finding: id of its finding.
        what: "vocabulary", "size", "channels", "head" or "input channels".
        names: names of the size in the model ("config.vocab_size"), or of the parameters that have it; may be empty.
        size: the current size.
        to: the least size that restores full alignment (and the talk's multiples of 8).
        to_preferred: the least size aligned to 128 bytes (a multiple of 64, 128 for 8-bit dtypes); equal to ``to`` on GPUs
            without that preference.
        modules: the modules that compute with it.
        share: share of the model's FLOPs, 0..1.
        is_worth_it: whether padding is expected to save time.
    """

    finding: str
    what: str
    names: tuple[str, ...]
    size: Size
    to: Size
    to_preferred: Size
    modules: tuple[str, ...]
    share: Annotated[float, Between(0, 1e6)]
    is_worth_it: bool = True

    @property
    def name(self) -> str:
        """Return the first of the names; "" without any."""
        return next(iter(self.names), "")

    @property
    def advised(self) -> int:
        """Return ``to_preferred`` if it is at most 2% larger than the current size, else ``to``."""
        return self.to_preferred if self.to_preferred <= 1.02 * self.size else self.to


@dataclass(frozen=True, repr=False)
class ShapeReport(RendersItself):
    """The judgement of the shapes of a model's matrix products on a GPU.

    Renders itself: ``str()``, ``_repr_html_()``, ``to_json()``, ``save(path)``.

    Args:
        model: the model's class; "" if unknown.
        gpu: the GPU that the shapes are judged for.
        dtype: the dtype of most FLOPs; "" for an empty recording.
        autocast_dtype: dtype of the autocast around the model, or None.
        device: where the model ran: "meta", "cpu", "cuda".
        backward: whether a backward was recorded.
        matmuls: a row for each product of each module, in the order of their first call.
        findings: one for each cause, the most severe first, then by the estimated time that is lost.
        padding: the sizes to pad, by share.
        flops: floating-point operations of everything recorded.
        flops_by_verdict: "native", "degraded", "off", "unknown" -> FLOPs.
        calls: number of products.
        calls_by_talk: how many products obey the talk's rule (True), break it (False), or are outside its scope (None).
        estimated_us: lower bound of all products' current time on the GPU; None if the GPU's rates are not known.
        estimated_partial_tiles_fraction: time that output tiles and waves of tiles which are not full add to
            ``estimated_us``, as a share of it; None if unknown.
        layout_copy_bytes, dtype_copy_bytes: bytes moved by copies that only change layout or dtype.
        notes: sentences on unrecorded parts and on assumptions.
        complete: whether the model ran to its end, so that the figures cover the whole model.
    """

    kind: ClassVar[str] = "shapes"

    model: str
    gpu: Gpu
    dtype: str
    autocast_dtype: str | None
    device: str
    backward: bool
    matmuls: tuple[ShapeRow, ...]
    findings: tuple[Finding, ...]
    padding: tuple[Padding, ...]
    flops: Work
    flops_by_verdict: dict[str, Work]
    calls: Size
    calls_by_talk: dict[bool | None, int]
    estimated_us: Estimate | None
    layout_copy_bytes: Work
    dtype_copy_bytes: Work
    notes: tuple[str, ...]
    complete: bool
    estimated_partial_tiles_fraction: Estimate | None = None

    @property
    def is_gpu_assumed(self) -> bool:
        """Whether the shapes are judged for an A100 because the user named no GPU and the machine lacks one."""
        return any(note.startswith(ASSUMED) for note in self.notes)

    @property
    def unchanging(self) -> tuple[Finding, ...]:
        """Return the findings whose fix has no measurable effect."""
        return tuple(finding for finding in self.findings if finding.evidence.get(CHANGES_NOTHING) is True)

    @property
    def listed(self) -> tuple[Finding, ...]:
        """Return the findings that a report lists: all but the unchanging ones."""
        unchanging = self.unchanging
        return tuple(finding for finding in self.findings if finding not in unchanging)
