"""A stand-in for an accelerator on machines without one: its memory is the host's, its operators are the CPU's.

It counts calls that would make the host wait for a real device: blocking copies, ``.item()``, ``nonzero`` and similar, and
waits for incomplete events. ``stand_in_device.cpp`` is built once per torch version and stored in the virtual environment.
torch can rename a device backend only once per process, so its users run in their own process (``trainings_on_a_device.py``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

NAME = "standin"
_SOURCE = Path(__file__).with_suffix(".cpp")


def why_not() -> str:
    """Return why the stand-in can't be built here; "" if it can."""
    if sys.platform != "linux":
        return "the stand-in device is built on Linux only"
    return "" if _compiler() else "no C++ compiler to build the stand-in device with"


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def built() -> Path:
    """Return the path of the extension, built first if this torch has none yet (half a minute on one core)."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    folder = Path(sys.prefix) / f".stand-in-{torch.__version__}-{sys.implementation.cache_tag}"
    folder.mkdir(exist_ok=True)
    library = folder / f"stand_in_{digest}.so"
    with FileLock(folder / "lock"):
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    of_torch = Path(torch.__file__).parent
    includes = [of_torch / "include", of_torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    # Including all of ATen's operators would take twice the time.
    macros = {
        "AT_PER_OPERATOR_HEADERS": "",
        "TORCH_EXTENSION_NAME": library.stem,
        "TORCH_API_INCLUDE_EXTENSION_H": "",
        "_GLIBCXX_USE_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    }
    unfinished = library.with_suffix(".unfinished")
    subprocess.run(
        [
            *(_compiler() or "c++").split(),
            *("-std=c++20", "-O0", "-shared", "-fPIC"),
            *(f"-D{name}={value}" for name, value in macros.items()),
            *(f"-I{folder}" for folder in includes),
            str(_SOURCE),
            f"-L{of_torch / 'lib'}",
            *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
            *("-o", str(unfinished)),
        ],
        check=True,
    )
    unfinished.rename(library)


def load() -> StandIn:
    """Register the device with torch under its name; once per process."""
    library = built()
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None
    torch.utils.rename_privateuse1_backend(NAME)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    stand_in = StandIn(native)
    torch._register_device_module(NAME, stand_in.module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    for name in ("linear", "matmul", "addmm", "scaled_dot_product_attention"):
        _AUTOCAST.impl(name, partial(_cast, name, None), _AUTOCAST_KEY.name)
    for name in ("layer_norm", "cross_entropy_loss"):
        _AUTOCAST.impl(name, partial(_cast, name, torch.float32), _AUTOCAST_KEY.name)
    _OPERATORS.impl("convolution_overrideable", _convolution, "PrivateUse1")
    _OPERATORS.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    return stand_in


_OPERATORS = torch.library.Library("aten", "IMPL")


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """Convolve on the CPU: torch has no fallback for a device's own convolutions."""
    given = [None if each is None else each.cpu() for each in (x, weight, bias)]
    return torch.ops.aten.convolution(*given, *options).to(NAME)  # type: ignore[no-any-return]


def _convolution_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any) -> Any:
    *options, transposed, output_padding, groups, mask = options
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    given = [each.cpu() for each in (gradient, x, weight)]
    made = torch.ops.aten.convolution_backward(*given, [channels], *options, transposed, output_padding, groups, mask)
    return tuple(None if each is None else each.to(NAME) for each in made)


_AUTOCAST = torch.library.Library("aten", "IMPL")
_AUTOCAST_KEY = torch._C.DispatchKey.AutocastPrivateUse1


def _cast(name: str, dtype: torch.dtype | None, *given: Any, **named: Any) -> Any:
    """Call an operator under autocast: with its floating-point tensors in ``dtype``, or in autocast's."""
    wanted = dtype or torch.get_autocast_dtype(NAME)
    is_cast = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in given]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST_KEY)):
        given = tuple(each.to(wanted) if cast else each for each, cast in zip(given, is_cast, strict=True))
        return getattr(torch.ops.aten, name)(*given, **named)


class StandIn:
    """The device's interface for tests.

    Attributes:
        now: the time, in steps; tests with late events advance it.
        late: how many steps an event needs to complete.
        capturing: whether the current stream captures a graph.
        initialized: whether the process has used the device.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self.now = self.late = 0
        self.capturing, self.initialized = False, True
        self.stream: Any = Stream(self)

    def waits(self) -> dict[str, int]:
        """Return the number of waits of the host since ``forget``, by their cause."""
        return dict(self._native.waits())

    def launches(self) -> int:
        """Return the number of launches, allocations and copies since ``forget``."""
        return sum(self._native.launches().values())

    def forget(self) -> None:
        self._native.forget()

    def waited(self, what: str) -> None:
        self._native.waited(what)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Make every wait of the host raise an exception."""
        self._native.raise_on_waits(True)
        try:
            yield
        finally:
            self._native.raise_on_waits(False)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Report a capture, as within ``torch.cuda.graph``."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def module(self) -> ModuleType:
        """Return the device's module: the counterparts of those functions of ``torch.cuda`` that torch and mpinspect use."""

        @contextmanager
        def stream(wanted: Any) -> Iterator[None]:
            before, self.stream = self.stream, wanted
            try:
                yield
            finally:
                self.stream = before

        module = ModuleType(f"torch.{NAME}")
        functions: dict[str, Any] = {
            "Stream": lambda device=None: Stream(self),
            "Event": lambda enable_timing=False: Event(self),
            "stream": stream,
            "current_stream": lambda device=None: self.stream,
            "is_current_stream_capturing": lambda: self.capturing,
            "is_initialized": lambda: self.initialized,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: self.waited("synchronize"),
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "set_rng_state": lambda state, device=None: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "_is_in_bad_fork": lambda: False,
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        }
        vars(module).update(functions)
        return module


class Stream:
    def __init__(self, of: StandIn) -> None:
        self._of = of
        self.device = torch.device(NAME, 0)

    def wait_event(self, event: Event) -> None:
        assert event.at is not None

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._of)
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._of.waited("synchronize")


class Event:
    """An event that is complete ``late`` steps after it was recorded."""

    def __init__(self, of: StandIn) -> None:
        self._of = of
        self.at: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        assert not self._of.capturing
        self.at = self._of.now

    def query(self) -> bool:
        assert not self._of.capturing
        return self.at is None or self._of.now >= self.at + self._of.late

    def synchronize(self) -> None:
        if not self.query():
            self._of.waited("an event that is not complete")

    def elapsed_time(self, end: Event) -> float:
        return 0.1
