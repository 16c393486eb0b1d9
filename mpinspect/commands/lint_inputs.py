"""Inputs of a model as words: "64,1024", "input_ids=int64:8,128"."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpinspect.commands.outcome import UnusableError
from mpinspect.numeric.formats import FLOAT8_E4M3, as_format

if TYPE_CHECKING:
    import torch

#: Named inputs that hold indices or masks by custom (Transformers): integers unless a dtype is given.
_INTEGER_NAMES = re.compile(r"(_ids|_mask|labels|positions|indices|tokens)$")
#: Elements up to which integers and bools have values beside a model on the meta device: models look into masks and indices.
_MAX_VALUES = 1 << 24
#: A size that torch can hold.
_MAX_SIZE = (1 << 63) - 1
_EXAMPLE = "as 64,1024 or input_ids=int64:8,128 or image=float16:1,3,224,224"

DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


@dataclass(frozen=True)
class InputSpec:
    """``name``: of a keyword argument, "" for a positional one."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def input_spec(text: str) -> InputSpec:
    """Read "[name=][dtype:]d0,d1,...".

    Raises:
        argparse.ArgumentTypeError: what is wrong, with an example.
    """
    name, equals, rest = text.rpartition("=")
    dtype, colon, sizes = rest.rpartition(":")
    if equals and not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: {name!r} is no name of an argument; write it {_EXAMPLE}")
    if not colon:
        dtype = "int64" if _INTEGER_NAMES.search(name) else "float32"
    elif _torchs(dtype) not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: {dtype!r} is no dtype known here: {', '.join(DTYPES)}")
    parts = [part.strip() for part in sizes.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: {sizes!r} is no list of sizes; write it {_EXAMPLE}")
    if any(len(part.lstrip("0")) > 19 or int(part) > _MAX_SIZE for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: a size is above {_MAX_SIZE:,}, the largest that a tensor can have")
    return InputSpec(name, _torchs(dtype), tuple(map(int, parts)))


def _torchs(dtype: str) -> str:
    """torch's name of a dtype that is given by a format's ("fp16"); what names no format stays as it is."""
    try:
        name = as_format(dtype).name
    except ValueError:
        return dtype.removeprefix("torch.")
    return {FLOAT8_E4M3.name: "float8_e4m3fn"}.get(name, name)


def build_inputs(specs: list[InputSpec], device: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments: floats without values on "meta", else random; integers zeros (a valid index), masks ones.

    Integers and bools beside a model on "meta" are on the host, for the recorder keeps their values where a model asks for them.

    Raises:
        UnusableError: a name that is given twice, or sizes that no tensor can have.
    """
    names = [spec.name for spec in specs if spec.name]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise UnusableError(f"--input {twice}=... is given {names.count(twice)} times: give each argument once")
    positional = tuple(_tensor(spec, device) for spec in specs if not spec.name)
    return positional, {spec.name: _tensor(spec, device) for spec in specs if spec.name}


def _tensor(spec: InputSpec, device: str) -> torch.Tensor:
    sizes = ",".join(map(str, spec.shape))
    try:
        return _made(spec, device)
    except (RuntimeError, MemoryError, OverflowError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnusableError(f"an input of {spec.dtype} {sizes} can't be made: {why}") from error


def _made(spec: InputSpec, device: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    if device == "meta" and (dtype.is_floating_point or math.prod(spec.shape) > _MAX_VALUES):
        return torch.empty(spec.shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, device=device).to(dtype)
    is_mask = dtype is torch.bool or spec.name.endswith("_mask")
    return torch.full(spec.shape, int(is_mask), dtype=dtype, device="cpu" if device == "meta" else device)
