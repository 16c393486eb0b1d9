"""Replaces the CUDA kernels by CPU functions with the same results, to test code that reads tensors late without a GPU.

``pytest -p host_kernels`` runs any tests this way.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mpinspect.counting import reference
from mpinspect.counting.bits import merge_rows
from mpinspect.counting.cuda import available
from mpinspect.counting.pieces import COUNTABLE
from mpinspect.ranges.capture import device_magnitudes
from mpinspect.ranges.faults.measure.examination import Examination

DTYPES = COUNTABLE


#: Counters: tensors read; tensors skipped because no value was non-finite; bytes read; launches.
READ, SPARED, BYTES, LAUNCHES = "read", "spared", "bytes", "launches"
calls: Counter[str] = Counter()


def largest_many(tensors: list[torch.Tensor], slots: list[int], broken: torch.Tensor, only_if_broken: bool) -> None:
    calls[LAUNCHES] += len({tensor.dtype for tensor in tensors})
    if only_if_broken and not broken:
        calls[SPARED] += len(tensors)
        return
    calls[READ] += len(tensors)
    calls[BYTES] += sum(tensor.nbytes for tensor in tensors)
    for tensor, slot in zip(tensors, slots, strict=True):
        wide = tensor if tensor.dtype is torch.float64 else tensor.float()
        bits = wide.reshape(-1).numpy().view(f"u{wide.itemsize}").astype(np.uint64)
        sign = np.uint64(1 << (8 * wide.itemsize - 1))
        infinity = np.uint64(0x7FF << 52 if wide.itemsize == 8 else 0xFF << 23)
        keys = (bits & ~sign) * np.uint64(2) + (bits == infinity)
        ctypes.c_uint64.from_address(slot).value = 1 + int(keys.max())
        if not tensor.isfinite().all():
            broken.fill_(1)


def largest_of_slots(slots: npt.NDArray[np.uint64], is_double: bool) -> list[float | None]:
    keys = slots - np.uint64(1)
    magnitudes = keys >> np.uint64(1)
    found = magnitudes.view(np.float64) if is_double else magnitudes.astype(np.uint32).view(np.float32).astype(float)
    found = np.where((found == math.inf) & ((keys & np.uint64(1)) == 0), -math.inf, found)
    return [value if slot else None for value, slot in zip(found.tolist(), slots.tolist(), strict=True)]


def add_many(counted: list[Counted]) -> None:
    for each in counted:
        add(*each)


def add(values: torch.Tensor, row: torch.Tensor) -> None:
    row.copy_(merge_rows([row, reference.count(values)]))


class Counted(NamedTuple):
    values: torch.Tensor
    row: torch.Tensor


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device whose kernels read tensors asynchronously."""
    monkeypatch.setattr(available, "counter", lambda: sys.modules[__name__])
    monkeypatch.setattr(device_magnitudes, "is_on_device", lambda tensor: True)
    begin_step = Examination.begin_step

    def as_on_a_device(self: Examination, sampled: bool, watched: bool) -> None:
        begin_step(self, sampled, watched)
        self.at_work &= self._may_wait or self._clock.measured

    monkeypatch.setattr(Examination, "begin_step", as_on_a_device)
    calls.clear()


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install for every test, when this module is loaded as a plugin."""
    install(monkeypatch)
