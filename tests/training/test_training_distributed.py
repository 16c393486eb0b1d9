"""Two processes under DistributedDataParallel have one scale and the weights of one process on the whole batch.

The data are small integers and the learning rate a power of two, so that every sum of two steps is exact in any order, in FP16
too. If a step is skipped, a third one runs.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from equality import equal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpinspect import LossScaler, MixedPrecision

RANKS = 2
STEPS = 3
SCALE = 2.0**8
PRECISIONS = ["fp32", "fp16-amp", "fp16-master"]
SCALED = PRECISIONS[1:]
OVERFLOWS_AT = 1

Build = Callable[[str], tuple[MixedPrecision, nn.Module]]


def network() -> nn.Module:
    """Return a network 4 -> 4 -> 2 of small integers; its ReLU passes all of these inputs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]]))
        model[0].bias.fill_(1.0)
        model[2].weight.copy_(torch.tensor([[1.0, 0, -1, 0], [0, 1, 0, 1]]))
    return model


def batch(step: int) -> torch.Tensor:
    """Return eight rows of 0, 1 and 2."""
    return torch.tensor([[(row * 5 + column * 3 + step) % 3 for column in range(4)] for row in range(8)]).float()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25)


def scaler(precision: str) -> LossScaler | None:
    """Return a scaler like MixedPrecision's, with a smaller initial scale."""
    return LossScaler("cpu", SCALE, forward_nonfinite="hold") if precision in SCALED else None


def plain(precision: str) -> tuple[MixedPrecision, nn.Module]:
    model = network()
    return MixedPrecision(model, sgd(model), precision, scaler(precision)), model


def wrapped_after(precision: str) -> tuple[MixedPrecision, nn.Module]:
    mp, model = plain(precision)
    return mp, DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrapped_before(precision: str) -> tuple[MixedPrecision, nn.Module]:
    model = DistributedDataParallel(network())
    return MixedPrecision(model, sgd(model), precision, scaler(precision)), model


def train(
    build: Build, precision: str, *, parts: int = 1, spoiled: float | None = None, rank: int | None = None
) -> dict[str, Any]:
    """Train two steps on this rank's half of each batch (None: the whole batch). ``spoiled`` adds a step, OVERFLOWS_AT.

    The half is split into ``parts`` micro-batches; only the last one's backward reduces.
    """
    mp, model = build(precision)
    stepped = []
    for step in range(STEPS if spoiled else STEPS - 1):
        rows = batch(step) if rank is None else batch(step).chunk(RANKS)[rank]
        mp.zero_grad()
        for number, part in enumerate(rows.chunk(parts)):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = number == parts - 1  # as inside and outside no_sync()
            with mp.autocast():
                loss = model(part).float().sum() / 8 * (RANKS if rank is not None else 1)
            mp.backward(loss * (spoiled if spoiled and step == OVERFLOWS_AT else 1.0))
        stepped.append(mp.step())
    return {
        "weights": mp.weights(),
        "model": {name: tensor.clone() for name, tensor in mp.state_dict()["weights"].items()},
        "scale": mp.loss_scale,
        "stepped": stepped,
        "skips": [(skip.step, skip.phase) for skip in mp.skips],
    }


def refusal() -> str:
    model = DistributedDataParallel(network())
    try:
        MixedPrecision(model, sgd(model), "fp16-master")
    except ValueError as error:
        return str(error)
    return ""


def accumulates_with_no_sync(rank: int) -> dict[str, torch.Tensor]:
    mp, model = wrapped_after("fp16-master")
    for step in range(STEPS - 1):
        first, second = batch(step).chunk(RANKS)[rank].chunk(2)
        mp.zero_grad()
        with model.no_sync(), mp.autocast():
            loss = model(first).float().sum() / 4
        with model.no_sync():
            mp.backward(loss)
        with mp.autocast():
            loss = model(second).float().sum() / 4
        mp.backward(loss)
        mp.step()
    return mp.weights()


def finds_its_scale(rank: int) -> tuple[float, tuple[float, float] | None]:
    """The second rank's inputs, and so its activation gradients, are 2^6 times the first's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=2.0**-6), "fp16-amp", "auto")
    wrapped = DistributedDataParallel(model)
    random = torch.Generator().manual_seed(rank)
    for _ in range(26):
        mp.zero_grad()
        with mp.autocast():
            loss = wrapped(torch.randn(16, 4, generator=random)).float().square().mean() * 2.0 ** (6 * rank - 20)
        mp.backward(loss)
        mp.step()
    return mp.loss_scale, mp.scaler.window


def on_each_rank(folder: Path) -> dict[str, Any]:
    """Run every test that needs two processes in one pair."""
    rank = dist.get_rank()
    ours = 2.0**100 if rank == 1 else 1.0
    found: dict[str, Any] = {"refusal": refusal()}
    for precision in PRECISIONS:
        found[f"clean {precision}"] = train(wrapped_after, precision, rank=rank)
    for precision in SCALED:
        found[f"overflow {precision}"] = train(wrapped_after, precision, rank=rank, spoiled=ours)
        nan = math.nan if rank == 0 else 1.0
        found[f"nan {precision}"] = train(wrapped_after, precision, rank=rank, spoiled=nan)
    for precision in ("fp32", "fp16-amp"):
        found[f"before {precision}"] = train(wrapped_before, precision, rank=rank)
    found["parts"] = train(wrapped_after, "fp16-master", rank=rank, parts=2)
    found["no_sync"] = accumulates_with_no_sync(rank)
    found["auto"] = finds_its_scale(rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the two processes."""
    return forked_ranks.results(tmp_path_factory.mktemp("ranks"), RANKS, on_each_rank)


def by_hand(*steps: int) -> dict[str, torch.Tensor]:
    """Compute the same steps in FP64, where all results are exact."""
    model = network().double()
    for step in steps:
        model.zero_grad()
        (model(batch(step).double()).sum() / 8).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.25 * parameter.grad
    return {name: tensor.float() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_process_is_exact(precision):
    """One process equals the exact computation, so it can serve as a reference."""
    assert equal(train(plain, precision)["weights"], by_hand(0, 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_end_with_the_weights_of_one_process_on_the_whole_batch(ranks, precision):
    for found in ranks:
        assert found[f"clean {precision}"]["stepped"] == [True, True]
        assert equal(found[f"clean {precision}"]["weights"], by_hand(0, 1))


@pytest.mark.parametrize("precision", SCALED)
def test_an_overflow_on_one_rank_is_skipped_on_all(ranks, precision):
    for found in ranks:
        run = found[f"overflow {precision}"]
        assert run["stepped"] == [step != OVERFLOWS_AT for step in range(STEPS)]
        assert run["scale"] == SCALE / 2
        assert run["skips"] == [(OVERFLOWS_AT, "backward")]
        assert equal(run["weights"], by_hand(0, 2))


@pytest.mark.parametrize("precision", SCALED)
def test_a_forward_that_fails_on_one_rank_holds_the_scale_of_all(ranks, precision):
    for found in ranks:
        run = found[f"nan {precision}"]
        assert run["stepped"] == [step != OVERFLOWS_AT for step in range(STEPS)]
        assert run["scale"] == SCALE
        assert run["skips"] == [(OVERFLOWS_AT, "forward")]
        assert equal(run["weights"], by_hand(0, 2))


def test_a_model_that_is_wrapped_already_is_refused_where_weights_change_their_dtype(ranks):
    for found in ranks:
        assert "DistributedDataParallel" in found["refusal"]
        assert "wrap after" in found["refusal"]


@pytest.mark.parametrize("precision", ["fp32", "fp16-amp"])
def test_wrapped_before_or_after_is_the_same_where_weights_stay_in_fp32(ranks, precision):
    for found in ranks:
        assert equal(found[f"before {precision}"]["weights"], found[f"clean {precision}"]["weights"])


@pytest.mark.parametrize("way", ["clean fp16-amp", "before fp16-amp", "clean fp16-master"])
def test_checkpoints_have_the_same_names_with_and_without_the_wrapper(ranks, way):
    mp, _ = plain("fp16-amp")
    for found in ranks:
        assert list(found[way]["model"]) == list(mp.state_dict()["weights"])
        mp.load_state_dict({**mp.state_dict(), "weights": found[way]["model"]})
        assert equal(mp.weights(), by_hand(0, 1))


def test_micro_batches_without_reduction_add_up_to_the_whole_batch(ranks):
    for found in ranks:
        assert equal(found["parts"]["weights"], by_hand(0, 1))
        assert equal(found["no_sync"], by_hand(0, 1))


def test_ranks_that_see_different_gradients_agree_on_one_window(ranks):
    (first, window), (second, other) = (found["auto"] for found in ranks)
    assert first == second
    assert window is not None
    assert window == other
    assert window[0] <= first <= window[1]
