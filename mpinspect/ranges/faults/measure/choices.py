"""Finds integers and masks of one step that 16-bit numbers decide otherwise than their exact values, and that are used later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.twins import NARROW, Marks
from mpinspect.ranges.records import ChangedChoices

aten = torch.ops.aten

#: Operators that choose integers by the values of numbers. Sorts are left out: ties change their order, and seldom matter.
CHOOSING = frozenset({aten._to_copy, aten.argmax, aten.argmin, aten.max, aten.min, aten.searchsorted, aten.bucketize})
#: The place of the table among the arguments of a search.
SEARCHING = {aten.searchsorted: 0, aten.bucketize: 1}
#: Operators that choose the place of the best of several numbers.
BEST = frozenset({aten.argmax, aten.argmin, aten.max, aten.min})
_NAMES_OF_BEST = frozenset(each.__name__ for each in BEST)
#: Operators that compare a chosen place with the right one.
_COMPARING = frozenset({aten.eq, aten.ne})
ROUNDING = frozenset({aten.floor, aten.ceil})
#: Operators that use integers and masks as indices, conditions or weights, or compute with them.
_USING = frozenset(
    {
        *(aten.index, aten.index_select, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_),
        *(aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten.embedding),
        *(aten.gather, aten.take, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_),
        *(aten.scatter_reduce, aten.scatter_reduce_, aten.nll_loss_forward),
        *(aten.where, aten.masked_fill, aten.masked_fill_, aten.masked_select, aten.masked_scatter, aten.mul_),
        *(aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub, aten.mul, aten.remainder, aten.floor_divide),
        *(aten.clamp, aten.clamp_, aten.clamp_min, aten.clamp_max, aten.minimum, aten.maximum),
    }
)
#: The fewest integers that are judged, and the least share of them that rounding decides.
_FEWEST, _LEAST_CHANGED = 64, 0.05
#: The least distance of the choices from the best exact scores, on average, in standard deviations of a row's scores.
_LEAST_REGRET = 0.1
#: A top k is judged from this many rows of scores on, and recorded if this share of them has an arbitrary choice.
_FEWEST_ROWS, _LEAST_TIED = 8, 0.01
#: The fewest entries of a table in which a number is searched by its distance.
_FEWEST_ENTRIES = 16
#: Entries for each distinct number of a table that rounding has crowded, and the share of its format's numbers that occur.
_CROWDED, _OCCUPIED = 2, 0.9

_Describe = Callable[..., Any]


class Choices:
    """Holds choices that rounding has changed until they are used."""

    def __init__(self) -> None:
        self._made: Marks[ChangedChoices] = Marks()
        #: By storage: the share of numbers whose fraction is lost, of a floor's or a ceiling's.
        self._whole: Marks[float] = Marks()
        self.used: list[ChangedChoices] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def use(self, func: Any, given: Iterable[Any]) -> None:
        """Handle an operator that is about to run."""
        is_comparison = func.overloadpacket in _COMPARING
        if is_comparison or func.overloadpacket in _USING:
            for each in given:
                made = self._made.of(each) if isinstance(each, torch.Tensor) else None
                # Of other integers, a comparison makes a count for a log.
                if made is not None and (not is_comparison or made.names[0] in _NAMES_OF_BEST):
                    self._made.put(each, None)
                    self.used.append(made)

    def rounded(self, result: torch.Tensor, value: torch.Tensor, twin: torch.Tensor) -> None:
        """Remember how many numbers became whole in 16 bits, of those that a floor or a ceiling takes. Waits for the device."""
        share = float(((value == value.round()) & (twin != twin.round())).float().mean())
        self._whole.put(result, share)

    def searched(self, table: torch.Tensor, describe: _Describe) -> None:
        """Record a sorted table with more entries than its format has numbers, if all of those occur. Waits for the device."""
        if not table.is_floating_point() or not table.numel():
            return
        for dtype in (torch.bfloat16, torch.float16):
            if table.dtype in (torch.float32, dtype) and bool((table == table.to(dtype)).all()):
                distinct, entries = _distinct(table), table.shape[-1]
                # The numbers from half the largest on: where a sorted table has most of its entries, and fewest numbers.
                upper = distinct[distinct > distinct.abs().max() / 2]
                numbers = 1 / torch.finfo(dtype).eps
                if entries >= _CROWDED * len(distinct) and len(upper) >= _OCCUPIED * numbers:
                    figures = {"entries": entries, "distinct": len(distinct)}
                    self.used.append(replace(describe(ChangedChoices, **figures), text=dtype_name(dtype)))
                return

    def looked_up(self, distances: torch.Tensor, describe: _Describe) -> None:
        """Record a search for a number in a table by its distance, if several entries are that number. Waits for the device."""
        is_of_table = distances.dtype in NARROW and distances.dim() == 1 and distances.numel() >= _FEWEST_ENTRIES
        if is_of_table and (equal := int((distances == 0).sum())) > 1:
            self.used.append(describe(ChangedChoices, entries=distances.numel(), equal=equal))

    def chosen(
        self,
        source: torch.Tensor,
        value: torch.Tensor,
        exact: torch.Tensor,
        table: torch.Tensor | None,
        describe: _Describe,
        hardly_matters: Callable[[], bool],
    ) -> None:
        """Compare the integers or the mask that an operator has made with the exact ones. Waits for the device.

        Args:
            source: the operator's first argument.
            value, exact: the integers or the mask, and those that it makes of exact arguments.
            table: the sorted numbers that were searched; None for other operators.
            describe: makes a record of a class at this line, with figures.
            hardly_matters: whether the choice is one between near equals.
        """
        differ = value != exact
        changed, of = float(differ.count_nonzero()), value.numel()
        if of < _FEWEST or changed < _LEAST_CHANGED * of or hardly_matters():
            return
        worst = int((value.float() - exact.float()).abs().argmax())
        figures = {"given": float(value.flatten()[worst]), "exact": float(exact.flatten()[worst])}
        if (whole := self._whole.of(source)) is not None:
            figures["whole"] = whole
        if table is not None:
            figures |= {"entries": table.shape[-1], "distinct": len(_distinct(table))}
        self._made.put(value, describe(ChangedChoices, changed=changed, of=of, **figures))

    def best(
        self, places: torch.Tensor, exact: torch.Tensor, k: int, dim: int, largest: bool, describe: _Describe
    ) -> None:
        """Hold the places of a top k if many of them are not among the best 2 k exact scores. Waits for the device.

        Args:
            exact: the exact scores.
            dim, largest: as of ``torch.topk``.
            describe: as of ``chosen``.
        """
        if not 0 < 2 * k < exact.shape[dim]:
            return
        edge = exact.topk(2 * k, dim, largest).values.narrow(dim, -1, 1)
        taken = exact.gather(dim, places)
        changed = float((taken < edge if largest else taken > edge).count_nonzero())
        if places.numel() >= _FEWEST and changed >= _LEAST_CHANGED * places.numel():
            self._made.put(places, describe(ChangedChoices, changed=changed, of=places.numel(), best=k))


def tied(
    scores: torch.Tensor, exact: torch.Tensor, k: int, dim: int = -1, largest: bool = True, _: bool = True
) -> float:
    """Return the share of rows whose top k is arbitrary: its last score ties with one that is left out, and no exact ones do.

    0.0 if it is small, or of too few rows. Waits for the device.
    """
    if not largest or not 0 < k < scores.shape[dim] or scores.numel() < _FEWEST_ROWS * scores.shape[dim]:
        return 0.0
    best, wanted = (each.topk(k + 1, dim).values.movedim(dim, -1)[..., -2:] for each in (scores, exact))
    last = best[..., 0]
    # Ties at zero (of a ReLU) or infinity (of a mask), and those that the exact scores have too, are not rounding's.
    is_tied = (last == best[..., 1]) & (wanted[..., 0] != wanted[..., 1]) & (last != 0) & last.isfinite()
    share = float(is_tied.float().mean())
    return share * (share >= _LEAST_TIED)


def is_near_tie(scores: torch.Tensor, chosen: torch.Tensor, best: torch.Tensor, dim: Any) -> bool:
    """Return whether the exact scores of other choices are so near the best ones that it hardly matters. Waits for the device.

    Args:
        scores: the exact scores.
        chosen, best: the places that rounded scores and exact ones choose.
        dim: the dimension in which they choose; without a number, all scores have one choice.
    """
    if not isinstance(dim, int) or not scores.dim() or scores.shape[dim] < 2:
        return False
    rows = scores.movedim(dim, -1)
    places = (each.reshape(rows.shape[:-1])[..., None] for each in (chosen, best))
    taken, wanted = (rows.gather(-1, each)[..., 0] for each in places)
    # A mask's infinities are no spread.
    spread = rows.where(rows.isfinite(), torch.nan)
    deviation = (spread - spread.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    regret = ((wanted - taken).abs() / deviation)[wanted != taken]
    return bool(regret.numel()) and float(regret.mean()) < _LEAST_REGRET


def _distinct(table: torch.Tensor) -> torch.Tensor:
    """Return the distinct values of a sorted table; of several, of the first."""
    first = table.reshape(-1, table.shape[-1])[0]
    return torch.cat((first[:1], first[1:][first.diff() != 0]))
