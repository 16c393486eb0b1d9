"""A Python process that has imported torch and forks: what runs in it costs a tenth of a new interpreter's start.

Each script runs in a copy of its own and ends as Python ends. What asks how an interpreter begins, imports torch or reads its
environment (OMP_NUM_THREADS, PYTHON...) needs a process of its own: ``launched.run`` starts those.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: More than any request: an environment and a command.
_LONGEST = 1 << 17
_STREAMS = (("in", os.O_RDONLY), ("out", os.O_WRONLY | os.O_APPEND), ("err", os.O_WRONLY | os.O_APPEND))
#: Memory that the C library gives back at once costs a third of a training's time.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_TOP_PAD_": "268435456"}
#: Imported beforehand, where their packages are installed. torch's first optimizer imports its compiler.
_MODULES = ("torch", "torch._dynamo", "torch.utils.tensorboard", "mpinspect.counting.cpu.counter")
_START = "import sys; sys.path[0] = {folder!r}; from warm import serve; del sys.path[0]; serve({connection})"


def run(
    folder: Path,
    words: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    *,
    is_one_stream: bool = False,
) -> tuple[int, str, str]:
    """Run ``python WORDS...`` in a folder, forked from a process that has imported torch.

    Args:
        words: a script and its arguments, or -m, a module and its arguments; before them -W error, if warnings are to be.
        env: what the environment has beside what it had when the process that forks was started.
        is_one_stream: whether stderr is written into stdout.

    Returns:
        The exit status (negative where a signal killed it), stdout and stderr.
    """
    if sys.platform != "linux":
        # There a process that has loaded torch can't be relied on to fork.
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **(env or {})},
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if is_one_stream else subprocess.PIPE,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr or ""
    with tempfile.TemporaryDirectory() as streams:
        for name, _ in _STREAMS:
            Path(streams, name).write_text(stdin if name == "in" else "")
        if is_one_stream:
            Path(streams, "err").unlink()
            Path(streams, "err").symlink_to("out")
        asked = {
            "folder": str(folder),
            "words": [str(word) for word in words],
            "env": dict(env or {}),
            "streams": streams,
        }
        server, end = _server()
        server.send(json.dumps(asked).encode())
        try:
            status = int(server.recv(_LONGEST))
        except BaseException:
            # An answer that came late would pass for the next one's.
            end()
            _server.cache_clear()
            raise
        out, err = (Path(streams, name).read_text(errors="surrogateescape") for name in ("out", "err"))
    return status, out, err


@functools.cache
def _server() -> tuple[socket.socket, Callable[[], None]]:
    """Start the process that forks, once for all tests of this process. Returns the connection and what ends both."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(300)
    start = _START.format(folder=str(Path(__file__).parent), connection=its.fileno())
    # As launched.run does: Python's own settings are the test's, not the caller's.
    names = (name for name in os.environ if name == "PYTHONPATH" or not name.startswith("PYTHON"))
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        env={name: os.environ[name] for name in names} | MEMORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        start_new_session=True,
    )
    its.close()

    def end() -> None:
        atexit.unregister(end)
        ours.close()
        # With what it forked.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    atexit.register(end)
    return ours, end


def serve(connection: int) -> None:
    """Fork for each request; the child runs what was asked for and returns, so that its interpreter ends as any does."""
    # No script here has a GPU, and an interpreter that ends without Triton's library ends sooner.
    sys.modules["triton"] = None  # type: ignore[assignment]
    path = list(sys.path)
    for name in _MODULES:
        try:
            __import__(name)
        except ImportError:
            continue
    # torch 2.6 adds a folder of its own, made at its import; the end of each child would remove it, with a warning.
    sys.path[:] = path
    own = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if own is not None:
        own.cleanup()
    # What is frozen no child's garbage collector walks through, at its end above all: a second each.
    gc.freeze()
    with socket.socket(fileno=connection) as server:
        while request := server.recv(_LONGEST):
            child = os.fork()
            if not child:
                break
            server.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    if request:
        _begin(**json.loads(request))


def _begin(folder: str, words: Sequence[str], env: Mapping[str, str], streams: str) -> None:
    os.chdir(folder)
    os.environ.update(env)
    for number, (name, flags) in enumerate(_STREAMS):
        stream = os.open(Path(streams, name), flags)
        os.dup2(stream, number)
        os.close(stream)
    if os.path.samestat(os.fstat(1), os.fstat(2)):
        # As in a terminal, the streams' lines come in the order in which they were written.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, folder)
        # What ``python -m`` itself calls.
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv = list(words)
        script = Path(words[0]).absolute()
        sys.path.insert(0, str(script.parent))
        main = sys.modules["__main__"].__dict__
        del main["serve"], main["sys"]
        main["__file__"] = str(script)
        exec(compile(script.read_bytes(), script, "exec"), main)
