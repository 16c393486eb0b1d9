"""Faults of sums kept in 16 bits: weights, optimizer states, accumulated gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges import records
from mpinspect.ranges.analysis.precision import SQUARES
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, FP32Weights
from mpinspect.ranges.faults.name.dtypes import Loaded
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.faults.name.operators import found_at
from mpinspect.ranges.kinds import UPDATE, WEIGHT
from mpinspect.ranges.session import Event, OptimizerRecord
from mpinspect.ranges.windows.tensors import NO_LOST_UPDATES, LostUpdates, TensorKey
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import by_number, filled, number_of

#: The optimizer's setting that is the share of a state that each step keeps, by the state's name.
_KEPT = {
    "exp_avg": "beta1",
    "exp_avg_sq": "beta2",
    "momentum_buffer": "momentum",
    "square_avg": "alpha",
    # In optimizers that a script writes itself.
    "m": "beta1",
    "v": "beta2",
}
#: torch's default weight decay in AdamW, which many scripts have without having chosen it.
_DEFAULT_DECAY = 0.01
#: Optimizers that shrink the weights themselves; the others add the decay to the gradient.
_DECOUPLED = ("AdamW", "Lion", "NAdamW", "Muon", "Adafactor")

#: Share of lost updates or gradients above which a warning is given. For comparison: a digits classifier trained by SGD with
#: FP16 weights and no FP32 masters lost 87% of its updates, and its loss ended at 0.298 against 0.160.
_LOST_TOLERANCE = 0.1
#: Least decrease of the loss by rounded updates, as a part of that by the exact ones, that makes the lost ones information.
_HARMLESS = 0.95
#: Adam's largest update, as a multiple of the learning rate, is (1 - beta1) / sqrt(1 - beta2), 3.2 by default. Larger ones are
#: a fault, and from the second number on an error.
_LARGEST_UPDATE, _HUGE_UPDATE = 10.0, 100.0
#: The share of weights that a training begins with as the one before did, from which on rounding takes much of what it learns.
_MOSTLY_AS_BEFORE = 0.3
#: The share of lost updates from which on a model hardly trains, if so many steps were sampled: not the first of a warm-up.
_NEARLY_ALL, _FEWEST_STEPS = 0.99, 5


def never_decays(dtype: str, kept: float) -> bool:
    """Return whether no number of a 16-bit dtype becomes smaller when it is multiplied by ``kept`` and rounded.

    An average v = beta v + (1 - beta) x is multiplied by beta and rounded before the new value is added. A factor of 1 - d
    returns the same number if d is below half the least relative step of the format, 2^-bits, which is the step of numbers
    just below a power of two.
    """
    bits = SIGNIFICAND_BITS.get(dtype)
    return bits is not None and 0 < 1 - kept < 2.0 ** -(bits + 1)


def never_halves(dtype: str, kept: float) -> bool:
    """Return whether no number of a 16-bit dtype ever reaches the next power of two below it in such products.

    The steps of numbers just above a power of two are 2^(1 - bits) of them, the largest relative ones.
    """
    bits = SIGNIFICAND_BITS.get(dtype)
    return bits is not None and 0 < (1 - kept) * (1 + 2.0 ** (1 - bits)) < 2.0**-bits


# -- weights ------------------------------------------------------------------------------------------------------------


class _Since(Sentences):
    CONVERTED = (
        "Until step {last_before} an optimizer stepped {count:.0f} of the weights in {before:format}: code before step {since} "
        "converted the model in place. .bfloat16(), .half() and .to(dtype) do so, and evaluations in 16 bits, such as "
        "bf16_full_eval of the Transformers' Trainer."
    )


def _converted(case: Case) -> tuple[_Since | None, dict[str, object]]:
    """Return the sentence on weights that were in a wider dtype for an earlier optimizer, and its words; None without any."""
    cast = next((each for each in case.recorded(records.ParametersCast) if each.is_new_optimizer), None)
    if cast is None:
        return None, {}
    words = {"last_before": cast.step - 1, "since": cast.step, "count": cast.count, "before": cast.dtypes[0]}
    return _Since.CONVERTED, words


class _Updates(Sentences):
    WOULD_LOSE = (
        "If the weights were stored in {format:format}, rounding would lose {lost_fraction:percent} of the updates{sampled}; "
        "{worst_lost_fraction:percent} in {worst:some 3}."
    )
    LOSE = (
        "{which} are stored in {format:format}, and rounding loses {lost_fraction:percent} of the updates{sampled}; "
        "{worst_lost_fraction:percent} in {worst:some 3}."
    )
    ONE_LOSES = (
        "{worst:some} is stored in {format:format}, and rounding loses {lost_fraction:percent} of its updates{sampled}."
    )
    ALL = "Nearly no update changes a weight: the model hardly trains."
    EFFECT = (
        "In the steps that were computed twice, the rounded updates lower the loss, to first order, by {effect:percent} of the "
        "decrease of the exact ones."
    )
    FP32_WEIGHTS = "Keep all weights in FP32: autocast casts the operands of each product."
    FP32_WEIGHTS_OR_MASTERS = (
        "Keep the weights in FP32 and compute in 16 bits by autocast. FP32 masters in the optimizer do as well."
    )


@dataclass(frozen=True)
class _LostInFormat:
    """The updates of weights in one storage format."""

    storage: str
    updates: Mapping[str, LostUpdates]
    #: The names of weights that are stored in it; the losses of other weights are hypothetical.
    stored: frozenset[str]

    @property
    def is_fault(self) -> bool:
        return any(self.updates[name].fraction > _LOST_TOLERANCE for name in self.stored)

    @property
    def matters(self) -> bool:
        return self.is_fault or any(each.lost for each in self.updates.values())

    @property
    def fraction(self) -> float:
        """The share of the non-zero updates that are lost, 0..1."""
        return sum(self.told.values(), NO_LOST_UPDATES).fraction

    @property
    def told(self) -> dict[str, LostUpdates]:
        """The updates that the finding is about: of a fault only those that are lost in this run."""
        return {name: each for name, each in self.updates.items() if not self.is_fault or name in self.stored}


def _updates_lost(case: Case) -> Iterator[Found]:
    """Updates that rounding loses when they are added to weights stored in 16 bits; in FP32 runs, those that would be lost.

    Two kinds of optimizers lose nothing: one whose step draws random numbers, which is taken to round stochastically, and one
    with Kahan summation, which is recognised by a state whose values are rounding errors.

    It is an error if all weights are in 16 bits and rounding loses 99% of the updates, in five sampled steps or more. It is an
    info if, in steps computed twice, the rounded updates lower the loss by at least 95% of the exact updates' decrease (to first
    order): the lost updates are small, or belong to few weights.

    False alarms: An optimizer that rounds stochastically with numbers of its own. Kahan summation whose state has another unit,
    or weights of about one magnitude, or updates that have not added up to a weight's spacing yet. A state whose name contains
    "kahan" or "compensation" is recognised from the first step.
    """
    for lost in _by_format(case):
        told = lost.told
        # Among equal fractions, the one with the most updates is first.
        ordered = sorted(told, key=lambda name: (told[name].fraction, told[name].nonzero), reverse=True)
        highest = told[ordered[0]].fraction
        fix, code = _kept_wide(lost, case)
        says, which = _who_loses(lost, case)
        is_all = _are_all_lost(lost, case)
        converted, since = _converted(case)
        effect = _effect_of_rounded(case) if lost.is_fault else None
        yield Found(
            (
                says,
                _Updates.ALL.when(is_all),
                _Updates.EFFECT.when(effect is not None),
                converted and converted.when(lost.is_fault),
            ),
            {
                "format": lost.storage,
                "lost_fraction": lost.fraction,
                "worst_lost_fraction": highest,
                "layers": len(told),
                "measured": all(part.measured for part in told.values()),
            },
            {
                "which": which,
                "worst": [name for name in ordered if told[name].fraction == highest],
                "sampled": _sampled(lost, case),
                "effect": effect,
                **since,
            },
            fix,
            code,
            layer=ordered[0],
            is_grave=is_all,
            is_mild=not is_all and (not lost.is_fault or (effect or 0.0) >= _HARMLESS),
        )


def _effect_of_rounded(case: Case) -> float | None:
    """Return the loss's decrease by the rounded updates, as a part of that by the exact ones; None if it was not measured.

    A step that was computed twice stands for all up to the next one.
    """
    found = list(case.recorded(records.UpdateEffect))
    steps = sorted({each.step for each in found})
    spans = dict(zip(steps, (end - step for step, end in pairwise((*steps, case.progress.steps))), strict=True))
    exact = sum(each.exact * spans[each.step] for each in found)
    return max(sum(each.rounded * spans[each.step] for each in found) / exact, 0.0) if exact > 0 else None


def no_weight_changes(case: Case) -> bool:
    """Return whether nearly all updates are lost, of a model whose weights are all in 16 bits."""
    return any(_are_all_lost(lost, case) for lost in _by_format(case))


def _are_all_lost(lost: _LostInFormat, case: Case) -> bool:
    is_of_all = set(case.precision.weights) == {lost.storage} and case.progress.sampled_steps >= _FEWEST_STEPS
    return lost.is_fault and is_of_all and lost.fraction >= _NEARLY_ALL


def _by_format(case: Case) -> Iterator[_LostInFormat]:
    """Yield the lost updates by storage format, except where the optimizer rounds stochastically or compensates."""
    by_format: dict[str, dict[str, LostUpdates]] = {}
    # An update that is made of rounding noise is not a loss.
    noise = {layer.name for layer in case.layers if layer.rounding_noise}
    updates = {key.name: window.lost_updates for key, window in case.totals.items() if key.kind == UPDATE}
    for name, of_formats in updates.items():
        for storage, counted in of_formats.items():
            if counted.nonzero and name not in noise:
                by_format.setdefault(storage, {})[name] = counted
    for storage, found in by_format.items():
        steppers = [optimizer for optimizer in case.precision.optimizers if storage in optimizer.steps]
        if any(optimizer.draws_random or optimizer.compensation for optimizer in steppers):
            continue
        stored = frozenset(name for name, each in found.items() if _is_stored_in(storage, name, each, case))
        lost = _LostInFormat(storage, found, stored)
        if lost.matters:
            yield lost


def _is_stored_in(storage: str, name: str, lost: LostUpdates, case: Case) -> bool:
    """Return whether the parameter really is stored in this format (otherwise its lost updates are hypothetical)."""
    dtypes = {case.infos[key].dtype for kind in (UPDATE, WEIGHT) if (key := TensorKey(name, kind)) in case.infos}
    return lost.measured or storage in dtypes


def _who_loses(lost: _LostInFormat, case: Case) -> tuple[_Updates, str]:
    """Return the sentence, and the weights that are its subject."""
    if not lost.stored:
        return _Updates.WOULD_LOSE, ""
    if not set(case.precision.weights) > {lost.storage}:
        return _Updates.LOSE, "The weights"
    return by_number(len(lost.told), _Updates.ONE_LOSES, _Updates.LOSE), f"{len(lost.told)} of the weights"


def _sampled(lost: _LostInFormat, case: Case) -> str:
    """Return in words in how many steps the updates were counted, to follow "the updates"; "" if in all."""
    sampled = max(case.totals[TensorKey(name, UPDATE)].samples for name in lost.told)
    return f" in the {number_of(sampled, 'sampled step')}" * (0 < sampled < case.progress.steps)


def _kept_wide(lost: _LostInFormat, case: Case) -> tuple[_Updates | tuple[()], FP32Weights | tuple[()]]:
    if not lost.is_fault:
        return (), ()
    if any(case.precision.autocast):
        return _Updates.FP32_WEIGHTS, FP32Weights.TO_FP32
    return _Updates.FP32_WEIGHTS_OR_MASTERS, FP32Weights.of(lost.storage)


# -- optimizer states ---------------------------------------------------------------------------------------------------


class _Moments(Sentences):
    ONLY_GROW = (
        "{optimizer} keeps {state} in {dtype:format} and multiplies it by {kept:g} a step, which {dtype:format} rounds back to "
        "the old value (a decay below 2^-{bits} = {least_decay:.2g} does nothing): it never decreases, so the steps stay as "
        "small as after the largest gradients."
    )
    NEVER_HALVES = (
        "{optimizer} keeps {state} in {dtype:format} and multiplies it by {kept:g} a step. Just above a power of two "
        "{dtype:format} rounds that back to the old value (a decay below 2^-{steps} = {most_lost:.2g} does nothing there): it "
        "never decreases by half, so the steps stay nearly as small as after the largest gradients."
    )
    MAY_ONLY_GROW = (
        "{optimizer} keeps {state} in {dtype:format}. If it is a moving average with a decay factor above 1 - 2^-{bits} "
        "({most_kept:.3g}), as Adam's second moment with a beta2 of 0.999, rounding lets it only grow; its decay "
        "factor is not known."
    )
    FP32_WEIGHTS = "Keep the weights that {optimizer} steps in FP32 and compute in 16 bits by autocast."
    FP32_STATES = (
        "Let {optimizer} keep {state} in FP32: the weights that it steps are in FP32 already, so the optimizer itself, or an "
        "option of it, sets the dtype of its states."
    )
    STATE = 'state["{state}"] = torch.zeros_like(\n    parameter, dtype=torch.float32\n)'


def moments_cannot_decay(case: Case) -> Iterator[Found]:
    """Moments kept in 16 bits whose decay is lost to rounding, as the settings alone show.

    An optimizer whose step draws random numbers is left out: it may round its states stochastically. Compensation of the weights
    does not help the moments.

    False alarms: None: it follows from the settings.
    """
    for optimizer in _rounding_to_nearest(case):
        for state in optimizer.states:
            for dtype in optimizer.dtypes(state):
                if dtype in SIGNIFICAND_BITS and state != optimizer.compensation:
                    yield from _moment(optimizer, state, dtype, case)


class _Flushed(Sentences):
    SQUARES = (
        "In step {step}{again} {flushed:percent} of the elements of {optimizer}'s state {state!r} were zero in FP16, where the "
        "gradient was not. It has no negative elements, like an average of squared gradients: FP16 flushes a square's share "
        "below 3e-8, and the step is divided by eps alone."
    )
    EXPLODED = "The weights grew to {ratio:.2g} times their norm at the start."
    FP32_STATE = "Let {optimizer} keep {state} in FP32."
    WAS_NARROW = (
        "Before the update of step {step}{again} {flushed:percent} of the elements of exp_avg_sq, an average of squared "
        "gradients, were zero where exp_avg was not. The update divides by eps alone there: it is up to {largest:.2g} times the "
        "learning rate. FP32 makes no such zeros: the states had passed through FP16{as_how}."
    )
    BY_LOADING = (
        "load_state_dict ({line}) cast them to it: torch casts a loaded state to its parameter's dtype, and a later .float() "
        "restores the dtype alone."
    )
    SAVE_WIDE = (
        "Save and load the optimizer's states in FP32. From a checkpoint that has lost them, begin with a new optimizer and a "
        "warm-up."
    )
    SAVE = '# as it is, without .half()\nstates = optimizer.state_dict()\ncheckpoint["optimizer"] = states'


def moments_flushed(case: Case) -> Iterator[Found]:
    """An optimizer's average of squared gradients whose elements FP16 flushed: an FP16 state, or an FP32 state once saved in
    FP16.

    False alarms: An FP16 state counts as an average of squares if no element is negative. It is an error only if the weights
    exploded. An epsilon that is zero too has a finding of its own. The earlier FP16 of an FP32 state is inferred; it is an error
    if an update is 100 times the learning rate.
    """
    if squares := [each for each in case.recorded(records.LostSquares) if each.largest >= _LARGEST_UPDATE]:
        fix: Sentences = _Flushed.SAVE_WIDE
        code: Sentences = _Flushed.SAVE
        evidence = {}
        if line := squares[0].text:
            fix, code, evidence = Loaded.RESTORE, Loaded.PUT_BACK, {"line": line}
        yield Found.of(
            case,
            squares,
            (_Flushed.WAS_NARROW, _Flushed.BY_LOADING.when(line)),
            fix,
            code,
            words={"as_how": ", as in a checkpoint" * (not line), "literal": '("exp_avg", "exp_avg_sq")'},
            evidence=evidence,
            is_grave=squares[0].largest >= _HUGE_UPDATE,
            is_inferred=True,
        )
    found = [each for each in case.recorded(records.FlushedState) if each.flushed >= _LOST_TOLERANCE]
    owners = {state: each for each in case.precision.optimizers for state in each.states}
    if not found or found[0].text not in owners or (found[0].text in SQUARES and any(epsilon_zero(case))):
        return
    state, optimizer = found[0].text, owners[found[0].text]
    growth = next(case.recorded(records.WeightGrowth), None)
    yield Found.of(
        case,
        [each for each in found if each.text == state],
        (_Flushed.SQUARES, _Flushed.EXPLODED.when(growth)),
        _Flushed.FP32_STATE,
        _Moments.STATE,
        words={"optimizer": optimizer.type, "state": state, "ratio": growth and growth.ratio},
        is_grave=growth is not None,
        is_inferred=True,
    )


def _rounding_to_nearest(case: Case) -> Iterator[OptimizerRecord]:
    """Yield the optimizers whose step draws no random numbers."""
    return (optimizer for optimizer in case.precision.optimizers if not optimizer.draws_random)


def _moment(optimizer: OptimizerRecord, state: str, dtype: str, case: Case) -> Iterator[Found]:
    kept, bits = optimizer.settings.get(_KEPT.get(state, "")), SIGNIFICAND_BITS[dtype] + 1
    evidence = {"optimizer": optimizer.type, "state": state, "dtype": dtype}
    if kept is None:
        words = {"bits": bits, "most_kept": 1 - 2.0**-bits}
        yield Found(_Moments.MAY_ONLY_GROW, evidence, words, severity="info", is_inferred=True)
    elif never_halves(dtype, kept):
        is_its_own = set(optimizer.steps) == {"float32"}
        converted, since = _converted(case)
        yield Found(
            (_Moments.ONLY_GROW.when(never_decays(dtype, kept)) or _Moments.NEVER_HALVES, converted),
            {**evidence, "kept": kept, "least_decay": 2.0**-bits},
            {"bits": bits, "steps": bits - 1, "most_lost": 2.0 ** (1 - bits), **since},
            _Moments.FP32_STATES.when(is_its_own) or _Moments.FP32_WEIGHTS,
            _Moments.STATE.when(is_its_own) or FP32Weights.of(dtype),
        )


#: The change of a weight over the run below which its loss is an info.
_LITTLE_DECAY = 0.05


class _Decay(Sentences):
    DOES_NOTHING = (
        "{optimizer} multiplies the {dtype:format} weights by 1 - lr * weight_decay = {factor:.12g} a step, and the product "
        "rounds back to the weight: the weight decay of {weight_decay:g} does nothing{unless}."
    )
    MEASURED = (
        "In step {step}, in {place}, weights in {dtype:format} are multiplied by {factor:.6g}, and rounding leaves "
        "{lost:count weight} as before: this weight decay does nothing."
    )
    FP32_WEIGHTS = "Keep the weights that the optimizer steps in FP32 and compute in 16 bits by autocast."
    IN_FP32 = "Multiply a copy of the weights in FP32, add the update there, and round once."


def _weight_decay_lost(case: Case) -> Iterator[Found]:
    """Decoupled weight decay of 16-bit weights whose factor rounds to 1: by the settings alone, or in steps computed twice.

    False alarms: None at the recorded learning rate, if the optimizer multiplies the weights themselves. Most optimizers with
    Kahan summation do so too (optimi's AdamW, torchdistX's AnyPrecisionAdamW); for these the finding is inferred. The severity is
    info if the decay is the optimizer's default, which few scripts chose, or if a measured decay would take less than 5% off the
    weights over the run.
    """
    is_known = False
    for optimizer in _rounding_to_nearest(case):
        decay, rate = optimizer.settings.get("weight_decay", 0.0), optimizer.settings.get("lr", 0.0)
        dtype = max(optimizer.steps, key=lambda dtype: optimizer.steps[dtype], default="")
        if not decay * rate > 0 or optimizer.type not in _DECOUPLED or not never_decays(dtype, 1 - decay * rate):
            continue
        unless = filled(" (if {!r} keeps only the updates, as is usual)", optimizer.compensation)
        yield Found(
            _Decay.DOES_NOTHING,
            {"optimizer": optimizer.type, "dtype": dtype, "lr": rate, "weight_decay": decay},
            {"factor": 1 - decay * rate, "unless": unless},
            _Decay.FP32_WEIGHTS,
            FP32Weights.of(dtype),
            is_mild=decay <= _DEFAULT_DECAY,
            is_inferred=bool(optimizer.compensation),
        )
        is_known = True
    for lost in () if is_known else case.recorded(records.LostFactor):
        words = {"lost": int(lost.lost)}
        is_mild = abs(1 - lost.factor) * case.progress.steps < _LITTLE_DECAY
        yield found_at(lost, _Decay.MEASURED, _Decay.IN_FP32, (), words, is_mild=is_mild)
        return


class _Epsilon(Sentences):
    ZERO = (
        "{optimizer} adds eps = {eps:g} to a denominator in {dtype:format}, where it is zero (magnitudes up to {flush_edge:.2g} "
        "are flushed): where an element's average of squared gradients (in Adam at first 1 - beta2 times the square) is flushed "
        "too, its step is divided by zero."
    )
    RUN_BROKE = "In step {step} the run was no longer finite."
    UPDATE_BROKE = (
        "The update of step {step_before} made the weights infinite or NaN, as the forward of step {step} shows: start again, "
        "or go back to an earlier checkpoint."
    )
    FP32_STATES = (
        "Keep the weights and states in FP32. A larger eps (2^-14, say) avoids the division by zero too, but where the average "
        "is flushed, the step is divided by eps alone."
    )


def epsilon_zero(case: Case) -> Iterator[Found]:
    """An epsilon that is rounded to zero in the dtype of the denominator, which makes 0/0 possible.

    False alarms: Without a non-finite event it is only a warning: it harms only elements whose average of squared
    gradients is flushed as well.
    """
    broke = next((event for event in case.events if not event.skipped), None)
    effect = _effect(broke)
    for optimizer in case.precision.optimizers:
        epsilon = optimizer.settings.get("eps", 0.0)
        dtypes = set(optimizer.dtypes(*SQUARES)) & set(SIGNIFICAND_BITS)
        is_known = bool(dtypes)
        if effect is _Epsilon.UPDATE_BROKE and not set(SQUARES) & set(optimizer.states):
            # An optimizer of the user's own has other names for its states.
            dtypes = set(optimizer.dtypes()) & set(SIGNIFICAND_BITS)
        for dtype in sorted(dtypes):
            edge = FORMATS[dtype].flush_edge
            if not 0 < epsilon <= edge:
                continue
            yield Found(
                (_Epsilon.ZERO, effect),
                {"optimizer": optimizer.type, "dtype": dtype, "eps": epsilon, "flush_edge": edge},
                {"step_before": broke and broke.step - 1},
                _Epsilon.FP32_STATES,
                FP32Weights.of(dtype),
                is_grave=broke is not None,
                is_inferred=not (broke and is_known),
                step=None if broke is None else broke.step,
            )


def _effect(event: Event | None) -> _Epsilon | None:
    """Return the sentence on the first event after which steps were taken: a forward shows the update before it."""
    if event is None:
        return None
    is_of_update = event.phase == "forward" and not event.given and event.step
    return _Epsilon.UPDATE_BROKE.when(is_of_update) or _Epsilon.RUN_BROKE


# -- masters ------------------------------------------------------------------------------------------------------------


class _Masters(Sentences):
    OVERWRITTEN = (
        "After step {step}{again} the masters were overwritten with the weights: {changed:percent} of their elements were "
        "rounded to the weights' dtype, which loses the updates that are smaller."
    )
    BY_A_COPY = (
        "After step {step}{again} the FP32 weights of {modules} were overwritten with values of a copy in {dtype:format}, which "
        "loses the updates that are smaller."
    )
    BY_CONVERSION = (
        "After step {step}{again} the FP32 weights of {modules} were converted to {dtype:format} and back, as for an evaluation: "
        ".bfloat16(), .half() and .to(dtype) convert the module itself. Updates too small for {dtype:format} are lost."
    )
    EVALUATE = "Evaluate under autocast, or convert a copy of the model."
    DEEPCOPY = "evaluated = copy.deepcopy(model)\nevaluated.to(torch.{dtype})"
    FP32_COPY = "Keep copies of weights that are written back (a stash, a checkpoint, a broadcast) in FP32."
    STASH = "stash = [\n    p.detach().clone()\n    for p in model.parameters()\n]"
    ONE_WAY = (
        "Copy only from the masters to the weights. Save and load the masters with a checkpoint: they are the weights of the "
        "training."
    )
    STALE = (
        "Before the first step the masters of {modules} had other values than the weights ({changed:percent} of their elements "
        "differ), and the step copied them into the weights: the weights with which the run began are lost."
    )
    MAKE_AFTER_LOADING = (
        "Make the masters, and the optimizer, after the weights are loaded; or set the masters to them."
    )
    SET_TO_WEIGHTS = (
        "# after the weights are loaded\n"
        "weights = model.parameters()\n"
        "with torch.no_grad():\n"
        "    for p, master in zip(weights, masters):\n"
        "        master.copy_(p)"
    )
    SAVE = 'checkpoint["masters"] = [\n    master.detach() for master in masters\n]'


def _masters_overwritten(case: Case) -> Iterator[Found]:
    """FP32 masters that are set to the 16-bit weights again; FP32 weights that a 16-bit copy overwrites, or that are converted to
    16 bits and back, as for an evaluation.

    False alarms: A loop that loads other weights on purpose, and sets the masters to them, is reported if it does so between two
    measured steps. That a copy overwrote FP32 weights is concluded from their values; for a single time the severity is info.
    """
    every = list(case.recorded(records.MastersOverwritten))
    if found := [each for each in every if each.text]:
        says, fix, code = _Masters.BY_A_COPY, _Masters.FP32_COPY, _Masters.STASH
        if all(each.moved for each in found):
            says, fix, code = _Masters.BY_CONVERSION, _Masters.EVALUATE, _Masters.DEEPCOPY
        severity = "" if len(found) > 1 else "info"
        words = {"dtype": found[0].text}
        yield Found.of(case, found, says, fix, code, words=words, severity=severity, is_inferred=True)
    if found := [each for each in every if not each.text]:
        evidence = {"parameters": len(found[0].names)}
        yield Found.of(case, found, _Masters.OVERWRITTEN, _Masters.ONE_WAY, _Masters.SAVE, evidence=evidence)


def _masters_stale(case: Case) -> Iterator[Found]:
    """Masters made before the weights were loaded or changed: the first step restores the old weights.

    False alarms: Masters that are filled within the first step, from weights loaded on purpose, are reported.
    """
    if found := list(case.recorded(records.MastersStale)):
        yield Found.of(case, found, _Masters.STALE, _Masters.MAKE_AFTER_LOADING, _Masters.SET_TO_WEIGHTS)


# -- accumulated gradients ---------------------------------------------------------------------------------


class _Returned(Sentences):
    ROUNDED = (
        "The weights are in FP32, but have values of {dtype:format} alone in step {step}, where another training of this model "
        "begins: between its trainings they pass through that format. {equal:percent} of the {of:.0f} elements that were "
        "compared are as they were when the training before began: its changes were below half a unit in their last place."
    )
    CHANGES = "Send or store the weights in FP32. Or send their change in {dtype:format}, and add it to FP32 weights."
    SENT = "# start: what was received, in FP32\nchange = weight - start\nsent = change.to(torch.{dtype})"


def _returned_rounded(case: Case) -> Iterator[Found]:
    """FP32 weights that pass through 16 bits from one training of a model to the next, as a client's that exchanges weights.

    Checked under ``mpinspect run``, in a model that several optimizers train in turn.

    False alarms: The values are measured, of up to 256 elements of 64 weights. A model that is loaded from a checkpoint in 16
    bits for each training begins with the same weights, and is left out: some must have changed.
    """
    for returned in case.recorded(records.ReturnedWeights):
        if _MOSTLY_AS_BEFORE <= returned.equal < 1:
            words = {"dtype": returned.text}
            yield Found.of(case, [returned], _Returned.ROUNDED, _Returned.CHANGES, _Returned.SENT, words=words)
            return


class _Accumulation(Sentences):
    LOST = (
        "Gradients are added up over {micro_batches} micro-batches in {dtype:format}: of the last one's non-zero elements "
        "{lost_fraction:percent} are lost in .grad, {worst_lost_fraction:percent} in {worst!r}."
    )
    IN_FP32 = "Accumulate in FP32: keep the weights (and so their .grad) in FP32 and compute in 16 bits by autocast."


def _accumulation_lost(case: Case) -> Iterator[Found]:
    """Gradients of micro-batches that are lost when they are added to a 16-bit .grad.

    False alarms: A micro-batch whose gradient really is negligible compared with the others' is reported too.
    """
    found = [each for each in case.recorded(records.Accumulation) if each.nonzero > 0]
    if not found:
        return
    # Each record of a worst tensor also has the sums over all parameters of its step; older files lack them.
    of_all = {each.step: (each.all_lost, each.all_nonzero or 0.0) for each in found if each.all_lost is not None}
    sums = list(of_all.values()) or [(each.lost, each.nonzero) for each in found]
    worst = max(found, key=lambda each: each.lost / each.nonzero)
    share = worst.lost / worst.nonzero
    micro_batches = int(max(each.micro_batches for each in found))
    # A sum of equal terms stops growing after 2^bits additions. From half of that on, the losses of the additions add up.
    few = 2.0 ** (SIGNIFICAND_BITS.get(worst.text, 0) - 1)
    if share <= _LOST_TOLERANCE * min(1.0, few / max(micro_batches, 1)):
        return
    yield Found(
        _Accumulation.LOST,
        {
            "lost_fraction": sum(part for part, _ in sums) / sum(whole for _, whole in sums),
            "worst_lost_fraction": share,
            "micro_batches": micro_batches,
            "dtype": worst.text,
        },
        {"worst": worst.name},
        _Accumulation.IN_FP32,
        FP32Weights.of(worst.text),
        layer=worst.name,
        step=worst.step,
    )


FAULTS = (
    Fault("epsilon-zero", "warning", epsilon_zero, (_Epsilon, FP32Weights), ("non-finite-event",)),
    Fault(
        "moments-flushed",
        "warning",
        moments_flushed,
        (_Flushed, _Moments, Loaded),
        ("weights-exploded", "training-diverged", "non-finite-event"),
    ),
    Fault("masters-overwritten", "error", _masters_overwritten, (_Masters,)),
    Fault("masters-stale", "error", _masters_stale, (_Masters,)),
    Fault("weights-returned-rounded", "warning", _returned_rounded, (_Returned,)),
    Fault("updates-lost", "warning", _updates_lost, (_Updates, _Since, FP32Weights)),
    Fault("accumulation-lost", "warning", _accumulation_lost, (_Accumulation, FP32Weights)),
    Fault("moments-cannot-decay", "warning", moments_cannot_decay, (_Moments, _Since, FP32Weights)),
    Fault("weight-decay-lost", "warning", _weight_decay_lost, (_Decay, FP32Weights)),
)
