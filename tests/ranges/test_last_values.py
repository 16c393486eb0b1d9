"""Results of reading a tensor are reused only for the same unchanged memory, and equal the results of a new reading."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Of
from torch import nn

pytest.importorskip("numba")

from mpinspect import Inspector
from mpinspect.counting import fastest
from mpinspect.ranges.capture import largest as largest_magnitudes
from mpinspect.ranges.capture import observations
from mpinspect.ranges.capture.host_rows import HostRows
from mpinspect.ranges.capture.observations import LastValues
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import TensorKey

_LENGTH = observations._LEAST
_BLOCK = (256, _LENGTH // 256)


@pytest.fixture
def last() -> LastValues[str]:
    return LastValues()


# -- tensors whose results are reused --------------------------------------------------------------------------------------


def test_a_result_is_reused_for_the_tensor_itself(last: LastValues[str]) -> None:
    tensor = torch.randn(_LENGTH)
    assert last.found_in(tensor) is None
    last.keep(tensor, "found")
    assert last.remembers
    assert last.found_in(tensor) == "found"
    assert last.found_in(tensor) == "found"


@pytest.mark.parametrize(
    "other",
    [
        lambda tensor: tensor.view(-1),
        lambda tensor: tensor.reshape(2, 128, -1),
        lambda tensor: tensor.unsqueeze(0),
        lambda tensor: tensor.view(-1)[:].view(_BLOCK),
    ],
    ids=["flat", "three dimensions", "unsqueezed", "sliced in full"],
)
def test_a_result_is_reused_for_another_shape_of_the_same_memory(
    last: LastValues[str], other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.randn(_BLOCK)
    last.keep(tensor, "found")
    assert last.found_in(other(tensor)) == "found"
    last.keep(other(tensor), "of the view")
    assert last.found_in(tensor) == "of the view"


def test_a_result_is_reused_for_a_view_of_a_view(last: LastValues[str]) -> None:
    base = torch.randn(2 * _LENGTH)
    half = base[_LENGTH:]
    last.keep(half, "found")
    assert last.found_in(half.view(_BLOCK)) == "found"
    assert last.found_in(base[:_LENGTH]) is None
    assert last.found_in(base) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda tensor: torch.randn(_BLOCK),
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.t(),
        lambda tensor: tensor.view(-1)[:-1],
        lambda tensor: tensor.view(-1)[1:],
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor.view(torch.bfloat16).view(-1)[: tensor.numel()],
        lambda tensor: tensor.view(-1)[:1].expand(_LENGTH),
        lambda tensor: tensor.view(-1).as_strided((_LENGTH // 2, 2), (1, _LENGTH // 2)),
    ],
    ids=[
        *("another tensor", "a copy", "transposed", "its beginning", "its end", "integers", "another dtype"),
        *("one value", "other strides"),
    ],
)
def test_no_result_is_reused_for_other_values(
    last: LastValues[str], other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.randn(_BLOCK)
    last.keep(tensor, "found")
    assert last.found_in(other(tensor)) is None
    assert last.found_in(tensor) == "found"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.mul_(2),
        lambda tensor: tensor.view(-1)[3:4].zero_(),
        lambda tensor: tensor.detach().zero_(),
        lambda tensor: torch.neg(tensor, out=tensor),
    ],
    ids=["itself", "one value of it", "by way of detach", "as an output"],
)
def test_no_result_is_reused_after_an_in_place_change(
    last: LastValues[str], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.randn(_BLOCK)
    last.keep(tensor, "found")
    change(tensor)
    assert last.found_in(tensor) is None
    assert last.found_in(tensor.view(-1)) is None
    last.keep(tensor, "now")
    assert last.found_in(tensor) == "now"


def test_no_result_is_reused_for_a_new_tensor_at_the_same_address(last: LastValues[str]) -> None:
    """An allocator reuses memory, and the new tensor's version is 0 again."""
    memory = bytearray(4 * _LENGTH)
    first = torch.frombuffer(memory, dtype=torch.float32)
    address = first.data_ptr()
    last.keep(first, "found")
    assert last.found_in(first) == "found"
    del first
    second = torch.frombuffer(memory, dtype=torch.float32)
    assert second.data_ptr() == address
    assert last.found_in(second) is None


def test_the_remembered_tensor_can_be_freed(last: LastValues[str]) -> None:
    tensor = torch.randn(_LENGTH)
    last.keep(tensor, "found")
    owner = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert owner() is None


def test_no_result_is_reused_after_an_assignment_to_data(last: LastValues[str]) -> None:
    tensor, other = torch.randn(_LENGTH), torch.randn(_LENGTH)
    last.keep(tensor, "found")
    tensor.data = other
    assert last.found_in(tensor) is None


class _Subclass(torch.Tensor):
    pass


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(_LENGTH)


_NOT_KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.randn(_LENGTH - 1),
    "empty": lambda: torch.randn(0),
    "a subclass": lambda: torch.randn(_LENGTH).as_subclass(_Subclass),
    "a parameter": lambda: nn.Parameter(torch.randn(_LENGTH)),
    "sparse": lambda: torch.ones(_LENGTH).to_sparse(),
    "with gaps": lambda: torch.randn(2 * _LENGTH)[::2],
    "transposed": lambda: torch.randn(_BLOCK[::-1]).t(),
    "inference": _inference,
}


@pytest.mark.parametrize("kind", _NOT_KEPT)
def test_unsupported_tensors_are_read_again(last: LastValues[str], kind: str) -> None:
    """The tensor before is forgotten too."""
    before, tensor = torch.randn(_LENGTH), _NOT_KEPT[kind]()
    last.keep(before, "before")
    assert last.found_in(tensor) is None
    last.keep(tensor, "found")
    assert not last.remembers
    assert last.found_in(tensor) is None
    assert last.found_in(before) is None


def test_the_result_none_is_not_remembered(last: LastValues[str]) -> None:
    before, tensor = torch.randn(_LENGTH), torch.randn(_LENGTH)
    last.keep(before, "before")
    last.keep(tensor, None)
    assert not last.remembers
    assert last.found_in(tensor) is None
    assert last.found_in(before) is None


def test_forget_drops_the_result(last: LastValues[str]) -> None:
    tensor = torch.randn(_LENGTH)
    last.keep(tensor, "found")
    last.forget()
    assert not last.remembers
    assert last.found_in(tensor) is None


# -- in an inspected training ----------------------------------------------------------------------------------------------


def _block() -> nn.Module:
    """A residual branch: its output and its last layer share one gradient, in the same memory."""
    layers = {"norm": nn.LayerNorm(256), "up": nn.Linear(256, 512), "proj": nn.Linear(512, 256)}
    return Of(lambda self, x: x + self.proj(torch.tanh(self.up(self.norm(x)))), **layers)


def _network() -> nn.Module:
    """Blocks and a head; the network returns the head's output flattened."""
    blocks = nn.Sequential(_block(), _block())
    layers = {"embedding": nn.Embedding(50, 256), "blocks": blocks, "head": nn.Linear(256, 256)}
    return Of(lambda self, tokens: self.head(self.blocks(self.embedding(tokens))).flatten(0, 1), **layers)


Seen = tuple[dict[TensorKey, Any], list[tuple[tuple[str, str], list[float]]], list[tuple[str, ...]], list[float]]


class _Reads:
    """The numbers of values read for counting and for the largest magnitude."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted = self.measured = 0
        count, largest = HostRows.count, largest_magnitudes.largest_magnitude

        def counted(rows: HostRows, tensor: torch.Tensor) -> torch.Tensor:
            self.counted += tensor.numel()
            return count(rows, tensor)

        def measured(tensor: torch.Tensor) -> float | None:
            self.measured += tensor.numel()
            return largest(tensor)

        monkeypatch.setattr(HostRows, "count", counted)
        monkeypatch.setattr(largest_magnitudes, "largest_magnitude", measured)

    def take(self) -> tuple[int, int]:
        found, self.counted, self.measured = (self.counted, self.measured), 0, 0
        return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> _Reads:
    return _Reads(monkeypatch)


def _nothing_found(self: LastValues[Any], tensor: torch.Tensor) -> None:
    return None


def _train(
    kinds: tuple[str, ...],
    *,
    loss_scale: float | None = None,
    each_step: Callable[[int, nn.Module, list[torch.Tensor]], None] | None = None,
) -> Seen:
    """Train three steps of two micro-batches; ``each_step`` is called with the outputs of the blocks."""
    torch.manual_seed(0)
    network = _network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    readings: list[tuple[str, ...]] = []
    outputs: list[torch.Tensor] = []
    values: list[float] = []
    with Inspector(network, capture=kinds, loss_scale=loss_scale, optimizers=optimizer) as inspector:
        watch = inspector._capture._watch
        assert watch is not None
        for step in range(3):
            optimizer.zero_grad()
            for micro_batch in range(2):
                tokens = torch.randint(0, 50, (2, 128), generator=torch.Generator().manual_seed(2 * step + micro_batch))
                hidden = network.embedding(tokens)
                outputs = []
                for block in network.blocks:
                    hidden = block(hidden)
                    outputs.append(hidden)
                if each_step is not None:
                    each_step(step, network, outputs)
                (network.head(hidden).flatten(0, 1).square().mean() * (loss_scale or 1.0)).backward()
                network(tokens).logsumexp(-1).mean().mul(loss_scale or 1.0).backward()
            readings += [(reading.phase, reading.what, reading.name) for reading in watch._log.readings]
            optimizer.step()
    values = [float(parameter.detach().double().sum()) for parameter in network.parameters()]
    rings = [(key, list(ring)) for key, ring in sorted(watch._judge._history._maxima.items())]
    assert inspector.session().notes == ()
    return inspector.session().totals(), rings, readings, values


def _with_and_without(monkeypatch: pytest.MonkeyPatch, reads: _Reads, *given: Any, **more: Any) -> list[int]:
    """Train with and without reuse, assert equal results, and return the numbers of values read."""
    found = _train(*given, **more)
    read = [sum(reads.take())]
    monkeypatch.setattr(LastValues, "found_in", _nothing_found)
    plain = _train(*given, **more)
    read.append(sum(reads.take()))
    assert found[0].keys() == plain[0].keys()
    for key, window in plain[0].items():
        assert found[0][key] == window, key
    assert found[1:] == plain[1:]
    return read


@pytest.mark.parametrize(
    "kinds",
    [KINDS, (WEIGHT_GRADIENT, ACTIVATION_GRADIENT), (WEIGHT_GRADIENT,), ()],
    ids=["every kind", "gradients", "weight gradients", "none"],
)
def test_reuse_reads_fewer_values_with_the_same_results(
    monkeypatch: pytest.MonkeyPatch, reads: _Reads, kinds: tuple[str, ...]
) -> None:
    with_it, without = _with_and_without(monkeypatch, reads, kinds)
    assert with_it < without


@pytest.mark.parametrize("loss_scale", [1024.0, 1000.0], ids=["a power of two", "not a power of two"])
def test_reuse_under_a_loss_scale_has_the_same_results(
    monkeypatch: pytest.MonkeyPatch, reads: _Reads, loss_scale: float
) -> None:
    """If the scale is not a power of two, the counts are of divided values, but the watch reads the original ones."""
    with_it, without = _with_and_without(monkeypatch, reads, KINDS, loss_scale=loss_scale)
    assert with_it < without


def test_a_gradient_shared_by_a_block_and_its_last_layer_is_read_once(reads: _Reads) -> None:
    block = _block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    read: list[tuple[int, int]] = []
    with Inspector(block, capture=(ACTIVATION_GRADIENT,), optimizers=optimizer):
        for _ in range(4):
            output = block(torch.randn(2, 128, 256))
            reads.take()
            output.square().mean().backward()
            read.append(reads.take())
            optimizer.step()
            optimizer.zero_grad()
    # The watch and the diagnoses each read the parameters' gradients.
    parameters = 2 * sum(parameter.numel() for parameter in block.parameters())
    outputs = 2 * 128 * 256
    # Four outputs, in every step: ``norm``, ``up`` (twice as wide) and ``proj``. The block shares proj's counts.
    assert [counted for counted, _ in read] == [4 * outputs] * 4
    # The watch also reads proj's input, which no module made, and the loss.
    others = 2 * outputs + 1
    assert [measured - parameters for _, measured in read] == [outputs + others, others, others, others]


def test_a_shared_gradient_is_divided_and_counted_once(reads: _Reads) -> None:
    """The scale is not a power of two, so the counts are of divided values and cannot replace a reading."""
    block = _block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    outputs, divided = 2 * 128 * 256, []
    count = fastest.count

    def counted(tensor: torch.Tensor, divisor: float | torch.Tensor | None = None) -> torch.Tensor:
        if divisor is not None:
            divided.append(tensor.numel())
        return count(tensor, divisor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "count", counted)
        with Inspector(block, capture=(ACTIVATION_GRADIENT,), loss_scale=1000.0, optimizers=optimizer):
            for _ in range(3):
                (block(torch.randn(2, 128, 256)).square().mean() * 1000.0).backward()
                optimizer.step()
    assert sum(divided) == 3 * 4 * outputs


@pytest.mark.parametrize("steps", [(0, 1, 2), (1,), (1, 2), (0,)], ids=str)
def test_no_result_is_reused_for_a_gradient_changed_between_two_modules(
    monkeypatch: pytest.MonkeyPatch, reads: _Reads, steps: tuple[int, ...]
) -> None:
    """Another hook changes the gradient in place, between the block's hook and its last layer's."""

    def change(step: int, network: nn.Module, outputs: list[torch.Tensor]) -> None:
        if step in steps:
            for output in outputs:
                # Runs after the inspector's hook on the same tensor, and before the last layer's hook.
                output.register_hook(lambda gradient: gradient.mul_(0.125).numel() and None)

    with_it, without = _with_and_without(monkeypatch, reads, KINDS, each_step=change)
    assert with_it < without


def test_a_gradient_changed_in_place_is_counted_with_its_values_at_each_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's counts are the block's, shifted by exactly 2^-3."""
    block = _block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
    x = torch.randn(2, 128, 256)
    model = nn.Sequential(block)
    histograms = []
    for changed in (False, True):
        kinds = (ACTIVATION_GRADIENT,)
        with Inspector(model, capture=kinds, include=("0", "0.proj"), optimizers=optimizer) as inspector:
            for _ in range(3):
                output = block(x)
                if changed:
                    output.register_hook(lambda gradient: gradient.mul_(0.125).numel() and None)
                output.sin().sum().backward()
                optimizer.step()
        totals = inspector.session().totals()
        histograms.append([totals[TensorKey(name, ACTIVATION_GRADIENT)].histogram for name in ("0", "0.proj")])
    (same_block, same_layer), (block_before, layer_after) = histograms
    assert same_block == same_layer == block_before
    assert layer_after.max_exponent == block_before.max_exponent - 3
    assert layer_after.total == block_before.total
    assert layer_after.counts.tolist() == block_before.counts.tolist()


def test_the_watch_names_the_inner_module_of_a_shared_output() -> None:
    """The container returns its head's output in another shape; both have the same maxima."""

    model = Of(lambda self, x: self.head(x).flatten(0, 1), head=nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    largest: list[float] = []
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(4):
            if step == 3:
                with torch.no_grad():
                    model.head.weight[0, 0] = float("inf")
            output = model(torch.randn(2, 128, 256))
            largest.append(float(output.detach().abs().max()))
            output.sum().backward()
            optimizer.step()
    assert inspector._capture._watch is not None
    maxima = inspector._capture._watch._judge._history._maxima
    assert list(maxima["head", "activation"]) == list(maxima["", "activation"]) == largest[:3]
    event = inspector.session().events[0]
    assert (event.step, event.phase, event.module) == (3, "forward", "head")
    assert event.last_maxima == tuple(largest[:3])


def test_an_output_changed_in_place_by_its_container_is_read_again() -> None:
    changed = Of(lambda self, x: self.head(x).mul_(float("inf")).flatten(0, 1), head=nn.Linear(256, 256))
    model = nn.Sequential(changed)
    with Inspector(model) as inspector:
        model(torch.randn(2, 128, 256)).sum().backward()
    event = inspector.session().events[0]
    assert (event.phase, event.module) == ("forward", "0")
