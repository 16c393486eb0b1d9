"""Hand-written normalisations whose squares overflow in FP16 are reported with their rows, and others are not."""

import pytest
import torch
from agreeing_reports import contradictions
from torch import nn
from trainings import take_step

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport

ROWS, WIDTH, EPS = 32, 16, 1e-5
#: Each divides rows by the root of the mean or sum of their squares.
NORMS = {
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "rsqrt of a product": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS),
    "rsqrt of what was cast too late": lambda x: x * torch.rsqrt((x * x).float().sum(-1, keepdim=True) + EPS),
    "sqrt": lambda x: x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt(),
    "sqrt and epsilon": lambda x: x / ((x * x).sum(-1, keepdim=True).sqrt() + EPS),
    "1 / sqrt": lambda x: x * (1 / (x.square().mean(-1, keepdim=True) + EPS).sqrt()),
    "power": lambda x: x * (x.square().mean(-1, keepdim=True) + EPS) ** -0.5,
    "division by a power": lambda x: x / (x.square().mean(-1, keepdim=True) + EPS) ** 0.5,
}


class Norm(nn.Module):
    def __init__(self, formula, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._formula, self._dtype = formula, dtype

    def forward(self, x):
        return self.weight.to(x.dtype) * self._formula(x.to(self._dtype)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, formula, dtype):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.norm = Norm(formula, dtype)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.norm(self.lin(x)))


def rows_with_outliers(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH)
    x[torch.rand(ROWS) < 0.3, 3] = 2000.0
    return x


def train(formula, narrow=torch.float16, norm_in=None, x=None, steps=3) -> RangeReport:
    """Train a model with a hand-written normalisation.

    Args:
        narrow: autocast's dtype; float32 for none.
        norm_in: the dtype of the normalisation; None for its input's dtype.
    """
    torch.manual_seed(1)
    model = Model(formula, norm_in or narrow)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=narrow is torch.float16)
    x = rows_with_outliers() if x is None else x
    with Inspector(model, second=True) as inspector:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16 if narrow is torch.float32 else narrow, narrow != torch.float32):
                made = model(x)
            loss = nn.functional.cross_entropy(made.float(), torch.arange(ROWS) % 4)
            take_step(optimizer, loss, scaler)
    report = inspector.report()
    assert contradictions(report) == []
    return report


def norm_findings(report):
    return [finding for finding in report.findings if finding.id == "norm-overflows"]


def zero_rows(formula, x=None) -> int:
    """Return the number of rows that are zero in FP16 but not in FP64."""
    torch.manual_seed(1)
    model = Model(formula, torch.float16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        x = model.lin(rows_with_outliers() if x is None else x)
        narrow, wide = formula(x), formula(x.double())
    return int(((narrow == 0).all(-1) & (wide != 0).any(-1)).sum())


@pytest.mark.parametrize("formula", NORMS.values(), ids=NORMS)
def test_rows_that_became_zero_are_counted_and_their_norm_is_reported(formula):
    report = train(formula)
    (finding,) = norm_findings(report)
    zeros = zero_rows(formula)
    assert 0 < zeros < ROWS
    assert (finding.severity, finding.layer, finding.step) == ("error", "norm", 1)
    assert (finding.evidence["elements"], finding.evidence["of"]) == (zeros, ROWS)
    assert f"In {zeros} of {ROWS} rows the values divided by it, or its root, became zero" in finding.message
    assert report.verdict.healthy is False
    assert not report.events
    compile(finding.code, "fix", "exec")


@pytest.mark.parametrize(("narrow", "norm_in"), [(torch.float16, torch.float32), (torch.bfloat16, None)])
@pytest.mark.parametrize("formula", [NORMS["rsqrt"], NORMS["sqrt and epsilon"]])
def test_norms_in_fp32_and_bf16_are_not_reported(formula, narrow, norm_in):
    assert not norm_findings(train(formula, narrow, norm_in))


def test_squares_within_fp16s_range_are_not_reported():
    torch.manual_seed(0)
    assert not norm_findings(train(NORMS["rsqrt"], x=torch.randn(ROWS, WIDTH)))


def test_a_variance_that_overflows_is_reported():
    def layer_norm(x):
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + EPS)

    x = 4 * rows_with_outliers()
    (finding,) = norm_findings(train(layer_norm, x=x))
    assert finding.evidence["elements"] == zero_rows(layer_norm, x) > 0


def test_a_root_without_rows_is_reported_by_its_elements():
    (finding,) = norm_findings(train(lambda x: x * torch.rsqrt((x * x).mean(-1) + EPS)[:, None]))
    zeros = zero_rows(NORMS["rsqrt of a product"])
    assert f"The values divided by {zeros} of its {ROWS} elements, or their roots, became zero" in finding.message


def test_a_scalar_infinite_root_is_reported_as_zeroing_everything():
    (finding,) = norm_findings(train(lambda x: x * torch.rsqrt((x * x).mean() + EPS)))
    assert "All values that are divided by it, or its root, became zero" in finding.message


def test_a_root_that_is_no_divisor_is_not_reported():
    def bounded(x):
        return x + (x * x).sum(-1, keepdim=True).sqrt().clamp(max=4.0)

    assert not norm_findings(train(bounded))


def test_a_root_of_an_infinity_without_a_square_or_sum_is_not_reported():
    def distances(x):
        far = torch.full_like(x, torch.inf).where(x > 1, x.abs() + 1)
        return torch.rsqrt(far)

    assert not norm_findings(train(distances))


def test_roots_under_a_non_finite_loss_are_not_reported():
    x = rows_with_outliers()
    x[0, 0] = torch.nan
    assert not norm_findings(train(NORMS["rsqrt"], x=x))


def test_at_most_three_modules_are_listed():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Norm(NORMS["sqrt"], torch.float16) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Inspector(model, second=[0]) as inspector, torch.autocast("cpu", torch.float16):
        hidden = model[0](rows_with_outliers())
        sum(norm(hidden).float().mean() for norm in model[1:]).backward()
        optimizer.step()
    (finding,) = norm_findings(inspector.report())
    assert finding.evidence["modules"] == ["1", "2", "3"]
    assert finding.message.endswith("The same was found in '2' (Norm) and in '3' (Norm).")


def test_a_single_divisor_is_to_be_added_up_in_fp32():
    (finding,) = norm_findings(train(lambda x: x / (x.abs() * 20).sum()))
    assert "total = terms.float().sum()" in finding.code
    assert "parts.float().sum() / total" in finding.code
    (finding,) = norm_findings(train(NORMS["rsqrt"]))
    assert "rsqrt" in finding.code


def test_the_norm_of_gradients_that_too_high_a_loss_scale_made_infinite_is_not_reported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with Inspector(model, optimizers=optimizer, second=[0, 1]) as inspector:
        for _ in range(16):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(ROWS, WIDTH))
            optimizer.zero_grad()
            scaler.scale(out.float().square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    report = inspector.report()
    assert report.session.progress.skipped_steps
    assert not norm_findings(report)
