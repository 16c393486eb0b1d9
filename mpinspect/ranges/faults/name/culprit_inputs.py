"""Diagnoses of the operation in which the first infinity or NaN arose, made from its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpinspect.numeric.formats import BFLOAT16, FLOAT16
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.faults.name.case import Case, Diagnosis
from mpinspect.ranges.session import LOSSES, MOST_ROWS, Event, Measurement
from mpinspect.reporting.finding import INFERRED, MEASURED, Finding
from mpinspect.reporting.words import number_of, some


def _event_at(case: Case, step: int) -> Event | None:
    """Return the step's first event, if there is one."""
    return next((event for event in case.events if event.step == step), None)


def _where(case: Case, found: Measurement) -> str:
    """Return the module in which the infinity or NaN arose; "" for the loss and for code after the last module."""
    event = _event_at(case, found.step)
    is_after = event is None or event.after or event.what in LOSSES
    return found.name or ("" if is_after or event is None else event.module)


def _rows(found: Measurement, one: str = "row", several: str = "rows", of: str = "the batch") -> str:
    """Return the positions along the first dimension in words: "row 5 of the batch", "all 32 rows of the batch"."""
    if not found.names:
        return ""
    if found.figures.get("rows") == found.figures.get("of_rows", 0) > 1:
        return f"all {found.figures['rows']:.0f} {several} of {of}"
    more = ", ..." if found.figures.get("rows", math.inf) > len(found.names) >= MOST_ROWS else ""
    return f"{several if len(found.names) > 1 else one} {', '.join(found.names)}{more} of {of}"


def _brackets(*parts: str) -> str:
    told = ", ".join(part for part in parts if part)
    return f" ({told})" if told else ""


def _aftermath(case: Case, event: Event | None) -> str:
    """Return a sentence that the weights are lost, if the optimizer stepped on non-finite gradients; else ""."""
    if event is None or event.skipped is not False or event.gradients_finite:
        return ""
    later = [each for each in case.events if each.step > event.step]
    if any(each.step == event.step for each in case.measured("replaced-before-step")):
        return " The gradients were made finite before the optimizer's step, which was taken on them."
    if case.progress.steps > event.step + 1 and all(each.forward_finite for each in later):
        return ""
    return " The optimizer took the step: the weights are lost, go back to a checkpoint before that step."


def _elements(found: Measurement) -> str:
    number = found.figures["elements"]
    return f"{number:.0f} element{'' if number == 1 else 's'}"


#: Records of operations that make infinities and NaNs whatever the weights are.
_SINGULAR = frozenset({"examined-argument", "examined-mask", "examined-zero-row"})
_EDGE = (
    "Add a small constant to the argument, or clamp it, before the operation. A torch.where after it does not help: the gradient "
    "of the discarded value is computed too."
)
_EXP = "x.clamp_max(80).exp()  # FP16 ends at exp(11.09), BF16 and FP32 at exp(88.7)"
#: The remedy, in words and as code, for each word that the operation's description may contain.
_MENDS = (
    (
        "ignored",
        "Divide by the number of targets that count, at least 1, or leave such a batch out.",
        'F.cross_entropy(logits, labels, reduction="sum") / labels.ne(-100).sum().clamp_min(1)',
    ),
    (
        "CTC",
        "Leave out the samples whose target, with a blank between equal labels, is longer than its input, or lengthen the input. "
        "zero_infinity=True gives them no loss and no gradient.",
        "loss_fn = torch.nn.CTCLoss(zero_infinity=True)",
    ),
    (
        "of an infinity",
        "Apply the mask after this operation, or mask by a large finite number: the gradient of a masked score is zero, and zero "
        "times infinity is NaN.",
        'scores = (scores / temperature).masked_fill(mask, float("-inf"))  # divided first, then masked',
    ),
    (
        "with a constant",
        "Look at where the constant comes from: a mean over nothing, the deviation of one sample, a division of targets.",
        "assert torch.isfinite(constant).all()",
    ),
    (
        "with a weight",
        "Look at how the weights are made: dividing by the count of a class that never occurs gives infinity.",
        "weight = torch.nan_to_num(weight, posinf=0.0)  # or leave its classes out",
    ),
    (
        "of a softmax",
        "Take log_softmax of the logits: it is finite, and so is its gradient. A clamp would be finite too, but gives the "
        "clamped elements no gradient.",
        "log_probabilities = torch.log_softmax(logits, -1)",
    ),
    ("logarithm", _EDGE, "x.clamp_min(1e-6).log()  # a clamped element gets no gradient"),
    ("square root", _EDGE, "(x + 1e-12).sqrt()"),
    ("sqrt", _EDGE, "(x + 1e-12).rsqrt()"),
    ("division", _EDGE, "a / b.clamp_min(1e-6)"),
    ("1 / x", _EDGE, "1 / x.clamp_min(1e-6)"),
    ("power", _EDGE, "x.clamp_min(1e-6) ** p"),
    (
        "exp",
        "Subtract the largest first (torch.softmax and torch.logsumexp do), bound the argument, or compute it in FP32.",
        _EXP,
    ),
    ("acos", _EDGE, "x.clamp(-1 + 1e-6, 1 - 1e-6).acos()"),
    ("asin", _EDGE, "x.clamp(-1 + 1e-6, 1 - 1e-6).asin()"),
    ("atanh", _EDGE, "x.clamp(-1 + 1e-6, 1 - 1e-6).atanh()"),
)


def batch_not_finite(case: Case) -> Iterator[Finding]:
    """The batch itself held infinities or NaNs.

    False alarms: Only the inputs of the model's outermost call are searched, and the targets that its loss keeps. A batch
    that the model is meant to clean (NaN for missing values) is still reported if the loss is not finite.
    """
    for found in case.session.measurements:
        if not found.what.startswith("examined-"):
            continue
        event = _event_at(case, found.step)
        # A non-finite difference from a target is the target's fault only if the model's own output was finite.
        of_targets = found.what == "examined-target" or (
            found.what == "examined-difference"
            and (event is None or event.what in LOSSES or event.forward_finite is not False)
        )
        if not of_targets and found.what != "examined-batch":
            continue
        # What another rank made first may have been sent to this one as its input.
        if event is not None and event.rank != found.rank:
            continue
        whose, name = ("targets", "targets hold") if of_targets else ("batch", "batch itself holds")
        yield Finding(
            "batch-not-finite",
            "error" if event is not None else "warning",
            "",
            f"In step {found.step} the {name} infinities or NaNs{_brackets(_elements(found), _rows(found))}: neither the "
            f"model nor the precision made them.{_aftermath(case, event)}",
            {"elements": found.figures["elements"], "rows": list(found.names)},
            "Look at these samples and their preprocessing; leave them out or repair them before they reach the model.",
            f'assert torch.isfinite({whose}).all(), "bad sample"',
            INFERRED if found.what == "examined-difference" else MEASURED,
            found.step,
        )
        return


def mask_hides_whole_row(case: Case) -> Iterator[Finding]:
    """A softmax or an attention in which a mask hides every element of a row.

    False alarms: A softmax is reported only if the autograd graph shows a mask just before it; scores that are -inf for
    another reason are not reported.
    """
    for found in case.measured("examined-mask"):
        module, rows = _where(case, found), int(found.figures["elements"])
        is_narrow = run_format(case.session) in (FLOAT16, BFLOAT16)
        rounded = " (that of float32 becomes -inf in 16 bits)" if is_narrow else ""
        yield Finding(
            "mask-hides-whole-row",
            "error",
            module,
            f"In step {found.step}{f', in {module!r},' if module else ''} a mask hides all scores of {number_of(rows, 'row')}"
            f"{_brackets(_rows(found, 'index', 'indices', 'the first dimension'))}: {'its' if rows == 1 else 'their'} softmax is "
            f"0/0, which is NaN.{_aftermath(case, _event_at(case, found.step))}",
            {"elements": found.figures["elements"], "rows": list(found.names)},
            "Leave each row at least one key, or mask by a large finite number of the scores' own dtype, "
            f"torch.finfo(scores.dtype).min{rounded}. Possible causes: an empty sample, padding on the wrong side, a mask that "
            "is applied twice.",
            "# True: visible. A row without keys gets them all; ignore it in the loss\nmask[~mask.any(-1)] = True",
            step=found.step,
        )
        return


def zero_row_normalized(case: Case) -> Iterator[Finding]:
    """A row of zeros divided by its own maximum or norm.

    False alarms: If nothing in a module is trained, there is no graph: rows of zeros that come out as NaN are then taken
    for a division, and the finding is inferred.
    """
    for found in case.measured("examined-zero-row"):
        module = _where(case, found)
        yield Finding(
            "zero-row-normalized",
            "error",
            module,
            f"In step {found.step}{f', in {module!r},' if module else ''} a row of zeros was divided by its own largest "
            f"magnitude or norm, which is zero{_brackets(_rows(found))}: 0/0 is NaN."
            f"{_aftermath(case, _event_at(case, found.step))}",
            {"rows": list(found.names)},
            "Add an epsilon to the divisor, or bound it from below.",
            "x / x.abs().amax(-1, keepdim=True).clamp_min(1e-6)",
            INFERRED if found.name else MEASURED,
            found.step,
        )
        return


def argument_out_of_range(case: Case) -> Iterator[Finding]:
    """An operation whose argument is at the edge of its domain, or beyond it.

    False alarms: The operation that ran first counts. If a later torch.where discards its result it may be harmless in the
    forward; its gradient is not.
    """
    for found in case.measured("examined-argument"):
        module, event = _where(case, found), _event_at(case, found.step)
        loss_finite = bool(found.figures.get("loss_finite", 0.0))
        in_model = event is not None and not event.after and event.what not in LOSSES
        if module:
            place = f"the code in or before {module!r}, or beside it on the same input,"
        elif in_model:
            place = f"the model's own code{'' if event is not None and event.of_input else ', or the loss,'}"
        else:
            place = "the loss, or the code that leads to it,"
        fix, code = next(((fix, code) for word, fix, code in _MENDS if word in found.text), (_EDGE, ""))
        bits = found.figures.get("bits")
        is_narrow = bits == 16 if bits else run_format(case.session) in (FLOAT16, BFLOAT16)
        if is_narrow and (fix is _EDGE or code is _EXP):
            fix += " Do it in FP32: in 16 bits the constant may be rounded away." if fix is _EDGE else ""
            code = (
                f"with torch.autocast(device_type, enabled=False):  # x in FP32: x = x.float()\n    y = {code}"
                if code
                else ""
            )
        if event is None:
            effect = "the loss is not finite, but its gradients are: the step did no harm"
        elif loss_finite:
            effect = "the loss is finite, but its gradient is not"
        else:
            effect = "what follows is not finite"
        yield Finding(
            "argument-out-of-range",
            "error" if event is not None else "warning",
            module,
            f"In step {found.step} {place} computes {found.text}{_brackets(_elements(found), _rows(found))}: {effect}."
            f"{_aftermath(case, event)}",
            {"operator": found.text, "elements": found.figures["elements"], "rows": list(found.names)},
            fix,
            code,
            step=found.step,
        )
        return


def weights_exploded(case: Case) -> Iterator[Finding]:
    """Weights that had grown out of all proportion before anything became infinite.

    False alarms: A norm that grows to 16 times its first value is no fault if the weights begin near zero (LoRA's B, a
    zero-initialised head): it is reported only if something also became infinite or the training diverged.
    """
    grown = list(case.measured("weight-growth"))
    broken = [event for event in case.events if not event.gradients_finite and not event.skipped]
    # Where a saturating model lets nothing become infinite, its loss shows it.
    loss_ratio = max((each.figures.get("loss_ratio", 0.0) for each in grown), default=0.0)
    if not grown or not (broken or case.advised.diverged or loss_ratio):
        return
    first = min(grown, key=lambda each: each.step)
    at_once = [each for each in grown if each.step == first.step]
    before = min((event.step for event in broken), default=case.progress.steps)
    in_forward = any(event.step == before and event.phase != "backward" for event in broken)
    ratio = max(each.figures["ratio"] for each in at_once)
    is_singular = any(each.what in _SINGULAR and each.step == before for each in case.session.measurements)
    if first.step > before or (is_singular and ratio < 2.0 ** (first.step + 1)):
        # Beside an argument at the edge of its domain, weights that did not even double in each step are no explosion.
        return
    rate, initial = first.figures.get("lr"), first.figures.get("initial_lr")
    optimizer = next((optimizer.type for optimizer in case.precision.optimizers), "")
    scheduled = initial is not None and initial != rate
    at_rate = f" at a learning rate of {rate:g}" if rate else ""
    group = first.figures.get("group")
    if rate and group is not None:
        at_rate += f" (of group {group:.0f} of the optimizer, which has several)"
    at_rate += f", to which a scheduler had brought it from {initial:g}" if rate and scheduled else ""
    lower = "the largest learning rate of the scheduler" if scheduled else "the learning rate"
    yield Finding(
        "weights-exploded",
        "error",
        first.name.rpartition(".")[0] or first.name,
        f"The weights exploded{at_rate}: after step {first.step} the norm of {some([each.name for each in at_once], 3)} had "
        f"grown to {ratio:.2g} times what it was at the start"
        + (
            f", and in step {before} the {'forward' if in_forward else 'backward'} was no longer finite."
            if broken
            else f", and the loss to {loss_ratio:.2g} times the first one."
            if loss_ratio
            else "."
        ),
        {"ratios": {each.name: each.figures["ratio"] for each in grown}, "lr": rate},
        f"Lower {lower} (to a tenth, and again if need be), with a warm-up or with clipped gradients. No precision and no loss "
        "scale mends this.",
        (
            ""
            if not rate or scheduled
            else f"optimizer = torch.optim.{optimizer}(model.parameters(), lr={rate / 10:g})\n"
            if group is None
            else f'optimizer.param_groups[{group:.0f}]["lr"] = {rate / 10:g}\n'
        )
        + "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # between backward() and step()",
        INFERRED,
        first.step,
    )


DIAGNOSES: tuple[Diagnosis, ...] = (
    batch_not_finite,
    mask_hides_whole_row,
    zero_row_normalized,
    weights_exploded,
    argument_out_of_range,
)
