"""Diagnoses of sums kept in 16 bits: weights, optimizer states, averages, accumulated gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.precision import SQUARES
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, Diagnosis, fp32_weights
from mpinspect.ranges.kinds import UPDATE, WEIGHT
from mpinspect.ranges.session import Event, LostUpdates, OptimizerRecord, TensorKey
from mpinspect.reporting.finding import INFERRED, MEASURED, Finding
from mpinspect.reporting.words import format_name, number_of, percent, some

#: The optimizer's setting that says which share of a state each step keeps, by the state's name.
_KEPT = {"exp_avg": "beta1", "exp_avg_sq": "beta2", "momentum_buffer": "momentum", "square_avg": "alpha"}
#: torch's default weight decay in AdamW, which many scripts have without having chosen it.
_DEFAULT_DECAY = 0.01
#: Optimizers that shrink the weights themselves; the others add the decay to the gradient.
_DECOUPLED = ("AdamW", "Lion", "NAdamW", "Muon", "Adafactor")

#: Share of lost updates or gradients above which a warning is given. For comparison: a digits classifier trained by SGD with
#: FP16 weights and no FP32 masters lost 87% of its updates, and its loss ended at 0.298 against 0.160.
_LOST_TOLERANCE = 0.1


def never_decays(dtype: str, kept: float) -> bool:
    """Return whether no number of a 16-bit dtype becomes smaller when it is multiplied by ``kept`` and rounded.

    An average v = beta v + (1 - beta) x is multiplied by beta and rounded before the new value is added. A factor of 1 - d
    returns the same number if d is below half the least relative step of the format, 2^-bits, which is the step of numbers
    just below a power of two.
    """
    bits = SIGNIFICAND_BITS.get(dtype)
    return bits is not None and 0 < 1 - kept < 2.0 ** -(bits + 1)


def updates_lost(case: Case) -> Iterator[Finding]:
    """Updates that rounding loses when they are added to weights stored in 16 bits; in FP32 runs, those that would be lost.

    An optimizer whose step draws random numbers is taken to round stochastically, which loses nothing on average; one that keeps
    what rounding cuts off in a state (Kahan's summation), as the state's values show, adds it later.

    False alarms: An optimizer that rounds stochastically with numbers of its own, and one that keeps what rounding cuts off in
    units of its own or for weights all of about the same magnitude, or whose updates have not added up to a weight's spacing yet
    (where the state's name says "kahan" or "compensation" it is known from the first step).
    """
    by_format: dict[str, dict[str, LostUpdates]] = {}
    # An update that is made of rounding noise is no loss.
    noise = {layer.name for layer in case.layers if layer.rounding_noise}
    for key, window in case.totals.items():
        for storage, counted in window.lost_updates.items() if key.kind == UPDATE else ():
            if counted.nonzero and key.name not in noise:
                by_format.setdefault(storage, {})[key.name] = counted
    for storage, found in by_format.items():
        steppers = [optimizer for optimizer in case.precision.optimizers if storage in optimizer.steps]
        if any(optimizer.draws_random or optimizer.compensation for optimizer in steppers):
            continue
        stored = {name: each for name, each in found.items() if _stored_in(storage, name, each, case)}
        is_fault = any(each.fraction > _LOST_TOLERANCE for each in stored.values())
        if not is_fault and not any(each.lost for each in found.values()):
            continue
        updates = stored if is_fault else found
        # Of equal ones that with the most updates.
        ordered = sorted(updates, key=lambda name: (updates[name].fraction, updates[name].nonzero), reverse=True)
        share = updates[ordered[0]].fraction
        lost, nonzero = (sum(getattr(part, field) for part in updates.values()) for field in ("lost", "nonzero"))
        has_autocast = any(case.precision.autocast)
        yield Finding(
            "updates-lost",
            "warning" if is_fault else "info",
            ordered[0],
            _updates_in_words(
                storage,
                lost / nonzero,
                [name for name in ordered if updates[name].fraction == share],
                updates,
                stored,
                case,
            ),
            {
                "format": storage,
                "lost_fraction": lost / nonzero,
                "worst_lost_fraction": share,
                "layers": len(updates),
                "measured": all(part.measured for part in updates.values()),
            },
            ""
            if not is_fault
            else "Keep all weights in FP32: autocast casts what a product needs."
            if has_autocast
            else "Keep the weights in FP32 and compute in 16 bits by autocast, or let the optimizer step FP32 master weights.",
            ""
            if not is_fault
            else "model.float()  # before the optimizer is made"
            if has_autocast
            else fp32_weights(storage),
        )


def _updates_in_words(
    storage: str,
    fraction: float,
    worst: list[str],
    updates: dict[str, LostUpdates],
    stored: Collection[str],
    case: Case,
) -> str:
    """Return which fraction of the updates, 0..1, is lost, and of which weights most."""
    name, share, progress = format_name(storage), percent(fraction), case.progress
    some_steps = 0 < progress.sampled_steps < progress.steps
    sampled = f" in the {number_of(progress.sampled_steps, 'sampled step')}" if some_steps else ""
    most = f"the updates{sampled}; {percent(updates[worst[0]].fraction)} of those of {some(worst, 3)}."
    if not stored:
        return f"If the weights were stored in {name}, rounding would lose {share} of {most}"
    if not set(case.precision.weights) > {storage}:
        return f"The weights are stored in {name}, and rounding loses {share} of {most}"
    if len(updates) == 1:
        return f"{worst[0]!r} is stored in {name}, and rounding loses {share} of its updates{sampled}."
    return f"{len(updates)} of the weights are stored in {name}, and rounding loses {share} of {most}"


def _stored_in(storage: str, name: str, lost: LostUpdates, case: Case) -> bool:
    """Return whether the parameter really is stored in this format (otherwise its lost updates are hypothetical)."""
    dtypes = {case.infos[key].dtype for kind in (UPDATE, WEIGHT) if (key := TensorKey(name, kind)) in case.infos}
    return lost.measured or storage in dtypes


def moments_cannot_decay(case: Case) -> Iterator[Finding]:
    """Moments kept in 16 bits whose decay is lost to rounding, as the settings alone show.

    An optimizer whose step draws random numbers is left out: it may round its states stochastically. Compensation of the weights
    does not help the moments.

    False alarms: The arithmetic gives none.
    """
    for optimizer in _rounding_to_nearest(case):
        for state, dtype in optimizer.states.items():
            kept = optimizer.settings.get(_KEPT.get(state, ""))
            if state == optimizer.compensation:
                continue
            if kept is None and dtype in SIGNIFICAND_BITS:
                yield _decay_unknown(optimizer.type, state, dtype)
            if kept is None or not never_decays(dtype, kept):
                continue
            name, limit = format_name(dtype), 2.0 ** -(SIGNIFICAND_BITS[dtype] + 1)
            yield Finding(
                "moments-cannot-decay",
                "warning",
                "",
                f"{optimizer.type} keeps {state} in {name} and multiplies it by {kept:g} a step, which {name} rounds back to "
                f"what it was (a decay below 2^-{SIGNIFICAND_BITS[dtype] + 1} = {limit:.2g} does nothing): it only grows, and "
                "the steps stay as small as the largest gradients made them.",
                {"optimizer": optimizer.type, "state": state, "dtype": dtype, "kept": kept, "least_decay": limit},
                f"Keep the weights that {optimizer.type} steps in FP32 and compute in 16 bits by autocast.",
                fp32_weights(dtype),
            )


def _rounding_to_nearest(case: Case) -> Iterator[OptimizerRecord]:
    """Yield the optimizers whose step draws no random numbers."""
    return (optimizer for optimizer in case.precision.optimizers if not optimizer.draws_random)


def _decay_unknown(optimizer: str, state: str, dtype: str) -> Finding:
    """Return the finding on a state in 16 bits of which the settings do not tell what share a step keeps."""
    name, bits = format_name(dtype), SIGNIFICAND_BITS[dtype] + 1
    return Finding(
        "moments-cannot-decay",
        "info",
        "",
        f"{optimizer} keeps {state} in {name}. If it is a moving average of which each step keeps more than 1 - 2^-{bits} "
        f"({1 - 2.0**-bits:.3g}), as Adam's second moment with a beta2 of 0.999, rounding lets it only "
        "grow; its decay is not known.",
        {"optimizer": optimizer, "state": state, "dtype": dtype},
        certainty=INFERRED,
    )


def weight_decay_lost(case: Case) -> Iterator[Finding]:
    """Decoupled weight decay of 16-bit weights whose factor rounds to 1, as the settings alone show.

    False alarms: The arithmetic gives none at the recorded learning rate, if the optimizer multiplies the weights themselves.
    Those that keep what rounding cuts off mostly do so too (optimi's AdamW, torchdistX's AnyPrecisionAdamW): the finding on them
    is inferred. It is only "info" if the decay is the optimizer's default, which few scripts have chosen.
    """
    for optimizer in _rounding_to_nearest(case):
        decay, rate = optimizer.settings.get("weight_decay", 0.0), optimizer.settings.get("lr", 0.0)
        dtype = max(optimizer.steps, key=lambda dtype: optimizer.steps[dtype], default="")
        if not decay * rate > 0 or optimizer.type not in _DECOUPLED or not never_decays(dtype, 1 - decay * rate):
            continue
        name = format_name(dtype)
        is_kept = bool(optimizer.compensation)
        but_not = f" (if {optimizer.compensation!r} keeps only the updates, as is usual)" if is_kept else ""
        yield Finding(
            "weight-decay-lost",
            "info" if decay <= _DEFAULT_DECAY else "warning",
            "",
            f"{optimizer.type} multiplies the {name} weights by 1 - lr * weight_decay = {1 - decay * rate:.12g} a step, and the "
            f"product rounds back to the weight: the weight decay of {decay:g} does nothing{but_not}.",
            {"optimizer": optimizer.type, "dtype": dtype, "lr": rate, "weight_decay": decay},
            "Keep the weights that the optimizer steps in FP32 and compute in 16 bits by autocast.",
            fp32_weights(dtype),
            INFERRED if is_kept else MEASURED,
        )


def epsilon_zero(case: Case) -> Iterator[Finding]:
    """An epsilon that is rounded to zero in the dtype of the denominator, which makes 0/0 possible.

    False alarms: Without a non-finite event it is only a warning: it harms only elements whose average of squared
    gradients is flushed as well.
    """
    for optimizer in case.precision.optimizers:
        epsilon = optimizer.settings.get("eps", 0.0)
        dtypes = {optimizer.states.get(state, "") for state in SQUARES} & set(SIGNIFICAND_BITS)
        for dtype in sorted(dtypes):
            edge = FORMATS[dtype].flush_edge
            if not 0 < epsilon <= edge:
                continue
            broke = [event for event in case.events if not event.skipped]
            name = format_name(dtype)
            yield Finding(
                "epsilon-zero",
                "error" if broke else "warning",
                "",
                f"{optimizer.type} adds eps = {epsilon:g} to a denominator in {name}, where it is zero (magnitudes up to "
                f"{edge:.2g} are flushed): where an element's average of squared gradients (in Adam at first "
                "1 - beta2 times the square) is flushed too, its step is divided by zero."
                + (_when_broken(broke[0]) if broke else ""),
                {"optimizer": optimizer.type, "dtype": dtype, "eps": epsilon, "flush_edge": edge},
                "Keep the weights and states in FP32. A larger eps (2^-14, say) avoids the division by zero too, but where the "
                "average is flushed it is all that the step is divided by.",
                fp32_weights(dtype),
                INFERRED if not broke else "measured",
                broke[0].step if broke else None,
            )


def _when_broken(event: Event) -> str:
    """Return a sentence on the first event after which steps were taken: a forward shows what the update before it did."""
    if event.phase != "forward" or event.given or not event.step:
        return f" In step {event.step} the run was no longer finite."
    return (
        f" The update of step {event.step - 1} made the weights infinite or NaN, as the forward of step {event.step} shows: "
        "start again, or go back to an earlier checkpoint."
    )


def average_lost(case: Case) -> Iterator[Finding]:
    """A 16-bit copy of the weights that is written and does not follow them.

    False alarms: An average that has caught up with its weights moves little, so only elements that differ from the weights
    count.
    """
    for found in case.measured("average"):
        share, name = found.figures["unmoved_fraction"], format_name(found.text)
        is_one = found.figures["tensors"] == 1
        copies, they, were = ("copy", "it", "was") if is_one else ("copies", "they", "were")
        yield Finding(
            "average-lost",
            "warning",
            found.name,
            f"The {name} {copies} of {some(list(found.names), 2)} {were} written in place, yet of the elements that differ "
            f"from the weights {percent(share)} never moved from step {found.step} on, since when {they} {were} watched: each "
            "update was below half a unit in the last place.",
            {"dtype": found.text, "copies_of": list(found.names), **found.figures},
            "Keep averages (EMA, SWA) of weights in FP32.",
            "averages = [p.detach().float().clone() for p in model.parameters()]\n"
            "# as a whole model: average = copy.deepcopy(model).float()",
        )


def accumulation_lost(case: Case) -> Iterator[Finding]:
    """Gradients of micro-batches that are lost when they are added to a 16-bit .grad.

    False alarms: A micro-batch whose gradient really is negligible beside the others' is reported likewise.
    """
    found = [each for each in case.measured("accumulation") if each.figures.get("nonzero", 0) > 0]
    if not found:
        return
    # The sums over all parameters of a step stand beside each of the worst; older files have the worst alone.
    of_all = {each.step: each.figures for each in found if "all_lost" in each.figures}.values()
    sums = [(each["all_lost"], each["all_nonzero"]) for each in of_all]
    sums = sums or [(each.figures["lost"], each.figures["nonzero"]) for each in found]
    lost = sum(part for part, _ in sums) / sum(whole for _, whole in sums)
    worst = max(found, key=lambda each: each.figures["lost"] / each.figures["nonzero"])
    share = worst.figures["lost"] / worst.figures["nonzero"]
    micro_batches, name = int(max(each.figures.get("micro_batches", 0) for each in found)), format_name(worst.text)
    # A sum of equal terms stops growing after 2^bits additions. From half of that on, the losses of the additions add up.
    few = 2.0 ** (SIGNIFICAND_BITS.get(worst.text, 0) - 1)
    if share <= _LOST_TOLERANCE * min(1.0, few / max(micro_batches, 1)):
        return
    yield Finding(
        "accumulation-lost",
        "warning",
        worst.name,
        f"Gradients are added up over {micro_batches} micro-batches in {name}: of the last one's non-zero elements "
        f"{percent(lost)} are lost in .grad, {percent(share)} in {worst.name!r}.",
        {"lost_fraction": lost, "worst_lost_fraction": share, "micro_batches": micro_batches, "dtype": worst.text},
        "Accumulate in FP32: keep the weights (and so their .grad) in FP32 and compute in 16 bits by autocast.",
        fp32_weights(worst.text),
        step=worst.step,
    )


DIAGNOSES: tuple[Diagnosis, ...] = (
    epsilon_zero,
    updates_lost,
    average_lost,
    accumulation_lost,
    moments_cannot_decay,
    weight_decay_lost,
)
