"""On a device, tensors are read in groups, and most of them only if a later value is not finite."""

import math
from collections.abc import Callable
from typing import Any

import host_kernels
import pytest
import torch
from host_kernels import BYTES, LAUNCHES, READ, SPARED
from models import Of
from networks import GPT, adamw, tokens
from together import together
from torch import nn
from trainings import cpu_scaler, inspected, take_step

from mpinspect import Inspector
from mpinspect.counting import reference
from mpinspect.ranges.capture import device_magnitudes, model_hooks, watch
from mpinspect.ranges.capture.culprit import NOT_READ
from mpinspect.ranges.capture.device_magnitudes import DeviceMagnitudes, StepMagnitudes
from mpinspect.ranges.capture.device_rows import DeviceRows
from mpinspect.ranges.capture.layers import Layer, outline


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.install(monkeypatch)
    # Hooks stay attached in a process that compiled any graph, and other tests do.
    for module in (model_hooks, watch):
        monkeypatch.setattr(module, "compiled_graphs", lambda: 0)


def _blocks(activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), activation(), nn.Linear(8, 8)) for _ in range(3)))


def _train(
    model: nn.Module, steps: int, spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, x: x
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        take_step(optimizer, model(spoil(step, torch.randn(4, 8))).square().mean())


def test_only_outputs_of_containers_are_read_between_samples_without_fp16() -> None:
    model = _blocks()
    with Inspector(model, every=100) as inspector:
        _train(model, 5)
        host_kernels.calls.clear()
        _train(model, 3)
        # Steps 5 to 7 read the outputs of the containers (the last is the model's own tensor) and the loss. They do not read
        # the batch, the two inner outputs of each block, the gradients of outputs, nor the twelve weight gradients.
        in_a_step = {what: number / 3 for what, number in host_kernels.calls.items()}
    assert in_a_step[READ] <= 3 + 1
    assert in_a_step[SPARED] >= 3 * 2 + 3 * 3 + 12
    assert inspector.session().notes == ()


def _step_of_a_gpt(layers: int) -> dict[str, int]:
    """Return the reads of one step between samples, for an FP32 GPT without a scaler."""
    model, (x, y) = GPT(layers, 32, 2, 16, 64), tokens(2, 16, 64)("cpu")
    optimizer = adamw(model.parameters())
    with Inspector(model, optimizers=optimizer, every=100):
        for _ in range(6):
            host_kernels.calls.clear()
            take_step(optimizer, nn.functional.cross_entropy(model(x), y))
        return dict(host_kernels.calls)


def _tower(blocks: int) -> nn.Sequential:
    """Return a model with four modules per block, a first layer and a container."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(blocks))
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*layers))


def _read(model: nn.Module, steps: int, before_step: Callable[[int], object], **options: Any) -> Inspector:
    """Train a tower with few samples."""
    options = {"lr": 0.0, "optimizers": None, "every": 100, **options}
    return inspected(
        model, lambda _: model(torch.randn(4, 8)).square().mean(), steps, before_step=before_step, **options
    )


def _read_and_spared() -> tuple[int, int]:
    return host_kernels.calls[READ], host_kernels.calls[SPARED]


def test_a_large_model_is_read_block_by_block_between_samples() -> None:
    model = _tower(8)
    with Inspector(model, every=100) as inspector:
        _train(model, 5)
        hooked = [name for name, module in model.named_modules() if module._forward_hooks]
        # Step 5 is neither sampled nor measured; step 8 is measured.
        assert sorted(hooked) == sorted(["", "0", "1", *(f"1.{block}" for block in range(8))])
        _train(model, 3)
        assert all(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert inspector.session().notes == ()


def test_every_module_is_read_after_an_event() -> None:
    model = _tower(8)
    ended: list[int] = []
    model[1][3][2].register_forward_hook(lambda module, args, y: y * math.inf if len(ended) in {5, 6, 7} else None)
    inspector = _read(model, 9, lambda _: None, scaler=cpu_scaler(2.0), after_step=ended.append)
    named = [(event.step, event.module) for event in inspector.session().events]
    assert named == [(5, "1.3"), (6, "1.3.2"), (7, "1.3.2")]
    assert "modules inside it were not observed" in inspector.session().events[0].explanation
    assert "not observed" not in inspector.session().events[1].explanation


@pytest.mark.parametrize("clips", [False, True])
def test_weight_gradients_of_fp16_are_read_when_the_optimizer_steps_between_samples(clips: bool) -> None:
    model = _tower(8).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reads = []
    with Inspector(model, every=100) as inspector:
        for step in range(7):
            host_kernels.calls.clear()
            optimizer.zero_grad()
            for _ in range(2 if step == 6 else 1):
                model(torch.randn(4, 8).half()).square().mean().backward()
            # Steps 5 and 6 are neither sampled nor measured, so the parameters have no hooks when the loop plants a value.
            assert bool(model[0].weight._backward_hooks) is (step < 5)
            if step == 6:
                model[1][3][2].weight.grad.view(-1)[0] = math.nan if clips else math.inf
            if clips:
                # Clips by hand, like a library that does not call torch's function.
                norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
                for each in model.parameters():
                    each.grad.mul_(1 / norm)
            optimizer.step()
            reads.append(host_kernels.calls[READ])
    # Each micro-batch reads outputs, their gradients and a loss; the weight gradients are read once.
    weights = len(list(model.parameters()))
    assert reads[6] - weights == 2 * (reads[5] - weights) > 0
    first = inspector.session().events[0]
    assert (first.step, first.phase) == (6, "backward")
    assert first.tensor == ("0.weight" if clips else "1.3.2.weight")
    assert "weight gradients were read when the optimizer stepped" in first.explanation


def test_weight_gradients_of_fp32_are_spared_and_a_broken_one_is_an_event_of_the_next_forward() -> None:
    model = _tower(8)
    calls = []

    def breaks_a_gradient(step: int) -> None:
        if step == 6:
            model[1][3][2].weight.grad.view(-1)[0] = math.nan
        host_kernels.calls.clear()

    inspector = _read(model, 8, breaks_a_gradient, lr=1e-3, after_step=lambda _: calls.append(_read_and_spared()))
    weights = len(list(model.parameters()))
    assert calls[5:7] == [(0, weights), (0, weights)]
    assert calls[7] == (weights, 0)
    first = inspector.session().events[0]
    assert (first.step, first.phase, first.module) == (7, "forward", "1.3")
    assert "nor the weight gradients of the step before" in first.explanation


def _reads_at_the_optimizer(model: nn.Module) -> dict[str, int]:
    _read(model, 6, lambda _: host_kernels.calls.clear())
    return dict(host_kernels.calls)


def test_weight_gradients_are_read_in_steps_that_do_not_see_the_fp16_inside_a_block() -> None:
    def in_fp16() -> nn.Module:
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).half()
        return Of(lambda self, x: x + self.inner(x.half()).float(), inner=inner)

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(in_fp16() for _ in range(8))), nn.Linear(8, 1))
    # Step 5 reads the blocks' outputs, which are all in FP32.
    assert _reads_at_the_optimizer(model)[READ] == len(list(model.parameters()))


def test_weight_gradients_are_read_if_code_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = len(list(_tower(8).parameters()))
    assert _reads_at_the_optimizer(_tower(8))[SPARED] == weights
    monkeypatch.setattr(watch, "compiled_graphs", lambda: 1)
    assert _reads_at_the_optimizer(_tower(8))[READ] == weights


@pytest.mark.parametrize("public", [False, True], ids=["clip_grad_norm_", "clip_grads_with_norm_"])
def test_clipped_weight_gradients_are_read_only_if_their_norm_is_not_finite(public: bool) -> None:
    model = _tower(8)
    parameters = list(model.parameters())
    reads = []

    def clips(step: int) -> None:
        if step == 7:
            model[1][3][2].weight.grad.view(-1)[0] = math.nan
        host_kernels.calls.clear()
        if public:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0)

    inspector = _read(model, 8, clips, after_step=lambda _: reads.append(_read_and_spared()))
    assert reads[5] == reads[6] == (1, len(parameters))
    assert reads[7] == (1 + len(parameters), 0)
    first = inspector.session().events[0]
    # The clipping makes every weight gradient NaN, but the gradients are read before it.
    assert (first.step, first.phase, first.tensor) == (7, "backward", "1.3.2.weight")
    assert "clipping" not in first.explanation
    assert inspector.session().notes == ()


def test_gradients_are_read_at_the_step_if_only_another_model_or_a_generator_was_clipped() -> None:
    model, other = _tower(8).half(), nn.Linear(8, 8).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, every=100, loss_scale=1.0) as inspector:
        for _ in range(7):
            optimizer.zero_grad()
            other(model(torch.randn(4, 8).half())).square().mean().backward()
            host_kernels.calls.clear()
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
            optimizer.step()
        clipped = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    assert host_kernels.calls[READ] == len(list(model.parameters()))
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)
    assert inspector.session().notes == ()


def test_gradients_of_a_backward_after_clipping_are_read() -> None:
    model = _tower(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, every=100) as inspector:
        for step in range(7):
            optimizer.zero_grad()
            for micro_batch in range(2):
                model(torch.randn(4, 8)).square().mean().backward()
                if micro_batch == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == 6:
                model[1][3][2].weight.grad.view(-1)[0] = math.nan
            optimizer.step()
    assert [(event.step, event.tensor) for event in inspector.session().events] == [(6, "1.3.2.weight")]


def test_weight_gradients_are_read_on_arrival_if_each_has_its_own_optimizer() -> None:
    model = _tower(8)
    optimizers = [torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()]
    with Inspector(model, optimizers=optimizers, every=100) as inspector:
        for _ in range(7):
            model.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            assert model[0].weight._backward_hooks
            host_kernels.calls.clear()
            for optimizer in optimizers:
                optimizer.step()
            assert host_kernels.calls[LAUNCHES] <= 1
    assert inspector.session().progress.steps == 7


def test_the_outline_descends_into_large_containers_and_uncalled_lists() -> None:
    model = nn.ModuleDict({"lists": nn.ModuleList([_blocks() for _ in range(2)]), "tower": _tower(7)})
    layers = [Layer(path, module, False, False) for path, module in model.named_modules()]
    blocks = {f"lists.{number}" for number in range(2)}
    # The tower contains 30 modules, and its sequence of blocks 28.
    inside = {"tower.0", "tower.1", *(f"tower.1.{block}" for block in range(7))}
    assert outline(layers) == {"", "lists", "tower"} | blocks | inside
    assert outline(layers[:32]) == {layer.path for layer in layers[:32]}


def test_another_block_adds_no_launch_and_reads_its_end_only() -> None:
    one, two = _step_of_a_gpt(1), _step_of_a_gpt(2)
    assert one[LAUNCHES] == two[LAUNCHES] == 5
    # A block reads its output. It spares 12 weight gradients, seven other outputs, two tensors of its own code, and the
    # gradients of these ten.
    assert two[BYTES] - one[BYTES] == 2 * 16 * 32 * 4
    assert (two[READ] - one[READ], two[SPARED] - one[SPARED]) == (1, 12 + 7 + 2 + 10)


@pytest.mark.parametrize(
    ("activation", "phase"),
    # tanh(inf) is 1, so the forward is finite after it; the gradient that is multiplied by the infinity is not.
    [(nn.ReLU, "forward"), (nn.Tanh, "backward")],
)
def test_the_culprit_is_found_among_modules_whose_tensors_were_not_read(
    activation: Callable[[], nn.Module], phase: str
) -> None:
    model = _blocks(activation)
    spoiled = False
    model[1][0].register_forward_hook(lambda module, args, y: y.abs() * math.inf if spoiled else None)

    def count(step: int, x: torch.Tensor) -> torch.Tensor:
        nonlocal spoiled
        spoiled = step == 6
        return x

    with Inspector(model, every=100) as inspector:
        _train(model, 8, count)
    first = inspector.session().events[0]
    assert (first.step, first.phase, first.module) == (6, phase, "1.0")


def _heads() -> nn.Module:
    """Two layers with the same input; the watch may read the output of only one of them."""
    layers = {name: nn.Linear(8, 8) for name in ("a", "b", "out")}
    return Of(lambda self, x: self.out(self.a(x) + self.b(x)), **layers)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_unread_tensor_is_not_reported_as_finite(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_magnitudes, "_HELD_BYTES", 100)
    model = nn.Sequential(nn.Linear(8, 8), _heads())
    spoiled = False

    def spoil(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor | None:
        if spoiled and phase == "backward":
            y.register_hook(lambda gradient: gradient * math.inf)
        return y * math.inf if spoiled and phase == "forward" else None

    model[1].a.register_forward_hook(spoil)

    def count(step: int, x: torch.Tensor) -> torch.Tensor:
        nonlocal spoiled
        spoiled = step == 6
        return x

    with Inspector(model, every=100) as inspector:
        _train(model, 8, count)
    (first, *_) = inspector.session().events
    assert (first.step, first.phase) == (6, phase)
    assert first.module == "1.a" or "not read" in first.explanation or "not known" in first.explanation, first


def test_a_group_ends_at_its_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_magnitudes, "_HELD_BYTES", 100)
    magnitudes = DeviceMagnitudes(torch.device("cpu"))
    magnitudes._steps = 100
    held = [torch.full((8,), float(i)) for i in range(1, 8)]
    slots = [magnitudes.read(tensor, str(i), always=False) for i, tensor in enumerate(held)]
    sent = magnitudes.send()
    assert isinstance(sent, StepMagnitudes)
    # Four tensors exceed 100 bytes, and the next ends the group. The last tensor of each group is read.
    assert [slot and slot.largest() for slot in slots] == [NOT_READ] * 4 + [5.0] + [NOT_READ] + [7.0]


def test_a_tensor_changed_before_its_reading_is_read_at_once_the_next_time() -> None:
    magnitudes = DeviceMagnitudes(torch.device("cpu"))
    magnitudes._steps = 100
    for expected in (None, 3.0):
        tensor = torch.full((4,), 3.0)
        slot = magnitudes.read(tensor, "a", always=True)
        tensor.add_(1)
        magnitudes.send()
        assert slot is not None
        assert slot.largest() == expected


def test_the_first_steps_read_tensors_at_once() -> None:
    magnitudes = DeviceMagnitudes(torch.device("cpu"))
    for _ in range(5):
        tensor = torch.full((4,), -2.0)
        slot = magnitudes.read(tensor, "a", always=True)
        tensor.zero_()
        magnitudes.send()
        assert slot is not None
        assert slot.largest() == 2.0


def test_in_place_activations_do_not_hide_an_event() -> None:
    model = _blocks(lambda: nn.ReLU(inplace=True))
    with Inspector(model, every=100) as inspector:
        _train(model, 8, lambda step, x: x * math.nan if step == 6 else x)
    assert {(event.step, event.phase) for event in inspector.session().events} == {(6, "forward"), (7, "forward")}
    assert inspector.session().events[0].given


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([1.0, -3.0], 3.0),
        ([1.0, -math.inf], -math.inf),
        ([math.inf, -math.inf], math.inf),
        ([math.nan, math.inf], math.nan),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_magnitudes_distinguish_infinities_by_sign_and_nans(
    values: list[float], largest: float, dtype: torch.dtype
) -> None:
    magnitudes = DeviceMagnitudes(torch.device("cpu"))
    slot = magnitudes.read(torch.tensor(values, dtype=dtype), "a", always=True)
    magnitudes.send()
    assert slot is not None
    assert slot.largest() == pytest.approx(largest, nan_ok=True)


def test_tensors_that_the_kernels_do_not_support_are_declined() -> None:
    magnitudes = DeviceMagnitudes(torch.device("cpu"))
    for tensor in (
        torch.ones(4, 4)[:, ::2],
        torch.ones(2, dtype=torch.complex64),
        torch.ones(0),
        torch.ones(3).to_sparse(),
        torch.ones(()).expand(4),
    ):
        assert magnitudes.read(tensor, "a", always=True) is None


def test_a_failed_launch_loses_only_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _blocks()
    work = host_kernels.largest_many

    def fails(*args: object) -> None:
        monkeypatch.setattr(host_kernels, "largest_many", work)
        raise RuntimeError("the device has vanished")

    notes = []
    monkeypatch.setattr(device_magnitudes.available, "gave_up", notes.append)
    monkeypatch.setattr(device_magnitudes.available, "trouble", lambda: "the kernels failed")
    with Inspector(model, every=100) as inspector:
        _train(model, 4)
        monkeypatch.setattr(host_kernels, "largest_many", fails)
        with pytest.warns(UserWarning, match="the kernels failed"):
            _train(model, 4)
    assert [str(error) for error in notes] == ["the device has vanished"]
    assert inspector.session().events == ()
    assert inspector.session().progress.steps == 8


def test_gradients_counted_later_have_the_same_rows() -> None:
    rows = DeviceRows(torch.device("cpu"), lambda note: None)
    tensors = [torch.randn(100), torch.randn(7, 3).to(torch.bfloat16)]
    late = [rows.count(tensor, later=True) for tensor in tensors]
    at_once = [rows.count(tensor).clone() for tensor in tensors]
    assert not any(int(row[5:].sum()) for row in late)
    rows.count_held()
    assert all(map(torch.equal, late, at_once))
    assert rows.lost == set()


def test_concurrent_threads_count_into_separate_rows() -> None:
    rows = DeviceRows(torch.device("cpu"), lambda note: None)
    each_has = [[torch.full((3,), 2.0**power) for _ in range(40)] for power in range(8)]

    def count(thread: int) -> list[torch.Tensor]:
        return [rows.count(tensor, later=number % 2 == 0) for number, tensor in enumerate(each_has[thread])]

    counted = [row for rows_of_thread in together(8, count) for row in rows_of_thread]
    rows.count_held()
    expected = [reference.count(tensor).tolist() for tensors in each_has for tensor in tensors]
    assert sorted(row.tolist() for row in counted) == sorted(expected)


def test_a_gradient_changed_before_counting_is_marked_as_lost() -> None:
    rows = DeviceRows(torch.device("cpu"), lambda note: None)
    tensor = torch.randn(100)
    row = rows.count(tensor, later=True)
    tensor.mul_(2)
    rows.count_held()
    assert rows.lost == {id(row)}
    assert not int(row[5:].sum())
