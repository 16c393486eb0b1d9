"""Runs each diagnosis on a training loop with its fault and on the same loop without it."""

import contextlib
import copy
import functools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from textwrap import indent

import pytest
import torch
import torch.utils.checkpoint
from agreeing_reports import analyse, contradictions
from models import Of
from torch import nn
from trainings import closure_of, cpu_scaler, sgd, take_step

from mpinspect import Inspector, MixedPrecision, Session
from mpinspect.numeric.formats import as_format
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.measure.compensation import spacing_of
from mpinspect.ranges.faults.measure.masters import Masters
from mpinspect.ranges.records import LeftOver
from mpinspect.ranges.session import DROPPED, Event, Measurement, Progress
from mpinspect.reporting.finding import Finding

Loop = Callable[[bool], RangeReport]


def mlp(dtype: torch.dtype = torch.float32, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float32):
    torch.manual_seed(2)
    return [(torch.randn(32, 8).to(dtype), torch.randint(0, 4, (32,))) for _ in range(steps)]


def entropy(model, x, y, step=0):
    """Return the usual loss, in FP32."""
    return nn.functional.cross_entropy(model(x).float(), y)


def summed(model, x, y, step):
    return nn.functional.cross_entropy(model(x).float(), y, reduction="sum")


def multiplied(factor):
    """Make a loss that has the factor of its step."""
    return lambda model, x, y, step: entropy(model, x, y) * factor(step)


def spoiled(value, steps=(5,)):
    """Make a function of batches that writes the value to one feature in these steps."""

    def batch_of(step, x):
        if step in steps:
            x[3, 2] = value
        return x

    return batch_of


def train(
    model,
    optimizer=0.1,
    steps=12,
    scaler=None,
    dtype=torch.float32,
    autocast=None,
    loss_of=None,
    before_step=None,
    after_step=None,
    update=None,
    zero_grad=None,
    batch_of=lambda step, x: x,
    **options,
) -> RangeReport:
    """Train, with the given parts of the loop replaced by those that cause a fault.

    Args:
        optimizer: an optimizer, or the rate of SGD.
        scaler: a scaler, or the initial scale of one.
        update: replaces the steps of scaler and optimizer, and the scaler's update.
        options: of the inspector.
    """
    if isinstance(optimizer, float):
        optimizer = sgd(model, optimizer)
    if isinstance(scaler, float):
        scaler = cpu_scaler(scaler)
    loss_of = loss_of or entropy
    with Inspector(model, **options) as inspector:
        for step, (x, y) in enumerate(batches(steps, dtype)):
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_of(model, batch_of(step, x), y, step)
            (zero_grad or (lambda step: optimizer.zero_grad()))(step)
            (scaler.scale(loss) if scaler else loss).backward()
            if before_step:
                before_step(step)
            if update:
                update(step)
            elif scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if after_step:
                after_step(step)
    return inspector.report()


def moments(broken):
    model = mlp(torch.bfloat16)
    betas = (0.9, 0.999 if broken else 0.95)
    return train(model, torch.optim.Adam(model.parameters(), lr=0.01, betas=betas), dtype=torch.bfloat16)


def weight_decay(broken):
    model = mlp(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if broken else 0.1, betas=(0.9, 0.95), weight_decay=0.1)
    return train(model, optimizer, dtype=torch.bfloat16)


def epsilon(broken):
    model = mlp(torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8 if broken else 1e-4)
    return train(model, optimizer, dtype=torch.float16)


def average(broken):
    model = mlp()
    shadow = copy.deepcopy(model)
    if broken:
        shadow.bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @torch.no_grad()
    def follow(step):
        for mine, theirs in zip(shadow.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), 1e-3)

    return train(model, optimizer, after_step=follow, second=[1])


def accumulation(broken):
    model = mlp(torch.bfloat16 if broken else torch.float32)
    optimizer = sgd(model)

    def many(model, x, y, step):
        (300 * entropy(model, x[:16], y[:16])).backward()
        return entropy(model, x[16:], y[16:])

    dtype = next(model.parameters()).dtype
    clear = lambda step: optimizer.zero_grad()  # noqa: E731
    return train(model, optimizer, dtype=dtype, loss_of=many, zero_grad=lambda step: None, after_step=clear)


def initial_scale(broken):
    return train(mlp(), 1e-3, 20, 2.0 ** (24 if broken else 10), autocast=torch.float16, loss_of=summed)


def static_scale(broken):
    model = mlp(torch.float16)
    scale = 2.0**22 if broken else 8.0
    with Inspector(model, loss_scale=scale) as inspector:
        for x, y in batches(6, torch.float16):
            model.zero_grad()
            (nn.functional.cross_entropy(model(x).float(), y) * scale).backward()
            if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.01 / scale * parameter.grad
    return inspector.report()


def scaler_made_anew(broken):
    """Create a scaler in each step; with ``broken=False`` only once, as after a checkpoint."""
    model = mlp()
    optimizer, scaler = sgd(model, 1e-5), cpu_scaler(2.0**16)
    with Inspector(model) as inspector:
        for step, (x, _) in enumerate(batches(24)):
            if broken or step == 12:
                del scaler
                scaler = cpu_scaler(2.0**16)
            with torch.autocast("cpu", torch.float16):
                loss = (model(x).float() - 1e4 * broken).square().mean()
            take_step(optimizer, loss, scaler)
    return inspector.report()


def no_scaler(broken):
    return train(mlp(), scaler=None if broken else 256.0, autocast=torch.float16)


def scaler_in_bfloat16(broken):
    return train(mlp(), scaler=cpu_scaler(256.0, enabled=broken), autocast=torch.bfloat16)


def shared_scaler(broken, scale=2.0**12, steps=12, overflowing=range(12)):
    """Let the scaler step another model, too, whose gradients are infinite in the given steps."""
    model, other = mlp(), mlp()
    scaler = cpu_scaler(scale)
    optimizer, theirs = sgd(model), sgd(other, 1e-9)

    def second(step):
        if broken:
            scaler.unscale_(optimizer)
            theirs.zero_grad()
            for parameter in other.parameters():
                parameter.grad = torch.full_like(parameter, torch.inf if step in overflowing else 1.0)
            scaler.step(theirs)

    return train(model, optimizer, steps, scaler, autocast=torch.float16, before_step=second)


def recurring(broken):
    loss_of = multiplied(lambda step: 1e6 if broken and step % 6 == 4 else 1.0)
    return train(mlp(), 1e-3, steps=40, scaler=2.0**8, autocast=torch.float16, loss_of=loss_of)


def regulariser(broken, first=7):
    """Train with a loss that overflows at any scale every ten steps; with ``broken=False`` only the growing scale overflows."""
    scaler = cpu_scaler(2.0 ** (8 if broken else 19), growth_interval=4)
    loss_of = multiplied(lambda step: 1e30 if broken and step % 10 == first else 1.0)
    report = train(mlp(), 1e-3, steps=40, scaler=scaler, autocast=torch.float16, loss_of=loss_of)
    assert report.session.progress.skipped_steps >= 4
    return report


def new_scaler_each_epoch(broken):
    """Train in jobs of eight steps that reload the weights, but the scaler's state only with ``broken=False``."""
    model = mlp()
    optimizer = sgd(model, 1e-3)
    state = None
    with Inspector(model) as inspector:
        for step, (x, y) in enumerate(batches(32)):
            if step % 8 == 0:
                scaler = cpu_scaler(2.0**24)
                if state and not broken:
                    scaler.load_state_dict(state)
            with torch.autocast("cpu", torch.float16):
                loss = summed(model, x, y, step)
            take_step(optimizer, loss, scaler)
            state = scaler.state_dict()
    return inspector.report()


def broken_forward(broken):
    batch_of = lambda step, x: x * (1e6 if broken and step >= 3 else 1.0)  # noqa: E731
    return train(mlp(), 1e-3, scaler=2.0**8, autocast=torch.float16, batch_of=batch_of)


def clipped_scaled(broken):
    model = mlp()
    optimizer, scaler = sgd(model), cpu_scaler(256.0)

    def clip(step):
        if not broken:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return train(model, optimizer, scaler=scaler, autocast=torch.float16, before_step=clip)


@pytest.mark.parametrize(("of_scale", "is_told"), [(False, True), (True, False)])
def test_a_limit_that_is_multiplied_by_the_loss_scale_needs_no_unscaling(of_scale, is_told):
    model = mlp()
    optimizer, scaler = sgd(model), cpu_scaler(2.0**12)

    def clip(step):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (scaler.get_scale() if of_scale else 1.0))

    report = train(model, optimizer, scaler=scaler, autocast=torch.float16, before_step=clip)
    assert ("unscale-missing" in ids(report)) == is_told


def norm_of(parameters, dtype):
    return sum((parameter.grad.to(dtype) ** 2).sum() for parameter in parameters) ** 0.5


def clipped_to_zero(broken):
    model = mlp(torch.float16)

    def clip(step):
        norm = norm_of(model.parameters(), torch.float16 if broken else torch.float32)
        for parameter in model.parameters():
            parameter.grad /= norm

    return train(model, 1e-3, dtype=torch.float16, loss_of=multiplied(lambda step: 3e3), before_step=clip)


def zeroed(broken):
    model = mlp()
    optimizer = sgd(model)
    return train(model, optimizer, before_step=lambda step: optimizer.zero_grad() if broken else None)


def replaced(broken):
    model = mlp()

    def replace(step):
        if broken:
            for parameter in model.parameters():
                torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)

    def loss_of(model, x, y, step):
        loss = nn.functional.cross_entropy(model(x), y)
        return loss + (0 * model[0].weight.sum()).sqrt() if step == 4 else loss

    return train(model, loss_of=loss_of, before_step=replace)


def replaced_by_hook(broken, *, late=False):
    """Replace infinities in hooks; with ``broken=False`` the scale is low, so the hooks only clamp finite gradients."""
    model = mlp()

    def batch_of(step, x):
        if step == 0 and late:
            hook()
        return x

    def hook():
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0).clamp(-1e4, 1e4))

    if not late:
        hook()
    scale = 2.0 ** (24 if broken else 6)
    return train(model, 1e-3, scaler=scale, autocast=torch.float16, loss_of=summed, batch_of=batch_of)


replaced_by_late_hook = functools.partial(replaced_by_hook, late=True)


def stale(broken):
    model = Of(
        lambda self, x, step: (self.right if step % 2 else self.left)(x), left=nn.Linear(8, 4), right=nn.Linear(8, 4)
    )

    def zero_grad(step):
        used = model.right if step % 2 else model.left
        (used if broken else model).zero_grad()

    loss_of = lambda model, x, y, step: nn.functional.cross_entropy(model(x, step), y)  # noqa: E731
    return train(model, loss_of=loss_of, zero_grad=zero_grad)


def never_zeroed(broken):
    model = mlp()
    optimizer = sgd(model, 0.01)
    zero_grad = lambda step: None if broken else optimizer.zero_grad()  # noqa: E731
    return train(model, optimizer, zero_grad=zero_grad)


def train_masters(
    dtype=torch.bfloat16,
    steps=12,
    scale=1.0,
    micro_batches=1,
    zero_masters="to none",
    copy_gradients=True,
    change=None,
    before_step=None,
    loss_of=None,
    loss_scale=None,
    model=None,
    into=lambda parameter: parameter,
) -> RangeReport:
    """Train a 16-bit model whose FP32 masters the optimizer steps.

    Args:
        zero_masters: how to zero them, before the step's first backward: "to none", "in place", "by overwriting" or "never".
        change: called with the parameters before their gradients are copied.
        before_step: called with the model's parameters and the masters; returns whether to step.
        into: returns the tensor that receives a master, for a parameter.
    """
    model = model or mlp(dtype)
    parameters = list(model.parameters())
    masters = [parameter.detach().clone().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    loss_of = loss_of or entropy
    with Inspector(model, optimizers=optimizer, loss_scale=loss_scale) as inspector:
        for step, (x, y) in enumerate(batches(steps, dtype)):
            if zero_masters in ("to none", "in place"):
                optimizer.zero_grad(set_to_none=zero_masters == "to none")
            for part, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                model.zero_grad()
                (loss_of(model, part, target, step) * scale).backward()
                if change:
                    change(parameters)
                for parameter, master in zip(parameters, masters, strict=True) if copy_gradients else ():
                    gradient = parameter.grad.float() / scale
                    if master.grad is None or zero_masters == "by overwriting":
                        master.grad = gradient
                    else:
                        master.grad += gradient
            if before_step is None or before_step(parameters, masters):
                optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    into(parameter).copy_(master)
    return inspector.report()


def zeroed_if_stepped(broken):
    """The scale is too high for step 5 alone."""
    model, scaler = mlp(), cpu_scaler(2.0**12)
    optimizer, scales = sgd(model, 0.01), []

    def loss_of(model, x, y, step):
        scales.append(scaler.get_scale())
        return (1e38 if step == 5 else 1.0) * entropy(model, x, y)

    def zero_grad(step):
        if not broken or len(scales) < 2 or scales[-1] >= scales[-2]:
            optimizer.zero_grad()

    return train(model, optimizer, steps=20, scaler=scaler, loss_of=loss_of, zero_grad=zero_grad)


def masters_never_zeroed(broken):
    return train_masters(zero_masters="never" if broken else "to none")


def masters_never_zeroed_over_micro_batches(broken):
    return train_masters(zero_masters="never" if broken else "in place", micro_batches=3)


def masters_never_zeroed_and_clipped(broken):
    def clip(parameters, masters):
        nn.utils.clip_grad_norm_(masters, 0.3)
        return True

    zeroing = "never" if broken else "to none"
    return train_masters(torch.float16, 40, 64.0, zero_masters=zeroing, loss_scale=64.0, before_step=clip)


def masters_copied_into_copies(broken):
    return train_masters(into=(lambda parameter: parameter.float()) if broken else (lambda parameter: parameter))


def masters_clipped_to_zero(broken):
    def clip(parameters):
        norm = norm_of(parameters, torch.float16 if broken else torch.float32)
        for parameter in parameters:
            parameter.grad *= (2e3 / norm).clamp(max=1)

    return train_masters(torch.float16, scale=2e3, loss_scale=2e3, change=clip)


def masters_given_nothing(broken):
    return train_masters(copy_gradients=not broken)


once_overflowing = multiplied(lambda step: 1e6 if step == 3 else 1)


def masters_given_repaired_gradients(broken):
    def repair(parameters, masters):
        finite = all(master.grad.isfinite().all() for master in masters)
        for master in masters:
            torch.nan_to_num_(master.grad, 1.0, 1.0, 1.0)
        return broken or finite

    return train_masters(torch.float16, loss_scale=1.0, before_step=repair, loss_of=once_overflowing)


def missing(broken):
    def loss_of(model, x, y, step):
        hidden = model[1](model[0](x))
        return nn.functional.cross_entropy(model[2](hidden.detach() if broken else hidden), y)

    return train(mlp(), loss_of=loss_of)


def missing_under_checkpoints(broken):
    def loss_of(model, x, y, step):
        hidden = torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=broken)
        return nn.functional.cross_entropy(model[2](hidden), y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(mlp(), loss_of=loss_of)


def replaced_behind_the_optimizer(broken):
    model = mlp()
    before = list(model.parameters())
    for module in (model[0], model[2]):
        nn.utils.parametrizations.weight_norm(module)
    # weight_norm replaces the weights and leaves the biases.
    return train(model, torch.optim.SGD(before if broken else model.parameters(), lr=0.1))


def not_optimized(broken):
    model = mlp(width=64)
    return train(model, sgd(model[0] if broken else model))


def nan_in_batch(broken):
    return train(mlp(), batch_of=spoiled(torch.nan, (5,) if broken else ()))


def outlier_in_batch(broken):
    return train(mlp(), batch_of=spoiled(1e5, (5,) if broken else ()), autocast=torch.float16)


def masked_row(broken):
    def loss_of(model, x, y, step):
        mask = torch.zeros(32, 32, dtype=torch.bool)
        mask[7] = broken and step == 3
        return nn.functional.cross_entropy(model(x, mask), y)

    model = Of(
        lambda self, x, mask: self.out((self.query(x) @ x.T).masked_fill(mask, -torch.inf).softmax(-1) @ x),
        query=nn.Linear(8, 8),
        out=nn.Linear(8, 4),
    )
    return train(model, loss_of=loss_of)


def masked():
    forward = lambda self, x, mask: self.out((self.query(x) @ x.T + mask).softmax(-1) @ x)  # noqa: E731
    return Of(forward, query=nn.Linear(8, 8), out=nn.Linear(8, 8))


class MaskedBlocks(nn.Module):
    """Two blocks that receive the same mask."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList([masked(), masked()]), nn.Linear(8, 4)

    def forward(self, x, mask):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x, mask)
        return self.last(x)


def causal(dtype=torch.float32):
    return torch.full((32, 32), torch.finfo(torch.float32).min).triu(1).to(dtype)


def mask_given_to_blocks(broken):
    """Give a BF16 mask to two blocks; the cast to BF16 turned FP32's lowest number into -inf."""
    model = MaskedBlocks().to(torch.bfloat16)

    def loss_of(model, x, y, step):
        mask = causal(torch.bfloat16)
        mask[7] = -torch.inf if broken and step == 3 else mask[7]
        return nn.functional.cross_entropy(model(x, mask).float(), y)

    return train(model, loss_of=loss_of, dtype=torch.bfloat16)


def infinity_beside_a_mask(broken):
    """Put -inf into the features; a layer that takes only features shows that they are not a mask."""

    def loss_of(model, x, y, step):
        x[3, 2] = -torch.inf if broken and step == 4 else x[3, 2]
        return nn.functional.cross_entropy(model(x, causal().masked_fill(causal() < 0, -torch.inf)), y)

    return train(MaskedBlocks(), loss_of=loss_of)


def zero_row(broken):
    def loss_of(model, x, y, step):
        made = torch.relu(model[0](x)) * (0.0 if broken and step == 4 else 1.0)
        return nn.functional.cross_entropy(model[2](made / (made.sum(-1, keepdim=True) + (0 if broken else 1e-6))), y)

    return train(mlp(), 0.01, loss_of=loss_of)


class NormedRows(torch.autograd.Function):
    """Divides each row of a matrix by its largest magnitude, hidden from autograd's graph."""

    @staticmethod
    def forward(context, weight):
        context.save_for_backward(weight)
        return weight / weight.abs().amax(-1, keepdim=True)

    @staticmethod
    def backward(context, gradient):
        return gradient


class NormedLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, NormedRows.apply(self.weight))


def zero_weight(broken):
    """Train an adapter whose second weight is normed and begins at zero, before a layer with a frozen bias and a softmax."""
    torch.manual_seed(0)
    model = nn.Sequential(NormedLinear(8, 8, bias=False), NormedLinear(8, 8, bias=False), nn.Linear(8, 4))
    model[2].bias.requires_grad_(False)
    if broken:
        nn.init.zeros_(model[1].weight)

    def loss_of(model, x, y, step):
        scores = model[1](model[0](x)) @ model[2].weight.t() + model[2].bias
        return nn.functional.cross_entropy(scores, y)

    return train(model, 0.05, loss_of=loss_of)


def logarithm(broken):
    def loss_of(model, x, y, step):
        chosen = model(x).softmax(-1).gather(1, y[:, None])
        if step == 6:
            chosen = chosen * torch.arange(32)[:, None].clamp_max(1)
        return -(chosen + (0 if broken else 1e-9)).log().mean()

    return train(mlp(), loss_of=loss_of)


def root_under_a_scaler(broken):
    """Of the pairs in every other step from 5 on, one is of a row with itself: no loss scale makes its gradient finite."""

    def loss_of(model, x, y, step):
        other = x.roll(1, 0)
        if step > 4 and step % 2:
            other[3] = x[3]
        distances = (model(x) - model(other)).square().sum(1) + (0 if broken else 1e-12)
        return distances.sqrt().mean()

    return train(mlp(), 1e-2, scaler=2.0**8, loss_of=loss_of)


def clamped_or_repaired_under_a_scaler(repaired):
    """A search for a scale from 2^30, with roots of zero in each step whose gradient a hook repairs, or a logit that clamps."""

    def loss_of(model, x, y, step):
        scores = model(x).float()
        zeros = scores * torch.tensor([1.0, 1, 1, 0])
        if not repaired:
            return zeros.clamp(0, 1).logit(1e-4).square().mean()
        distances = zeros.square()
        distances.register_hook(torch.nan_to_num)
        return distances.sqrt().mean()

    return train(mlp(), 1e-3, scaler=2.0**30, steps=40, autocast=torch.float16, loss_of=loss_of)


@pytest.mark.parametrize("repaired", [True, False])
def test_zeros_whose_gradient_is_finite_are_not_blamed_for_the_search_of_a_scale(repaired):
    report = clamped_or_repaired_under_a_scaler(repaired)
    assert any(event.skipped for event in report.events)
    assert not named(report, "argument-out-of-range")


def exploding(broken):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    loss_of = lambda model, x, y, step: (model(x)[:, 0] - y).square().mean()  # noqa: E731
    return train(model, 3.0 if broken else 1e-3, loss_of=loss_of)


def statistics(broken, narrow=torch.float16, momentum=0.1, rate=1e-4, batch_of=lambda step, x: 1e3 * x):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Tanh(), nn.Linear(16, 4))
    dtype = narrow if broken else torch.float32
    return train(model.to(dtype), rate, dtype=dtype, batch_of=batch_of)


def stuck_statistics(broken):
    return statistics(broken, torch.bfloat16, 1e-4, 0.1, lambda step, x: x)


def class_weight(broken):
    def loss_of(model, x, y, step):
        weight = torch.ones(4)
        if step == 5:
            weight[2] = torch.inf if broken else 2.0
        return nn.functional.cross_entropy(model(x), y, weight=weight)

    return train(mlp(), loss_of=loss_of)


def half_loss_scaled(broken):
    """Overflow a 16-bit loss under a scaler: the gradients are finite."""

    def loss_of(model, x, y, step):
        made = model(x)
        return ((made if broken else made.float()) * 300).square().mean()

    return train(mlp(), 1e-9, scaler=2.0**-8, autocast=torch.float16, loss_of=loss_of, second=[0])


def positions(broken):
    dtype = torch.bfloat16 if broken else torch.float32
    made = Of(lambda self, n: torch.arange(n, dtype=dtype)[:, None] / torch.tensor([1.0, 8.0], dtype=dtype))
    layers = {"positions": made, "out": nn.Linear(2, 4)}
    model = Of(lambda self, x: self.out(self.positions(512).float().sin())[: len(x)], **layers)
    return train(model, second=[0])


def router(choose, experts=48):
    """Weigh an input by the scores of a layer that ``choose`` returns."""

    def forward(self, x):
        scores = self.gate(x.to(self.gate.weight.dtype))
        return self.out(x * choose(scores).float().sum(-1, keepdim=True))

    return Of(forward, gate=nn.Linear(8, experts), out=nn.Linear(8, 4))


def ties(broken):
    torch.manual_seed(5)
    dtype = torch.bfloat16 if broken else torch.float32
    return train(router(lambda scores: (0.1 * scores).sigmoid().to(dtype).topk(2).values), second=[0])


def ties_softmax(broken):
    """Apply top-k in FP32 to scores that a layer rounded to 16 bits."""
    torch.manual_seed(5)
    model = router(lambda scores: scores.softmax(-1, dtype=torch.float32).topk(2).values)
    model.gate.to(torch.bfloat16 if broken else torch.float32)
    nn.init.constant_(model.gate.bias, 3.0)
    return train(model, second=[0])


def against_a_reference(of):
    """Make a loop whose loss ``of`` compares the model with a frozen copy of it: ``of(logits, the copy's, y, broken)``."""

    def loop(broken):
        model = mlp()
        reference = copy.deepcopy(model).requires_grad_(False)
        loss_of = lambda model, x, y, step: of(model(x), reference(x), y, broken)  # noqa: E731
        return train(model, autocast=torch.bfloat16, loss_of=loss_of, second=[1])

    return loop


def divergence(of, summed):
    """Make a loop whose policy loss has a KL term to a reference; the term loses most bits if the logits have 16 bits."""

    def loss(logits, known, y, broken):
        if not broken:
            logits, known = logits.float(), known.float()
        log_p, log_q = logits.log_softmax(-1), known.log_softmax(-1)
        policy = -(torch.linspace(-1, 1, 32) * log_p.gather(1, y[:, None])[:, 0]).mean()
        return summed(policy, of(log_p, log_q))

    return against_a_reference(loss)


divergence_added = divergence(lambda p, q: (p.exp() * (p - q)).sum(-1).mean(), lambda policy, kl: policy + 0.1 * kl)
divergence_of_samples = divergence(
    lambda p, q: ((q - p)[:, 0].exp() - (q - p)[:, 0] - 1).float(), lambda policy, kl: (policy + 0.1 * kl).mean()
)


@against_a_reference
def margin_of_sums(logits, known, y, broken):
    """Return a margin of summed log-probabilities, computed in FP32 and then rounded to BF16."""
    log_p, log_q = (each.float().log_softmax(-1).gather(1, y[:, None]) for each in (logits, known))
    if broken:
        log_p, log_q = log_p.bfloat16(), log_q.bfloat16()
    return -nn.functional.logsigmoid((log_p.sum(-1) - log_q.sum(-1)).float()).mean()


def by_hand(scale_of, *, zero_first=False, known=True):
    """Train with a loss scaled by hand, without the steps whose gradients are not finite."""
    model = mlp()
    optimizer = sgd(model, 0.01)
    with Inspector(model, optimizers=optimizer if known else None) as inspector:
        for step, (x, y) in enumerate(batches(16)):
            if zero_first:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(out.float(), y) * scale_of(step)).backward()
            if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
                for parameter in model.parameters():
                    parameter.grad.div_(scale_of(step))
                optimizer.step()
    return inspector.report()


def test_a_nan_is_attributed_to_the_module_that_uses_the_mask():
    report = mask_given_to_blocks(True)
    first = report.events[0]
    assert (first.step, first.module, first.tensor, first.value) == (3, "blocks.0", "blocks.0.out", "nan")
    assert "of 'blocks.0'" in first.explanation
    assert "torch.finfo(scores.dtype).min (float32's becomes -inf in 16 bits)" in report.findings[0].fix
    assert mask_given_to_blocks(False).events == infinity_beside_a_mask(False).events == ()


def test_a_nan_is_attributed_to_a_module_whose_only_infinite_input_is_a_mask():
    softmax = Of(lambda self, scores, mask: (scores + mask).softmax(-1))
    model = Of(
        lambda self, x, mask: self.softmax(self.query(x) @ x.T, mask) @ x, query=nn.Linear(8, 8), softmax=softmax
    )
    hidden = torch.full((32, 32), -torch.inf).triu(1)
    hidden[5] = -torch.inf
    with Inspector(model) as inspector:
        model(torch.randn(32, 8), hidden).sum().backward()
    first = inspector.report().events[0]
    assert first.module == "softmax"
    assert "its input was finite except -inf, as in a mask" in first.explanation


def test_an_infinity_outside_of_a_mask_is_attributed_to_the_code_that_made_it():
    model = Of(lambda self, x: self.inner(x.relu().log()), inner=nn.Linear(8, 4))
    with Inspector(model) as inspector:
        model(torch.randn(32, 8)).sum().backward()
    assert inspector.report().events[0].module == ""


def ids(report):
    return {finding.id for finding in report.findings}


def graver_than_info(report):
    return [finding for finding in report.findings if finding.severity != "info"]


def test_the_model_itself_is_called_the_model():
    event = Event(0, 0, "forward", "", "activation", "", "inf")
    assert event.quantity == "the activation of the model"
    assert event.place == "the model itself"


@pytest.mark.parametrize("loop", [replaced_by_hook, replaced_by_late_hook])
def test_gradients_replaced_by_a_hook_are_the_first_finding(loop):
    report = loop(True)
    finding = report.findings[0]
    assert (finding.id, finding.certainty) == ("gradients-replaced", "inferred")
    assert "the scale stays at 16777216 (2^24)" in finding.message
    assert "infinities in step" not in str(report)
    assert all(other.severity == "info" for other in report.findings if other.id == "gradients-all-zero")


def test_infinities_stopped_by_a_relu_are_not_reported_as_replaced():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def loss_of(model, x, y, step):
        hidden = model[1](model[0](x) - 100.0)
        # At zero the square root's derivative is infinite, and the ReLU before it passes no gradient.
        return entropy(model[2], hidden, y) + hidden.float().sqrt().sum()

    report = train(model, 1e-3, scaler=2.0**6, autocast=torch.float16, loss_of=loss_of)
    assert report.events
    assert "gradients-replaced" not in ids(report)


def test_gradients_of_a_closure_cause_no_finding():
    model = mlp()
    optimizer = sgd(model)
    with Inspector(model) as inspector:
        for x, y in batches(12):
            optimizer.step(closure_of(optimizer, lambda x=x, y=y: entropy(model, x, y)))
    assert graver_than_info(inspector.report()) == []


def stepped_scaled(broken):
    model, scaler = mlp(), cpu_scaler(1024.0)
    optimizer = sgd(model, 1e-5)

    def by_hand(step):
        if not broken:
            for parameter in model.parameters():
                parameter.grad /= scaler.get_scale()

    return train(model, optimizer, scaler=scaler, before_step=by_hand, update=lambda step: optimizer.step())


def unscaled_by_hand_too(broken):
    """Unscale the gradients a second time by hand; with ``broken=False`` divide them by a number of micro-batches."""
    model, scaler = mlp(), cpu_scaler(2.0**8)

    def by_hand(step):
        for parameter in model.parameters():
            parameter.grad /= scaler.get_scale() if broken else 4.0

    return train(model, scaler=scaler, autocast=torch.float16, before_step=by_hand)


def unscaled_each_micro_batch(broken):
    """Unscale after each of two micro-batches; with ``broken=False`` zero the first one's gradients, as after an overflow."""
    model, scaler = mlp(), cpu_scaler(2.0**8)
    optimizer = sgd(model)

    def zero_grad(step):
        if step % 2 == 0 or not broken:
            optimizer.zero_grad()

    def step_every_second_time(step):
        scaler.unscale_(optimizer)
        if step % 2:
            scaler.step(optimizer)
        scaler.update()

    options = {"zero_grad": zero_grad, "update": step_every_second_time, "optimizers": optimizer}
    return train(model, optimizer, 16, scaler, autocast=torch.float16, **options)


def second_loss_not_scaled(broken):
    """Scale one of two losses; with ``broken=False`` the second loss has its own optimizer, without a scaler."""
    both, scaler = nn.ModuleList([mlp(), nn.Linear(4, 4)]), cpu_scaler(2.0**8)
    optimizer, of_second = sgd(both if broken else both[0]), sgd(both[1])
    with Inspector(both, optimizers=optimizer if broken else [optimizer, of_second]) as inspector:
        for x, y in batches(8):
            with torch.autocast("cpu", torch.float16):
                out = both[0](x)
            both.zero_grad()
            scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
            entropy(both[1], x[:, :4], y).backward()
            scaler.step(optimizer)
            scaler.update()
            if not broken:
                of_second.step()
    return inspector.report()


def test_gradients_left_in_place_after_their_step_are_not_reported_as_unscaled_again():
    """A critic steps twice per generator step, and its gradients remain during the generator's backward."""
    both, scaler = nn.ModuleList([mlp(), nn.Linear(4, 4)]), cpu_scaler(2.0**6)
    optimizers = [sgd(each, 1e-3) for each in both]
    with Inspector(both, optimizers=optimizers) as inspector:
        for x, y in batches(8):
            for turn in (1, 1, 0):
                with torch.autocast("cpu", torch.float16):
                    out = both[1](both[0](x))
                optimizers[turn].zero_grad()
                scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
                scaler.unscale_(optimizers[turn])
                scaler.step(optimizers[turn])
                scaler.update()
    assert "unscaled-too-often" not in ids(inspector.report())


def test_an_optimizer_that_a_loop_only_unscales_with_unscales_new_gradients_in_each_update():
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=256.0)
    with Inspector(model) as inspector:
        for x, y in batches(6):
            optimizer.zero_grad()
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = nn.functional.cross_entropy(model(part).float(), target)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
            scaler.update()
    assert "unscaled-too-often" not in ids(inspector.report())


def targets_of(make):
    def loop(broken):
        def loss_of(model, x, y, step):
            target = torch.randn(32, 4)
            if broken and step == 5:
                target[3, 1] = float("nan")
            return make(model(x), target)

        return train(mlp(), loss_of=loss_of)

    return loop


def test_an_unscaled_loss_with_its_own_optimizer_needs_no_unscaling():
    """A model has two heads: the first uses the scaler, the second trains in FP32 with its own optimizer."""
    model, scaler = nn.ModuleList([mlp(), mlp()]), cpu_scaler(1024.0)
    first, second = map(sgd, model)
    with Inspector(model) as inspector:
        for x, y in batches(12):
            model.zero_grad()
            scaler.scale(entropy(model[0], x, y)).backward()
            entropy(model[1], x, y).backward()
            scaler.step(first)
            scaler.update()
            second.step()
    assert "unscale-missing" not in ids(inspector.report())


nan_targets = targets_of(nn.functional.mse_loss)
nan_targets_by_hand = targets_of(lambda output, target: ((output - target) ** 2).mean())
nan_targets_absolute = targets_of(nn.functional.l1_loss)


def ignored_targets(broken):
    ignored = torch.full((32,), -100)
    return train(mlp(), loss_of=lambda model, x, y, step: entropy(model, x, ignored if broken and step == 5 else y))


def test_an_overflow_in_the_model_is_not_attributed_to_the_targets():
    """The model's product overflows FP16; the targets are finite."""

    def loss_of(model, x, y, step):
        return ((model(x) * 60000).float() * 60000 - torch.ones(32, 4)).pow(2).mean()

    assert "batch-not-finite" not in ids(train(mlp(torch.float16), 0.0, dtype=torch.float16, loss_of=loss_of))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = mlp(), mlp()

    def forward(self, x):
        return self.large(x), self.small(x)


class OneHeadInFP32(TwoHeads):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            small = self.small(x.float())
        return self.large(x), small


def two_branches(broken, model=None, large_loss=lambda out: out.mul(300).sub(9), rate=1e-9, steps=20, scale=2.0**12):
    """Train two branches in FP16: one makes the scaler lower its scale, which flushes the other's gradients."""
    weight = 1e-9 if broken else 1.0

    def loss_of(model, x, y, step):
        large, small = model(x)
        return large_loss(large.float()).square().mean() + weight * nn.functional.cross_entropy(small.float(), y)

    return train(model or TwoHeads(), rate, steps, scale, autocast=torch.float16, loss_of=loss_of)


def silent_branch(broken):
    """Train two branches in FP16 at a scale that flushes all gradients of one of them."""
    return two_branches(broken, large_loss=lambda out: out, rate=1e-3, steps=12, scale=2.0**4)


def never_stepped(broken):
    """Call the scaler's scale, unscale_ and update, but never its step."""
    model, scaler = mlp(), cpu_scaler(2.0**4)
    optimizer = sgd(model)

    def step_or_not(step):
        scaler.unscale_(optimizer)
        if not broken:
            scaler.step(optimizer)
        scaler.update()

    return train(model, optimizer, 6, scaler, autocast=torch.float16, update=step_or_not)


@pytest.mark.parametrize("classes", [4, 7])
def test_a_layer_that_was_replaced_after_the_optimizer_was_made_is_not_optimized(classes):
    model = mlp()
    optimizer = sgd(model)
    model[2] = nn.Linear(16, classes)
    (finding,) = named(train(model, optimizer), "parameters-not-optimized")
    assert finding.layer.startswith("2")


@pytest.mark.parametrize("in_optimizer", [False, True])
def test_a_backbone_that_is_unfrozen_belongs_in_the_optimizer(in_optimizer):
    model = mlp(width=64)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters() if in_optimizer else model[2:].parameters(), lr=0.05)

    def step_and_unfreeze(step):
        optimizer.step()
        model[0].requires_grad_(step >= 3)

    found = named(train(model, optimizer, 10, update=step_and_unfreeze), "parameters-not-optimized")
    assert [(each.layer, each.severity, each.evidence["unfrozen"]) for each in found] == (
        [] if in_optimizer else [("0.weight", "warning", 2)]
    )


def test_gradients_that_a_script_assigns_are_not_reported_as_never_zeroed():
    """The script sums gradients from torch.autograd.grad and assigns .grad, so it need not zero it."""
    model = mlp()
    optimizer, parameters = sgd(model), list(model.parameters())
    with Inspector(model, optimizers=optimizer) as inspector:
        for x, y in batches(8):
            sums = [torch.zeros_like(parameter) for parameter in parameters]
            for part in range(2):
                loss = entropy(model, x[part::2], y[part::2]) / 2
                for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                    total += gradient
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total
            optimizer.step()
    assert graver_than_info(inspector.report()) == []


def test_weights_that_explode_with_a_finite_loss_are_reported():
    """The hidden layer saturates, so the loss grows and stays finite."""
    model = mlp()
    optimizer = sgd(model, 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 3.0**step)
    report = train(model, optimizer, steps=16, after_step=lambda step: scheduler.step())
    assert report.events == ()
    (finding,) = named(report, "weights-exploded")
    assert "times the first one" in finding.message


def test_an_infinite_derivative_is_not_an_overflow_of_bf16():
    model = mlp(torch.bfloat16)

    def loss_of(model, x, y, step):
        made = model(x).float()
        return made.square().mean() + ((made - made.detach()).square().sum().sqrt() if step == 5 else 0)

    report = train(model, 0.0, dtype=torch.bfloat16, loss_of=loss_of)
    assert [event.phase for event in report.events][:1] == ["backward"]
    assert report.loss_scale.needed is False


def test_backwards_without_an_optimizer_step_are_not_training():
    model = mlp()
    with Inspector(model) as inspector:
        for x, y in batches(6):
            entropy(model, x, y).backward()
    report = inspector.report()
    assert report.verdict.healthy is None
    assert "none of 6 backwards led to an update" in str(report.verdict)
    assert graver_than_info(report) == []


@pytest.mark.parametrize(
    ("steps", "evaluations", "is_named"),
    [(30, 0, True), (6, 40, False), (14, 0, False)],
    ids=["leaves", "evaluates elsewhere", "leaves a few times"],
)
def test_a_loop_that_leaves_the_step_before_the_backward_is_named(steps, evaluations, is_named):
    model = mlp()
    optimizer = sgd(model, 0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step, (x, y) in enumerate(batches(steps)):
            loss = entropy(model, x, y)
            if step >= 6:
                continue
            take_step(optimizer, loss)
        for x, _ in batches(evaluations):
            model(x)
        with torch.no_grad():
            for x, y in batches(evaluations):
                entropy(model, x, y)
    found = named(inspector.report(), "steps-stopped")
    wanted = [(6, 24, "inferred")] * is_named
    assert [(each.step, each.evidence["forwards"], each.certainty) for each in found] == wanted
    assert all("test_diagnoses.py:" in each.message for each in found)


def test_a_nan_that_a_module_computes_from_a_finite_batch_is_not_attributed_to_the_batch():
    # Rows of zeros make inf * 0, before the module calls another one.
    code = lambda x: x.sum(1, keepdim=True).pow(-0.5).mul(0) * x  # noqa: E731
    model = nn.Sequential(Of(lambda self, x: self.inner(code(x)), inner=nn.Linear(8, 4)))
    batch_of = lambda step, x: x.abs() if step < 5 else torch.zeros_like(x)  # noqa: E731
    report = train(model, batch_of=batch_of)
    assert report.events[0].step == 5
    assert named(report, "batch-not-finite") == []


def test_weights_that_explode_late_are_reported_with_the_schedulers_learning_rate():
    """The weights grow in a step that is not measured."""
    model = mlp()
    optimizer = sgd(model, 0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 20 else 30000.0)
    loss_of = lambda model, x, y, step: model(x).square().mean()  # noqa: E731
    report = train(model, optimizer, steps=26, loss_of=loss_of, after_step=lambda step: scheduler.step())
    (finding,) = named(report, "weights-exploded")
    assert "at a learning rate of 300, which a scheduler had changed from 0.01" in finding.message
    assert "Lower the largest learning rate of the scheduler" in finding.fix
    assert "optimizer =" not in finding.code


def test_a_branch_in_fp32_needs_no_scale():
    """The suggested fix removes the finding, although the branch's gradients are as small as before."""
    report = two_branches(True, OneHeadInFP32())
    assert named(report, "scale-window-empty") == []
    assert report.loss_scale.needed is False
    small, large = (
        next(layer for layer in report.layers if (layer.name, layer.kind) == (f"{name}.0.weight", "weight_gradient"))
        for name in ("small", "large")
    )
    assert report.session.passed_through([small.key]) == {"float32"}
    assert report.session.passed_through([large.key]) == {"float16"}


def test_branches_without_a_common_scale_get_one_fix():
    report = two_branches(True)
    finding = report.findings[0]
    assert finding.id == "scale-window-empty"
    assert finding.message in str(report.verdict)
    # The fix names every layer of a branch, so that it resolves all conflicts.
    small, large = finding.fix.split(" in FP32 (or ")
    assert re.findall(r"'([\w.]+)'", small) == ["small.0", "small.1", "small.2"]
    assert re.findall(r"'([\w.]+)'", large) == ["large.0", "large.1", "large.2"]
    lowest, highest = report.loss_scale.lowest, report.loss_scale.highest
    worst = report.loss_scale.conflicts[0]
    assert (2.0**worst.log2_lowest, 2.0**worst.log2_highest) == (lowest, highest)
    assert [other.id for other in graver_than_info(report) if other.fix or other.code] == ["scale-window-empty"]


CASES: tuple[tuple[str, str, int | None, Loop], ...] = (
    ("moments-cannot-decay", "", None, moments),
    ("weight-decay-lost", "", None, weight_decay),
    ("epsilon-zero", "", None, epsilon),
    ("buffer-stops-changing", "", 1, average),
    ("accumulation-lost", "", None, accumulation),
    ("initial-scale-too-high", "", 0, initial_scale),
    ("scale-too-high", "", 0, static_scale),
    ("scaler-made-anew", "", 0, scaler_made_anew),
    ("scaler-made-anew", "", 8, new_scaler_each_epoch),
    ("scaler-missing-in-float16", "", None, no_scaler),
    ("scaler-in-bfloat16", "", None, scaler_in_bfloat16),
    ("scaler-shared", "", 0, shared_scaler),
    ("overflow-recurs", "", 4, recurring),
    ("overflow-recurs", "", 7, regulariser),
    ("scale-window-empty", "small", None, two_branches),
    ("non-finite-event", "0", 3, broken_forward),
    ("unscale-missing", "", 0, clipped_scaled),
    ("unscale-missing", "", 0, stepped_scaled),
    ("unscaled-too-often", "", 0, unscaled_by_hand_too),
    ("unscaled-too-often", "", 0, unscaled_each_micro_batch),
    ("unscaled-too-often", "1.weight", 0, second_loss_not_scaled),
    ("gradients-clipped-to-zero", "", 0, clipped_to_zero),
    ("gradients-zeroed", "", 0, zeroed),
    ("gradients-replaced", "0", 4, replaced),
    ("gradients-replaced", "0", 0, replaced_by_hook),
    ("gradients-replaced", "0", 0, replaced_by_late_hook),
    ("gradients-stale", "left", 1, stale),
    ("gradients-never-zeroed", "", 1, never_zeroed),
    ("gradients-never-zeroed", "", 5, zeroed_if_stepped),
    ("gradients-never-zeroed", "", 1, masters_never_zeroed),
    ("gradients-never-zeroed", "", 1, masters_never_zeroed_over_micro_batches),
    ("gradients-never-zeroed", "", 1, masters_never_zeroed_and_clipped),
    ("gradients-clipped-to-zero", "", 0, masters_clipped_to_zero),
    ("never-updated", "", None, masters_copied_into_copies),
    ("gradients-zeroed", "", 0, masters_given_nothing),
    ("gradients-replaced", "2", 3, masters_given_repaired_gradients),
    ("gradients-missing", "0", None, missing),
    ("gradients-missing", "0", None, missing_under_checkpoints),
    ("parameters-not-optimized", "2", None, not_optimized),
    ("parameters-not-optimized", "0.parametrizations", None, replaced_behind_the_optimizer),
    ("batch-not-finite", "", 5, nan_in_batch),
    ("batch-not-finite", "", 5, nan_targets),
    ("batch-not-finite", "", 5, nan_targets_by_hand),
    ("batch-not-finite", "", 5, nan_targets_absolute),
    ("argument-out-of-range", "", 5, ignored_targets),
    ("batch-not-finite", "", 4, infinity_beside_a_mask),
    ("batch-beyond-float16", "0", 5, outlier_in_batch),
    ("mask-hides-whole-row", "", 3, masked_row),
    ("zero-row-normalized", "1", 0, zero_weight),
    ("mask-hides-whole-row", "blocks.0", 3, mask_given_to_blocks),
    ("zero-row-normalized", "", 4, zero_row),
    ("argument-out-of-range", "", 6, logarithm),
    ("argument-out-of-range", "", 5, root_under_a_scaler),
    ("weights-exploded", "", None, exploding),
    ("statistics-broken", "1", None, statistics),
    ("statistics-broken", "1", None, stuck_statistics),
    ("argument-out-of-range", "", 5, class_weight),
    ("overflow-in-operator", "", 0, half_loss_scaled),
    ("gradients-all-zero", "small", None, silent_branch),
    ("never-updated", "", None, never_stepped),
    ("positions-collapse", "positions", 0, positions),
    ("router-ties", "", 0, ties),
    ("result-is-rounding-error", "", 1, divergence_added),
    ("result-is-rounding-error", "", 1, divergence_of_samples),
    ("result-is-rounding-error", "", 1, margin_of_sums),
    ("router-ties", "", 0, ties_softmax),
)
NAMES = {loop: name for name, loop in list(globals().items()) if callable(loop)}
each_case = pytest.mark.parametrize(
    ("id", "module", "step", "loop"), CASES, ids=[f"{case[0]}-{NAMES[case[3]]}" for case in CASES]
)


def named(report: RangeReport, id: str) -> list[Finding]:
    return [finding for finding in graver_than_info(report) if finding.id == id]


@pytest.mark.parametrize(("backoff", "is_fixed"), [(0.5, True), (0.5, False), (0.9, False)])
def test_for_a_scaler_that_never_lowers_its_scale_update_is_suggested(backoff, is_fixed):
    model, scaler = mlp(), cpu_scaler(2.0**40, backoff_factor=backoff)
    optimizer = sgd(model, 1e-3)

    def step_and_update(step):
        scaler.step(optimizer)
        scaler.update(2.0**40 if is_fixed else None)

    report = train(model, optimizer, 5, scaler, autocast=torch.float16, update=step_and_update)
    asked = [finding for finding in named(report, "scale-too-high") if "scaler.update()" in finding.fix]
    assert len(asked) == is_fixed


@each_case
def test_each_fault_is_reported_with_its_module_and_step(id, module, step, loop):
    report = loop(True)
    assert contradictions(report) == []
    assert named(report, id), [str(finding) for finding in report.findings]
    finding = named(report, id)[0]
    assert finding.layer.startswith(module)
    assert step is None or finding.step == step
    assert report.verdict.healthy is False
    compile(f"def run():\n  for batch, target in loader:\n    pass\n{indent(finding.code, '    ')}", "fix", "exec")


@each_case
def test_each_loop_without_its_fault_has_no_such_finding(id, module, step, loop):
    report = loop(False)
    assert contradictions(report) == []
    assert not named(report, id), [str(finding) for finding in report.findings]


def quiet(report, id):
    assert not named(report, id), [str(finding) for finding in report.findings]


def test_an_overflow_in_fp32_is_not_blamed_on_the_range_of_fp16():
    spoil = spoiled(3e38)
    report = train(mlp(), batch_of=lambda step, x: spoil(step, x) * 4)
    assert report.session.events[0].step == 5
    quiet(report, "batch-beyond-float16")


@pytest.mark.parametrize(("steps", "severity"), [(60, "warning"), (20, "error")])
def test_rare_outliers_whose_steps_a_scaler_skips_are_a_warning(steps, severity):
    report = train(mlp(), steps=steps, scaler=4.0, batch_of=spoiled(1e5), autocast=torch.float16)
    (finding,) = named(report, "batch-beyond-float16")
    assert (finding.severity, finding.evidence["rows"], finding.step) == (severity, ["3"], 5)
    assert "continue" in finding.code
    ranks = replace(report.session, info=replace(report.session.info, world_size=2))
    (finding,) = named(analyse(ranks), "batch-beyond-float16")
    assert "continue" not in finding.code
    assert "batch[~good] = 0" in finding.code


@pytest.mark.parametrize(
    ("broken", "further"), [((5,), None), ((5, 9), "1 further step"), (range(2, 40), "7 further steps")]
)
def test_only_steps_whose_batches_had_outliers_count_as_further_ones(broken, further):
    # Without a scaler the first one breaks the weights, and so all steps after it.
    scaler = None if further is None else 4.0
    report = train(mlp(), steps=40, scaler=scaler, batch_of=spoiled(1e5, broken), autocast=torch.float16)
    (finding,) = named(report, "batch-beyond-float16")
    assert ("further" in finding.message) == (further is not None)
    assert further is None or f"The same holds for {further} among those examined." in finding.message


def test_for_a_row_of_zeros_in_fp32_no_cast_to_fp32_is_advised():
    (finding,) = named(zero_row(True), "zero-row-normalized")
    assert "FP" not in finding.fix


def of_id(report, id):
    """Return the only finding with this id, of any severity."""
    (finding,) = [finding for finding in report.findings if finding.id == id]
    return finding


def test_a_loop_that_unscales_into_its_masters_needs_no_scaler():
    def is_finite(parameters, masters):
        return all(parameter.grad.isfinite().all() for parameter in parameters)

    loss_of = multiplied(lambda step: 1e6 if step == 5 else 1)
    report = train_masters(torch.float16, scale=1024.0, loss_of=loss_of, before_step=is_finite)
    assert contradictions(report) == []
    assert "scaler-missing-in-float16" not in {finding.id for finding in report.findings}
    assert [(event.step, event.skipped, event.story) for event in report.events] == [(5, True, DROPPED)]
    assert any("The loop dropped the gradients of the step." in finding.message for finding in report.findings)
    assert report.verdict.healthy


@pytest.mark.parametrize(("scale", "known"), [(1024.0, True), (1.0, False), (3.0, False)])
def test_a_loss_times_a_power_of_two_is_scaled_by_hand_whatever_happens_to_the_masters_gradients(scale, known):
    def clips_by_element(parameters, masters):
        torch.nn.utils.clip_grad_value_(masters, 1e-3)
        return True

    report = train_masters(torch.float16, scale=scale, before_step=clips_by_element)
    assert bool(named(report, "scaler-missing-in-float16")) is not known
    assert report.session.progress.scale_known is known
    assert report.verdict.healthy is known


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("power", [21, 40])
def test_a_step_dropped_by_a_loop_that_scales_by_hand_is_reported_as_dropped(power, at, known, zero_first):
    """At 2^21 only a weight's gradient overflows; at 2^40 the gradients of the outputs do."""
    report = by_hand(lambda step: 2.0 ** (power if step == at else 8), known=known, zero_first=zero_first)
    (event,) = report.events
    assert (event.step, event.what) == (at, "weight_gradient" if power == 21 else "activation_gradient")
    assert (event.story, event.skipped) == (DROPPED, True)
    assert graver_than_info(report) == []
    assert (event.loss_scale, report.session.progress.scale_known) == (2.0**power, True)
    assert not named(report, "scaler-missing-in-float16")
    assert report.verdict.healthy is True
    assert contradictions(report) == []


def test_a_loop_with_a_hand_written_dynamic_scale_is_healthy_and_its_scale_is_known():
    report = by_hand(lambda step: 2.0 ** (8 + step // 3))
    assert graver_than_info(report) == []
    assert report.session.progress.scale_known
    assert [change.scale for change in report.session.progress.scales] == [2.0**power for power in range(8, 14)]


def test_a_scale_that_is_no_power_of_two_is_recognised_by_the_division():
    report = by_hand(lambda step: 1000.0)
    assert graver_than_info(report) == []
    said = of_id(report, "scaler-missing-in-float16")
    assert "1000 times smaller" in said.message


def test_gradients_averaged_by_hand_do_not_count_as_unscaled():
    model = mlp()
    optimizer = sgd(model)

    def average(step):
        if step % 4 == 3:
            for parameter in model.parameters():
                parameter.grad /= 4
            optimizer.step()
            optimizer.zero_grad()

    report = train(model, optimizer, 24, autocast=torch.float16, zero_grad=lambda step: None, update=average)
    assert named(report, "scaler-missing-in-float16")


def test_a_scale_at_which_no_step_was_taken_is_not_recommended():
    report = train(mlp(), 1e-3, steps=4, scaler=2.0**24, autocast=torch.float16, loss_of=summed)
    assert report.session.progress.skipped_steps == 4
    (said,) = named(report, "initial-scale-too-high")
    assert (said.evidence["settled"], said.evidence["at_most"]) == (None, 2.0**20)
    assert "not settled" in said.message
    assert (said.code, "Begin" in said.fix) == ("", False)
    assert report.loss_scale.available is False


def test_skipped_steps_are_summed_over_scalers_recreated_each_epoch():
    report = new_scaler_each_epoch(True)
    (said,) = named(report, "scaler-made-anew")
    skipped = report.session.progress.skipped_steps
    assert said.evidence["skipped_steps"] == skipped > 16
    assert (said.evidence["restarts"], said.evidence["period"]) == ([8, 16, 24], 8)
    assert "initial-scale-too-high" not in ids(report)
    assert not any("ithout a loss scale" in finding.fix for finding in report.findings)


@pytest.mark.parametrize("first", [0, 7])
def test_a_regulariser_that_always_overflows_is_reported_as_never_acting(first):
    report = regulariser(True, first)
    (said,) = named(report, "overflow-recurs")
    assert (said.evidence["period"], said.evidence["steps"]) == (10, [first + 10 * time for time in range(4)])
    assert "never acts" in said.message
    assert "initial-scale-too-high" not in ids(report)


@pytest.mark.parametrize("unscaled", ["beside", "between", "two scalers"])
def test_a_second_loss_with_another_scale_is_not_a_fall_of_the_first_scale(unscaled):
    """The second loss is unscaled, in the same step or in its own, or another scaler scales it."""
    both = nn.ModuleList([mlp(), nn.Linear(4, 4)])
    optimizers = [sgd(each, 1e-3) for each in both]
    scalers = [cpu_scaler(2.0**10), cpu_scaler(2.0**6) if unscaled == "two scalers" else None]
    with Inspector(both, optimizers=optimizers[:1] if unscaled == "between" else optimizers) as inspector:
        for step, (x, y) in enumerate(batches(16)):
            if unscaled != "between" or step % 2 == 0:
                with torch.autocast("cpu", torch.float16):
                    out = both[0](x)
                take_step(optimizers[0], nn.functional.cross_entropy(out.float(), y), scalers[0])
            if unscaled != "between" or step % 2:
                take_step(optimizers[1], entropy(both[1], x[:, :4], y), scalers[1])
    report = inspector.report()
    assert "scaler-shared" not in ids(report)
    if unscaled != "two scalers":
        assert {change.scale for change in report.session.progress.scales} == {1024.0}
    assert report.verdict.healthy is True


def test_an_overflow_is_reported_with_the_scale_of_its_own_backward():
    """The last backward of the step has an unscaled loss."""
    model, scaler = mlp(), cpu_scaler(2.0**30)
    optimizer = sgd(model, 1e-3)
    with Inspector(model) as inspector:
        for x, y in batches(2):
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward(retain_graph=True)
            out.float().square().mean().backward()
            scaler.step(optimizer)
            scaler.update()
    assert [event.loss_scale for event in inspector.report().events] == [2.0**30, 2.0**29]


@pytest.mark.parametrize("between", ["to none", "in place", "broken last", "replaced", "kept"])
def test_a_step_counts_as_skipped_only_if_its_gradients_were_zeroed(between):
    model = mlp()
    optimizer = sgd(model)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            if step == 2:
                (entropy(model, x, y) * math.inf).backward()
                if between == "replaced":
                    for parameter in model.parameters():
                        parameter.grad.nan_to_num_(1.0, 1.0, -1.0)
                elif between != "kept":
                    optimizer.zero_grad(set_to_none=between != "in place")
            factor = math.inf if (step, between) == (2, "broken last") else 1.0
            (entropy(model, x, y) * factor).backward()
            optimizer.step()
    first = inspector.report().events[0]
    assert (first.step, bool(first.skipped)) == (2, between in ("to none", "in place"))


def test_fp16_training_with_masters_and_no_loss_scale_needs_a_scaler():
    assert named(train_masters(torch.float16), "scaler-missing-in-float16")


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "lost", "is_found"),
    [
        ("bfloat16", 4, 0.06, False),
        ("bfloat16", 4, 0.12, True),
        ("bfloat16", 128, 0.06, False),
        ("bfloat16", 300, 0.06, True),
        ("bfloat16", 300, 0.01, False),
        ("float16", 300, 0.06, False),
    ],
)
def test_the_threshold_of_accumulation_losses_falls_with_the_number_of_micro_batches(
    dtype, micro_batches, lost, is_found
):
    figures = {"lost": 1000 * lost, "nonzero": 1000.0, "all_lost": 1000 * lost, "all_nonzero": 1000.0}
    figures["micro_batches"] = float(micro_batches)
    measured = Measurement("accumulation", "0.weight", 2, figures, text=dtype)
    report = analyse(Session(progress=Progress(steps=3, backwards=3), measurements=(measured,)))
    assert [finding.id for finding in report.findings] == ["accumulation-lost"] * is_found


def _frozen_by_prefix(*prefixes):
    """Inspect two towers of 23 blocks each; the blocks whose names begin with a prefix are frozen."""
    model = nn.ModuleDict({tower: nn.ModuleList(nn.Linear(2, 2) for _ in range(23)) for tower in ("left", "right")})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    with Inspector(model, capture="weight_gradient") as inspector:
        pass
    return [finding for finding in inspector.report().findings if finding.id == "gradients-missing"]


def test_each_group_frozen_by_a_name_prefix_is_listed():
    (found,) = _frozen_by_prefix("left.1", "right.1", "right.2")
    assert found.evidence["groups"] == {
        "left.1": [f"left.{number}" for number in range(10, 20)],
        "right.1": [f"right.{number}" for number in range(10, 20)],
        "right.2": ["right.20", "right.21", "right.22"],
    }
    assert "right.2 is frozen, and with it right.20, right.21, right.22 (6 parameters)" in found.message
    assert found.code.startswith('if name.startswith(("left.1.", "right.1.", "right.2.")):')
    (found,) = _frozen_by_prefix("left.1")
    assert found.evidence["frozen"] == ["1", *map(str, range(10, 20))]
    assert found.code.splitlines()[0] == 'if name.startswith("left.1."):'


def test_frozen_blocks_without_an_ambiguous_prefix_are_not_a_finding():
    assert not _frozen_by_prefix("left.1.", "left.10.", "left.5.")
    assert not _frozen_by_prefix(*(f"left.{number}." for number in range(1, 23)))


@pytest.mark.parametrize("tower", [False, True])
def test_frozen_modules_do_not_affect_the_gradients_precision(tower):
    frozen = nn.Linear(8, 8).half().requires_grad_(False) if tower else nn.Identity()
    features = Of(lambda self, rows: self.tower(self.table[rows]), tower=frozen)
    features.register_buffer("table", torch.randn(50, 8).half())
    model = nn.Sequential(features, nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=1e-3)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(4):
            rows = torch.randint(0, 50, (16,))
            with torch.autocast("cpu", torch.bfloat16):
                scores = model[1:](features(rows).float())
            take_step(optimizer, nn.functional.cross_entropy(scores.float(), rows % 4))
    report = inspector.report()
    assert (inspector.session().progress.scale_known, report.format) == (True, "bfloat16")
    assert report.loss_scale.available
    assert all(finding.severity == "info" for finding in report.findings)
    assert inspector.session().passed_through() <= {"bfloat16", "float32"}


def test_a_module_that_never_ran_is_an_info_finding():
    model = nn.Sequential(*mlp(), nn.Linear(4, 4))
    report = train(model, loss_of=lambda model, x, y, step: entropy(model[:3], x, y))
    said = of_id(report, "gradients-missing")
    assert (said.severity, said.layer, report.verdict.healthy) == ("info", "3.weight", True)
    assert "did not run" in said.message


def test_replaced_parameters_left_in_the_optimizer_are_always_reported():
    report = replaced_behind_the_optimizer(True)
    (said,) = named(report, "parameters-not-optimized")
    assert "holds 2 tensors outside of the model that never got a gradient" in said.message
    assert not {"gradients-zeroed", "gradients-missing"} & ids(report)


class Keeping(torch.optim.Optimizer):
    """SGD of 16-bit weights, with FP32 masters, rounding errors or only a momentum in its state."""

    def __init__(self, parameters, keeps):
        super().__init__(parameters, {"lr": 1e-3})
        self._keeps = keeps

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            update, state = -1e-3 * parameter.grad.float(), self.state[parameter]
            if self._keeps == "master":
                master = state.setdefault("master", parameter.float())
                parameter.copy_(master.add_(update))
            elif self._keeps == "compensation":
                rest = state.setdefault("compensation", torch.zeros_like(parameter))
                before = parameter.clone()
                parameter.add_((update + rest).to(parameter.dtype))
                rest.copy_(update + rest - (parameter - before))
            else:
                state["momentum"] = update.to(parameter.dtype)
                parameter.add_(update)


@pytest.mark.parametrize("keeps", ["master", "compensation", ""])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_optimizer_that_stores_masters_or_rounding_errors_loses_no_updates(keeps, dtype):
    model = mlp(dtype)
    assert bool(named(train(model, Keeping(model.parameters(), keeps), dtype=dtype), "updates-lost")) == (not keeps)


NOISE = torch.Generator().manual_seed(0)


class RoundingStochastically(torch.optim.Adam):
    """Adam of BF16 weights with stochastic rounding; with ``draws=False`` it rounds to nearest."""

    def __init__(self, parameters, draws, generator="of torch"):
        super().__init__(parameters, lr=1e-4)
        self._draws = draws
        self._generator = torch.Generator().manual_seed(0) if generator == "its own" else None
        self._is_global = generator == "of the module"

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            updated = (parameter.float() - 1e-4 * parameter.grad.float().sign()).view(torch.int32)
            draw = functools.partial(torch.randint, 1 << 16, updated.shape, dtype=torch.int32)
            noise = draw(generator=NOISE if self._is_global else self._generator) if self._draws else 1 << 15
            parameter.copy_(((updated + noise) & -65536).view(torch.float32))
        return loss


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("draws", [False, True])
def test_an_optimizer_that_rounds_stochastically_loses_no_updates(draws, closure):
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4)).bfloat16()
    optimizer = RoundingStochastically(model.parameters(), draws)

    def loss():
        optimizer.zero_grad()
        found = model(torch.randn(8, 16).bfloat16()).float().square().mean()
        found.backward()
        return found

    with Inspector(model) as inspector:
        for _ in range(8):
            optimizer.step(loss) if closure else (loss(), optimizer.step())
    report = inspector.report()
    # The random numbers of a closure and of the step are indistinguishable.
    assert bool(named(report, "updates-lost")) == (not draws or closure)
    drawing = "RoundingStochastically (its step draws random numbers)"
    assert (drawing in report.verdict.precision) == (draws and not closure)


@pytest.mark.parametrize("generator", ["its own", "of the module"])
def test_an_optimizer_that_rounds_with_another_generator_loses_no_updates(generator):
    model = mlp(torch.bfloat16)
    optimizer = RoundingStochastically(model.parameters(), True, generator)
    assert not named(train(model, optimizer, dtype=torch.bfloat16), "updates-lost")


def test_gradients_that_a_frozen_part_keeps_from_its_own_training_are_not_left_over():
    model = mlp()
    model(next(iter(batches(1)))[0]).square().mean().backward()
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert model[0].weight.grad is not None
    assert not named(train(model, torch.optim.SGD(trained, lr=0.01)), "gradients-never-zeroed")


class Compensating(torch.optim.Optimizer):
    """SGD of 16-bit weights that stores rounding errors in its state "rest", as optimi does, or clears them."""

    def __init__(self, parameters, rate, keeps=True):
        super().__init__(parameters, {"lr": rate, "momentum": 0.9})
        self._keeps = keeps

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            average = state.setdefault("average", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
            rest = state.setdefault("rest", torch.zeros_like(parameter))
            rest.add_(average, alpha=-self.defaults["lr"])
            before = parameter.clone()
            parameter.add_(rest)
            rest.add_(before.sub_(parameter)) if self._keeps else rest.zero_()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_optimizer_with_rounding_errors_in_an_unknown_state_loses_no_updates(keeps, dtype):
    model = mlp(dtype, width=64)
    rate = 1e-2 if dtype is torch.bfloat16 else 1e-3
    report = train(model, Compensating(model.parameters(), rate, keeps), steps=40, dtype=dtype)
    assert bool(named(report, "updates-lost")) == (not keeps)
    assert ("('rest' holds the rounding errors)" in report.verdict.precision) == keeps
    # Only the average is a moment, so only it is checked for decay.
    states = [each.evidence["state"] for each in report.findings if each.id == "moments-cannot-decay"]
    assert states == ["average"] if keeps else "average" in states


class AdamW(torch.optim.AdamW):
    """Multiplies the weights by the decay directly, as torch does, and adds the update through "rest"."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            rest = self.state[parameter].setdefault("rest", torch.zeros_like(parameter))
            parameter.mul_(1 - self.defaults["lr"] * self.defaults["weight_decay"])
            rest.add_(parameter.grad.sign(), alpha=-self.defaults["lr"])
            before = parameter.clone()
            rest.add_(before.sub_(parameter.add_(rest)))


def test_weight_decay_applied_outside_of_compensation_is_lost():
    model = mlp(torch.bfloat16, width=64)
    report = train(model, AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), steps=20, dtype=torch.bfloat16)
    (said,) = named(report, "weight-decay-lost")
    assert said.message.endswith("does nothing (if 'rest' keeps only the updates, as is usual).")
    assert (said.certainty, named(report, "updates-lost")) == ("inferred", [])


MOMENTS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
    "SGD with decay": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=1e-4),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-4, momentum=0.9, centered=True),
}
_SIGNS, _PLACES = (torch.arange(4096) % 2 * 2 - 1).float(), torch.linspace(0, 1, 4096)
WEIGHTS = {
    "normal": lambda: 0.02 * torch.randn(4096),
    "of one size": lambda: _SIGNS,
    "near one": lambda: 1 + 0.1 * torch.randn(4096),
    "of three powers of two": lambda: _SIGNS * torch.exp2(-3 * _PLACES),
    "zero": lambda: torch.zeros(4096),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spacing_is_the_distance_to_the_next_number(dtype):
    infinity = int(torch.tensor(torch.inf, dtype=dtype).view(torch.int16))
    numbers = torch.arange(infinity, dtype=torch.int16).view(dtype).double().numpy()
    spacing = spacing_of(numbers, as_format(dtype))
    assert (spacing[:-1] == numbers[1:] - numbers[:-1]).all()
    assert (spacing_of(-numbers, as_format(dtype)) == spacing).all()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_moments_are_not_mistaken_for_rounding_errors(moments, weights):
    for exponent in range(-24, -3, 6):
        torch.manual_seed(3)
        model = nn.Linear(64, 64, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.copy_(WEIGHTS[weights]().reshape(64, 64)[:, torch.randperm(64)])
        optimizer = MOMENTS[moments](model.parameters())
        with Inspector(model, capture=["weight_gradient"], watch=False) as inspector:
            for _ in range(5):
                model(torch.ones(1, 64).bfloat16()).sum().backward()
                model.weight.grad = (2.0**exponent * torch.randn(64, 64)).bfloat16()
                optimizer.step()
        (record,) = inspector.session().precision.optimizers
        assert record.compensation == ""


def test_a_single_weight_stored_in_16_bits_is_named():
    model = mlp()
    model[2].bias.data = model[2].bias.data.bfloat16() + 4
    report = train(model, 1e-3, autocast=torch.bfloat16)
    (said,) = named(report, "updates-lost")
    assert said.message == "'2.bias' is stored in BF16, and rounding loses 100% of its updates."
    assert said.code == "# before the line that makes the optimizer\nmodel.float()"


def test_a_shared_scaler_whose_scale_settled_early_is_an_info_finding():
    report = shared_scaler(True, 2.0**14, steps=20, overflowing=range(4))
    said = of_id(report, "scaler-shared")
    assert (said.severity, said.fix, report.verdict.healthy) == ("info", "", True)


def test_exploded_weights_are_reported_with_the_learning_rate_of_their_group():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 3e4}]
    loss_of = lambda model, x, y, step: nn.functional.mse_loss(model(x), 1e3 * nn.functional.one_hot(y, 4))  # noqa: E731
    (said,) = named(train(model, torch.optim.SGD(groups), loss_of=loss_of), "weights-exploded")
    assert said.layer == "2"
    assert "at a learning rate of 30000 (of group 1 of the optimizer, which has several)" in said.message
    assert said.code.endswith('\noptimizer.param_groups[1]["lr"] = 3000')


CHOICES = {
    "given": lambda scores: scores.gather(-1, torch.randint(0, 64, (32, 4))),
    "lowest": lambda scores: scores.gather(-1, scores.topk(4, largest=False).indices),
    "ReLU": lambda scores: (scores - 0.99).relu().topk(40).values,
    "all equal": lambda scores: (0 * scores + 0.5).topk(4).values,
    "dropped": lambda scores: nn.functional.dropout(scores, 0.5),
    "one of each": lambda scores: scores.gather(-1, scores.argmax(-1, keepdim=True)),
}


def test_nans_before_a_softmax_are_not_attributed_to_a_mask():
    assert not named(zero_weight(True), "mask-hides-whole-row")


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES.keys())
def test_operators_other_than_a_choice_of_the_largest_have_no_router_ties(choose):
    torch.manual_seed(7)
    model = router(lambda scores: choose(torch.sigmoid((0.3 * scores + 3).bfloat16())), experts=64)
    quiet(train(model, second=[0]), "router-ties")


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="this torch does not tell what hooks have packed"
)
def test_reading_the_graph_does_not_recompute_checkpoints():
    calls, layer = [], nn.Linear(8, 8)

    def counted(x):
        calls.append(1)
        return torch.sqrt(torch.exp(layer(x) * torch.ones(32, 8)) + 1)

    def loss_of(model, x, y, step):
        return entropy(model[1], torch.utils.checkpoint.checkpoint(counted, x, use_reentrant=False), y)

    train(nn.Sequential(layer, nn.Linear(8, 4)), steps=5, loss_of=loss_of)
    assert len(calls) == 2 * 5


def test_masters_are_named_in_the_findings_on_them():
    assert "the masters' earlier .grad" in named(masters_never_zeroed(True), "gradients-never-zeroed")[0].message
    clipped = named(masters_clipped_to_zero(True), "gradients-clipped-to-zero")[0]
    assert "the gradients of the masters that the optimizer was given were zeros: the sum of squares" in clipped.message


def _clipped(parameters, masters):
    nn.utils.clip_grad_norm_(masters, 0.01)
    return True


def _with_momentum():
    """Make a function that writes moving averages of the gradients to .grad; the averages are stored elsewhere."""
    averages = []

    def replace(parameters, masters):
        averages[:] = averages or [torch.zeros_like(master) for master in masters]
        for average, master in zip(averages, masters, strict=True):
            average.mul_(0.9).add_(master.grad, alpha=0.1)
            master.grad.copy_(average)
        return True

    return replace


def _damped(parameters, masters):
    """Add nine tenths of the last step's gradients to .grad."""
    for master in masters:
        if hasattr(master, "old"):
            master.grad += 0.9 * master.old
        master.old = master.grad.clone()
    return True


def _none_where_infinite(parameters, masters):
    if not all(parameter.grad.isfinite().all() for parameter in parameters):
        for master in masters:
            master.grad = None
    return True


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"zero_masters": "in place"},
        {"zero_masters": "by overwriting"},
        {"zero_masters": "by overwriting", "dtype": torch.float16, "scale": 2.0**14, "loss_scale": 2.0**14},
        {"zero_masters": "by overwriting", "dtype": torch.float16, "scale": 1000.0, "loss_scale": 1000.0},
        # The masters' gradients are the model's times 2^-30.
        {"zero_masters": "by overwriting", "scale": 2.0**30, "loss_scale": 2.0**30},
        {"micro_batches": 4},
        {"micro_batches": 16, "zero_masters": "in place"},
        {"before_step": _clipped},
        {"before_step": _with_momentum()},
        {"before_step": _damped},
        {"before_step": _damped, "zero_masters": "by overwriting"},
        # After an overflow the optimizer steps without gradients.
        {"dtype": torch.float16, "loss_of": once_overflowing, "before_step": _none_where_infinite, "loss_scale": 1.0},
    ],
    ids=lambda how: ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in how.items()) or "plain",
)
def test_healthy_loops_with_masters_have_no_finding_about_gradients(how):
    report = train_masters(**how)
    assert contradictions(report) == []
    accused = {id for id in ids(report) if id.startswith(("gradients-", "unscale", "parameters-", "never-fired"))}
    assert not accused, [str(finding) for finding in report.findings if finding.id in accused]
    reasons = {(kind, reason) for _, kind, reason in report.coverage.never_fired}
    assert reasons == {("update", "the optimizer steps masters, copies of the weights")}


class OwnMasters(torch.optim.SGD):
    """Steps FP32 copies of its weights, whose gradients it makes within its step."""

    def __init__(self, weights, overwrites):
        self.weights, self.overwrites = list(weights), overwrites
        super().__init__([nn.Parameter(weight.detach().float()) for weight in self.weights], lr=0.05)

    def step(self, closure=None):
        masters = self.param_groups[0]["params"]
        for weight, master in zip(self.weights, masters, strict=True):
            if self.overwrites or master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.copy_(weight.grad)
        super().step()
        with torch.no_grad():
            for weight, master in zip(self.weights, masters, strict=True):
                weight.copy_(master)
                weight.grad = None


@pytest.mark.parametrize("overwrites", [True, False])
def test_gradients_that_an_optimizer_gives_its_masters_within_its_step_are_not_lost(overwrites):
    model = mlp(torch.bfloat16)
    optimizer = OwnMasters(model.parameters(), overwrites)
    options = {"optimizers": optimizer, "zero_grad": lambda step: None}
    assert graver_than_info(train(model, optimizer, 20, dtype=torch.bfloat16, **options)) == []


def test_the_output_of_a_model_whose_update_broke_it_is_not_the_batch_of_another_one():
    maker, judge = mlp(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_judge = sgd(maker, 0.01), sgd(judge, 0.01)
    with Inspector(maker, optimizers=of_maker), Inspector(judge, optimizers=of_judge) as inspector:
        for step, (x, _) in enumerate(batches(8)):
            take_step(of_judge, judge(maker(x).detach() * 2).square().mean())
            take_step(of_maker, maker(x).square().mean())
            if step == 3:
                with torch.no_grad():
                    maker[0].bias[1] = math.inf
    assert "batch-not-finite" not in ids(inspector.report())


@pytest.mark.parametrize("is_inspected", [True, False])
def test_a_loss_that_another_models_weights_break_is_not_this_models(is_inspected):
    maker, judge = mlp(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.01)
    other = Inspector(judge) if is_inspected else contextlib.nullcontext()
    with other, Inspector(maker, optimizers=optimizer) as inspector:
        for step, (x, _) in enumerate(batches(8)):
            optimizer.zero_grad()
            judge(maker(x)).square().mean().backward()
            if step < 3:
                optimizer.step()
            else:
                judge.bias.data[0] = math.nan
    found = named(inspector.report(), "weights-broken-elsewhere")[0]
    # The step without an update goes on with the next backward.
    assert (found.severity, found.step) == ("warning", 3)
    assert ("Linear" if is_inspected else "not inspected") in found.message
    assert {each.id for each in graver_than_info(inspector.report())} == {found.id}


@pytest.mark.parametrize("precision", ["bf16-master", "fp16-master"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_with_mixed_precision_has_no_finding(precision, micro_batches):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model, 0.05)
    mixed = MixedPrecision(model, optimizer, precision, "dynamic" if precision == "fp16-master" else None)
    with Inspector(model, optimizers=optimizer) as inspector:
        for x, y in batches(24):
            mixed.zero_grad()
            for part, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                with mixed.autocast():
                    loss = nn.functional.cross_entropy(model(part).float(), target)
                mixed.backward(loss)
            mixed.unscale_()
            mixed.clip_grad_norm_(0.01)
            mixed.step()
    report = inspector.report()
    assert graver_than_info(report) == []
    assert not {"never-fired", "parameters-not-optimized"} & ids(report)
    # BatchNorm's weights have no masters.
    assert {name for name, kind, _ in report.coverage.never_fired} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert "on FP32 masters" in report.verdict.precision


def test_weights_without_a_master_are_not_optimized():
    model = mlp(torch.bfloat16, width=64)
    masters = [parameter.detach().clone().float().requires_grad_() for parameter in model[0].parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)

    @torch.no_grad()
    def step_masters(step):
        for parameter, master in zip(model[0].parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        for parameter, master in zip(model[0].parameters(), masters, strict=True):
            parameter.copy_(master)

    options = {"optimizers": optimizer, "zero_grad": lambda step: model.zero_grad(), "update": step_masters}
    report = train(model, optimizer, 8, dtype=torch.bfloat16, **options)
    assert of_id(report, "parameters-not-optimized").layer == "2.weight"


def test_unrelated_tensors_in_the_optimizer_are_not_masters():
    model = mlp(torch.bfloat16)
    others = [torch.randn(parameter.shape, requires_grad=True) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(others, lr=0.05)
    options = {"optimizers": optimizer, "zero_grad": lambda step: model.zero_grad()}
    report = train(model, optimizer, 8, dtype=torch.bfloat16, **options)
    assert not [id for id in ids(report) if id.startswith(("gradients-", "param"))]


def test_masters_are_matched_to_weights_in_any_order():
    model = mlp(torch.bfloat16)
    parameters = list(model.parameters())[::-1]
    masters = [parameter.detach().clone().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    with Inspector(model, optimizers=optimizer) as inspector:
        for x, y in batches(4, torch.bfloat16):
            model.zero_grad()
            nn.functional.cross_entropy(model(x).float(), y).backward()
            for parameter, master in zip(parameters, masters, strict=True):
                # One weight's gradient is zeroed.
                master.grad = parameter.grad.float() * (parameter is not model[0].weight)
            optimizer.step()
    measured = [each for each in inspector.session().measurements if each.what == "changed-before-step"]
    assert {each.names for each in measured} == {("0.weight",)}


def test_the_inspector_does_not_change_training_with_masters(monkeypatch, deterministic_torch):
    def trained():
        model = mlp(torch.float16)
        train_masters(torch.float16, scale=8.0, loss_scale=8.0, micro_batches=2, zero_masters="never", model=model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    with_inspector = trained()
    monkeypatch.setattr(Inspector, "attach", lambda self: self)
    assert all(map(torch.equal, with_inspector, trained()))


def test_an_error_while_finding_masters_does_not_stop_the_training(monkeypatch):
    def broken(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Masters, "find", broken)
    with pytest.warns(UserWarning, match="a fault of ours"):
        report = train_masters(steps=4)
    assert any("a fault of ours" in note for note in report.session.notes)
    assert report.session.progress.steps == 4


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but:UserWarning")
@pytest.mark.parametrize(
    ("device", "said", "code"),
    [
        ("cuda", "made for cuda, the default of torch.amp.GradScaler(), and", '("cpu"'),
        ("xpu", "made for xpu, and the model is on cpu", '("cpu"'),
        ("cpu", "its GradScaler is disabled: its scale() returns", "enabled=True"),
    ],
)
def test_a_disabled_scaler_in_fp16_is_named(device, said, code):
    scaler = torch.amp.GradScaler(device, enabled=False)
    report = train(mlp(), 1e-3, scaler=scaler, autocast=torch.float16)
    assert contradictions(report) == []
    (finding,) = named(report, "scaler-missing-in-float16")
    assert said in finding.message
    assert "no GradScaler was seen" not in finding.message
    assert code in finding.code
    assert report.verdict.precision.endswith("GradScaler disabled.")


def test_a_disabled_scaler_in_bf16_is_not_a_finding():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert train(mlp(), 1e-3, scaler=scaler, autocast=torch.bfloat16).verdict.healthy is True


def test_left_over_nans_of_a_loop_without_a_scaler_are_not_said_to_stop_the_steps():
    def left(step, **figures):
        return LeftOver(step=step, names=("0.weight",), parameters=4, of=4, **figures).measurement()

    def finding(*left_over, skipped):
        event = Event(3, 0, "backward", "0", "weight_gradient", "0.weight", "nan", skipped=skipped, forward_finite=True)
        records = replace(train(mlp(), steps=3).session, measurements=left_over, events=(event,))
        return named(analyse(records), "gradients-never-zeroed")[0]

    broken = left(4, largest=0.0, not_finite=4)
    assert "no later step is taken" in finding(broken, skipped=True).message
    assert "no later step is taken" not in finding(broken, skipped=False).message
    # Gradients that are never zeroed are the older fault.
    never = finding(left(1, largest=1.0), left(2, largest=2.0), broken, skipped=False)
    assert (never.step, "the sum of all gradients so far" in never.message) == (1, True)
