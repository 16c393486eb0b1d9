"""The training loop's protocol: loss scales by hand, and masters that are overwritten with their weights."""

import gc
import math
import weakref

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from trainings import take_step

from mpinspect import Inspector
from mpinspect.ranges.capture.backward_scale import constant_factor


def by_hand(
    multiplied,
    divided,
    *,
    steps=10,
    of_loss=lambda loss, scale: loss * scale,
    lr=lambda step: 0.01,
    limits=(math.inf, math.inf),
):
    """Train with a loss scaled by hand; ``multiplied`` and ``divided`` return the factors of a step.

    ``limits``: of the gradients' norm before and after the division.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(steps):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            optimizer.zero_grad()
            of_loss(loss, multiplied(step)).backward()
            nn.utils.clip_grad_norm_(list(model.parameters()), limits[0])
            for parameter in model.parameters():
                parameter.grad.div_(divided(step))
            nn.utils.clip_grad_norm_(list(model.parameters()), limits[1])
            optimizer.param_groups[0]["lr"] = lr(step)
            optimizer.step()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_a_division_by_another_scale_is_reported():
    found = by_hand(lambda step: 256.0, lambda step: 512.0 if step == 3 else 256.0)["divided-by-another-scale"]
    assert (found.severity, found.step) == ("error", 3)
    assert (found.evidence["multiplied_by"], found.evidence["divided_by"]) == (256.0, 512.0)
    assert "0.5 times the true gradients" in found.message


@pytest.mark.parametrize(
    ("multiplied", "divided"),
    [
        (lambda step: 256.0, lambda step: 256.0),
        (lambda step: 2.0 ** (8 + step), lambda step: 2.0 ** (8 + step)),
        # Also averaged over micro-batches, in every step.
        (lambda step: 256.0, lambda step: 1024.0),
        # Clipped in one step.
        (lambda step: 256.0, lambda step: 700.0 if step == 2 else 256.0),
        (lambda step: 1.0, lambda step: 512.0 if step == 3 else 1.0),
    ],
    ids=["constant", "growing", "an average", "clipped", "no scale"],
)
def test_divisions_by_the_same_scale_are_not_a_fault(multiplied, divided):
    assert "divided-by-another-scale" not in by_hand(multiplied, divided)


def test_a_loss_divided_by_the_inverse_scale_is_recognised():
    found = by_hand(
        lambda step: 256.0, lambda step: 128.0 if step == 2 else 256.0, of_loss=lambda loss, scale: loss / (1 / scale)
    )
    assert found["divided-by-another-scale"].step == 2


def test_a_factor_whose_saved_tensors_are_packed_is_not_read():
    """Unpacking may repeat a forward."""
    loss, unpacked = torch.ones((), requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: unpacked.append(kept) or kept):
        packed = loss * torch.tensor(1024.0)
    assert (constant_factor([packed]), unpacked) == (None, [])
    assert constant_factor([loss * 1024.0 / 4]) == 1024.0


@pytest.mark.parametrize(
    ("multiplied", "divided", "lr", "is_found"),
    [
        (lambda step: 512.0 if step < 3 else 256.0, lambda step: 1.0, lambda step: 1e-5, True),
        (lambda step: 512.0, lambda step: 1.0, lambda step: 1e-5 / (1 + step), False),
        (lambda step: 2.0 ** (9 + step), lambda step: 1.0, lambda step: 1e-5 / 2.0**step, False),
        (lambda step: 2.0 ** (9 + step), lambda step: 2.0 ** (9 + step), lambda step: 0.01, False),
        (lambda step: 512.0 if step < 3 else 256.0, lambda step: 512.0 if step == 4 else 1.0, lambda step: 1e-5, False),
    ],
    ids=["changed", "constant", "in the learning rate", "divided", "divided in one step"],
)
def test_steps_on_gradients_of_a_scale_that_changed_are_reported(multiplied, divided, lr, is_found):
    found = by_hand(multiplied, divided, lr=lr)
    assert ("unscale-missing" in found) is is_found
    if is_found:
        finding = found["unscale-missing"]
        assert (finding.severity, finding.step) == ("error", 3)
        assert (finding.evidence["before"], finding.evidence["after"]) == (512.0, 256.0)


@pytest.mark.parametrize(
    ("limits", "divisor", "is_found"),
    [
        ((1e-3, math.inf), 1024.0, True),
        ((1e3, math.inf), 1024.0, False),
        ((math.inf, 1e-3), 1024.0, False),
        ((1e-3, math.inf), 1.0, False),
    ],
    ids=["before", "at a large norm", "after", "without a division"],
)
def test_a_clip_before_the_division_by_a_loops_own_scale_is_reported(limits, divisor, is_found):
    found = by_hand(lambda step: 1024.0, lambda step: divisor, limits=limits)
    assert ("unscale-missing" in found) is is_found
    if is_found:
        assert (found["unscale-missing"].step, found["unscale-missing"].evidence["loss_scale"]) == (0, 1024.0)


def until_it_overflows(floor, *, overflows_from=6, steps=40):
    """Train in a function with a scale by hand that falls to a floor; its optimizer is deleted before the inspector detaches."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    inspector = Inspector(model).attach()

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scale = 2.0**20
        for step in range(steps):
            with torch.autocast("cpu", torch.float16):
                output = model(torch.randn(16, 8))
            loss = output.float().square().mean() * (1e9 if step >= overflows_from else 1e-3)
            optimizer.zero_grad()
            (loss * scale).backward()
            if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
                for parameter in model.parameters():
                    parameter.grad.div_(scale)
                optimizer.step()
            else:
                scale = max(scale / 2, floor)

    train()
    inspector.detach()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_a_floor_of_a_loops_own_scale_at_which_all_gradients_overflow_is_reported():
    found = until_it_overflows(2.0**19)["scale-too-high"]
    assert (found.severity, found.step, found.evidence["loss_scale"]) == ("error", 6, 2.0**19)
    assert "No optimizer step followed in the last 34 backwards" in found.message
    assert found.code == "# after each backward that overflows\nscale = scale / 2"


def test_a_loops_own_scale_that_still_falls_at_the_end_is_not_reported_as_staying():
    assert "scale-too-high" not in until_it_overflows(1e-9, overflows_from=6, steps=20)


def with_masters(set_back, *, steps=10, dtype=torch.bfloat16, load=lambda weights, masters: None):
    """Train masters with Adam; ``set_back`` is called after each step with its number, the weights and the masters.

    ``load`` changes both before the first step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    masters = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-4)
    with torch.no_grad():
        load(list(model.parameters()), masters)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(steps):
            model.zero_grad()
            model(torch.randn(16, 8).to(dtype)).float().square().mean().backward()
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad = weight.grad.float()
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters, strict=True):
                    weight.copy_(master)
                set_back(step, list(model.parameters()), masters)
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def copies_back(step, weights, masters):
    if step == 2:
        for weight, master in zip(weights, masters, strict=True):
            master.copy_(weight)


def test_masters_overwritten_with_their_weights_are_reported():
    found = with_masters(copies_back)["masters-overwritten"]
    assert (found.severity, found.step, found.evidence["parameters"]) == ("error", 2, 4)
    assert found.evidence["changed"] > 0.5


def decays(step, weights, masters):
    for master in masters:
        master.mul_(0.99)


@pytest.mark.parametrize("set_back", [lambda *given: None, decays], ids=["untouched", "decayed by hand"])
def test_masters_with_their_own_values_are_not_reported(set_back):
    assert "masters-overwritten" not in with_masters(set_back)


def loads_weights(weights, masters):
    for weight in weights[1:]:
        weight.normal_()


def loads_both(weights, masters):
    loads_weights(weights, masters)
    for weight, master in zip(weights, masters, strict=True):
        master.copy_(weight)


def test_masters_made_before_the_weights_were_loaded_are_reported():
    found = with_masters(lambda *given: None, load=loads_weights)["masters-stale"]
    assert (found.severity, found.step, found.evidence["names"]) == ("error", 0, ["0.bias", "2.weight", "2.bias"])
    assert "100% of their elements differ" in found.message


class Wrapped:
    """Steps masters of a model, which it makes, with an optimizer of its own."""

    def __init__(self, model):
        self.pairs = [(weight, weight.detach().float().clone()) for weight in model.parameters()]
        self.inner = torch.optim.AdamW([master for _, master in self.pairs], lr=1e-3)

    @torch.no_grad()
    def step(self, copy):
        for weight, master in self.pairs:
            master.grad = weight.grad.float()
        self.inner.step()
        for weight, master in self.pairs if copy else ():
            weight.copy_(master)


@pytest.mark.parametrize(("load", "copy", "expected"), [(1, 1, "masters-stale"), (0, 0, "never-updated"), (0, 1, None)])
def test_masters_of_an_optimizer_that_is_gone_at_the_end_are_judged(load, copy, expected):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).bfloat16()
    optimizer = Wrapped(model)
    if load:
        model.load_state_dict(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).state_dict())
    with Inspector(model, optimizers=optimizer.inner) as inspector:
        for _ in range(10):
            model.zero_grad()
            model(torch.randn(16, 8).bfloat16()).float().square().mean().backward()
            optimizer.step(copy)
        gone = weakref.ref(optimizer.inner)
        del optimizer
        gc.collect()
        assert gone() is None
    ids = {finding.id for finding in analyse(inspector.session()).findings}
    assert ids & {"masters-stale", "never-updated"} == ({expected} - {None})


@pytest.mark.parametrize("load", [lambda *given: None, loads_both], ids=["as made", "loaded too"])
def test_masters_that_equal_their_weights_are_not_stale(load):
    assert "masters-stale" not in with_masters(lambda *given: None, load=load)


def swapped(stash, *, every=1, changes=lambda weight: None, write=torch.Tensor.copy_, rate=1e-4):
    """Train FP32 weights; after each ``every``-th step, copies that ``stash`` makes replace changed weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).bfloat16().float()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(12):
            take_step(optimizer, model(torch.randn(16, 8)).square().mean())
            if step % every == every - 1:
                with torch.no_grad():
                    copies = [stash(weight) for weight in model.parameters()]
                    for weight, copy in zip(model.parameters(), copies, strict=True):
                        changes(weight)
                        write(weight, copy)
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def replaces_data(weight, copy):
    weight.data = copy.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [torch.Tensor.copy_, replaces_data, lambda weight, copy: weight.data.copy_(copy)])
def test_weights_that_a_16_bit_copy_overwrites_are_reported(dtype, write):
    found = swapped(lambda weight: weight.to(dtype), every=2, write=write)["masters-overwritten"]
    assert (found.severity, found.step) == ("error", 1)
    assert found.evidence["names"] == ["0.weight", "2.weight", "0.bias"]
    assert {torch.bfloat16: "BF16", torch.float16: "FP16"}[dtype] in found.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_converted_to_16_bits_and_back_between_steps_is_told_to_convert_a_copy(dtype):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(12):
            take_step(optimizer, model(torch.randn(16, 8)).square().mean())
            if step % 2:
                model.to(dtype).float()
    found = {finding.id: finding for finding in analyse(inspector.session()).findings}["masters-overwritten"]
    assert (found.severity, found.step) == ("error", 1)
    assert found.code == f"evaluated = copy.deepcopy(model)\nevaluated.to({dtype})"


def test_weights_that_a_16_bit_copy_overwrites_once_are_information():
    assert swapped(lambda weight: weight.bfloat16(), every=7)["masters-overwritten"].severity == "info"


@pytest.mark.parametrize(
    ("stash", "changes"),
    [
        (torch.clone, lambda weight: None),
        (torch.clone, lambda weight: weight.copy_(weight.bfloat16())),
        # Binary weights are meant to have few values.
        (torch.sign, lambda weight: None),
        (lambda weight: weight * 0.99, lambda weight: None),
    ],
    ids=["FP32 copies", "16-bit copies for an evaluation", "signs", "decay by hand"],
)
def test_weights_with_their_own_values_are_not_reported(stash, changes):
    assert "masters-overwritten" not in swapped(stash, changes=changes)


def test_weights_that_no_step_changes_are_not_reported():
    assert "masters-overwritten" not in swapped(torch.clone, rate=0.0)


def with_backwards(numbers, *, step_last=False):
    """Train; ``numbers`` has the backwards of each step, and the last step is not taken unless asked for."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for place, number in enumerate(numbers, start=1):
            for _ in range(number):
                model(torch.randn(16, 8)).square().mean().backward()
            if place < len(numbers) or step_last:
                optimizer.step()
                optimizer.zero_grad()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_backwards_after_the_last_step_are_reported():
    found = with_backwards([2] * 6 + [20])["steps-stopped"]
    assert (found.severity, found.step) == ("warning", 6)
    assert (found.evidence["backwards"], found.evidence["most"]) == (20, 2)
    assert found.evidence["change_at"].startswith("test_protocol.py:")
    assert (
        "No optimizer step followed step 5: 20 backwards have run since, and each step before had at most 2."
        in found.message
    )


@pytest.mark.parametrize(
    ("numbers", "step_last"),
    [([1] * 6 + [11], False), ([8] * 4 + [31], False), ([1] * 6 + [20], True), ([20], False)],
    ids=["few", "as usual", "a step at last", "no step at all"],
)
def test_a_run_that_ends_within_a_step_has_not_stopped(numbers, step_last):
    assert "steps-stopped" not in with_backwards(numbers, step_last=step_last)


def test_gradients_that_add_up_after_the_training_in_another_place_are_not_of_it():
    torch.manual_seed(0)
    model = nn.Linear(8, 2)

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with Inspector(model) as inspector:
        train()
        for _ in range(30):
            model(torch.randn(1, 8)).square().mean().backward()
    assert "steps-stopped" not in {finding.id for finding in analyse(inspector.session()).findings}


def test_gradients_that_are_asked_for_after_the_last_step_add_up_nothing():
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(6):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(30):
            torch.autograd.grad(model(torch.randn(16, 8)).square().mean(), list(model.parameters()))
    assert "steps-stopped" not in {finding.id for finding in analyse(inspector.session()).findings}


class Pair(nn.Module):
    """Two networks with an optimizer each."""

    def __init__(self, fused=False):
        super().__init__()
        self.actor, self.critic = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
        self.optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.01, fused=fused) for part in (self.actor, self.critic)
        ]

    def losses(self):
        with torch.autocast("cpu", torch.float16):
            return [part(torch.randn(16, 8)).float().square().mean() for part in (self.actor, self.critic)]


def of_pair(step, *, fused=False, interval=4, others=None, steps=10):
    """Train a pair; ``step`` gets the pair, its scalers (``others``: initial scale of a second one) and the step's number."""
    torch.manual_seed(0)
    pair = Pair(fused)
    scales = [2.0**8, *([others] if others else [])]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval) for scale in scales]
    with Inspector(pair, optimizers=pair.optimizers) as inspector:
        for number in range(steps):
            step(pair, scalers, number)
            pair.zero_grad()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def updates_in_between(pair, scalers, number):
    for loss in pair.losses():
        scalers[0].scale(loss).backward()
    for optimizer in pair.optimizers:
        scalers[0].step(optimizer)
        scalers[0].update()


def updates_between_unscaling_and_step(pair, scalers, number):
    for loss in pair.losses():
        scalers[0].scale(loss).backward()
    for optimizer in pair.optimizers:
        scalers[0].unscale_(optimizer)
    for optimizer in pair.optimizers:
        scalers[0].step(optimizer)
        scalers[0].update()


def swaps_scalers(pair, scalers, number):
    for scaler, loss in zip(scalers, pair.losses(), strict=True):
        scaler.scale(loss).backward()
    for scaler, optimizer in zip(reversed(scalers), pair.optimizers, strict=True):
        scaler.step(optimizer)
        scaler.update()


def accumulates_over_updates(pair, scalers, number):
    for _ in range(2):
        for loss in pair.losses():
            scalers[0].scale(loss).backward()
        scalers[0].step(pair.optimizers[0])
        pair.optimizers[0].zero_grad()
        scalers[0].update()
    scalers[0].step(pair.optimizers[1])
    scalers[0].update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("step", [updates_in_between, accumulates_over_updates])
def test_an_update_between_a_backward_and_its_division_is_reported(step, fused):
    found = of_pair(step, fused=fused)["divided-by-another-scale"]
    # The first optimizer's second step ends the step of the two.
    assert (found.severity, found.step) == ("error", 2 * (step is accumulates_over_updates))
    assert found.layer.startswith("critic.")
    assert (
        "scaler.update() was called between the backward of 'critic.0' (Linear), 'critic.2' (Linear) and the division"
        in found.message
    )


@pytest.mark.parametrize(("interval", "severity"), [(1000, "warning"), (10**6, "info")])
def test_an_update_in_between_is_no_error_as_long_as_the_scale_stays(interval, severity):
    found = of_pair(updates_in_between, interval=interval)["divided-by-another-scale"]
    assert (found.severity, "The scale changed" in found.message) == (severity, False)


def test_an_update_between_unscaling_and_step_is_reported():
    found = of_pair(updates_between_unscaling_and_step, interval=1000)["divided-by-another-scale"]
    assert (found.severity, found.layer) == ("error", "critic.0.weight")
    assert "between unscale_() and step() of the optimizer of 'critic.0' (Linear), 'critic.2' (Linear)" in found.message
    assert "the loss scale of 256 (2^8) once more" in found.message


def test_another_scalers_division_is_reported():
    found = of_pair(swaps_scalers, others=2.0**10)["divided-by-another-scale"]
    assert (found.severity, found.step) == ("error", 0)
    assert "another one divided the gradients" in found.message


def updates_once(pair, scalers, number):
    for loss in pair.losses():
        scalers[0].scale(loss).backward()
    for optimizer in pair.optimizers:
        scalers[0].step(optimizer)
    scalers[0].update()


def updates_after_its_own_backward(pair, scalers, number):
    for loss, optimizer in zip(pair.losses(), pair.optimizers, strict=True):
        scalers[0].scale(loss).backward()
        scalers[0].step(optimizer)
        scalers[0].update()


def clears_after_the_update(pair, scalers, number):
    """As a GAN's generator leaves gradients in the discriminator."""
    sum(map(scalers[0].scale, pair.losses())).backward()
    scalers[0].step(pair.optimizers[0])
    scalers[0].update()
    pair.optimizers[1].zero_grad(set_to_none=number % 2 == 0)
    scalers[0].scale(pair.losses()[1]).backward()
    scalers[0].step(pair.optimizers[1])
    scalers[0].update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("step", [updates_once, updates_after_its_own_backward, clears_after_the_update])
def test_updates_at_their_place_are_not_a_fault(step, fused):
    assert "divided-by-another-scale" not in of_pair(step, fused=fused)


def accumulated(unscales_after, *, clip=None, fused=False):
    """Train over 3 micro-batches a step; ``unscales_after``: the number of the micro-batch after which gradients are unscaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(8):
            for micro_batch in range(3):
                with torch.autocast("cpu", torch.float16):
                    out = model(torch.randn(16, 8))
                scaler.scale(out.float().square().mean()).backward()
                if micro_batch == unscales_after:
                    scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1e-4])
def test_gradients_that_are_added_after_the_division_are_reported(clip, fused):
    found = accumulated(0, clip=clip, fused=fused)["unscale-missing"]
    assert (found.severity, found.step, found.evidence["divided_early"]) == ("error", 0, 1.0)
    assert "before the last micro-batch's backward" in found.message
    assert "instead of optimizer.step()" not in found.code


def test_gradients_that_a_later_backward_does_not_add_to_are_divided_once():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(8):
            loss = model(torch.randn(16, 8)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            loss = scaler.scale(model(torch.randn(16, 8)).square().mean())
            added = torch.autograd.grad(loss, list(model.parameters()))
            for weight, gradient in zip(model.parameters(), added, strict=True):
                weight.grad = weight.grad + gradient / scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert "unscale-missing" not in {finding.id for finding in analyse(inspector.session()).findings}


@pytest.mark.parametrize("unscales_after", [None, 2])
def test_gradients_divided_after_the_last_backward_are_not_a_fault(unscales_after):
    assert "unscale-missing" not in accumulated(unscales_after, clip=unscales_after and 1e-4)


# -- weights that the loop writes itself --------------------------------------------------------------------------------


def perturbed(is_checked, scale=2.0**20):
    """Train by sharpness-aware minimisation; ``is_checked``: whether gradients are unscaled and checked first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def backward():
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(16, 8)).float().square().sum()
        scaler.scale(loss).backward()

    with Inspector(model, optimizers=optimizer, second=True) as inspector:
        for _ in range(12):
            optimizer.zero_grad()
            backward()
            if is_checked:
                scaler.unscale_(optimizer)
                is_finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
                scaler.update()
                if not is_finite:
                    continue
            norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            moves = [parameter.grad * (0.01 / norm) for parameter in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            scaler.step(optimizer)
            scaler.update()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_weights_that_the_loop_breaks_after_an_overflow_are_reported():
    found = perturbed(is_checked=False)
    broken = found["weights-broken-by-loop"]
    assert (broken.severity, broken.certainty, broken.step) == ("error", "inferred", 0)
    assert "the backward of step 0 overflowed at the loss scale 1048576 (2^20)" in broken.message
    assert "(test_protocol.py:" in broken.message
    assert {finding.id for finding in found.values() if finding.severity != "info"} == {"weights-broken-by-loop"}


@pytest.mark.parametrize("scale", [2.0**20, 1.0])
def test_weights_that_the_loop_moves_after_a_check_are_not_reported(scale):
    assert "weights-broken-by-loop" not in perturbed(is_checked=True, scale=scale)


def test_a_scaler_that_grows_after_each_step_is_to_grow_later():
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
    with Inspector(model) as inspector:
        for _ in range(40):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            take_step(optimizer, loss, scaler)
    found = {finding.id: finding for finding in analyse(inspector.session()).findings}["non-finite-event"]
    assert found.severity == "warning"
    assert "doubles its scale after 1 step without an overflow" in found.message
    assert found.fix == "Let the scaler grow after more steps: its default is growth_interval=2000."


# -- steps that no scaler guards -----------------------------------------------------------------------------------------


def unguarded(take_step, steps=6, scale=2.0**24):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(torch.randn(16, 8))
            scaler.scale(output.float().square().mean()).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            take_step(scaler, optimizer, norm)
            scaler.update()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_a_step_that_the_loop_takes_on_overflowed_gradients_in_place_of_the_scaler_is_named():
    found = unguarded(lambda scaler, optimizer, norm: optimizer.step())
    cause = found["scaler-step-missing"]
    assert (cause.severity, cause.step, cause.certainty) == ("error", 0, "inferred")
    assert "scaler.step(optimizer)" in cause.code
    assert {finding.id for finding in found.values() if finding.severity != "info"} == {"scaler-step-missing"}


@pytest.mark.parametrize(
    "take_step",
    [
        lambda scaler, optimizer, norm: scaler.step(optimizer),
        lambda scaler, optimizer, norm: optimizer.step() if norm.isfinite() else None,
    ],
    ids=["by the scaler", "after a check of the norm"],
)
def test_guarded_steps_are_not_a_fault(take_step):
    assert "scaler-step-missing" not in unguarded(take_step)


def both_step(scaler, optimizer, norm):
    scaler.step(optimizer)
    optimizer.step()


def steps_on_others(scaler, optimizer, norm):
    scaler.step(optimizer)
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()


def test_a_step_of_the_optimizer_after_the_scalers_is_named_as_the_cause_of_broken_weights():
    found = unguarded(both_step)
    cause = found["stepped-beside-scaler"]
    assert (cause.severity, cause.step, cause.certainty) == ("error", 0, "measured")
    assert "skipped its step" in cause.message
    assert cause.evidence["line"].startswith("test_protocol.py:")
    assert {finding.id for finding in found.values() if finding.severity != "info"} == {"stepped-beside-scaler"}


def test_a_second_step_on_gradients_that_did_not_overflow_is_a_warning():
    found = unguarded(both_step, scale=1024.0)["stepped-beside-scaler"]
    assert found.severity == "warning"
    assert "each update is made twice" in found.message


@pytest.mark.parametrize("scale", [2.0**24, 1024.0])
def test_a_second_step_on_other_gradients_is_not_a_fault(scale):
    assert "stepped-beside-scaler" not in unguarded(steps_on_others, scale=scale)


def clipped_together(unscaled, steps=4):
    """Clip two parts of a model, each with its own optimizer, after the optimizers with these numbers were unscaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[0], model[2])]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Inspector(model, optimizers=optimizers) as inspector:
        for _ in range(steps):
            model.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(torch.randn(16, 8))
            scaler.scale(output.float().square().mean()).backward()
            for number in unscaled:
                scaler.unscale_(optimizers[number])
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


@pytest.mark.parametrize(("unscaled", "scaled"), [((0,), ["2.weight", "2.bias"]), ((1,), ["0.weight", "0.bias"])])
def test_gradients_that_are_clipped_together_with_unscaled_ones_are_named(unscaled, scaled):
    found = clipped_together(unscaled)["unscale-missing"]
    assert found.evidence["names"] == scaled
    assert 0 < found.evidence["factor"] < 0.01
    assert "optimizer, other_optimizer" in found.code


def test_an_average_over_replicas_before_the_division_is_no_clip():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
        for _ in range(4):
            model.zero_grad()
            scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
            for parameter in model.parameters():
                parameter.grad.add_(parameter.grad.abs().amax() * torch.randn_like(parameter)).div_(2)
            scaler.step(optimizer)
            scaler.update()
    assert "unscale-missing" not in {finding.id for finding in analyse(inspector.session()).findings}


def test_gradients_that_are_all_unscaled_may_be_clipped_together():
    assert "unscale-missing" not in clipped_together((0, 1))


# -- gradients that are zeroed between two backwards --------------------------------------------------------------------


def zeroed_between(loop, *, steps=20, scaled=False, optimizer=torch.optim.SGD):
    """Train an encoder with two heads; ``loop`` gets a function that runs a task's backward, the model and the optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("encoder", "one", "other")})
    optimizer = optimizer(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**8)

    def forward(task, x=None):
        x = torch.randn(16, 8) if x is None else x
        with torch.autocast("cpu", torch.float16, enabled=scaled):
            return model[task](model["encoder"](x).tanh()).float().square().mean()

    def backward(task, x=None):
        loss = forward(task, x)
        scaler.scale(loss).backward()
        return loss

    backward.forward = forward
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(steps):
            loop(backward, model, optimizer, step)
            scaler.step(optimizer)
            scaler.update()
    found = {finding.id: finding for finding in analyse(inspector.session()).findings}
    return found.get("gradients-zeroed")


def zeroes_before_each(backward, model, optimizer, step):
    for task in ("one", "other"):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(task)


def zeroes_and_clips(backward, model, optimizer, step):
    zeroes_before_each(backward, model, optimizer, step)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zeroes_all_of_nine(backward, model, optimizer, step):
    for _ in range(8):
        optimizer.zero_grad()
        backward("one")
    zeroes_before_each(backward, model, optimizer, step)


@pytest.mark.parametrize(
    ("loop", "lost", "scaled"),
    [
        (zeroes_before_each, 1, False),
        (zeroes_before_each, 1, True),
        (zeroes_and_clips, 1, False),
        (zeroes_all_of_nine, 9, False),
    ],
)
def test_backwards_whose_gradients_no_step_uses_are_reported(loop, lost, scaled):
    found = zeroed_between(loop, scaled=scaled)
    assert (found.severity, found.certainty, found.step) == ("warning", "measured", 2)
    assert (found.evidence["lost"], found.evidence["backwards"], found.evidence["measured_steps"]) == (
        lost,
        lost + 1,
        5,
    )
    assert f"the gradients of {lost} of {lost + 1} backwards were zeroed before an optimizer stepped" in found.message
    assert found.message.endswith("In these steps it got no gradient of 'one'.")
    assert "in place of before each backward" in found.fix


def accumulates(backward, model, optimizer, step):
    optimizer.zero_grad(set_to_none=False)
    for task in ("one", "other"):
        backward(task)


def drops_some(backward, model, optimizer, step):
    (accumulates if step == 3 else zeroes_before_each)(backward, model, optimizer, step)


def moves_weights(backward, model, optimizer, step, add=lambda weight, move: weight.add_(move)):
    """As sharpness-aware minimisation does."""
    optimizer.zero_grad()
    backward("one")
    moves = [(weight, 0.1 * weight.grad) for weight in model.parameters() if weight.grad is not None]
    with torch.no_grad():
        for weight, move in moves:
            add(weight, move)
        optimizer.zero_grad()
        with torch.enable_grad():
            backward("one")
        for weight, move in moves:
            add(weight, -move)


def moves_data(backward, model, optimizer, step):
    moves_weights(backward, model, optimizer, step, lambda weight, move: weight.data.add_(move))


def adds_by_hand(backward, model, optimizer, step):
    sums = [torch.zeros_like(weight) for weight in model.parameters()]
    for task in ("one", "other"):
        optimizer.zero_grad()
        backward(task)
        for total, weight in zip(sums, model.parameters(), strict=True):
            total += 0 if weight.grad is None else weight.grad.clamp(-0.01, 0.01)
    for total, weight in zip(sums, model.parameters(), strict=True):
        weight.grad = total


def attacks_inputs(backward, model, optimizer, step):
    x = torch.randn(16, 8, requires_grad=True)
    backward("one", x)
    optimizer.zero_grad()
    backward("one", (x + x.grad.sign()).detach())
    assert x.grad is not None


def attacks_activations(backward, model, optimizer, step):
    kept = []

    def keeps_gradient(module, args, output):
        output.retain_grad()
        kept.append(output)

    hook = model["encoder"].register_forward_hook(keeps_gradient)
    backward("one")
    hook.remove()
    optimizer.zero_grad()
    backward("one")
    assert kept[0].grad.any()


def weighs_tasks(backward, model, optimizer, step):
    losses = [backward.forward(task) for task in ("one", "other")]
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
    optimizer.zero_grad()
    sum(losses).backward()


def asks_for_gradients(backward, model, optimizer, step):
    optimizer.zero_grad()
    torch.autograd.grad(backward.forward("one"), list(model["encoder"].parameters()))
    backward("one")


@pytest.mark.parametrize(
    "loop",
    [
        *(accumulates, drops_some, moves_weights, moves_data, adds_by_hand, attacks_inputs, attacks_activations),
        *(weighs_tasks, asks_for_gradients),
    ],
)
def test_gradients_that_the_loop_uses_otherwise_are_not_a_fault(loop):
    assert zeroed_between(loop) is None


def test_a_generators_gradients_in_the_discriminator_are_not_a_lost_backward():
    generator, discriminator = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_discriminator = (
        torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, discriminator)
    )
    with Inspector(discriminator, optimizers=of_discriminator) as inspector:
        for _ in range(20):
            of_generator.zero_grad()
            discriminator(generator(torch.randn(16, 4))).square().mean().backward()
            of_discriminator.zero_grad()
            # Not even the generator's optimizer steps before these are used.
            (discriminator(torch.randn(16, 8)) - 1).square().mean().backward()
            of_discriminator.step()
            of_generator.step()
    assert "gradients-zeroed" not in {finding.id for finding in analyse(inspector.session()).findings}


def clips_weights(weights, masters):
    nn.utils.clip_grad_norm_(weights, 1e-3)


def clips_masters(weights, masters):
    nn.utils.clip_grad_norm_(masters, 1e-3)


def zeroes_weights(weights, masters):
    for weight in weights:
        weight.grad.zero_()


@pytest.mark.parametrize(
    ("before", "after", "is_late"),
    [
        (None, clips_weights, True),
        (clips_weights, None, False),
        (None, clips_masters, False),
        (None, zeroes_weights, False),
        (None, None, False),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_a_clip_after_the_copy_to_the_masters_is_reported(before, after, is_late, scale):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).bfloat16()
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    optimizer = torch.optim.SGD(masters, lr=1e-2)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(10):
            model.zero_grad()
            (model(torch.randn(16, 8).bfloat16()).float().square().mean() * scale).backward()
            if before is not None:
                before(weights, masters)
            for weight, master in zip(weights, masters, strict=True):
                master.grad = weight.grad.float() / scale
            if after is not None:
                after(weights, masters)
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
    found = [each for each in analyse(inspector.session()).findings if each.id == "clipped-after-copy"]
    assert len(found) == is_late
    for each in found:
        assert each.severity == "warning"
        assert 0 < each.evidence["factor"] < 1
