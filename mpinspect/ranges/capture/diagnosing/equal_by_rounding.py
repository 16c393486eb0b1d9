"""An observer that finds values made equal by rounding to 16 bits: neighbouring positions, and scores at the edge of a top k."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from mpinspect.ranges.capture.diagnosing.singularities import graph, saved_dim
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Call, Observer
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.session import Measurement

#: The 16-bit formats and the first whole number that each can't represent.
_FIRST_LOST = ((torch.bfloat16, 257), (torch.float16, 2049))
_DTYPES = tuple(dtype for dtype, _ in _FIRST_LOST)
#: The number of neighbours above that number that rounding must make equal, to rule out coincidence.
_FEWEST_PAIRS = 4
#: The most elements of a tensor that is compared, and of scores that are kept until backward.
_MOST_ELEMENTS, _MOST_SCORES = 1 << 24, 1 << 20
#: The most nodes of the graph that are searched for a top k.
_MOST_NODES = 20_000
#: The most records of one kind.
_MOST_RECORDS = 3
#: The least share of rows with ties that is recorded.
_LEAST_TIED = 0.01


class EqualByRounding(Observer):
    """Compares, in measured steps, tensors that need no gradient and the scores of each top k. Waits for the device.

    Args:
        clock: the run's step clock.
        recording: receives the measurements.
    """

    def __init__(self, clock: StepClock, recording: Recording) -> None:
        self._clock, self._recording = clock, recording
        self._told: dict[str, int] = {"positions": 0, "ties": 0}
        #: Modules' 16-bit outputs with the module's name, by the graph node that made them; kept until backward is called.
        self._scores: dict[Any, tuple[str, torch.Tensor]] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self._clock.measured and min(self._told.values()) < _MOST_RECORDS
        self._scores.clear()

    @torch.no_grad()
    def called(self, call: Call) -> None:
        """Compare a call's inputs and outputs that need no gradient; keep its small outputs, possibly the scores of a top k."""
        if call.recomputed:
            return
        for tensor in (*call.outputs, *call.inputs()):
            if not tensor.requires_grad and is_plain(tensor):
                self._compare(call.layer.path, tensor)
        for tensor in call.inputs():
            if tensor.dtype in _DTYPES and tensor.numel() == max(tensor.shape, default=0) > 1 and is_plain(tensor):
                self._compare_whole(call.layer.path, tensor)
        for tensor in call.outputs:
            if tensor.grad_fn is not None and tensor.dtype in _DTYPES and tensor.numel() <= _MOST_SCORES:
                self._scores[tensor.grad_fn] = (call.layer.path, tensor.detach())

    @torch.no_grad()
    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Search the graph of the losses for constant factors and for top k."""
        for node in graph([loss.grad_fn for loss in losses], _MOST_NODES):
            name = node.name()
            if name == "MulBackward0" and node._saved_self is None and is_plain(node._saved_other):
                self._compare("", node._saved_other)
            elif name == "TopkBackward0":
                self._compare_scores(node)
        self._scores.clear()

    def end_step(self, step: int, sampled: bool) -> None:
        """Discard the scores, which are left over in a step without a backward."""
        self._scores.clear()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _compare(self, module: str, tensor: torch.Tensor) -> None:
        """Record a table whose rows equal their neighbours exactly where whole numbers rounded to 16 bits do."""
        if self._told["positions"] >= _MOST_RECORDS or not 0 < tensor.numel() <= _MOST_ELEMENTS:
            return
        for dim, length in enumerate(tensor.shape):
            for dtype, first_lost in _FIRST_LOST:
                if length <= first_lost + 2 * _FEWEST_PAIRS:
                    continue
                rows = tensor.movedim(dim, 0).reshape(length, -1)
                equal = (rows[1:] == rows[:-1]).all(1).cpu()
                if bool((equal == _equal_neighbours(length, dtype)).all()):
                    self._tell_positions(module, length, dtype, True)
                    return

    def _compare_whole(self, module: str, tensor: torch.Tensor) -> None:
        """Record a 16-bit tensor of whole numbers, one per row of a batch, if some are too large to be exact in its format."""
        largest, first_lost = float(tensor.max()), dict(_FIRST_LOST)[tensor.dtype]
        if (
            self._told["positions"] < _MOST_RECORDS
            and first_lost + 2 * _FEWEST_PAIRS <= largest < _MOST_ELEMENTS
            and float(tensor.min()) >= 0
            and bool((tensor == tensor.round()).all())
        ):
            self._tell_positions(module, int(largest) + 1, tensor.dtype, False)

    def _tell_positions(self, module: str, length: int, dtype: torch.dtype, is_table: bool) -> None:
        left = length - float(_equal_neighbours(length, dtype).sum())
        figures = {"largest": length - 1.0, "before": float(length), "after": left, "is_table": float(is_table)}
        self._tell("positions", module, figures, dtype)

    def _compare_scores(self, node: Any) -> None:
        """Record a top k if in enough rows the last chosen score ties with the first score not chosen."""
        dtype = node._input_metadata[0].dtype
        if self._told["ties"] >= _MOST_RECORDS or dtype not in _DTYPES:
            return
        module, scores = self._scores_of(node)
        if not is_plain(scores) or tuple(scores.shape) != tuple(node._saved_self_sym_sizes):
            return
        dim = saved_dim(node)
        k = node._saved_indices.shape[dim]
        if k >= scores.shape[dim]:
            return
        ordered = scores.to(dtype).movedim(dim, -1).sort(dim=-1, descending=True).values
        tied = float((ordered[..., k - 1] == ordered[..., k]).double().mean())
        if tied >= _LEAST_TIED:
            self._tell("ties", module, {"fraction": tied, "k": float(k), "scores": float(scores.shape[dim])}, dtype)

    def _scores_of(self, node: Any) -> tuple[str, torch.Tensor | None]:
        """Return the module that made the scores of a top k ("" if unknown), and the scores (None if no longer available)."""
        scores: torch.Tensor | None = None
        for _ in range(8):
            node = node.next_functions[0][0] if node.next_functions else None
            if node is None:
                break
            if node in self._scores:
                module, made = self._scores[node]
                return module, made if scores is None else scores
            if scores is None:
                if node.name().startswith(("Softmax", "Sigmoid")):
                    scores = node._saved_result
                elif not node.name().startswith("ToCopy"):
                    break
        return "", scores

    def _tell(self, what: str, module: str, figures: dict[str, float], dtype: torch.dtype) -> None:
        self._told[what] += 1
        self._recording.measured(Measurement(what, module, self._clock.step, figures, text=dtype_name(dtype)))


@lru_cache(maxsize=8)
def _equal_neighbours(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return for each of 1, .., length - 1 whether it equals the number before it when both are rounded to ``dtype``."""
    rounded = torch.arange(length).to(dtype)
    return rounded[1:] == rounded[:-1]
