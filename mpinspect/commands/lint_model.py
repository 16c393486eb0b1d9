"""Makes the model and inputs named on ``mpinspect lint``'s command line: "file.py:Model", "input_ids=int64:8,128"."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpinspect.commands.output import UnusableError
from mpinspect.numeric.formats import FLOAT8_E4M3, as_format

if TYPE_CHECKING:
    import torch

_FORM = "give it as package.module:build_model or path/to/file.py:build_model"
#: Names that by convention (Transformers) hold indices or masks: int64 unless a dtype is given.
_INTEGER_NAMES = re.compile(r"(_ids|_mask|labels|positions|indices|tokens)$")
#: Up to this many elements, integers and bools get values even for a "meta" model: models read masks and indices.
_MAX_VALUES = 1 << 24
#: The largest size that torch can hold.
_MAX_SIZE = (1 << 63) - 1
_EXAMPLE = "as 64,1024 or input_ids=int64:8,128 or image=float16:1,3,224,224"

DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


# -- the model -----------------------------------------------------------------------------------------------------------


def load_model(target: str, device: str) -> torch.nn.Module:
    """Import the target; return it if it is a Module, else the result of calling it under ``torch.device(device)``.

    Raises:
        UnusableError: the target can't be found, raises (the message names the place), or returns no Module.
    """
    import torch

    # Imported here since it loads numpy, which `mpinspect run` must not do before the script does.
    from mpinspect.reporting.words import indefinite

    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UnusableError(f"{target!r} does not name a model: {_FORM}")
    found = _attribute(_module(place), place, name)
    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise UnusableError(
            f"{target} is {indefinite(type(found).__name__)}, neither a torch.nn.Module nor a function that makes one"
        )
    try:
        with torch.device(device):
            model = found()
    except (Exception, SystemExit) as error:
        reason = f"calling {target} without arguments failed: {describe(error)}"
        if device == "meta" and isinstance(error, Exception):
            reason += "; --real builds it with real weights"
        raise UnusableError(reason) from error
    if not isinstance(model, torch.nn.Module):
        raise UnusableError(f"{target} returned {indefinite(type(model).__name__)}, not a torch.nn.Module")
    return model


def describe(error: BaseException) -> str:
    """Return an exception's type, its message's first line, and its innermost code line outside installed packages."""
    what = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    if not own:
        return what
    return f"{what} ({own[-1].filename}, line {own[-1].lineno})"


def _is_installed(filename: str) -> bool:
    return "site-packages" in filename or Path(filename).is_relative_to(Path(__file__).parents[1])


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _from_file(Path(place))
        # As with python -m, modules in the current directory can be imported.
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise UnusableError(
                f"there is no module {error.name!r} here or among the installed packages: {_FORM}"
            ) from error
        raise UnusableError(f"importing {place} failed: {describe(error)}") from error
    except UnusableError:
        raise
    except (Exception, SystemExit) as error:
        raise UnusableError(f"importing {place} failed: {describe(error)}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnusableError(f"{path} is not a file: {_FORM}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UnusableError(f"{path} can't be imported as Python")
    # Like a script, the file can import modules from its own folder.
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnusableError(f"{place} has no {name!r}: {_near(found)}")
        found = getattr(found, part)
    return found


def _near(found: Any) -> str:
    """Return a hint that lists the module's own functions, classes and models."""
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == getattr(found, "__name__", "")
    ]
    if not own:
        return _FORM
    return f"it has {', '.join(own[:8])}"


# -- its inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputSpec:
    """An input's dtype and shape; ``name`` is the keyword argument's name, "" for a positional one."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def input_spec(text: str) -> InputSpec:
    """Parse "[name=][dtype:]d0,d1,...".

    Raises:
        argparse.ArgumentTypeError: the text is no such specification; the message has an example.
    """
    name, equals, rest = text.rpartition("=")
    dtype, colon, sizes = rest.rpartition(":")
    if equals and not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: {name!r} is not a name of an argument; write it {_EXAMPLE}")
    if not colon:
        dtype = "int64" if _INTEGER_NAMES.search(name) else "float32"
    elif _torch_name(dtype) not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: {dtype!r} is not a known dtype: {', '.join(DTYPES)}")
    parts = [part.strip() for part in sizes.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: {sizes!r} is not a list of sizes; write it {_EXAMPLE}")
    if any(len(part.lstrip("0")) > 19 or int(part) > _MAX_SIZE for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: a size is above {_MAX_SIZE:,}, the largest that a tensor can have")
    return InputSpec(name, _torch_name(dtype), tuple(map(int, parts)))


def _torch_name(dtype: str) -> str:
    """Return torch's name for a dtype given as a format ("fp16"); return other text without its "torch." prefix."""
    try:
        name = as_format(dtype).name
    except ValueError:
        return dtype.removeprefix("torch.")
    return {FLOAT8_E4M3.name: "float8_e4m3fn"}.get(name, name)


def build_inputs(specs: list[InputSpec], device: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return positional and keyword arguments: random floats (no values on "meta"), integers 0, a valid index, masks 1.

    For a model on "meta", integers and bools are on the CPU, so that the recorder can supply their values to the model.

    Raises:
        UnusableError: a name is given twice, or no tensor can have such sizes.
    """
    names = [spec.name for spec in specs if spec.name]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise UnusableError(f"--input {twice}=... is given {names.count(twice)} times: give each argument once")
    positional = tuple(_input(spec, device) for spec in specs if not spec.name)
    return positional, {spec.name: _input(spec, device) for spec in specs if spec.name}


def _input(spec: InputSpec, device: str) -> torch.Tensor:
    sizes = ",".join(map(str, spec.shape))
    try:
        return _tensor(spec, device)
    except (RuntimeError, MemoryError, OverflowError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnusableError(f"an input of {spec.dtype} {sizes} can't be made: {why}") from error


def _tensor(spec: InputSpec, device: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    if device == "meta" and (dtype.is_floating_point or math.prod(spec.shape) > _MAX_VALUES):
        return torch.empty(spec.shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=torch.float32, device=device).to(dtype)
    is_mask = dtype is torch.bool or spec.name.endswith("_mask")
    return torch.full(spec.shape, int(is_mask), dtype=dtype, device="cpu" if device == "meta" else device)
