"""What parallel, compiled and checkpointed models are wrapped in: their parts by their own names, and eagerly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: Modules whose names are not the model's own, by the name of their class, and what they call the module that they wrap.
#: By name, since importing the classes takes a second, and since torch moved some of them between its versions.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """Return the module that this one wraps; None where it is no wrapper. Reads nothing but ``_modules``: no lazy proxy wakes."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            inner: nn.Module | None = registered(module, "_modules").get(_WRAPPERS[kind.__name__])
            return inner
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model's own module, whatever wrappers are around it."""
    while (inner := wrapped_by(module)) is not None:
        module = inner
    return module


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether it is what ``torch.compile(module)`` returned, or wraps that."""
    inner = wrapped_by(module)
    return inner is not None and (type(module).__name__ == "OptimizedModule" or is_compiled_wrapper(inner))


def plain_names(model: nn.Module) -> dict[str, str]:
    """By each name of ``model.named_modules()`` the same without wrappers: "module.0._orig_mod.fc" -> "0.fc".

    A wrapper and what it wraps have one name. A user's own module may be called ``module`` as well, and keeps its name.
    """
    plain: dict[str, str] = {}
    wrapped: dict[str, Any] = {}
    for name, module in model.named_modules():  # what holds a module comes before it
        above, _, own = name.rpartition(".")
        is_own = bool(name) and wrapped[above] is not module
        plain[name] = f"{plain[above]}.{own}".lstrip(".") if is_own else plain.get(above, "")
        wrapped[name] = wrapped_by(module)
    return plain


def registered(module: nn.Module, table: str) -> dict[str, Any]:
    """``module._modules`` and its like, past any ``__getattribute__``; empty for a module whose ``__init__`` has not run."""
    found = object.__getattribute__(module, "__dict__").get(table)
    return found if isinstance(found, dict) else {}


@contextmanager
def compiled_modules_eager() -> Iterator[None]:
    """Run compiled modules as plain Python within the block: their graphs were made for other dtypes and see no modes."""
    if "torch._dynamo" in sys.modules:
        # Only a process that has it can hold a compiled module, and importing it takes seconds.
        import torch

        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
