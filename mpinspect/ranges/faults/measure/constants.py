"""The second computation of constants that a script makes before its first step."""

from __future__ import annotations

import torch

from mpinspect.ranges.faults.measure.second import CASTS, Pending, SecondComputation


class Constants(SecondComputation):
    """Computes constants twice. A cast to -inf alone is taken for a mask, which is meant to be that small."""

    def _compare_broken(self, pending: Pending, value: torch.Tensor, twin: torch.Tensor, local: torch.Tensor) -> None:
        is_mask = pending.func.overloadpacket in CASTS and not bool((value.isnan() | (value == torch.inf)).any())
        if not is_mask:
            super()._compare_broken(pending, value, twin, local)
