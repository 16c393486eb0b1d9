"""Derives a run's compute format and a one-line summary from its precision ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat
from mpinspect.ranges.session import OptimizerRecord, ScalerRecord, Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting.words import filled, format_name, with_power

#: Optimizer states whose square root, plus epsilon, is the denominator of the update.
SQUARES = ("exp_avg_sq", "square_avg")
#: A dtype below this share of the elements is called "a few": normalisation weights in FP32, for example.
_A_FEW = 0.001
_NARROW = (FLOAT16.name, BFLOAT16.name)


def run_format(session: Session) -> FloatFormat | None:
    """Return the format of the run's matrix products; None if it cannot be determined.

    This is the autocast dtype, else the dtype of most weights, else (without a ledger) the narrow format that values had been
    rounded to. If both FP16 and BF16 occur, the result is FP16, which has the narrower range.
    """
    ledger = session.precision
    told = {dtype for dtype in ledger.autocast if dtype}
    if not told and ledger.weights:
        told = {max(ledger.weights, key=lambda dtype: ledger.weights[dtype])}
        if told == {FLOAT32.name}:
            # A model with FP32 weights may cast its inputs and weights itself.
            told = {dtype for dtype in (*ledger.outputs, *ledger.unseen) if dtype in _NARROW} or told
            if told == {FLOAT32.name} and is_hidden(session):
                return None
    for format in (FLOAT16, BFLOAT16, FLOAT32):
        if format.name in (told or session.passed_through() - {FLOAT32.name}):
            return format
    return None


def holds_without_scale(session: Session, keys: Collection[TensorKey]) -> str:
    """Return why FP16's flushing or overflow of these tensors needs no warning, or "" if the run may compute in FP16."""
    passed = session.passed_through(keys)
    if passed == {BFLOAT16.name}:
        return "The run uses BF16, which holds them."
    format = run_format(session)
    if not session.precision.weights or (format is None and FLOAT16.name in passed):
        return ""
    if format is None and is_hidden(session):
        return "Whether the run computes in FP16 is not known."
    if format is None:
        return f"The run computes in {_names(session.precision.weights)}, which holds them."
    if format.max_exponent <= FLOAT16.max_exponent:
        return ""
    return f"The run computes in {format_name(format.name)}, which holds them."


def damped_by_epsilon(session: Session, largest: float) -> str:
    """Return a clause saying that the optimizer's eps is above gradients up to ``largest``; "" if it is not, or unknown.

    Adam's step is lr * m / (sqrt(v) + eps), so eps more than halves the step of gradients below eps.
    """
    adaptive = [each for each in session.precision.optimizers if set(SQUARES) & set(each.states)]
    if not adaptive or len(adaptive) < len(session.precision.optimizers):
        return ""
    least = min(adaptive, key=lambda each: each.settings.get("eps", 0.0))
    epsilon = least.settings.get("eps", 0.0)
    if largest >= epsilon:
        return ""
    return f"{least.type}'s eps, {epsilon:g}, is above gradients that small and damps their steps in any format"


def is_hidden(session: Session) -> bool:
    """Return whether compiled code hides the formats: it never ran eagerly, and the losses' graphs were not read completely."""
    progress, unseen = session.progress, session.precision.unseen
    return bool(progress.compiled) and not progress.eager_steps and (not unseen or "" in unseen)


def ledger_line(session: Session) -> str:
    """Return a line like "FP32 weights, BF16 autocast, AdamW with states in FP32, no scaler"; "" without a ledger."""
    return ", ".join(_parts(session)) if session.precision.weights else ""


def _parts(session: Session) -> Iterator[str]:
    precision = session.precision
    yield _by_share(precision.weights, "weights")
    autocast = [dtype for dtype in precision.autocast if dtype]
    if "" in session.progress.compiled and not precision.autocast:
        # Autocast is read at module calls, which were not seen.
        narrow = [dtype for dtype in precision.unseen if dtype in _NARROW]
        if narrow:
            yield f"{_names(narrow)} in compiled code"
        elif is_hidden(session):
            yield "autocast not known (the model is compiled)"
        else:
            yield "no 16 bits in compiled code"
    elif autocast and "" in precision.autocast:
        yield f"{_names(autocast)} autocast of some modules"
    elif autocast:
        yield f"{_names(autocast)} autocast"
    elif precision.autocast:
        yield "no autocast"
    # An optimizer of masters receives the masters' gradients, not the model's.
    if precision.gradients and not precision.has_masters and set(precision.gradients) != set(precision.weights):
        yield _by_share(precision.gradients, "gradients")
    if session.info.inference:
        yield "inference"
        return
    if precision.optimizers:
        yield from dict.fromkeys(map(_optimizer, precision.optimizers))
    else:
        yield "no optimizer step seen"
    scalers = [_scaler(scaler) for scaler in precision.scalers if scaler.enabled]
    disabled = [scaler.type for scaler in precision.scalers if not scaler.enabled]
    yield from dict.fromkeys(scalers) or ([f"{disabled[0]} disabled"] if disabled else ["no scaler"])


def _optimizer(optimizer: OptimizerRecord) -> str:
    dtypes = optimizer.dtypes()
    words = [optimizer.type]
    if optimizer.masters:
        words.append(f"on {_by_share(optimizer.steps, 'masters')}")
    if dtypes:
        words.append(f"with states in {_names(dtypes)}")
    if optimizer.draws_random:
        words.append("(its step draws random numbers)")
    if optimizer.compensation:
        words.append(f"({optimizer.compensation!r} holds the rounding errors)")
    return " ".join(words)


def _scaler(scaler: ScalerRecord) -> str:
    if scaler.init_scale is None:
        return scaler.type
    return f"{scaler.type} from {with_power(scaler.init_scale)}"


def _by_share(elements: Mapping[str, int], what: str) -> str:
    """Return "BF16 weights" or "BF16 and FP32 weights", the largest share first; dtypes below _A_FEW are "a few"."""
    most = sorted(elements, key=lambda dtype: -elements[dtype])
    few = [dtype for dtype in most if elements[dtype] < _A_FEW * sum(elements.values())]
    return f"{_names(dtype for dtype in most if dtype not in few)} {what}{filled(' (a few in {})', _names(few))}"


def _names(dtypes: Iterable[str]) -> str:
    return " and ".join(map(format_name, dtypes))
