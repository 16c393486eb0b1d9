"""How the window of safe scales moves during a run: time blocks, and what a static and a dynamic scaler make of them."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.analysis.overflow_odds import log2_room
from mpinspect.ranges.analysis.report import TimeBlock
from mpinspect.ranges.analysis.serving import flush_exponent
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import TensorKey, Window, merge_windows

#: Blocks that a run is cut into: enough to see a trend, few enough that each holds many steps.
MAX_BLOCKS = 8

#: torch.amp.GradScaler's default growth interval, and the shortest that is suggested: an overflow costs a step in so many.
LONGEST_GROWTH_INTERVAL = 2000
SHORTEST_GROWTH_INTERVAL = 100

#: A training has diverged where its largest gradients rose by so many powers of two, to beyond FP16's top: as many as the
#: gradients of the talk of 2018 left unused there, and those of a training that goes well mostly shrink. Or where they are so
#: large that a scale under which they fit FP16 would flush 1.
EXPLOSION = 15

#: Powers of two: the peaks of a steady training differ by one from block to block.
LEAST_RISE = 2


def time_blocks(windows: Sequence[Window]) -> list[list[Window]]:
    """Return the windows in at most MAX_BLOCKS groups of neighbours with about as many sampled steps each."""
    ordered = sorted(windows, key=lambda window: window.first_step)
    whole = sum(window.sampled_steps for window in ordered)
    blocks: dict[int, list[Window]] = {}
    before = 0
    for window in ordered:
        middle = before + window.sampled_steps / 2
        blocks.setdefault(int(MAX_BLOCKS * middle / whole) if whole else 0, []).append(window)
        before += window.sampled_steps
    return list(blocks.values())


def block_histograms(block: Sequence[Window]) -> dict[TensorKey, Visibility]:
    """Return the gradients of a block of windows, merged."""
    merged = merge_windows(*block).of_kinds(GRADIENT_KINDS)
    return {key: Visibility.of(tensor) for key, tensor in merged.tensors.items()}


def divergence(windows: Sequence[Window]) -> str:
    """Return why the gradients are those of a training that diverged, which no loss scale is for; "" where they are not."""
    seen = sorted((window for window in windows if window.gradient_peaks), key=lambda window: window.first_step)
    if not seen:
        return ""
    (first, before), (last, after) = ((window, max(window.gradient_peaks)) for window in (seen[0], seen[-1]))
    largest = max(max(window.gradient_peaks) for window in seen)
    if after - before >= EXPLOSION and log2_room(after, FLOAT16) < 0:
        course = f"rose from 2^{before} in step {first.first_step} to 2^{after} in step {last.last_step}"
    elif log2_room(largest, FLOAT16) <= flush_exponent(FLOAT16):
        course = f"reached 2^{largest}"
    else:
        return ""
    return (
        f"No advice: the training diverged. Its largest gradients {course}, and no loss scale mends that: a lower learning "
        "rate, a warm-up or clipping the gradients may."
    )


def growth_interval(blocks: Sequence[TimeBlock], longest: int = LONGEST_GROWTH_INTERVAL) -> int:
    """Return steps after which a dynamic scaler should try twice the scale, to follow the window's rise.

    Where the largest safe scale rises by d powers of two a step over the run, a scaler that grows by one in every 1/d steps
    keeps up: 1/d, within 100 .. ``longest``. A rise of under LEAST_RISE is taken for chance. (A fall needs no interval:
    the scaler backs off at once.)
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
    """Powers of two between the lowest and the highest ``log2_highest`` of the blocks."""
    highest = [block.log2_highest for block in blocks if block.log2_highest is not None]
    return max(highest) - min(highest) if highest else 0
