"""On a CUDA device, counts equal the CPU's and no synchronisation is added. Skipped without a GPU."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import take_step

from mpinspect import Inspector, LossScaler, MixedPrecision, count_blocks
from mpinspect.counting.cuda import available
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.training import PRECISIONS

pytestmark = pytest.mark.gpu


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.LayerNorm(128), nn.Linear(128, 16)).cuda()


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    with _no_synchronisation():
        take_step(optimizer, model(batch).square().mean())


@pytest.mark.parametrize("kinds", [KINDS, ()])
def test_no_synchronisation_in_a_step(kinds: tuple[str, ...]) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64, device="cuda")
    _step(model, optimizer, batch)
    with Inspector(model, capture=kinds) as inspector:
        for _ in range(5):
            _step(model, optimizer, batch)
    session = inspector.session()
    assert session.notes == ()
    assert session.progress.steps == 5
    if kinds:
        assert session.totals()[TensorKey("0.weight", "weight_gradient")].samples == 5


def test_no_synchronisation_under_autocast_with_a_scaler() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    batch = torch.randn(32, 64, device="cuda")
    with Inspector(model) as inspector:
        for _ in range(5):
            optimizer.zero_grad()
            with _no_synchronisation(), torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch).float().square().mean()
            scaled = scaler.scale(loss)
            with _no_synchronisation():
                scaled.backward()
            scaler.step(optimizer)  # reads found_inf, also without an inspector
            scaler.update()
    session = inspector.session()
    assert session.notes == ()
    assert [change.scale for change in session.progress.scales] == [2.0**10]
    found = session.totals()[TensorKey("0.weight", "weight_gradient")]
    assert (found.passed_through, found.floor_exponent, found.samples) == ("float16", -35, 5)


def test_counts_equal_those_of_the_cpu() -> None:
    """The gradients of one GPU run, counted on the GPU and on the CPU."""
    from mpinspect import count_exponents

    model = _model()
    batch = torch.randn(32, 64, device="cuda")
    with Inspector(model) as inspector:
        model(batch).square().mean().backward()
    totals = inspector.session().totals()
    for name, parameter in model.named_parameters():
        assert totals[TensorKey(name, "weight_gradient")].histogram == count_exponents(parameter.grad.cpu())


def test_the_culprit_is_reported_a_step_later() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.randn(32, 64, device="cuda")

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * math.inf if armed else None

    armed = False
    model[2].register_forward_hook(spoil)
    with Inspector(model, every=50) as inspector:
        for step in range(4):
            armed = step == 2
            _step(model, optimizer, batch)
    event = inspector.session().events[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "2")


def test_training_is_bit_identical() -> None:
    results = []
    for inspect in (False, True):
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        inspector = Inspector(model, capture=KINDS)
        if inspect:
            inspector.attach()
        for _ in range(5):
            _step(model, optimizer, torch.randn(32, 64, device="cuda"))
        inspector.detach()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, seen in zip(*results, strict=True):
        assert torch.equal(plain, seen)


# -- training -----------------------------------------------------------------------------------------------------------

EVERY = sorted(name for name, each in PRECISIONS.items() if not each.recipe)
SCALED = ["fp16-amp", "fp16-master"]


def _scaled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, batch: torch.Tensor, times: float
) -> None:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch).float().square().mean() * times
    take_step(optimizer, loss, scaler)


def _trained(mp: MixedPrecision, steps: int, seed: int = 1) -> list[float]:
    """Train on one batch drawn from ``seed``; return the losses."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(64, 64, device="cuda", generator=generator)
    y = torch.randint(16, (64,), device="cuda", generator=generator)
    losses = []
    for _ in range(steps):
        mp.zero_grad()
        with mp.autocast():
            loss = nn.functional.cross_entropy(mp.model(x), y)
        mp.backward(loss)
        mp.step()
        losses.append(loss.item())
    return losses


def _mixed(precision: str, loss_scale: Any = None) -> MixedPrecision:
    model = _model()
    # Adam's default eps rounds to 0 in FP16, so weights without masters would become NaN where a gradient is 0.
    return MixedPrecision(model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4), precision, loss_scale)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_decides_as_grad_scaler_bit_for_bit(fused: bool) -> None:
    def run(make: Callable[..., torch.amp.GradScaler]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        model = _model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        scaler = make("cuda", init_scale=2.0**10, growth_interval=4)
        torch.manual_seed(1)
        for step in range(20):
            times = 2.0**100 if step in (3, 4, 11) else 1.0
            _scaled_step(model, optimizer, scaler, torch.randn(32, 64, device="cuda"), times)
        state = scaler.state_dict()
        state.pop("mpinspect", None)
        return [parameter.detach() for parameter in model.parameters()], state

    plain, plain_state = run(torch.amp.GradScaler)
    ours, our_state = run(LossScaler)
    assert our_state == plain_state
    for here, there in zip(ours, plain, strict=True):
        assert torch.equal(here, there)


def test_a_loss_scaler_with_a_fused_optimizer_never_waits() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = LossScaler("cuda", init_scale=2.0**10)
    batch = torch.randn(32, 64, device="cuda")
    _scaled_step(model, optimizer, scaler, batch, 1.0)
    with _no_synchronisation():
        for step in range(5):
            _scaled_step(model, optimizer, scaler, batch, 2.0**100 if step == 2 else 1.0)
    assert scaler.skipped_steps == 1
    assert scaler.get_scale() == 2.0**9


def test_a_loss_scaler_waits_no_more_often_than_grad_scaler() -> None:
    def waits(scaler: torch.amp.GradScaler) -> int:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(32, 64, device="cuda")
        _scaled_step(model, optimizer, scaler, batch, 1.0)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    _scaled_step(model, optimizer, scaler, batch, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    assert 0 < waits(LossScaler("cuda")) <= waits(torch.amp.GradScaler("cuda"))


@pytest.mark.parametrize("precision", SCALED)
def test_forward_and_backward_in_mixed_precision_do_not_wait(precision: str) -> None:
    mp = _mixed(precision, 2.0**10)
    _trained(mp, 2)
    batch = torch.randn(32, 64, device="cuda")
    with _no_synchronisation():
        mp.zero_grad()
        with mp.autocast():
            loss = mp.model(batch).float().square().mean()
        mp.backward(loss)
        mp.clip_grad_norm_(1.0)
    assert mp.step()


@pytest.mark.parametrize("precision", EVERY)
def test_every_precision_learns(precision: str) -> None:
    mp = _mixed(precision, 2.0**10 if PRECISIONS[precision].scaled else None)
    assert not mp.emulated
    losses = _trained(mp, 60)
    assert losses[-1] < losses[0] / 2
    assert mp.skipped_steps == 0
    if PRECISIONS[precision].masters:
        for parameter, master in zip(mp.model.parameters(), mp.master_parameters(), strict=True):
            assert master.is_cuda
            assert master.dtype == torch.float32
            assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("precision", SCALED)
def test_products_are_those_of_the_emulation(precision: str) -> None:
    """One step's gradients, on Tensor Cores and emulated on the CPU, differ only by the order of sums."""

    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 16))
        x, y = torch.randn(32, 64), torch.randint(16, (32,))
        model.to(device)
        mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, 2.0**10)
        with mp.autocast():
            loss = nn.functional.cross_entropy(mp.model(x.to(device)), y.to(device))
        mp.backward(loss)
        mp.unscale_()
        return [parameter.grad.cpu() for parameter in mp.master_parameters()]  # type: ignore[union-attr]

    for here, there in zip(gradients("cuda"), gradients("cpu"), strict=True):
        # A few values may round to 11 bits in the other direction.
        assert (here - there).norm() <= 4 * 2.0**-11 * there.norm()


def test_the_layer_that_overflows_is_named() -> None:
    mp = _mixed("fp16-amp", 2.0**10)
    mp.model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * math.inf,))
    mp.backward(mp.model(torch.randn(8, 64, device="cuda")).square().mean())
    assert mp.step() is False
    culprit = mp.skips[0].culprit
    assert culprit is not None
    assert culprit.layer == "0"


@pytest.mark.parametrize("precision", EVERY)
def test_stop_and_resume_is_bit_identical(precision: str, tmp_path: Path) -> None:
    straight, stopped = _mixed(precision), _mixed(precision)
    _trained(straight, 20)
    _trained(stopped, 12)
    stopped.save(tmp_path / "checkpoint.pt")
    resumed = _mixed(precision)
    resumed.load(tmp_path / "checkpoint.pt")
    _trained(resumed, 8)
    for name, weight in straight.weights().items():
        assert weight.is_cuda
        assert torch.equal(weight, resumed.weights()[name])


def test_auto_finds_a_window() -> None:
    mp = _mixed("fp16-amp", "auto")
    _trained(mp, 30)
    window = mp.scaler.window
    assert window is not None
    assert window[0] <= mp.loss_scale <= window[1]


def test_suggestions_read_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).cuda()
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp")
    for _ in range(10):
        model(torch.randn(2, 1, 8, 8, device="cuda"))
    assert any("cudnn.benchmark" in said for said in mp.suggestions())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [(1, 16), (1, 32), (1, 128), (16, 16), (128, 128), (3, 7), (1, 0)])
def test_blocks_equal_the_cpus(dtype: torch.dtype, block: tuple[int, int]) -> None:
    x = torch.randn(300, 1000) * torch.exp2(-100 * torch.rand(300, 1000))
    x[3, 5], x[70:90], x[100, 7] = math.inf, 0.0, math.nan
    x = x.to(dtype)
    on_gpu = x.cuda()
    for view in (lambda values: values, torch.t, lambda values: values[1:, 3:], torch.flatten):
        assert count_blocks(view(on_gpu), block) == count_blocks(view(x), block)
    assert available.trouble() == ""
