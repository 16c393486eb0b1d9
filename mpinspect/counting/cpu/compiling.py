"""Compiles loops into numba's cache on disk, from which every other process loads them.

numba finds a function in its cache by its name, its types, its processor and the text of its own file; changes of the
functions that it calls go undetected. So every name ends with a digest of all files that contribute to a loop.

Only functions that Python or a thread calls are compiled to machine code and stored, with their callees. Compiling each callee
by itself as well took half of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numba
import numba.core.event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT

#: The files of this folder that contribute to loops; ``layout`` contributes too, by its constants.
_MADE_OF = (
    "block_layout",
    "block_tiles",
    "block_vectors",
    "blocks",
    "compiling",
    "kernels",
    "lost",
    "memory",
    "planes",
    "shares",
    "vectors",
)
#: Suffixes of numba's index and data files.
_SUFFIXES = (".nbi", ".nbc")


def _digest() -> str:
    folder = Path(__file__).parent
    sources = [folder.parent / "layout.py", *(folder / f"{name}.py" for name in _MADE_OF)]
    constants = repr((CUTS, DISTANCES, LOWEST_EXPONENT)).encode()
    return hashlib.sha256(b"".join([constants, *(path.read_bytes() for path in sources)])).hexdigest()[:12]


_DIGEST = _digest()


def _named(function: Any) -> Any:
    # Only once: after a failed import because of a missing loop, a second import calls this again.
    if not function.__qualname__.endswith(_DIGEST):
        function.__qualname__ += f"_{_DIGEST}"
    return function


class _Part(JITCodeLibrary):
    """The code of a function that only compiled functions call. numba would optimise it alone and make machine code of it."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, as for a name that is not defined."""
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: without machine code, the pointer to the function's environment has no memory."""


class _PartCompiler(CompilerBase):
    def define_pipelines(self) -> Any:
        state, library, passes = self.state, cast(Any, _Part), cast(Any, DefaultPassBuilder)
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return [passes.define_nopython_pipeline(state)]


def compiled(function: Any) -> Any:
    """Compile a function that compiled code calls, once per combination of argument types; LLVM optimises it in its callers."""
    njit: Any = numba.njit
    return njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_PartCompiler)(function)


def compiled_for(signature: str) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function at once, for these argument types."""
    return lambda function: numba.njit(signature, nogil=True, cache=True)(_named(function))


#: References that protect C functions with a known address from the garbage collector.
_kept: list[Any] = []


def function_of_c(function: Any) -> int:
    """Compile a C function of one int64 without a result, and return its address."""
    types: Any = numba.types
    cfunc: Any = numba.cfunc
    made = cfunc(types.void(types.int64), cache=True)(_named(function))
    _kept.append(made)
    address: int = made.address
    return address


def cache_folder() -> Path:
    """Return numba's cache folder: ``NUMBA_CACHE_DIR``, this file's folder, or one in the user's cache folder.

    Raises:
        RuntimeError: numba can write to none of these.
    """

    def nothing() -> None:
        """A function of this file: numba chooses a folder for each file."""

    made: Any = numba.njit(cache=True)(nothing)
    # numba leaves a relative NUMBA_CACHE_DIR as it is: a later os.chdir must not redirect the path.
    return Path(made.stats.cache_path).absolute()


class NotOnDiskError(Exception):
    """A loop is missing from the cache, so numba would have to compile it."""


class _Refusal(numba.core.event.Listener):
    def on_start(self, event: Any) -> None:
        if event.data["module"].startswith("mpinspect."):
            raise NotOnDiskError(event.data["qualname"])

    def on_end(self, event: Any) -> None:
        pass


@contextlib.contextmanager
def only_from_disk() -> Iterator[None]:
    """Within this context numba loads our loops from its cache, or raises NotOnDiskError instead of compiling one."""
    with numba.core.event.install_listener("numba:run_pass", _Refusal()):
        yield


def remove_others(folder: Path) -> None:
    """Remove cached loops that were compiled from other versions of the sources."""
    for path in folder.iterdir():
        if path.suffix in _SUFFIXES and _DIGEST not in path.name:
            with contextlib.suppress(OSError):
                path.unlink()
