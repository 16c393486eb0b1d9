"""Functions of torch are wrapped while a listener is registered, and restored afterwards."""

import types

import pytest
import torch
from torch import nn

from mpinspect.runtime.torch_calls import CLIP_WITH_NORM, Calls


@pytest.fixture
def module() -> types.SimpleNamespace:
    return types.SimpleNamespace(double=lambda value, *, plus=0.0: 2 * value + plus)


def test_listeners_receive_the_arguments_however_they_are_passed(module: types.SimpleNamespace) -> None:
    calls, received = Calls((module, "double"), (module, "missing"), value=0, plus=1), []
    original = module.double

    def listener(value: float, plus: float | None) -> None:
        received.append((value, plus))

    calls.listen(listener)
    assert module.double(3.0) == 6.0
    assert module.double(value=4.0, plus=1.0) == 9.0
    calls.unlisten(listener)
    assert received == [(3.0, None), (4.0, 1.0)]
    assert module.double is original
    assert not hasattr(module, "missing")


def test_a_wrapper_of_other_code_is_preserved(module: types.SimpleNamespace) -> None:
    calls, received = Calls((module, "double"), value=0), []
    calls.listen(received.append)
    ours = module.double
    module.double = theirs = lambda value: ours(value) + 1
    calls.unlisten(received.append)
    assert module.double is theirs
    assert theirs(1.0) == 3.0
    assert received == []
    calls.listen(received.append)
    assert module.double(2.0) == 5.0
    assert received == [2.0]


def test_a_compiled_clipping_is_traced_through_and_gives_the_same() -> None:
    parameters = [nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.ones(3))]
    received: list[object] = []

    def clipped() -> list[torch.Tensor]:
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def listener(given: object, limit: object, norm: object) -> None:
        received.append(norm)

    expected = clipped()
    CLIP_WITH_NORM.listen(listener)
    try:
        found = torch.compile(clipped, backend="eager")()
        assert received == []
        assert all(map(torch.equal, clipped(), expected))
    finally:
        CLIP_WITH_NORM.unlisten(listener)
    assert all(map(torch.equal, found, expected))
    assert len(received) == 1
    assert nn.utils.clip_grads_with_norm_.__code__.co_filename == nn.utils.clip_grad.__file__
