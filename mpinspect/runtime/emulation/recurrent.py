"""Makes the matrix products of LSTM, GRU and RNN visible to dispatch modes; oneDNN's fused kernel would hide them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class PlainRecurrence(TorchFunctionMode):
    """Computes recurrent layers gate by gate; oneDNN's fused kernel also lacks FP16 on most CPUs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RECURRENT:
            with _ONEDNN.off():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_RECURRENT = frozenset(getattr(home, name) for home in (torch, torch._VF) for name in NAMES)


class _Onednn:
    """Disables oneDNN, a process-wide setting, while any thread is inside ``off()``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._before = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    torch._C._set_mkldnn_enabled(self._before)


_ONEDNN = _Onednn()
