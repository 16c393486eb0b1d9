"""Drift of the window of safe loss scales during a run: time blocks, divergence, and a dynamic scaler's growth interval."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.numeric.exponents import ratio
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.overflow_odds import log2_room
from mpinspect.ranges.analysis.report import TimeBlock
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import Window, merge_windows

#: Maximum number of blocks that a run is divided into: enough to show a trend, few enough that each holds many steps.
MAX_BLOCKS = 8

#: torch.amp.GradScaler's default growth interval, and the shortest one suggested: about one step per interval overflows.
LONGEST_GROWTH_INTERVAL = 2000
SHORTEST_GROWTH_INTERVAL = 100

#: A training counts as diverged if its largest gradients rose by this many powers of two to beyond FP16's maximum: as many
#: powers as the gradients of the talk of 2018 left unused at FP16's top; gradients of a healthy training mostly shrink. A
#: training also counts as diverged if its gradients are so large that a scale small enough for them would flush 1 in FP16.
EXPLOSION = 15

#: Least rise of the highest safe scale that counts as a trend, in powers of two: a steady training's blocks differ by one.
LEAST_RISE = 2


def time_blocks(windows: Sequence[Window]) -> list[list[Window]]:
    """Group the windows into at most MAX_BLOCKS runs of neighbours with about equal numbers of sampled steps."""
    ordered = sorted(windows, key=lambda window: window.first_step)
    whole = sum(window.sampled_steps for window in ordered)
    blocks: dict[int, list[Window]] = {}
    before = 0
    for window in ordered:
        middle = before + window.sampled_steps / 2
        blocks.setdefault(int(ratio(MAX_BLOCKS * middle, whole)), []).append(window)
        before += window.sampled_steps
    return list(blocks.values())


def block_histograms(block: Sequence[Window]) -> dict[TensorKey, Visibility]:
    """Return each gradient's counts, merged over a block of windows."""
    merged = merge_windows(*block).of_kinds(GRADIENT_KINDS)
    return {key: Visibility.of(tensor) for key, tensor in merged.tensors.items()}


def has_finite_gradients(window: Window) -> bool:
    """Return whether all gradients counted in a window are finite, so that the peaks are their true maxima."""
    tensors = window.columns()
    broken = (tensors.columns["infs"] != 0) | (tensors.columns["nans"] != 0)
    return not any(key.kind in GRADIENT_KINDS for key, each in zip(tensors.order, broken.tolist(), strict=True) if each)


def divergence(windows: Sequence[Window]) -> str:
    """Return a sentence saying that and how the training diverged, which no loss scale fixes; "" if it did not diverge."""
    whole = (window for window in windows if window.gradient_peaks and has_finite_gradients(window))
    seen = sorted(whole, key=lambda window: window.first_step)
    if not seen:
        return ""
    (first, before), (last, after) = ((window, max(window.gradient_peaks)) for window in (seen[0], seen[-1]))
    largest = max(max(window.gradient_peaks) for window in seen)
    if after - before >= EXPLOSION and log2_room(after, FLOAT16) < 0:
        course = f"rose from 2^{before} in step {first.first_step} to 2^{after} in step {last.last_step}"
        if last is not max(windows, key=lambda window: window.last_step):
            course += ", the last step whose gradients were all finite"
    elif log2_room(largest, FLOAT16) <= FLOAT16.flush_exponent:
        course = f"reached 2^{largest}"
    else:
        return ""
    return (
        f"The training diverged. Its largest gradients {course}, which no loss scale fixes: try a lower learning rate, a "
        "warm-up or gradient clipping."
    )


def growth_interval(blocks: Sequence[TimeBlock], longest: int = LONGEST_GROWTH_INTERVAL) -> int:
    """Return the number of steps after which a dynamic scaler should double its scale to follow the window's rise.

    If the largest safe scale rises by d powers of two per step over the run, a scaler that doubles every 1/d steps
    keeps up: the result is 1/d, limited to 100 .. ``longest``. A rise of less than LEAST_RISE counts as chance. (A fall needs
    no interval: the scaler backs off at once.)
    """
    known = [(block, block.log2_highest) for block in blocks if block.log2_highest is not None]
    if len(known) < 2:
        return longest
    (first, before), (last, after) = known[0], known[-1]
    steps = (last.first_step + last.last_step - first.first_step - first.last_step) / 2
    if after - before < LEAST_RISE or steps <= 0:
        return longest
    return min(longest, max(SHORTEST_GROWTH_INTERVAL, int(steps / (after - before))))


def moved(blocks: Sequence[TimeBlock]) -> int:
    """Return the difference between the highest and the lowest ``log2_highest`` of the blocks, in powers of two."""
    highest = [block.log2_highest for block in blocks if block.log2_highest is not None]
    return max(highest, default=0) - min(highest, default=0)
