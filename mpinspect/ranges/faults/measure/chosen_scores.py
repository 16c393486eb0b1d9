"""Measures, in an autograd graph, how often scores tie at the edge of a choice of the k largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mpinspect.ranges.faults.measure.singularities import saved_dim

#: Maximum number of scores read, maximum length of a row, and minimum number of rows.
_MOST_SCORES, _LONGEST_ROW, _FEWEST_ROWS = 1 << 20, 1 << 14, 8


#: Nodes that may represent a choice. A product does if one factor is a mask of zeros and ones.
CHOOSING = frozenset({"TopkBackward0", "GatherBackward0", "MaskedFillBackward0", "WhereBackward0", "MulBackward0"})


@dataclass(frozen=True)
class Choice:
    """Scores chosen along ``dim``: by ``index``, or where ``mask`` is True."""

    dim: int
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def choice(node: Any) -> Choice | None:
    """Return the choice that a node may represent; None if it represents none. Waits for the device."""
    name = node.name()
    if name == "TopkBackward0":
        return Choice(saved_dim(node), node._saved_indices)
    if name == "GatherBackward0":
        dim, index = saved_dim(node), node._saved_index
        # One element per row is gathered for many reasons, mostly as the target's log-probability.
        return Choice(dim, index) if index.dim() and index.shape[dim] > 1 else None
    if name == "MaskedFillBackward0":
        return Choice(-1, mask=~node._saved_mask)
    if name == "WhereBackward0":
        return Choice(-1, mask=node._saved_condition)
    factor = node._saved_other if node._saved_self is None else None
    if factor is None or factor.dim() < 2 or not 0 < factor.numel() <= _MOST_SCORES:
        return None
    # The first row is cheap to read and rules out most factors.
    is_choice = _is_binary(factor[(0,) * (factor.dim() - 1)]) and _is_binary(factor)
    return Choice(-1, mask=factor == 1) if is_choice else None


def _is_binary(factor: torch.Tensor) -> bool:
    return bool(((factor == 0) | (factor == 1)).all())


def tied(scores: torch.Tensor, chosen: Choice) -> tuple[float, int]:
    """Return the share of rows whose last chosen score ties with a rejected score, and k. Waits for the device.

    The share is 0 unless every row chose its k largest scores. Ties at zero (from a ReLU) or infinity (from a mask) and
    constant rows are not counted, since rounding did not make them.
    """
    if scores.dim() < 2 or not 0 < scores.numel() <= _MOST_SCORES or scores.shape[chosen.dim] > _LONGEST_ROW:
        return 0.0, 0
    scores = scores.movedim(chosen.dim, -1)
    if chosen.index is not None:
        index = chosen.index.movedim(chosen.dim, -1)
        if index.shape[:-1] != scores.shape[:-1]:
            return 0.0, 0
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True)
        k = index.shape[-1]
    elif chosen.mask is not None and chosen.mask.shape == scores.shape:
        mask = chosen.mask
        k = int(mask.flatten(0, -2)[0].sum())
    else:
        return 0.0, 0
    rows = scores.numel() // scores.shape[-1]
    if not 0 < k < scores.shape[-1] or rows < _FEWEST_ROWS or not bool((mask.sum(-1) == k).all()):
        return 0.0, 0
    last = scores.masked_fill(~mask, torch.inf).amin(-1)
    next_one = scores.masked_fill(mask, -torch.inf).amax(-1)
    if not bool((last >= next_one).all()):
        return 0.0, 0
    is_tied = (last == next_one) & (last != 0) & last.isfinite() & (scores.amax(-1) != scores.amin(-1))
    return float(is_tied.double().mean()), k
