"""What is said of one product: the talk's rule beside today's."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpinspect.shapes.analysis.alignment import Layout

#: native: at full speed as far as shapes tell; degraded: on Tensor Cores, slower; off: not on them; unknown: can't be told.
VERDICTS = ("native", "degraded", "off", "unknown")


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """Two verdicts on one product.

    Args:
        verdict: one of VERDICTS, by today's rule (strides, dtypes) on the GPU asked about.
        reason: one sentence: why.
        multiples_of_8: the talk's rule (16 for INT8); None where it says nothing.
        stride_bytes: row stride of each operand ("A", "B", "output"); None for a vector. Empty for convolutions.
        alignment_bytes: the power of two, up to 128, that divides every base pointer and stride; None where that is no question.
        cause: a short word for what binds: "" if nothing does.
        remarks: what else is worth knowing, sentences.
        layouts: the operands behind ``stride_bytes``.
    """

    verdict: str
    reason: str
    multiples_of_8: bool | None = None
    stride_bytes: dict[str, int | None] = field(default_factory=dict, hash=False)
    alignment_bytes: int | None = None
    cause: str = ""
    remarks: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """Part of a verdict, as one rule gives it: the fields of ShapeVerdict that it decides."""

    verdict: str
    reason: str
    cause: str = ""
    alignment_bytes: int | None = None
    layouts: tuple[Layout, ...] = ()
    remarks: tuple[str, ...] = ()
