"""Faults by which parameters do not learn: no gradient, gradients that are all zero, no optimizer."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.precision import damped_by_epsilon, run_format
from mpinspect.ranges.analysis.ranges import NO_GRADIENT_SEEN
from mpinspect.ranges.analysis.visibility import always_zero
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, grouped, quoted
from mpinspect.ranges.faults.name.fault import MOST_NAMES, Fault, Found
from mpinspect.ranges.faults.name.replaced import replaced
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.records import MissingGradients, NotOptimized, Saturated
from mpinspect.ranges.session import FROZEN
from mpinspect.ranges.windows.tensors import TensorKey
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
        "torch.utils.checkpoint.checkpoint(\n"
        "    module, x, use_reentrant=False\n"
        ")\n"
        "# in Transformers:\n"
        "# model.gradient_checkpointing_enable(\n"
        '#     {{"use_reentrant": False}}\n'
        "# )"
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
    without gradients are not a fault: coverage lists them.

    False alarms: The severity is info, since the parameters may be meant for a later phase.
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
        "of its own."
    )
    OWN_FACTOR_ONLY = "If they are not zero there, multiply this part's loss by a factor of its own."
    LIMIT = "A loss scale above {highest} may make other layers overflow."
    DAMPED = "FP32 alone would not train them: {damped}."
    BEGIN_AT = "# {once}\nscaler = torch.amp.GradScaler(\n    {device_type}, init_scale={raised:.0f}\n)"
    AUTOCAST_OFF = "# for one batch\nwith torch.autocast({device_type}, enabled=False):\n    y = module(x.float())"


class _Silent(Sentences):
    MODEL = (
        "All gradients of the model's weights, {parameters:count tensor}, were exactly zero in all {steps:count sampled step}: "
        "the model does not learn."
    )
    FRONT = (
        "The weight gradients of {modules} were exactly zero in all {steps:count sampled step}: these weights do not learn, "
        "while later parameters do."
    )
    BRANCH = (
        "The weight gradients of {modules} were exactly zero in all {steps:count sampled step}. A branch that no sample reaches, "
        "or whose loss is multiplied by 0, has such gradients; so has a dead ReLU."
    )
    INSIDE = (
        "The weight gradients of {modules} were exactly zero in all {steps:count sampled step}: these weights do not learn, "
        "although gradients arrive at the output of {lost}."
    )
    LOST_IN = (
        "They become zero in the backward of {border!r}: the gradients that arrive at its output are not zero (largest magnitude "
        "{largest:.2g})."
    )
    ZERO_INPUT = "A product whose other operand is zero, such as the output of a dead ReLU, has such gradients."
    ARRIVE_AS_ZEROS = "The gradients that arrive at the output of {last!r} are zero already."
    SATURATED = (
        "In step {saturated_step} all {elements:,} results of a {function}{in_module} in {dtype:format} were exactly {at}, where "
        "its gradient is zero{rounds}."
    )
    LOGITS = "Give the loss the logits, and let a loss that contains the {function} compute it in FP32."
    FP32_ARGUMENT = "Compute the {function} in FP32, and keep its argument small."
    FOLLOW_BACK = (
        "Look in the code between {last!r} and the loss for a factor 0, a clamp or a saturated function, and a cast to a narrow "
        "format."
    )
    READ_OPERANDS = "Read the operands of that backward in one step: its casts, its scale, its saved input."
    BCE_WITH_LOGITS = (
        "# without the sigmoid\ncriterion = torch.nn.BCEWithLogitsLoss()\nloss = criterion(logits.float(), target)"
    )
    CROSS_ENTROPY = (
        "# without the softmax\ncriterion = torch.nn.CrossEntropyLoss()\nloss = criterion(logits.float(), target)"
    )
    TANH = "y = torch.tanh(x.float())"


#: Fewest sampled steps with zeros, beyond the steps that were skipped: weights that begin at zero (LoRA's B, a gate of a
#: residual) keep others from a gradient until their first update.
_FEWEST_STEPS = 5
#: The same of layers that lose the gradients at their own output, and the fewest such layers: the recurrent weight of a cell
#: that is called once, and a layer whose input is not in use, have such gradients.
_FEWEST_STEPS_INSIDE, _FEWEST_INSIDE = 8, 2
#: The values of a saturated function's results, its change and its code.
_SATURATED = {
    "sigmoid": ("0 or 1", _Silent.LOGITS, _Silent.BCE_WITH_LOGITS),
    "softmax": ("0 or 1", _Silent.LOGITS, _Silent.CROSS_ENTROPY),
    "tanh": ("1 or -1", _Silent.FP32_ARGUMENT, _Silent.TANH),
}


def _gradients_all_zero(case: Case) -> Iterator[Found]:
    """Modules whose weights get gradients that are exactly zero in every sampled step.

    In FP16 a module is reported if all its weights get zeros in at least three samples each. In other formats it takes at least
    five sampled steps; all weights of the model are an error, and its first layers (in the order of its parameters) up to one
    that gets gradients are a warning.

    False alarms: Gradients that are zero in FP32 too (an expert that no sample reached, a dead ReLU) are reported as well, since
    counts do not distinguish them from flushed ones; outside of FP16 as info, with the exceptions above.
    """
    if run_format(case.session) != FLOAT16:
        # A head that begins at zero leaves the layers before it without a gradient until the first update.
        if case.progress.weights_moved is not False:
            yield from _silent(case)
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
    limited = bool(advice.highest) and not has_room
    return Found(
        (_Zero.ZERO, _Zero.LIMIT.when(limited), _Zero.DAMPED.when(damped)),
        {"parameters": len(names), "names": names[:MOST_NAMES], "loss_scale": scale},
        {
            "modules": grouped(names),
            "edge": as_power(2.0**-25 / (scale or 1.0)),
            "at_scale": filled(" at the loss scale of {}", scale and with_power(scale)),
            "raised": recommended,
            "highest": advice.highest and with_power(advice.highest),
            "damped": damped,
        },
        (_Zero.RAISE.when(has_room) or _Zero.TAKE_ONE_BATCH, _Zero.OWN_FACTOR_ONLY.when(damped) or _Zero.OWN_FACTOR),
        _Zero.BEGIN_AT.when(has_room) or _Zero.AUTOCAST_OFF,
        layer=names[0],
        is_inferred=True,
    )


def _silent(case: Case) -> Iterator[Found]:
    """Yield a finding on the parameters with zeros as gradients: of the whole model, of its first layers, or of a branch."""
    trained = [
        key for key in case.infos if key.kind == WEIGHT_GRADIENT and key in case.totals and case.totals[key].samples
    ]
    least = _FEWEST_STEPS + case.progress.skipped_steps
    zero = [key.name for key in trained if _is_zero(key, case) and _sampled_steps(key.name, case) >= least]
    first = next((place for place, key in enumerate(trained) if key.name not in zero), len(trained))
    heard = {key.name.rpartition(".")[0] for key in trained if key.name not in zero}
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in zero))
    whole = [module for module in modules if module not in heard]
    if zero and len(zero) == len(trained):
        yield _silent_layers(_Silent.MODEL, zero, modules, case)
    elif first == len(zero) and len(modules) > 1 and any(_arrives_as_zeros(module, case) for module in whole):
        yield _silent_layers(_Silent.FRONT, zero, modules, case)
    elif len(lost := list(_inside(zero, case))) >= _FEWEST_INSIDE:
        silent = {*whole, *lost}
        names = [name for name in zero if name.rpartition(".")[0] in silent]
        yield _silent_layers(_Silent.INSIDE, names, lost, case)
    elif whole:
        names = [name for name in zero if name.rpartition(".")[0] in whole]
        figures = {"parameters": len(names), "names": names[:MOST_NAMES], "steps": _sampled_steps(names[0], case)}
        yield Found(_Silent.BRANCH, figures, {"modules": grouped(names)}, layer=names[0], severity="info")


def _inside(zero: Sequence[str], case: Case) -> Iterator[str]:
    """Yield the modules that get gradients at their output, or of their bias, and none of their weight."""
    least = _FEWEST_STEPS_INSIDE + case.progress.skipped_steps
    for name in zero:
        module, _, own = name.rpartition(".")
        bias = case.totals.get(TensorKey(f"{module}.bias", WEIGHT_GRADIENT))
        output = case.totals.get(TensorKey(module, ACTIVATION_GRADIENT))
        arrives = any(window is not None and window.histogram.nonzero for window in (bias, output))
        if own == "weight" and arrives and _sampled_steps(name, case) >= least:
            yield module


def _is_zero(key: TensorKey, case: Case) -> bool:
    """Return whether all elements of a tensor were zero in all samples; False for a tensor without elements."""
    histogram = case.totals[key].histogram if key in case.totals else None
    return histogram is not None and histogram.zeros > 0 and not histogram.nonzero and not histogram.nonfinite


def _arrives_as_zeros(module: str, case: Case) -> bool:
    return _is_zero(TensorKey(module, ACTIVATION_GRADIENT), case)


def _sampled_steps(name: str, case: Case) -> int:
    """Return the number of sampled steps of the windows that have a weight's gradient: a step may have several samples."""
    key = TensorKey(name, WEIGHT_GRADIENT)
    return sum(window.sampled_steps for window in case.session.windows if key in window.tensors)


def _silent_layers(says: _Silent, zero: Sequence[str], modules: Sequence[str], case: Case) -> Found:
    """Return the finding on layers without any gradient, with the place where the zeros arise as far as it is known."""
    at_output = {module: case.totals.get(TensorKey(module, ACTIVATION_GRADIENT)) for module in modules}
    borders = [module for module, window in at_output.items() if window is not None and window.histogram.nonzero]
    saturated = next((each for each in case.recorded(Saturated) if each.names[0] in _SATURATED), None)
    figures = {"parameters": len(zero), "names": zero[:MOST_NAMES], "steps": _sampled_steps(zero[0], case)}
    words: dict[str, object] = {"modules": grouped(zero), "last": modules[-1]}
    words["lost"] = grouped(f"{module}.weight" for module in modules)
    is_model = says is _Silent.MODEL
    # No layer of many stands for the whole model.
    layer = "" if is_model else zero[0]
    more: tuple[_Silent, ...] = (_Silent.ARRIVE_AS_ZEROS,)
    fix, code = _Silent.FOLLOW_BACK, None
    if says is _Silent.INSIDE:
        more, fix = (_Silent.ZERO_INPUT,), _Silent.READ_OPERANDS
    if borders:
        window = at_output[borders[-1]]
        largest = window.histogram.max_abs if window else 0.0
        more, fix = (_Silent.LOST_IN, _Silent.ZERO_INPUT), _Silent.READ_OPERANDS
        layer = layer or borders[-1]
        figures |= {"border": borders[-1], "largest": largest}
    elif saturated is not None and is_model:
        at, fix, code = _SATURATED[saturated.names[0]]
        more = (_Silent.SATURATED,)
        figures |= {"function": saturated.names[0], "elements": int(saturated.elements), "dtype": saturated.text}
        words |= {"saturated_step": saturated.step, "at": at, "rounds": _rounds(saturated)}
        layer, words["in_module"] = saturated.name, filled(" in {!r}", saturated.name)
    return Found((says, *more), figures, words, fix, code, layer=layer, is_grave=is_model, is_inferred=bool(borders))


def _rounds(saturated: Saturated) -> str:
    """Return a clause on the argument from which on a sigmoid in 16 bits rounds to 1; "" for other functions."""
    bits = SIGNIFICAND_BITS.get(saturated.text)
    if saturated.names[0] != "sigmoid" or bits is None:
        return ""
    # The numbers just below 1 are 2^-bits apart, so what is above 1 - 2^-(bits + 1) rounds to 1; sigmoid(x) is 1 - e^-x there.
    return f": a sigmoid rounds to 1 from an argument of about {(bits + 1) * math.log(2):.1f} on"


# -- no optimizer -------------------------------------------------------------------------------------------------------


class _NotOptimized(Sentences):
    ONE = "{names[0]!r} gets gradients but is in no optimizer that was seen: it never changes."
    MANY = "The {parameters} parameters of {modules} get gradients but are in no optimizer that was seen: they never change."
    IDLE = (
        "The optimizer holds {idle:count tensor} outside of the model that never got a gradient: it was made before parameters "
        "were replaced."
    )
    UNFROZEN = (
        "In the first step {unfrozen:.0f} of them needed no gradient: the optimizer seems to hold those that did."
    )
    ADD_GROUP = (
        "Add parameters to the optimizer when they are unfrozen, or give it all from the start: it leaves out those without a "
        "gradient."
    )
    ADDED = '# where they are unfrozen\noptimizer.add_param_group(\n    {{"params": list(unfrozen)}}\n)'
    MAKE_LAST = "Make the optimizer after the last module was added. Parameters that should not learn are to be frozen."
    MOVE = "# move below the last new module:\n# {at_optimizer}"


def _parameters_not_optimized(case: Case) -> Iterator[Found]:
    """Parameters that get gradients and that no optimizer steps.

    False alarms: Parameters that the script steps by hand are reported. If most of the model is left out the finding is
    only "info", since usually a head is trained on a backbone, unless the optimizer holds tensors that never get gradients, or
    parameters were unfrozen during the run.
    """
    for measured in case.recorded(NotOptimized):
        idle, share = int(measured.idle), measured.fraction
        unfrozen = int(measured.unfrozen)
        fix, code = _NotOptimized.MAKE_LAST, _NotOptimized.MOVE
        if unfrozen:
            fix, code = _NotOptimized.ADD_GROUP, _NotOptimized.ADDED
        yield Found(
            (
                by_number(len(measured.names), _NotOptimized.ONE, _NotOptimized.MANY),
                _NotOptimized.IDLE.when(idle),
                _NotOptimized.UNFROZEN.when(unfrozen),
            ),
            {
                "parameters": len(measured.names),
                "fraction": share,
                "idle": idle,
                "unfrozen": unfrozen,
                "names": list(measured.names[:MOST_NAMES]),
            },
            {"modules": grouped(measured.names)},
            fix,
            code,
            layer=measured.name,
            is_mild=share >= 0.5 and not idle and not unfrozen,
        )


WITHOUT_GRADIENT = (
    Fault("gradients-missing", "warning", _gradients_missing, (_Missing,)),
    Fault(
        "gradients-all-zero",
        "warning",
        _gradients_all_zero,
        (_Zero, _Silent),
        ("result-is-rounding-error",),
        is_of_every_step=True,
    ),
    Fault("parameters-not-optimized", "warning", _parameters_not_optimized, (_NotOptimized,)),
)
NEVER_FIRED = Fault("never-fired", "info", _never_fired, (_NeverFired,))
