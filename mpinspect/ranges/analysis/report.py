"""The results of the analysis as plain data, which every report renders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mpinspect.ranges.analysis.layer_report import LayerReport
from mpinspect.ranges.session import Event, Precision, Session
from mpinspect.reporting.finding import Finding, Lines
from mpinspect.reporting.rendering import RendersItself
from mpinspect.reporting.words import filled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Coverage:
    """The number of watched and of seen tensors, and (name, kind, reason) of each tensor that was never seen."""

    watched: int
    seen: int
    never_fired: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        if not self.never_fired:
            return f"all {self.watched} watched tensors were seen"
        return f"{self.seen} of {self.watched} watched tensors were seen"


@dataclass(frozen=True)
class ScaleConflict:
    """Two layers that no one scale can serve: one needs at least log2_lowest, the other overflows above log2_highest."""

    needs_large: str
    log2_lowest: int
    needs_small: str
    log2_highest: int


@dataclass(frozen=True)
class DynamicSettings:
    """Settings for a dynamic loss scaler (torch.amp.GradScaler's names)."""

    init_scale: float
    growth_interval: int


@dataclass(frozen=True)
class TimeBlock:
    """The window of safe scales over one block of steps (powers of two)."""

    first_step: int
    last_step: int
    log2_lowest: int | None
    log2_highest: int | None


@dataclass(frozen=True)
class LossScaleAdvice:
    """The recommended loss scale and its confidence. Scales are floats and powers of two.

    Args:
        available: False if no advice can be given (no gradients seen, scale unknown); ``reason`` is a sentence on the cause.
        needed: whether, at scale 1, any layer that must be served overflows or loses more than the tolerance, over the
            run or in one of its blocks; None if values flushed before counting make this undecidable.
        recommended: the scale; 1.0 if no scaling is needed. If no one scale serves every layer, the largest without
            overflow.
        lowest, highest: the window of safe scales: the least scale that serves every layer, by the counted values, and
            the largest without overflow, with a margin for larger gradients and below every scale at which the run
            overflowed.
        headroom: powers of two between ``recommended`` and ``highest``.
        flushed_fraction_unscaled, flushed_fraction_scaled: of the worst layer, at scale 1 and at ``recommended``.
        worst_layer: name of the layer that loses most at scale 1.
        conflicts: pairs of layers that no one scale serves.
        samples: number of sampled steps that do not overflow at ``recommended``.
        overflow_probability_bound: 95% upper bound of a step's overflow probability at ``recommended``; 3/n after n steps
            without overflow; None if some steps were not finite, since the size of their gradients is unknown.
        static_scale: ``recommended``, for a scale that stays fixed.
        dynamic: settings for a dynamic scaler. It starts at ``recommended``, or, if no one scale serves the whole run,
            at the scale that suits the first block.
        blocks: the window in each block of steps, which shows drift over time.
        reason: the advice in words, one or more sentences.
        all_finite: whether every gradient was finite; if not, the advice rests on the finite ones.
        finer_from: the least scale of the window where FP16 rounds every gradient that a scale has to serve at least as finely
            as BF16 (estimated noise-to-signal ratio); None without such a scale, in other formats than FP16, and if the lower
            end of the window is unknown.
        reserve: powers of two between ``highest`` and the largest scale without overflow of the counted values, as a margin for
            larger gradients.
    """

    available: bool
    needed: bool | None = None
    recommended: float | None = None
    lowest: float | None = None
    highest: float | None = None
    headroom: int | None = None
    flushed_fraction_unscaled: float | None = None
    flushed_fraction_scaled: float | None = None
    worst_layer: str = ""
    conflicts: tuple[ScaleConflict, ...] = ()
    samples: int = 0
    overflow_probability_bound: float | None = None
    static_scale: float | None = None
    dynamic: DynamicSettings | None = None
    blocks: tuple[TimeBlock, ...] = ()
    reason: str = ""
    all_finite: bool = True
    finer_from: float | None = None
    reserve: int = 0

    @property
    def serves_none(self) -> bool:
        """Whether no one scale serves every layer, since the window of safe scales is empty."""
        return self.lowest is not None and self.highest is not None and self.lowest > self.highest

    def __repr__(self) -> str:
        """Return the scale, its window and the headroom in one line."""
        from mpinspect.ranges.report.scale_line import scale_line

        return f"<LossScaleAdvice: {scale_line(self)}>"

    def __str__(self) -> str:
        """Return the scale, its window and the headroom as a sentence, followed by the reason."""
        from mpinspect.ranges.report.scale_line import scale_line

        return f"{scale_line(self)}. {self.reason}"


@dataclass(frozen=True)
class FormatVerdict:
    """The verdict on whether another format would fit one kind of tensor.

    ``scaling`` is "none", or "per-tensor" if each tensor is first multiplied by its own power of two, which brings its
    maximum just below the format's maximum. ``worst_lost_l1_share`` and ``worst_layer`` apply at that scaling.
    """

    format: str
    kind: str
    scaling: str
    fits: bool
    worst_layer: str
    worst_lost_l1_share: float
    overflows: bool


@dataclass(frozen=True)
class Verdict:
    """The overall verdict on a run.

    Args:
        healthy: whether the run is healthy; None if too little was observed.
        precision: the dtypes of the run's storage and computation, in one line; "" if unknown.
        sentences: for a healthy run its health and the next thing to do, the checks, and the loss scale; otherwise the gravest
            problem.
        change: the one thing to change; "" for no change.
        code: that change as code; "" without code.
        more: a pointer to further findings; "" without any.
        ended: the exception that ended the run, with its step and phase; "" without one.
    """

    healthy: bool | None
    precision: str
    sentences: tuple[str, ...]
    change: str = ""
    code: Lines = ""
    more: str = ""
    ended: str = ""

    @property
    def opening(self) -> str:
        """The verdict's first words: "Healthy", "Healthy so far", "Warning", "Error (inferred)"; "" without one."""
        return re.split("[:.]", next(iter(self.sentences), ""), maxsplit=1)[0]

    @property
    def lines(self) -> tuple[str, ...]:
        """The verdict as three to seven lines, including the lines of code."""
        change = filled("Change: {}", self.change)
        found = (self.ended, self.precision, *self.sentences, change, *self.code.splitlines(), self.more)
        return tuple(line for line in found if line)

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, repr=False)
class RangeReport(RendersItself):
    """The full analysis of a session. Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    ``format`` is the name of the format judged. ``layers`` holds one report per watched tensor; ``overall`` holds one
    per kind over all its tensors pooled (for orientation: scales are judged layer by layer). ``findings`` are sorted,
    gravest first. ``in_float16`` is the advice for FP16 if ``format`` is another format, else None.
    """

    kind: ClassVar[str] = "ranges"

    session: Session
    format: str
    layers: tuple[LayerReport, ...]
    findings: tuple[Finding, ...]
    events: tuple[Event, ...]
    coverage: Coverage
    loss_scale: LossScaleAdvice
    formats: tuple[FormatVerdict, ...]
    overall: tuple[LayerReport, ...] = ()
    in_float16: LossScaleAdvice | None = None
    verdict: Verdict = Verdict(None, "", ())

    @property
    def precision(self) -> Precision:
        """The precision ledger: the dtypes of the run's storage and computation."""
        return self.session.precision

    def figure(self) -> Figure:
        """Return the pictures of ``save("report.png")`` as a matplotlib figure, which a notebook shows."""
        from mpinspect.ranges.report.plots import figure

        return figure(self)

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per layer and kind.

        Raises:
            ImportError: pandas is not installed (``pip install mpinspect[pandas]``).
        """
        from mpinspect.ranges.report.dataframe import render

        return render(self)
