"""How loops are compiled: into numba's cache on disk, and read from there by every other process.

numba finds a function in its cache by its name, its types, its processor and the text of its own file; it does not ask whether
what the function calls has changed since. So every name ends with a digest of all files that a loop is made of.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numba.core.event

#: The files of this folder that loops are made of; beside them they know the constants of ``layout``.
_MADE_OF = ("compiling", "kernels", "lost", "memory", "planes", "shares", "vectors")
#: Suffixes of numba's index and data files.
_SUFFIXES = (".nbi", ".nbc")


def _digest() -> str:
    folder = Path(__file__).parent
    sources = [folder.parent / "layout.py", *(folder / f"{name}.py" for name in _MADE_OF)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


_DIGEST = _digest()


def _named(function: Any) -> Any:
    # Once: after an import that found a loop missing on disk, the next one may come by again.
    if not function.__qualname__.endswith(_DIGEST):
        function.__qualname__ += f"_{_DIGEST}"
    return function


def compiled(function: Any) -> Any:
    """Compiled at its first call, once for each types of arguments. Holds no interpreter lock."""
    return numba.njit(nogil=True, cache=True)(_named(function))


def compiled_for(signature: str) -> Callable[[Any], Any]:
    """Compiled now, for arguments of these types."""
    return lambda function: numba.njit(signature, nogil=True, cache=True)(_named(function))


#: What an address belongs to must not be collected.
_kept: list[Any] = []


def function_of_c(function: Any) -> int:
    """The address of a C function of one int64 that returns nothing, compiled now."""
    types: Any = numba.types
    cfunc: Any = numba.cfunc
    made = cfunc(types.void(types.int64), cache=True)(_named(function))
    _kept.append(made)
    address: int = made.address
    return address


def cache_folder() -> Path:
    """Where numba keeps the loops: in ``NUMBA_CACHE_DIR``, beside this file, or in the user's cache folder.

    Raises:
        RuntimeError: none of these can be written to.
    """

    def nothing() -> None:
        """A function of this file: numba chooses a folder for each file."""

    made: Any = numba.njit(cache=True)(nothing)
    # numba leaves a relative NUMBA_CACHE_DIR as it is: a later os.chdir must not redirect the path.
    return Path(made.stats.cache_path).absolute()


class NotOnDiskError(Exception):
    """A loop is not in the cache, so that numba would have to compile it."""


class _Refusal(numba.core.event.Listener):
    def on_start(self, event: Any) -> None:
        if event.data["module"].startswith("mpinspect."):
            raise NotOnDiskError(event.data["qualname"])

    def on_end(self, event: Any) -> None:
        pass


@contextlib.contextmanager
def only_from_disk() -> Iterator[None]:
    """Inside, none of our loops is compiled: numba reads them from its cache or raises NotOnDiskError."""
    with numba.core.event.install_listener("numba:run_pass", _Refusal()):
        yield


def remove_others(folder: Path) -> None:
    """Remove from the cache what was compiled of other sources than today's."""
    for path in folder.iterdir():
        if path.suffix in _SUFFIXES and _DIGEST not in path.name:
            with contextlib.suppress(OSError):
                path.unlink()
