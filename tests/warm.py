"""Runs scripts in forks of a process that has imported torch, which takes a tenth of the time of a new interpreter.

Each script runs in its own fork, whose interpreter shuts down as in a process of its own. Tests of interpreter start-up, of
torch's import, of variables that are read then (OMP_NUM_THREADS, PYTHON...) or of the destructors of C++ libraries need a new
process: ``launched.run`` starts one.
"""

import atexit
import ctypes
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
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: An upper bound on the bytes of a request.
_LONGEST = 1 << 17
_STREAMS = (("in", os.O_RDONLY), ("out", os.O_WRONLY | os.O_APPEND), ("err", os.O_WRONLY | os.O_APPEND))
#: glibc must not return freed memory to the OS: allocating it again would take a third of a training's time.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_TOP_PAD_": "268435456"}
#: Imported before forking, where installed. torch._dynamo, because the first optimizer would import it.
_MODULES = (
    *("torch", "torch._dynamo", "torch.utils.tensorboard", "sklearn.datasets", "mpinspect.counting.cpu.counter"),
    # Nearly all that a training under mpinspect run imports of it.
    *("mpinspect.commands.run", "mpinspect.run.ending", "mpinspect.run.models.one_step", "mpinspect.run.report"),
    *("mpinspect.run.watcher", "mpinspect.ranges.report.tensorboard"),
)
#: For ``run``: a process that has imported torch, and neither numba nor mpinspect.
ALONE = ("torch",)
_START = "import sys; sys.path[0] = {folder!r}; from warm import serve; del sys.path[0]; serve({connection}, {modules})"


def run(
    folder: Path,
    words: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    *,
    is_one_stream: bool = False,
    modules: tuple[str, ...] = (),
) -> tuple[int, str, str]:
    """Run ``python WORDS...`` in a folder, forked from a process that has imported torch.

    Args:
        words: a script and its arguments, or -m, a module and its arguments; optionally preceded by -W error.
        env: variables added to the environment of the forking process.
        is_one_stream: whether stderr is redirected to stdout.
        modules: further modules that the forking process has imported, such as transformers; or torch alone, without numba.

    Returns:
        The exit status (negative where a signal killed it), stdout and stderr.
    """
    if sys.platform != "linux":
        # Elsewhere, forking a process that has loaded torch is unreliable.
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
        server, end = _server(modules)
        server.send(json.dumps(asked).encode())
        try:
            status = int(server.recv(_LONGEST))
        except BaseException:
            # A late answer would be taken for the answer to the next request.
            end()
            _server.cache_clear()
            raise
        out, err = (Path(streams, name).read_text(errors="surrogateescape") for name in ("out", "err"))
    return status, out, err


@functools.cache
def _server(modules: tuple[str, ...]) -> tuple[socket.socket, Callable[[], None]]:
    """Start the forking process, once per test process; with further modules, fork one from it.

    Returns:
        The connection, and a function that closes the connection and ends the process with all its forks.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(300)
    if modules not in ((), ALONE):
        first, end = _server(())
        socket.send_fds(first, [json.dumps(modules).encode()], [its.fileno()])
        its.close()
        atexit.register(ours.close)
        return ours, end
    start = _START.format(folder=str(Path(__file__).parent), connection=its.fileno(), modules=modules or _MODULES)
    # As in launched.run: the caller's PYTHON* settings must not reach the script.
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
        # The process group includes its forks.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    atexit.register(end)
    return ours, end


def serve(connection: int, modules: Sequence[str]) -> None:
    """Fork for each request; the child runs the requested script and returns, so that its interpreter shuts down normally.

    A request for modules forks a process that imports them and serves the connection sent with it.
    """
    # No script here uses a GPU, and the interpreter shuts down faster without Triton's library.
    sys.modules["triton"] = None  # type: ignore[assignment]
    path = list(sys.path)
    for name in modules:
        try:
            __import__(name)
        except ImportError:
            continue
    # torch 2.6 adds a temporary folder to sys.path on import; each child would remove it at exit, with a warning.
    sys.path[:] = path
    own = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if own is not None:
        own.cleanup()
    # A child's garbage collector skips frozen objects, which saves a second at exit.
    gc.freeze()
    asked, further = None, []
    with socket.socket(fileno=connection) as server:
        while not further:
            request, further, _, _ = socket.recv_fds(server, _LONGEST, 1)
            asked = json.loads(request or "null")
            if not asked:
                break
            child = os.fork()
            if not child:
                break
            if further:
                os.close(further.pop())
            else:
                server.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    if further:
        serve(further[0], asked)
    elif asked:
        # Once the interpreter has shut down, skip the destructors of C++ libraries, which take as long again.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        _begin(**asked)


def _begin(folder: str, words: Sequence[str], env: Mapping[str, str], streams: str) -> None:
    os.chdir(folder)
    os.environ.update(env)
    if lines := sys.modules.get("mpinspect.runtime.user_line"):
        # A process of the script's own would import it now, after the script was written.
        lines._STARTED = time.time()  # type: ignore[attr-defined]
    for number, (name, flags) in enumerate(_STREAMS):
        stream = os.open(Path(streams, name), flags)
        os.dup2(stream, number)
        os.close(stream)
    if os.path.samestat(os.fstat(1), os.fstat(2)):
        # Line buffering preserves the order in which lines were written to the two streams.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, folder)
        # ``python -m`` calls this function too.
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv = list(words)
        script = Path(words[0]).absolute()
        sys.path.insert(0, str(script.parent))
        main = sys.modules["__main__"].__dict__
        del main["serve"], main["sys"]
        main["__file__"] = str(script)
        exec(compile(script.read_bytes(), script, "exec"), main)
