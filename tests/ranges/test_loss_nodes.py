"""Nodes kept of a loss's graph show the same singular operations as the graph itself, also after its backward freed it."""

import pytest
import torch
from torch.nn import functional as F

from mpinspect.ranges.capture.graph import graph
from mpinspect.ranges.faults.measure.loss_nodes import kept_nodes
from mpinspect.ranges.faults.measure.singularities import infinite_operand, singular
from mpinspect.runtime.storages import StorageReference


def _scores(*shape: int) -> torch.Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape).requires_grad_()


def _of_a_difference(x: torch.Tensor) -> torch.Tensor:
    return ((x - x.detach()) ** 2).sum(1).sqrt().mean()


def _masked(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[1] = True
    return x.masked_fill(mask, -torch.inf).softmax(-1).square().sum()


def _entropy(x: torch.Tensor) -> torch.Tensor:
    chosen = (60 * x).softmax(-1)
    return -(chosen * chosen.half().float().log()).sum(-1).mean()


def _masked_after_nans(x: torch.Tensor) -> torch.Tensor:
    scores = (x * torch.full((4, 6), torch.nan)) @ torch.ones(6, 6, requires_grad=True)
    return scores.masked_fill(torch.eye(4, 6).bool(), -torch.inf).softmax(-1).square().sum()


LOSSES = {
    "mask of scores that are NaN already": _masked_after_nans,
    "logarithm of zero": lambda x: (x - x.detach().amin()).log().mean(),
    "entropy in FP16": _entropy,
    "root of zero": _of_a_difference,
    "masked row": _masked,
    "row of zeros": lambda x: (x * 0 / (x * 0).norm(dim=1, keepdim=True)).sum(),
    "division by zero": lambda x: (1 / (x - x.detach())).sum(),
    "no target": lambda x: F.cross_entropy(x, torch.full((4,), -100)),
    "infinite target": lambda x: F.mse_loss(x, torch.full((4, 6), torch.inf)),
    "power of zero": lambda x: ((x - x.detach()) ** 0.5).sum(),
    "exp": lambda x: (1000 * x).exp().mean(),
    "constant": lambda x: (x * torch.tensor(torch.nan)).sum(),
    "fine": lambda x: F.cross_entropy(x, torch.arange(4)),
}


def _found(nodes: list[object]) -> list[object]:
    return [each for node in nodes for find in (singular, infinite_operand) if (each := find(node)) is not None]


@pytest.mark.parametrize("name", LOSSES)
def test_kept_nodes_show_the_same_as_the_graph_and_still_do_after_the_backward(name: str) -> None:
    loss = LOSSES[name](_scores(4, 6))
    expected = _found(graph([loss.grad_fn], 24))
    assert bool(expected) is (name != "fine")
    kept = kept_nodes([loss.grad_fn])
    loss.backward()
    assert _found(list(kept)) == expected


def test_a_loss_without_such_operations_keeps_nothing() -> None:
    assert kept_nodes([(_scores(4, 6) + 1).sum().grad_fn]) == []


@pytest.mark.parametrize("retains", [False, True])
def test_neither_the_graph_nor_its_large_tensors_are_kept(retains: bool) -> None:
    x = _scores(300, 300)
    large = x.softmax(-1)
    small = large[:2].log()
    loss = small.sum()
    kept = kept_nodes([loss.grad_fn])
    references = [StorageReference(each) for each in (large, loss)]
    loss.backward(retain_graph=retains)
    del large, loss, small
    assert all(each.expired() for each in references)
    assert [node.name().partition("Backward")[0] for node in kept][:3] == ["Sum", "Log", "Slice"]


def test_few_bytes_are_kept() -> None:
    x = _scores(200, 300)
    loss = torch.stack([x.exp() for _ in range(22)]).sum()
    kept = [node._saved_result for node in kept_nodes([loss.grad_fn]) if node.name().startswith("Exp")]
    assert sum(each.nbytes for each in kept if not each.is_meta) <= 4 << 20
    assert any(each.is_meta for each in kept)


def test_a_value_that_was_changed_in_place_since_is_not_read() -> None:
    temperature = torch.ones(1)
    loss = (_scores(4, 6) / temperature).sum()
    kept = kept_nodes([loss.grad_fn])
    temperature.zero_()
    assert _found(list(kept)) == []


def test_a_value_whose_memory_was_freed_since_is_not_read() -> None:
    divisor = torch.zeros(6, requires_grad=True)
    loss = (_scores(4, 6) / (divisor + 0)).sum()
    kept = kept_nodes([loss.grad_fn])
    assert _found(list(kept))
    for node in kept:
        for value, _ in node._saved.values():
            if isinstance(value, torch.Tensor):
                value.untyped_storage().resize_(0)
    assert _found(list(kept)) == []


def test_values_that_hooks_have_packed_stay_packed() -> None:
    unpacked = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = (_scores(4, 6) ** 2).log().sum()
    assert kept_nodes([loss.grad_fn])
    assert unpacked == []
