"""Moving averages, running sums and counters that a script keeps in 16 bits from step to step, outside of the optimizer."""

import copy

import pytest
import torch
from torch import nn
from trainings import take_step

import mpinspect

BF16 = torch.bfloat16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


class Kept:
    """State of a loop; ``after`` changes it after each step of the optimizer."""

    def __init__(self, model, dtype):
        self.model, self.dtype = model, dtype
        self.average = copy.deepcopy(model).to(dtype).requires_grad_(False)
        self.total = torch.zeros((), dtype=dtype)
        self.shadow = {name: value.clone() for name, value in self.average.state_dict().items()}
        self.lost = [torch.zeros_like(each) for each in self.average.parameters()]
        self.step = 0

    @torch.no_grad()
    def multiplied(self, loss, decay=0.998):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.mul_(decay).add_(its.to(mine.dtype), alpha=1 - decay)

    @torch.no_grad()
    def in_small_steps(self, loss, decay=0.995):
        """Both operators change most elements, by one unit in the last place: together they do not."""
        self.multiplied(loss, decay)

    @torch.no_grad()
    def divided(self, loss):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.div_(1 / 0.99).add_(its.to(mine.dtype), alpha=0.01)

    @torch.no_grad()
    def replaced(self, loss, decay=0.995):
        for name, value in self.model.state_dict().items():
            new = (1 - decay) * value.to(self.dtype) + decay * self.shadow[name]
            self.shadow[name] = new.clone()

    @torch.no_grad()
    def copied(self, loss, decay=0.995):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.copy_(decay * mine + (1 - decay) * its.to(mine.dtype))

    @torch.no_grad()
    def towards_another_model(self, loss, decay=0.995):
        """The target is far away, so that the exact change is larger than a unit in the last place."""
        for mine in self.average.parameters():
            mine.mul_(decay).add_(torch.full_like(mine, 4.0), alpha=1 - decay)

    @torch.no_grad()
    def with_momentum(self, loss):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.mul_(0.9).add_(its.to(mine.dtype), alpha=0.1)

    @torch.no_grad()
    def rounded_at_random(self, loss, decay=0.995):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            exact = mine.float().mul_(decay).add_(its, alpha=1 - decay)
            bits = exact.view(torch.int32) + torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
            mine.copy_((bits & -65536).view(torch.float32))

    @torch.no_grad()
    def compensated(self, loss, decay=0.995):
        """Kahan summation of the average's changes."""
        for mine, its, lost in zip(self.average.parameters(), self.model.parameters(), self.lost, strict=True):
            lost.add_(((its - mine.float() - lost.float()) * (1 - decay)).to(mine.dtype))
            before = mine.clone()
            mine.add_(lost)
            lost.add_(before.sub_(mine))

    @torch.no_grad()
    def computed_anew(self, loss):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.mul_(0).add_(its.to(mine.dtype)).mul_(0.999).add_(its.to(mine.dtype), alpha=0.001)

    def multiplied_within_the_step(self, loss):
        copies = [each.detach().to(self.dtype) for each in self.model.parameters()]
        self.seen = [each.mul_(0.995).add_(each, alpha=0.005) for each in copies]

    @torch.no_grad()
    def interpolated(self, loss):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(its.to(mine.dtype), 0.002)

    @torch.no_grad()
    def by_foreach(self, loss):
        weights = [each.to(self.dtype) for each in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.parameters()), weights, 0.002)

    @torch.no_grad()
    def in_fp32_and_back(self, loss, decay=0.998):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.copy_(mine.float().mul_(decay).add_(its, alpha=1 - decay))

    @torch.no_grad()
    def in_fp32_and_back_by_foreach(self, loss):
        mine = list(self.average.parameters())
        wide = [each.float() for each in mine]
        torch._foreach_lerp_(wide, list(self.model.parameters()), 0.002)
        torch._foreach_copy_(mine, wide)

    @torch.no_grad()
    def replaced_from_fp32(self, loss, decay=0.998):
        for name, value in self.model.state_dict().items():
            self.shadow[name] = torch.lerp(self.shadow[name].float(), value, 1 - decay).to(self.dtype)

    def fast_in_fp32(self, loss):
        self.in_fp32_and_back(loss, decay=0.5)

    def rescaled(self, loss):
        for name, value in self.shadow.items():
            self.shadow[name] = (value.float() * 3 / 3).to(self.dtype)

    def with_an_adapter_within_the_step(self, loss):
        self.seen = [(value.float() + 1e-6).to(self.dtype) * 2 for value in self.shadow.values()]

    @torch.no_grad()
    def compensated_in_fp32(self, loss, decay=0.995):
        for mine, its, lost in zip(self.average.parameters(), self.model.parameters(), self.lost, strict=True):
            exact = mine.float() + lost.float() + (1 - decay) * (its - mine.float())
            mine.copy_(exact)
            lost.copy_(exact - mine.float())

    @torch.no_grad()
    def rounded_at_random_in_place(self, loss, decay=0.995):
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            exact = mine.float().mul_(decay).add_(its, alpha=1 - decay)
            bits = exact.view(torch.int32)
            bits.add_(torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)).bitwise_and_(-65536)
            mine.copy_(exact)

    @torch.no_grad()
    def from_masters(self, loss):
        self.masters = getattr(self, "masters", None) or [each.float() for each in self.average.parameters()]
        for mine, its, master in zip(self.average.parameters(), self.model.parameters(), self.masters, strict=True):
            mine.copy_(master.lerp_(its, 0.002))

    def fast(self, loss):
        self.multiplied(loss, decay=0.5)

    @torch.no_grad()
    def at_its_target(self, loss):
        for mine in self.average.parameters():
            # The target is one part in 128 away; a tenth of that distance is rounded away.
            mine.lerp_(mine * (1 + 2**-7), 0.1)

    def summed(self, loss):
        self.total = self.total + loss.detach().to(self.dtype)

    def summed_in_place(self, loss):
        self.total += loss.detach().to(self.dtype)

    def summed_for_20_steps(self, loss):
        if self.step % 20 == 0:
            self.total = torch.zeros((), dtype=self.dtype)
        self.summed(loss)

    def averaged(self, loss):
        self.total.mul_(0.99).add_(loss.detach().to(self.dtype), alpha=0.01)

    def counted(self, loss):
        self.total += 1

    def summed_within_the_step(self, loss):
        total = torch.full((), 100.0, dtype=self.dtype)
        total += 1
        self.seen = total * 2

    @torch.no_grad()
    def evaluated(self, loss, every=4):
        """Count the hits of a validation in the dtype, as a metric of many small batches."""
        if self.step % every == every - 1:
            hits = 0.0
            for _ in range(400):
                hits = hits + (self.model(torch.zeros(4, 16)) < 9).to(self.dtype).sum()

    def evaluated_in_each_step(self, loss):
        self.evaluated(loss, every=1)

    def weights_by_hand(self, loss):
        with torch.no_grad():
            self.hand = getattr(self, "hand", None) or nn.Linear(64, 1).to(self.dtype)
            self.hand.weight.add_(1.0)


def findings(after, dtype=BF16, steps=120, second=(1, 100), model=network):
    model = model()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
    kept = Kept(model, dtype)
    with mpinspect.Inspector(model, optimizers=optimizer, second=second, every=1000) as inspector:
        for kept.step in range(steps):
            loss = 2 + model(torch.randn(8, 16)).square().mean()
            take_step(optimizer, loss)
            getattr(kept, after)(loss)
    return {finding.id: finding for finding in inspector.report().findings}


@pytest.mark.parametrize("after", ["multiplied", "interpolated", "by_foreach"])
def test_an_average_that_its_updates_do_not_change_is_named_with_its_line(after):
    # In a run of 20 steps only the step that is computed twice shows it.
    finding = findings(after, steps=7)["buffer-stops-changing"]
    assert (finding.severity, finding.step) == ("warning", 1)
    assert "test_kept_sums.py:" in finding.message
    assert finding.evidence["unchanged"] > 0.9
    assert finding.evidence["times"] == 4
    assert ".float()" in finding.code


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("after", ["in_fp32_and_back", "in_fp32_and_back_by_foreach", "replaced_from_fp32"])
def test_an_average_whose_change_in_fp32_is_lost_in_the_cast_back_is_named(after, dtype):
    finding = findings(after, dtype, steps=7)["buffer-stops-changing"]
    assert (finding.severity, finding.step, finding.certainty) == ("warning", 1, "measured")
    assert finding.evidence["line"].startswith("test_kept_sums.py:")
    assert finding.evidence["unchanged"] > 0.5
    assert "new values that are stored leave" in finding.message
    assert finding.fix.startswith("Keep this tensor in FP32: ")


@pytest.mark.parametrize("after", ["in_small_steps", "divided", "replaced", "copied"])
def test_an_average_whose_operators_together_round_its_change_away_is_named(after):
    finding = findings(after, steps=7)["buffer-stops-changing"]
    assert (finding.severity, finding.step, finding.certainty) == ("warning", 1, "measured")
    assert finding.evidence["line"].startswith("test_kept_sums.py:")
    assert finding.evidence["rounded"] > 0.5
    assert finding.evidence["times"] >= 2
    assert "mostly rounding" in finding.message
    assert "average.lerp_" in finding.code


@pytest.mark.parametrize("after", ["summed", "summed_in_place"])
def test_a_sum_that_will_stop_within_the_run_is_a_warning(after):
    finding = findings(after, steps=400)["buffer-stops-changing"]
    # Some 2.3 a step: 100 steps make 230, and the sum stops at 256 terms.
    assert (finding.severity, finding.certainty) == ("warning", "inferred")
    assert 1 <= finding.evidence["stops_at"] / (256 * finding.evidence["term"]) < 2
    stopped = torch.tensor(finding.evidence["stops_at"], dtype=BF16)
    assert stopped + finding.evidence["term"] == stopped
    total = torch.tensor(finding.evidence["total"], dtype=BF16)
    assert total + finding.evidence["unit"] > total
    assert total + finding.evidence["unit"] / 4 == total


def test_a_counter_that_is_exact_until_the_run_ends_is_not_reported():
    assert "buffer-stops-changing" not in findings("counted")


def test_a_sum_stops_where_it_is_said_to():
    finding = findings("counted", steps=400)["buffer-stops-changing"]
    counter = torch.zeros((), dtype=BF16)
    for _ in range(400):
        counter += 1
    assert counter == finding.evidence["stops_at"] == 256


@pytest.mark.parametrize(
    ("after", "dtype"),
    [
        ("multiplied", torch.float32),
        ("summed", torch.float32),
        # A count of 100 is exact in FP16, which counts to 2,048.
        ("counted", torch.float16),
        ("fast", BF16),
        ("at_its_target", BF16),
        ("averaged", BF16),
        ("in_small_steps", torch.float32),
        ("replaced", torch.float32),
        ("towards_another_model", BF16),
        ("with_momentum", BF16),
        ("rounded_at_random", BF16),
        ("compensated", BF16),
        ("computed_anew", BF16),
        ("multiplied_within_the_step", BF16),
        ("summed_for_20_steps", BF16),
        ("summed_within_the_step", BF16),
        ("weights_by_hand", BF16),
        ("in_fp32_and_back", torch.float32),
        ("fast_in_fp32", BF16),
        ("rescaled", BF16),
        ("rescaled", torch.float8_e4m3fn),
        ("with_an_adapter_within_the_step", BF16),
        ("compensated_in_fp32", BF16),
        ("rounded_at_random_in_place", BF16),
        ("from_masters", BF16),
    ],
)
def test_sums_that_lose_nothing_that_matters_are_not_reported(after, dtype):
    assert "buffer-stops-changing" not in findings(after, dtype, second=(1, 2, 50, 100))


def test_a_sum_of_a_validation_in_regular_steps_is_computed_twice():
    finding = findings("evaluated", steps=20, second=True)["addition-changes-nothing"]
    # The validations follow the optimizer's steps 3, 7 and 11.
    assert (finding.severity, finding.step, finding.evidence["times"]) == ("warning", 12, 399)
    assert "test_kept_sums.py:" in finding.message
    assert "addition-changes-nothing" not in findings("evaluated", steps=12, second=True)


@pytest.mark.parametrize(("after", "dtype"), [("evaluated", torch.float32), ("evaluated", torch.float16)])
def test_a_sum_of_a_validation_that_loses_nothing_is_not_reported(after, dtype):
    assert "addition-changes-nothing" not in findings(after, dtype, steps=20, second=True)


class Adapted(nn.Module):
    """A frozen BF16 layer with a low-rank adapter, which every third forward merges into it."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 32).to(BF16).requires_grad_(False)
        self.head = nn.Linear(32, 1)
        self.change, self.calls = change, 0

    @torch.no_grad()
    def merge(self):
        self.base.weight.add_(torch.full_like(self.base.weight, self.change))

    def forward(self, x):
        if self.calls % 3 == 2:
            self.merge()
        self.calls += 1
        return self.head(self.base(x.to(BF16)).float().relu())


@pytest.mark.parametrize(("change", "is_lost"), [(1e-5, True), (1.0, False)])
def test_merges_that_a_frozen_weight_loses_are_named(change, is_lost):
    found = findings("fast", steps=20, second=True, model=lambda: Adapted(change)).get("buffer-stops-changing")
    if not is_lost:
        assert found is None
        return
    assert (found.severity, found.step) == ("warning", 8)
    assert "of the weight 'base.weight'" in found.message
    assert "register_buffer" not in found.code
