"""Lost updates, compared with an exact rounding of weight + update."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainings import inspected, take_step

from mpinspect import Inspector
from mpinspect.counting.cpu import available
from mpinspect.ranges.capture import updates
from mpinspect.ranges.capture.updates import lost_updates, unmoved
from mpinspect.ranges.windows.tensors import LostUpdates, TensorKey, TensorWindow

DTYPES = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}


def _oracle(weight: np.ndarray, update: np.ndarray, dtype: torch.dtype) -> tuple[int, int]:
    """Count the updates after which the stored weight is still the nearest number (ties to even), computed exactly."""
    stored = torch.tensor(weight).to(dtype)
    w16 = stored.to(torch.float64).numpy()
    codes = stored.view(torch.int16).numpy().astype(np.int32)
    counted = np.isfinite(w16) & np.isfinite(update) & (update != 0)
    lost = 0
    for index in np.flatnonzero(counted):
        total = w16[index] + np.float64(update[index])
        # numpy rounds float64 to float16 directly; a detour through float32 would round twice.
        if dtype == torch.float16:
            with np.errstate(over="ignore"):
                lost += bool(np.float16(total) == np.float16(w16[index]))
        else:
            lost += _rounds_back(Fraction(float(update[index])), int(codes[index]))
    return lost, int(counted.sum())


def _rounds_back(update: Fraction, code: int) -> bool:
    """Return whether weight + update rounds to the weight (ties to even), computed in rational arithmetic."""
    magnitude = code & 0x7FFF
    own = _bfloat16(magnitude)
    outward = -update if code & 0x8000 else update
    neighbours = [_bfloat16(magnitude + 1), _bfloat16(magnitude - 1) if magnitude else -_bfloat16(1)]
    distances = [abs(own + outward - neighbour) for neighbour in neighbours]
    return abs(outward) < min(distances) or (abs(outward) == min(distances) and magnitude % 2 == 0)


def _bfloat16(code: int) -> Fraction:
    return Fraction(float(np.array(code, np.int16).view(ml_dtypes.bfloat16)))


@pytest.mark.parametrize(
    ("dtype", "weight", "update", "lost"),
    [
        (torch.bfloat16, 1.0, -(2.0**-9), True),
        (torch.bfloat16, 1.0, 2.0**-8, True),
        (torch.bfloat16, 1.0, -(2.0**-9) * 1.01, False),
        (torch.bfloat16, 1.0, 2.0**-8 * 1.01, False),
        (torch.float16, 1.0, 2.0**-11, True),
        (torch.float16, 1.0, -(2.0**-12), True),
        (torch.float16, 1.0, 2.0**-11 * 1.001, False),
        (torch.float16, 1.0, -(2.0**-12) * 1.001, False),
        (torch.float16, -1.0, 2.0**-12, True),
        (torch.float16, 1.0 + 2.0**-10, 2.0**-11, False),
        (torch.float16, 0.0, 2.0**-25, True),
        (torch.float16, 0.0, -(2.0**-25) * 1.001, False),
        (torch.float16, 65504.0, 15.0, True),
        (torch.float16, 65504.0, 16.0, False),
    ],
)
def test_known_ties_round_to_even(dtype: torch.dtype, weight: float, update: float, lost: bool) -> None:
    assert lost_updates(torch.tensor([weight]), torch.tensor([update]), dtype).tolist() == [int(lost), 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_updates_agree_with_exact_rounding(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    n = 4000
    sign = rng.choice([-1.0, 1.0], n)
    weight = (np.exp2(rng.uniform(-28, 15.9, n)) * sign).astype(np.float32)
    update = (weight * np.exp2(rng.uniform(-16, -5, n)) * rng.choice([-1.0, 1.0], n)).astype(np.float32)
    weight[:50] = 0
    weight[50:300] = np.exp2(rng.integers(-24, 15, 250))
    update[:50] = np.exp2(rng.integers(-30, -20, 50))
    update[50:300] = weight[50:300] * np.exp2(rng.integers(-14, -6, 250)) * rng.choice([-1.0, 1.0], 250)
    assert tuple(lost_updates(torch.tensor(weight), torch.tensor(update), dtype).tolist()) == _oracle(
        weight, update, dtype
    )


@settings(max_examples=200, deadline=None)
@given(
    st.floats(width=16, allow_nan=False, allow_infinity=False),
    st.floats(width=32, min_value=-(2.0**20), max_value=2.0**20, allow_nan=False),
)
def test_any_fp16_weight_and_update_agree_with_exact_rounding(weight: float, update: float) -> None:
    arrays = np.array([weight], np.float32), np.array([update], np.float32)
    found = lost_updates(torch.tensor(arrays[0]), torch.tensor(arrays[1]), torch.float16)
    assert tuple(found.tolist()) == _oracle(*arrays, torch.float16)


# -- compiled loops ---------------------------------------------------------------------------------------------------------


def _by_torch(weight: torch.Tensor, update: torch.Tensor) -> dict[str, list[int]]:
    return {name: lost_updates(weight, update, dtype).tolist() for name, dtype in updates.STORAGE_DTYPES.items()}


def _compiled(weight: torch.Tensor, update: torch.Tensor) -> dict[str, list[int]]:
    lost = pytest.importorskip("mpinspect.counting.cpu.lost", exc_type=ImportError)
    assert lost.takes(weight, update)
    return {name: counts.tolist() for name, counts in updates.lost_updates_by_format(weight, update).items()}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=40))
def test_compiled_loops_agree_with_torch_for_any_bits(pairs: list[tuple[int, int]]) -> None:
    """The bits include infinities, NaNs and subnormals."""
    bits = np.array(pairs, np.uint32).view(np.float32)
    weight, update = torch.tensor(bits[:, 0]), torch.tensor(bits[:, 1])
    assert _compiled(weight, update) == _by_torch(weight, update)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_loops_agree_with_torch_for_every_weight_near_ties(dtype: torch.dtype) -> None:
    """All 65,536 codes, with updates of an eighth to a whole step in both directions, and slightly more or less."""
    stored = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    stored = stored[stored.isfinite()]
    exponent = torch.frexp(stored).exponent - 1
    info = torch.finfo(dtype)
    least = math.frexp(info.smallest_normal)[1] - 1
    for power in (-3, -2, -1, 0):
        step = torch.ldexp(torch.full_like(stored, info.eps), exponent.clamp(min=least) + power)
        for factor in (1.0, -1.0, 1 + 2.0**-20, -1 - 2.0**-20, 1 - 2.0**-20):
            assert _compiled(stored, step * factor) == _by_torch(stored, step * factor)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 4097, 300_001])
def test_compiled_loops_agree_with_torch_for_any_length(threads: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    weight = torch.randn(length, generator=generator)
    update = weight * torch.exp2(-16 * torch.rand(length, generator=generator)) * 0.1
    weight[::7], update[::5] = 0.0, 0.0
    assert _compiled(weight, update) == _by_torch(weight, update)
    assert lost_updates(weight, update, torch.bfloat16)[0] > 0 or length == 1


def test_channels_last_weights_are_read_in_memory_order() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 4, 3, 3, generator=generator).to(memory_format=torch.channels_last)
    update = (1e-3 * torch.randn(8, 4, 3, 3, generator=generator)).to(memory_format=torch.channels_last)
    assert _compiled(weight, update) == _by_torch(weight, update)


def test_torch_judges_tensors_that_the_compiled_loops_do_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, update = torch.randn(6, 4, generator=generator), 1e-3 * torch.randn(6, 4, generator=generator)
    expected = _by_torch(weight, update)
    # Tensors of different memory order, of another dtype, and with gaps.
    for one, other in ((weight, update.t().contiguous().t()), (weight.double(), update.double())):
        found = updates.lost_updates_by_format(one, other)
        assert {name: counts.tolist() for name, counts in found.items()} == expected
    gaps = torch.stack([weight, weight], dim=-1)[..., 0]
    found = updates.lost_updates_by_format(gaps, update)
    assert {name: counts.tolist() for name, counts in found.items()} == expected
    monkeypatch.setattr(available, "loops", lambda: None)
    found = updates.lost_updates_by_format(weight, update)
    assert {name: counts.tolist() for name, counts in found.items()} == expected


def test_unmoved_counts_weights_with_a_gradient_only() -> None:
    before, after = torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0]), torch.tensor([1.0, 1.5, 1.0, 2.0, float("-inf")])
    gradient = torch.tensor([0.5, 0.5, 0.0, float("inf"), 0.5])
    assert unmoved(before, after, gradient).tolist() == [1, 2]


def _updates(inspector: Inspector, name: str = "weight") -> TensorWindow:
    return inspector.session().totals()[TensorKey(name, "update")]


def _train(model: nn.Module, lr: float, **options: object) -> Inspector:
    x = torch.ones(1, 4, dtype=next(model.parameters()).dtype)
    return inspected(model, lambda _: model(x).sum(), 3, lr=lr, **{"optimizers": None, **options})


def test_updates_of_fp32_weights_are_estimated_for_each_format() -> None:
    """With weight 1, gradient 1 and rate 2^-12, the update is exactly half of FP16's step below 1."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    found = _updates(_train(model, 2.0**-12, capture=("update",)))
    assert found.lost_updates["bfloat16"] == LostUpdates(12, 12)
    # In steps 1 and 2 the weight rounds to 1, and the tie 1 - 2^-12 rounds back to 1, which is even. In step 3 the weight
    # is 1 - 2^-11, an odd code, so the tie rounds away from it.
    assert found.lost_updates["float16"] == LostUpdates(8, 12)
    assert (found.samples, found.histogram.nonzero) == (3, 12)
    assert found.histogram.max_abs == 2.0**-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_of_half_weights_are_captured_by_default_and_measured(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    name = str(dtype).removeprefix("torch.")
    lost = _updates(_train(model, 2.0**-13, loss_scale=1.0)).lost_updates
    assert lost == {name: LostUpdates(12, 12, measured=True)}
    moved = _updates(_train(model, 0.5, loss_scale=1.0)).lost_updates
    assert moved == {name: LostUpdates(0, 12, measured=True)}


def test_updates_are_captured_as_soon_as_the_weights_are_converted_to_16_bits() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    with Inspector(model, every=1, loss_scale=1.0) as inspector:
        for dtype, steps in ((torch.float32, 7), (torch.bfloat16, 9)):
            optimizer = torch.optim.SGD(model.to(dtype).parameters(), lr=2.0**-13)
            for _ in range(steps):
                take_step(optimizer, model(torch.ones(1, 4, dtype=dtype)).sum())
    # The first step after the conversion had begun before it.
    assert _updates(inspector).lost_updates == {"bfloat16": LostUpdates(32, 32, measured=True)}
    (finding,) = [each for each in inspector.report().findings if each.id == "updates-lost"]
    assert "in the 8 sampled steps" in finding.message
    assert inspector.session().notes == ()


def test_updates_of_fp32_weights_are_not_captured_by_default() -> None:
    assert not [key for key in _train(nn.Linear(4, 1), 0.1).session().totals() if key.kind == "update"]


def test_a_skipped_step_has_no_update() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with Inspector(model, capture=("update",)) as inspector:
        scaler.scale(model(torch.full((1, 4), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert inspector.session().totals() == {}


def test_a_learning_rate_of_zero_loses_no_updates() -> None:
    """The first step of a warm-up moves no weight, for a reason other than rounding."""
    model = nn.Linear(4, 1, bias=False).to(torch.float16)
    inspector = _train(model, 0.0, loss_scale=1.0)
    assert not [key for key in inspector.session().totals() if key.kind == "update"]
