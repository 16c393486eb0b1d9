"""Faults by which parameters do not learn: no gradient, gradients that are all zero, no optimizer."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.precision import damped_by_epsilon, run_format
from mpinspect.ranges.analysis.ranges import NO_GRADIENT_SEEN
from mpinspect.ranges.analysis.visibility import always_zero
from mpinspect.ranges.faults.name.case import Case, grouped, quoted
from mpinspect.ranges.faults.name.fault import MOST_NAMES, Fault, Found
from mpinspect.ranges.faults.name.replaced import replaced
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.records import MissingGradients, NotOptimized
from mpinspect.ranges.session import FROZEN
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import as_power, by_number, filled, with_power

#: A loss scale that may be raised by this factor is to be raised before anything else is tried.
_MUCH_ROOM = 256.0


# -- no gradient --------------------------------------------------------------------------------------------------------


class _Missing(Sentences):
    ONE = "{names[0]!r} is in the optimizer but never got a gradient."
    MANY = "The {parameters} parameters of {modules} are in the optimizer but never got a gradient."
    NOT_CALLED = "The code that uses {it} did not run in the steps that were checked."
    WITHOUT_GRAPH = (
        "The forward that uses {it} built no graph. It ran under torch.no_grad(), or in a reentrant checkpoint whose inputs need "
        "no gradient."
    )
    NOT_REACHED = (
        "The loss does not reach {it}. A result is detached, converted to a number or computed under no_grad, or not "
        "used."
    )
    FROZEN_BY_PREFIX = (
        "{frozen_with_it}, while all other blocks are trained: it looks as if names that begin with {prefixes} were frozen, "
        "without the trailing dot."
    )
    CALL_WITH_GRADIENTS = "Call these modules with gradients enabled, and checkpoint without reentry."
    LOOK_FOR = (
        "Look for detach(), .data, .item(), argmax or torch.no_grad() in the code that uses these modules' outputs; freeze {it} "
        "if not meant to learn."
    )
    COMPARE_WITH_DOT = "Compare with the trailing dot: names that begin with {dotted}."
    NOT_REENTRANT = (
        "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)\n"
        '# in Transformers: model.gradient_checkpointing_enable({{"use_reentrant": False}})'
    )
    STARTS_WITH = "if name.startswith({literal}):\n    parameter.requires_grad_(False)"


def _gradients_missing(case: Case) -> Iterator[Found]:
    """Parameters in an optimizer that never got a gradient, and parameters that a name's prefix froze by mistake.

    False alarms: Modules that were not called (an expert without tokens, a head for a later phase) are reported as
    information. A frozen prefix is inferred from names alone.
    """
    never = {
        info.name
        for key, info in case.infos.items()
        if info.kind == WEIGHT_GRADIENT and (key not in case.totals or not case.totals[key].samples)
    }
    for measured in case.recorded(MissingGradients):
        names = [name for name in measured.names if name in never]
        if names:
            yield _without_gradient(measured, names)
    yield from _frozen_by_prefix(case)


def _without_gradient(measured: MissingGradients, names: Sequence[str]) -> Found:
    """Return the finding on parameters without gradients, by how their modules were called."""
    why: _Missing = _Missing.NOT_REACHED
    fix, code = _Missing.LOOK_FOR.when(not measured.not_called), None
    if measured.not_called:
        why = _Missing.NOT_CALLED
    elif measured.without_graph:
        why, fix, code = _Missing.WITHOUT_GRAPH, _Missing.CALL_WITH_GRADIENTS, _Missing.NOT_REENTRANT
    return Found(
        (by_number(len(names), _Missing.ONE, _Missing.MANY), why),
        {"parameters": len(names), "names": names[:MOST_NAMES], **measured.figures},
        {"modules": grouped(names), "it": by_number(len(names), "it", "them")},
        fix,
        code,
        layer=names[0],
        is_mild=bool(measured.not_called),
        is_inferred=True,
    )


def _frozen_by_prefix(case: Case) -> Iterator[Found]:
    """Yield a finding if blocks 1, 10, 11, ... are frozen and 2..9 are trained, as by a name's prefix without its final dot."""
    frozen: dict[str, Counter[str]] = defaultdict(Counter)
    trained: dict[str, Counter[str]] = defaultdict(Counter)
    for info in case.infos.values():
        match = re.search(r"\d+(?=\.)", info.name)
        if info.kind == WEIGHT_GRADIENT and match is not None:
            blocks = frozen if info.note.startswith(FROZEN) else trained
            blocks[info.name[: match.start()]][match.group()] += 1
    groups = {
        f"{place}{meant}": [f"{place}{number}" for number in caught]
        for place, numbers in frozen.items()
        for meant, caught in _prefixes(numbers, trained.get(place, Counter())).items()
    }
    if not groups:
        return
    parameters = {f"{place}{number}": count for place, numbers in frozen.items() for number, count in numbers.items()}
    caught_by = [
        f"{meant} is frozen, and with it {', '.join(caught)} ({sum(parameters[each] for each in caught)} parameters)"
        for meant, caught in groups.items()
    ]
    prefix, dotted = next(iter(groups)), [f"{meant}." for meant in groups]
    place = next(place for place in frozen if prefix.removeprefix(place).isdecimal() and prefix.startswith(place))
    literals = ", ".join(map(quoted, dotted))
    yield Found(
        _Missing.FROZEN_BY_PREFIX,
        {
            "frozen": sorted(frozen[place], key=int),
            "trained": sorted(trained[place].keys() - frozen[place].keys(), key=int),
            "groups": {meant: list(caught) for meant, caught in groups.items()},
        },
        {
            "frozen_with_it": "; ".join(caught_by),
            "prefixes": " or ".join(map(repr, groups)),
            "dotted": " or ".join(map(repr, dotted)),
            "literal": literals if len(dotted) == 1 else f"({literals})",
        },
        _Missing.COMPARE_WITH_DOT,
        _Missing.STARTS_WITH,
        layer=groups[prefix][0],
        is_inferred=True,
    )


def _prefixes(frozen: Collection[str], trained: Collection[str]) -> dict[str, list[str]]:
    """Return the numbers whose prefix explains all frozen blocks, each with those that it caught; empty without such a prefix."""
    meant = [number for number in frozen if not any(number.startswith(other) for other in frozen if other != number)]
    caught = {one: sorted((each for each in frozen if each.startswith(one) and each != one), key=int) for one in meant}
    others = set(trained) - set(frozen)
    spared = any(other.startswith(one) for other in others for one in meant)
    return caught if others and not spared and all(caught.values()) else {}


class _NeverFired(Sentences):
    ONE = (
        "{names[0]!r} needs a gradient and never got one in a sampled step, while other parameters did. No optimizer was seen, "
        "so whether they are meant to be trained is not known."
    )
    MANY = (
        "{count} parameters, such as {names[0]!r}, need a gradient and never got one in a sampled step, while other parameters "
        "did. No optimizer was seen, so whether they are meant to be trained is not known."
    )


def _never_fired(case: Case) -> Iterator[Found]:
    """Trainable parameters without any gradient, in a run that trained others and whose optimizer is unknown.

    The diagnosis "gradients-missing" reports those that a known optimizer holds. Modules that were not called and activations
    without gradients are no fault: coverage lists them.

    False alarms: It is information, since the parameters may be meant for a later phase.
    """
    is_trained = any(key.kind == WEIGHT_GRADIENT and window.samples for key, window in case.totals.items())
    never = case.coverage.never_fired
    names = [name for name, kind, why in never if (kind, why) == (WEIGHT_GRADIENT, NO_GRADIENT_SEEN)]
    if names and is_trained and not case.precision.optimizers:
        yield Found(
            by_number(len(names), _NeverFired.ONE, _NeverFired.MANY),
            {"names": names[:MOST_NAMES], "count": len(names)},
            layer=names[0],
        )


# -- gradients that are all zero ----------------------------------------------------------------------------------------


class _Zero(Sentences):
    REPLACED = (
        "Every weight gradient of {modules} was zero in all sampled steps, since infinities and NaNs were replaced: these "
        "weights do not learn."
    )
    ZERO = (
        "Every weight gradient of {modules} was zero in all sampled steps: these weights do not learn. FP16 flushes gradients "
        "up to {edge}{at_scale}; whether that made the zeros is not known."
    )
    RAISE = (
        "Raise the loss scale to {raised:scale}, where nothing seen overflows. If the zeros stay, take the gradients of one "
        "batch with autocast off."
    )
    TAKE_ONE_BATCH = "Take the gradients of one batch with autocast off."
    OWN_FACTOR = (
        "If they are not zero there, compute these modules in FP32, or multiply this part's loss by a factor "
        "of its own{limit}."
    )
    OWN_FACTOR_ONLY = (
        "If they are not zero there, multiply this part's loss by a factor of its own{limit}. Computing them in FP32 would not "
        "do: {damped}."
    )
    BEGIN_AT = "scaler = torch.amp.GradScaler(device_type, init_scale={raised:.0f})"
    AUTOCAST_OFF = "with torch.autocast(device_type, enabled=False):  # for this one batch\n    y = module(x.float())"


def _gradients_all_zero(case: Case) -> Iterator[Found]:
    """Modules whose weights get gradients in FP16 that are zero in every sampled step.

    False alarms: Gradients that are zero in FP32 too (an expert that no sample reached, a dead ReLU) are reported as well, since
    counts do not distinguish them from flushed ones. A module is reported only if all its weights get zeros, in at least three
    samples each.
    """
    if run_format(case.session) != FLOAT16:
        return
    zero, unseen = always_zero(case.totals), replaced(case)
    names = [name for name in zero if name not in unseen]
    if names:
        yield _all_zero(names, case)
    elif zero:
        yield Found(
            _Zero.REPLACED,
            {"parameters": len(zero), "names": zero[:MOST_NAMES]},
            {"modules": grouped(zero)},
            layer=zero[0],
            severity="info",
        )


def _all_zero(names: Sequence[str], case: Case) -> Found:
    scale, advice = case.session.last_scale, case.advised.advice
    recommended = advice.recommended
    has_room = bool(scale and recommended and recommended >= _MUCH_ROOM * scale)
    damped = damped_by_epsilon(case.session, 2.0**-25 / (scale or 1.0))
    limit = ""
    if advice.highest and not has_room:
        limit = f" rather than raise the loss scale for all: above {with_power(advice.highest)} the other layers may overflow"
    return Found(
        _Zero.ZERO,
        {"parameters": len(names), "names": names[:MOST_NAMES], "loss_scale": scale},
        {
            "modules": grouped(names),
            "edge": as_power(2.0**-25 / (scale or 1.0)),
            "at_scale": filled(" at the loss scale of {}", scale and with_power(scale)),
            "raised": recommended,
            "limit": limit,
            "damped": damped,
        },
        (_Zero.RAISE.when(has_room) or _Zero.TAKE_ONE_BATCH, _Zero.OWN_FACTOR_ONLY.when(damped) or _Zero.OWN_FACTOR),
        _Zero.BEGIN_AT.when(has_room) or _Zero.AUTOCAST_OFF,
        layer=names[0],
        is_inferred=True,
    )


# -- no optimizer -------------------------------------------------------------------------------------------------------


class _NotOptimized(Sentences):
    ONE = "{names[0]!r} gets gradients but is in no optimizer that was seen: it never changes."
    MANY = "The {parameters} parameters of {modules} get gradients but are in no optimizer that was seen: they never change."
    IDLE = (
        "The optimizer holds {idle:count tensor} outside of the model that never got a gradient: it was made before parameters "
        "were replaced."
    )
    MAKE_LAST = (
        "Make the optimizer after the last module was added, or add that module's parameters to it; freeze parameters that "
        "should not learn."
    )
    ADD_MODULE = 'optimizer.add_param_group({{"params": model.get_submodule({module}).parameters()}})'
    ADD_ALL = (
        'known = {{id(p) for group in optimizer.param_groups for p in group["params"]}}\n'
        'optimizer.add_param_group({{"params": [p for p in model.parameters() if id(p) not in known]}})'
    )


def _parameters_not_optimized(case: Case) -> Iterator[Found]:
    """Parameters that get gradients and that no optimizer steps.

    False alarms: Parameters that the script steps by hand are reported. If most of the model is left out the finding is
    only "info", since usually a head is trained on a backbone, unless the optimizer holds tensors that never get gradients.
    """
    for measured in case.recorded(NotOptimized):
        idle, share = int(measured.idle or 0), measured.fraction
        modules = {name.rpartition(".")[0] for name in measured.names}
        yield Found(
            (
                by_number(len(measured.names), _NotOptimized.ONE, _NotOptimized.MANY),
                _NotOptimized.IDLE.when(idle),
            ),
            {
                "parameters": len(measured.names),
                "fraction": share,
                "idle": idle,
                "names": list(measured.names[:MOST_NAMES]),
            },
            {"modules": grouped(measured.names), "module": quoted(min(modules, default=""))},
            _NotOptimized.MAKE_LAST,
            by_number(len(modules), _NotOptimized.ADD_MODULE, _NotOptimized.ADD_ALL),
            layer=measured.name,
            is_mild=share >= 0.5 and not idle,
        )


WITHOUT_GRADIENT = (
    Fault("gradients-missing", "warning", _gradients_missing, (_Missing,)),
    Fault("gradients-all-zero", "warning", _gradients_all_zero, (_Zero,)),
    Fault("parameters-not-optimized", "warning", _parameters_not_optimized, (_NotOptimized,)),
)
NEVER_FIRED = Fault("never-fired", "info", _never_fired, (_NeverFired,))
