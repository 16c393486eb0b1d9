"""Counts CUDA tensors into rows with the Triton kernels of ``kernels``. No function here waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from mpinspect.counting.bits import BINARY32, BINARY64, DEVICE_CHUNK, Encoding, empty_row, merge_rows
from mpinspect.counting.cuda import kernels
from mpinspect.counting.layout import HEADER, MIN_BITS
from mpinspect.counting.pieces import COUNTABLE, flat_bits
from mpinspect.counting.reference import float32_bits

#: The real dtypes that the kernels support.
DTYPES = COUNTABLE
#: The usual dtypes of gradients, for which ``warm_up`` compiles the kernels.
_USUAL = (torch.float32, torch.float16, torch.bfloat16)

#: Lanes of a program: one warp, so that summing over lanes needs no shared memory and no barriers between warps.
_LANES = 32
# The largest number of values in a program: sums over its lanes have 15 bits.
_MOST_IN_A_PROGRAM = 0x7FFF
#: The smallest number of full tiles per program: summing over its lanes costs as much as three tiles.
_FEWEST_TILES = 8
#: The intended number of programs per launch: a GPU with 132 multiprocessors runs about 2000 at a time.
_PROGRAMS = 4096
#: Tiles per program in a launch shared by many tensors.
_TILES_OF_MANY = 16
#: The largest number of elements in one launch: the kernels' offsets have 32 bits.
_MOST_IN_A_LAUNCH = 1 << 30
# The kernels have no floating-point arithmetic to fuse; setting the option avoids Triton's warning about its default.
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


class Counted(NamedTuple):
    """Values to count, and the row to which their counts are added.

    Args:
        values: a dense tensor of one of DTYPES.
        row: contiguous int64 tensor of the dtype's layout on the same device, holding earlier counts or an ``empty_row``.
    """

    values: torch.Tensor
    row: torch.Tensor


def encoding_of(dtype: torch.dtype) -> Encoding:
    """Return the encoding whose row holds values of this dtype."""
    return BINARY64 if dtype == torch.float64 else BINARY32


def count(values: torch.Tensor) -> torch.Tensor:
    """Return the row of a strided tensor of one of DTYPES, with any size, strides and device; does not wait for the GPU.

    Returns:
        int64 on the tensor's device, see ``mpinspect.counting.layout``: WIDE for float64, else NARROW.
    """
    row = empty_row(encoding_of(values.dtype), values.device)
    add(values, row)
    return row


def add(values: torch.Tensor, row: torch.Tensor) -> None:
    """Add the counts of a strided tensor to a row (see ``Counted``). Does not wait for the GPU.

    Non-contiguous memory is copied a few million values at a time; expanded dimensions are counted once and multiplied.
    """
    pieces, times = flat_bits(values, _MOST_IN_A_LAUNCH if values.is_contiguous() else DEVICE_CHUNK)
    into = row if times == 1 else empty_row(encoding_of(values.dtype), values.device)
    with _on(row.device):
        for piece in pieces:
            if piece.numel():
                # A one-dimensional piece may still be non-contiguous.
                _launch_one(piece.contiguous(), into, values.dtype)
    if times != 1:
        into[:MIN_BITS] *= times
        into[HEADER:] *= times
        _merge(into, row)


def add_many(counted: Sequence[Counted]) -> None:
    """Add the counts of many dense tensors on one device to their rows, with one launch per dtype; does not wait."""
    by_dtype: dict[torch.dtype, list[Counted]] = {}
    for each in counted:
        if each.values.numel():
            by_dtype.setdefault(each.values.dtype, []).append(each)
    for dtype, group in by_dtype.items():
        with _on(group[0].row.device):
            _launch_many(group, dtype)


def warm_up(devices: Iterable[torch.device]) -> None:
    """Compile the kernels for the usual dtypes: some seconds per dtype, once per machine (Triton caches them on disk).

    Raises:
        Exception: any exception of Triton or its compilers.
    """
    for device in devices:
        for dtype in _USUAL:
            values = torch.ones(1, dtype=dtype, device=device)
            row = count(values)
            add_many([Counted(values, row)])


def _launch_one(bits: torch.Tensor, row: torch.Tensor, dtype: torch.dtype) -> None:
    numel = bits.numel()
    tile = kernels.VALUES.value * _LANES
    tiles = min(max(numel // (_PROGRAMS * tile), _FEWEST_TILES), _MOST_IN_A_PROGRAM // tile)
    share = tiles * tile
    grid = (-(-numel // share),)
    kernels.count_one[grid](bits, row, _codes(dtype, row), numel, share, *_constants(dtype), **_OPTIONS)


def _launch_many(group: list[Counted], dtype: torch.dtype) -> None:
    tile = kernels.VALUES.value * _LANES
    share = min(_TILES_OF_MANY, _MOST_IN_A_PROGRAM // tile) * tile
    numels = np.array([each.values.numel() for each in group], np.int64)
    programs = -(-numels // share)
    entries = np.empty((len(group), 4), np.int64)
    entries[:, 0] = [each.values.data_ptr() for each in group]
    entries[:, 1] = numels
    entries[:, 2] = [each.row.data_ptr() for each in group]
    entries[:, 3] = np.cumsum(programs) - programs
    owners = np.repeat(np.arange(len(group), dtype=np.int64), programs)
    device = group[0].row.device
    table = _sent(np.concatenate((entries.reshape(-1), owners)), device)
    codes = _codes(dtype, group[0].row)
    kernels.count_many[(len(owners),)](table, table[entries.size :], codes, share, *_constants(dtype), **_OPTIONS)


def _sent(numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> torch.Tensor:
    """Copy the numbers to the device asynchronously through pinned memory, which torch reuses after the copy."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that makes ``device`` current, since Triton launches on the current device."""
    guard: AbstractContextManager[None] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return guard


def _constants(dtype: torch.dtype) -> tuple[str, int, int]:
    """Return the kernels' constants KIND, M and LANES."""
    kind = "codes" if dtype.itemsize == 1 else str(dtype).removeprefix("torch.")
    return kind, encoding_of(dtype).mantissa_bits, _LANES


def _codes(dtype: torch.dtype, row: torch.Tensor) -> torch.Tensor:
    """Return each code's magnitude bits for an 8-bit dtype; for others ``row``, as a placeholder that is not read."""
    return _magnitudes_of_codes(dtype, row.device) if dtype.itemsize == 1 else row


@cache
def _magnitudes_of_codes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        return float32_bits(codes, dtype) & BINARY32.magnitude_mask


def _merge(row: torch.Tensor, into: torch.Tensor) -> None:
    merged = merge_rows([into, row])
    into.copy_(merged)
