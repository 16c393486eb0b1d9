"""Cached results of pointwise operators equal torch's results."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpinspect.shapes.record.meta import Pointwise, is_pointwise

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


ARGUMENTS = [
    (meta(3, 4), meta(3, 4)),
    (meta(3, 4), meta(4)),
    (meta(3, 1), meta(1, 4)),
    (meta(4, 3).t(), meta(4, 3).t()),
    (meta(3, 4, dtype=torch.float16), meta(3, 4)),
    (meta(3, 4, dtype=torch.float16), meta(dtype=torch.float32)),
    (meta(3, 4, dtype=torch.int64), meta(3, 4, dtype=torch.bool)),
    (meta(2, 3, 4, 5).to(memory_format=torch.channels_last), meta(3, 1, 1)),
    (meta(3, 8)[:, ::2], meta(3, 4)),
]


@pytest.mark.parametrize(
    "func", [aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.eq.Tensor, aten.maximum.default]
)
def test_remembered_results_are_torchs_own(func):
    remembered = Pointwise()
    assert is_pointwise(func)
    for first, second in [*ARGUMENTS, *ARGUMENTS]:
        expected, given = func(first, second), remembered.run(func, (first, second), {})
        assert (given.shape, given.stride(), given.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert given.is_meta


def test_equal_numbers_of_different_types_are_distinguished():
    remembered, x = Pointwise(), meta(3, dtype=torch.int64)
    for number in (2, 2.0, True, 1, 1.0):
        assert remembered.run(aten.mul.Scalar, (x, number), {}).dtype == aten.mul.Scalar(x, number).dtype


def test_tensors_with_values_are_computed():
    remembered = Pointwise()
    for value in (1.0, 2.0):
        assert remembered.run(aten.add.Tensor, (torch.tensor(value), torch.tensor(1.0)), {}).item() == value + 1


@pytest.mark.parametrize(
    "func", [aten.add_.Tensor, aten.add.out, aten.view.default, aten.mm.default, aten.native_layer_norm.default]
)
def test_operators_that_change_or_alias_their_arguments_are_not_cached(func):
    assert not is_pointwise(func)


def test_the_second_call_does_not_reach_torch():
    class Counts(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counts.calls += func is aten.relu.default
            return func(*args, **(kwargs or {}))

    remembered = Pointwise()
    with Counts():
        for _ in range(3):
            remembered.run(aten.relu.default, (meta(3),), {})
    assert Counts.calls == 1
