"""second_opinion: its findings, and models that it must not disturb. That the model stays as it was: test_probe.py."""

import copy
import pickle

import pytest
import torch
from models import Of
from torch import nn

import mpinspect

F = nn.functional


def mean_square(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).float().square().mean()


def test_an_infinity_of_the_precision_has_its_operator_and_line():
    layers = {"linear": nn.Linear(8, 8), "scale": nn.Parameter(torch.tensor(14.3))}
    model = Of(lambda self, x: self.linear(x).half() * self.scale.half().exp(), **layers)
    (found,) = mpinspect.second_opinion(model, lambda model, x: model(x).float().mean(), torch.ones(4, 8))
    assert (found.id, found.severity) == ("overflow-in-operator", "warning")
    assert (found.evidence["operator"], found.evidence["dtype"]) == ("exp", "float16")
    assert found.evidence["line"].startswith("test_second_opinion.py:")
    assert found.evidence["largest"] > 65504


def test_more_bits_are_not_suggested_for_an_infinity_of_the_data():
    def loss(model, x):
        return mean_square(model, x / 0)

    (found,) = mpinspect.second_opinion(nn.Linear(8, 8), loss, torch.ones(4, 8))
    assert (found.id, found.severity) == ("breaks-in-fp32-too", "info")


def test_a_sum_that_stops_growing_has_its_module():
    class Hub(nn.Module):
        def forward(self, x):
            return torch.zeros(2, 8, dtype=x.dtype).index_put(
                (torch.zeros(2000, dtype=torch.long),), x, accumulate=True
            )

    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), Hub())
    (found,) = mpinspect.second_opinion(model, mean_square, torch.randn(2000, 8))
    assert (found.id, found.severity, found.layer) == ("sum-loses-terms", "warning", "2")
    assert found.evidence["value"] < found.evidence["exact"] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_step_has_no_findings(dtype):
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(dtype)
    assert (
        mpinspect.second_opinion(
            model, lambda model, x: model(x).float().square().mean(), torch.randn(2, 6, 16).to(dtype)
        )
        == ()
    )


def copying(self, x):
    """Copy and pickle the layer, and branch, while hooks and a dispatch mode are on it."""
    x = copy.deepcopy(self.layer)(x) + pickle.loads(pickle.dumps(self.layer))(x) + self.layer(x)
    return torch.cond(x.shape[0] > 2, lambda x: x * 2, lambda x: x / 0, (x,))


def test_a_step_that_copies_its_layers_and_branches():
    assert mpinspect.second_opinion(Of(copying, layer=nn.Linear(8, 8)), mean_square, torch.randn(4, 8)) == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padded_batch_whose_layers_take_nested_tensors():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    head = nn.Linear(16, 1)

    def loss(model, x):
        with torch.no_grad():
            features = encoder(x, src_key_padding_mask=torch.arange(6).expand(2, 6) > torch.tensor([[3], [6]]))
        return mean_square(model, features)

    assert mpinspect.second_opinion(head, loss, torch.randn(2, 6, 16)) == ()


def test_a_result_whose_sizes_exceed_its_storage():
    def loss(model, x):
        total = torch.zeros(1, dtype=torch.bfloat16).expand(1 << 33)
        return mean_square(model, x + torch.empty_strided((8,), (0,)).zero_().bfloat16() + total[:8])

    assert mpinspect.second_opinion(nn.Linear(8, 8), loss, torch.ones(4, 8)) == ()


def test_an_error_of_the_user_propagates_and_leaves_no_trace():
    def loss(model, x):
        model(x)
        raise RuntimeError("mine")

    model = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="mine"):
        mpinspect.second_opinion(model, loss, torch.ones(4, 8).bfloat16().float())
    assert not model._forward_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(
    ("model", "loss_fn", "error", "words"),
    [
        (lambda x: x, mean_square, TypeError, "not a torch.nn.Module"),
        (nn.Linear(8, 8), 3, TypeError, "loss_fn is of type int"),
        (nn.Linear(8, 8), lambda model, x: 1.0, TypeError, "not a tensor"),
        (nn.Linear(8, 8), lambda model, x: model(x), ValueError, "reduce it to one number"),
        (nn.Linear(8, 8), lambda model, x: model(x).sum().detach(), ValueError, "has no graph"),
    ],
)
def test_bad_input_is_named(model, loss_fn, error, words):
    with pytest.raises(error, match=words):
        mpinspect.second_opinion(model, loss_fn, torch.ones(4, 8))
