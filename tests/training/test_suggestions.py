"""The torch settings that are suggested for an observed training."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

from mpinspect import MixedPrecision
from mpinspect.training.forwards import ForwardShapes
from mpinspect.training.suggestions import Seen, suggestions

#: An A100 that trains a convolutional network in FP32: ten batches of one shape, all settings off.
PLAIN = Seen("cuda", (8, 0), 10, 1, True, 1.0, False, False, False)


def switches(seen: Seen) -> list[str]:
    """Return the settings that a text names."""
    names = ("cudnn.benchmark", "cuda.matmul.allow_tf32", "cudnn.allow_tf32")
    return [name for name in names if any(f"torch.backends.{name} = True" in said for said in suggestions(seen))]


def test_all_suggestions_together():
    assert switches(PLAIN) == ["cudnn.benchmark", "cuda.matmul.allow_tf32", "cudnn.allow_tf32"]
    assert len(suggestions(PLAIN)) == 3
    assert "100% of the weights" in suggestions(PLAIN)[1]


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_no_suggestions_without_an_nvidia_gpu(device):
    assert suggestions(replace(PLAIN, device=device, capability=None)) == []


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"cudnn_benchmark": True}, ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]),
        ({"input_shapes": 2}, ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]),
        ({"forwards": 9}, ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]),
        ({"forwards": 0, "input_shapes": 0}, ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]),
        ({"has_convolutions": False}, ["cuda.matmul.allow_tf32"]),
        ({"tf32_matmul": True}, ["cudnn.benchmark", "cudnn.allow_tf32"]),
        ({"tf32_convolution": True}, ["cudnn.benchmark", "cuda.matmul.allow_tf32"]),
        ({"capability": (7, 5)}, ["cudnn.benchmark"]),
        ({"capability": None}, ["cudnn.benchmark"]),
        ({"float32_fraction": 0.0}, ["cudnn.benchmark"]),
        ({"float32_fraction": 0.09}, ["cudnn.benchmark"]),
        ({"capability": (9, 0)}, ["cudnn.benchmark", "cuda.matmul.allow_tf32", "cudnn.allow_tf32"]),
        ({"cudnn_benchmark": True, "tf32_matmul": True, "tf32_convolution": True}, []),
    ],
)
def test_each_has_its_condition(change, left):
    assert switches(replace(PLAIN, **change)) == left


def test_the_share_of_weights_is_given():
    assert "25% of the weights" in suggestions(replace(PLAIN, float32_fraction=0.25))[1]


# -- observations -------------------------------------------------------------------------------------------------------


def test_shapes_of_training_forwards_are_counted():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    shapes = ForwardShapes(model)
    for size in (8, 8, 8, 9):
        model(torch.ones(2, 1, size, size))
    model.eval()
    model(torch.ones(5, 1, 20, 20))
    seen = shapes.seen("cpu", 0.5)
    assert (seen.forwards, seen.input_shapes, seen.has_convolutions, seen.float32_fraction) == (4, 2, True, 0.5)
    assert seen.capability is None
    shapes.detach()
    model.train()
    model(torch.ones(2, 1, 8, 8))
    assert shapes.seen("cpu", 0.5).forwards == 4


def test_keyword_and_nested_inputs_have_shapes():
    class Takes(nn.Module):
        def forward(self, x: dict[str, torch.Tensor], *, mask: torch.Tensor) -> torch.Tensor:
            return x["tokens"] * mask

    model = Takes()
    shapes = ForwardShapes(model)
    for length in (3, 3, 4):
        model({"tokens": torch.ones(length)}, mask=torch.ones(1))
    for length in (1, 2):
        model({"tokens": torch.ones(3)}, mask=torch.ones(length, 3))
    seen = shapes.seen("cpu", 0.0)
    assert (seen.forwards, seen.input_shapes, seen.has_convolutions) == (5, 4, False)


def test_the_number_of_stored_shapes_is_bounded():
    model = nn.Identity()
    shapes = ForwardShapes(model)
    for length in range(100):
        model(torch.ones(length))
    assert shapes.seen("cpu", 0.0).input_shapes == len(shapes._shapes) == 16


def test_the_switches_are_read_at_each_call(monkeypatch):
    model = nn.Linear(2, 2)
    shapes = ForwardShapes(model)
    for value in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", value)
        assert shapes.seen("cpu", 0.0).cudnn_benchmark is value


class BothSwitches:
    """torch's TF32 settings since 2.9, after the new one was set."""

    def __init__(self, fp32_precision: str) -> None:
        self.fp32_precision = fp32_precision

    @property
    def allow_tf32(self) -> bool:
        raise RuntimeError("you have used mix of the legacy and new APIs to set the TF32 status")


@pytest.mark.parametrize(("value", "allowed"), [("tf32", True), ("ieee", False)])
def test_torchs_newer_switch_is_read_where_the_old_one_refuses(monkeypatch, value, allowed):
    model = nn.Linear(2, 2)
    shapes = ForwardShapes(model)
    monkeypatch.setattr(torch.backends.cuda, "matmul", BothSwitches(value))
    assert shapes.seen("cpu", 0.0).tf32_matmul is allowed


def test_copies_and_pickles_of_the_model_are_not_counted():
    model = nn.Linear(2, 2)
    shapes = ForwardShapes(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.ones(1, 2))
    assert shapes.seen("cpu", 0.0).forwards == 0


def test_a_compiled_model_still_runs():
    model = nn.Linear(2, 2)
    ForwardShapes(model)
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("precision", "share"), [("fp32", 1.0), ("fp16-amp", 0.0), ("fp16-master", 0.0), ("bf16-amp", 0.0)]
)
def test_the_share_of_fp32_products_is_the_precisions(precision, share):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    assert mp._float32_fraction() == share
    assert mp.suggestions() == []  # no GPU under this model


def test_the_suggestions_are_in_the_report(monkeypatch):
    monkeypatch.setattr(ForwardShapes, "seen", lambda self, device, share: replace(PLAIN, float32_fraction=share))
    model = nn.Sequential(nn.Linear(4, 4))
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    assert str(mp).count("torch.backends.") == 3
    half = MixedPrecision(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp")
    assert str(half).count("torch.backends.") == 1
