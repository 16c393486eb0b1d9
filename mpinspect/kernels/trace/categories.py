"""What Kineto calls the kinds of events: it has renamed them ("Kernel" and "kernel", "Operator" and "cpu_op", ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Taker = Callable[[dict[str, Any]], None]

# Without case, underscores and spaces.
KERNELS = ("kernel", "concurrentkernel")
COPIES = ("gpumemcpy", "gpumemset", "memcpy", "memset", "asyncmemcpy", "asyncmemset")
LAUNCHES = ("cudaruntime", "cudadriver", "runtime", "driver", "hipruntime", "hipdriver", "xpuruntime", "xpudriver")
OPERATORS = ("cpuop", "operator")
ANNOTATIONS = ("userannotation",)
FRAMES = ("pythonfunction", "python")
FLOWS = ("fwdbwd", "forwardbackward")


class Takers(dict[object, Taker]):
    """What takes an event in, by its category as it is spelt: looked up once a spelling.

    Args:
        known: by the names above; others are passed over.
        without_category: takes the events that have none.
    """

    def __init__(self, known: dict[tuple[str, ...], Taker], without_category: Taker) -> None:
        super().__init__({None: without_category})
        self._known = {name: taker for names, taker in known.items() for name in names}

    def __missing__(self, category: object) -> Taker:
        plain = str(category).lower().replace("_", "").replace(" ", "")
        taker = self[category] = self._known.get(plain, _pass_over)
        return taker


def _pass_over(event: dict[str, Any]) -> None:
    """A category that nothing here needs."""
