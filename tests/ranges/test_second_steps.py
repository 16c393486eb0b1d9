"""Inspector(second=...): chosen steps of the training are computed twice, and nothing of it changes."""

import copy
import gc
import sys
import warnings
import weakref

import pytest
import torch
from models import Of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from trainings import inspected, take_step

import mpinspect
from mpinspect.ranges.capture.steps import LossLevel, StepChoice
from mpinspect.ranges.faults.measure.implicit import ImplicitConversions
from mpinspect.ranges.faults.measure.second import SecondComputation
from mpinspect.ranges.records import BornInfinite, GradientsError, ReadNumber, recorded


class Hub(nn.Module):
    """Adds 600 rows up in one of BF16, where a sum stops at 256."""

    def forward(self, x):
        return torch.zeros(2, 8, dtype=x.dtype).index_put((torch.zeros(600, dtype=torch.long),), x, accumulate=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Dropout(0.1), Hub(), nn.Linear(8, 3))


class Training:
    """A network with an optimizer and a scaler, which makes some steps under an inspector."""

    def __init__(self, **options):
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.inspector = mpinspect.Inspector(self.model, **options)

    def loss(self):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(torch.randn(600, 8)).float().square().mean()

    def step(self):
        take_step(self.optimizer, self.loss(), self.scaler)

    def trained(self, steps=4):
        with self.inspector:
            for _ in range(steps):
                self.step()
        return self

    def steps_of(self, what="second-lost-sum"):
        return [each.step for each in self.inspector.session().measurements if each.what == what]


@pytest.mark.parametrize(("second", "steps"), [(False, []), (True, [1]), ([0], [0]), ((2, 0), [0, 2]), ([7], [])])
def test_the_chosen_steps_are_computed_twice_and_the_training_stays(second, steps):
    plain, training = Training().trained(), Training(second=second)
    training.trained()
    assert training.steps_of() == steps
    assert training.inspector.session().notes == ()
    assert torch._C._len_torch_dispatch_stack() == 0
    for mine, plains in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, plains)
    found = [each for each in training.inspector.report().findings if each.id == "sum-loses-terms"]
    assert [(each.layer, each.step) for each in found] == [("3", step) for step in steps[:1]]


def test_the_loss_scale_is_followed_through_the_chosen_step():
    training = Training(second=[1])

    def with_noise():
        training.scaler.scale(training.loss()).backward()
        for parameter in training.model.parameters():
            parameter.grad += torch.randn_like(parameter)
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.optimizer.zero_grad()

    training.step = with_noise
    training.trained()
    assert training.steps_of("mixed-powers") == [1]


def test_a_validation_within_the_step_is_left_out():
    training = Training(second=[1])
    step = training.step

    def validated():
        training.model.eval()
        with torch.no_grad():
            training.model[3](torch.ones(600, 8, dtype=torch.bfloat16))
            training.model(torch.randn(600, 8))
        training.model.train()
        training.model[3].forward = lambda x: x[:2]
        step()

    training.step = validated
    training.trained(3)
    assert training.steps_of() == []


def test_a_copy_that_is_made_within_the_step_is_not_followed():
    training, copies = Training(second=[1]), []
    step = training.step

    def copied():
        copies.append(copy.deepcopy(training.model))
        step()

    training.step = copied
    training.trained(3)
    assert training.steps_of() == [1]
    for each in copies:
        each(torch.randn(600, 8))


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_step_under_the_scripts_own_mode_is_left_out_with_a_note():
    training = Training(second=[1])
    with Passing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mpinspect.MpinspectWarning)
        training.trained(3)
    assert training.steps_of() == []
    (note,) = training.inspector.session().notes
    assert note == "no step was computed twice: the script has entered a torch dispatch mode of its own"


def test_a_mode_that_the_script_enters_within_the_step_may_outlast_it():
    training, mode = Training(second=[1]), Passing()
    with training.inspector:
        training.step()
        mode.__enter__()
        training.step()
        training.step()
        mode.__exit__(None, None, None)
        training.step()
        assert torch._C._len_torch_dispatch_stack() == 0
    assert training.steps_of() == [1]


def test_a_run_that_ends_within_the_step_leaves_no_mode():
    training = Training(second=True)
    with training.inspector:
        training.step()
        training.loss().backward()
        assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0
    assert training.steps_of() == []


@pytest.mark.parametrize(
    ("owner", "method", "steps"), [(SecondComputation, "after", []), (ImplicitConversions, "ran", [1])]
)
def test_an_error_of_ours_costs_the_work_of_one_instrument_in_that_step(owner, method, steps, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(owner, method, fail)
    plain, training = Training().trained(), Training(second=[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpinspect.MpinspectWarning)
        training.trained()
    (note,) = training.inspector.session().notes
    assert "planted" in note
    assert training.steps_of() == steps
    assert all(map(torch.equal, training.model.parameters(), plain.model.parameters()))


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        return torch.full((600, 8), float(place)).bfloat16().float()


def test_workers_that_load_data_are_not_followed():
    training = Training(second=[1])
    with training.inspector:
        training.step()
        batches = list(DataLoader(Rows(), num_workers=1, multiprocessing_context="fork"))
        training.step()
    assert [float(batch.mean()) for batch in batches] == [0.0, 1.0, 2.0, 3.0]
    assert training.steps_of() == [1]


@pytest.mark.parametrize("second", ["yes", [0.5], [True]])
def test_a_wrong_type_is_refused(second):
    with pytest.raises(TypeError, match="second="):
        mpinspect.Inspector(network(), second=second)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="from 0 on"):
        mpinspect.Inspector(network(), second=[-1])


def chosen(choice, broken, found_in=()):
    """Return which of 20 steps are chosen, if the forwards before some are known to break, and are seen to in others."""
    steps = []
    for step in range(20):
        if choice.is_due(step, lambda step=step: ["forward" for each in broken if each <= step]):
            choice.begins(step)
            steps.append(step)
            choice.ends(
                [BornInfinite(names=("exp", "", "forward"), elements=1, of=1, largest=1e5)] if step in found_in else [],
                ["forward"],
            )
    return steps


@pytest.mark.parametrize(
    ("worked", "expected"),
    [
        ([3, 7, 11, 15, 19], [11, 15]),
        ([3, 7], [11]),
        # Each is expected at the last distance again.
        ([3, 7, 12], [11, 17]),
        (range(20), []),
        ([5], []),
    ],
)
def test_regular_steps_with_rarer_work_are_chosen(worked, expected):
    choice, found, work = StepChoice(()), [], 0
    for step in range(20):
        if choice.is_due(step, lambda: ()):
            choice.begins(step)
            found.append(step)
        work += step in worked
        choice.passed(step, work)
    assert found == expected


@pytest.mark.parametrize(("breaks_at", "expected"), [(None, [12, 16]), (16, [12, 16, 20])])
def test_a_further_step_with_rarer_work_is_chosen_once_something_broke(breaks_at, expected):
    choice, found, broken = StepChoice((), after_events=0), [], []
    for step in range(24):
        if choice.is_due(step, lambda: broken):
            choice.begins(step)
            found.append(step)
        if step == breaks_at:
            broken.append("forward")
        choice.passed(step, step // 4)
    assert found == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaaaabbbbbb", [8]),
        # Two new phases, each once; the first one again, and a third.
        ("aaaabbbbaaaaccccdddd", [6, 14]),
        # The last batch of each epoch is smaller.
        ("aaaaabaaaabaaaab", []),
        # Batches of texts.
        ("abcabdaebfaagbh", []),
        ("aaabbbccc", []),
    ],
)
def test_a_step_is_chosen_once_steps_are_of_another_kind(kinds, expected):
    choice, found = StepChoice(()), []
    for step, kind in enumerate([*kinds, "end"]):
        if choice.is_due(step, lambda: ()):
            choice.begins(step)
            found.append(step)
        choice.passed(step, 0, "conv", kind)
    assert found == expected


def test_kinds_are_compared_of_steps_that_begin_with_the_same_module():
    choice = StepChoice(())
    for step in range(16):
        assert not choice.is_due(step, lambda: ())
        choice.passed(step, 0, *(("conv", "a") if step < 8 else ("block", "b")))


@pytest.mark.parametrize(
    ("losses", "jumps"),
    [
        ([1.0] * 20 + [5.0, 5.0], [22]),
        # One outlier, as of one batch; a rise by less than four times; too few losses before.
        ([1.0] * 20 + [5.0, 1.0, 5.0, 1.0], []),
        ([1.0] * 20 + [3.9] * 9, []),
        ([1.0] * 8 + [5.0] * 9, []),
        # A second jump counts from the level of the first.
        ([1.0] * 20 + [5.0] * 20 + [30.0] * 2, [22, 42]),
    ],
)
def test_a_loss_has_jumped_once_two_in_a_row_are_far_above_all_recent_ones(losses, jumps):
    level, found = LossLevel(), []
    for number, loss in enumerate(losses, 1):
        before = level.jumps
        level.add(loss)
        found += [number] * (level.jumps > before)
    assert found == jumps


@pytest.mark.parametrize("is_late", [True, False])
def test_an_overflow_that_raises_the_loss_and_leaves_it_finite_is_found(is_late):
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with mpinspect.Inspector(model, optimizers=optimizer, second=True, loss_scale=1) as inspector:
        for step in range(60):
            x = torch.full((4, 4), 500.0 if is_late and step >= 40 else 1.0).half()
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
            loss = (model(normed).float() - model.bias.detach().float() - 0.01 * step / 60 - 1.0).square().mean()
            loss = loss * (100 if is_late and step >= 40 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = [finding for finding in inspector.report().findings if finding.id == "overflow-in-operator"]
    assert [finding.step for finding in found] == [43] * is_late


LATER_OVERFLOWS = {
    "size": lambda model, later: model(torch.full((4096 if later else 4, 4), 100.0)).half().abs().sum(),
    "loss": lambda model, later: (torch.sum if later else torch.mean)(model(torch.full((4096, 4), 100.0)).half().abs()),
    "precision": lambda model, later: (model(torch.full((4, 4), 100.0)) * 4096).float().abs().sum(),
}


@pytest.mark.parametrize("change", LATER_OVERFLOWS)
def test_an_overflow_of_a_later_phase_that_leaves_the_loss_finite_is_found(change):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mpinspect.Inspector(model, optimizers=optimizer, second=True) as inspector:
        for step in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=change == "precision" and step >= 10):
                total = LATER_OVERFLOWS[change](model, step >= 10)
            (1 / (1 + total)).backward()
            optimizer.step()
    assert "overflow-in-operator" in {finding.id for finding in inspector.report().findings}


def wave():
    """A network of a sine, whose second derivative has the square of the first layer's weights as a factor."""
    return Of(lambda self, x: self.last(torch.sin(self.first(x))), first=nn.Linear(1, 8), last=nn.Linear(8, 1))


def test_the_layer_whose_derivative_overflows_fp16_is_named():
    model = wave()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-9), torch.amp.GradScaler("cpu", init_scale=1.0)
    with mpinspect.Inspector(model, optimizers=optimizer, second=True) as inspector:
        for step in range(16):
            with torch.no_grad():
                model.first.weight.copy_(torch.linspace(200.0, 300.0, 8)[:, None])
                model.last.weight.fill_(10.0 if step >= 8 else 1e-3)
            x = torch.rand(32, 1).requires_grad_()
            with torch.autocast("cpu", torch.float16):
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            optimizer.zero_grad()
            scaler.scale(curvature.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    found = inspector.report().findings[0]
    assert (found.id, found.severity, found.step) == ("overflow-in-operator", "error", 8)
    assert found.evidence["phase"] == "backward"
    assert "In the backward of 'first' (" in found.message
    assert "self.first(x)" in found.code


def test_steps_after_an_infinity_are_chosen_until_one_has_it():
    always = range(5, 20)
    assert chosen(StepChoice(()), []) == []
    assert chosen(StepChoice(()), always) == list(range(5, 13))
    assert chosen(StepChoice(()), always, found_in=[7]) == [5, 6, 7]
    # An infinity in a step that was chosen for its number may be another one.
    assert chosen(StepChoice([2, 9]), always, found_in=[2, 6]) == [2, 5, 6, 9]
    assert chosen(StepChoice([3], after_events=0), range(1, 20)) == [3]


def test_of_steps_after_one_infinity_some_are_left_for_the_next():
    assert chosen(StepChoice(()), [2, 12, 15, 16, 17]) == [2, 3, 4, 5, 6, 12, 15, 16]


@pytest.mark.parametrize(
    ("error", "dtype", "expected"),
    [
        (0.2, "bfloat16", [1, 30, 60, 120, 240]),
        # Such an error names its cause at once; ordinary rounding and FP32 need no further step.
        (0.7, "bfloat16", [1, 30]),
        (0.05, "bfloat16", [1, 30]),
        (0.2, "float32", [1, 30]),
    ],
)
def test_a_step_with_unexplained_errors_leads_to_a_later_one(error, dtype, expected):
    choice, begun = StepChoice([1, 30]), []
    for step in range(500):
        if choice.is_due(step, list):
            choice.begins(step)
            begun.append(step)
            choice.ends([GradientsError(text=dtype, error=error)], [])
    assert begun == expected


def decays(of_input):
    """Multiply by 1 less decay factors: of a parameter, or of the input."""

    def forward(self, x):
        logits = self.logits + x if of_input else self.logits
        return (1 - torch.sigmoid(logits).bfloat16()).float() * x

    return Of(forward, logits=nn.Parameter(torch.linspace(0, 12, 16)))


@pytest.mark.parametrize("of_input", [False, True])
def test_decay_factors_of_a_parameter_that_round_to_1_are_named_and_saturated_gates_are_not(of_input):
    model = nn.Sequential(decays(of_input), nn.Linear(16, 1))
    inspector = inspected(model, lambda _: model(torch.randn(8, 16)).mean(), 4, lr=0.01, second=True)
    found = {finding.id: finding for finding in inspector.report().findings}
    assert ("constant-is-one" in found) is not of_input
    if not of_input:
        constant = found["constant-is-one"]
        # sigmoid(x) rounds to 1 above log(511) = 6.2, which 8 of 0, 0.8, ..., 12 are.
        assert (constant.layer, constant.step, constant.severity) == ("0", 1, "warning")
        assert (constant.evidence["elements"], constant.evidence["of"]) == (8, 16)


@pytest.mark.parametrize("is_added_back", [True, False])
def test_the_error_of_a_difference_that_is_added_back_is_none(is_added_back):
    """A straight-through estimator adds a number's quantisation error, which is mostly the number's rounding, to the number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpinspect.Inspector(model, optimizers=optimizer, second=True) as inspector:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model[:2](torch.randn(32, 16)).float()
            error = ((hidden * 200).round() / 200 - hidden).detach()
            given = hidden + error if is_added_back else hidden * error * 100
            take_step(optimizer, model[2](given).square().mean())
    found = {each.id for each in inspector.report().findings if each.severity != "info"}
    assert ("result-is-rounding-error" in found) is not is_added_back


def test_the_gradients_of_masters_are_compared_where_the_loop_drops_those_of_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    # In another order than the weights.
    optimizer = torch.optim.AdamW([{"params": masters[1::2]}, {"params": masters[::2]}])
    with mpinspect.Inspector(model, optimizers=optimizer, second=True) as inspector:
        for _ in range(4):
            (model(torch.randn(8, 16).bfloat16()).float().square().mean() * 256).backward()
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad, weight.grad = weight.grad.float() / 256, None
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters, strict=True):
                    weight.copy_(master)
    errors = [each for each in recorded(inspector.session().measurements, GradientsError) if each.text == "bfloat16"]
    assert [each.of for each in errors] == [4]
    assert 1e-3 < errors[0].error < 0.1


def test_an_optimizer_of_another_model_has_no_masters_of_this_one():
    """Its biases are zeros, as this model's are."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 4).bfloat16(), nn.Linear(8, 4)
    for each in (model, other):
        nn.init.zeros_(each.bias)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, other)]
    with mpinspect.Inspector(model, optimizers=optimizers[0], second=[1]) as inspector:
        for _ in range(3):
            x = torch.randn(16, 8)
            (other(x).square().mean() + model(x.bfloat16()).float().square().mean()).backward()
            for each in reversed(optimizers):
                each.step()
                each.zero_grad()
    errors = [each for each in recorded(inspector.session().measurements, GradientsError) if each.text == "bfloat16"]
    assert [each.of for each in errors] == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_number_that_the_loop_reads_is_recorded_with_the_sum_in_16_bits_that_it_is_made_of(dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.randn(40, 16, 8)
    with mpinspect.Inspector(model, optimizers=optimizer, second=[1]) as inspector:
        for _ in range(3):
            total = torch.zeros((), dtype=dtype)
            with torch.no_grad():
                for x in batches:
                    total += model(x).square().mean().to(dtype)
            value = (total / 40).item()
            take_step(optimizer, model(batches[0]).square().mean())
            if inspector.session().progress.steps == 2:
                read_in_step_1 = value
    numbers = list(recorded(inspector.session().measurements, ReadNumber))
    assert [(each.terms, each.value) for each in numbers] == [(40, read_in_step_1)] * (dtype == torch.bfloat16)
    assert all(0 < abs(each.exact - each.value) < 0.05 * each.value for each in numbers)


EPOCH = 1_700_000_000


def subtracted(difference, numbers, dtype=torch.float32, steps=4):
    """Train on differences of whole numbers, which a script has cast before the loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    given = numbers.to(dtype)

    def loss_of(_):
        x = difference(given).float().reshape(-1, 1)
        return model(x.clamp(-1, 1)).square().mean()

    inspector = inspected(model, loss_of, steps, lr=0.01, second=True)
    return [each for each in inspector.report().findings if each.id == "result-is-rounding-error"]


def times(gap, start=EPOCH):
    return start + torch.randint(1, 2 * gap, (16, 20), generator=torch.Generator().manual_seed(1)).cumsum(1)


DIFFERENCES = {
    "neighbours": lambda x: x[:, 1:] - x[:, :-1],
    "diff": lambda x: torch.diff(x),
    "in place": lambda x: x[:, 1:].clone().sub_(x[:, :-1]),
    "a negative number": lambda x: x[:, 1:] + -x[:, :-1],
    "one column": lambda x: x - x[:, :1],
    "a number": lambda x: x - EPOCH,
    "from a number": lambda x: EPOCH - x,
}


@pytest.mark.parametrize("how", DIFFERENCES)
def test_a_difference_of_whole_numbers_beyond_those_of_float32_is_named(how):
    (finding,) = subtracted(DIFFERENCES[how], times(20))
    assert (finding.severity, finding.certainty, finding.step) == ("warning", "inferred", 1)
    assert finding.evidence["line"].startswith("test_second_steps.py:")
    # 1.7e9 lies between 2^30 and 2^31.
    assert finding.evidence["unit"] == 2.0 ** (30 - 23)
    assert finding.evidence["typical"] % finding.evidence["unit"] == 0
    assert "int64" in finding.fix


@pytest.mark.parametrize(
    ("how", "numbers", "dtype"),
    [
        ("neighbours", times(20), torch.float64),
        ("neighbours", times(20), torch.int64),
        # Exact numbers, differences of many units, data that are coarser than FP32, and a sum.
        ("neighbours", times(20, start=1 << 20), torch.float32),
        ("neighbours", times(100_000), torch.float32),
        ("neighbours", times(20) // 256 * 256, torch.float32),
        ("sum", times(20), torch.float32),
        # A mask of large negative numbers, as of attention.
        ("masked", times(20), torch.float32),
    ],
)
def test_differences_that_float32_represents_are_not_reported(how, numbers, dtype):
    others = {
        "sum": lambda x: x[:, 1:] + x[:, :-1],
        "masked": lambda x: torch.zeros_like(x).masked_fill(x % 256 == 0, -1e9) - 1e9,
    }
    assert subtracted({**DIFFERENCES, **others}[how], numbers, dtype) == []


@pytest.mark.parametrize("is_second", [True, False])
def test_a_logarithm_that_breaks_later_has_the_line_of_its_call_in_the_step_computed_twice(is_second):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mpinspect.Inspector(model, optimizers=optimizer, second=is_second) as inspector:
        for step in range(6):
            p = torch.sigmoid(model(torch.randn(8, 4)).bfloat16() + 20.0 * (step == 4))
            loss = torch.log(p)
            loss = loss + torch.log(1 - p)
            take_step(optimizer, loss.float().mean())
    (finding,) = [each for each in inspector.report().findings if each.id == "argument-out-of-range"]
    assert finding.step == 4
    assert (finding.evidence["line"] != "") is is_second
    assert finding.evidence.get("source", "") == "loss = loss + torch.log(1 - p)" * is_second


def test_the_code_of_a_closure_is_not_a_part_of_the_optimizer():
    """Lightning runs the whole training step in a closure of the optimizer."""
    training = Training(second=True)
    training.model.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))

    def closure():
        with torch.enable_grad():
            training.optimizer.zero_grad()
            training.model.seen += 1
            loss = training.loss()
            loss.backward()
            return loss

    with training.inspector:
        for _ in range(103):
            training.optimizer.step(closure)
    assert training.steps_of("second-growing") == [100]


@pytest.mark.parametrize(("dtype", "flushed"), [(torch.float16, 1), (torch.float32, 0)])
def test_a_logarithm_of_flushed_results_is_recorded(dtype, flushed):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = mpinspect.Inspector(model, optimizers=optimizer, second=True)
    with inspector:
        for _ in range(3):
            power = (1e-4 * torch.rand(16, 8)).to(dtype) ** 2
            take_step(optimizer, model(power.float().clamp(min=1e-12).log10()).square().mean())
    found = [each for each in inspector.session().measurements if each.what == "second-flushed"]
    assert [each.names[3] for each in found] == ["log10"] * flushed


@pytest.mark.parametrize(("dtype", "infinite"), [(torch.float16, 8), (torch.bfloat16, None), (torch.float32, None)])
def test_a_teacher_whose_variance_a_cast_made_infinite_is_named(dtype, infinite):
    teacher = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    teacher[0].running_var.fill_(1e6)
    teacher.to(dtype)
    student = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    inspector = mpinspect.Inspector(student, optimizers=optimizer, second=True)
    with inspector:
        for _ in range(3):
            x = 1000 * torch.randn(16, 8)
            with torch.no_grad():
                target = teacher(x.to(dtype)).float()
            take_step(optimizer, (student(x / 1000) - target).square().mean())
    found = [each for each in inspector.report().findings if each.id == "divisor-infinite"]
    assert [each.evidence["infinite"] for each in found] == [infinite] * (infinite is not None)
    for each in found:
        assert (each.severity, each.step, each.certainty) == ("error", 1, "measured")
        assert each.evidence["line"].startswith("test_second_steps.py:")


def test_a_determinant_that_16_bits_made_negative_names_the_last_operator_in_16_bits():
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # In half of the steps the determinant is negative.
    inspector = mpinspect.Inspector(model, optimizers=optimizer, second=range(12))
    with inspector:
        for _ in range(12):
            with torch.autocast("cpu", torch.bfloat16):
                z = 4 * model(torch.randn(256, 10))
                z = z - z.mean(0)
                gram = z.T @ z / len(z)
                loss = torch.logdet(gram + 1e-4 * torch.eye(24))
            take_step(optimizer, loss.nan_to_num())
    born = next(each for each in inspector.session().measurements if each.what == "second-born")
    first_line = sys._getframe().f_code.co_firstlineno
    assert (born.figures["is_last"], born.names[1]) == (1, f"test_second_steps.py:{first_line + 11}")
    assert born.names[5] == f"test_second_steps.py:{first_line + 10}"
    assert "z.float()" in next(each.code for each in inspector.report().findings if each.id == "input-rounded-away")


@pytest.mark.parametrize(("is_used", "severity"), [(False, "info"), (True, "error")])
def test_an_overflow_outside_of_the_graph_is_an_info_unless_it_spoils_the_gradients(is_used, severity):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with mpinspect.Inspector(model, second=[0]) as inspector:
        with torch.autocast("cpu", torch.float16):
            output = model(torch.randn(8, 4))
        with torch.no_grad():
            energy = (output.half() + 300).square().amax()
        scale = energy.float().rsqrt() if is_used else 1.0
        take_step(optimizer, ((output.float() * scale) - 1).square().mean())
    (found,) = [each for each in inspector.report().findings if each.id == "overflow-in-operator"]
    assert found.severity == severity


def test_tensors_of_a_recorded_step_are_freed_without_the_garbage_collector():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    gc.collect()
    gc.disable()
    try:
        with mpinspect.Inspector(model, optimizers=optimizer, second=[0, 1]):
            for _ in range(2):
                cast = (300 * model[0](torch.randn(4, 8))).clamp(-448, 448).to(torch.float8_e4m3fn).float()
                added = 2 * cast + torch.ones(8).bfloat16()
                made += [weakref.ref(each) for each in (cast, added)]
                take_step(optimizer, model[1](added).square().mean())
                del cast, added
                assert not any(each() for each in made)
    finally:
        gc.collect()
        gc.enable()
