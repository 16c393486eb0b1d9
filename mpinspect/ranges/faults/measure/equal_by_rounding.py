"""An observer that finds values made equal by rounding to 16 bits: neighbouring positions, and scores at the edge of a top k."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch

from mpinspect.ranges.capture.graph import graph
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call, Observer
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.chosen_scores import CHOOSING, choice, tied
from mpinspect.ranges.faults.measure.module_spans import ModuleSpans
from mpinspect.ranges.faults.measure.rounded_numbers import FIRST_LOST
from mpinspect.ranges.faults.measure.rounded_positions import angles_of_rounded, collapsed, repeating
from mpinspect.ranges.faults.measure.singularities import is_packed
from mpinspect.ranges.records import Positions, Record, Ties

_DTYPES = tuple(FIRST_LOST)
#: Minimum number of pairs above FIRST_LOST that rounding must make equal, to rule out coincidence.
_FEWEST_PAIRS = 4
#: Maximum number of elements of a compared tensor, and of scores stored until backward.
_MOST_ELEMENTS, _MOST_SCORES = 1 << 24, 1 << 20
#: Maximum sizes of a tensor of integers and of a table that are compared, and maximum number of each in a step.
_MOST_NUMBERS, _MOST_ANGLES, _MOST_KEPT = 1 << 12, 1 << 18, 16
#: Maximum number of graph nodes searched for tables and choices.
_MOST_NODES = 20_000
#: Maximum number of records of one kind.
_MOST_RECORDS = 3
#: Nodes that preserve the order of scores.
_KEEPING_ORDER = ("Softmax", "Sigmoid", "ToCopy", "View", "UnsafeView", "ReshapeAlias")
#: Minimum share of rows with ties for a record.
_LEAST_TIED = 0.01
#: Returns a module's name, which is searched for only if it is recorded; None if it is uncertain.
Where = Callable[[], str | None]


#: Minimum length of rows of non-decreasing numbers that count as positions.
_FEWEST_IN_ROW = 8


class EqualByRounding(Observer):
    """Compares, in measured steps, tensors that need no gradient and the scores of each top k.

    Works on the CPU only: comparing would wait for a device, so tables and scores on one are left out.

    Args:
        clock: the run's step clock.
        recording: receives the measurements.
    """

    def __init__(self, clock: StepClock, recording: Recording) -> None:
        self._clock, self._recording = clock, recording
        self._records: dict[type[Record], int] = {Positions: 0, Ties: 0}
        #: Modules' 16-bit outputs with the module's name, by the graph node that made them; stored until backward is called.
        self._scores: dict[Any, tuple[str, torch.Tensor]] = {}
        #: The integer arguments of modules, and small tables that need no gradient; stored until backward is called.
        self._numbers: dict[int, torch.Tensor] = {}
        self._tables: dict[tuple[Any, ...], tuple[Where, torch.Tensor]] = {}
        self._spans = ModuleSpans()
        #: The first 16-bit dtype of a module's output; how many elements this step may still compare; the factors compared so
        #: far.
        self._dtype: torch.dtype | None = None
        self._left = 0
        self._compared: set[tuple[Any, ...]] = set()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self._clock.measured and min(self._records.values()) < _MOST_RECORDS
        self._left = _MOST_ELEMENTS
        self._forget()

    @torch.no_grad()
    def called(self, call: Call) -> None:
        """Compare a call's inputs and outputs that need no gradient; store the tensors that ``backward_called`` compares."""
        if call.recomputed or not all(tensor.is_cpu for tensor in (*call.outputs, *call.inputs())):
            return
        path = call.layer.path
        where = partial(str, path)
        for tensor in (*call.outputs, *call.inputs()):
            if not tensor.requires_grad and is_plain(tensor):
                self._compare(where, tensor)
                self._keep_table(where, tensor)
        for tensor in call.inputs():
            if tensor.dtype in _DTYPES and is_plain(tensor) and _may_be_positions(tensor):
                self._compare_whole(path, tensor)
        for tensor in call.whole_numbers():
            if 1 < tensor.numel() <= _MOST_NUMBERS and len(self._numbers) < _MOST_KEPT:
                self._numbers[id(tensor)] = tensor
        for tensor in call.outputs:
            if tensor.dtype in _DTYPES and self._dtype is None:
                self._dtype = tensor.dtype
            if tensor.grad_fn is not None and tensor.dtype in _DTYPES and tensor.numel() <= _MOST_SCORES:
                self._scores[tensor.grad_fn] = (path, tensor.detach())
        self._spans.remember(call)

    @torch.no_grad()
    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Search the graph of the losses for constant factors and for choices of the largest scores."""
        if not all(loss.is_cpu for loss in losses):
            return
        nodes = graph([loss.grad_fn for loss in losses], _MOST_NODES)
        for node in reversed(nodes):
            name = node.name()
            if name not in CHOOSING or is_packed(node):
                continue
            where = partial(self._spans.module_of, node, nodes)
            # A saved tensor that the script has changed since can't be read.
            with suppress(RuntimeError):
                if name == "MulBackward0":
                    self._compare_factor(where, node)
                if self._records[Ties] < _MOST_RECORDS:
                    self._compare_scores(where, node)
        self._compare_angles()
        self._forget()

    def end_step(self, step: int, sampled: bool) -> None:
        """Discard the stored nodes, which are left after a step without a backward."""
        self._forget()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        for kept in (self._scores, self._numbers, self._tables, self._spans, self._compared):
            kept.clear()

    def _compare(self, where: Where, tensor: torch.Tensor) -> None:
        """Record a table whose neighbouring rows are equal exactly where consecutive whole numbers are in 16 bits."""
        if self._records[Positions] >= _MOST_RECORDS or not 0 < tensor.numel() <= _MOST_ELEMENTS:
            return
        dims = repeating(tensor)
        cost = len(dims) * tensor.numel()
        if cost > self._left:
            return
        self._left -= cost
        for dim in dims:
            length = tensor.shape[dim]
            for dtype, first_lost in FIRST_LOST.items():
                if length <= first_lost + 2 * _FEWEST_PAIRS:
                    continue
                rows = tensor.movedim(dim, 0).reshape(length, -1)
                equal = (rows[1:] == rows[:-1]).all(1).cpu()
                if bool((equal == _equal_neighbours(length, dtype)).all()):
                    self._tell_positions(where() or "", length, dtype, True)
                    return
        found = collapsed(tensor, dims)
        if found is not None:
            dtype = tensor.dtype if tensor.dtype in _DTYPES else self._dtype or _DTYPES[0]
            # The format's numbers are 2 apart from its first lost number on, and 4 apart from twice that number on.
            least = found.spacing * (FIRST_LOST[dtype] - 1) // 2
            self._record(
                Positions(
                    name=where() or "",
                    step=self._clock.step,
                    text=dtype_name(dtype),
                    least=least,
                    before=found.before,
                    after=found.after,
                    is_table=True,
                )
            )

    def _compare_factor(self, where: Where, node: Any) -> None:
        """Compare the factor of a product that needs no gradient, such as a table of cosines."""
        constant = [place for place, (following, _) in enumerate(node.next_functions) if following is None]
        if len(constant) != 1:
            return
        factor = node._saved_other if constant[0] else node._saved_self
        if isinstance(factor, torch.Tensor) and factor.is_complex():
            factor = torch.view_as_real(factor.resolve_conj())
        if is_plain(factor) and factor.dim() > 1:
            key = factor.data_ptr(), tuple(factor.shape), factor.stride()
            if key not in self._compared:
                self._compared.add(key)
                self._compare(where, factor)
                self._keep_table(where, factor)

    def _keep_table(self, where: Where, tensor: torch.Tensor) -> None:
        key = tensor.data_ptr(), tuple(tensor.shape)
        if tensor.dim() > 1 and tensor.numel() <= _MOST_ANGLES and len(self._tables) < _MOST_KEPT:
            self._tables.setdefault(key, (where, tensor))

    def _compare_whole(self, module: str, tensor: torch.Tensor) -> None:
        """Record a 16-bit tensor of whole numbers, one per row of a batch, if some are too large to be exact in its format."""
        largest, first_lost = float(tensor.max()), FIRST_LOST[tensor.dtype]
        if (
            self._records[Positions] < _MOST_RECORDS
            and first_lost + 2 * _FEWEST_PAIRS <= largest < _MOST_ELEMENTS
            and float(tensor.min()) >= 0
            and bool((tensor == tensor.round()).all())
        ):
            self._tell_positions(module, int(largest) + 1, tensor.dtype, False)

    def _compare_angles(self) -> None:
        """Record a table of sines and cosines that were computed from rounded copies of a module's integers."""
        for numbers in self._numbers.values():
            largest = int(numbers.max())
            if not min(FIRST_LOST.values()) < largest < _MOST_ELEMENTS:
                continue
            shape = [length for length in numbers.shape if length > 1]
            for where, table in self._tables.values():
                if self._records[Positions] >= _MOST_RECORDS:
                    return
                if [length for length in table.shape[:-1] if length > 1] != shape:
                    continue
                dtype = angles_of_rounded(numbers, table)
                if dtype is not None:
                    self._tell_positions(where() or "", largest + 1, dtype, True)
                    return

    def _tell_positions(self, module: str, length: int, dtype: torch.dtype, is_table: bool) -> None:
        left = length - float(_equal_neighbours(length, dtype).sum())
        self._record(
            Positions(
                name=module,
                step=self._clock.step,
                text=dtype_name(dtype),
                largest=length - 1,
                before=length,
                after=left,
                is_table=is_table,
            )
        )

    def _compare_scores(self, where: Where, node: Any) -> None:
        """Record a choice if in enough rows the last chosen score ties with the first score not chosen."""
        dtype = node._input_metadata[0].dtype
        module, scores = self._scores_of(node) if dtype in _DTYPES else self._cast_scores_of(node)
        chosen = choice(node) if scores is not None else None
        if chosen is None or not is_plain(scores):
            return
        dtype = dtype if dtype in _DTYPES else scores.dtype
        share, k = tied(scores.to(dtype), chosen)
        if share < _LEAST_TIED:
            return
        module = where() if module is None else module
        # A choice in another model's code belongs to that model's record.
        if module is not None:
            self._record(
                Ties(
                    name=module,
                    step=self._clock.step,
                    text=dtype_name(dtype),
                    fraction=share,
                    k=k,
                    scores=scores.shape[chosen.dim],
                )
            )

    def _cast_scores_of(self, node: Any) -> tuple[str | None, torch.Tensor | None]:
        """Return a module and its 16-bit output if a choice's wider scores are that output, only cast and normalised.

        A softmax or a sigmoid preserves the order of the scores, and their ties.
        """
        for _ in range(8):
            node = _only_edge(node)
            if node is None or node in self._scores or not node.name().startswith(_KEEPING_ORDER):
                break
        return self._scores.get(node, (None, None))

    def _scores_of(self, node: Any) -> tuple[str | None, torch.Tensor | None]:
        """Return the module that made the scores of a choice (None: unknown), and the scores (None if no longer available)."""
        scores: torch.Tensor | None = node._saved_self if node.name() == "GatherBackward0" else None
        for _ in range(8):
            node = _only_edge(node)
            if node is None:
                break
            if node in self._scores:
                module, made = self._scores[node]
                return module, made if scores is None else scores
            if scores is None:
                name = node.name()
                if name.startswith(("Softmax", "Sigmoid")) and not is_packed(node):
                    scores = node._saved_result
                elif not name.startswith(("ToCopy", "Add")):
                    break
        return None, scores

    def _record(self, found: Record) -> None:
        self._records[type(found)] += 1
        self._recording.record(found)


def _only_edge(node: Any) -> Any:
    """Return the node that receives a node's gradient; None unless there is exactly one."""
    edges = [following for following, _ in node.next_functions if following is not None]
    return edges[0] if len(edges) == 1 else None


@lru_cache(maxsize=8)
def _equal_neighbours(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return for each of 1, .., length - 1 whether it equals the number before it when both are rounded to ``dtype``."""
    rounded = torch.arange(length, device="cpu").to(dtype)
    return rounded[1:] == rounded[:-1]


def _may_be_positions(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds one number for each row of a batch, or rows of numbers that never fall."""
    if tensor.numel() == max(tensor.shape, default=0) > 1:
        return True
    if tensor.dim() < 2 or tensor.shape[-1] < _FEWEST_IN_ROW or tensor.requires_grad or tensor.numel() > _MOST_ELEMENTS:
        return False
    return bool((tensor[..., 1:] >= tensor[..., :-1]).all()) and bool((tensor[..., -1] >= tensor[..., 0]).any())
