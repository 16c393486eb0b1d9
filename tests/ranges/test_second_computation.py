"""The second computation of a step: twins equal torch's results in FP32, and the run's own bits are unchanged."""

import copy
import math

import pytest
import torch
from models import Of, Times
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpinspect.ranges.faults.measure import second_steps
from mpinspect.ranges.faults.measure.second import SecondComputation
from mpinspect.ranges.records import (
    AbsorbedOperand,
    AmplifiedError,
    BornInfinite,
    BrokenAlike,
    CalledLines,
    ChangedChoices,
    ChangedIntegers,
    DividedInHalf,
    FrozenBuffer,
    GradientsError,
    LostSum,
    NearestEnd,
    RoundedArgument,
    RoundedBound,
    Ties,
)
from mpinspect.shapes.record.live import LiveMatmuls

F = nn.functional


class Twice:
    """A context in which everything is computed twice, as in the recorded step of ``mpinspect run``."""

    def __init__(self, model=None):
        self.model = nn.Identity() if model is None else model
        self._live = LiveMatmuls({"model": self.model})
        self.second = SecondComputation(
            self._live.calls.path, self.model.named_parameters(), self.model.named_buffers()
        )
        self._mode = second_steps.Twice([self.second], self._live.calls)

    def __enter__(self):
        self._mode.__enter__()
        self._live.begin()
        return self.second

    def __exit__(self, *error):
        self.recording = self._live.end()
        assert self._mode.leave()
        assert not self.recording or self.recording.notes == ()


def records(second, kind):
    return [each for each in second.records() if isinstance(each, kind)]


def recorded(kind, compute, *args):
    """Return the records of this kind of a function that is computed twice."""
    with Twice() as second:
        compute(*args)
    return records(second, kind)


def uniform(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b.abs() + 1),
    "scalar": lambda a, b: 3 * a + 0.1,
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "pow": lambda a, b: a.abs() ** 1.5,
    "square": lambda a, b: a.square(),
    "exp": lambda a, b: a.exp(),
    "expm1": lambda a, b: a.expm1(),
    "log": lambda a, b: (a.abs() + 0.1).log(),
    "log1p": lambda a, b: a.abs().log1p(),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "rsqrt": lambda a, b: (a.abs() + 0.1).rsqrt(),
    "sin": lambda a, b: a.sin(),
    "cos": lambda a, b: a.cos(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "erf": lambda a, b: a.erf(),
    "relu": lambda a, b: a.relu(),
    "gelu": lambda a, b: F.gelu(a),
    "silu": lambda a, b: F.silu(a),
    "softplus": lambda a, b: F.softplus(a),
    "elu": lambda a, b: F.elu(a),
    "leaky_relu": lambda a, b: F.leaky_relu(a),
    "hardtanh": lambda a, b: F.hardtanh(a),
    "abs": lambda a, b: a.abs(),
    "neg": lambda a, b: -a,
    "reciprocal": lambda a, b: (a.abs() + 0.1).reciprocal(),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "atan2": torch.atan2,
    "sum": lambda a, b: a.sum(),
    "sum of rows": lambda a, b: a.sum(1),
    "mean": lambda a, b: a.mean(0),
    "var": lambda a, b: a.var(1),
    "std": lambda a, b: a.std(1),
    "norm": lambda a, b: a.norm(dim=1),
    "amax": lambda a, b: a.amax(1),
    "cumsum": lambda a, b: a.cumsum(1),
    "logsumexp": lambda a, b: a.logsumexp(1),
    "softmax": lambda a, b: a.softmax(1),
    "log_softmax": lambda a, b: a.log_softmax(1),
    "mm": lambda a, b: a @ b.T,
    "bmm": lambda a, b: a.view(2, 4, 8) @ b.view(2, 8, 4),
    "linear": lambda a, b: F.linear(a, b),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "layer_norm": lambda a, b: F.layer_norm(a, (8,)),
    "group_norm": lambda a, b: F.group_norm(a, 2),
    "rms_norm": lambda a, b: F.rms_norm(a, (8,), eps=1e-5),
    "conv1d": lambda a, b: F.conv1d(a.view(1, 8, 8), b.view(8, 8, 1)),
    "avg_pool": lambda a, b: F.avg_pool1d(a, 2),
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "cross_entropy": lambda a, b: F.cross_entropy(a, torch.arange(8)),
    "kl_div": lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="sum"),
    "index_add": lambda a, b: a.index_add(0, torch.tensor([0, 0, 1]), b[:3]),
    "index_put": lambda a, b: a.index_put((torch.tensor([0, 0, 1]),), b[:3], accumulate=True),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(8, 8, dtype=torch.long), b),
    "gather": lambda a, b: a.gather(1, torch.zeros(8, 2, dtype=torch.long)),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "transposed": lambda a, b: a.T.contiguous() + b,
    "sort": lambda a, b: a.sort(1).values,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_twin_equals_torchs_result_in_float32(name, dtype):
    operator = OPERATORS[name]
    a, b = (values(8, 8, seed=seed).to(dtype) for seed in (1, 2))
    plain = operator(a, b)
    with Twice() as second:
        result = operator(a, b)
    twin = second.twin(result)
    assert torch.equal(result, plain)
    exact = operator(a.float(), b.float())
    assert second.skipped == {}
    assert torch.equal(result.float() if twin is None else twin, exact)


def test_errors_are_inherited_through_a_chain():
    x, weights = values(16, 16).bfloat16(), [values(16, 16, seed=seed).bfloat16() / 4 for seed in range(4)]
    with Twice() as second:
        y = x
        for weight in weights:
            y = (y @ weight).tanh()
    wanted = x.double()
    for weight in weights:
        wanted = (wanted @ weight.double()).tanh()
    torch.testing.assert_close(second.twin(y).double(), wanted, rtol=1e-5, atol=1e-6)


def test_writes_and_views_have_the_twins_of_their_storage():
    x = values(8, 8).bfloat16()
    with Twice() as second:
        y = x * 1.01
        y[2:4] += 0.3
        y.mul_(1.7)
        z = y.view(4, 16)[1:].T
    exact = x.float() * 1.01
    exact[2:4] += 0.3
    exact *= 1.7
    assert torch.equal(second.twin(y), exact)
    assert torch.equal(second.twin(z), exact.view(4, 16)[1:].T)


def test_a_cast_has_the_values_that_its_source_had():
    """It shares the memory of its source's FP32 values until either is written."""
    x = values(8, 8)
    before = x.clone()
    with Twice() as second:
        y = x.bfloat16()
        z = y.float()
        x.add_(1)
        assert torch.equal(second.twin(y), before)
        y.mul_(1.01)
        assert torch.equal(second.twin(z), before)
        assert torch.equal(second.twin(y), before * 1.01)
        z[1:].mul_(3)
    assert torch.equal(second.twin(z)[0], before[0])
    assert torch.equal(second.twin(z)[1:], 3 * before[1:])
    assert torch.equal(x, before + 1)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_large_products_and_their_gradients_are_computed_in_float32(is_transposed):
    x, weight = values(512, 256), values(256, 256, seed=1) / 16
    bias = values(256, seed=2)

    def products(x, weight, bias):
        weight = weight.T if is_transposed else weight
        y = F.linear(x, weight, bias) @ weight
        return y, *torch.autograd.grad(y.square().mean(), (x, bias))

    with Twice() as second:
        results = products(x.bfloat16().requires_grad_(), weight.bfloat16(), bias.bfloat16().requires_grad_())
    assert second.skipped == {}
    wanted = products(x.double().requires_grad_(), weight.double(), bias.double().requires_grad_())
    for result, exact in zip(results, wanted, strict=True):
        error = (second.twin(result).double() - exact).norm() / exact.norm()
        assert error < 1e-6 < (result.double() - exact).norm() / exact.norm()


def test_a_twin_has_the_memory_of_the_result_alone():
    with Twice() as second:
        kept = values(64, 64).bfloat16() * 1.01
        wide = torch.ones(64, 64).bfloat16().expand(3, 64, 64) * 1.01
        (wide * 1.01).sum()
    assert second.twin(kept) is not None
    assert second._twins.bytes == 4 * sum(each.numel() for each in (kept, wide))


def test_the_exact_computation_follows_its_own_decisions():
    """A ratio near one that rounding moves beyond a bound is clamped, and has no gradient; the exact ratio has one."""

    x = (values(64) - 5).bfloat16().requires_grad_()
    old = x.detach().float() * 1.01

    def loss(new):
        ratio = (new - old).exp()
        return torch.min(ratio, ratio.clamp(0.998, 1.002)).sum()

    with Twice() as second:
        loss(x * 1.01).backward()
    exact = x.detach().float().requires_grad_()
    loss(exact * 1.01).backward()
    assert bool((x.grad == 0).any())
    assert bool((exact.grad != 0).all())
    torch.testing.assert_close(second.twin(x.grad), exact.grad)
    assert second.skipped == {}


def test_of_several_cancelling_differences_the_one_with_the_most_effect_on_the_loss_is_recorded():
    """The first has the larger error, and a weight of 1e-6 in the loss."""
    x = values(128).requires_grad_()
    with Twice() as second:
        loud = (100 * x).bfloat16() - 99.99 * x
        harmful = (x + 8).bfloat16() - (x.detach() + 7.99)
        (1e-6 * loud.sum() + harmful.square().sum()).backward()
    by_error = sorted(second._found[AmplifiedError], key=lambda each: each.after)
    (found,) = records(second, AmplifiedError)
    assert len(by_error) == 2
    assert found.names[1] == by_error[0].names[1] != by_error[1].names[1]


def trained(model, twice, loss_of):
    """Return the loss and gradients of a copy of the model after one step, and the second computation if asked for."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    context = Twice(model)
    if twice:
        context.__enter__()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    if twice:
        context.__exit__()
    return [loss, *(parameter.grad for parameter in model.parameters()), *model.buffers()], context.second


def checkpointed(use_reentrant):
    forward = lambda self, x: checkpoint(self.block, x.requires_grad_(), use_reentrant=use_reentrant)  # noqa: E731
    return Of(forward, block=nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU()))


def odd(self, x):
    """Compute with complex numbers, integers, a sparse gradient, a write in place and a function of one's own."""
    mixed = torch.fft.ifft(torch.fft.fft(x.float())).real
    y = Times.apply(self.linear(mixed + self.embed(torch.arange(8) % 3)), 2, 2)
    y.relu_()
    return y + torch.arange(16)


def penalised(model):
    x = values(8, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).float().square().mean(), x, create_graph=True)
    return gradient.square().sum()


def writing():
    """Write to tensors that have no FP32 twin."""

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.total += y.bfloat16().mean(0)
            self.turned.add_(y.bfloat16()[0])
            self.count += (y.bfloat16()[0] > 0).int()
            torch.mul(y.bfloat16()[0], y.bfloat16()[1], out=self.written)
            torch.zeros(1, dtype=torch.bfloat16).expand(4).fill_(2.0)
            torch.nested.nested_tensor([y[0], y[1, :3]]).bfloat16().mul(2)
        return y

    model = Of(forward, linear=nn.Linear(16, 16))
    dtypes = {"total": torch.float64, "turned": torch.complex64, "count": torch.int32, "written": torch.float64}
    for name, dtype in dtypes.items():
        model.register_buffer(name, torch.zeros(16, dtype=dtype))
    return model


def mean_square(*shape):
    return lambda model: model(values(*shape)).float().square().mean()


MODELS = {
    "tensors without twins that are written": (writing(), mean_square(8, 16)),
    "a transformer with dropout": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False),
        mean_square(2, 8, 16),
    ),
    "a convolution with BatchNorm": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)),
        mean_square(4, 3, 8, 8),
    ),
    "an LSTM": (nn.LSTM(64, 128, 2), lambda model: model(values(50, 8, 64))[0].float().square().mean()),
    "checkpointing": (checkpointed(False), mean_square(8, 16)),
    "reentrant checkpointing": (checkpointed(True), mean_square(8, 16)),
    "a gradient of a gradient": (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), penalised),
    "complex, sparse and in place": (
        Of(odd, embed=nn.Embedding(10, 16, sparse=True), linear=nn.Linear(16, 16)),
        mean_square(8, 16),
    ),
    "FP16 weights": (nn.Linear(16, 16).half(), lambda model: model(values(8, 16).half()).float().square().mean()),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_the_runs_own_bits_do_not_change(name):
    model, loss_of = MODELS[name]
    try:
        plain, _ = trained(model, False, loss_of)
    except RuntimeError as error:
        pytest.skip(f"torch itself can't compute this here: {error}")
    twice, second = trained(model, True, loss_of)
    for one, other in zip(plain, twice, strict=True):
        assert torch.equal(one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other)
    # Nothing healthy is told.
    told = second.records()
    assert {type(each) for each in told} <= {CalledLines, NearestEnd, GradientsError}
    assert all(each.error < 0.2 for each in told if isinstance(each, GradientsError))


def test_a_float32_step_is_not_computed_twice():
    model = nn.Linear(8, 8)
    with Twice(model) as second:
        model(values(4, 8)).sum().backward()
    assert second.twin(model.weight.grad) is None
    told = sorted((type(each), each.text) for each in second.records())
    assert told == [(CalledLines, "addmm"), (CalledLines, "sum")]


def test_an_infinity_of_the_precision_is_distinguished_from_one_of_the_data():
    (born,) = recorded(BornInfinite, lambda: torch.tensor([1.0, 14.3]).half().exp())
    assert (born.names[0], born.text, born.elements) == ("exp", "float16", 1.0)
    assert born.largest == pytest.approx(1.623e6, rel=1e-2)
    assert born.names[1].startswith("test_second_computation.py:")
    with Twice() as second:
        x = torch.tensor([0.0, 1.0]).half()
        x / x.sub(x)
    assert records(second, BornInfinite) == []
    (alike,) = records(second, BrokenAlike)
    assert (alike.names[0], alike.elements) == ("div", 2.0)


def test_a_logarithm_of_a_flushed_probability_leads_to_the_operator_that_flushed_it():
    # The logits' rounding makes most of the probabilities' relative error, but a logarithm of these would be finite.
    with Twice() as second:
        logits = 2000 * torch.linspace(1.0003, 1.0203, 8).half()
        (-logits.softmax(0).unsqueeze(1)[:4].float().log()).mean()
    (born,) = records(second, BornInfinite)
    assert born.names[0] == "log"
    assert born.names[4] == "_softmax"


def test_each_line_on_which_an_operator_overflows_by_itself_is_recorded_once():
    with Twice() as second:
        x = torch.full((4,), 14.0).half()
        for _ in range(2):
            first = x.exp()
        again = x.exp() + first
        again.exp()
        (x * 100).exp2()
    lines = [int(each.names[1].partition(":")[2]) for each in records(second, BornInfinite)]
    # Neither the loop's second round, nor an infinite argument, nor another operator.
    assert lines == [lines[0], lines[0] + 1]


def test_an_epsilon_that_rounds_away_is_blamed_on_the_precision():
    x = torch.zeros(4).half()
    (born,) = recorded(BornInfinite, lambda: x / (x + 1e-8))
    assert (born.names[0], born.largest) == ("div", 0.0)


def before(record):
    """Return an earlier operator that a record names, and by how many lines it is earlier."""
    operator, line, _, dtype = record.names[4:]
    return operator, dtype, int(record.names[1].partition(":")[2]) - int(line.partition(":")[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_infinity_of_rounded_inputs_leads_to_the_cast_that_rounded_them(dtype):
    numbers = torch.tensor([0.2, 0.5, 0.9999, 0.7])
    with Twice() as second:
        noise = numbers.to(dtype)
        halves = noise.view(2, 2).T
        -torch.log(-torch.log(halves))
    (born,) = records(second, BornInfinite)
    assert (born.names[0], born.largest, born.elements) == ("log", 0.0, 1.0)
    assert before(born) == ("_to_copy", str(dtype).removeprefix("torch."), 2)


@pytest.mark.parametrize(("scores", "is_near"), [([9.9] * 8, True), ([1.0] * 30000, False)])
def test_a_sum_that_overflows_leads_to_the_operator_that_used_the_range_up(scores, is_near):
    with Twice() as second:
        terms = torch.tensor(scores).half().exp()
        (terms.view(2, -1) * 1.0).sum()
    (born,) = records(second, BornInfinite)
    assert (born.names[0], born.near) == ("sum", float(terms.max()) if is_near else None)
    if is_near:
        assert before(born) == ("exp", "float16", 1)


def test_of_two_operators_near_the_end_the_one_that_adds_more_is_named():
    with Twice() as second:
        large = torch.full((4,), 3000.0).half() * 2
        large * large
    (born,) = records(second, BornInfinite)
    # The factor 2 is less than the factor 6,000.
    assert born.near is None


def test_a_difference_leads_to_the_addition_that_made_its_operands_equal():
    estimate, target = 10 * values(64), 10 * values(64, seed=1)
    with Twice() as second:
        moved = estimate.bfloat16() + 20030
        wide = torch.stack([moved[:32], moved[32:]]).float()
        wide.flatten() - (target + 20030)
    (cancelled,) = records(second, AmplifiedError)
    assert cancelled.names[0] == "sub"
    # The last name is the weight's, which does not exist here; it follows the phase.
    assert before(cancelled) == ("add", "bfloat16", 2)


def test_a_difference_of_sums_leads_to_the_sum_that_rounds_and_not_to_its_terms():
    terms = (4 + values(64, 96) / 8).sqrt()
    with Twice() as second:
        rounded = terms.bfloat16()
        total = rounded.sum(1)
        total.float() - (terms.sum(1) + 1e-2)
    (cancelled,) = records(second, AmplifiedError)
    # The errors of 96 terms average out; the sum's unit in the last place, near 192, is 1.
    assert before(cancelled) == ("sum", "bfloat16", 1)


def decaying(self, steps, dtype):
    """Sum up the past with weights that decay, as state-space layers do."""
    decay = (-steps * self.rate).to(dtype).cumsum(1)
    lags = decay[:, :, None] - decay[:, None]
    future = torch.ones(steps.shape[1], steps.shape[1], dtype=torch.bool).triu(1)
    return lags.masked_fill(future, -math.inf).exp().float().sum(2)


@pytest.mark.parametrize(("off", "is_useless"), [(1e-3, True), (1.0, False)])
def test_an_error_that_an_exponential_raises_is_recorded_only_if_the_gradients_are_useless(off, is_useless):
    model, steps = Of(decaying, rate=nn.Parameter(torch.ones(()))), (1 + values(4, 192).abs()) / 2
    target = model(steps, torch.float32).detach() - off
    with Twice(model) as second:
        F.mse_loss(model(steps, torch.bfloat16), target).backward()
    found = records(second, AmplifiedError)
    assert len(found) == is_useless
    for raised in found:
        # The mask's infinities hide neither the error nor its origin.
        assert 0 < raised.before < 0.01 < 0.1 <= raised.after < 0.3
        assert raised.names[0] == "exp"
        assert before(raised)[:2] == ("cumsum", "bfloat16")
        assert raised.gradients_error > 1


def test_an_error_to_which_layers_add_alike_has_no_origin():
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    narrow = copy.deepcopy(wide).bfloat16()
    wide.load_state_dict(narrow.state_dict())
    x = values(64, 64).bfloat16()
    exact = wide(x.float())
    with Twice(narrow) as second:
        narrow(x).float() - (exact + 1e-4)
    (cancelled,) = records(second, AmplifiedError)
    assert cancelled.names[4:] == ()


def test_an_addition_that_absorbs_its_operands_error_is_computed_twice():
    with Twice() as second:
        values(64).bfloat16() + 2.0**30
    assert second.skipped == {}


def test_a_sum_that_stops_growing():
    ones = torch.ones(1526, 4).bfloat16()
    zeros, where = torch.zeros(3, 4).bfloat16(), torch.zeros(1526, dtype=torch.long)
    (lost,) = recorded(LostSum, lambda: zeros.index_put((where,), ones, accumulate=True))
    assert (lost.value, lost.exact) == (256.0, 1526.0)
    assert lost.error == pytest.approx(1 - 256 / 1526)


def test_an_operand_that_is_absorbed():
    large, ones = torch.full((100,), 512.0).bfloat16(), torch.ones(100).bfloat16()
    (absorbed,) = recorded(AbsorbedOperand, lambda: large + ones)
    assert (absorbed.unchanged, absorbed.error, absorbed.inherited) == (1.0, pytest.approx(1.0), 0.0)
    assert recorded(AbsorbedOperand, lambda: large + 8 * ones) == []


def test_an_operand_that_is_absorbed_by_a_larger_one_with_an_error_of_its_size_leads_to_that_error():
    exact = 512 + uniform(100)
    small = torch.full((100,), 0.5)
    with Twice() as second:
        total = exact.bfloat16() * 1.0
        total + small.bfloat16()
    (absorbed,) = records(second, AbsorbedOperand)
    rounded = exact.bfloat16().float() - exact
    assert absorbed.inherited == pytest.approx(float(rounded.norm() / small.norm()), rel=1e-3)
    assert (absorbed.names[0], absorbed.names[4], absorbed.names[7]) == ("add", "_to_copy", "bfloat16")


BOUNDS = {
    "a bound before a logarithm": (lambda x: (1 - x.bfloat16().sigmoid().clamp(1e-4, 1 - 1e-4)).log(), 1 - 1e-4, "log"),
    "a bound before a cast": (lambda x: -(-x.sigmoid().clamp(1e-6, 1 - 1e-6).bfloat16().log()).log(), 1 - 1e-6, "log"),
    "a bound of FP16 before atanh": (lambda x: x.half().tanh().clamp(max=1 - 1e-6).atanh(), 1 - 1e-6, "atanh"),
    "an epsilon below FP16's smallest": (lambda x: 1 / x.half().abs().clamp_min(1e-8), 1e-8, "reciprocal"),
    "a bound that the dtype holds": (lambda x: (1 - x.bfloat16().sigmoid().clamp(max=0.99)).log(), None, ""),
    "a bound that stays in FP32": (lambda x: (1 - x.sigmoid().clamp(max=1 - 1e-4)).log(), None, ""),
    "a bound far from the edge": (lambda x: x.bfloat16().sigmoid().clamp(1e-4, 1 - 1e-4).log(), None, ""),
    "a cast of the logarithm alone": (lambda x: (1 - x.sigmoid().clamp(max=1 - 1e-4)).log().bfloat16(), None, ""),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_that_round_to_an_edge_are_recorded_although_no_value_is_there(name):
    function, bound, operator = BOUNDS[name]
    with Twice() as second:
        assert function(torch.linspace(0.1, 1, 8)).isfinite().all()
    found = [(each.bound, each.names[0]) for each in records(second, RoundedBound)]
    assert found == [(bound, operator)] * bool(operator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [-1e4, "min"])
def test_scores_that_a_mask_absorbs_are_not_recorded(masked, dtype):
    low = torch.finfo(dtype).min if masked == "min" else masked
    scores, mask = torch.linspace(-2, 2, 128).to(dtype), torch.zeros(128, dtype=dtype)
    mask[::2] = low
    assert recorded(AbsorbedOperand, lambda: (scores + mask).softmax(0)) == []
    mask[::2] = -2048
    (absorbed,) = recorded(AbsorbedOperand, lambda: (scores.mul(0.01) + mask).softmax(0))
    assert absorbed.error > 0.5


def counted(times, one, is_in_place=True):
    """Count in BF16; return the count and the records of absorbed operands."""
    with Twice() as second:
        count = torch.zeros((), dtype=torch.bfloat16)
        for _ in range(times):
            if is_in_place:
                count += one
            else:
                count = count + one
    return float(count), records(second, AbsorbedOperand)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_small_sums_that_stop_growing_are_judged_line_by_line(is_in_place):
    one = torch.ones((), dtype=torch.bfloat16)
    count, (absorbed,) = counted(700, one, is_in_place)
    # The first addition, to zero, is not judged; from 256 on nothing is added.
    assert (count, absorbed.times, absorbed.size) == (256.0, 699.0, 1.0)
    assert absorbed.unchanged == pytest.approx(444 / 699)
    assert counted(200, one) == (200.0, [])


@pytest.mark.parametrize(("argument", "exponent"), [(14.0, 14.0), (3.0, None)])
def test_a_cast_that_overflows_has_the_exponential_that_made_the_value(argument, exponent):
    with Twice() as second:
        scale = torch.tensor(argument).exp() * (1.0 if exponent else 1e5)
        (scale * values(64).abs().clamp_min(0.5)).half()
    (born,) = records(second, BornInfinite)
    assert (born.names[0], born.exponent) == ("_to_copy", exponent)
    assert born.names[3].partition(":")[0] == "test_second_computation.py" * bool(exponent)


def test_a_sum_of_many_elements_is_judged_by_the_joint_loss_of_its_additions():
    terms = values(1000, 100).abs().bfloat16()
    with Twice() as second:
        total = torch.zeros(100, dtype=torch.bfloat16)
        for term in terms:
            total += term
    exact = terms.float().sum(0)
    (absorbed,) = records(second, AbsorbedOperand)
    assert absorbed.times == 999
    assert absorbed.error == pytest.approx(float((total.float() - exact).norm() / exact.norm()), rel=0.05)


def test_steps_that_are_too_small_for_their_weights_are_lost_together_and_larger_ones_are_not():
    for rate, is_lost in ((1e-4, True), (0.05, False)):
        with Twice() as second:
            weights = {name: torch.ones(20, dtype=torch.bfloat16) for name in ("a", "b")}
            for _ in range(12):
                weights = {name: each - rate * torch.ones_like(each) for name, each in weights.items()}
        assert [(each.times, each.error) for each in records(second, AbsorbedOperand)] == [(11, 1.0)] * is_lost


def test_a_sum_that_stops_late_is_judged_and_a_state_that_keeps_changing_is_not():
    count, (absorbed,) = counted(300, 1)
    assert (count, absorbed.times) == (256.0, 299.0)
    with Twice() as second:
        state, weight = values(16).bfloat16(), values(16, 16).bfloat16()
        for _ in range(300):
            state = state + 2 * torch.sin(weight @ state) - 0.5 * state
    assert float((state.float() - second.twin(state)).norm() / second.twin(state).norm()) > 0.1
    assert records(second, AbsorbedOperand) == []


def test_a_number_that_is_lost_is_judged_only_if_it_is_added_in_place():
    with Twice() as second:
        norm = torch.full((), 512.0, dtype=torch.bfloat16)
        for _ in range(100):
            norm.clone() + 1e-3
    assert records(second, AbsorbedOperand) == []
    count, (absorbed,) = counted(700, 1)
    assert (count, absorbed.times, absorbed.size) == (256.0, 699.0, 1.0)


def test_a_branch_that_begins_near_zero_has_its_size_recorded():
    (absorbed,) = recorded(AbsorbedOperand, lambda: torch.ones(100).bfloat16() + torch.full((100,), 1e-3).bfloat16())
    assert absorbed.size == pytest.approx(1e-3, rel=1e-2)


def test_whole_numbers_that_a_cast_changes():
    ids = torch.tensor([3.0, 256.0, 8544.0, 1001.0])
    (changed,) = recorded(ChangedIntegers, lambda: ids.bfloat16().long())
    assert (changed.changed, changed.of, changed.given, changed.exact) == (2.0, 4.0, 8576.0, 8544.0)
    assert changed.text == "bfloat16"
    with Twice() as second:
        # Small ids are exact, fractions are rounded on purpose, and a mask is not a number.
        ids[:2].bfloat16().long()
        (ids.bfloat16() * 1.01).round().long()
        (ids + 0.25).bfloat16().int()
        ids.bfloat16().bool()
    assert records(second, ChangedIntegers) == []


def test_a_top_k_whose_scores_rounding_made_equal():
    scores = 3 + 0.01 * torch.linspace(-1, 1, 64).expand(32, 64)
    (ties,) = recorded(Ties, lambda: (scores.bfloat16() * 1.5).topk(4))
    assert (ties.fraction, ties.k, ties.scores, ties.text) == (1.0, 4, 64, "bfloat16")
    with Twice() as second:
        # Chosen along the other dimension, the lowest, all of them, of scores that are exact, and equal exactly.
        made = scores.bfloat16() * 1.5
        made.topk(4, 0)
        made.topk(4, largest=False)
        made.topk(64)
        scores.round().bfloat16().topk(4)
        (made * 0 + 1.01).topk(4)
    assert records(second, Ties) == []


def test_a_difference_that_leaves_rounding_error():
    x = 40 + values(64, 64)
    with Twice() as second:
        mean, squares = x.bfloat16().mean(1), x.bfloat16().square().mean(1)
        squares - mean * mean
    (cancelled,) = records(second, AmplifiedError)
    assert cancelled.names[0] == "sub"
    assert cancelled.before < 0.01 < 0.5 < cancelled.after


def test_a_loss_of_one_number_is_a_difference_too():
    outputs = 1000 + values(64)
    (found,) = recorded(AmplifiedError, lambda: F.mse_loss(outputs.bfloat16(), (outputs + 1).bfloat16()))
    assert (found.names[0], found.text) == ("mse_loss", "bfloat16")
    # BF16's numbers lie 4 apart there. The exact difference is 1.
    off = (outputs.bfloat16().float() - (outputs + 1).bfloat16().float() + 1).square().mean().sqrt()
    assert found.after == pytest.approx(off.item(), rel=1e-3)
    assert found.after > 1


def test_a_loss_that_is_right_by_chance_shows_the_error_of_its_difference():
    offsets, target = values(64), 290 + values(64, seed=1)
    with Twice() as second:
        rounded = offsets.bfloat16() + target.bfloat16()
        nn.functional.huber_loss(rounded.float(), target)
    (found,) = records(second, AmplifiedError)
    assert (found.names[0], found.text) == ("huber_loss", "float32")
    assert 0 < found.before < 0.01 < 0.5 < found.after
    # Two roundings are alike, and the second would not exist if the first operand were in FP32.
    assert before(found) == ("_to_copy", "bfloat16", 1)


def test_operands_whose_gradients_a_loop_divides_in_fp16_are_counted():
    model = nn.Linear(4, 4).half()
    model.weight.grad = torch.tensor([2.0**-10, 2.0**-20, 0, 1]).half().expand(4, 4).clone()
    with Twice(model) as second:
        torch._foreach_div([model.weight.grad], 2.0**10)
    (found,) = records(second, DividedInHalf)
    assert (found.name, found.lost, found.factor) == ("weight", 1 / 3, 2.0**-10)


def test_a_constant_minus_a_number_near_it_is_a_difference_even_of_few_elements():
    """One number for each channel, such as the input's share in a state that decays slowly."""
    slow = torch.linspace(0.5e-3, 1.5e-3, 32, dtype=torch.bfloat16)
    with Twice() as second:
        kept = 1 - torch.exp(-slow)
    (found,) = records(second, AmplifiedError)
    assert not kept.any()
    assert (found.names[0], found.after) == ("rsub", 1.0)


def test_the_error_of_the_gradients_is_that_of_float32():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x, twice = values(32, 16), Twice(model)
    with twice as second:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
    exact = copy.deepcopy(model)
    exact.zero_grad()
    exact(x).square().mean().backward()
    for parameter, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(second.twin(parameter.grad), wanted.grad, rtol=1e-4, atol=1e-5)
        assert not torch.equal(parameter.grad, wanted.grad)


def _scale(x, dtype, dim=None):
    largest = x.detach().abs()
    largest = largest.amax() if dim is None else largest.amax(dim, keepdim=True)
    return torch.finfo(dtype).max / largest


def in_e4m3(x):
    scale = _scale(x, torch.float8_e4m3fn)
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


def straight_through(x):
    return x + (in_e4m3(x) - x).detach()


class Product(torch.autograd.Function):
    """A product of two FP8 operands, with one scale for a tensor or a row; its gradients are those of the exact operands."""

    @staticmethod
    def forward(ctx, x, weight, dim, is_v2=False, dtype=torch.bfloat16):
        ctx.save_for_backward(x, weight)
        scales = [_scale(each, torch.float8_e4m3fn, dim) for each in (x, weight)]
        left, right = ((each * scale).to(torch.float8_e4m3fn) for each, scale in zip((x, weight), scales, strict=True))
        inverse = [1 / scale for scale in scales]
        right_inverse = inverse[1] if dim is None else inverse[1].t()
        if is_v2:
            kinds = (F.ScalingType.TensorWise, F.ScalingType.RowWise)[dim is not None]
            given = inverse[0], kinds, right_inverse, kinds
            return F.scaled_mm(left, right.t(), *given, output_dtype=torch.bfloat16)
        return torch._scaled_mm(left, right.t(), inverse[0], right_inverse, out_dtype=dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        return gradient @ weight, gradient.t() @ x, None, None, None, None


IN_FP8 = {
    "casts": lambda x, weight: in_e4m3(x) @ in_e4m3(weight).t(),
    "straight-through": lambda x, weight: x @ straight_through(weight).t(),
    "gradients in E5M2": lambda x, weight: (x @ weight.t()).to(torch.float8_e5m2).float(),
    "a clamp that cuts": lambda x, weight: (
        (400 * x).clamp(-448, 448).to(torch.float8_e4m3fn).float() @ weight.t() / 400
    ),
    "an FP8 product": lambda x, weight: Product.apply(x, weight, None).float(),
    "an FP8 product in FP16": lambda x, weight: Product.apply(x, weight, None, False, torch.float16).float(),
    "an FP8 product with scales of rows": lambda x, weight: Product.apply(x, weight, 1).float(),
}
if hasattr(F, "scaled_mm"):
    IN_FP8 |= {
        "torch's scaled_mm": lambda x, weight: Product.apply(x, weight, None, True).float(),
        "torch's scaled_mm with scales of rows": lambda x, weight: Product.apply(x, weight, 1, True).float(),
    }


@pytest.mark.parametrize("name", IN_FP8)
def test_the_twins_of_fp8_are_those_without_casts(name):
    x, weight = values(32, 16), values(16, 16, seed=1)
    weight.requires_grad_()
    model = nn.ParameterList([nn.Parameter(weight.detach().clone())])
    exact = (x @ weight.t()).square().mean()
    exact.backward()
    with Twice(model) as second:
        loss = IN_FP8[name](x, model[0]).square().mean()
        loss.backward()
        torch.testing.assert_close(second.twin(loss), exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(second.twin(model[0].grad), weight.grad, rtol=1e-4, atol=1e-6)
    off = float((model[0].grad - weight.grad).norm() / weight.grad.norm())
    found = second.records()
    (error,) = [each for each in found if isinstance(each, GradientsError)]
    assert error.error == pytest.approx(off, rel=1e-3)
    assert 0.005 < off < 0.5
    # The difference of a number and the same in FP8 is meant to be an error.
    assert not any(isinstance(each, AmplifiedError) for each in found)
    assert not second.skipped


def _cached_in_fp8(x):
    cache = torch.zeros(2, *x.shape, dtype=torch.float8_e4m3fn)
    cache[0].copy_(x.detach().to(torch.float8_e4m3fn))
    return x + cache.clone()[0].float()


def _with_sparse_infinities(x):
    assert (1e5 * x.detach().half()).to_sparse().values().isinf().any()
    return in_e4m3(x)


def _with_a_mask_in_fp8(x):
    masked = torch.where(x > 0, x.half(), -torch.inf).clamp(-448, 448)
    return in_e4m3(x) + masked.to(torch.float8_e4m3fn).float() / 448


def _with_meta_casts(x):
    assert x.detach().to("meta").to(torch.float8_e5m2).is_meta
    return in_e4m3(x)


@pytest.mark.parametrize(
    "through",
    [_cached_in_fp8, _with_sparse_infinities, _with_a_mask_in_fp8, _with_meta_casts],
    ids=lambda f: f.__name__,
)
def test_tensors_without_values_to_compare_cost_no_other_operator_its_twin(through):
    model = nn.Linear(16, 4)
    with Twice(model) as second:
        loss = model(through(values(32, 16))).square().mean()
        loss.backward()
    assert not second.skipped
    assert any(isinstance(each, GradientsError) for each in second.records())


@pytest.mark.parametrize("kind", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}], ids=str)
def test_gradients_that_ranks_sum_up_are_compared_before(kind, one_rank):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x, errors = values(32, 16), []
    for wrap in (lambda module: module, lambda module: nn.parallel.DistributedDataParallel(module, **kind)):
        model.zero_grad()
        wrapped, twice = wrap(model), Twice(model)
        with twice as second, torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(x).float().square().mean()
            # Collectives of the loop's own.
            torch.distributed.all_reduce(torch.ones(3))
            loss.backward()
        (error,) = records(second, GradientsError)
        errors.append(error)
    bare, summed = errors
    assert summed.error == pytest.approx(bare.error, rel=1e-6)
    assert summed.size == pytest.approx(bare.size, rel=1e-6)


def test_a_fake_tensor_passes_through_a_recorded_step():
    with Twice() as second, torch._subclasses.FakeTensorMode():
        x = torch.ones(3, 4).detach()
        assert (x @ x.t()).shape == (3, 3)
    assert not second.skipped


HARMLESS = {
    "a cube before tanh": (lambda x: (x**3).tanh().float().sum(), True),
    "a cube before a clamp": (lambda x: (x**3).clamp(max=1).float().sum(), True),
    "a monitor": (lambda x: ((x**3).detach().max(), x.float().sum())[1], True),
    "a reciprocal": (lambda x: (1 / (x**3)).float().sum(), False),
    "a mask": (lambda x: (x * ((x**3).detach() < 1e5)).float().sum(), False),
    "the loss": (lambda x: (x**3).float().sum(), False),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_infinities_are_harmless_where_all_that_is_computed_of_them_is_right(name):
    function, is_harmless = HARMLESS[name]
    x = torch.linspace(41, 60, 64).half().requires_grad_()
    (born,) = recorded(BornInfinite, lambda: function(x).backward())
    assert (born.names[0], bool(born.is_unused)) == ("pow", is_harmless)


def test_operators_beyond_the_time_limit_are_not_computed_twice(monkeypatch):
    monkeypatch.setattr("mpinspect.ranges.faults.measure.recomputation._MOST_SECONDS", -1.0)
    with Twice() as second:
        y = values(4).bfloat16() * 1.01
    assert second.twin(y) is None
    assert second.left_out() == "Left out of the second computation of a step: all of it after -1 s"


def test_twins_are_freed_with_their_storages(monkeypatch):
    # Each of the results takes 4 KiB in FP32; the limit is that of four.
    monkeypatch.setattr("mpinspect.ranges.faults.measure.recomputation._MOST_BYTES", 16 << 10)
    x = values(1024).bfloat16()
    with Twice() as second:
        for _ in range(100):
            y = x * 1.01
    assert second.twin(y) is not None
    assert second.left_out() == ""
    with Twice() as second:
        kept = [x * 1.01 for _ in range(100)]
    assert second.twin(kept[-1]) is None
    assert "once its copies took" in second.left_out()


def test_an_operator_without_a_second_run_is_named():
    class Odd(torch.utils._python_dispatch.TorchDispatchMode):
        """Refuses FP32, as a kernel of a device does."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.erfinv.default and args[0].dtype is torch.float32:
                raise RuntimeError("not implemented for 'Float'")
            return func(*args, **(kwargs or {}))

    x = values(4).bfloat16().clamp(-0.5, 0.5)
    with Odd(), Twice() as second:
        y = x.erfinv() * 2
    assert torch.equal(y, x.erfinv() * 2)
    assert second.left_out() == "Left out of the second computation of a step: 1 call of erfinv"


def attending(self, x):
    """Add a large residual, which absorbs a part of the branch; the bias of the keys has a gradient of zero."""
    q, k, v = (layer(x) for layer in (self.query, self.key, self.value))
    return 2048.0 * x + (q @ k.mT).softmax(-1) @ v


def test_a_gradient_that_is_zero_but_for_rounding_does_not_count_as_off():
    model = Of(attending, **{name: nn.Linear(16, 16) for name in ("query", "key", "value")})
    with Twice(model) as second, torch.autocast("cpu", torch.bfloat16):
        y = model(values(4, 12, 16).bfloat16())
        (y.float() * values(4, 12, 16)).sum().backward()
    (absorbed,) = records(second, AbsorbedOperand)
    exact = copy.deepcopy(model)
    exact.zero_grad()
    (exact(values(4, 12, 16)) * values(4, 12, 16)).sum().backward()
    # Relative to itself, that gradient is nothing but error.
    assert float((model.key.bias.grad - exact.key.bias.grad).norm() / exact.key.bias.grad.norm()) > 1
    assert absorbed.gradients_error < 0.5


def test_gradients_that_overflow_have_no_error():
    model = nn.Linear(8, 8)
    twice = Twice(model)
    with twice as second:
        ones = torch.ones(1526, 8).bfloat16()
        total = torch.zeros(3, 8).bfloat16().index_put((torch.zeros(1526, dtype=torch.long),), ones, accumulate=True)
        with torch.autocast("cpu", torch.float16):
            y = model(total.float() / 1526)
        (y.float().sum() * 1e38 * 1e3).backward()
    (lost,) = records(second, LostSum)
    assert not model.weight.grad.isfinite().all()
    assert lost.gradients_error is None


def test_a_dtype_among_the_arguments_is_that_of_the_twins():
    # The backward of a softmax takes its input's dtype as a positional argument.
    x = values(32).half().requires_grad_()
    with Twice() as second:
        y = (x * 1.01).softmax(-1).square().sum()
        (gradient,) = torch.autograd.grad(y, x)
    assert second.left_out() == ""
    assert second.twin(gradient).dtype is torch.float32


class Counting(nn.Module):
    """Counts its calls, and averages its inputs, in buffers of a dtype."""

    def __init__(self, dtype, calls=256.0):
        super().__init__()
        self.register_buffer("calls", torch.tensor(calls, dtype=dtype))
        self.register_buffer("mean", torch.full((8,), 2.0, dtype=dtype))

    def forward(self, x):
        self.calls += 1
        self.mean.sub_(self.mean - x.mean(0).to(self.mean.dtype), alpha=0.001)
        return x


@pytest.mark.parametrize(
    ("dtype", "calls", "frozen"),
    [
        (torch.bfloat16, 256.0, {"calls", "mean"}),
        (torch.bfloat16, 100.0, {"mean"}),
        (torch.float16, 256.0, set()),
        (torch.float16, 2048.0, {"calls"}),
        (torch.float32, 256.0, set()),
    ],
)
def test_buffers_that_no_longer_change_are_recorded(dtype, calls, frozen):
    model = Counting(dtype, calls)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = values(4, 8)
    with Twice(model) as second:
        for _ in range(3):
            model(x)
    found = {record.names[-1]: record for record in records(second, FrozenBuffer)}
    assert found.keys() == frozen
    assert all((record.unchanged, record.times) == (1.0, 3) for record in found.values())
    same = {name for name, buffer in model.named_buffers() if torch.equal(buffer, before[name])}
    assert same == frozen


class Annealed:
    """A number that a loop keeps in BF16 and lowers; each way returns it."""

    def __init__(self, value):
        self.value = torch.tensor(value, dtype=torch.bfloat16)

    def in_place(self):
        self.value.mul_(0.9985)

    def assigned(self):
        self.value = self.value * 0.9985

    def copied(self):
        self.value.copy_(self.value * 0.9985)

    def divided(self):
        self.value /= 1.0015

    def interpolated(self):
        self.value.lerp_(torch.zeros_like(self.value), 0.0015)

    def in_place_above_a_bound(self):
        self.value.mul_(0.9985).clamp_(min=0.3)

    def assigned_above_a_bound(self):
        self.value = torch.clamp(self.value * 0.9985, min=0.3)

    def assigned_above_a_tensor(self):
        self.value = torch.maximum(self.value * 0.9985, torch.tensor(0.3, dtype=torch.bfloat16))


def lowered(way, value=1.0):
    schedule = Annealed(value)
    with Twice() as second:
        for _ in range(3):
            getattr(schedule, way)()
    found = records(second, FrozenBuffer)
    # Where it is named, it is where it was.
    assert not found or schedule.value == torch.tensor(value, dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize("way", [each for each in vars(Annealed) if not each.startswith("_")])
def test_a_schedule_whose_steps_are_rounded_away_is_recorded_however_it_is_written(way):
    (record,) = lowered(way)
    assert (record.unchanged, record.text) == (1.0, "bfloat16")
    assert record.names[1].startswith("test_second_computation.py:")


@pytest.mark.parametrize("way", [each for each in vars(Annealed) if "above" in each])
def test_a_schedule_at_its_lower_bound_rightly_stays(way):
    # 0.3 is 0.30078125 in BF16, which the clamp restores.
    assert lowered(way, 0.3) == []


def test_changes_that_are_exact_or_of_no_size_are_not_recorded():
    one, tiny, mask = torch.ones(4).bfloat16(), torch.full((4,), 1e-39).bfloat16(), torch.ones(100).bfloat16()
    with Twice() as second:
        one.mul_(1.0)
        tiny.mul_(0.9985)
        used = mask * 0.9985
        values(100).bfloat16() * used
    assert records(second, FrozenBuffer) == []


def test_counts_that_an_index_adds_to_are_recorded_where_they_stop():
    counts, where = torch.full((8,), 256.0).bfloat16(), torch.tensor([1, 3, 5])
    (record,) = recorded(FrozenBuffer, lambda: counts.index_add_(0, where, torch.ones(3).bfloat16()))
    assert (record.names[0], record.unchanged) == ("index_add_", 1.0)
    assert bool((counts == 256).all())


def test_an_addition_of_integers_to_16_bits_has_a_second_run():
    with Twice() as second:
        (torch.arange(100) - values(100).bfloat16()).sum()
    assert second.left_out() == ""


def floors(position):
    low, up = position.floor().long(), position.ceil().long()
    return torch.zeros(128).scatter_add_(0, low, (up - position).float())


@pytest.mark.parametrize(("dtype", "differ"), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, False)])
def test_positions_that_lose_their_fraction_are_recorded_where_they_become_indices(dtype, differ):
    fraction = uniform(4000) * 100
    found = recorded(ChangedChoices, lambda: floors(fraction.to(dtype) * 1.0))
    assert bool(found) is differ
    for record in found:
        exact, rounded = fraction, fraction.to(dtype)
        up = record.exact < record.given
        changed = (exact.floor() != rounded.floor()) if up else (exact.ceil() != rounded.ceil())
        whole = (rounded == rounded.round()) & (exact != exact.round())
        assert (record.changed, record.of) == (int(changed.sum()), 4000)
        assert record.whole == pytest.approx(float(whole.float().mean()))


def test_integers_that_are_only_compared_are_not_recorded():
    position = uniform(4000) * 100
    assert recorded(ChangedChoices, lambda: (position.bfloat16().floor().long() == 7).sum()) == []


def test_a_mask_that_rounding_decides_is_recorded_where_it_is_used():
    near, far = values(400) * 0.01 + 8, values(400, seed=1) * 0.01 + 8
    with Twice() as second:
        hard = near.bfloat16() * 1 < far.bfloat16() * 1
        torch.where(hard, near, far)
    (record,) = records(second, ChangedChoices)
    exact = near < far
    assert (record.names[0], record.changed, record.of) == ("lt", int((hard != exact).sum()), 400)


def test_the_nearest_of_rounded_distances_is_recorded():
    code, x = values(256, 16, seed=1) + 4, values(128, 16) + 4
    with Twice() as second, torch.autocast("cpu", torch.bfloat16):
        distances = x.bfloat16().square().sum(1)[:, None] + code.bfloat16().square().sum(1) - 2 * x @ code.T
        chosen = distances.argmin(1)
        code[chosen]
    (record,) = records(second, ChangedChoices)
    # The exact distances begin with FP32 values.
    exact = (x.square().sum(1)[:, None] + code.square().sum(1) - 2 * x @ code.T).argmin(1)
    assert record.names[0] == "argmin"
    assert record.changed == pytest.approx(int((chosen != exact).sum()), abs=3)


@pytest.mark.parametrize("choose", [lambda scores: scores.argmax(1), lambda scores: scores.max(1)[1]])
def test_the_best_of_near_equals_is_no_choice_that_matters(choose):
    """Rounding to BF16 makes ties of two actions that are equally good, far above the others."""
    scores = values(256, 4)
    scores[:, 2:] = 4 + 1e-3 * values(256, 2, seed=1)
    with Twice() as second:
        chosen = choose(scores.bfloat16())
        torch.ones(4)[chosen]
    assert (chosen != choose(scores)).sum() >= 64
    assert records(second, ChangedChoices) == []


def probabilities(n=2000):
    p = uniform(n) + 0.5
    return p / p.sum()


@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_crowded_table_is_recorded_where_it_is_searched(is_made_before):
    p, u = probabilities().bfloat16(), uniform(512, seed=1)
    table = p.cumsum(0).float()
    with Twice() as second:
        found = torch.searchsorted(table if is_made_before else p.cumsum(0).float(), u)
        p[found.clamp_max(1999)]
    (record,) = records(second, ChangedChoices)
    assert (record.entries, record.distinct) == (2000, len(table.unique()))
    assert record.distinct < 1000
    exact = torch.searchsorted(p.float().cumsum(0), u)
    assert (record.changed, record.of) == ((0, 0) if is_made_before else (int((found != exact).sum()), 512))


def test_tables_that_are_exact_in_16_bits_or_have_empty_intervals_are_not_recorded():
    u = uniform(512, seed=1)
    p = probabilities()
    p[torch.arange(2000) % 4 > 0] = 0
    offsets = torch.arange(0, 200).repeat_interleave(3).float()
    with Twice() as second:
        torch.bucketize(u.bfloat16(), torch.linspace(0, 1, 65).bfloat16())
        p[torch.searchsorted((p / p.sum()).cumsum(0), u).clamp_max(1999)]
        torch.searchsorted(offsets, u * 200)
    assert records(second, ChangedChoices) == []


def test_an_argument_near_zero_is_recorded_with_the_difference_that_made_it():
    cosine = 1 - uniform(100) * 0.01
    with Twice() as second:
        near = cosine.bfloat16()
        distance = (2 - 2 * near)[:50].sqrt()
        (distance + 1).sqrt()
    (record,) = records(second, RoundedArgument)
    exact, given = 2 - 2 * cosine[:50].double(), 2 - 2 * cosine[:50].bfloat16().double()
    off = (given - exact).abs() / exact
    assert (record.elements, record.of) == (int((off >= 0.5).sum()), 50)
    assert record.given == pytest.approx(float(given[off.argmax()]))
    assert record.exact == pytest.approx(float(exact[off.argmax()]), rel=1e-3)
    assert int(record.names[3].partition(":")[2]) == int(record.names[1].partition(":")[2])


def test_an_argument_that_is_zero_in_fp32_too_is_the_scripts_own():
    x = values(100).bfloat16()
    assert recorded(RoundedArgument, lambda: (x * 1.01 - x * 1.01).sqrt()) == []


@pytest.mark.parametrize(("function", "end"), [(torch.sigmoid, 7.0), (torch.tanh, 4.0)])
@pytest.mark.parametrize("is_saturated", [False, True])
def test_a_gradient_that_is_zero_as_a_function_rounds_to_1_is_recorded(function, end, is_saturated):
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, end * is_saturated)
    with Twice(model) as second, torch.autocast("cpu", torch.bfloat16):
        function(model(values(8, 4))).float().sum().backward()
    found = records(second, AmplifiedError)
    assert [(each.names[0], each.names[4], each.after) for each in found] == [
        (f"{function.__name__}_backward", function.__name__, 1.0)
    ] * is_saturated
