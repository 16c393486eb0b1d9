"""Gradients are counted unscaled, by the scale of their own backward; an unknown scale is reported."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Of
from torch import nn
from trainings import cpu_scaler, inspected, take_step

from mpinspect import FLOAT16, Inspector, MpinspectWarning, count_exponents
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.capture.backward_scale import BackwardScale, from_callable, from_number, from_scaler
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow


def _model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def _weight(session: Session, name: str = "weight") -> TensorWindow:
    return session.totals()[TensorKey(name, "weight_gradient")]


def _trained(inputs: tuple[float, ...], scaler: torch.amp.GradScaler, fused: bool = False, **options: Any) -> Inspector:
    """Train with a step for each input, which is the weight's gradient."""
    model = _model()
    options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    options = {"optimizers": None, **options}
    return inspected(
        model, lambda step: model(torch.full((1, 1), inputs[step])).sum(), len(inputs), scaler=scaler, **options
    )


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("scale", [2.0**16, 1.0, 1000.0, 3.0 * 2**-4])
def test_a_grad_scalers_scale_is_divided_out(scale: float, given: bool) -> None:
    scaler = cpu_scaler(scale)
    session = _trained((3.0, 0.25), scaler, scalers=scaler if given else None).session()
    assert session.notes == ()
    assert _weight(session).histogram.max_abs == 3.0
    assert _weight(session).histogram.min_abs == 0.25
    assert [change.scale for change in session.progress.scales] == [scale]


def test_each_backward_uses_its_own_scale() -> None:
    session = _trained((3.0,) * 4, cpu_scaler(2.0**10, growth_interval=1)).session()
    assert [(change.step, change.scale) for change in session.progress.scales] == [
        (i, 2.0 ** (10 + i)) for i in range(4)
    ]
    assert _weight(session).peaks == {1: 4}


def test_an_infinity_of_a_skipped_step_is_counted_once() -> None:
    inspector = _trained((math.inf, 1.0), cpu_scaler(4.0))
    histogram = _weight(inspector.session()).histogram
    assert (histogram.infs, histogram.nonzero, histogram.max_abs) == (1, 1, 1.0)
    assert inspector.session().progress.skipped_steps == 1


def test_gradients_of_a_fused_optimizer_are_counted_unscaled() -> None:
    inspector = _trained((3.0,), cpu_scaler(8.0), fused=True)
    assert _weight(inspector.session()).histogram.max_abs == 3.0
    assert inspector.session().progress.steps == 1


def test_scaled_and_unscaled_backwards_of_one_loss_have_equal_counts() -> None:
    model = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with Inspector(model) as inspector:
        y = model(torch.full((1, 1), 3.0)).sum()
        scaler.scale(y).backward(retain_graph=True)
        y.backward()
    assert _weight(inspector.session()).peaks == {1: 2}


def test_two_networks_can_have_different_scalers() -> None:
    """In a GAN each backward uses the scale of its own scaler."""
    model = nn.ModuleDict({"one": _model(), "two": _model()})
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 1024.0)]
    with Inspector(model) as inspector:
        for scaler, network in zip(scalers, model.values(), strict=True):
            scaler.scale(network(torch.full((1, 1), 3.0)).sum()).backward()
    for name in ("one.weight", "two.weight"):
        assert _weight(inspector.session(), name).histogram.max_abs == 3.0


def _gan(of_critic: Sequence[float], of_generator: Sequence[float], freezes: bool = False) -> tuple[Session, Session]:
    """Train a GAN in FP16 with one scaler and weighted losses, and return the sessions of the critic and the generator."""
    torch.manual_seed(0)
    generator, critic = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
    steps_generator, steps_critic = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (generator, critic))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    with Inspector(critic) as of_c, Inspector(generator) as of_g:
        for times_c, times_g in zip(of_critic, of_generator, strict=True):
            noise = torch.randn(16, 4)
            with torch.autocast("cpu", torch.float16):
                fake = generator(noise)
                loss = (critic(fake.detach()) - critic(noise)).square().mean()
            steps_critic.zero_grad()
            scaler.scale(times_c * loss).backward()
            scaler.step(steps_critic)
            critic.requires_grad_(not freezes)
            with torch.autocast("cpu", torch.float16):
                loss = critic(generator(noise)).float().mean()
            steps_generator.zero_grad()
            scaler.scale(times_g * loss).backward()
            scaler.step(steps_generator)
            critic.requires_grad_(True)
            scaler.update()
    return of_c.session(), of_g.session()


_OVERFLOWS = 1e6


@pytest.mark.parametrize("freezes", [False, True])
def test_the_generators_overflow_in_the_critic_does_not_count_for_the_critic(freezes: bool) -> None:
    often = [_OVERFLOWS, _OVERFLOWS, *[1e-3] * 18]
    critic, generator = _gan([_OVERFLOWS, *[1e-3] * 19], often, freezes)
    assert (critic.progress.skipped_steps, generator.progress.skipped_steps) == (1, 2)
    own, others = ([event for event in critic.events if event.aside is aside] for aside in (False, True))
    assert [(event.step, event.loss_scale, event.story) for event in own] == [(0, 2.0**15, "skipped")]
    # These gradients have the scale of the generator's backward, one step earlier.
    assert [(event.step, event.loss_scale) for event in others] == [(1, 2.0**15), (2, 2.0**14)]
    assert not any(event.aside for event in generator.events)
    report = analyse(critic)
    found = next(finding for finding in report.findings if finding.id == "initial-scale-too-high")
    assert (
        "the first of 20 steps was skipped. By then the scaler had lowered the scale to 16384 (2^14)." in found.message
    )
    assert "2 of" not in str(report.verdict)


def test_the_critics_report_names_overflows_of_the_generator_alone_as_info() -> None:
    critic, generator = _gan([1e-3] * 20, [_OVERFLOWS] * 4 + [1e-3] * 16)
    assert (critic.progress.skipped_steps, generator.progress.skipped_steps) == (0, 4)
    found = {finding.id: finding for finding in analyse(critic).findings}
    assert "initial-scale-too-high" not in found
    assert found["non-finite-event"].severity == "info"
    assert "another model's loss through this one was not finite in 4 steps" in found["non-finite-event"].message


def test_gradients_of_a_loss_that_trains_two_models_count_for_both() -> None:
    """One loss trains an encoder and a head, each with its own optimizer."""
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in (head, encoder)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Inspector(encoder) as inspector:
        for times in (1.0, math.inf, 1.0):
            scaler.scale(times * head(encoder(torch.ones(2, 4))).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    assert [(event.step, event.story, event.aside) for event in inspector.session().events] == [(1, "skipped", False)]


@pytest.mark.parametrize("scaled", [False, True])
def test_an_infinite_loss_that_does_not_reach_a_model_is_not_an_event_for_it(scaled: bool) -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    with Inspector(generator) as inspector:
        for times in (1.0, math.inf):
            fake = generator(torch.ones(4, 2))
            loss = times * critic(fake.detach()).sum()
            (scaler.scale(loss) if scaled else loss).backward()
            critic(fake).sum().backward()
    assert inspector.session().events == ()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_disabled_scaler_scales_by_one(enabled: bool) -> None:
    model = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
    with Inspector(model, scalers=scaler) as inspector:
        scaler.scale(model(torch.full((1, 1), 3.0)).sum()).backward()
    assert _weight(inspector.session()).histogram.max_abs == 3.0
    assert inspector.session().progress.scales[0].scale == (64.0 if enabled else 1.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_disabled_scaler_does_not_check_the_weight_gradients(enabled: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    spoiled = False
    model[0].weight.register_hook(lambda gradient: gradient * math.inf if spoiled else gradient)
    with Inspector(model, optimizers=optimizer, scalers=scaler, every=100) as inspector:
        for step in range(8):
            spoiled = step == 6
            take_step(optimizer, model(torch.ones(3, 2)).sum(), scaler)
    first = inspector.session().events[0]
    assert (first.step, first.phase, first.tensor, first.skipped) == (6, "backward", "0.weight", enabled)


@pytest.mark.parametrize("scale", [128.0, 1000.0])
@pytest.mark.parametrize("as_callable", [True, False])
def test_the_scale_of_a_loop_that_scales_by_hand_is_divided_out(scale: float, as_callable: bool) -> None:
    model = _model()
    with Inspector(model, loss_scale=(lambda: scale) if as_callable else scale) as inspector:
        (scale * model(torch.full((1, 1), 3.0)).sum()).backward()
    assert _weight(inspector.session()).histogram.max_abs == 3.0


def test_a_callable_is_called_once_per_backward() -> None:
    calls: list[float] = []
    model = nn.Sequential(_model(), _model())

    def scale() -> float:
        calls.append(1.0)
        return 2.0

    with Inspector(model, loss_scale=scale):
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
    assert len(calls) == 3


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0, -8.0])
def test_a_callable_that_returns_an_invalid_scale_makes_it_unknown(bad: float) -> None:
    model = _model()
    with (
        pytest.warns(MpinspectWarning, match="loss scale is not known"),
        Inspector(model, loss_scale=lambda: bad) as inspector,
    ):
        model(torch.ones(1, 1)).sum().backward()
    assert not inspector.session().progress.scale_known
    assert not inspector.report().loss_scale.available
    assert _weight(inspector.session()).samples == 1


def test_fp16_weights_without_a_scaler_have_an_unknown_scale() -> None:
    model = _model().to(torch.float16)
    with pytest.warns(MpinspectWarning, match="pass loss_scale="), Inspector(model) as inspector:
        model(torch.ones(1, 1, dtype=torch.float16)).sum().backward()
    advice = inspector.report().loss_scale
    assert not advice.available
    assert advice.recommended is None


@pytest.mark.parametrize(
    ("dtype", "factor", "is_scale"),
    [(torch.float16, 40_000.0, True), (torch.float16, 100.0, False), (torch.float32, 40_000.0, False)],
)
def test_any_large_factor_of_the_loss_is_the_scale_of_fp16_weights(
    dtype: torch.dtype, factor: float, is_scale: bool
) -> None:
    model = _model().to(dtype)
    with warnings.catch_warnings(), Inspector(model) as inspector:
        warnings.simplefilter("ignore", MpinspectWarning)
        (model(torch.full((1, 1), 1e-3, dtype=dtype)).float().sum() * factor).backward()
    scales = [change.scale for change in inspector.session().progress.scales]
    assert (scales == [factor]) is is_scale


def test_a_given_scaler_that_never_scales_produces_a_warning() -> None:
    model = _model()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.warns(MpinspectWarning, match="has not scaled a loss"), Inspector(model, scalers=scaler) as inspector:
        (model(torch.ones(1, 1)).sum() * 60000).backward()
    assert not inspector.report().loss_scale.available


def test_the_scale_of_other_scalers_is_read() -> None:
    class Apex:
        def loss_scale(self) -> float:
            return 16.0

    class Engine:
        loss_scale = 32.0

    class Unknown:
        pass

    assert from_scaler(Apex()).value == 16.0
    assert from_scaler(Engine()).value == 32.0
    assert "neither" in from_scaler(Unknown()).unknown
    assert "failed" in from_callable(lambda: 1 / 0).unknown
    assert from_number(1000.0).divisor == 1000.0
    assert from_number(1024.0).divisor is None
    model = _model()
    with Inspector(model, scalers=Engine()) as inspector:
        (model(torch.full((1, 1), 3.0)).sum() * 32).backward()
    assert _weight(inspector.session()).histogram.max_abs == 3.0


def test_a_subclass_that_overrides_scale_scales_once() -> None:
    class Sharded(torch.amp.GradScaler):
        calls = 0

        def scale(self, outputs: Any) -> Any:
            type(self).calls += 1
            return super().scale(outputs)

    model = _model()
    scaler = Sharded("cpu", init_scale=8.0)
    with Inspector(model) as inspector:
        scaler.scale(model(torch.full((1, 1), 3.0)).sum()).backward()
    assert Sharded.calls == 1
    assert _weight(inspector.session()).histogram.max_abs == 3.0


# -- values flushed before they were counted --------------------------------------------------------------------------


def test_the_report_bounds_values_that_autocast_flushed() -> None:
    """The 16 gradients are 3e-9; under FP16 autocast at scale 1, the FP32 .grad contains 16 zeros."""
    model = nn.Linear(16, 1, bias=False)

    def session_at(scale: float) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with Inspector(model, scalers=scaler) as inspector, torch.autocast("cpu", dtype=torch.float16):
            scaler.scale(model(torch.full((1, 16), 3e-9 * 2**14)).float().sum() * 2.0**-14).backward()
        model.zero_grad()
        return inspector

    at_one, at_many = session_at(1.0), session_at(2.0**16)
    seen = _weight(at_one.session())
    assert (seen.histogram.zeros, seen.histogram.nonzero) == (16, 0)
    assert (seen.passed_through, seen.floor_exponent) == ("float16", -25)
    (layer,) = (row for row in at_one.report().layers if row.kind == "weight_gradient")
    assert layer.already_flushed_fraction is not None
    assert (layer.already_flushed_fraction.low, layer.already_flushed_fraction.high) == (0.0, 1.0)
    seen = _weight(at_many.session())
    assert (seen.histogram.zeros, seen.histogram.nonzero, seen.floor_exponent) == (0, 16, -41)
    assert seen.histogram.flushed(FLOAT16) == 16


def test_a_loop_with_masters_and_a_scale_by_hand_has_the_ranges_of_fp32() -> None:
    """The model is FP16, with FP32 masters and the scale 128; the exponents equal FP32's within FP16's range."""
    x, y = torch.randn(64, 32), torch.randn(64, 16)
    reference = nn.Linear(32, 16)
    half = nn.Linear(32, 16)
    half.load_state_dict(reference.state_dict())
    half.to(torch.float16)
    masters = [parameter.detach().clone().float().requires_grad_(True) for parameter in half.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    scale_factor = 128.0
    with Inspector(half, optimizers=optimizer, loss_scale=scale_factor) as by_hand:
        loss = (half(x.to(torch.float16)).float() - y).square().mean()
        (loss * scale_factor).backward()
        for master, parameter in zip(masters, half.parameters(), strict=True):
            master.grad = parameter.grad.float() / scale_factor
        optimizer.step()
    with Inspector(reference) as plain:
        (reference(x) - y).square().mean().backward()
    assert by_hand.session().progress.steps == 1
    for name in ("weight", "bias"):
        found, expected = (_weight(run.session(), name).histogram for run in (by_hand, plain))
        assert found.total == expected.total
        assert abs(found.max_exponent - expected.max_exponent) <= 1
        # FP16 rounding moves a few values to the next exponent.
        shared = [i for i in range(expected.min_exponent, expected.max_exponent + 1) if i >= -24 - 7]
        for exponent in shared:
            below, limit = (h._count_below(exponent) for h in (found, expected))
            assert abs(below - limit) <= 0.05 * expected.total
    assert count_exponents(reference.weight.grad) == _weight(plain.session()).histogram


def test_fp32_gradients_of_an_fp16_backward_have_fp16s_visibility_floor() -> None:
    """An embedding's gradient is FP32 under autocast, but it passed through the FP16 layer after the embedding."""

    model = Of(
        lambda self, tokens: self.head(self.embedding(tokens)),
        embedding=nn.Embedding(8, 4),
        head=nn.Linear(4, 8, bias=False),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Inspector(model, scalers=scaler) as inspector, torch.autocast("cpu", dtype=torch.float16):
        scaler.scale(model(torch.tensor([1, 2])).float().square().mean()).backward()
    assert model.embedding.weight.grad.dtype == torch.float32
    for key, window in inspector.session().totals().items():
        assert (window.passed_through, window.floor_exponent) == ("float16", -26), key


def test_different_scales_in_one_backward_make_the_scale_unknown() -> None:
    model = _model()
    first, second = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 8.0))
    inspector = Inspector(model).attach()
    loss = model(torch.ones(1, 1)).sum()
    with pytest.warns(MpinspectWarning, match="different scales"):
        (first.scale(loss) + second.scale(loss)).backward()
    inspector.detach()
    assert not inspector.session().progress.scale_known
    on_device = [BackwardScale(None, torch.tensor(4.0), source=source) for source in (1, 2, 1)]
    assert not on_device[0].agrees_with(on_device[1])
    assert on_device[0].agrees_with(on_device[2])


def test_a_step_skipped_by_a_fused_optimizer_is_counted_as_skipped() -> None:
    session = _trained((1.0, math.inf, 1.0), cpu_scaler(4.0), fused=True).session()
    assert [(event.step, event.skipped) for event in session.events] == [(1, True)]
    assert (session.progress.steps, session.progress.skipped_steps) == (3, 1)


def test_a_scaler_in_another_thread_does_not_change_the_scale() -> None:
    """Another network trains with a scaler in another thread, the inspected one without."""
    import threading

    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    stop = threading.Event()

    def train_other() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        while not stop.is_set():
            scaler.scale(other(torch.ones(4, 8)).sum()).backward()

    thread = threading.Thread(target=train_other)
    with Inspector(model, every=1) as inspector:
        thread.start()
        for _ in range(150):
            model(torch.ones(1, 8)).sum().backward()
            model.zero_grad()
        stop.set()
        thread.join()
    session = inspector.session()
    assert {change.scale for change in session.progress.scales} == {1.0}
    assert _weight(session).histogram.max_abs == _weight(session).histogram.min_abs == 1.0
    assert session.notes == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_of_a_checkpoint_are_unscaled(reentrant: bool) -> None:
    """A reentrant checkpoint runs a nested backward, with the same scale."""
    from torch.utils.checkpoint import checkpoint

    model = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with Inspector(model) as inspector:
        x = torch.full((1, 1), 3.0, requires_grad=True)
        scaler.scale(checkpoint(model, x, use_reentrant=reentrant).sum()).backward()
    assert _weight(inspector.session()).histogram.max_abs == 3.0
