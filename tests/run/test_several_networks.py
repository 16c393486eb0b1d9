"""Several networks that train together with separate scales; several optimizers with one scale; gradient penalties."""

import math

import pytest
import torch
from equality import equal
from torch import nn
from torch.nn import functional as F

import mpinspect
from mpinspect import LossScaler, MixedPrecision
from mpinspect.training import LossScaleWarning

PRECISIONS = ["fp16-amp", "fp16-master"]


class GAN:
    """A generator 4 -> 8 -> 2 and a discriminator 2 -> 8 -> 1, a MixedPrecision each."""

    def __init__(self, precision: str, loss_scale: object = "dynamic") -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.generator = MixedPrecision(
            generator, torch.optim.Adam(generator.parameters(), lr=1e-3), precision, loss_scale
        )
        self.discriminator = MixedPrecision(
            discriminator, torch.optim.Adam(discriminator.parameters(), lr=1e-3), precision, loss_scale
        )
        self.random = torch.Generator().manual_seed(1)

    def step(self, *, generator_times: float = 1.0, discriminator_times: float = 1.0) -> tuple[bool, bool]:
        """One step of each, their losses multiplied. Returns whether (generator, discriminator) stepped."""
        g, d = self.generator, self.discriminator
        real = torch.randn(32, 2, generator=self.random) + 2
        noise = torch.randn(32, 4, generator=self.random)
        d.zero_grad()
        with d.autocast():
            fake = g.model(noise)
            loss = F.softplus(d.model(fake.detach())).mean() + F.softplus(-d.model(real)).mean()
        d.backward(loss * discriminator_times)
        discriminator_stepped = d.step()
        g.zero_grad()
        with g.autocast():
            loss = F.softplus(-d.model(g.model(noise))).mean()
        g.backward(loss * generator_times)
        return g.step(), discriminator_stepped


# -- a scale each -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_generators_overflow_does_not_affect_the_discriminator(precision):
    plain, spoiled = GAN(precision), GAN(precision)
    for _ in range(5):
        assert plain.step() == spoiled.step() == (True, True)
    plain.step()
    before = spoiled.generator.weights()
    assert spoiled.step(generator_times=2.0**100) == (False, True)
    assert equal(before, spoiled.generator.weights())
    assert equal(plain.discriminator.weights(), spoiled.discriminator.weights())
    assert (spoiled.generator.loss_scale, spoiled.discriminator.loss_scale) == (2.0**15, 2.0**16)
    assert (spoiled.generator.skipped_steps, spoiled.discriminator.skipped_steps) == (1, 0)
    assert (spoiled.generator.steps, spoiled.discriminator.steps) == (6, 6)
    assert spoiled.step() == (True, True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_discriminators_overflow_does_not_affect_the_generator(precision):
    gan = GAN(precision)
    for _ in range(5):
        gan.step()
    before = gan.discriminator.weights()
    assert gan.step(discriminator_times=2.0**100) == (True, False)
    assert equal(before, gan.discriminator.weights())
    assert (gan.generator.loss_scale, gan.discriminator.loss_scale) == (2.0**16, 2.0**15)
    assert (gan.generator.skipped_steps, gan.discriminator.skipped_steps) == (0, 1)
    assert [skip.step for skip in gan.discriminator.skips] == [5]
    assert not gan.generator.skips


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_unrelated_networks_train_as_if_alone(precision):
    """One network overflows now and then; the other is bit-identical to training alone."""

    def trained(overflows: frozenset[int]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        pair = []
        for _ in range(2):
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            pair.append(MixedPrecision(model, torch.optim.Adam(model.parameters()), precision))
        first, second = pair
        for step in range(20):
            for mp in pair:
                mp.zero_grad()
                with mp.autocast():
                    loss = mp.model(torch.randn(8, 4)).square().mean()
                mp.backward(loss * (2.0**100 if mp is first and step in overflows else 1.0))
                mp.step()
        assert first.skipped_steps == len(overflows)
        assert (second.skipped_steps, second.loss_scale) == (0, 2.0**16)
        return second.weights()

    assert equal(trained(frozenset()), trained(frozenset({0, 3, 4, 11})))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_jump_of_one_networks_gradients_lowers_its_scale_until_they_fit(precision):
    """The discriminator's gradients grow by 2^8: its scale falls by about as much, in about eight skipped steps."""
    gan = GAN(precision, "talk")
    for _ in range(40):
        gan.step()
    scale, skipped = gan.discriminator.loss_scale, gan.discriminator.skipped_steps
    other_scale, other_skipped = gan.generator.loss_scale, gan.generator.skipped_steps
    # Each scale falls from 2^32 until its gradients fit.
    assert scale == 2.0 ** (32 - skipped) < 2.0**25
    assert other_scale == 2.0 ** (32 - other_skipped) < 2.0**25
    taken = [gan.step(discriminator_times=2.0**8) for _ in range(40)]
    lost = gan.discriminator.skipped_steps - skipped
    assert 7 <= lost <= 9
    assert gan.discriminator.loss_scale == scale / 2.0**lost
    assert [stepped for _, stepped in taken][-20:] == [True] * 20
    assert (gan.generator.loss_scale, gan.generator.skipped_steps) == (other_scale, other_skipped)
    assert all(stepped for stepped, _ in taken)
    for weights in (gan.generator.weights(), gan.discriminator.weights()):
        assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_in_one_networks_forward_holds_its_scale_only(precision):
    gan = GAN(precision)
    gan.step()
    with pytest.warns(LossScaleWarning, match="forward"):
        assert gan.step(discriminator_times=math.nan) == (True, False)
    assert (gan.generator.loss_scale, gan.discriminator.loss_scale) == (2.0**16, 2.0**16)
    assert [skip.phase for skip in gan.discriminator.skips] == ["forward"]


def test_one_shared_grad_scaler_halves_both_scales():
    """The contrast: torch's scaler given to both optimizers, as most scripts do it."""
    networks = [nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for network, factor in zip(networks, (2.0**127, 1.0), strict=True):
        scaler.scale(network(torch.ones(1, 2)).sum() * factor * 4).backward()
    before = [network.weight.clone() for network in networks]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0  # also for the network that did not overflow
    assert torch.equal(networks[0].weight, before[0])
    assert not torch.equal(networks[1].weight, before[1])


# -- several optimizers, one scale --------------------------------------------------------------------------------------


def two_halves() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    """x -> 2x -> the same, by two layers; SGD of learning rate 1/4 for each."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[1].weight.fill_(1.0)
    return model, [torch.optim.SGD(layer.parameters(), lr=0.25) for layer in model]


def test_several_optimizers_share_one_loss_scaler():
    model, optimizers = two_halves()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    # The gradients are 1 and 2; the second one's is made infinite.
    model[1].weight.grad.fill_(math.inf)
    skipped = []
    for optimizer in optimizers:
        scaler.step(optimizer)
        skipped.append(scaler.last_step_skipped)
    scaler.update()
    assert skipped == [False, True]
    assert (model[0].weight.item(), model[1].weight.item()) == (2.0 - 0.25 * 1.0, 1.0)
    assert (scaler.get_scale(), scaler.steps, scaler.skipped_steps, len(scaler.skips)) == (4.0, 1, 1, 1)


@pytest.mark.parametrize("infinite", [0, 1])
def test_whichever_optimizer_overflows_the_scale_moves_once(infinite):
    model, optimizers = two_halves()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=3)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        if step == 0:
            model[infinite].weight.grad.fill_(math.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    # Halved at the first step, doubled after the three clean ones that follow.
    assert (scaler.get_scale(), scaler.steps, scaler.skipped_steps) == (8.0, 5, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_optimizers_of_one_network_in_mixed_precision(precision):
    model, optimizers = two_halves()
    mp = MixedPrecision(model, optimizers, precision, LossScaler("cpu", init_scale=8.0))
    with mp.autocast():
        loss = mp.model(torch.ones(1, 1)).sum()
    mp.backward(loss)
    model[1].weight.grad.fill_(math.inf)
    assert mp.step() is False
    assert (mp.weights()["0.weight"].item(), mp.weights()["1.weight"].item()) == (1.75, 1.0)
    assert (mp.loss_scale, mp.skipped_steps, mp.steps) == (4.0, 1, 1)
    assert mp.skips[0].culprit.name == "1.weight"


# -- gradient penalties -------------------------------------------------------------------------------------------------


def penalised(mp: MixedPrecision, x: torch.Tensor) -> torch.Tensor:
    """The mean squared norm of the score's gradient by the input: a backward within the forward, itself differentiated."""
    x = x.clone().requires_grad_()
    score = mp.model(x).float().sum()
    (gradient,) = torch.autograd.grad(mp.scaler.scale(score), x, create_graph=True)
    return (gradient.float() / mp.loss_scale).square().sum(1).mean()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_is_exact_where_the_numbers_are(precision):
    """A linear score w.x has the input gradient w: the penalty |w|^2 = 25 and its gradient 2w = (6, 8) are exact in FP16."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.125), precision, 2.0**7)
    with mp.autocast():
        penalty = penalised(mp, torch.ones(4, 2))
    assert penalty.item() == 25.0
    mp.zero_grad()
    mp.backward(penalty)
    mp.unscale_()
    assert mp.master_parameters()[0].grad.tolist() == [[6.0, 8.0]]
    assert mp.step()
    assert mp.weights()["weight"].tolist() == [[3.0 - 0.75, 4.0 - 1.0]]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_of_a_network_is_that_of_fp32_rounded(precision):
    def gradients(precision: str) -> tuple[float, list[torch.Tensor]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        mp = MixedPrecision(
            model, torch.optim.SGD(model.parameters(), lr=0.1), precision, 2.0**7 if precision != "fp32" else None
        )
        with mp.autocast():
            penalty = penalised(mp, torch.randn(8, 4))
        mp.backward(penalty)
        mp.unscale_()
        return penalty.item(), [parameter.grad for parameter in mp.master_parameters()]

    exact, wanted = gradients("fp32")
    rounded, found = gradients(precision)
    # Some ten roundings to 11 bits on the way.
    assert rounded == pytest.approx(exact, rel=10 * 2.0**-11)
    for here, there in zip(found, wanted, strict=True):
        assert (here is None) == (there is None)
        if there is not None:
            assert (here - there).norm() <= 10 * 2.0**-11 * there.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_discriminator_with_a_gradient_penalty_trains(precision):
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    mp = MixedPrecision(model, torch.optim.Adam(model.parameters(), lr=0.01), precision, 2.0**10)
    losses = []
    for _ in range(60):
        real, fake = torch.randn(32, 2) + 2, torch.randn(32, 2)
        mp.zero_grad()
        with mp.autocast():
            between = penalised(mp, (real + fake) / 2)
            loss = mp.model(fake).float().mean() - mp.model(real).float().mean() + 0.1 * between
        mp.backward(loss)
        mp.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert mp.skipped_steps == 0


def test_half_arithmetic_alone_carries_a_double_backward():
    """A loop written by hand as in the talk, with FP16 weights and a penalty whose gradient is exact."""
    weight = torch.tensor([[3.0], [4.0]], dtype=torch.float16, requires_grad=True)
    x = torch.ones(4, 2, dtype=torch.float16, requires_grad=True)
    with mpinspect.half_arithmetic():
        (gradient,) = torch.autograd.grad((x @ weight).float().sum(), x, create_graph=True)
        assert gradient.dtype == torch.float16
        gradient.float().square().sum(1).mean().backward()
    assert weight.grad.flatten().tolist() == [6.0, 8.0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loss_scale", ["dynamic", "talk"])
def test_a_penalty_that_overflows_lowers_the_scale_though_the_loss_was_not_finite(precision, loss_scale):
    """The penalty is computed from a scaled gradient, so the scale causes its infinity and must be lowered."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    mp = MixedPrecision(model, torch.optim.Adam(model.parameters(), lr=0.01), precision, loss_scale)
    stepped = []
    for _ in range(40):
        mp.zero_grad()
        with mp.autocast():
            loss = mp.model(torch.randn(32, 2)).float().mean() + 0.1 * penalised(mp, torch.randn(32, 2))
        mp.backward(loss)
        stepped.append(mp.step())
    assert stepped[-10:] == [True] * 10
    assert 1 <= mp.skipped_steps <= 25
    assert mp.skips[0].phase == "backward"
    assert "gradient penalty" in str(mp.skips[0])
