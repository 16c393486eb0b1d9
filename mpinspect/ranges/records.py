"""Typed records: one class for each kind of measurement that observers make and rules read.

A session stores a record as a ``Measurement``, whose figures are numbers by name. Only these classes know the names: an
observer makes a record, and a rule reads the same class. A figure whose value is None is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from mpinspect.ranges.session import Measurement
from mpinspect.runtime.user_line import source_of

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool):
        """Return a decorator that does nothing: type checkers alone read it."""
        return lambda cls: cls


AnyRecord = TypeVar("AnyRecord", bound="Record")
#: The fields of every record. The fields that a class adds are its figures.
_COMMON = ("name", "step", "names", "text", "rank")
_BY_KIND: dict[str, type[Record]] = {}
_CASTS: dict[type[Record], dict[str, Any]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Record:
    """Base of all records; each subclass becomes a frozen dataclass.

    Args:
        name: dotted path of the module or parameter; "" for the whole model.
        step: counted from 0.
        names: further dotted paths, or a few words.
        text: a few words: a dtype, an operator, a class name.
        rank: the rank that made it; None in a session of one process.
    """

    #: The name under which sessions store records of this class; "" for a base class.
    kind: ClassVar[str] = ""

    name: str = ""
    step: int = 0
    names: tuple[str, ...] = ()
    text: str = ""
    rank: int | None = None

    def __init_subclass__(cls, kind: str = "") -> None:
        # Comparisons made for each of a hundred classes would take a twentieth of a second at each start.
        dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
        cls.kind = kind
        if kind:
            _BY_KIND[kind] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    @property
    def figures(self) -> dict[str, float]:
        """The figures as a session stores them: numbers, flags as 0 and 1."""
        values = {name: getattr(self, name) for name in _casts(type(self))}
        return {name: float(value) for name, value in values.items() if value is not None}

    def measurement(self) -> Measurement:
        """Return the record as a session stores it, with the text of the lines that it names."""
        sources = {line: text for line in (*self.names, self.text) if (text := source_of(line))}
        return Measurement(self.kind, self.name, self.step, self.figures, self.names, self.text, self.rank, sources)

    @classmethod
    def read(cls: type[AnyRecord], stored: Measurement) -> AnyRecord:
        """Return the record that was stored.

        Raises:
            KeyError, ValueError, OverflowError: a figure is missing, or does not convert to its type.
        """
        optional = {each.name for each in fields(cls) if each.default is not MISSING}
        missing = [name for name in _casts(cls) if name not in stored.figures and name not in optional]
        if missing:
            raise KeyError(missing[0])
        figures = {name: cast(stored.figures[name]) for name, cast in _casts(cls).items() if name in stored.figures}
        common = {name: getattr(stored, name) for name in _COMMON}
        return cls(**common, **figures)


def recorded(measurements: Iterable[Measurement], of: type[AnyRecord]) -> Iterator[AnyRecord]:
    """Yield the records of a class and its subclasses, in the order of ``measurements``."""
    for each in measurements:
        kind = _BY_KIND.get(each.what)
        if kind is not None and issubclass(kind, of):
            yield kind.read(each)


def _casts(record: type[Record]) -> Mapping[str, Any]:
    """Return the figures of a class, each with its type."""
    if record not in _CASTS:
        hints = get_type_hints(record)
        named = [each.name for each in fields(record) if each.name not in _COMMON]
        types = {name: [kind for kind in (bool, int, float) if hints[name] in (kind, kind | None)] for name in named}
        _CASTS[record] = {name: kinds[0] for name, kinds in types.items()}
    return _CASTS[record]


#: The phase of operators that ran before a run's first step.
BEFORE_STEPS = "before the first step"

# -- the operation that made the first infinity or NaN; names: rows of the batch ------------------------------------------


class Examined(Record):
    """Non-finite arguments of an operation or of the model, or finite ones with an infinite or NaN result.

    Args:
        elements: the number of such elements.
        rows, of_rows: the number of rows (along the first dimension) with such elements, and of all rows.
        loss_finite: whether the loss was finite.
        bits: width of the result's dtype; 0 or None if unknown.
        call, calls: the number of the operation among the operator's calls that lead to the loss, from 0, and of all of them.
    """

    elements: float
    rows: float | None = None
    of_rows: float | None = None
    loss_finite: bool | None = None
    bits: int | None = None
    call: int | None = None
    calls: int | None = None


class ExaminedBatch(Examined, kind="examined-batch"):
    """The model's input."""


class ExaminedOutliers(Examined, kind="examined-outliers"):
    """Finite values of the model's input that FP16 can't hold. ``name``: the innermost module that it was given to.

    ``largest``: the largest magnitude.
    """

    largest: float


class ExaminedTarget(Examined, kind="examined-target"):
    """The loss's target."""


class ExaminedDifference(Examined, kind="examined-difference"):
    """A difference that the loss computes."""


class ExaminedMask(Examined, kind="examined-mask"):
    """A mask that hides whole rows."""


class ExaminedZeroRow(Examined, kind="examined-zero-row"):
    """A row of zeros that is divided by its norm."""


#: Follows an argument in the text of ``ExaminedArgument`` that may be rounding error.
ROUNDED_DIFFERENCE = ", a difference of terms rounded to 16 bits"
#: An operand in that text that takes no gradient.
CONSTANT = "a constant"
#: Follows an operation in that text whose result FP16 can't hold.
BEYOND_FLOAT16 = "beyond FP16's largest number, 65504"
#: Precedes the number of elements in that text if it is too small for the operation.
TOO_FEW = "of only"


class ExaminedArgument(Examined, kind="examined-argument"):
    """An argument at the edge of its operation's domain, or beyond. ``text``: the operation in words."""


class BrokenWeights(Record, kind="broken-weights"):
    """Weights that held infinities or NaNs when a loss was made that was not finite. ``of``: the number of weights read."""

    of: float


class BrokenState(Record, kind="broken-state"):
    """An optimizer's state of a weight that held infinities or NaNs.

    ``names``: the optimizer's class and the state's name. ``text``: its dtype.

    Args:
        broken: how many of its elements are infinite or NaN.
        of: how many it has.
    """

    broken: float
    of: float


class BrokenElsewhere(Record, kind="broken-elsewhere"):
    """Weights outside of the model, in the graph of a loss that was not finite, that held infinities or NaNs.

    ``names``: the weights. ``text``: their model; "" if it is not inspected.
    """


class WeightGrowth(Record, kind="weight-growth"):
    """A parameter whose norm grew out of proportion.

    Args:
        ratio: its norm divided by its norm at the start.
        began: its norm at the start.
        loss_ratio: the loss divided by the run's first loss, if the loss has grown far; else 0.
        lr, initial_lr: the current and the initial learning rate of its parameter group.
        group: the number of its parameter group, if the groups' learning rates differ.
        elements: its number of elements.
    """

    ratio: float
    began: float | None = None
    elements: float | None = None
    loss_ratio: float = 0.0
    lr: float | None = None
    initial_lr: float | None = None
    group: float | None = None


# -- gradients between the backward and the optimizer; names: the parameters -----------------------------------------------


class Change(Record):
    """Gradients that changed.

    Args:
        factor: the median factor of the change; NaN if every gradient became non-finite.
        is_uniform: whether all changed by this factor.
        of: the number of gradients compared.
    """

    factor: float
    is_uniform: bool = False
    of: float = 0.0


class ChangedWhileScaled(Change, kind="changed-while-scaled"):
    """Gradients that changed between the backward and the scaler's division.

    Args:
        at_limit: how many of them have the same largest magnitude, as after a clip by value; None in earlier sessions.
    """

    at_limit: float | None = None


class SteppedWhileScaled(Change, kind="stepped-while-scaled"):
    """Gradients that an optimizer applied before a scaler divided them.

    Args:
        divided_early: whether the scaler had divided the earlier micro-batches' sum, before the last backward.
    """

    divided_early: bool = False


class SteppedOnChangingScale(Record, kind="stepped-on-changing-scale"):
    """Gradients that an optimizer took undivided, while the loop multiplied its loss by a scale that changed.

    ``step``: the first measured step with another scale.

    Args:
        before, after: the scale in the measured step before it, and in the last one.
        steps: the number of measured steps.
    """

    before: float
    after: float
    steps: float


class ChangedBeforeStep(Change, kind="changed-before-step"):
    """Gradients that changed after the scaler's division (if any) and before the optimizer's step.

    Args:
        zeroed: how many became zero or NaN.
        sum_of_squares: the sum of squares of the finite FP16 gradients.
        not_finite: how many were not finite before the change.
        nans: how many were not finite after the change.
        masters: True if the gradients are compared with master weights' gradients.
        multiplied_by: the constant factor that the loop itself (not a scaler) applied to the loss; None without one.
        largest: the largest magnitude after the change; None in sessions of earlier versions.
    """

    zeroed: float
    sum_of_squares: float = 0.0
    not_finite: float = 0.0
    masters: bool | None = None
    nans: float | None = None
    multiplied_by: float | None = None
    largest: float | None = None


class SteppedBesideScaler(Record, kind="stepped-beside-scaler"):
    """A step that the loop took itself after a scaler's step on the same gradients. ``text``: the line of the loop.

    Args:
        skipped: whether the scaler had skipped its step.
    """

    skipped: bool


class LostSquares(Record, kind="lost-squares"):
    """Averages of squared gradients that are zero before a step, in FP32's range, beside averages of gradients that are not.

    Args:
        flushed: their share of the averages whose square FP32 holds.
        largest: the largest step that the optimizer would take there, as a multiple of its learning rate.
        text: the line of ``load_state_dict`` that cast the states to FP16; "" without one.
    """

    flushed: float
    largest: float


class InfiniteDivisor(Record, kind="infinite-divisor"):
    """An FP16 divisor, or a running variance, from before a step, with infinities: a division by them gives zero.

    ``names``: the operator, its line and its phase.

    Args:
        infinite: the number of infinite elements.
        elements: the number of all.
    """

    infinite: float
    elements: float


class CastToFP8(Record, kind="cast-to-fp8"):
    """The first cast to FP8 in a step that was computed twice, or a module's first one whose values nothing bounds.

    Its names are the operator, the line and the phase, and its text the format.

    Args:
        is_bounded: 1 if a clamp bounds the values before, or the cast itself does, so that none becomes infinite or NaN.
    """

    is_bounded: float = 1.0


class ReplacedBeforeStep(Record, kind="replaced-before-step"):
    """Infinite or NaN gradients that became finite before the optimizer's step. ``of``: the number of gradients."""

    of: float


class DividedByAnother(Record, kind="divided-by-another-scale"):
    """Gradients that a scaler divides by another scale than the scale that multiplied their loss.

    Args:
        of: the number of the optimizer's gradients.
        other_scaler: whether another scaler multiplied the loss; else the scaler was updated in between.
        repeated: whether the scaler had divided them already, before the update.
    """

    of: float
    other_scaler: bool = False
    repeated: bool = False


class UnscaledNeverScaled(Record, kind="unscaled-never-scaled"):
    """Gradients that a scaler divided although no scaler had multiplied their loss. ``of``: the number of gradients."""

    of: float


class UnscaledAgain(Record, kind="unscaled-again"):
    """Gradients that a scaler divided ``times`` times while they were accumulated. ``of``: the number of gradients."""

    of: float
    times: float


class DividedInHalf(Record, kind="divided-in-half"):
    """FP16 gradients that the loop multiplies by ``factor`` (None: unknown) in FP16, where elements become zero.

    Its text is the line. ``lost``: the share of the non-zero elements of all gradients, 0..1.
    """

    lost: float
    factor: float | None = None


class GradientsUnderflow(Record, kind="gradients-underflow"):
    """Gradients from ``torch.autograd.grad`` that crowd at FP16's lower end. Its text is the line.

    Args:
        lost: the share of the sum of magnitudes that was likely flushed, 0..1; 1 if all are zero.
    """

    lost: float


class Stale(Record, kind="stale"):
    """Gradients of an earlier step that the optimizer applied: ``parameters`` out of ``of``."""

    parameters: float = 0.0
    of: float = 0.0


class LeftOver(Record, kind="left-over"):
    """Gradients that were not zeroed: ``parameters`` out of ``of``.

    Args:
        largest: their largest finite magnitude.
        not_finite: the number of parameters whose gradients held infinities or NaNs.
    """

    parameters: float
    of: float
    largest: float
    not_finite: float = 0


class LostBackwards(Record, kind="lost-backwards"):
    """A step whose optimizers got the gradients of its last backward alone: the earlier ones, ``lost``, were zeroed before it.

    Args:
        backwards: the number of the step's backwards.
        names: the parameters that got gradients in lost backwards alone, in all compared steps.
    """

    lost: float
    backwards: float


class MissingGradients(Record, kind="missing"):
    """Optimized parameters, out of ``of``, that never received a gradient. One flag shows how their module was called."""

    of: float
    unknown: bool | None = None
    not_called: bool | None = None
    called: bool | None = None
    without_graph: bool | None = None


class Saturated(Record, kind="saturated"):
    """A function near the loss whose results all lie where its gradient is exactly zero. ``text``: the dtype.

    ``name``: the module that returns its results, if one does. Its name in words is the one of ``names``. ``elements``: the
    number of results.
    """

    elements: float


class NotOptimized(Record, kind="not-optimized"):
    """Parameters that receive gradients but belong to no optimizer.

    Args:
        fraction: their share of the model's elements, 0..1.
        idle: the number of tensors in the optimizers that are not in the model and never had a gradient.
        unfrozen: the number of them that needed no gradient in the first step.
    """

    fraction: float
    idle: float = 0.0
    unfrozen: float = 0


class NeverUpdated(Record, kind="never-updated"):
    """``backwards`` backwards without an update. ``names``: the optimizers.

    Args:
        kept_broken: the number of weights whose gradient holds infinities or NaNs at the end and was never zeroed.
    """

    backwards: float
    kept_broken: float = 0


class StepsStopped(Record, kind="steps-stopped"):
    """``backwards`` backwards since the last optimizer step, and the most that preceded one. ``step``: the unfinished step.

    Args:
        cleared: whether the loop clears the gradients between these backwards.
        loss_scale: the loss scale of the last one, if the host knows it.
    """

    backwards: float
    most: float
    cleared: bool = False
    loss_scale: float | None = None


class ForwardsLeft(Record, kind="forwards-left"):
    """Forwards at the run's end that no backward followed. ``names``: the line that called the model, and that of its caller
    unless a library or the interpreter called it.

    Args:
        forwards: their number.
    """

    forwards: float


class Standstill(Record, kind="standstill"):
    """FP32 weights that did not change any more after ``step``, up to the run's end, although they had gradients.

    Args:
        steps: the optimizers' steps since, with a learning rate other than 0.
        losses: the number of measured steps since whose first loss was read.
        loss: that loss, if it is the same number in all of them.
    """

    steps: float
    losses: float
    loss: float | None = None


class RateZero(Record, kind="rate-zero"):
    """Every learning rate of an optimizer (``text``: its class) was 0 in the last ``steps`` of its ``of`` steps."""

    steps: float
    of: float


class RateFallen(Record, kind="rate-fallen"):
    """Every learning rate of an optimizer (``text``: its class) was at most 1e-4 of its highest in its last ``steps``, from
    ``step`` on, and the weights stood still.

    Args:
        steps: their number.
        of: the number of all its steps.
        highest, latest: the largest of its learning rates in the run, and at its end.
        compared: a measured step, the first with such rates or the one before.
        moved: the weights' change from the end of that step to the run's end, as a part of their norm.
        by_metric: whether a ReduceLROnPlateau existed then; None in sessions of earlier versions.
    """

    steps: float
    of: float
    highest: float
    latest: float
    compared: float
    moved: float
    by_metric: bool | None = None


# -- masters --------------------------------------------------------------------------------------------------------------


class MastersNotCopied(Record, kind="masters-not-copied"):
    """Masters, out of ``of``, that changed in ``steps`` steps while their weights did not."""

    steps: float
    of: float | None = None


class MastersStale(Record, kind="masters-stale"):
    """Masters that differed from their weights before the first step, ``changed`` of their elements, and equal them later."""

    changed: float
    of: float


class MastersOverwritten(Record, kind="masters-overwritten"):
    """Masters that were overwritten by their weights between two steps, or FP32 weights by a 16-bit copy (``text``: its dtype).

    Args:
        changed: the share of changed elements, 0..1; None for weights that a copy overwrote.
        moved: whether the weights have other memory since, as after a conversion of the module.
    """

    changed: float | None = None
    moved: bool = False


class MastersGivenSmaller(Record, kind="masters-given-smaller"):
    """Gradients that were divided by ``least`` to ``most`` on their way to the masters, in ``steps`` steps."""

    least: float
    most: float
    steps: float | None = None


class MastersClippedLate(Record, kind="masters-clipped-late"):
    """Weights' gradients that the loop multiplied by a ``factor`` after it had copied them to the masters' gradients.

    Args:
        factor: below 1, the same for all.
        of: the number of masters.
    """

    factor: float
    of: float


class MastersAddedUp(Record, kind="masters-added-up"):
    """Masters' gradients that are a sum of old and new gradients.

    Args:
        kept, added: the coefficients of the old gradients and of the step's last backward in the sum.
        largest: the largest magnitude.
        parameters, of: the number of masters compared, and of all.
    """

    kept: float
    added: float
    largest: float
    parameters: float | None = None
    of: float | None = None


# -- dtypes that change; text: the dtypes before and after ------------------------------------------------------------------


class Cast(Record):
    """Tensors that were cast to a narrower dtype in the run."""

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes before and after."""
        before, _, after = self.text.partition(" ")
        return before, after


class ParametersCast(Cast, kind="parameters-cast"):
    """Parameters that an optimizer stepped in a wider dtype before: ``count`` of the ``of`` parameters of the one that steps now.

    Args:
        is_new_optimizer: whether that one was made since.
    """

    count: float
    of: float
    is_new_optimizer: bool = False


class StatesCast(Cast, kind="states-cast"):
    """States that ``load_state_dict`` cast. ``names``: the optimizer's class, the user's line, and the states."""


# -- sums and numbers in 16 bits; text: the dtype ---------------------------------------------------------------------------


class FlushedState(Record, kind="flushed-state"):
    """An optimizer's FP16 state without negative elements. ``text``: its name; ``names``: the parameters.

    Args:
        flushed: the share of its elements that are zero, of those with a gradient other than zero, 0..1.
    """

    flushed: float


class Accumulation(Record, kind="accumulation"):
    """Elements of a micro-batch's gradient that were lost when they were added to the accumulated gradient.

    Args:
        lost, nonzero: the number of lost elements, and of non-zero elements.
        micro_batches: the number of micro-batches.
        all_lost, all_nonzero: the same for all parameters together.
    """

    lost: float
    nonzero: float = 0.0
    micro_batches: float = 0.0
    all_lost: float | None = None
    all_nonzero: float | None = None


class Statistics(Record, kind="statistics"):
    """Running statistics that are not finite, or that ``writes`` writes did not change. ``text``: which one, and the dtype."""

    NOT_FINITE: ClassVar[str] = "not finite"
    STUCK: ClassVar[str] = "stuck"

    writes: float | None = None

    @property
    def is_stuck(self) -> bool:
        return self.text.startswith(self.STUCK)

    @property
    def dtype(self) -> str:
        return self.text.rpartition(" ")[2]


class BrokenLoss(Record, kind="broken-loss"):
    """A loss that was not finite. ``names``: autograd's operators. ``in_half``: whether one of them computed in FP16."""

    in_half: bool = False


class Positions(Record, kind="positions"):
    """Consecutive whole numbers that rounding made equal. ``names``: the operator that rounded them, their use, and the line of
    the operator, or the line that takes them if they are older than the step.

    Args:
        largest: the largest number, if known.
        least: a lower bound of the largest number, if only a bound is known.
        before, after: the number of distinct values before and after rounding.
        is_table: whether the counts are measured on a whole table.
        stored: whether the numbers are in FP32 now.
    """

    largest: float | None = None
    least: float | None = None
    before: float
    after: float
    is_table: bool
    stored: bool = False


class Ties(Record, kind="ties"):
    """Scores that tie at the edge of a top k.

    Args:
        fraction: the share of rows with such a tie, 0..1.
        k, scores: the number of chosen scores, and of all scores in a row.
    """

    fraction: float
    k: float
    scores: float


# -- autocast regions -------------------------------------------------------------------------------------------------------


class StaleCasts(Record, kind="autocast-stale-casts"):
    """Forwards, in ``steps`` of the measured steps, with casts of weights made before the weights' last update.

    ``names``: empty after an optimizer's step; else operator, line, phase, and the weight.
    """

    steps: float


class AutocastElsewhere(Record, kind="autocast-elsewhere"):
    """``regions`` autocast regions for another device type than the model's. ``names``: the regions' type, the model's type."""

    regions: float


# -- the second computation; names: operator, line, phase, and the weight whose gradient has the largest error ---------------


class BornInfinite(Record, kind="second-born"):
    """The first operator with a result that is infinite or NaN where the exact one is finite.

    Args:
        elements, of: the number of such elements, and of all.
        largest: their largest exact magnitude; 0 if the operator is not to blame but the rounding of its inputs.
        exponent: of a cast, the largest argument of an exponential before it that FP16 can't hold. Its line is the fourth name.
        near: the largest magnitude of the first result near FP16's end.
        is_last: 1 if the fifth and further names are those of the last operator in 16 bits before an operator in FP32.
        is_negative: 1 if all of them are -inf, as in a mask.
        is_unused: 1 if no gradient depends on the infinities: nothing in the graph took them, or what did is right nevertheless.

    The names from the fifth on are the operator, line, module and dtype of that result, or, if ``largest`` is 0, of the rounding
    that made most of the error of the inputs.
    """

    elements: float
    of: float
    largest: float
    exponent: float | None = None
    near: float | None = None
    is_last: float = 0
    is_negative: float = 0
    is_unused: float = 0

    @property
    def did_harm(self) -> bool:
        """Whether gradients depend on infinities of a forward, and not on those of a mask."""
        return bool(self.largest and not self.is_negative and not self.is_unused and self.names[2:3] == ("forward",))


class NearestEnd(Record, kind="second-nearest-end"):
    """The operator of a forward whose finite results came nearest to FP16's end: their ``largest`` magnitude."""

    largest: float


class LostInFP32(Record):
    """Elements of a result that FP32 loses and FP64 does not.

    Args:
        elements: their number.
        largest: their largest magnitude in FP64.
    """

    elements: float
    largest: float


class BrokenInFP32(LostInFP32, kind="second-broken-in-fp32"):
    """The first operator with a result in FP32 that is infinite or NaN where that of a computation in FP64 is finite.

    The names from the fifth on are the operator, line, module and dtype where FP32's errors had grown most before, if they had.
    """


class FlushedInFP32(LostInFP32, kind="second-flushed-in-fp32"):
    """The first operator with a gradient whose result is zero throughout in FP32, and not in FP64."""


class UpdatesLostInFP32(Record, kind="second-fp32-updates"):
    """An FP32 weight whose updates rounding takes most of. ``name``: the weight.

    Args:
        exact, rounded: the decrease of the loss by its exact and by its rounded change in a step, to first order.
        share: its share of that by the exact changes of all weights.
        largest: its largest magnitude.
    """

    exact: float
    rounded: float
    share: float
    largest: float


class BrokenAlike(Record, kind="second-broken-alike"):
    """The first operator with a result that is not finite in the exact computation either: ``elements`` of ``of``.

    Args:
        from_finite: whether all of its inputs were finite; False in sessions of earlier versions.
        operand: the index of its only argument that was not finite; -1 if there was none or several.
        given: the number of that argument's infinities and NaNs, without -inf.
    """

    elements: float
    of: float
    from_finite: bool = False
    operand: int = -1
    given: float = 0


class PreparedError(Record, kind="prepared-error"):
    """A tensor that was computed before the first step, still exists at that step, and differs from its FP32 twin.

    ``names``: the operator that made most of the error, its line and phase.

    Args:
        elements: the number of its elements.
        broken: the number of infinities and NaNs that are finite in the twin.
        error: the norm of the error, relative to that of the twin.
        changed: the number of whole numbers that a cast has changed.
        flushed: the number of its zeros whose twins are no smaller than 2^-11 of the twin's largest element.
        ones: the number of its ones whose twins are other numbers.
        equal: the number of elements that equal the one before, of a tensor whose twin rises or falls throughout.
        value, exact: the worst element, and the twin's.
        times: the number of additions to a running sum that was not followed to its end; 0 for a tensor that was. ``error`` is
            then the lost part of the terms.
        unchanged: the mean share of its elements that an addition left as they were.
    """

    elements: float
    value: float
    exact: float
    broken: float = 0
    error: float = 0
    changed: float = 0
    flushed: float = 0
    ones: float = 0
    equal: float = 0
    times: float = 0
    unchanged: float = 0


class CalledLines(Record, kind="second-lines"):
    """The lines of all calls of an operator, its name as ``text``, in a forward that takes a gradient."""


class LostSum(Record, kind="second-lost-sum"):
    """A sum that loses terms to rounding.

    Args:
        error: its local error, relative to the norm of the exact result.
        value, exact: its worst element, and the exact value of that element.
        gradients_error: the largest relative error of a weight's gradient, of all arithmetic together.
    """

    error: float
    value: float
    exact: float
    gradients_error: float | None = None


class LostFactor(Record, kind="second-lost-factor"):
    """A multiplication of weights in an optimizer's step whose products round to the old weights.

    Args:
        elements: the number of weights that the exact products change.
        lost: how many of them the rounded ones leave as they were.
        factor: the factor.
    """

    elements: float
    lost: float
    factor: float


class AbsorbedOperand(Record, kind="second-absorbed"):
    """An addition whose smaller operand is mostly lost.

    Args:
        error: the share of the smaller operand's norm that is lost.
        unchanged: the share of elements that equal one of the operands, 0..1.
        size: the root mean square of the smaller operand; None in sessions of earlier versions.
        times: how many additions to one sum these are the figures of.
        gradients_error: the largest relative error of a weight's gradient, of all arithmetic together.
        inherited: the error of the larger operand, relative to the smaller operand's norm. From the fifth on the names are the
            operator, line, module and dtype that made most of it, if it is as large.
    """

    error: float
    unchanged: float
    size: float | None = None
    times: float = 1
    gradients_error: float | None = None
    inherited: float = 0


class FlushedResult(Record, kind="second-flushed"):
    """An FP16 result that is mostly flushed, in an optimizer's step, in a tensor that persists, in a number that the loop reads
    or in an optimizer's gradients; or such a cast to FP8.

    Args:
        flushed: of the results that are not zero in FP32, the share that is zero here, 0..1.
        elements: the number of results that are not zero in FP32.
        largest: the largest exact magnitude that became zero.
        times: how many results at one line these are the figures of.
        lost: the share of the sum of magnitudes that a cast to FP8 flushes, 0..1.
        unused: how many powers of two of FP8's range are above the largest value of such a cast.
        rows: the share of rows that lose nearly all of their elements in a cast to FP8 that suits others, 0..1.
        taken: of the sum of magnitudes of an optimizer's gradients, the share that became zero, 0..1; None outside of these.
        emptied, weights: the optimizer's weights whose gradients lost half of theirs or more, and all; 0 in earlier sessions.
        exact: the exact number computed from them that the loop reads as zero; None if it reads none.
    """

    flushed: float
    elements: float
    largest: float
    lost: float = 0.0
    unused: float = 0.0
    rows: float = 0.0
    exact: float | None = None
    times: float = 1
    taken: float | None = None
    emptied: float = 0
    weights: float = 0


class ReadNumber(Record, kind="second-read"):
    """A 16-bit number that the loop reads, outside of modules. ``names``: the operator, the line and the phase, and the line of
    the sum in 16 bits that it is made of, if it is.

    Args:
        value, exact: the number, and the same computed in FP32; None in earlier sessions.
        terms: the number of terms of that sum; 0 without one.
    """

    value: float | None = None
    exact: float | None = None
    terms: float = 0.0


class SaturatedCast(Record, kind="second-saturated"):
    """A clamp to the range of FP8 that cuts off a part of the values.

    Args:
        lost: the share of the sum of magnitudes that is beyond the bound, 0..1.
        saturated: the share of the elements that are beyond it, 0..1.
        largest: the largest magnitude before the clamp.
        bound: FP8's largest number.
    """

    lost: float
    saturated: float
    largest: float
    bound: float


class RoundedConstant(Record, kind="second-constant"):
    """A difference from the constant 1 that is zero, since the other number is 1 in 16 bits: of an optimizer's step, or
    ``elements`` of ``of`` in a forward.
    """

    elements: float = 1
    of: float = 1


class UpdateEffect(Record, kind="second-updates"):
    """The decrease of the loss by an optimizer's step on 16-bit weights, to first order.

    Args:
        exact: by the updates before rounding.
        rounded: by the changes of the weights.
    """

    exact: float
    rounded: float


class FrozenBuffer(Record, kind="second-buffer"):
    """A tensor kept from step to step that an operator leaves unchanged. A buffer's or weight's name is the last of ``names``.

    Args:
        unchanged: the share of elements, of those that would change in FP32, that did not change, 0..1.
        times: how many operators at one line these are the figures of.
        is_weight: whether it is a weight that no optimizer steps.
        rounded: the error of the step's change, relative to the exact change, of a decaying average that does change; else None.
    """

    unchanged: float
    times: float = 1
    is_weight: bool = False
    rounded: float | None = None


class GrowingSum(Record, kind="second-growing"):
    """A sum kept from step to step that rounds its terms, and stops if it grows on. A buffer's name is the last of ``names``.

    Args:
        total, term: the magnitudes of the sum and of the term that is added to it.
        unit: the distance of neighbouring numbers at the sum.
        stops_at: the magnitude from which on such a term changes nothing.
    """

    total: float
    term: float
    unit: float
    stops_at: float


#: The least relative error of a result that is mostly error.
MOSTLY_ERROR = 0.3


class AmplifiedError(Record, kind="second-amplified"):
    """An operator whose result is mostly the error of its inputs; or, with a smaller error, the one that enlarged it most.

    The names from the fifth on are the operator, line, module and dtype of the rounding that made most of that error, if any did.

    Args:
        before, after: relative errors of the inputs and of the result.
        gradients_error: the largest relative error of a weight's gradient, of all arithmetic together.
        largest, unit: of a difference of numbers that were rounded before the step, the largest one and the distance of
            neighbouring numbers there; None otherwise, where the error is measured.
        typical: the median of such differences that are not zero; of 16-bit data, the root mean square of all.
    """

    before: float
    after: float
    gradients_error: float | None = None
    largest: float | None = None
    unit: float | None = None
    typical: float | None = None


#: Stands for the outputs of an inference where a training has the name of a weight, whose gradient is off.
OUTPUTS = "outputs()"


class GradientsError(Record, kind="second-gradients"):
    """The error of all weights' gradients together, or of the outputs of an inference.

    If the error is large, it has the operator whose line raises errors most.

    ``names``: the operator, its line and phase, an empty name, and the operator, line, module and dtype of the rounding that made
    most of its operands' error, if any did.

    Args:
        error: the norm of the error, relative to that of the exact gradients: those of FP32, or of FP64 if the dtype is FP32.
        off, of: the number of weights whose own gradient is off by half its size, or by FP32_OFF in FP32, and of all compared.
        size: the norm of the exact gradients.
        zeroed: the norm of the exact gradients' elements that are zero in the run, relative to that of the error.
        share: the operator's line's share of the growth of errors in all lines, 0..1.
        of_outputs: 1 for the outputs of an inference.
    """

    error: float = 0.0
    off: float = 0
    of: float = 0
    size: float = 0.0
    zeroed: float = 0.0
    share: float = 0.0
    of_outputs: float = 0


#: The least error of all gradients for which FP32 is called too coarse.
FP32_OFF = 0.1


class ChangedIntegers(Record, kind="second-integers"):
    """Whole numbers that a 16-bit format changed before they were made integers again.

    Args:
        changed: how many of the ``of`` elements.
        given, exact: the element that changed most, and its value without rounding.
    """

    changed: float
    of: float
    given: float
    exact: float


class ReturnedWeights(Record, kind="returned-weights"):
    """FP32 weights with which a later training of a model begins, and which have the values of a 16-bit format alone (``text``).

    Args:
        equal: the share of the ``of`` compared elements that are as they were when the last training began.
    """

    equal: float
    of: float


class TruncatedWrite(Record, kind="second-truncated"):
    """Numbers with fractions that were written into a tensor of integers. The fourth of ``names`` is that tensor's dtype.

    Args:
        changed: how many of the ``of`` numbers have a fraction.
        given, exact: what the first of these became, and the number itself.
    """

    changed: float
    of: float
    given: float
    exact: float


class BroadcastDifference(Record, kind="second-broadcast"):
    """A difference outside of modules of a column and a vector of ``rows`` elements each, which is a matrix."""

    rows: float


class ChangedChoices(Record, kind="second-choices"):
    """Integers or a mask that 16-bit numbers decide, other than in FP32, and that are used as indices, weights or conditions.

    Args:
        changed: how many of the ``of`` elements; 0 of 0 if only the table is known.
        given, exact: the element that changed most, and its value without rounding.
        whole: the share of the numbers that have a fraction in FP32 alone, if a floor or a ceiling was taken.
        entries, distinct: the entries of the table that was searched, and how many of them differ.
        equal: the number of entries that are the number which was searched, if several are.
        best: of a top k, k; ``changed`` are then those that are not among the best 2 k exact scores.
    """

    changed: float = 0
    of: float = 0
    given: float = 0
    exact: float = 0
    whole: float | None = None
    entries: float | None = None
    distinct: float | None = None
    equal: float | None = None
    best: float | None = None

    @property
    def is_of_crowded_table(self) -> bool:
        """Whether most entries of the searched table equal another one, or the searched one does."""
        return self.entries is not None and (self.equal is not None or (self.distinct or 0) * 2 <= self.entries)


class RoundedArgument(Record, kind="second-argument"):
    """Arguments near zero of an operator that is singular there, which are mostly rounding error.

    The line of the sum or difference that made them, if known, is the fourth of ``names``; an operator that was given the
    number that rounding changed, and its line, are the next ones.

    Args:
        elements: how many of the ``of`` elements.
        given, exact: the element that is furthest off, and its exact value.
        bound, rounded, nearest: a number of the script that leads to this element, such as a bound or an epsilon, its value in
            the tensor's dtype, and the nearest other value there.
    """

    elements: float
    of: float
    given: float
    exact: float
    bound: float | None = None
    rounded: float | None = None
    nearest: float | None = None


class RoundedBound(Record, kind="second-bound"):
    """A bound of the script that 16 bits round to an argument at which a later operator is infinite, even if no value is there.

    Its names are those of the operator that is infinite, its line and phase, and of the one that was given the bound.

    Args:
        bound, rounded, nearest: the number, its value in the tensor's dtype, and the nearest other value there.
        given: the argument of the operator at the rounded bound.
    """

    bound: float
    rounded: float
    nearest: float
    given: float


class MixedPowers(Record, kind="mixed-powers"):
    """A sum of two terms that carry different powers of the loss scale, or a number that limits a scaled value.

    Its text says where: "accumulated" (by two backwards), "gradient", "optimizer", "state" (a tensor that the optimizer takes),
    "number" (one term is a number), "values", "backward", "weights" (of an inner step), "function" (whose backward drops the
    scale), "limit". Its names are the operator, the line, and the parameters in which gradients were accumulated; or the
    functions with a backward of their own.

    Args:
        first, second: the powers of the two terms.
        share: the share of the elements that the limit concerns, 0..1.
    """

    loss_scale: float
    first: float
    second: float
    share: float | None = None


class StuckNumber(Record, kind="stuck-number"):
    """A number that the loop keeps, computed from an infinity or NaN from before the step.

    ``names``: the operator that computes it, the line and the phase. ``text``: its dtype.

    Args:
        is_nan: whether it is NaN; else it is infinite.
        is_compared: whether the loop compares it, or a number computed from it.
    """

    is_nan: bool = False
    is_compared: bool = True


class WrittenByLoop(Record, kind="written-by-loop"):
    """A weight that other code than an optimizer's step or a forward writes. Its names are the operator and the line."""


class LoopLine(Record, kind="loop-line"):
    """A line of the training loop. ``text``: its role. ``names``: the name that it assigns, or "", and the line, or "".

    The roles are "forward", "backward", "clip", "unscale" and "step", of calls, and "model", "optimizer", "scaler" and "loss",
    which may be expressions.
    """


class NewScalers(Record, kind="new-scalers"):
    """Steps that used a newly made scaler: ``new`` out of ``steps``."""

    new: float
    steps: float
