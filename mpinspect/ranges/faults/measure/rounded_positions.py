"""Recognises positions and timesteps that were rounded to 16 bits, in the tables that a model computes from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

#: Minimum number of a table's rows, and of repeated rows; elements of each other dimension in a first, cheap comparison.
_FEWEST_ROWS, _FEWEST_REPEATS, _FEW = 16, 4, 8
#: Minimum number of pairs of groups that follow the pattern, sum of their bits (k for a spacing of 2^k), share of all pairs.
_FEWEST_PAIRS, _FEWEST_BITS, _LEAST_SHARE = 2, 8, 0.75
#: Minimum number of whole numbers that rounding changes; tolerances of their sines in FP32 and in 16 bits.
_FEWEST_CHANGED, _NEAR, _NEAR_IN_16_BITS = 4, 1e-3, 2.0**-7
_DTYPES = (torch.bfloat16, torch.float16)


class Collapsed(NamedTuple):
    """A table of ``before`` rows, ``after`` of them distinct; ``spacing``: the distance of the format's numbers there."""

    before: int
    after: int
    spacing: int


def repeating(table: torch.Tensor) -> list[int]:
    """Return the dimensions of a table along which a few of its elements repeat often enough. Waits for the device."""
    found: list[int] = []
    for dim, length in enumerate(table.shape):
        if length < _FEWEST_ROWS:
            continue
        few = table.movedim(dim, 0)
        for other in range(1, few.dim()):
            few = few.narrow(other, 0, min(few.shape[other], _FEW))
        if _FEWEST_REPEATS <= int(_equal(few).sum()) < length - _FEWEST_PAIRS:
            found.append(dim)
    return found


def collapsed(table: torch.Tensor, dims: Sequence[int]) -> Collapsed | None:
    """Return the collapse of a table whose rows, along one dimension, repeat like rounded consecutive whole numbers.

    Rounded to the nearest, ties to even, consecutive whole numbers fall into groups whose sizes alternate between one less and
    one more than the spacing: 3, 5, 3, 5, .. from 512 on in BF16. All groups must differ. Waits for the device.
    """
    for dim in dims:
        rows = table.movedim(dim, 0)
        starts = [0, *((~_equal(rows)).nonzero().flatten() + 1).tolist()]
        spacing = _spacing([after - before for before, after in zip(starts, [*starts[1:], len(rows)], strict=True)])
        if spacing is not None:
            groups = rows[starts].reshape(len(starts), -1).float()
            if len(torch.unique(groups, dim=0)) == len(starts):
                return Collapsed(len(rows), len(starts), spacing)
    return None


def angles_of_rounded(numbers: torch.Tensor, table: torch.Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype that whole numbers had before a table of their sines and cosines was computed.

    A table of positions or timesteps has a column of frequency 1, where rounding a number changes its sine by up to the full
    range. Returns None if no dtype is certain. Waits for the device.

    Args:
        numbers: whole numbers, as integers.
        table: one row for each number, in any shape of the same order.
    """
    rows = table.reshape(numbers.numel(), -1).double()
    whole = numbers.reshape(-1, 1).to(rows.device).double()
    near = _NEAR if table.element_size() > 2 else _NEAR_IN_16_BITS
    for dtype in _DTYPES:
        rounded = whole.to(dtype).double()
        changed = (rounded != whole).flatten()
        if int(changed.sum()) < _FEWEST_CHANGED:
            continue
        for function in (torch.sin, torch.cos):
            is_near = (rows - function(rounded)).abs() < near
            was_near = ((rows - function(whole)).abs() < near)[changed]
            if bool((is_near.all(0) & (was_near.double().mean(0) < 0.5)).any()):
                return dtype
    return None


def _equal(rows: torch.Tensor) -> torch.Tensor:
    """Return, on the host, whether each row after the first equals the previous row."""
    return (rows[1:] == rows[:-1]).reshape(len(rows) - 1, -1).all(1).cpu()


def _spacing(sizes: Sequence[int]) -> int | None:
    """Return the spacing of the format's numbers, by the sizes of consecutive groups; None if the pattern does not fit."""
    # The first group of several rows and the last group may be cut off. Earlier numbers are exact, each in its own group.
    first = next((place for place, size in enumerate(sizes) if size > 1), len(sizes))
    inner = sizes[first + 1 : -1]
    pairs = list(pairwise(inner))
    spacings = [(one + other) // 2 for one, other in pairs if abs(one - other) == 2 and _is_power(one + other)]
    bits = sum(math.log2(spacing) for spacing in spacings)
    if len(spacings) < max(_FEWEST_PAIRS, _LEAST_SHARE * len(pairs)) or bits < _FEWEST_BITS:
        return None
    return spacings[-1]


def _is_power(number: int) -> bool:
    return number > 2 and number & (number - 1) == 0
