"""Loads compiled kernels onto a GPU and launches them through libcuda, without waiting or allocating torch memory."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from mpinspect.counting.cuda import compiling
from mpinspect.runtime.device import raw_stream

#: The most tensors in one launch, and the threads of a block: ENTRIES and THREADS of ``kernels.cu``.
ENTRIES, _THREADS = 168, 256
#: By kind: KEYS, the factor of COLUMNS in COPIES, and EXTRA of ``kernels.cu``.
_COUNTERS = {
    "float32": (768, 1.0, 3 * 23),
    "bfloat16": (512, 1.0, 3 * 23),
    "float16": (307, 1.0, 0),
    "float64": (6144, 1 / 8, 3 * 52),
    "codes": (256, 1.0, 0),
}
#: Shared memory for the extremes of a block's warps, for the magnitudes of the 256 codes, and CUDA's own part for a block.
_SCRATCH, _MAGNITUDES, _RESERVED = 128, 512, 1024
#: Two kinds of counters of 3 classes and 64 distances, and 2 more, in 16 copies each; and 484 without copies.
_BYTES_OF_BLOCKS = 4 * ((2 * 3 * 64 + 2) * 16 + 484)
#: The kernels that are compiled together, by the first half of their unit (``compiling.compiled``).
_TOGETHER = {"only": ("count", "largest"), "blocks": ("blocks",)}
# Values of libcuda's enumerations.
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_OF_MULTIPROCESSOR = 16, 75, 76, 81
_MOST_DYNAMIC_SHARED, _CARVEOUT = 8, 9


def shared_bytes(way: str, kind: str, columns: int) -> int:
    """Return the shared memory of a block of threads, as BYTES in ``kernels.cu`` and ``blocks.cu``.

    Args:
        way: the beginning of a kernel's name: count, largest or blocks.
        kind: its end, such as float32.
        columns: see ``compiling.compiled``.
    """
    if way == "blocks":
        return _BYTES_OF_BLOCKS
    if way == "largest":
        return _SCRATCH + (_MAGNITUDES if kind == "codes" else 0)
    keys, factor, extra = _COUNTERS[kind]
    return _SCRATCH + 4 * (int(keys * columns * factor) + extra)


@cache
def table_layout(entries: int) -> struct.Struct:
    """Return the layout of the first ``entries`` entries of Table in ``kernels.cu``."""
    return struct.Struct("=Q4I" + entries * "QQII")


#: The layout of Matrix in ``blocks.cu``.
MATRIX = struct.Struct("=QQqq5I4x")


@dataclass(frozen=True)
class _Kernel:
    """A function of a loaded module, and the number of its blocks that the GPU runs at a time."""

    function: ctypes.c_void_p
    shared_bytes: int
    most_blocks: int


class Gpu:
    """The kernels of one CUDA device; each kind is compiled and loaded when it is first used (a third of a second).

    Args:
        index: torch's index of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._cuda = _libcuda()
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._cuda.cuInit(0))
        self._check(self._cuda.cuDeviceGet(ctypes.byref(device), index))
        # The context in which torch allocates; it is never released.
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))
        self._multiprocessors = self._attribute(_MULTIPROCESSORS, device)
        self._capability = 10 * self._attribute(_CAPABILITY_MAJOR, device) + self._attribute(_CAPABILITY_MINOR, device)
        # Two blocks at a time hide each other's barriers; a GPU with too little shared memory for them gets half the columns.
        wanted = 2 * (shared_bytes("count", "float32", 32) + _RESERVED)
        self._columns = 32 if self._attribute(_SHARED_OF_MULTIPROCESSOR, device) >= wanted else 16
        self._kernels: dict[tuple[str, str], _Kernel] = {}
        self._table = ctypes.create_string_buffer(table_layout(ENTRIES).size)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._table))
        self._lock = threading.Lock()

    def launch(self, way: str, kind: str, tiles: int, layout: struct.Struct, numbers: Sequence[int]) -> None:
        """Launch a kernel on the device's current stream.

        Args:
            way, kind: the name of the kernel, such as "count" and "float32".
            tiles: the greatest number of blocks of threads that have work.
            layout: of the kernel's parameter, up to its last used field.
            numbers: the parameter's fields.

        Raises:
            OSError, RuntimeError: the kernel could not be compiled, loaded or launched.
        """
        stream = raw_stream(self._index)
        # A thread may have no current context, or another device's.
        self._check(self._cuda.cuCtxPushCurrent_v2(self._context))
        try:
            kernel = self._kernels.get((way, kind)) or self._load(way, kind)
            blocks = min(tiles, kernel.most_blocks)
            with self._lock:
                # The driver has copied the parameters when the call returns.
                layout.pack_into(self._table, 0, *numbers)
                status = self._cuda.cuLaunchKernel(
                    kernel.function,
                    *(blocks, 1, 1, _THREADS, 1, 1),
                    *(kernel.shared_bytes, stream, self._parameters, None),
                )
            self._check(status)
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _load(self, way: str, kind: str) -> _Kernel:
        unit, together = next((unit, ways) for unit, ways in _TOGETHER.items() if way in ways)
        image, _ = compiling.compiled(f"{unit}_{kind}", self._columns, self._capability)
        module = ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), image))
        for each in together:
            function, blocks = ctypes.c_void_p(), ctypes.c_int()
            name = f"{each}_{kind}".encode()
            self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), module, name))
            shared = shared_bytes(each, kind, self._columns)
            if each != "largest":
                self._check(self._cuda.cuFuncSetAttribute(function, _MOST_DYNAMIC_SHARED, shared))
                self._check(self._cuda.cuFuncSetAttribute(function, _CARVEOUT, 100))
            occupancy = self._cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor
            self._check(occupancy(ctypes.byref(blocks), function, _THREADS, ctypes.c_size_t(shared)))
            # More than four blocks on a multiprocessor read no faster, and each adds its results with atomic operations.
            most = self._multiprocessors * max(min(blocks.value, 4), 1)
            self._kernels[each, kind] = _Kernel(function, shared, most)
        return self._kernels[way, kind]

    def _attribute(self, which: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._check(self._cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device))
        return value.value

    def _check(self, status: int) -> None:
        if status:
            said = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(said))
            raise RuntimeError(f"CUDA: {(said.value or str(status).encode()).decode()}")


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the kernels of a CUDA device."""
    return Gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _libcuda() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    library.cuCtxPushCurrent_v2.argtypes = [pointer]
    return library
