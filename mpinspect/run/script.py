"""Runs a script as Python itself would: as ``__main__``, with its own sys.argv and sys.path, and with its own tracebacks."""

# ruff: noqa: PTH109, PTH110, PTH113, PTH117, PTH118, PTH120
# Python leaves paths as the user wrote them; pathlib would shorten them.

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

from mpinspect.run.options import LaunchOptions
from mpinspect.runtime import own_code

#: Modules loaded before the first line of any script, so a file in the script's directory never shadows them.
_LOADED_BY_PYTHON = {
    *("_collections_abc", "abc", "builtins", "codecs", "encodings", "genericpath", "io", "ntpath", "os", "posixpath"),
    *("site", "sitecustomize", "stat", "sys", "usercustomize", "zipimport"),
}
_IMPORT_MACHINERY = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def load(options: LaunchOptions) -> Callable[[], None]:
    """Compile the script and return a function that runs it once; modules and folders are found only when run.

    Raises:
        OSError: the script can't be opened.
        SyntaxError: as Python would raise it.
    """
    if options.is_module:
        return lambda: _run_module(options)
    if _is_importable(options.target):
        return lambda: _run_folder(options)
    if options.is_code:
        return _prepared("-c", options, "", None, compile(options.target, "<string>", "exec", dont_inherit=True))
    if options.target == "-":
        # Like the interpreter, read all of it before the first line runs.
        source = sys.stdin.buffer.read() if sys.stdin is not None else b""
        return _prepared("-", options, "", "<stdin>", compile(source, "<stdin>", "exec", dont_inherit=True))
    path = _absolute(options.target)
    directory = os.path.dirname(os.path.realpath(options.target))
    return _prepared(options.target, options, directory, path, *_compiled(path))


def _prepared(
    name: str,
    options: LaunchOptions,
    directory: str,
    file: str | None,
    code: CodeType,
    loader: object = BuiltinImporter,
) -> Callable[[], None]:
    """Return a function that runs the code as ``__main__``.

    Args:
        name: becomes sys.argv[0].
        directory: becomes sys.path[0]; "" stands for the working directory.
        file: becomes ``__file__``; None leaves ``__file__`` undefined.
    """
    return lambda: _run_code([name, *options.arguments], directory, file, code, loader)


def _run_code(words: list[str], directory: str, file: str | None, code: CodeType, loader: object) -> None:
    sys.argv[:] = words
    _lead_the_path(directory)
    before = vars(sys.modules["__main__"])
    main = _new_main()
    main.__loader__ = loader  # type: ignore[assignment]
    if file is not None:
        main.__file__ = file
        if "__cached__" in before:
            main.__dict__["__cached__"] = None
    names = main.__dict__
    # Keep no reference, so that the module is freed at the same time as in plain Python.
    del main
    try:
        exec(code, names)
    finally:
        _flush()


def _flush() -> None:
    """Flush stderr and stdout, as Python does after the last line of a script, before its exit handlers run."""
    for name in ("stderr", "stdout"):
        with suppress(Exception):
            getattr(sys, name).flush()


def _run_module(options: LaunchOptions) -> None:
    import runpy

    # sys.argv[0] is "-m" in Python too, until it has found the module.
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
    """Install and return a fresh ``__main__``, like the interpreter's, in place of our command's."""
    main = ModuleType("__main__")
    if "__annotations__" in vars(sys.modules["__main__"]):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _lead_the_path(directory: str, *, always: bool = False) -> None:
    """Put a directory at the front of sys.path in place of our command's entry; in Python's safe mode, which has no such entry,
    only if ``always``."""
    safe = getattr(sys.flags, "safe_path", bool(sys.flags.isolated))
    if not safe and sys.path:
        del sys.path[0]
    if always or not safe:
        sys.path.insert(0, directory)
        _unload_shadowed(directory)


def _unload_shadowed(directory: str) -> None:
    """Unload standard library modules that a file in the directory shadows, so that the script imports the file."""
    for name in sys.stdlib_module_names.intersection(sys.modules).difference(
        _LOADED_BY_PYTHON, sys.builtin_module_names
    ):
        here = os.path.join(directory, name)
        if os.path.isfile(f"{here}.py") or os.path.isfile(os.path.join(here, "__init__.py")):
            del sys.modules[name]


def forget_file() -> None:
    """Delete ``__file__``, as Python does after a script's last line, before its threads and exit handlers end."""
    main = getattr(sys.modules.get("__main__"), "__dict__", {})
    if main.get("__spec__") is None:
        main.pop("__file__", None)
        main.pop("__cached__", None)


def was_not_found(error: BaseException) -> bool:
    """Return whether the script never began, because the module or the directory's ``__main__`` was not found."""
    links = list(_links(error.__traceback__))
    if not links or not isinstance(error, SystemExit):
        return False
    last = links[-1].tb_frame
    return last.f_globals.get("__name__") == "runpy" and last.f_code.co_name == "_run_module_as_main"


def _is_importable(target: str) -> bool:
    """Return whether the target is a directory or a zip file."""
    from pkgutil import get_importer

    return os.path.exists(target) and get_importer(_absolute(target)) is not None


def _absolute(path: str) -> str:
    """Return the absolute path, as Python forms it for a script, without resolving or shortening anything."""
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
    # dont_inherit: this file's own __future__ imports are not the script's.
    return compile(source, path, "exec", dont_inherit=True), SourceFileLoader("__main__", path)


#: Code of our functions that call the script's, or that raise the error if it can't be compiled.
_LAST_OF_OURS = frozenset(function.__code__ for function in (load, _run_code, _run_module, _run_folder))


# -- its tracebacks ------------------------------------------------------------------------------------------------------


def show_without_our_frames(afterwards: Callable[[], None]) -> None:
    """Wrap sys.excepthook, so that the exception that ends the script is shown without our frames; then call ``afterwards``."""
    # The script may have deleted sys.excepthook.
    is_missing = not hasattr(sys, "excepthook")
    shown_by = sys.__excepthook__ if is_missing else sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        clean(error)
        sys.last_traceback = error.__traceback__
        if is_missing:
            _write("sys.excepthook is missing\n")
        # The script's hook sees the value of sys.excepthook that the script set.
        sys.excepthook = shown_by
        _show(shown_by, error)
        afterwards()

    sys.excepthook = show


def clean(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception and of all its causes and contexts."""
    for each in _family(error):
        each.__traceback__ = _without_ours(each.__traceback__)


def _show(hook: Callable[..., object], error: BaseException) -> None:
    """Call the hook; if it fails, show both exceptions as the interpreter does."""
    try:
        hook(type(error), error, error.__traceback__)
        return
    except SystemExit:
        raise
    except BaseException as fault:
        broken = fault
    clean(broken)
    _write("Error in sys.excepthook:\n")
    sys.__excepthook__(type(broken), broken, broken.__traceback__)
    _write("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, error.__traceback__)


def _write(text: str) -> None:
    # print() would write to stdout where there is no stderr.
    if sys.stderr is not None:
        sys.stderr.write(text)


def _family(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its causes and contexts, and the members of exception groups, each once."""
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in known:
            continue
        known.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = list(_links(trace))
    kept = [link for link, drop in zip(frames, _dropped(frames), strict=True) if not drop]
    following = None
    for link in reversed(kept):
        link.tb_next = following
        following = link
    return following


def _dropped(frames: list[TracebackType]) -> list[bool]:
    """Return for each frame whether to drop it.

    Drop all frames up to the one that runs the script, all frames of ours, and frames of the import machinery right
    before one of ours, which Python drops by itself only if no wrapper of ours is in between.
    """
    first = max((i + 1 for i, link in enumerate(frames) if link.tb_frame.f_code in _LAST_OF_OURS), default=0)
    dropped = [i < first or _is_ours(link) for i, link in enumerate(frames)]
    for i in range(len(frames) - 2, first - 1, -1):
        if dropped[i + 1] and frames[i].tb_frame.f_code.co_filename in _IMPORT_MACHINERY:
            dropped[i] = True
    return dropped


def _is_ours(link: TracebackType) -> bool:
    return own_code.is_of(link.tb_frame, own_code.RUNNING_SCRIPTS + own_code.WRAPPING_TORCH)


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
