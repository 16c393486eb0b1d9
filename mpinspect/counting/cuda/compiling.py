"""Compiles ``kernels.cu`` and ``blocks.cu`` with NVRTC, the CUDA compiler as a library, which torch's CUDA packages include."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from mpinspect.counting.encodings import magnitudes

#: The 8-bit dtypes, in the order of the table MAGNITUDES of the source.
CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)(\.\d+)?|nvrtc64_(\d+)\d_0\.dll")


@cache
def source() -> str:
    """Return the CUDA C++ source of the kernels."""
    rows = ",\n".join(
        f"  {{{', '.join(str(_float32_bits(value) >> 16) for value in magnitudes(name))}}}" for name in CODES
    )
    table = (
        f"static __constant__ __attribute__((unused)) unsigned short MAGNITUDES[{len(CODES)}][256] = {{\n{rows}}};\n"
    )
    return "".join(
        [table, *(Path(__file__).with_name(name).read_text("utf-8") for name in ("kernels.cu", "blocks.cu"))]
    )


def _float32_bits(magnitude: float) -> int:
    """Return the bits of a value that float32 represents, computed from integers: a cast may flush subnormals."""
    if not math.isfinite(magnitude):
        return 0x7FC00000 if math.isnan(magnitude) else 0x7F800000
    multiple = int(magnitude * 2.0**149)
    shift = max(multiple.bit_length() - 24, 0)
    return (shift << 23) + (multiple >> shift)


def compiled(unit: str, columns: int, capability: int) -> tuple[bytes, str]:
    """Compile the kernels of one kind of values.

    Args:
        unit: only_ or blocks_ (the kernels of ``kernels.cu``, or that of ``blocks.cu``), then the end of the kernels' names:
            float32, bfloat16, float16, and only float64 or codes.
        columns: copies of the counters, 16 or 32.
        capability: the GPU's compute capability as an integer, such as 90.

    Returns:
        An image that the driver loads (machine code, or PTX if this NVRTC is older than the GPU), and the compiler's log.

    Raises:
        OSError: NVRTC was not found.
        RuntimeError: NVRTC failed.
    """
    nvrtc = _nvrtc()
    known = _capabilities(nvrtc)
    target, prefix, form = capability, "sm", "CUBIN"
    if capability not in known:
        # A GPU runs the PTX of every older one.
        target, prefix, form = max((each for each in known if each < capability), default=capability), "compute", "PTX"
    options = [f"--gpu-architecture={prefix}_{target}", "--std=c++14"]
    options += [f"-DCOLUMNS={columns}", f"-D{unit.upper()}"]
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source().encode(), b"mpinspect.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _text(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
        _check(nvrtc, status, log)
        return _text(nvrtc, form, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(nvrtc: ctypes.CDLL, status: int, log: str = "") -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()} {log}".strip())


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _capabilities(nvrtc: ctypes.CDLL) -> list[int]:
    number = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(number)))
    found = (ctypes.c_int * number.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(found))
    return list(found)


@cache
def _nvrtc() -> ctypes.CDLL:
    tried = []
    for name in _candidates():
        try:
            # NVRTC opens its second library by name, which finds it only where it is loaded or on the loader's path.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if os.sep in name else ():
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(error)
    last = next(reversed(tried), None)
    raise OSError("the CUDA compiler library NVRTC was not found (pip package nvidia-cuda-nvrtc)") from last


def _candidates() -> Iterator[str]:
    """Yield libraries to try, torch's CUDA version first, and names before paths, since a named one may be loaded already."""
    major = int((torch.version.cuda or "0").split(".")[0])
    if sys.platform != "win32":
        yield from (f"libnvrtc.so.{version}" for version in ("11.2" if major == 11 else str(major),))
    folders = [Path(torch.__file__).parent / "lib"]
    packages = importlib.util.find_spec("nvidia")
    for place in (packages.submodule_search_locations or ()) if packages else ():
        folders += [*Path(place).glob("*/lib"), *Path(place).glob("*/bin"), *Path(place).glob("*/bin/x86_64")]
    found = [(match, path) for folder in folders for path in _files(folder) if (match := _LIBRARY.fullmatch(path.name))]
    versions = [(int(match[1] or match[3]), str(path)) for match, path in found]
    yield from (path for _, path in sorted(versions, key=lambda each: (each[0] != major, -each[0])))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
