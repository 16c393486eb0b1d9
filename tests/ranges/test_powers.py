"""The power of the loss scale through a step: sums of terms with different powers are found, ordinary steps are not."""

import copy
import math
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import cpu_scaler

from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.ranges.faults.measure.operands import OperatorCall
from mpinspect.ranges.faults.measure.powers import PowersOfScale


class Following(TorchDispatchMode):
    """Follows the loss scale through the code inside the context."""

    supports_higher_order_operators = True

    def __init__(self, model):
        super().__init__()
        self.powers = PowersOfScale(lambda: "", model.named_parameters())
        self.in_optimizer = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.powers.ran(OperatorCall(func, args, kwargs or {}, result, sys._getframe(), self.in_optimizer))
        return result

    # A listener of scalers and optimizers.
    def loss_scaled(self, scaler, given, scaled):
        self.powers.scaled(scaler, given, scaled)

    def scaler_steps(self, scaler, optimizer): ...

    def scaler_stepped(self, scaler, optimizer): ...

    def scaler_unscales(self, scaler, optimizer): ...

    def scaler_unscaled(self, scaler, optimizer): ...

    def optimizer_steps(self, optimizer):
        self.in_optimizer = True

    def optimizer_stepped(self, optimizer):
        self.in_optimizer = False


class Training:
    """A network, its optimizer and its scaler, which have made one step."""

    def __init__(self, make_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01), scale=4096.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = cpu_scaler(scale)
        self.step_on()

    def loss(self):
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(torch.randn(6, 8)).float()
            return nn.functional.cross_entropy(output, torch.randint(0, 4, (6,)))

    @property
    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]

    def backward(self, loss=None):
        self.scaler.scale(self.loss() if loss is None else loss).backward()

    def step_on(self, loss=None):
        self.backward(loss)
        self.step()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def followed(self, step):
        """Return the records of one more step."""
        mode = Following(self.model)
        scaler_watch.listen(mode)
        optimizer_steps.listen(mode)
        try:
            with mode:
                step(self)
        finally:
            scaler_watch.unlisten(mode)
            optimizer_steps.unlisten(mode)
        return mode.powers.records()


def ordinary(training):
    training.step_on()


def micro_batches(training):
    for _ in range(3):
        training.scaler.scale(training.loss() / 3).backward()
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.step()


def two_losses(training):
    training.backward()
    training.scaler.scale([training.loss()])[0].backward()
    training.step()


def scaled_gradient(training):
    """Return the gradient of the scaled outputs with respect to their inputs."""
    x = torch.randn(6, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(training.scaler.scale(training.model(x).sum()), x, create_graph=True)
    return gradient


def penalised(training, gradient):
    training.step_on((gradient.norm(dim=1) - 1).square().mean() + training.loss())


def penalty_divided(training):
    penalised(training, scaled_gradient(training) * (1.0 / training.scaler.get_scale()))


def penalty_divided_by_a_number(training):
    x = torch.randn(6, 8, requires_grad=True)
    (scaled,) = torch.autograd.grad(training.scaler.scale(training.model(x).sum()), x, create_graph=True)
    training.scaler.get_scale()
    training.scaler.scale((scaled * 0.5).square().mean() + training.loss()).backward()


def penalty_divided_with_more(training):
    penalised(training, scaled_gradient(training) * (1.0 / (training.scaler.get_scale() * 3)))


def decay_after_division(training):
    training.backward()
    training.scaler.unscale_(training.optimizer)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.grad.add_(parameter, alpha=0.01)
    training.step()


def divided_by_hand(training):
    training.backward()
    scale = training.scaler.get_scale()
    for gradient in training.gradients:
        gradient.div_(scale)
    training.optimizer.step()
    training.optimizer.zero_grad()


def divided_by_hand_and_by_micro_batches(training):
    for _ in range(2):
        training.backward()
    scale = training.scaler.get_scale()
    for parameter in training.model.parameters():
        parameter.grad.mul_(1 / (scale * 2))
    training.optimizer.step()


def copied_to_masters(training):
    masters = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.backward()
    for master, parameter in zip(masters, training.model.parameters(), strict=True):
        master -= 0.01 * (parameter.grad.double() / training.scaler._scale.double()).float()


def logged(training):
    total = torch.zeros(()) + 1
    scaled = training.scaler.scale(training.loss())
    scaled.backward()
    total += scaled.detach()
    training.step()


def checkpointed(training):
    x = torch.randn(6, 8, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(training.model, x, use_reentrant=False)
    training.step_on(output.sum())


def average_of_weights(training):
    average = copy.deepcopy(training.model)
    ordinary(training)
    for mine, its in zip(average.parameters(), training.model.parameters(), strict=True):
        mine.data.lerp_(its.data, 0.01)


def a_sum_that_is_dropped(training):
    """A discriminator's gradients, of its own loss and then of the generator's, which are set to zero before its next step."""
    training.backward()
    training.scaler.step(training.optimizer)
    training.backward()
    training.scaler.update()
    training.optimizer.zero_grad(set_to_none=False)
    ordinary(training)


def a_count_that_equals_the_scale(training):
    """A mean by hand, and a pooling whose derivative divides by the size of the scale."""
    x = torch.randn(1, 4096, 8)
    output = training.model(x)
    pooled = nn.functional.adaptive_avg_pool1d(output.transpose(1, 2), 1)
    training.step_on(output.sum() / 4096 + output.square().mean() + pooled.sum() * output.sum())


@contextmanager
def hooked(training, hook):
    handles = [parameter.register_hook(hook) for parameter in training.model.parameters()]
    yield
    for handle in handles:
        handle.remove()


def limits_after_division(training):
    with hooked(training, lambda gradient: gradient.clamp(min=0).neg().clamp_max(math.inf)):
        training.backward()
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_value_(training.model.parameters(), 1e-4)
    if nn.utils.get_total_norm(training.gradients) > 100:
        training.optimizer.zero_grad()
    training.step()


def clamped_to_a_multiple_of_the_scale(training):
    bound = 1e-4 * training.scaler.get_scale()
    with hooked(training, lambda gradient: gradient.clamp(-bound, bound)):
        ordinary(training)


def clamped_beyond_all_values(training):
    with hooked(training, lambda gradient: gradient.clamp(-1e9, 1e9)):
        ordinary(training)


HEALTHY = (
    *(a_sum_that_is_dropped, a_count_that_equals_the_scale),
    *(limits_after_division, clamped_to_a_multiple_of_the_scale, clamped_beyond_all_values),
    *(ordinary, micro_batches, two_losses, penalty_divided, penalty_divided_with_more, decay_after_division),
    *(divided_by_hand, divided_by_hand_and_by_micro_batches, copied_to_masters, logged, checkpointed),
    average_of_weights,
)


@pytest.mark.parametrize("scale", [4096.0, 64.0, 3000.0])
@pytest.mark.parametrize("step", HEALTHY)
def test_nothing_is_found_in_a_right_step(step, scale):
    assert Training(scale=scale).followed(step) == []


def test_a_scale_that_has_fallen_to_zero_is_followed():
    training = Training()
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": 0.0})
    assert training.followed(penalty_divided_by_a_number) == []


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, 0.01, fused=True, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, weight_decay=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, weight_decay=0.01, foreach=True),
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, weight_decay=0.01),
    "Adamax": torch.optim.Adamax,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step", [ordinary, micro_batches])
def test_nothing_is_found_in_an_optimizers_arithmetic(step, name):
    assert Training(OPTIMIZERS[name]).followed(step) == []


def one_loss_unscaled(training):
    training.backward()
    training.loss().backward()
    training.step()


def penalty_undivided(training):
    penalised(training, scaled_gradient(training))


def penalty_added_to_the_loss(training):
    training.step_on(training.loss() + scaled_gradient(training).square().mean())


def decay_before_division(training):
    training.backward()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.grad += 0.01 * parameter
    training.step()


def decay_before_division_out_of_place(training):
    training.backward()
    for parameter in training.model.parameters():
        parameter.grad = parameter.grad + 0.01 * parameter.detach()
    training.step()


def noise_before_division(training):
    training.backward()
    for parameter in training.model.parameters():
        parameter.grad += torch.randn_like(parameter)
    training.step()


def part_of_the_loss_unscaled(training):
    (training.scaler.scale(training.loss()) + training.loss()).backward()
    training.step()


class Injected(torch.autograd.Function):
    """Gives a loss of its own the gradient one, as losses of routers do."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


def loss_injected_in_the_backward(training, select=lambda hidden: hidden):
    hidden = training.model[:3](torch.randn(6, 8))
    output = Injected.apply(training.model[3](select(hidden)), hidden.square().mean())
    training.step_on(output.square().mean())


def loss_injected_beside_an_index(training):
    loss_injected_in_the_backward(training, lambda hidden: hidden[torch.arange(6)])


def scaled_twice(training):
    training.step_on(training.scaler.scale(training.loss()))


def divided_after_each_backward(training):
    for _ in range(2):
        training.backward()
        scale = training.scaler.get_scale()
        for parameter in training.model.parameters():
            parameter.grad.mul_(1 / scale)
    training.optimizer.step()


def stepped_undivided(training):
    training.backward()
    training.optimizer.step()


def clamped_in_hooks(training):
    for parameter in training.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    ordinary(training)


def clamped_in_place_after_the_backward(training):
    training.backward()
    torch._foreach_clamp_max_(training.gradients, 0.01)
    training.step()


def clamped_within_the_backward(training):
    hidden = training.model[:3](torch.randn(6, 8))
    hidden.register_hook(lambda gradient: torch.clip(gradient, max=0.01))
    training.step_on(training.model[3](hidden).square().mean())


def norm_compared_undivided(training):
    training.backward()
    if nn.utils.get_total_norm(training.gradients) < 5:
        training.optimizer.zero_grad()
    training.step()


class Curvature(torch.optim.Optimizer):
    """Divides by squares of gradients, which the loop has it measure in a backward of their own."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.squares = {each: torch.zeros_like(each) for each in self.param_groups[0]["params"]}

    @torch.no_grad()
    def measure(self, factor=1.0):
        for parameter, squares in self.squares.items():
            squares.mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=factor)

    @torch.no_grad()
    def step(self):
        for parameter, squares in self.squares.items():
            parameter.sub_(parameter.grad / (squares + 1.0))


def measure_first(training, divide):
    training.backward()
    divide()
    training.optimizer.zero_grad()
    ordinary(training)


def squares_of_scaled(training):
    measure_first(training, training.optimizer.measure)


def squares_divided_by_hand(training):
    measure_first(training, lambda: training.optimizer.measure(1 / training.scaler.get_scale() ** 2))


def squares_of_divided(training):
    def divide():
        for parameter in training.model.parameters():
            parameter.grad.div_(training.scaler.get_scale())
        training.optimizer.measure()

    measure_first(training, divide)


class OwnGradient(torch.autograd.Function):
    """Computes its gradient in the forward, part by part, and multiplies it in the backward by the one it is given, or not."""

    @staticmethod
    def forward(ctx, output, multiplies):
        gradient = torch.empty_like(output)
        for rows in (slice(3), slice(3, None)):
            gradient[rows] = 2 * output[rows] / output.numel()
        ctx.save_for_backward(gradient)
        ctx.multiplies = multiplies
        return output.square().mean()

    @staticmethod
    def backward(ctx, given):
        (gradient,) = ctx.saved_tensors
        return (gradient * given if ctx.multiplies else gradient), None


def own_backward(training, multiplies, clips=False):
    training.scaler.scale(OwnGradient.apply(training.model(torch.randn(6, 8)), multiplies)).backward()
    if clips:
        training.scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.step()


@pytest.mark.parametrize("clips", [False, True])
def test_a_backward_that_drops_the_scale_is_named(clips):
    (mixed,) = Training().followed(lambda training: own_backward(training, multiplies=False, clips=clips))
    assert (mixed.text, mixed.first, mixed.second, mixed.names) == ("function", 0.0, -1.0, ("", "", "OwnGradient"))
    assert Training().followed(lambda training: own_backward(training, multiplies=True, clips=clips)) == []


def gradients_by_numpy(training):
    training.scaler.scale(OwnGradient.apply(training.model(torch.randn(6, 8)), True)).backward()
    for parameter in training.model.parameters():
        parameter.grad = torch.from_numpy(parameter.grad.numpy().copy())
    training.step()


def test_gradients_that_code_outside_of_torch_wrote_have_no_known_scale():
    assert Training().followed(gradients_by_numpy) == []


@pytest.mark.parametrize("scale", [4096.0, 64.0])
def test_squares_of_scaled_gradients_that_an_optimizer_takes_are_found(scale):
    (mixed,) = Training(Curvature, scale).followed(squares_of_scaled)
    assert (mixed.text, mixed.first, mixed.second) == ("state", 0.0, 2.0)


@pytest.mark.parametrize("step", [squares_divided_by_hand, squares_of_divided])
def test_squares_that_were_divided_are_not_found(step):
    assert Training(Curvature).followed(step) == []


def test_squares_that_no_optimizer_takes_are_not_found():
    squares = torch.zeros(16, 8)

    def logged_by_hand(training):
        training.backward()
        squares.addcmul_(training.model[0].weight.grad, training.model[0].weight.grad)
        training.step()

    assert Training().followed(logged_by_hand) == []


def _inner_step(training, of_gradients):
    weights = dict(training.model.named_parameters())
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    inner = training.scaler.scale(nn.functional.cross_entropy(training.model(x), y))
    gradients = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
    gradients = map(of_gradients, gradients)
    adapted = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    output = torch.func.functional_call(training.model, adapted, (x,))
    training.step_on(nn.functional.cross_entropy(output, y))


def inner_step_undivided(training):
    _inner_step(training, lambda gradient: gradient)


def inner_step_divided(training):
    scale = training.scaler.get_scale()
    _inner_step(training, lambda gradient: gradient.float() / scale)


FAULTY = {
    inner_step_undivided: ("weights", {1.0, 0.0}),
    clamped_in_hooks: ("limit", {1.0, 0.0}),
    clamped_in_place_after_the_backward: ("limit", {1.0, 0.0}),
    clamped_within_the_backward: ("limit", {1.0, 0.0}),
    norm_compared_undivided: ("limit", {1.0, 0.0}),
    one_loss_unscaled: ("accumulated", {1.0, 0.0}),
    penalty_undivided: ("number", {1.0, 0.0}),
    penalty_added_to_the_loss: ("values", {2.0, 0.0}),
    decay_before_division: ("gradient", {1.0, 0.0}),
    decay_before_division_out_of_place: ("gradient", {1.0, 0.0}),
    noise_before_division: ("gradient", {1.0, 0.0}),
    part_of_the_loss_unscaled: ("values", {1.0, 0.0}),
    loss_injected_in_the_backward: ("backward", {1.0, 0.0}),
    loss_injected_beside_an_index: ("backward", {1.0, 0.0}),
    scaled_twice: ("optimizer", {1.0, 0.0}),
    stepped_undivided: ("optimizer", {1.0, 0.0}),
}


def test_gradients_that_were_divided_before_the_last_backward_are_found():
    (mixed,) = Training(scale=4096.0).followed(divided_after_each_backward)
    assert (mixed.text, mixed.first, mixed.second) == ("divided", 0.0, 1.0)


@pytest.mark.parametrize("scale", [4096.0, 64.0])
@pytest.mark.parametrize("step", FAULTY)
def test_a_sum_of_different_powers_is_found(step, scale):
    (mixed,) = Training(scale=scale).followed(step)
    kind, powers = FAULTY[step]
    assert (mixed.text, {mixed.first, mixed.second}, mixed.loss_scale) == (kind, powers, scale)
    assert mixed.names[1].startswith("test_powers.py:")


def test_the_function_whose_backward_makes_a_gradient_is_named():
    (mixed,) = Training().followed(loss_injected_in_the_backward)
    assert mixed.names[2] == "Injected"


def test_all_parameters_in_which_gradients_are_added_are_named():
    training = Training()
    (mixed,) = training.followed(one_loss_unscaled)
    assert set(mixed.names[2:]) == {name for name, _ in training.model.named_parameters()}


def test_gradients_that_compiled_code_wrote_are_unknown():
    def step(training):
        training.backward()
        for parameter in training.model.parameters():
            # As by a kernel that torch's dispatcher does not see.
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.numpy()[:] = 1
        training.loss().backward()
        training.step()

    assert Training().followed(step) == []


def test_an_inner_step_on_divided_gradients_is_right():
    assert Training().followed(inner_step_divided) == []


def test_a_scale_of_one_multiplies_nothing():
    assert Training(scale=1.0).followed(one_loss_unscaled) == []


def test_a_disabled_scaler_multiplies_nothing():
    training = Training()
    training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert training.followed(one_loss_unscaled) == []
