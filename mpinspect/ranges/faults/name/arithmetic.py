"""Diagnoses of losses, statistics, normalisations, positions and scores that are computed or kept in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mpinspect.numeric.formats import FLOAT16, FORMATS
from mpinspect.ranges.faults.name.case import SIGNIFICAND_BITS, Case, Diagnosis, quoted
from mpinspect.ranges.session import MOST_ROWS, Measurement, module_named
from mpinspect.reporting.finding import INFERRED, MEASURED, Finding
from mpinspect.reporting.words import format_name, percent, some

#: Statistics that were reset are those of no data.
_ANEW = "; before the model is evaluated, run training batches through it in train(), which makes them anew"


def statistics_broken(case: Case) -> Iterator[Finding]:
    """Running statistics that are not finite, or that never move.

    False alarms: Statistics that are frozen on purpose are not written, and so are not reported. A mean of zeros stays
    zero, and is reported.
    """
    found = list(case.measured("statistics"))
    broken = [each for each in found if each.text.startswith("not finite")]
    stuck = [each for each in found if each.text.startswith("stuck")]
    if broken:
        first = broken[0]
        module, kind = first.name.rpartition(".")[0], format_name(first.text.rpartition(" ")[2])
        places = [each.name.rpartition(".") for each in broken if each.step == first.step]
        buffers = [buffer for where, _, buffer in places if where == module]
        has, it = ("has", "it") if len(buffers) == 1 else ("have", "them")
        # Where only the variance is infinite, what is divided by it is zero, and the layer's bias is left.
        gives = (
            " and gives NaN"
            if "running_mean" in buffers
            else ": a channel whose variance is infinite gives the same output for every input, one with NaN gives NaN"
        )
        is_wide = first.text.endswith("float32")
        early = f" (a variance exceeds {FLOAT16.max_finite:g} long before the values do)" if kind == "FP16" else ""
        begun = next((event for event in case.events if event.step <= first.step and event.phase == "forward"), None)
        mend = "Look at what makes the values too large, infinite or NaN"
        if begun is not None:
            what = "the batch" if begun.given else f"the forward of {module_named(begun.module)}"
            why = f" ({begun.explanation})" if begun.explanation else ""
            mend = f"Mend {what}, which was not finite in step {begun.step}{why}"
        yield Finding(
            "statistics-broken",
            "error",
            module,
            f"{' and '.join(buffers)} of {module_named(module)} ({kind}) {has} not been finite since step {first.step}: "
            "training uses the batch's own statistics and goes on, but evaluation uses the running statistics"
            f"{gives}."
            + (f" A forward that was not finite wrote {it}; skipping its step does not undo that." if begun else ""),
            {"buffers": [each.name for each in broken]},
            f"{mend}, and reset the running statistics{_ANEW}."
            if is_wide
            else f"Keep normalisations and their statistics in FP32{early}, and reset the running statistics{_ANEW}.",
            ("" if is_wide else f"model.get_submodule({quoted(module)}).float()\n")
            + f"model.get_submodule({quoted(module)}).reset_running_stats()  # then train on, or run batches in train()",
            step=first.step,
        )
    if stuck:
        first, names = stuck[0], list(dict.fromkeys(each.name for each in stuck))
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        was, its = ("was", "its") if len(names) == 1 else ("were", "their")
        yield Finding(
            "statistics-broken",
            "warning",
            modules[0],
            f"{some(names)} {was} written {first.figures['writes']:.0f} times and never moved: "
            f"{format_name(first.text.rpartition(' ')[2])} rounds {its} updates away, or they are zero.",
            {"buffers": names},
            "Keep the statistics of all normalisations in FP32, or take a larger momentum.",
            f"for name in [{', '.join(map(quoted, modules[:MOST_ROWS]))}]:\n    model.get_submodule(name).float()",
        )


def loss_in_16_bits(case: Case) -> Iterator[Finding]:
    """A loss computed in 16 bits: it may overflow, and the rest of a sum whose terms cancel is rounding error.

    A term of a loss is told likewise: a mean or sum in 16 bits that the loss adds to others, or a difference of 16-bit
    log-probabilities.

    False alarms: The warning is given if the loss has operators whose results may cancel (differences, products, KL),
    whether or not they do in this run. In a term of it a product with a constant is no such operator.
    """
    terms = sorted(case.measured("loss-term"), key=lambda each: not each.figures["cancels"])
    whole = [
        each for each in case.measured("loss") if not (terms and terms[0].figures["cancels"] and _is_rounded_once(each))
    ]
    for found in terms[:1] if not whole else ():
        yield _narrow_term(found, case)
    for found in whole:
        value, name, bits = found.figures["value"], format_name(found.text), SIGNIFICAND_BITS[found.text]
        overflowed = bool(found.figures["is_known"]) and not math.isfinite(value)
        # A cross-entropy is rounded once, after a log-softmax; a sum of products or differences is rounded at each term.
        broke = any(event.step == found.step and event.gradients_finite is False for event in case.events)
        cancels = overflowed or not _is_rounded_once(found)
        weighs = any(operator in ("Mul", "KlDiv") for operator in found.names)
        yield Finding(
            "loss-in-16-bits",
            "error" if overflowed else "warning" if cancels else "info",
            "",
            f"The loss is computed in {name}"
            + (
                f", and in step {found.step}, which was examined, it is {value:g}: a square or a sum inside it exceeds "
                f"{FORMATS[found.text].max_finite:g}" + ("." if broke else "; the gradients are finite all the same.")
                if overflowed
                else f" (autograd's {' of '.join(found.names[:4]).lower()}): each of its terms is rounded to {bits} bits "
                f"(a relative 2^-{bits}), so that where they nearly cancel only rounding error is left."
                if cancels
                else f": its value and first gradient have {bits} bits."
            )
            + _on_a_cpu_only(found, case),
            {
                "value": value if found.figures["is_known"] else None,
                "dtype": found.text,
                "operators": list(found.names),
            },
            "Compute the loss in FP32: cast the model's output to FP32 before the loss"
            f"{'; if the target is a softmax, cast its logits first, too' if weighs else ''}."
            if overflowed or cancels
            else "",
            f"output = model(x).float(){_AND_TARGET if weighs else ''}\nloss = loss_fn(output, target)"
            if overflowed or cancels
            else "",
            step=found.step,
        )
        return


def _is_rounded_once(loss: Measurement) -> bool:
    """Return whether a loss did not overflow, and no operators of it may cancel: a cross-entropy, say."""
    if loss.figures["is_known"] and not math.isfinite(loss.figures["value"]):
        return False
    return "NllLoss" in loss.names or not any(operator in _CANCELLING for operator in loss.names)


def _on_a_cpu_only(found: Measurement, case: Case) -> str:
    """Return a sentence on a loss that CUDA's autocast, unlike a CPU's, would compute in FP32; else ""."""
    if not any(case.precision.autocast) or not found.figures.get("is_wide_on_cuda"):
        return ""
    return " Within autocast this is so on a CPU only: CUDA's autocast computes it in FP32."


def _narrow_term(found: Measurement, case: Case) -> Finding:
    """Return the finding of a term of the loss that is computed in 16 bits."""
    name, bits, cancels = format_name(found.text), SIGNIFICAND_BITS[found.text], bool(found.figures["cancels"])
    return Finding(
        "loss-in-16-bits",
        "warning" if cancels else "info",
        "",
        f"A term of the loss is computed in {name} (autograd's {' of '.join(found.names[:4]).lower()}): "
        + (
            f"each of its own terms is rounded to {bits} bits (a relative 2^-{bits}), so that where they nearly cancel only "
            "rounding error is left, whatever the dtype of the loss that it is added to."
            if cancels
            else f"its value and first gradient have {bits} bits."
        )
        + _on_a_cpu_only(found, case),
        {"dtype": found.text, "operators": list(found.names)},
        "Compute every term of the loss in FP32: cast the logits, and a reference's, before the log-softmax, and keep the "
        "log-probabilities, and sums of them, in FP32."
        if cancels
        else "",
        "log_p = model(x).float().log_softmax(-1)\nlog_q = reference(x).float().log_softmax(-1)" if cancels else "",
        step=found.step,
    )


_AND_TARGET = "  # and the logits of a target that is a softmax"
#: Operators, as autograd names them, whose results may cancel in a sum.
_CANCELLING = ("Sub", "Rsub", "Mul", "Pow", "MseLoss", "KlDiv", "Add")


def norm_overflows(case: Case) -> Iterator[Finding]:
    """A normalisation by hand in FP16 whose squares, or their sum, overflow, so that what it normalises becomes zero.

    It is looked for in the code of the model's own modules, in the first four steps and ever fewer later ones. What needs no
    gradient, an activation checkpoint and a compiled region leave no graph to look in.

    False alarms: It is measured: the root's argument is infinite, and the loss is finite. Rows that nothing uses, such as
    padding, count as well.
    """
    found = list(case.measured("overflowed-norm"))
    for first in found[:1]:
        figures, others = first.figures, [each.name for each in found[1:]]
        elements, of = int(figures["elements"]), int(figures["of"])
        if elements == of:
            zeroed = "everything that is divided by that root became zero"
        elif figures["is_by_row"]:
            zeroed = f"in {elements} of {of} rows what is divided by that root became zero"
        else:
            zeroed = f"what is divided by {elements} of that root's {of} elements became zero"
        likewise = f" The same was found in {' and in '.join(map(module_named, others))}." if others else ""
        yield Finding(
            "norm-overflows",
            "error",
            first.name,
            f"In {module_named(first.name)}, first in step {first.step}, a square or a sum under a root exceeded 65504 in FP16 "
            f"and became infinite: {zeroed}, and stays finite, so that no infinity or NaN shows it.{likewise}",
            {
                "elements": elements,
                "of": of,
                "operator": first.text.rpartition(" ")[2],
                "modules": [each.name for each in found],
            },
            "Compute the normalisation in FP32 and cast its result back: in FP16 the square of a value of 256 or more is "
            "infinite.",
            "wide = x.float()  # before it is squared\n"
            "x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)",
            step=first.step,
        )


def positions_collapse(case: Case) -> Iterator[Finding]:
    """Positions, or other whole numbers, that become equal to their neighbours in 16 bits.

    False alarms: It is measured if a table has equal neighbours where consecutive whole numbers in the format have them: in
    groups one less and one more than a power of two. Indices that a script rounds on purpose, half to even, look alike. It is
    measured, too, if a table holds the sines or cosines of the rounded whole numbers that a module was given, and, in one step
    under ``mpinspect run``, if a cast, an arange or a cumsum makes distinct whole numbers equal that are then subtracted from
    each other, compared, made integers again or given a sine: whole targets that a loss ranks look like that. Counts that
    something is divided by, and targets of a regression, are not reported. It is inferred if a module's input holds one whole
    number per row and the largest exceeds 264 (BF16; 2056 in FP16): it may be a count that is meant to be rounded.
    """
    for found in sorted(case.measured("positions"), key=lambda each: not each.figures["is_table"]):
        figures = found.figures
        operator, used = found.names or ("", "")
        which = f"whole numbers up to {figures['largest']:.0f}" if "largest" in figures else ""
        if operator == "cumsum":
            which = f"the sums of a cumsum, {which},"
            fix, code = _FIX_OF_SUMS
        else:
            fix, code = _FIX_OF_ANGLES if used in ("", "get a sine or cosine") else _FIX_OF_INDICES
        yield Finding(
            "positions-collapse",
            "warning",
            found.name,
            f"In {module_named(found.name)} {which or _whole_numbers_from(figures)} are in "
            f"{format_name(found.text)}, which keeps {figures['after']:.0f} of these {figures['before']:.0f} distinct: "
            f"neighbours become one position, timestep or index{' before they ' + used if used else ''}.",
            {**figures, "dtype": found.text},
            fix,
            code,
            certainty=MEASURED if figures["is_table"] else INFERRED,
            step=found.step,
        )
        return


_FIX_OF_ANGLES = (
    "Compute positions, and everything derived from them, in FP32; cast only the cosines and sines.",
    "angles = positions.float()[:, None] * inv_freq.float()\ncos, sin = angles.cos().to(dtype), angles.sin().to(dtype)",
)
_FIX_OF_SUMS = ("Add up in integers.", "slots = torch.cumsum(mask.long(), dim=0) - 1")
_FIX_OF_INDICES = (
    "Keep positions, indices and counts as integers, or in FP32.",
    "indices = torch.arange(n, device=x.device)  # not in the dtype of x",
)


def _whole_numbers_from(figures: Mapping[str, float]) -> str:
    """Return in words the consecutive whole numbers of which only the least possible value is known."""
    return f"{figures['before']:.0f} consecutive whole numbers, {figures['least']:.0f} or larger,"


def router_ties(case: Case) -> Iterator[Finding]:
    """Scores in 16 bits of which several are equal at the edge of the top k.

    The scores are those of a top k, of a gathering of the k largest, or of a mask that leaves the k largest. If a constant
    was added to choose them, they are told only where every row chose the k largest without it.

    False alarms: Ties are reported from one row in a hundred on, even if a random choice among equal experts is intended.
    Ties at zero and rows of one value only do not count.
    """
    for found in case.measured("ties"):
        share = found.figures["fraction"]
        yield Finding(
            "router-ties",
            "warning",
            found.name,
            f"The top {found.figures['k']:.0f} of the {found.figures['scores']:.0f} scores of {module_named(found.name)} are "
            f"chosen in {format_name(found.text)}: in {percent(share)} of the rows the last one chosen ties with one that is "
            "left out, and it is not the scores that decide between them.",
            {**found.figures, "dtype": found.text},
            "Compute the router's scores in FP32.",
            "with torch.autocast(device_type, enabled=False):\n    scores = router(x.float()).softmax(-1)",
            step=found.step,
        )
        return


DIAGNOSES: tuple[Diagnosis, ...] = (
    statistics_broken,
    loss_in_16_bits,
    norm_overflows,
    positions_collapse,
    router_ties,
)
