"""Compiles the kernels of ``counting/cuda`` as host code with g++, to run them without a GPU."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpinspect.counting.cuda import compiling, driver

UNIT = Path(__file__).with_name("cuda_on_host.cpp")


class HostGpu:
    """Launches kernels in this process, with the interface of ``driver.Gpu``; records the launches.

    Args:
        library: made by ``build``.
        most_blocks: the largest number of blocks of a launch.
    """

    def __init__(self, library: Path, columns: int, most_blocks: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._columns, self.most_blocks = columns, most_blocks
        self.launched: list[str] = []

    def launch(self, way: str, kind: str, tiles: int, layout: struct.Struct, numbers: Sequence[int]) -> None:
        parameter = ctypes.create_string_buffer(driver.table_layout(driver.ENTRIES).size)
        assert len(parameter) == self.constant(3) <= 4096
        layout.pack_into(parameter, 0, *numbers)
        name = f"{way}_{kind}"
        used = self._library.launch(name.encode(), parameter, min(tiles, self.most_blocks))
        assert used == driver.shared_bytes(way, kind, self._columns)
        self.launched.append(name)

    def constant(self, which: int) -> int:
        """Return ENTRIES, THREADS, or the bytes of a tile, of Table or of Matrix."""
        return int(self._library.constants(which))


def build(folder: Path, columns: int) -> Path:
    """Compile the kernels into a library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is missing: it compiles the kernels as host code")
    (folder / "source.cu").write_text(compiling.source())
    library = folder / f"kernels{columns}.so"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
    options += [f"-DCOLUMNS={columns}", f"-I{folder}"]
    subprocess.run([compiler, *options, str(UNIT), "-o", str(library)], check=True)
    return library
