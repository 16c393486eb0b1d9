"""The model that a command is about: "package.module:build_model" or "path/to/file.py:Model"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpinspect.commands.outcome import UnusableError
from mpinspect.reporting.words import indefinite

if TYPE_CHECKING:
    import torch

_FORM = "give it as package.module:build_model or path/to/file.py:build_model"


def load_model(target: str, device: str) -> torch.nn.Module:
    """The Module that a target names, or that the class or function which it names makes when called without arguments.

    What is made is made under ``torch.device(device)``.

    Raises:
        UnusableError: one sentence: what can't be found, or what the user's code raised and where.
    """
    import torch

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
        hint = "; --real builds it with real weights" if device == "meta" and isinstance(error, Exception) else ""
        raise UnusableError(f"calling {target} without arguments failed: {describe(error)}{hint}") from error
    if not isinstance(model, torch.nn.Module):
        raise UnusableError(f"{target} returned {indefinite(type(model).__name__)}, not a torch.nn.Module")
    return model


def describe(error: BaseException) -> str:
    """An exception in a sentence: its type, its first line, and the innermost line of code outside installed packages."""
    text = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
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
        # As python -m does: what lies in the current directory can be imported.
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
        raise UnusableError(f"{path} is no file: {_FORM}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UnusableError(f"{path} can't be imported as Python")
    # As a script would find its neighbours.
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
    """What could have been meant: the module's own functions, classes and models."""
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and (getattr(value, "__module__", None) == getattr(found, "__name__", ""))
    ]
    return f"it has {', '.join(own[:8])}" if own else _FORM
