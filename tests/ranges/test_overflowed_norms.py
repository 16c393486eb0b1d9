"""Normalisations by hand whose squares overflow in FP16: which are named, with how many rows, and which are not."""

from __future__ import annotations

import pytest
import torch
from agreeing_reports import contradictions
from torch import nn

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.measure import overflowed_norms

ROWS, WIDTH, EPS = 32, 16, 1e-5
#: Each divides rows by a root of the mean or the sum of their squares.
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


def train(formula, narrow=torch.float16, norm_in=None, x=None, steps=3, of=None) -> RangeReport:
    """Train a model with a normalisation by hand.

    Args:
        narrow: autocast's dtype; float32 for none.
        norm_in: the dtype in which the normalisation is computed; None for that of its input.
        of: the part of the model that is inspected; None for all of it.
    """
    torch.manual_seed(1)
    model = Model(formula, norm_in or narrow)
    watched = of(model) if of else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=narrow is torch.float16)
    x = rows_with_outliers() if x is None else x
    with Inspector(watched) as inspector:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16 if narrow is torch.float32 else narrow, narrow != torch.float32):
                made = model(x)
            loss = nn.functional.cross_entropy(made.float(), torch.arange(ROWS) % 4)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    report = inspector.report()
    assert contradictions(report) == []
    return report


def told(report):
    return [finding for finding in report.findings if finding.id == "norm-overflows"]


def zero_rows(formula, x=None) -> int:
    """Return how many rows are zero in FP16 that are none in FP64."""
    torch.manual_seed(1)
    model = Model(formula, torch.float16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        x = model.lin(rows_with_outliers() if x is None else x)
        narrow, wide = formula(x), formula(x.double())
    return int(((narrow == 0).all(-1) & (wide != 0).any(-1)).sum())


@pytest.mark.parametrize("formula", NORMS.values(), ids=NORMS)
def test_rows_that_became_zero_are_counted_and_their_norm_is_named(formula):
    report = train(formula)
    (finding,) = told(report)
    zeros = zero_rows(formula)
    assert 0 < zeros < ROWS
    assert (finding.severity, finding.layer, finding.step) == ("error", "norm", 0)
    assert (finding.evidence["elements"], finding.evidence["of"]) == (zeros, ROWS)
    assert f"in {zeros} of {ROWS} rows what is divided by that root became zero" in finding.message
    assert report.verdict.healthy is False
    assert not report.events
    compile(finding.code, "fix", "exec")


@pytest.mark.parametrize(("narrow", "norm_in"), [(torch.float16, torch.float32), (torch.bfloat16, None)])
@pytest.mark.parametrize("formula", NORMS.values(), ids=NORMS)
def test_norms_in_fp32_and_bf16_are_not_named(formula, narrow, norm_in):
    assert not told(train(formula, narrow, norm_in))


def test_squares_within_fp16_are_not_named():
    torch.manual_seed(0)
    assert not told(train(NORMS["rsqrt"], x=torch.randn(ROWS, WIDTH)))


def test_a_variance_that_overflows_is_named():
    def layer_norm(x):
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + EPS)

    x = 4 * rows_with_outliers()
    (finding,) = told(train(layer_norm, x=x))
    assert finding.evidence["elements"] == zero_rows(layer_norm, x) > 0


def test_a_root_without_rows_is_told_by_its_elements():
    (finding,) = told(train(lambda x: x * torch.rsqrt((x * x).mean(-1) + EPS)[:, None]))
    zeros = zero_rows(NORMS["rsqrt of a product"])
    assert f"what is divided by {zeros} of that root's {ROWS} elements became zero" in finding.message


def test_a_root_of_infinity_alone_makes_everything_zero():
    (finding,) = told(train(lambda x: x * torch.rsqrt((x * x).mean() + EPS)))
    assert "everything that is divided by that root became zero" in finding.message


def test_a_root_of_the_scripts_own_is_passed_over():
    class Sqrt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sqrt()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    formula = NORMS["rsqrt"]
    own = lambda x: Sqrt.apply(x.square().mean(-1, keepdim=True)).clamp(max=1)  # noqa: E731
    (finding,) = told(train(lambda x: 0 * own(x) + formula(x)))
    assert finding.evidence["elements"] == zero_rows(formula)


def test_a_root_that_nothing_is_divided_by_is_not_named():
    def bounded(x):
        return x + (x * x).sum(-1, keepdim=True).sqrt().clamp(max=4.0)

    assert not told(train(bounded))


def test_an_infinity_that_no_square_or_sum_made_is_not_named():
    def distances(x):
        far = torch.full_like(x, torch.inf).where(x > 1, x.abs() + 1)
        return torch.rsqrt(far)

    assert not told(train(distances))


def test_roots_of_a_loss_that_is_not_finite_are_left_to_its_examination():
    x = rows_with_outliers()
    x[0, 0] = torch.nan
    assert not told(train(NORMS["rsqrt"], x=x))


def test_a_norm_of_another_model_is_not_told_of_this_one():
    assert not told(train(NORMS["rsqrt"], of=lambda model: model.head))
    assert [finding.layer for finding in told(train(NORMS["rsqrt"], of=lambda model: model.norm))] == [""]


def test_without_fp16_no_graph_is_searched(monkeypatch):
    searched = []

    def graph(starts, most):
        searched.append(most)
        return []

    monkeypatch.setattr(overflowed_norms, "graph", graph)
    train(NORMS["rsqrt"], torch.float32)
    assert not searched
    train(NORMS["rsqrt"], torch.float16)
    assert searched


def test_three_modules_are_told_and_no_more():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Norm(NORMS["sqrt"], torch.float16) for _ in range(5)))
    with Inspector(model) as inspector, torch.autocast("cpu", torch.float16):
        for _ in range(3):
            hidden = model[0](rows_with_outliers())
            sum(norm(hidden).float().mean() for norm in model[1:]).backward()
            model.zero_grad()
    (finding,) = told(inspector.report())
    assert finding.evidence["modules"] == ["1", "2", "3"]
    assert finding.message.endswith("The same was found in '2' and in '3'.")
