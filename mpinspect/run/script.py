"""Running somebody's script as Python itself would: as ``__main__``, with its own sys.argv and sys.path."""

# ruff: noqa: PTH109, PTH110, PTH113, PTH117, PTH118, PTH120
# Paths stay as the user wrote them: pathlib would shorten them, and Python does not.

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType

from mpinspect.run.options import LaunchOptions

#: Loaded before the first line of any script: a neighbour of the script never takes their place.
_LOADED_BY_PYTHON = {
    *("_collections_abc", "abc", "builtins", "codecs", "encodings", "genericpath", "io", "ntpath", "os", "posixpath"),
    *("site", "sitecustomize", "stat", "sys", "usercustomize", "zipimport"),
}


def load(options: LaunchOptions) -> Callable[[], None]:
    """Find and compile the script; what is returned runs it, once.

    Raises:
        OSError: it can't be opened.
        SyntaxError: as Python would raise it. Modules, directories and zip files are looked at only when they are run.
    """
    if options.is_module:
        return lambda: _run_module(options)
    if _is_importable(options.target):
        return lambda: _run_folder(options)
    path = _absolute(options.target)
    code, loader = _compiled(path)
    return lambda: _run_file(options, path, code, loader)


def _run_file(options: LaunchOptions, path: str, code: CodeType, loader: object) -> None:
    sys.argv[:] = [options.target, *options.arguments]
    _lead_the_path(os.path.dirname(os.path.realpath(options.target)))
    before = vars(sys.modules["__main__"])
    main = _new_main()
    main.__loader__ = loader  # type: ignore[assignment]
    main.__file__ = path
    if "__cached__" in before:
        main.__dict__["__cached__"] = None
    names = main.__dict__
    # Nothing here keeps the module: it goes when Python's own would.
    del main
    try:
        exec(code, names)
    finally:
        _flush()


def _flush() -> None:
    """As Python does after the last line of a script, before its exit handlers run."""
    for name in ("stderr", "stdout"):
        with suppress(Exception):
            getattr(sys, name).flush()


def _run_module(options: LaunchOptions) -> None:
    import runpy

    # As the interpreter has it while it looks for the module.
    sys.argv[:] = ["-m", *options.arguments]
    _lead_the_path(os.getcwd())
    _new_main()
    runpy._run_module_as_main(options.target)  # type: ignore[attr-defined]


def _run_folder(options: LaunchOptions) -> None:
    import runpy

    sys.argv[:] = [options.target, *options.arguments]
    _lead_the_path(_absolute(options.target), always=True)
    _new_main()
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _new_main() -> ModuleType:
    """A ``__main__`` as the interpreter makes it: the one there is holds the names of our own command."""
    main = ModuleType("__main__")
    if "__annotations__" in vars(sys.modules["__main__"]):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _lead_the_path(directory: str, *, always: bool = False) -> None:
    """Put a directory where Python puts the script's: in the place of our own command's, if there is one."""
    safe = getattr(sys.flags, "safe_path", bool(sys.flags.isolated))
    if not safe and sys.path:
        del sys.path[0]
    if always or not safe:
        sys.path.insert(0, directory)
        _let_neighbours_be_found(directory)


def _let_neighbours_be_found(directory: str) -> None:
    """A script's neighbour named like a module of the library that only we have imported so far: Python would import it."""
    for name in sys.stdlib_module_names.intersection(sys.modules).difference(
        _LOADED_BY_PYTHON, sys.builtin_module_names
    ):
        here = os.path.join(directory, name)
        if os.path.isfile(f"{here}.py") or os.path.isfile(os.path.join(here, "__init__.py")):
            del sys.modules[name]


def forget_file() -> None:
    """As Python does when a script's code is over: its threads and exit handlers find no ``__file__``."""
    main = getattr(sys.modules.get("__main__"), "__dict__", {})
    if main.get("__spec__") is None:
        main.pop("__file__", None)
        main.pop("__cached__", None)


def was_not_found(error: BaseException) -> bool:
    """Whether Python gave up before the first line: there is no such module, or no ``__main__`` in the directory."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, SystemExit):
        return False
    last = trace.tb_frame
    return last.f_globals.get("__name__") == "runpy" and last.f_code.co_name == "_run_module_as_main"


def _is_importable(target: str) -> bool:
    """Whether it is a directory or a zip file."""
    from pkgutil import get_importer

    return os.path.exists(target) and get_importer(_absolute(target)) is not None


def _absolute(path: str) -> str:
    """As Python makes a script's path absolute: nothing in it is resolved or shortened."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _compiled(path: str) -> tuple[CodeType, object]:
    if path.endswith(".pyc"):
        bare = SourcelessFileLoader("__main__", path)
        code = bare.get_code("__main__")
        if code is None:
            raise ImportError(f"{path} holds no code")
        return code, bare
    with io.open_code(path) as file:
        source = file.read()
    # Neither our own __future__ imports nor our optimisation: the interpreter's.
    return compile(source, path, "exec", dont_inherit=True), SourceFileLoader("__main__", path)


#: The last frames of ours below the script's own, or below the error that it can't be compiled.
LAST_OF_OURS = frozenset(function.__code__ for function in (load, _run_file, _run_module, _run_folder))
