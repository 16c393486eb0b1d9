"""Hand-written sessions for the tests of the analysis: counts without measurements."""

from collections.abc import Mapping, Sequence

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, GRADIENT_KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.session import Progress, RunInfo, Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window

#: The gradient at the logits of a word-level language model (vocabulary 4096, mean over 8192 tokens), 20 steps, counted
#: in FP32 from 2^-44 upwards; and the exact powers of two among the values.
LOGITS_COUNTS = (
    *(18, 74, 202, 1048, 10566, 47149, 143156, 426644, 1213449, 3307928, 9117530, 22615505, 44908551, 71293508),
    *(92413831, 98173105, 86003520, 69253232, 90956550, 56015564, 12262194, 5968087, 3127777, 1722573, 939170, 490683),
    *(279481, 149790, 68214, 25327, 154212, 2),
)
LOGITS_POWERS = (*(0,) * 17, 98, 0, 180, 18, 26, 1, 2, 1, *(0,) * 6, 2)


def spread(counts: Mapping[int, int], **others: int) -> ExponentHistogram:
    """Return the histogram of a dict exponent -> count."""
    if not counts:
        return ExponentHistogram.from_counts([], 0, **others)
    low, high = min(counts), max(counts)
    return ExponentHistogram.from_counts([counts.get(e, 0) for e in range(low, high + 1)], low, **others)


def logits() -> ExponentHistogram:
    near_top = [23712 if exponent == -14 else 0 for exponent in range(-44, -12)]
    return ExponentHistogram.from_counts(LOGITS_COUNTS, -44, powers_of_two=LOGITS_POWERS, near_top=near_top)


def cut_below(histogram: ExponentHistogram, exponent: int) -> ExponentHistogram:
    """Return the histogram with all values below 2^exponent counted as zeros."""
    keep = max(exponent - histogram.min_exponent, 0)
    return ExponentHistogram.from_counts(
        histogram.counts[keep:],
        histogram.min_exponent + keep,
        powers_of_two=histogram.powers_of_two[keep:],
        zeros=histogram.zeros + int(histogram.counts[:keep].sum()),
    )


def through_fp16(histogram: ExponentHistogram, log2_scale: int = 0) -> ExponentHistogram:
    """Return the histogram after rounding to FP16 at a scale, which rounds values between 2^-25 and 2^-24 up to 2^-24."""
    smallest = -24 - log2_scale
    at_edge = smallest - 1 - histogram.min_exponent
    rounded_up = 0
    if 0 <= at_edge < len(histogram.counts):
        rounded_up = int(histogram.counts[at_edge] - histogram.powers_of_two[at_edge])
    kept = cut_below(histogram, smallest)
    ups = ExponentHistogram.from_counts([rounded_up], smallest, powers_of_two=[rounded_up])
    visible = merge((kept, ups))
    return ExponentHistogram.from_counts(
        visible.counts, visible.min_exponent, powers_of_two=visible.powers_of_two, zeros=visible.zeros - rounded_up
    )


def weight(name: str) -> TensorKey:
    return TensorKey(name, WEIGHT_GRADIENT)


def activation(name: str) -> TensorKey:
    return TensorKey(name, ACTIVATION_GRADIENT)


def window_of(histogram: ExponentHistogram, samples: int = 10, **others: object) -> TensorWindow:
    peaks = {histogram.peak_exponent: samples} if len(histogram.counts) else {}
    return TensorWindow(histogram, samples, peaks, **others)  # type: ignore[arg-type]


def session_of(
    *blocks: Mapping[TensorKey, ExponentHistogram | TensorWindow],
    steps: int = 10,
    infos: Sequence[TensorInfo] = (),
    progress: Progress | None = None,
    **others: object,
) -> Session:
    """Return a session with one window per block, of ``steps`` sampled steps that peak at the block's largest gradient."""
    windows = []
    for index, block in enumerate(blocks):
        tensors = {
            key: found if isinstance(found, TensorWindow) else window_of(found, steps) for key, found in block.items()
        }
        whole = merge(part.histogram for key, part in tensors.items() if key.kind in GRADIENT_KINDS)
        peaks = {whole.peak_exponent: steps} if len(whole.counts) else {}
        windows.append(Window(index * steps, (index + 1) * steps - 1, steps, tensors, peaks))
    announced = {info.key for info in infos}
    keys = dict.fromkeys(key for block in blocks for key in block)
    watched = (*infos, *(TensorInfo(key.name, key.kind, key.name, "") for key in keys if key not in announced))
    ran = steps * len(blocks)
    return Session(
        RunInfo(kinds=GRADIENT_KINDS),
        watched,
        tuple(windows),
        progress=progress or Progress(ran, ran, 0, ran, True),
        **others,  # type: ignore[arg-type]
    )
