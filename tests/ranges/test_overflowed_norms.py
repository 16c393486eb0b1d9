"""Hand-written normalisations whose squares overflow in FP16 are reported, and others are not."""

import pytest
import torch
from agreeing_reports import contradictions
from models import Of
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


def normalised(formula, dtype):
    """Make a model with a norm by this formula, computed in a dtype."""
    norm = Of(
        lambda self, x: self.weight.to(x.dtype) * formula(x.to(dtype)).to(x.dtype),
        weight=nn.Parameter(torch.ones(WIDTH)),
    )
    layers = {"lin": nn.Linear(WIDTH, WIDTH), "norm": norm, "head": nn.Linear(WIDTH, 4)}
    return Of(lambda self, x: self.head(self.norm(self.lin(x))), **layers)


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
    model = normalised(formula, norm_in or narrow)
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
    return [finding for finding in report.findings if finding.id == "overflow-in-operator"]


def overflowed_squares() -> int:
    """Return the number of elements whose square FP16 can't hold."""
    torch.manual_seed(1)
    model = normalised(None, torch.float16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        return int(model.lin(rows_with_outliers()).square().isinf().sum())


@pytest.mark.parametrize("formula", NORMS.values(), ids=NORMS)
def test_the_squares_that_overflow_are_counted_and_their_norm_is_reported(formula):
    report = train(formula)
    (finding,) = norm_findings(report)
    assert (finding.severity, finding.layer, finding.step) == ("warning", "norm", 1)
    assert finding.evidence["elements"] == overflowed_squares() > 0
    assert finding.evidence["operator"] in ("pow", "mul", "square")
    assert "# test_overflowed_norms.py" in finding.code
    assert report.verdict.healthy is False
    assert not report.events
    compile(finding.code, "fix", "exec")


@pytest.mark.parametrize(("narrow", "norm_in"), [(torch.float16, torch.float32), (torch.bfloat16, None)])
@pytest.mark.parametrize("formula", [NORMS["rsqrt"], NORMS["sqrt and epsilon"]])
def test_norms_in_fp32_and_bf16_are_not_reported(formula, narrow, norm_in):
    assert not norm_findings(train(formula, narrow, norm_in))


def test_squares_within_fp16s_range_are_not_reported():
    assert not norm_findings(train(NORMS["rsqrt"], x=torch.randn(ROWS, WIDTH)))


@pytest.mark.parametrize(
    ("formula", "operator"),
    [
        (lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(4 * x.var(-1, keepdim=True) + EPS), "var"),
        (lambda x: x / (x.abs() * 20).sum(), "sum"),
    ],
)
def test_other_divisors_that_overflow_are_reported(formula, operator):
    (finding,) = norm_findings(train(formula, x=4 * rows_with_outliers()))
    assert (finding.layer, finding.evidence["operator"]) == ("norm", operator)


def test_a_root_of_an_infinity_without_a_square_or_sum_is_not_reported():
    def distances(x):
        far = torch.full_like(x, torch.inf).where(x > 1, x.abs() + 1)
        return torch.rsqrt(far)

    assert not norm_findings(train(distances))


def test_the_norm_of_gradients_that_too_high_a_loss_scale_made_infinite_is_not_reported():
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
