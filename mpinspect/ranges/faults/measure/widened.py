"""Computes chosen operators of a step in FP32, within the run: where they end, their results are rounded to the run's dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from mpinspect.ranges.faults.measure.operands import Pending
from mpinspect.ranges.faults.measure.recomputation import Recomputation


class Widened(Recomputation):
    """Replaces the results of chosen operators, in forward and backward, by those of their FP32 twins.

    A twin stays in FP32 as long as only chosen operators read it; others read the rounded values.

    Args:
        module: as of ``Recomputation``.
        chosen: returns whether the operator of this name, in the module of this dotted path, is computed in FP32.
    """

    def __init__(self, module: Callable[[], str], chosen: Callable[[str, str], bool]) -> None:
        super().__init__(module)
        self._chosen = chosen
        #: The number of calls by module and operator.
        self.calls: Counter[tuple[str, str]] = Counter()

    @property
    def is_whole(self) -> bool:
        """Whether neither time nor memory ended the computation early."""
        return not self._ended_by

    def _is_chosen(self, func: Any) -> bool:
        node, name = torch._C._current_autograd_node(), func.overloadpacket.__name__
        if node is None:
            path = self._modules[_get_sequence_nr() - 1] = self._module()
        else:
            path = self._modules.get(node._sequence_nr(), "")
        self.calls[path, name] += 1
        return self._chosen(path, name)

    def _keep(self, value: torch.Tensor, twin: torch.Tensor, is_cast: bool, is_ours: bool) -> None:
        value.copy_(twin)
        super()._keep(value, twin, is_cast, is_ours)

    def _keep_cast(self, pending: Pending, value: torch.Tensor) -> bool:
        return False

    def _keep_decision(self, pending: Pending, value: torch.Tensor) -> None:
        args, kwargs = pending.arguments
        value.copy_(pending.func(*args, **kwargs))
        self._forget([value])
