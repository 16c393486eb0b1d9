"""What copies and pickles of a model take along: everything of the user's, and none of our hooks.

A hook lives in the module's own dictionaries, which ``pickle``, ``torch.save(model)`` and ``copy.deepcopy`` take from
``Module.__getstate__``. That method is wrapped while anyone has hooks on, on each class that has its own, and put back after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpinspect.runtime.hooks import ModelHook

#: A module's tables of hooks, and beside each those that hold facts about its hooks by the same keys.
_TABLES = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}

_users: list[object] = []
_originals: dict[type, Any] = {}
_MISSING = object()


def leave_hooks_out(user: object, modules: Iterable[torch.nn.Module]) -> None:
    """From now on pickles and copies of these modules hold no ModelHook, until ``user`` and all others have stopped."""
    if not any(known is user for known in _users):
        _users.append(user)
    for kind in {_defining(type(module)) for module in modules}:
        if kind not in _originals:
            _originals[kind] = vars(kind).get("__getstate__", _MISSING)
            kind.__getstate__ = _without_our_hooks(kind.__getstate__)  # type: ignore[attr-defined]


def stop(user: object) -> None:
    """This user has no hooks any more; the last one leaves the classes as they were."""
    _users[:] = [known for known in _users if known is not user]
    if _users:
        return
    while _originals:
        kind, original = _originals.popitem()
        if original is _MISSING:
            del kind.__getstate__  # type: ignore[attr-defined]
        else:
            kind.__getstate__ = original  # type: ignore[attr-defined]


def _defining(kind: type) -> type:
    """The class whose ``__getstate__`` is called: one that has its own, else Module itself."""
    return next((base for base in kind.__mro__ if "__getstate__" in vars(base) and base is not object), torch.nn.Module)


def _without_our_hooks(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __getstate__(module: Any) -> Any:
        return _filtered(original(module))

    return __getstate__


def _filtered(state: Any) -> Any:
    """The state without our hooks; the very same object where there are none, or where it is not a module's usual dict."""
    if not isinstance(state, dict):
        return state
    changed = {}
    for table, beside in _TABLES.items():
        hooks = state.get(table)
        ours = {key for key, hook in hooks.items() if isinstance(hook, ModelHook)} if hooks else ()
        for name in (table, *beside) if ours else ():
            kept = state.get(name)
            if kept is not None:
                changed[name] = type(kept)((key, value) for key, value in kept.items() if key not in ours)
    return {**state, **changed} if changed else state
