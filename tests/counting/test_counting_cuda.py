"""The CUDA kernels' availability, rows in a device buffer, and, with a GPU, the kernels themselves."""

import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trainings import take_step
from waiting_gradients import row_of, waited

from mpinspect import Inspector
from mpinspect.counting import fastest, reference
from mpinspect.counting.bits import merge_rows
from mpinspect.counting.cuda import available, driver
from mpinspect.counting.layout import decode
from mpinspect.counting.pieces import COUNTABLE, fills_its_memory
from mpinspect.ranges.capture import device_rows
from mpinspect.ranges.capture.device_rows import DeviceRows
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.windows.tensors import TensorKey

# -- unavailable kernels -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Reset ``available`` to its state before the first count, on a machine with CUDA."""
    monkeypatch.setattr(available, "_trouble", [])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    loaded = available._loaded
    loaded.cache_clear()
    yield monkeypatch
    loaded.cache_clear()


def test_without_a_compiler_the_reference_counts_and_a_note_says_so(fresh: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("NVRTC was not found")

    fresh.setattr(driver, "_libcuda", missing)
    fresh.setattr(torch.cuda, "current_device", lambda: 0)
    assert available.count(torch.ones(3)) is None
    assert fastest.warm_up([torch.device("cuda", 0)]) == [available.trouble()]
    assert "NVRTC was not found" in available.trouble()


def test_other_vendors_gpus_have_no_kernels(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(torch.version, "cuda", None)
    assert available.counter() is None
    assert "are for CUDA" in available.trouble()


def test_failed_kernels_are_not_tried_again(fresh: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*given: object) -> torch.Tensor:
        calls.append(given)
        raise RuntimeError("no compiler\nhere")

    ways = types.SimpleNamespace(DTYPES=COUNTABLE, count=fail, warm_up=fail)
    fresh.setattr(available, "_loaded", lambda: ways)
    assert available.count(torch.ones(3)) is None
    assert available.count(torch.ones(3)) is None
    assert available.warm_up([torch.device("cuda", 0)]) == available.trouble()
    assert len(calls) == 1
    assert "no compiler here" in available.trouble()


def test_running_out_of_memory_does_not_disable_the_kernels(fresh: pytest.MonkeyPatch) -> None:
    def fail(values: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    fresh.setattr(available, "_loaded", lambda: types.SimpleNamespace(DTYPES=COUNTABLE, count=fail))
    with pytest.raises(torch.OutOfMemoryError):
        available.count(torch.ones(3))
    assert available.trouble() == ""


# -- rows in a buffer, with the CPU as the device -----------------------------------------------------------------------


class _Counter(types.SimpleNamespace):
    """Replaces ``counting.cuda.counter`` by the reference, and counts its calls."""

    DTYPES = COUNTABLE

    def __init__(self) -> None:
        super().__init__(one=0, many=[])

    @staticmethod
    def Counted(values: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values, row

    def add(self, values: torch.Tensor, row: torch.Tensor) -> None:
        self.one += 1
        row.copy_(merge_rows([row, reference.count(values)]))

    def add_many(self, counted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.many.append(len(counted))
        for values, row in counted:
            # The kernels receive an address and a length, and a row of the dtype's layout.
            assert values.dtype in COUNTABLE
            assert row.shape == reference.count(values).shape
            assert fills_its_memory(values)
            row.copy_(merge_rows([row, reference.count(values)]))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> _Counter:
    stand_in = _Counter()
    monkeypatch.setattr(available, "counter", lambda: stand_in)
    return stand_in


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def rows(counter: _Counter, notes: list[str]) -> DeviceRows:
    return DeviceRows(torch.device("cpu"), notes.append)


def _sent(rows: DeviceRows, given: list[torch.Tensor]) -> dict[int, np.ndarray]:
    return {
        index: row.copy()
        for indices, copy in rows.send(given)
        for index, row in zip(indices, copy.values(), strict=True)
    }


def test_rows_of_several_steps(rows: DeviceRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers alternate and are cleared. Rows that do not fit are counted outside; the next step's buffer is larger."""
    monkeypatch.setattr(device_rows, "_FIRST_CAPACITY", 4)
    rows = DeviceRows(torch.device("cpu"), [].append)
    for step in range(6):
        tensors = [torch.randn(10 + i + step) for i in range(3 if step < 2 else 7)]
        given = [rows.count(tensor) for tensor in tensors]
        for tensor, row in zip(tensors, given, strict=True):
            assert torch.equal(row, reference.count(tensor))
        found = _sent(rows, given)
        assert len(found) == (3 if step < 2 else 4 if step == 2 else 7)
        for index, row in found.items():
            assert row.tolist() == reference.count(tensors[index]).tolist()


def test_tensors_that_the_kernels_do_not_support_are_counted_outside_the_buffer(rows: DeviceRows) -> None:
    sparse = torch.sparse_coo_tensor([[1, 3]], [1.0, 2.0], (5,), check_invariants=True).coalesce()
    for tensor in (torch.ones(3, dtype=torch.float64), sparse):
        row = rows.count(tensor)
        assert torch.equal(row, reference.count(tensor))
        assert rows.send([row]) == []


def test_waiting_gradients_are_counted_in_one_launch(rows: DeviceRows, counter: _Counter) -> None:
    alone = torch.randn(4)
    row = rows.count(alone)
    for micro_batch in range(2):
        gradients = [torch.randn(shape) for shape in [(3,), (30, 41), (1,), (17, 5), (0,)]]
        waiting = waited(*gradients)
        rows.count_together(waiting)
        assert (counter.one, counter.many) == (1, [len(gradients)] * (micro_batch + 1))
        for gradient, each in zip(gradients, waiting, strict=True):
            assert torch.equal(row_of(each), reference.count(gradient))
    found = _sent(rows, [row, *(row_of(each) for each in waiting)])
    assert found[0].tolist() == reference.count(alone).tolist()
    for index, gradient in enumerate(gradients, 1):
        assert found[index].tolist() == reference.count(gradient).tolist()


def test_gradients_beyond_the_buffers_capacity_are_counted_outside_it(
    counter: _Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_FIRST_CAPACITY", 2)
    rows = DeviceRows(torch.device("cpu"), [].append)
    gradients = [torch.randn(length) for length in (5, 6, 7)]
    for step in range(3):
        waiting = waited(*gradients)
        rows.count_together(waiting)
        given = [row_of(each) for each in waiting]
        for gradient, row in zip(gradients, given, strict=True):
            assert torch.equal(row, reference.count(gradient))
        assert set(_sent(rows, given)) == ({0, 1} if step == 0 else {0, 1, 2})
    assert counter.many == [2, 3, 3]


def test_waiting_gradients_are_counted_without_kernels(rows: DeviceRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "counter", lambda: None)
    gradients = [torch.randn(5), torch.randn(6)]
    waiting = waited(*gradients)
    rows.count_together(waiting)
    for gradient, each in zip(gradients, waiting, strict=True):
        assert torch.equal(row_of(each), reference.count(gradient))
    assert rows.send([row_of(each) for each in waiting]) == []


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(5, 3, dtype=torch.complex64),
        torch.randn(5, 3, dtype=torch.complex128),
        torch.randn(10, 3)[::2],
        torch.randn(1, 3).expand(5, 3),
        torch.randn(3, 5).t(),
        torch.randn(20)[4:19],
        torch.randn(0),
    ],
    ids=["float64", "complex64", "complex128", "with gaps", "expanded", "transposed", "a part", "empty"],
)
def test_waiting_gradients_of_every_dtype_and_layout_are_counted(
    fresh: pytest.MonkeyPatch, rows: DeviceRows, notes: list[str], gradient: torch.Tensor
) -> None:
    gradients = [torch.randn(4), gradient, torch.randn(6)]
    waiting = waited(*gradients)
    rows.count_together(waiting)
    for each, expected in zip(waiting, gradients, strict=True):
        assert torch.equal(row_of(each), reference.count(expected))
    assert notes == []


def test_kernels_that_fail_at_the_end_of_a_backward_lose_only_the_waiting_gradients(
    rows: DeviceRows, counter: _Counter, fresh: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """The waiting gradients have no counts; rows counted earlier are sent."""

    def fail(counted: object) -> None:
        raise RuntimeError("no compiler")

    before = torch.randn(4)
    row = rows.count(before)
    counter.add_many = fail
    waiting = waited(torch.randn(3), torch.randn(5))
    rows.count_together(waiting)
    assert [each.found for each in waiting] == [None, None]
    assert _sent(rows, [row])[0].tolist() == reference.count(before).tolist()
    assert notes == [available.trouble()]
    assert "no compiler" in notes[0]


@pytest.mark.parametrize("kinds", [KINDS, ("weight_gradient",)])
def test_an_inspector_records_the_same_through_a_buffer(
    counter: _Counter, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    def run(through_buffer: bool) -> tuple[dict[TensorKey, Any], tuple[str, ...], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with monkeypatch.context() as patch, Inspector(model, capture=kinds) as inspector:
            if through_buffer:
                buffer = DeviceRows(torch.device("cpu"), inspector._recording.note)
                patch.setattr(inspector._capture._tally, "_host_rows", buffer)
            for _ in range(5):
                optimizer.zero_grad()
                for _ in range(2):
                    model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
        session = inspector.session()
        return session.totals(), session.notes, [parameter.detach().clone() for parameter in model.parameters()]

    plain, buffered = run(False), run(True)
    assert buffered[:2] == plain[:2]
    assert all(torch.equal(here, there) for here, there in zip(plain[2], buffered[2], strict=True))
    # Small output gradients wait with the parameters' on a CPU: those of the two layers whose output has one.
    assert counter.many == [4 + 2 * ("activation_gradient" in kinds)] * 10


# -- on a GPU -----------------------------------------------------------------------------------------------------------


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _messy(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return random bits (every exponent, zeros, infinities, NaNs), followed by values in a gradient's range."""
    generator = torch.Generator().manual_seed(numel)
    bits = torch.randint(0, 256, (numel // 2 * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 1:
        return bits
    return torch.cat((bits, torch.randn(numel - numel // 2, generator=generator).mul(1e-3).to(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(COUNTABLE, key=str), ids=str)
def test_the_same_integers_on_a_gpu_without_a_wait(dtype: torch.dtype) -> None:
    from mpinspect.counting.cuda import counter as gpu

    tensors = [_messy(dtype, numel) for numel in (2, 511, 512, 513, 4096, 100_003)]
    there = [tensor.cuda() for tensor in tensors]
    for tensor in there:
        gpu.count(tensor)
    with _no_synchronisation():
        rows = [gpu.count(tensor) for tensor in there]
        odd = [gpu.count(tensor[1::3]) for tensor in there]
        wide = gpu.count(there[2][:1].expand(1000, 7))
        many = [gpu.empty_row(gpu.encoding_of(dtype), tensor.device) for tensor in there]
        gpu.add_many([gpu.Counted(tensor, row) for tensor, row in zip(there, many, strict=True)])
    for tensor, row, third, together in zip(tensors, rows, odd, many, strict=True):
        assert torch.equal(row.cpu(), reference.count(tensor))
        assert torch.equal(third.cpu(), reference.count(tensor[1::3]))
        assert torch.equal(together.cpu(), reference.count(tensor))
    assert torch.equal(wide.cpu(), reference.count(tensors[2][:1].expand(1000, 7)))
    assert available.trouble() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["subnormal", "nan", "zero", "one", "two scales", "every exponent"])
def test_large_tensors_of_every_make_up_on_a_gpu(kind: str) -> None:
    from mpinspect.counting.cuda import counter as gpu

    numel = 3_000_001
    values = torch.randn(numel)
    if kind == "subnormal":
        values = torch.randint(0, 1 << 23, (numel,), dtype=torch.int32).view(torch.float32)
    elif kind == "two scales":
        values[::2] *= 2.0**-60
    elif kind == "every exponent":
        values = torch.randint(-(1 << 31), 1 << 31, (numel,)).to(torch.int32).view(torch.float32)
    else:
        values.fill_({"nan": float("nan"), "zero": 0.0, "one": 1.0}[kind])
    assert torch.equal(gpu.count(values.cuda()).cpu(), reference.count(values))


@pytest.mark.gpu
def test_more_than_two_to_the_31_values() -> None:
    from mpinspect.counting.cuda import counter as gpu

    numel = (1 << 31) + 12_345
    if torch.cuda.mem_get_info()[0] < 3 * numel:
        pytest.skip("needs 6.4 GB of free GPU memory")
    values = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    values[-1] = 3
    histogram = decode(gpu.count(values).cpu().numpy())
    assert histogram.total == numel
    assert histogram.counts.tolist() == [numel - 1, 1]


@pytest.mark.gpu
def test_largest_magnitudes_on_a_gpu_without_a_wait() -> None:
    """Many tensors of every dtype, on two streams; with ``only_if_broken``, reading depends on an earlier non-finite value."""
    from mpinspect.counting.cuda import counter as gpu

    tensors = [_messy(dtype, numel) for dtype in sorted(COUNTABLE, key=str) for numel in (2, 513, 100_003)]
    tensors += [
        torch.full((300,), -math.inf),
        torch.tensor([1.0, -math.inf, math.inf]),
        torch.zeros(5),
        torch.randn(70_000),
    ]
    there = [tensor.cuda() for tensor in tensors]
    slots = torch.zeros(4, len(tensors) + 1, dtype=torch.int64, device="cuda")
    addresses = [range(row.data_ptr(), row.data_ptr() + 8 * len(tensors), 8) for row in slots]
    words = [row[-1:] for row in slots]
    gpu.largest_many(there, addresses[3], words[3])
    slots.zero_()
    other = torch.cuda.Stream()
    with _no_synchronisation():
        gpu.largest_many(there, addresses[0], words[0])
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            gpu.largest_many(there, addresses[1], words[0], only_if_broken=True)
        torch.cuda.current_stream().wait_stream(other)
        gpu.largest_many(there, addresses[2], words[2], only_if_broken=True)
        gpu.largest_many(there[-2:], addresses[3][:2], words[3])
    is_double = np.array([tensor.dtype == torch.float64 for tensor in tensors])
    first, second, third, fourth = (
        gpu.largest_of_slots(row[:-1].cpu().numpy(), is_double) for row in slots.cpu().unbind(0)
    )
    assert slots[:, -1].tolist() == [1, 0, 0, 0]
    assert third == [None] * len(tensors)
    assert fourth[:2] == [0.0, float(tensors[-1].abs().max())]
    for found in (first, second):
        for tensor, value in zip(tensors, found, strict=True):
            wide = tensor.double()
            infinite = wide.max() if wide.max() == math.inf else wide.min()
            true = wide.abs().max() if wide.isnan().any() or not wide.isinf().any() else infinite
            assert value == float(true) or (math.isnan(float(true)) and value is not None and math.isnan(value))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 16)).cuda()


@pytest.mark.gpu
def test_an_inspector_does_not_wait_and_counts_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpinspect.counting.cuda import counter as gpu

    launches: list[int] = []
    add_many = gpu.add_many
    gpu.warm_up([torch.device("cuda", 0)])
    monkeypatch.setattr(gpu, "add_many", lambda counted: (launches.append(len(counted)), add_many(counted)))
    model, batch = _model(), torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: dict[str, Any] = {}
    with Inspector(model, capture=KINDS) as inspector:
        for _ in range(6):
            with _no_synchronisation():
                optimizer.zero_grad()
                model(batch).square().mean().backward()
            for name, parameter in model.named_parameters():
                histogram = decode(reference.count(parameter.grad.cpu()).numpy())
                expected[name] = expected[name] + histogram if name in expected else histogram
            with _no_synchronisation():
                optimizer.step()
    session = inspector.session()
    assert session.notes == ()
    # As seen on an H200: one launch for the six weight gradients of a step, and one for four other tensors together.
    assert [many for many in launches if many > 1] == [6, 4] * 6
    for name, histogram in expected.items():
        assert session.totals()[TensorKey(name, "weight_gradient")].histogram == histogram


@pytest.mark.gpu
def test_a_backward_on_another_stream_is_counted() -> None:
    model, batch = _model(), torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    side = torch.cuda.Stream()
    with Inspector(model) as inspector:
        for step in range(8):
            with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
                take_step(optimizer, model(batch).square().mean())
            torch.cuda.synchronize()
    totals = inspector.session().totals()
    for name, parameter in model.named_parameters():
        once = decode(reference.count(parameter.grad.cpu()).numpy())
        assert totals[TensorKey(name, "weight_gradient")].histogram.total == 8 * once.total


@pytest.mark.gpu
def test_a_step_captured_as_a_graph_is_not_touched() -> None:
    model, batch = _model(), torch.randn(32, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(batch).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with Inspector(model) as inspector:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.cuda.graph(graph):
            model(batch).square().mean().backward()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert any("CUDA graphs" in note for note in inspector.session().notes)
    assert inspector.session().totals() == {}


@pytest.mark.gpu
def test_a_graph_of_a_whole_step_equals_the_graph_without_an_inspector() -> None:
    """The graph also captures the optimizer's step, and must not contain mpinspect's operations."""

    def run(is_inspected: bool) -> tuple[list[torch.Tensor], tuple[str, ...]]:
        model, batch = _model(), torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            optimizer.step()

        inspector = Inspector(model)
        if is_inspected:
            inspector.attach()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        inspector.detach()
        return [parameter.detach().clone() for parameter in model.parameters()], inspector.session().notes

    (bare, _), (inspected, notes) = run(False), run(True)
    assert all(torch.equal(here, there) for here, there in zip(bare, inspected, strict=True))
    assert len(notes) == 1
    assert "CUDA graphs are not seen" in notes[0]
