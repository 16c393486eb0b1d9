"""What a model is called in the report: names that tell a script's models apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpinspect.run.models.owners import Holders, Parameters, named_children
from mpinspect.runtime.wrappers import unwrapped, wrapped_by


@dataclass(frozen=True)
class Label:
    """What is known of a model's name.

    ``parent``: the outermost module around it and the path to it, as in "ActorCritic.actor"; "" where it is the outermost.
    ``variable``: what the script calls it; "" where that is not known.
    """

    parent: str = ""
    variable: str = ""


def label(model: nn.Module, holders: Holders, variables: Mapping[int, str]) -> Label:
    """Read from the modules around the model and from the script's variables, by id."""
    around = {id(top): top for top in map(unwrapped, holders.outermost(model))}
    if len(around) != 1 or id(model) in around:
        # Two that hold it, side by side: it belongs to neither.
        return Label("", variables.get(id(model), ""))
    (top,) = around.values()
    path = _path(top, model)
    of_torch = _is_of_torch(top) and variables.get(id(top))
    parent = ".".join((of_torch or type(top).__name__, *path)) if path else ""
    return Label(parent, variables.get(id(model), ""))


def free_name(model: nn.Module, known: Label, taken: Mapping[str, Label]) -> str:
    """A name for a model and its directory that no other has.

    Args:
        model: a part of a larger one has its path for a name, others their class or variable.
        known: its label.
        taken: labels of the models before, by name.
    """
    wanted = [_plain(name) for name in _wanted(model, known) if name] or ["Model"]
    for name in wanted:
        if name not in taken:
            return name
        if taken[name] == known:  # one built anew in the same place
            return _numbered(name, taken)
    return _numbered(wanted[0], taken)


def _wanted(model: nn.Module, known: Label) -> Iterable[str]:
    if isinstance(model, Parameters):
        return ("Parameters",)
    if known.parent:
        return (known.parent,)
    own = type(model).__name__
    return (known.variable, own) if _is_of_torch(model) else (own, known.variable)


def _numbered(name: str, taken: Mapping[str, Any]) -> str:
    numbers = range(2, len(taken) + 3)
    return next(each for number in numbers if (each := f"{name}-{number}") not in taken)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name)


def _is_of_torch(model: nn.Module) -> bool:
    """Whether its class tells nothing of what it is: Sequential, Linear, ..."""
    return type(model).__module__.startswith("torch.nn.")


def _path(top: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """The shortest path from one to the other, without wrappers; () where there is none."""
    seen = {id(top)}
    waiting: list[tuple[nn.Module, tuple[str, ...]]] = [(top, ())]
    for each, path in waiting:
        for name, child in named_children(each):
            inside = path if wrapped_by(each) is child else (*path, name)
            if child is model:
                return inside
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, inside))
    return ()
