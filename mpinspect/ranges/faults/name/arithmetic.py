"""Faults of statistics, normalisations, positions and scores that are computed or kept in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, quoted
from mpinspect.ranges.faults.name.fault import TWICE, Fault, Found
from mpinspect.ranges.faults.name.operators import MATTERS, found_at
from mpinspect.ranges.records import Positions, ReadNumber, Statistics, Ties
from mpinspect.ranges.session import MOST_ROWS, Event, module_named
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import bracketed, by_number, filled

#: The fewest terms of a sum in 16 bits that the loop reads.
_FEWEST_TERMS = 8
#: A relative difference that a loop is to see.
_SEEN = 2.0**-11

# -- statistics ---------------------------------------------------------------------------------------------------------


class _Running(Sentences):
    NOT_FINITE = (
        "{buffers} of {module} ({dtype:format}) {have} not been finite since step {step}: training uses the batch's own "
        "statistics and continues, but evaluation uses the running statistics."
    )
    GIVES_NAN = "Evaluation gives NaN."
    GIVES_A_CONSTANT = (
        "There a channel with an infinite variance gives one output for all inputs, one with NaN gives NaN."
    )
    WRITTEN = "A forward that was not finite wrote {them}; skipping its step does not undo that."
    STUCK = (
        "{names:some} {were} written {writes:.0f} times and never moved: {dtype:format} rounds the updates away, or they are "
        "zero."
    )

    KEEP_IN_FP32 = "Keep normalisations and their statistics in FP32{why_fp32}."
    FIND_LARGE_VALUES = "Find the cause of the values that are too large, infinite or NaN."
    REPAIR_BATCH = "Repair the batch, which was not finite in step {origin_step}{why}."
    REPAIR_FORWARD = "Repair the forward of {origin}, which was not finite in step {origin_step}{why}."
    BEYOND_FP16 = (
        "It computes in FP16, where magnitudes beyond 65504 are infinite: compute it in FP32, and the modules after it until "
        "values are below that again."
    )
    COMPUTE_AGAIN = (
        "Then reset the running statistics; before the model is evaluated, run training batches through it in train(), which "
        "computes them again."
    )
    KEEP_ALL_IN_FP32 = "Keep the statistics of all normalisations in FP32, or take a larger momentum."
    NORM = "norm = model.get_submodule({path})"
    TO_FP32 = "norm.float()"
    RESET = "norm.reset_running_stats()\n# then train on, or run batches in train()"
    ALL_TO_FP32 = "for name in [{paths}]:\n    model.get_submodule(name).float()"


def _statistics_broken(case: Case) -> Iterator[Found]:
    """Running statistics that are not finite, or that never move.

    False alarms: Statistics that are frozen on purpose are not written, and so are not reported. A mean of zeros stays
    zero, and is reported.
    """
    found = list(case.recorded(Statistics))
    broken = [each for each in found if not each.is_stuck]
    stuck = [each for each in found if each.is_stuck]
    if broken:
        yield _not_finite(broken, case)
    if stuck:
        yield _stuck(stuck)


def _not_finite(broken: Sequence[Statistics], case: Case) -> Found:
    first = broken[0]
    module, dtype = first.name.rpartition(".")[0], first.dtype
    places = [each.name.rpartition(".") for each in broken if each.step == first.step]
    buffers = [buffer for path, _, buffer in places if path == module]
    origin = next((event for event in case.events if event.step <= first.step and event.phase == "forward"), None)
    # Division by an infinite variance gives zero, and leaves the layer's bias.
    is_of_mean, number = "running_mean" in buffers, len(buffers)
    return Found(
        (
            _Running.NOT_FINITE,
            _Running.GIVES_NAN.when(is_of_mean) or _Running.GIVES_A_CONSTANT,
            _Running.WRITTEN.when(origin),
        ),
        {"buffers": [each.name for each in broken]},
        {
            "module": module_named(module),
            "dtype": dtype,
            "path": quoted(module),
            "origin": origin and module_named(origin.module),
            "origin_step": origin and origin.step,
            "why": origin and bracketed(origin.explanation),
            "why_fp32": " (a variance exceeds 65504 long before the values do)" * (dtype == FLOAT16.name),
            "buffers": " and ".join(buffers),
            "have": by_number(number, "has", "have"),
            "them": by_number(number, "it", "them"),
        },
        (_repair(dtype, origin), _Running.BEYOND_FP16.when(_is_beyond_fp16(origin)), _Running.COMPUTE_AGAIN),
        (_Running.NORM, _Running.TO_FP32.when(dtype != "float32"), _Running.RESET),
        layer=module,
        is_grave=True,
        step=first.step,
    )


def _is_beyond_fp16(origin: Event | None) -> bool:
    """Return whether finite values became infinite in FP16."""
    return origin is not None and not origin.given and (origin.value, origin.dtype) == ("inf", FLOAT16.name)


def _repair(dtype: str, origin: Event | None) -> _Running:
    if dtype != "float32":
        return _Running.KEEP_IN_FP32
    if origin is None:
        return _Running.FIND_LARGE_VALUES
    return _Running.REPAIR_BATCH.when(origin.given) or _Running.REPAIR_FORWARD


def _stuck(stuck: Sequence[Statistics]) -> Found:
    names = list(dict.fromkeys(each.name for each in stuck))
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return Found(
        _Running.STUCK,
        {"buffers": names},
        {
            "names": names,
            "were": by_number(len(names), "was", "were"),
            "writes": stuck[0].writes,
            "dtype": stuck[0].dtype,
            "paths": ", ".join(map(quoted, modules[:MOST_ROWS])),
        },
        _Running.KEEP_ALL_IN_FP32,
        _Running.ALL_TO_FP32,
        layer=modules[0],
    )


# -- whole numbers ------------------------------------------------------------------------------------------------------


class _Whole(Sentences):
    COLLAPSED = (
        "In {place} {which} are in {dtype:format}, which keeps {after:.0f} of these {before:.0f} distinct: neighbours become "
        "one position, timestep or index{before_use}."
    )
    STORED = (
        "In {place} {which} are all numbers of {dtype:format}, which keeps {after:.0f} of these {before:.0f} distinct: they were "
        "stored in it, where neighbours became one number{before_use}."
    )
    STORE_WHOLE = "Store these numbers as integers or in FP32, and make the narrow ones of the others alone."
    WHOLE_COLUMN = "# a column of its own\nminutes = minutes.astype(np.int64)"
    ANGLES = "Compute positions, and everything derived from them, in FP32; cast only the cosines and sines."
    CAST_ANGLES = (
        "Pass positions as integers, and compute everything derived from them in FP32. Cast only the cosines and sines. A cast "
        "of the model or of a batch to 16 bits leaves integers as they are."
    )
    SUMS = "Add up in integers."
    INDICES = "Keep positions, indices and counts as integers, or in FP32."
    WIDE_ANGLES = (
        "positions = torch.arange(\n"
        "    n, dtype=torch.float32, device=x.device\n"
        ")\n"
        "inv_freq = inv_freq.float()\n"
        "angles = positions[:, None] * inv_freq\n"
        "cos = angles.cos().to(dtype)\n"
        "sin = angles.sin().to(dtype)"
    )
    INTEGER_ANGLES = (
        "# in the data\n"
        "positions = positions.long()\n"
        "# in the model\n"
        "positions = positions.float()\n"
        "angles = positions * inv_freq.float()\n"
        "cos = angles.cos().to(dtype)\n"
        "sin = angles.sin().to(dtype)"
    )
    INTEGER_SUMS = "slots = torch.cumsum(mask.long(), dim=0) - 1"
    INTEGER_INDICES = "# not in the dtype of x\nindices = torch.arange(n, device=x.device)"


def _positions_collapse(case: Case) -> Iterator[Found]:
    """Positions, or other whole numbers, that become equal to their neighbours in 16 bits.

    False alarms: The collapse is measured if a cast, an arange or a cumsum makes distinct whole numbers equal, and these are then
    subtracted from each other, compared, cast to integers or used in a sine. Whole targets that a loss ranks look the same.
    Divisors that are counts, and targets of a regression, are not reported. The finding is inferred for whole numbers made before
    the step and above the format's exact ones (256 in BF16, 2,048 in FP16): they may have been representable. Whole numbers in
    FP32 are taken for stored ones if at least 16 are above these, all of them numbers of the format, and 16 closer ones below.
    """
    found = sorted(case.recorded(Positions), key=lambda each: (not each.is_table, not each.name))
    for measured in found[:1]:
        operator, used, line = (*measured.names, "", "", "")[:3]
        fix, code = _Whole.INDICES, _Whole.INTEGER_INDICES
        if operator == "cumsum":
            fix, code = _Whole.SUMS, _Whole.INTEGER_SUMS
        elif used in ("", "get a sine or cosine"):
            is_cast = operator == "cast"
            fix = _Whole.CAST_ANGLES.when(is_cast) or _Whole.ANGLES
            code = _Whole.INTEGER_ANGLES.when(is_cast) or _Whole.WIDE_ANGLES
        says = _Whole.COLLAPSED
        if measured.stored:
            says, fix, code = _Whole.STORED, _Whole.STORE_WHOLE, _Whole.WHOLE_COLUMN
        # Numbers that the script has stored were lost before the first step.
        step = None if measured.stored else measured.step
        words = {
            "place": module_named(measured.name) + bracketed(line) if measured.name or not line else line,
            "which": _whole_numbers(measured, operator),
            "dtype": measured.text,
            "before_use": filled(" before they {}", used),
        }
        more = {
            "layer": measured.name,
            "is_inferred": not measured.is_table,
            "before": [line] * bool(line),
            "step": step,
        }
        evidence = {"dtype": measured.text, "line": line}
        yield Found.of(case, [measured], says, fix, code, words=words, evidence=evidence, **more)


def _whole_numbers(measured: Positions, operator: str) -> str:
    """Return in words the whole numbers that were rounded; of a table only the least possible value is known."""
    up_to = filled("whole numbers up to {:.0f}", measured.largest)
    if operator == "cumsum":
        return f"the sums of a cumsum, {up_to},"
    return up_to or f"{measured.before:.0f} consecutive whole numbers, {measured.least:.0f} or larger,"


# -- scores -------------------------------------------------------------------------------------------------------------


class _Tied(Sentences):
    TIED = (
        "The top {k:.0f} of the {scores:.0f} scores of {module} are chosen in {dtype:format}: in {fraction:percent} of the rows "
        "the last one chosen ties with one that is left out, and the choice between them is arbitrary."
    )
    IN_FP32 = "Compute the router's scores in FP32."
    WIDE = "with torch.autocast({device_type}, enabled=False):\n    scores = router(x.float()).softmax(-1)"


def _router_ties(case: Case) -> Iterator[Found]:
    """Scores that are equal in 16 bits at the edge of a top k, although the exact scores differ.

    False alarms: The ties are measured, and reported from one row in a hundred on, as an info below a tenth. Ties that the exact
    scores have too, and ties at zero, do not count.
    """
    for measured in case.recorded(Ties):
        words = {"module": module_named(measured.name), "dtype": measured.text}
        is_mild, fix = measured.fraction < MATTERS, _Tied.IN_FP32
        yield Found.of(case, [measured], _Tied.TIED, fix, _Tied.WIDE, words=words, layer=measured.name, is_mild=is_mild)
        return


# -- numbers that the loop reads ----------------------------------------------------------------------------------------


class _Metric(Sentences):
    STANDS_STILL = (
        "In steps {step} and {later.step} the loop reads the same number, {value:.6g} ({line}). In FP32 it is {exact:.6g} and "
        "{later.exact:.6g}: it is made of a sum of {terms:.0f} terms in {dtype:format}{at_line}, whose neighbours lie up to "
        "{apart:percent} apart. A schedule, an early stop or a choice of the best checkpoint that compares this number does not "
        "see the difference."
    )
    IN_FP32 = "Add up in FP32 or in Python, from FP32 values."
    TOTAL = "total += error.float().item()"


def _metric_stands_still(case: Case) -> Iterator[Found]:
    """A number that the loop reads, such as a validation's mean loss, and that is the same in two steps as its sum has 16 bits.

    False alarms: Both numbers are measured. A loop that only prints them is not harmed.
    """
    read = [each for each in case.recorded(ReadNumber) if each.terms >= _FEWEST_TERMS and each.exact is not None]
    for one, later in pairwise(read):
        is_same = one.names[1] == later.names[1] and one.value == later.value
        if is_same and abs(later.exact - one.exact) > _SEEN * abs(one.exact):  # type: ignore[operator, arg-type]
            words = {"later": later, "at_line": bracketed(one.names[3])}
            words |= {"apart": 2.0 ** (1 - SIGNIFICAND_BITS[one.text])}
            yield found_at(one, _Metric.STANDS_STILL, _Metric.IN_FP32, _Metric.TOTAL, words, before=[one.names[3]])
            return


class _Read(Sentences):
    OFF = (
        "In step {step} the script reads {value:.6g} ({line}) in {dtype:format}. In FP32, from the same choices, it is "
        "{exact:.6g}: rounding puts it off by {off:percent}."
    )
    RANKS = "Numbers that are compared with it, such as the scores of a beam search, are off as well: near ones tie."
    ADD_IN_FP32 = "Keep what is added up over many steps in FP32: cast the sum, and leave its terms in 16 bits."
    SUM = "# what is added up, at its start\nscores = scores.float()"


def _read_number_off(case: Case) -> Iterator[Found]:
    """A number that a script without a training reads, such as the score of a search, and that rounding puts off by 10% or more.

    Only numbers beyond 256 in BF16, or 2,048 in FP16, count: there neighbours lie 2 apart or more.

    False alarms: Both numbers are measured.
    """
    if not case.session.info.inference:
        return
    for read in case.recorded(ReadNumber):
        if read.value is None or not read.exact:
            continue
        off = abs(read.value - read.exact) / abs(read.exact)
        if math.isfinite(off) and off >= MATTERS and abs(read.value) >= 2.0 ** SIGNIFICAND_BITS[read.text]:
            yield found_at(read, (_Read.OFF, _Read.RANKS), _Read.ADD_IN_FP32, _Read.SUM, {"off": off})
            return


FAULTS = (
    Fault("statistics-broken", "warning", _statistics_broken, (_Running,)),
    Fault(
        "positions-collapse",
        "warning",
        _positions_collapse,
        (_Whole,),
        ("result-is-rounding-error", "choices-differ"),
        "warning",
        checked=TWICE,
    ),
    Fault("router-ties", "warning", _router_ties, (_Tied,), checked=TWICE),
    Fault("metric-stands-still", "warning", _metric_stands_still, (_Metric,), checked=TWICE),
    Fault(
        "read-number-off",
        "warning",
        _read_number_off,
        (_Read,),
        checked=TWICE,
        heading="Number that the script reads is off",
    ),
)
