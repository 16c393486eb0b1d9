"""In place of the kernels of a CUDA device: the same results, of CPU tensors, so that what reads a device's tensors late is tested here.

``pytest -p host_kernels`` runs any tests so.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mpinspect.counting.cuda import available
from mpinspect.counting.pieces import COUNTABLE
from mpinspect.ranges.capture import device_magnitudes

DTYPES = COUNTABLE


def largest_many(tensors: list[torch.Tensor], slots: torch.Tensor, places: list[int], only_if_broken: bool) -> None:
    if only_if_broken and not slots[0]:
        return
    for tensor, place in zip(tensors, places, strict=True):
        values = tensor.double().abs().reshape(-1)
        key = int(values.max().view(torch.int64)) if not values.isnan().any() else int(torch.tensor(math.nan).double().view(torch.int64))
        is_positive = bool((tensor == math.inf).any()) and not values.isnan().any()
        slots.numpy().view(np.uint64)[place] = 1 + 2 * (key & 0x7FFF_FFFF_FFFF_FFFF) + is_positive
        if not tensor.isfinite().all():
            slots[0] = 1


def largest_of_slots(slots: npt.NDArray[np.uint64], is_double: bool) -> list[float]:
    found = ((slots - np.uint64(1)) >> np.uint64(1)).view(np.float64)
    negative = ((slots - np.uint64(1)) & np.uint64(1)) == 0
    return [-value if value == math.inf and minus else value for value, minus in zip(found.tolist(), negative.tolist(), strict=True)]


@pytest.fixture(autouse=True)
def _reading_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(available, "counter", lambda: sys.modules[__name__])
    monkeypatch.setattr(device_magnitudes, "is_on_device", lambda tensor: True)
