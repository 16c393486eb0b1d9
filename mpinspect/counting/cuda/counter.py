"""Counts CUDA tensors into rows, and finds their largest magnitudes, with ``kernels.cu``. No function waits for the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting.bits import BINARY32, BINARY64, DEVICE_CHUNK, empty_row, encoding_of, merge_rows
from mpinspect.counting.cuda import driver
from mpinspect.counting.cuda.compiling import CODES
from mpinspect.counting.cuda.driver import ENTRIES, table_layout
from mpinspect.counting.layout import NO_MINIMUM, repeated
from mpinspect.counting.pieces import COUNTABLE, fills_its_memory, flat_bits

#: The real dtypes that the kernels support.
DTYPES = COUNTABLE
#: The usual dtypes of gradients; ``warm_up`` compiles their kernels.
_USUAL = (torch.float32, torch.float16, torch.bfloat16)
#: Bytes in a tile: TILE vectors of 16 bytes in ``kernels.cu``.
_TILE_BYTES = 256 * 4 * 16
#: The most values in an entry; with more, 32-bit counters could overflow.
_MOST_IN_AN_ENTRY = 1 << 30


class Counted(NamedTuple):
    """Values to count, and the row that receives their counts.

    Args:
        values: a tensor of one of DTYPES, dense in any order of its dimensions (``pieces.fills_its_memory``).
        row: contiguous int64 tensor of the dtype's layout on the same device, holding earlier counts or an ``empty_row``.
    """

    values: torch.Tensor
    row: torch.Tensor


#: The address and number of a tensor's values, and the address of its row or slot; a plain tuple, since a step has hundreds.
_Entry = tuple[int, int, int]


# -- counting ---------------------------------------------------------------------------------------------------------


def count(values: torch.Tensor) -> torch.Tensor:
    """Return the row of a strided tensor of one of DTYPES, with any size and strides; does not wait for the GPU.

    Returns:
        int64 on the tensor's device, see ``mpinspect.counting.layout``: WIDE for float64, else NARROW.
    """
    row = empty_row(encoding_of(values.dtype), values.device)
    add(values, row)
    return row


def add(values: torch.Tensor, row: torch.Tensor) -> None:
    """Add the counts of a strided tensor to a row (see ``Counted``). Does not wait for the GPU.

    Memory with gaps is copied a few million values at a time; expanded dimensions are counted once and multiplied.
    """
    if values.is_contiguous() or fills_its_memory(values):
        add_many([Counted(values, row)])
        return
    pieces, times = flat_bits(values, DEVICE_CHUNK)
    into = row if times == 1 else empty_row(encoding_of(values.dtype), values.device)
    for piece in pieces:
        # A one-dimensional piece may still have gaps.
        add_many([Counted(piece.contiguous().view(values.dtype), into)])
    if times != 1:
        row.copy_(merge_rows([row, repeated(into, times)]))


def add_many(counted: Sequence[Counted]) -> None:
    """Add the counts of many tensors on one device to their rows: a launch per dtype and ENTRIES tensors. Does not wait."""
    by_dtype: defaultdict[torch.dtype, list[_Entry]] = defaultdict(list)
    for values, row in counted:
        numel = values.numel()
        if numel:
            by_dtype[values.dtype].append((values.data_ptr(), numel, row.data_ptr()))
    for dtype, entries in by_dtype.items():
        _launch("count", dtype, entries, counted[0].row.device)


# -- largest magnitudes -----------------------------------------------------------------------------------------------


def largest_many(
    tensors: Sequence[torch.Tensor], slots: Sequence[int], broken: torch.Tensor, only_if_broken: bool = False
) -> None:
    """Raise each tensor's slot to its largest magnitude: a launch per dtype and ENTRIES tensors. Does not wait.

    Args:
        tensors: dense tensors of any of DTYPES on the device of ``broken``; an empty one leaves its slot as it is.
        slots: for each tensor the address of 8 bytes on the device, 0 at first; read with ``largest_of_slots``.
        broken: int64 with one element; becomes 1 if any value is infinite or NaN.
        only_if_broken: do nothing if ``broken`` is 0; the device decides.
    """
    by_dtype: defaultdict[torch.dtype, list[_Entry]] = defaultdict(list)
    for tensor, slot in zip(tensors, slots, strict=True):
        numel = tensor.numel()
        if numel:
            by_dtype[tensor.dtype].append((tensor.data_ptr(), numel, slot))
    for dtype, entries in by_dtype.items():
        _launch("largest", dtype, entries, broken.device, broken.data_ptr(), only_if_broken)


def largest_of_slots(slots: npt.NDArray[Any], is_double: bool | npt.NDArray[np.bool_]) -> list[float | None]:
    """Return the largest magnitudes that slots hold.

    Args:
        slots: 64-bit integers copied from the device.
        is_double: whether the tensors were float64; one answer, or one per slot.

    Returns:
        None where no value was read; NaN if any value was NaN; infinity if any was positive infinity, minus infinity if all
        infinite values were negative; else the largest |x|.
    """
    slots = np.ascontiguousarray(slots).view(np.uint64)
    encoded = slots - np.uint64(1)
    magnitude = encoded >> np.uint64(1)
    # Subnormals of float32 become normal float64 by integers and an exact product, whatever the flush-denormals mode.
    normal = (magnitude << np.uint64(29)) + np.uint64((BINARY64.bias - BINARY32.bias) << 52)
    special = (magnitude << np.uint64(29)) | np.uint64(NO_MINIMUM)
    bits = np.where(magnitude < BINARY32.infinity, normal, special)
    single = np.where(magnitude < BINARY32.min_normal, magnitude * 2.0**-149, bits.view(np.float64))
    values = np.where(is_double, magnitude.view(np.float64), single)
    is_negative = np.isinf(values) & (encoded & np.uint64(1) == 0)
    found: list[float] = np.where(is_negative, -values, values).tolist()
    return [value if slot else None for value, slot in zip(found, slots.tolist(), strict=True)]


# -- launching --------------------------------------------------------------------------------------------------------


def warm_up(devices: Iterable[torch.device]) -> None:
    """Compile the kernels for the usual dtypes: a third of a second for each, in every process.

    Raises:
        Exception: any exception of compiling, loading or launching.
    """
    for device in devices:
        for dtype in _USUAL:
            values = torch.ones(1, dtype=dtype, device=device)
            slot = torch.zeros(2, dtype=torch.int64, device=device)
            count(values)
            largest_many([values], [slot.data_ptr()], slot[1:])


def _launch(
    way: str,
    dtype: torch.dtype,
    entries: list[_Entry],
    device: torch.device,
    broken: int = 0,
    only_if_broken: bool = False,
) -> None:
    kind, codes, size = _KINDS[dtype]
    per_tile = _TILE_BYTES // size
    if any(numel > _MOST_IN_AN_ENTRY for _, numel, _ in entries):
        entries = [part for entry in entries for part in _parts(entry, size)]
    gpu = driver.gpu_of(device)
    for begin in range(0, len(entries), ENTRIES):
        part = entries[begin : begin + ENTRIES]
        numbers = [broken, len(part), 0, codes, only_if_broken]
        tiles = 0
        for values, numel, target in part:
            numbers += (values, target, numel, tiles)
            tiles += -(-numel // per_tile)
        numbers[2] = tiles
        gpu.launch(way, kind, tiles, table_layout(len(part)), numbers)


def _parts(entry: _Entry, size: int) -> list[_Entry]:
    """Split an entry with too many values."""
    values, numel, target = entry
    return [
        (values + begin * size, min(_MOST_IN_AN_ENTRY, numel - begin), target)
        for begin in range(0, numel, _MOST_IN_AN_ENTRY)
    ]


def _kinds() -> dict[torch.dtype, tuple[str, int, int]]:
    """Return by dtype the end of its kernels' names, its row of the codes' magnitudes, and the size of a value."""
    found = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[dtype] = ("codes", CODES.index(name), 1) if dtype.itemsize == 1 else (name, 0, dtype.itemsize)
    return found


_KINDS = _kinds()
