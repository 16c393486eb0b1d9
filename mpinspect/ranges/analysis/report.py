"""The findings of a session as plain data: what every report renders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.ranges.session import Event, LostUpdates, Precision, Session, TensorKey
from mpinspect.reporting.finding import Finding, Lines
from mpinspect.reporting.rendering import RendersItself

#: Every finding's id; a new finding is listed here.
FINDING_IDS = (
    "accumulation-lost",
    "argument-out-of-range",
    "average-lost",
    "batch-not-finite",
    "epsilon-zero",
    "gradients-already-flushed",
    "gradients-clipped-to-zero",
    "gradients-flushed",
    "gradients-missing",
    "gradients-never-zeroed",
    "gradients-overflow",
    "gradients-replaced",
    "gradients-stale",
    "gradients-zeroed",
    "initial-scale-too-high",
    "loss-in-16-bits",
    "mask-hides-whole-row",
    "moments-cannot-decay",
    "never-fired",
    "non-finite-event",
    "overflow-recurs",
    "parameters-not-optimized",
    "positions-collapse",
    "reductions-overflow",
    "rounding-noise",
    "router-ties",
    "scale-falls-for-forward",
    "scale-too-high",
    "scale-too-low",
    "scale-unknown",
    "scale-window-empty",
    "scale-window-moves",
    "scaler-in-bfloat16",
    "scaler-missing-in-float16",
    "scaler-shared",
    "statistics-broken",
    "training-diverged",
    "unscale-missing",
    "unwatched-skips",
    "updates-lost",
    "values-overflow",
    "weight-decay-lost",
    "weight-gradients-fine",
    "weights-exploded",
    "zero-row-normalized",
)


@dataclass(frozen=True)
class LayerReport:
    """What FP16 (or whichever format was asked about) does to one tensor, over the whole run, at scale 1.

    Args:
        name, kind, module, module_type: as in TensorInfo.
        samples: tensors counted; 0 if never seen.
        histogram: unscaled counts, or None if never seen.
        range_offset: unused powers of two at the top of the format; None if there was no finite non-zero value.
        flushed_fraction: share of the non-zero elements that flush. Measured where nothing was flushed before counting (the
            three figures are equal); where the values had passed through a narrow format, the estimate is that of the
            visible ones and the bounds are what the zeros leave (none of them, or all, were flushed values). Where samples
            stand for different numbers of steps, it is an estimate over the run, between its lowest and its highest block.
        already_flushed_fraction: share of the non-zero elements that was flushed before counting, as bounds (the estimate
            is the low one: no figure follows from the counts); None where none can have been.
        floor_exponent: visibility floor, see TensorWindow.
        subnormal_fraction: share of the visible non-zero elements that survive with fewer bits.
        overflowed: number of finite elements beyond the format (upper bound where not exact).
        lost_l1_share: estimate with bounds, over the run as flushed_fraction.
        noise_to_signal: estimate; inf if something overflows.
        log2_scale_needed: least k >= 0 at which the lost L1 share is at most the tolerance, over the run and in each of its
            blocks; None if there is no value.
        max_log2_scale: largest k without overflow.
        lost_updates: for kind "update".
        rounding_noise: True where the gradient is zero in theory and the counts hold rounding noise (no scale need serve it).
    """

    name: str
    kind: str
    module: str
    module_type: str
    samples: int
    histogram: ExponentHistogram | None
    range_offset: int | None = None
    flushed_fraction: Interval | None = None
    already_flushed_fraction: Interval | None = None
    floor_exponent: int | None = None
    subnormal_fraction: float | None = None
    overflowed: int | None = None
    lost_l1_share: Interval | None = None
    noise_to_signal: float | None = None
    log2_scale_needed: int | None = None
    max_log2_scale: int | None = None
    lost_updates: dict[str, LostUpdates] | None = None
    rounding_noise: bool = False

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.name, self.kind)


@dataclass(frozen=True)
class Coverage:
    """What was watched and what never fired: (name, kind, reason) of the latter."""

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
    """The loss scale that fits, and how sure that is. Scales are floats, powers of two.

    Args:
        available: False where no advice can be given (no gradients seen, scale unknown): ``reason`` says why, the rest is None.
        needed: whether any layer that must be served loses more than the tolerance at scale 1, over the run or in a block of it,
            or overflows; None where the values that were flushed before counting leave it open.
        recommended: the scale; 1.0 where none is needed. Where no one scale serves every layer, the largest without overflow.
        lowest, highest: the window: least scale that serves every layer, by what was counted; largest without overflow, with a
            margin for larger steps than were seen, and below every scale at which the run itself overflowed.
        headroom: powers of two between ``recommended`` and ``highest``.
        flushed_fraction_unscaled, flushed_fraction_scaled: of the worst layer, at scale 1 and at ``recommended``.
        worst_layer: its name.
        conflicts: pairs of layers that no one scale serves.
        samples: sampled steps without overflow at ``recommended``.
        overflow_probability_bound: 95% upper bound of the probability that a step overflows there: 3/n if none of n did.
        static_scale, dynamic: ``recommended`` for a scale that stays fixed; where a dynamic scaler starts: there too, unless no
            one scale serves the whole run, then as its first block likes it.
        blocks: drift over time.
        reason: a sentence.
    """

    available: bool
    needed: bool | None
    recommended: float | None
    lowest: float | None
    highest: float | None
    headroom: int | None
    flushed_fraction_unscaled: float | None
    flushed_fraction_scaled: float | None
    worst_layer: str
    conflicts: tuple[ScaleConflict, ...]
    samples: int
    overflow_probability_bound: float | None
    static_scale: float | None
    dynamic: DynamicSettings | None
    blocks: tuple[TimeBlock, ...]
    reason: str

    def __repr__(self) -> str:
        """Return the scale, its window and the headroom in one line."""
        from mpinspect.ranges.report.scale_line import scale_line

        return f"<LossScaleAdvice: {scale_line(self)}>"

    def __str__(self) -> str:
        """Return the same as a sentence, and the reason."""
        from mpinspect.ranges.report.scale_line import scale_line

        return f"{scale_line(self)}. {self.reason}"


@dataclass(frozen=True)
class FormatVerdict:
    """Whether another format would do for one kind of tensor.

    ``scaling``: "none", or "per-tensor" where each tensor is first multiplied by a power of two of its own that
    brings its maximum just below the format's top. ``worst_lost_l1_share`` and ``worst_layer`` at that scaling.
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
    """What a run comes to.

    Args:
        healthy: None where too little was seen to say.
        precision: the ledger in a line: in which dtypes the run keeps and computes things; "" where that is not known.
        sentences: whether it is healthy, else what is wrong first of all; the scale.
        change: the one thing to change; "" if nothing.
        code: that change as code; "" where there is none.
        more: what else there is to read; "" if nothing.
    """

    healthy: bool | None
    precision: str
    sentences: tuple[str, ...]
    change: str = ""
    code: Lines = ""
    more: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Three to six lines, the code's among them."""
        change = (f"Change: {self.change}",) if self.change else ()
        found = (self.precision, *self.sentences, *change, *self.code.splitlines(), self.more)
        return tuple(line for line in found if line)

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, repr=False)
class RangeReport(RendersItself):
    """Everything that a session tells. Renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    ``format`` is the name of the format asked about, ``layers`` one report a watched tensor, ``overall`` one a kind seen,
    over all its tensors pooled (for orientation: scales are judged layer by layer). ``findings`` are the gravest first.
    ``in_float16`` is the advice for FP16 where ``format`` is another one.
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
        """The ledger: in which dtypes the run keeps and computes things."""
        return self.session.precision

    def to_dataframe(self) -> Any:
        """Return one row a layer and kind, as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed (``pip install mpinspect[pandas]``).
        """
        from mpinspect.ranges.report.dataframe import render

        return render(self)
