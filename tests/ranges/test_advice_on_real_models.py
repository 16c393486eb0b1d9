"""Healthy networks that need no loss scaling get info findings only."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from trainings import take_step

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport

datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn (mpinspect[examples])")


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = datasets.load_digits()
    return torch.tensor(digits.images / 16.0, dtype=torch.float32), torch.tensor(digits.target)


def _mlp(activation: Callable[[], nn.Module], hidden: int) -> nn.Module:
    widths = [64, *[128] * hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), activation()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 16, 10),
    )


HEALTHY = {
    "ReLU MLP": lambda: _mlp(nn.ReLU, 2),
    "4 sigmoid layers": lambda: _mlp(nn.Sigmoid, 4),
    "CNN with BatchNorm": _cnn,
}


def _train(model: nn.Module, steps: int = 60) -> RangeReport:
    images, labels = _digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(steps):
            batch = torch.randint(0, len(labels), (64,), generator=generator)
            take_step(optimizer, nn.functional.cross_entropy(model(images[batch]), labels[batch]))
    return inspector.report()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_network_has_info_findings_only(name: str) -> None:
    report = _train(HEALTHY[name]())
    assert report.loss_scale.available
    # The first sigmoid layer's gradients are tiny; a small share is flushed, without effect on the training.
    assert (report.loss_scale.needed, report.loss_scale.recommended) == (False, 1.0)
    # There is a window even so.
    assert report.loss_scale.lowest <= 2.0 < report.loss_scale.highest
    assert {finding.severity for finding in report.findings} <= {"info"}
    assert report.events == ()


def test_zeros_of_a_relu_do_not_count_as_flushed() -> None:
    report = _train(HEALTHY["ReLU MLP"]())
    first = next(layer for layer in report.layers if (layer.name, layer.kind) == ("1", "activation_gradient"))
    assert first.histogram is not None
    assert first.histogram.zeros > 0.1 * first.histogram.total
    assert first.flushed_fraction is not None
    assert first.flushed_fraction.estimate < 0.05


def test_the_gradient_of_a_bias_before_batch_norm_is_rounding_noise() -> None:
    noise = {layer.name for layer in _train(_cnn()).layers if layer.rounding_noise}
    assert {"1.bias", "4.bias"} <= noise
    assert not {"1.weight", "4.weight", "9.bias"} & noise
