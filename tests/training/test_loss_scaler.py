"""LossScaler decides as torch.amp.GradScaler does; its additional rules are compared with a simulation."""

import itertools
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import take_step

from mpinspect.training.loss_scaler import LossScaleCollapsedError, LossScaler, LossScaleWarning
from mpinspect.training.scale_rules import PRESETS
from mpinspect.training.skipped_steps import NonFinite

Scaler = torch.amp.GradScaler
Step = Callable[[Scaler, int], None]

# -- the same decisions as GradScaler ---------------------------------------------------------------------------------


TOKENS = torch.randint(12, (8, 4), generator=torch.Generator().manual_seed(0)).unbind()


class Training:
    """A small network and its training."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.embedding = nn.Embedding(12, 4, sparse="sparse" in kind)
        self.linear = nn.Linear(4, 3)
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        sparse, dense = list(self.embedding.parameters()), list(self.linear.parameters())
        both = [*sparse, *dense]
        if self.kind == "sparse adam":
            return [torch.optim.SparseAdam(sparse, lr=0.01), torch.optim.SGD(dense, lr=0.01)]
        if self.kind == "two optimizers":
            return [torch.optim.Adam(sparse), torch.optim.SGD(dense, lr=0.01, momentum=0.9)]
        if self.kind == "one fused of two":
            return [torch.optim.Adam(sparse, fused=True), torch.optim.SGD(dense, lr=0.01)]
        if self.kind in ("adam", "fused adam"):
            return [torch.optim.Adam(both, fused=self.kind != "adam")]
        return [
            torch.optim.SGD(both, lr=0.01, momentum=0.0 if "sparse" in self.kind else 0.9, fused="fused" in self.kind)
        ]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [*self.embedding.parameters(), *self.linear.parameters()]

    def step(self, scaler: Scaler, step: int, poison: float | None) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for micro_batch in range(3 if self.kind == "accumulation" else 1):
            scaler.scale(self.linear(self.embedding(TOKENS[(step + micro_batch) % 8])).square().mean()).backward()
        if poison is not None:
            gradient = self.weights[step % 3].grad
            (gradient._values() if gradient.is_sparse else gradient).view(-1)[0] = poison
        if self.kind == "clipping":
            scaler.unscale_(self.optimizers[0])
            nn.utils.clip_grad_norm_(self.weights, 0.1)
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update()


def poisons(steps: int) -> list[float | None]:
    """Return multipliers: an infinity or NaN in about one step of twenty, and several in a row."""
    chance = random.Random(7)
    plan = [chance.choice([math.inf, -math.inf, math.nan]) if chance.random() < 0.05 else None for _ in range(steps)]
    plan[100:108] = [math.inf] * 8
    return plan


KINDS = [
    *("sgd", "adam", "fused sgd", "fused adam", "two optimizers", "one fused of two"),
    *("clipping", "accumulation", "sparse sgd", "sparse adam"),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "interval", "steps"),
    [(kind, 7, 500 if kind == "sgd" else 200) for kind in KINDS] + [("sgd", 2000, 200)],
    ids=str,
)
def test_every_step_as_grad_scaler(kind: str, interval: int, steps: int) -> None:
    """Compares scale, growth tracker and weights at every step, bit for bit."""
    theirs, ours = Training(kind), Training(kind)
    stock, scaler = Scaler("cpu", growth_interval=interval), LossScaler("cpu", growth_interval=interval)
    plan = poisons(steps)
    for step, poison in enumerate(plan):
        theirs.step(stock, step, poison)
        ours.step(scaler, step, poison)
        assert scaler.get_scale() == stock.get_scale()
        assert scaler._get_growth_tracker() == stock._get_growth_tracker()
        assert all(map(torch.equal, ours.weights, theirs.weights)), step
    skipped = [step for step, poison in enumerate(plan) if poison is not None]
    assert (scaler.steps, scaler.skipped_steps) == (steps, len(skipped))
    assert [skip.step for skip in scaler.skips] == skipped[-100:]
    assert {skip.phase for skip in scaler.skips} == {"backward"}
    for before, after in itertools.pairwise(scaler.skips):
        assert before.next_loss_scale == before.loss_scale / 2
        if after.step == before.step + 1:
            assert after.loss_scale == before.next_loss_scale


@pytest.mark.parametrize("fused", [False, True])
def test_skips_caused_by_the_scale_itself(fused: bool) -> None:
    """The scale grows until FP32 overflows, backs off, and grows again."""
    runs: list[list[tuple[float, float]]] = []
    for scaler in (Scaler("cpu", 2.0**120, growth_interval=2), LossScaler("cpu", 2.0**120, growth_interval=2)):
        weight = torch.full((3,), 100.0, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=2.0**-10, fused=fused)
        runs.append([])
        for _ in range(60):
            take_step(optimizer, weight.square().sum(), scaler)
            runs[-1].append((scaler.get_scale(), weight[0].item()))
    assert runs[0] == runs[1]
    assert isinstance(scaler, LossScaler)
    assert scaler.skipped_steps > 10
    assert {skip.loss_scale for skip in scaler.skips} == {2.0**121}


def sgd(lr: float = 1.0, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of a single weight of 1.0."""
    return torch.optim.SGD([torch.ones((), requires_grad=True)], lr=lr, fused=fused)


def one_step(scaler: Scaler, gradient: float = 1.0, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """Run one iteration of the optimizer of a single weight, by default a new one."""
    optimizer = optimizer or sgd()
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    scaler.scale(weight * 1.0).backward()
    assert weight.grad is not None
    weight.grad.mul_(gradient)
    scaler.step(optimizer)
    scaler.update()
    return weight.detach()


def outcomes(scaler: Scaler, overflows: list[bool]) -> list[float]:
    """Return the scale after each step, given which steps overflow in the backward."""
    scales = []
    for overflow in overflows:
        one_step(scaler, math.inf if overflow else 1.0)
        scales.append(scaler.get_scale())
    return scales


def test_growth_is_refused_where_the_scale_would_not_be_finite() -> None:
    """FP32's largest power of two is 2^127. At the limit, the count of clean steps still restarts."""
    for scaler in (Scaler("cpu", 2.0**126, growth_interval=3), LossScaler("cpu", 2.0**126, growth_interval=3)):
        assert outcomes(scaler, [False] * 10) == [2.0**126] * 2 + [2.0**127] * 8
        assert scaler._get_growth_tracker() == 1


def test_it_is_a_grad_scaler_made_lazily_with_its_defaults() -> None:
    scaler, stock = LossScaler("cpu"), Scaler("cpu")
    assert isinstance(scaler, Scaler)
    assert scaler._scale is None
    ours = scaler.state_dict()
    del ours["mpinspect"]
    assert ours == stock.state_dict()
    assert LossScaler().is_enabled()
    scaled = scaler.scale([torch.ones(2), (torch.ones(()), torch.ones(()))])
    assert [type(part) for part in scaled] == [torch.Tensor, tuple]
    assert scaler._scale is not None
    assert (scaler._scale.dtype, scaler._growth_tracker.dtype) == (torch.float32, torch.int32)


def test_the_inverse_is_taken_in_fp64() -> None:
    """The inverse of a scale of 3 must be the FP32 value nearest to 1/3."""
    weight = torch.ones(1, requires_grad=True)
    with pytest.warns(LossScaleWarning, match="not a power of two"):
        scaler = LossScaler("cpu", 3.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert weight.grad is not None
    assert weight.grad.item() == (torch.tensor(3.0) * torch.tensor(1 / 3, dtype=torch.float32)).item()


def test_generators_of_losses_are_scaled_lazily() -> None:
    scaler = LossScaler("cpu", 4.0)
    asked: list[int] = []

    def losses() -> Iterator[torch.Tensor]:
        for index in range(2):
            asked.append(index)
            yield torch.tensor(math.inf if index else 1.0)

    scaled = scaler.scale(losses())
    assert asked == []
    assert next(scaled).item() == 4.0
    assert not scaler._iteration.losses.any_failed()
    assert next(scaled).item() == math.inf
    assert scaler._iteration.losses.any_failed()


# -- cost -------------------------------------------------------------------------------------------------------------


class CountOperations(TorchDispatchMode):
    """Records the operations on the device, in order. ``detach`` only makes a view and is excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_operations_on_the_device_as_grad_scaler(kind: str) -> None:
    """As many kernels and reads of the device as GradScaler; ``_local_scalar_dense`` is a read."""
    counted = []
    for scaler in (Scaler("cpu"), LossScaler("cpu")):
        training = Training(kind)
        training.step(scaler, 0, None)
        with CountOperations() as count:
            for step in range(1, 4):
                training.step(scaler, step, None)
        counted.append(count.operations)
    assert counted[0] == counted[1]
    assert any("_amp_update_scale_" in operation for operation in counted[1])


def test_the_scaler_holds_neither_a_graph_nor_a_large_tensor() -> None:
    scaler = LossScaler("cpu")
    weight = torch.ones(1000, requires_grad=True)
    scaler.scale((weight * 2)[0])
    scaler.scale(weight * 2)
    scaler.scale(torch.empty(0))
    kept = scaler._iteration.losses._kept
    assert [(loss.dim(), loss.requires_grad, loss.untyped_storage().nbytes()) for loss in kept] == [(0, False, 4)] * 2


def test_many_micro_batches_are_folded() -> None:
    scaler = LossScaler("cpu")
    for index in range(2000):
        scaler.scale(torch.tensor(math.nan if index == 3 else 1e30, dtype=torch.float64))
    assert len(scaler._iteration.losses) <= 257
    assert scaler._iteration.losses.any_failed()


def test_steps_on_the_device_are_read_after_a_while() -> None:
    """With a fused optimizer, outcomes are not read during the run, but the number of stored outcomes is bounded."""
    optimizer = sgd(0.0, fused=True)
    scaler = LossScaler.static(2.0**16, device="cpu")
    longest = 0
    for step in range(1500):
        one_step(scaler, math.nan if step % 5 == 0 else 1.0, optimizer)
        longest = max(longest, len(scaler._unread))
    assert 500 < longest <= 1024
    assert scaler.skipped_steps == 300
    assert not scaler._unread


# -- presets and rules ------------------------------------------------------------------------------------------------


def simulated_talk(overflows: list[bool]) -> list[float]:
    """NVIDIA, GTC 2018: start at 2^32, halve on overflow, double after 1000 iterations without one."""
    scale, clean, scales = 2.0**32, 0, []
    for overflow in overflows:
        clean = 0 if overflow else clean + 1
        if overflow:
            scale /= 2
        elif clean == 1000:
            scale, clean = scale * 2, 0
        scales.append(scale)
    return scales


def test_the_talks_preset() -> None:
    chance = random.Random(0)
    overflows = [chance.random() < (0.5 if step < 30 else 0.001) for step in range(3200)]
    expected = simulated_talk(overflows)
    assert len({*expected}) > 8
    assert any(later > earlier for earlier, later in itertools.pairwise(expected))
    assert outcomes(LossScaler.preset("talk", device="cpu"), overflows) == expected


def test_presets() -> None:
    assert set(PRESETS) == {"torch", "talk", "apex"}
    apex = LossScaler.preset("apex", device="cpu", growth_interval=1)
    assert outcomes(apex, [False] * 10)[-3:] == [2.0**24] * 3
    assert LossScaler.preset("torch").rules == LossScaler().rules
    assert LossScaler.preset("talk").rules.growth_interval == 1000
    with pytest.raises(ValueError, match="no preset 'tlak': there are 'torch', 'talk', 'apex'"):
        LossScaler.preset("tlak")


def simulated(
    overflows: list[bool], interval: int, floor: float, ceiling: float, hysteresis: int, tolerance: float, static: bool
) -> list[float]:
    """Simulate the rules in one loop, which ends where the scale would fall below the floor."""
    scale, clean, in_a_row, since_move, skips_since_move, scales = 8.0, 0, 0, 0, 0, []
    for overflow in overflows:
        since_move += 1
        before = scale
        if overflow:
            clean, in_a_row, skips_since_move = 0, in_a_row + 1, skips_since_move + 1
            if in_a_row >= hysteresis and skips_since_move / since_move >= tolerance:
                if scale == floor:
                    return scales
                scale = scale if static else max(scale / 2, floor)
        else:
            clean, in_a_row = clean + 1, 0
            if clean == interval:
                clean, scale = 0, (scale if static else min(scale * 2, ceiling))
        if scale != before:
            since_move = skips_since_move = 0
        scales.append(scale)
    return scales


@settings(max_examples=60, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 5),
    floor=st.sampled_from([0.25, 1.0, 8.0]),
    ceiling=st.sampled_from([8.0, 16.0, 2.0**20]),
    hysteresis=st.integers(1, 4),
    tolerance=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    static=st.booleans(),
)
def test_rules_against_a_simulation(overflows: list[bool], static: bool, **rules: Any) -> None:
    expected = simulated(overflows, static=static, **rules)
    rules["growth_interval"] = rules.pop("interval")
    factors = {"growth_factor": 1.0, "backoff_factor": 1.0} if static else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "10 steps in a row", LossScaleWarning)
        scaler = LossScaler("cpu", 8.0, **factors, **rules)
        assert outcomes(scaler, overflows[: len(expected)]) == expected
        assert scaler._get_growth_tracker() == scaler._state.clean_steps
        if len(expected) < len(overflows):
            with pytest.raises(LossScaleCollapsedError):
                one_step(scaler, math.nan)


@settings(max_examples=40, deadline=None)
@given(overflows=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5), fused=st.booleans())
def test_the_state_on_the_host_follows_the_one_on_the_device(overflows: list[bool], interval: int, fused: bool) -> None:
    scaler = LossScaler("cpu", growth_interval=interval)
    optimizer = sgd(0.0, fused)
    for overflow in overflows:
        one_step(scaler, math.inf if overflow else 1.0, optimizer)
    assert scaler.skipped_steps == sum(overflows)
    assert (scaler._state.scale, scaler._state.clean_steps) == (scaler.get_scale(), scaler._get_growth_tracker())


def test_a_static_scale_stays() -> None:
    scaler = LossScaler.static(128.0, device="cpu", growth_interval=2)
    assert outcomes(scaler, [False, False, True, False, False, False]) == [128.0] * 6
    assert scaler.is_static
    assert scaler.skipped_steps == 1
    assert not LossScaler("cpu").is_static
    with pytest.raises(TypeError, match="growth_factor is not an option of a static scale"):
        LossScaler.static(8.0, growth_factor=2.0)


def test_a_static_scale_that_never_starts_training() -> None:
    scaler = LossScaler.static(2.0**40, device="cpu")
    outcomes(scaler, [True] * 9 + [False])
    with pytest.warns(
        LossScaleWarning, match=r"10 steps in a row .* static loss scale 2\^40: .* never starts training"
    ):
        outcomes(scaler, [True] * 10)
    outcomes(scaler, [True] * 20)


def test_a_collapse_without_a_floor_is_warned_about_once() -> None:
    scaler = LossScaler("cpu", 2.0**-22)
    outcomes(scaler, [True] * 2)
    with pytest.warns(LossScaleWarning, match=r"fell to 2\^-25 and still steps overflow") as told:
        outcomes(scaler, [True] * 10)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert scaler.get_scale() == 2.0**-34


def test_bounds_and_window() -> None:
    scaler = LossScaler("cpu", 2.0**16)
    scaler.bound(2.0**4, 2.0**10)
    assert scaler.get_scale() == 2.0**10
    assert (scaler.window, scaler.rules.floor, scaler.rules.ceiling) == ((16.0, 1024.0), 16.0, 1024.0)
    one_step(scaler, math.inf)
    assert str(scaler.skips[-1]).endswith("goes from 1024 to 512 (within the window 16 .. 1024)")
    scaler.bound(2.0**12, 2.0**13)
    assert scaler.get_scale() == 2.0**12
    assert scaler.scale(torch.ones(())).item() == 2.0**12
    assert LossScaler("cpu", 4.0, floor=8.0).get_scale() == 8.0
    assert LossScaler("cpu", 4.0, ceiling=2.0).get_scale() == 2.0
    scaler.bound(2.0**12, 2.0**13, floor=2.0**-4)
    assert (scaler.window, scaler.rules.floor, scaler.rules.ceiling) == ((4096.0, 8192.0), 2.0**-4, 8192.0)
    with pytest.raises(ValueError, match="floor 16384 is above the window's lowest scale, 4096"):
        scaler.bound(2.0**12, 2.0**13, floor=2.0**14)
    with pytest.raises(ValueError, match="lowest scale 8 is above its highest, 4"):
        scaler.bound(8.0, 4.0)
    assert (scaler.window, scaler.get_scale()) == ((4096.0, 8192.0), 4096.0)


def test_bounds_in_the_middle_of_a_fused_run() -> None:
    """Outcomes that are only on the device are read before the rules change."""
    optimizer = sgd(0.0, fused=True)
    scaler = LossScaler("cpu", 2.0**16, growth_interval=3)
    for step in range(12):
        one_step(scaler, math.inf if step in (2, 7, 11) else 1.0, optimizer)
        if step == 8:
            assert (len(scaler._unread), scaler.get_scale()) == (9, 2.0**15)
            scaler.bound(2.0**2, 2.0**15)
            assert not scaler._unread
    assert scaler.get_scale() == 2.0**14
    assert [(skip.step, skip.loss_scale) for skip in scaler.skips] == [(2, 2.0**16), (7, 2.0**16), (11, 2.0**15)]
    assert scaler._get_growth_tracker() == 0


def test_an_overflow_at_the_floor() -> None:
    class Knows:
        def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite:
            return NonFinite("head", "head.weight", "inf")

        def forward(self) -> None:
            raise AssertionError("the forward was fine")

        def step_ended(self, *, forward_finite: bool) -> None:
            pass

    scaler = LossScaler("cpu", 4.0, floor=2.0, explainer=Knows(), growth_interval=3)
    outcomes(scaler, [True, False, False])
    with pytest.raises(LossScaleCollapsedError) as caught:
        one_step(scaler, math.inf)
    assert str(caught.value) == (
        "the loss scale stands at its floor 2, and still step 3 skipped: the gradient of 'head.weight' was infinite, the first "
        "in the backward, at layer 'head'; the loss scale stays at 2. Run 'head' in FP32 or BF16, clip its values, "
        "or lower the floor."
    )
    assert caught.value.skipped is scaler.skips[-1]
    # The iteration is complete, so training can continue after the error is caught.
    assert outcomes(scaler, [False, False, False]) == [2.0, 2.0, 4.0]
    assert (scaler.steps, scaler.skipped_steps) == (7, 2)


def test_learning_rates_need_no_change() -> None:
    """Gradients are unscaled, so the weights are bit-identical at any scale (a question from the talk)."""
    x, y = torch.randn(16, 6), torch.randn(16, 2)
    for make in (
        lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
        lambda weights: torch.optim.Adam(weights, lr=0.01),
    ):
        results = []
        for scale in (1.0, 2.0**-8, 2.0**7, 2.0**16, 2.0**32):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
            optimizer = make(model.parameters())
            scaler = LossScaler.static(scale, device="cpu")
            for _ in range(60):
                take_step(optimizer, (model(x) - y).square().mean(), scaler)
            assert scaler.skipped_steps == 0
            results.append([parameter.detach() for parameter in model.parameters()])
        for weights in results[1:]:
            assert all(map(torch.equal, weights, results[0]))


# -- reasons of skipped steps -----------------------------------------------------------------------------------------


def nan_steps(scaler: Scaler, steps: int, fused: bool = False) -> None:
    """Steps whose loss is not finite before it is scaled: NaN, infinite, and so on."""
    for step in range(steps):
        weight = torch.ones((), requires_grad=True)
        scaler.scale(weight * (math.inf if step % 2 else math.nan)).backward()
        scaler.step(torch.optim.SGD([weight], lr=1.0, fused=fused))
        assert weight.item() == 1.0
        scaler.update()


def test_a_forward_that_fails_lowers_the_scale_as_in_grad_scaler() -> None:
    stock, scaler = Scaler("cpu", 8.0), LossScaler("cpu", 8.0, growth_interval=2000)
    nan_steps(stock, 40)
    with pytest.warns(LossScaleWarning) as told:
        nan_steps(scaler, 40)
    assert scaler.get_scale() == stock.get_scale() == 8.0 * 2.0**-40
    assert [str(warning.message)[:60] for warning in told] == [
        "step 0 skipped: the loss was not finite before it was scaled",
        "the loss scale fell to 2^-25 and still steps overflow: the s",
    ]
    assert "forward_nonfinite='hold' leaves it as it is" in str(told[0].message)
    assert {skip.phase for skip in scaler.skips} == {"forward"}


@pytest.mark.parametrize("fused", [False, True])
def test_hold_does_not_change_the_scale(fused: bool) -> None:
    scaler = LossScaler("cpu", 8.0, growth_interval=5, forward_nonfinite="hold")
    outcomes(scaler, [False] * 3)
    with pytest.warns(LossScaleWarning, match="leave the scale as it is") as told:
        nan_steps(scaler, 40, fused)
    assert len(told) == 1
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.skipped_steps) == (8.0, 3, 40)
    assert {(skip.phase, skip.loss_scale, skip.next_loss_scale) for skip in scaler.skips} == {("forward", 8.0, 8.0)}
    # Those steps do not affect the scale, which still backs off after a true overflow.
    assert outcomes(scaler, [False, False, True]) == [8.0, 16.0, 8.0]


def test_hold_at_the_floor_is_not_a_collapse() -> None:
    scaler = LossScaler("cpu", 8.0, floor=8.0, forward_nonfinite="hold")
    with pytest.warns(LossScaleWarning):
        nan_steps(scaler, 3)
    with pytest.raises(LossScaleCollapsedError):
        one_step(scaler, math.inf)


def test_without_hold_the_floor_ends_a_run_whose_forward_fails() -> None:
    scaler = LossScaler("cpu", 8.0, floor=4.0)
    with (
        pytest.warns(LossScaleWarning, match="No loss scale helps"),
        pytest.raises(LossScaleCollapsedError, match="No loss scale helps where the forward is not finite"),
    ):
        nan_steps(scaler, 3)
    assert scaler.steps == 2


def test_every_loss_of_the_iteration_is_checked() -> None:
    """The first micro-batch's loss is infinite. Losses in lists and in larger tensors are checked too."""
    for losses in (
        [torch.tensor(math.inf), torch.tensor(1.0)],
        [[torch.tensor(1.0), (torch.tensor(math.nan),)]],
        [torch.tensor([[1.0, -math.inf]])],
    ):
        scaler = LossScaler("cpu")
        weight = torch.ones((), requires_grad=True)
        scaler.scale(weight * math.inf).backward()
        scaler._iteration.losses.forget()
        for loss in losses:
            scaler.scale(loss)
        scaler.step(torch.optim.SGD([weight], lr=1.0))
        with pytest.warns(LossScaleWarning):
            scaler.update()
        assert scaler.skips[-1].phase == "forward"


def test_an_fp16_loss_cannot_hold_the_scale() -> None:
    """The loss's own gradient is the scale, and 2^16 overflows FP16."""
    scaler = LossScaler("cpu", 2.0**16)
    weight = torch.ones((), requires_grad=True)
    for _ in range(2):
        weight.grad = None
        scaler.scale((weight * 3).half()).backward()
        scaler.step(torch.optim.SGD([weight], lr=0.0))
        scaler.update()
    assert len(scaler.skips) == 1
    assert "gradient of 'loss' was infinite" in str(scaler.skips[0])
    assert "the loss is FP16, which cannot hold 2^16: compute the loss in FP32" in str(scaler.skips[0])


class Explains:
    """An explainer that records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended: list[bool] = []

    def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite:
        gradient = optimizer.param_groups[0]["params"][0].grad
        self.asked.append(f"gradient {gradient.item()}")
        return NonFinite("layer", "layer.weight", "inf")

    def forward(self) -> NonFinite:
        self.asked.append("forward")
        return NonFinite("", "", "nan", "seen before the loss")

    def step_ended(self, *, forward_finite: bool) -> None:
        self.ended.append(forward_finite)


@pytest.mark.parametrize("when", ["in step", "asked before update", "in update"])
def test_the_explainer_is_asked_only_about_skipped_steps(when: str) -> None:
    """A fused optimizer's outcome is read on request, or in update() if the rules need it."""
    explainer = Explains()
    rules = {"floor": 2.0**-10} if when == "in update" else {}
    scaler = LossScaler("cpu", 8.0, explainer=explainer, **rules)
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=when != "in step")

    def train(value: float, gradient: float) -> None:
        weight.grad = None
        scaler.scale(weight * value).backward()
        weight.grad.mul_(gradient)
        scaler.step(optimizer)
        if when == "asked before update":
            assert scaler.last_step_skipped == (value != 1.0 or gradient != 1.0)
        scaler.update()

    train(1.0, 1.0)
    train(1.0, math.inf)
    with pytest.warns(LossScaleWarning, match="step 2 skipped"):
        train(math.nan, 1.0)
    assert explainer.asked == ["gradient inf", "forward"]
    assert explainer.ended == [True, True, False]
    assert [skip.culprit and skip.culprit.name for skip in scaler.skips] == ["layer.weight", ""]
    assert str(scaler.skips[0]) == (
        "step 1 skipped: the gradient of 'layer.weight' was infinite, the first in the backward, at layer 'layer'; "
        "the loss scale goes from 8 to 4"
    )


def test_a_fault_of_the_explainer_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def gradient(self, optimizer: torch.optim.Optimizer) -> NonFinite:
            raise ZeroDivisionError

        def forward(self) -> NonFinite:
            raise ZeroDivisionError

        def step_ended(self, *, forward_finite: bool) -> None:
            raise ZeroDivisionError

    scaler = LossScaler("cpu", 8.0, explainer=Broken())
    with caplog.at_level(logging.INFO, "mpinspect.training"):
        assert outcomes(scaler, [True, False]) == [4.0, 4.0]
    assert scaler.skips[-1].culprit is None
    assert [record.getMessage() for record in caplog.records] == [
        "the search for the cause of a skipped step failed",
        "ending the search for the cause of a skipped step failed",
        "step 0 skipped: a gradient was not finite; the loss scale goes from 8 to 4",
        "ending the search for the cause of a skipped step failed",
    ]


def test_last_step_skipped_is_set_for_each_optimizer() -> None:
    """With two optimizers on one scaler, the first one's infinity lowers the scale of both; outcomes are separate."""
    for fused in (False, True):
        scaler = LossScaler("cpu", 8.0)
        assert not scaler.last_step_skipped
        weights = [torch.ones((), requires_grad=True) for _ in range(2)]
        optimizers = [torch.optim.SGD([weight], lr=1.0, fused=fused) for weight in weights]
        scaler.scale(weights[0] + weights[1]).backward()
        weights[0].grad.fill_(math.inf)
        # Unscaled in the other order: torch accumulates the flags in the first optimizer's.
        scaler.unscale_(optimizers[1])
        for optimizer, bad in zip(optimizers, (True, False), strict=True):
            scaler.step(optimizer)
            if not fused:
                assert scaler.last_step_skipped is bad
                assert scaler.found_inf.item() == float(bad)
        scaler.update()
        assert scaler.last_step_skipped is False
        assert scaler.found_inf.item() == 0.0
        assert (scaler.found_inf.dim(), scaler.found_inf.dtype) == (0, torch.float32)
        assert [weight.item() for weight in weights] == [1.0, 0.0]
        assert scaler.get_scale() == 4.0
        assert scaler.skipped_steps == 1


def test_an_iteration_that_is_only_unscaled() -> None:
    """A loop may skip a step because of the norm and still call update(), as GradScaler allows."""
    scaler = LossScaler("cpu", 8.0)
    weight = torch.ones((), requires_grad=True)
    scaler.scale(weight * math.inf).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    scaler.update()
    with pytest.warns(LossScaleWarning):
        assert (scaler.get_scale(), scaler.skipped_steps, scaler.steps) == (4.0, 1, 1)


# -- invalid input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60, 2.0**-128, 2.0**128])
def test_impossible_scales_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"init_scale is .*: a loss scale must be finite, above 0"):
        LossScaler("cpu", bad)
    with pytest.raises(ValueError, match="init_scale is "):
        LossScaler.static(bad)
    scaler = LossScaler("cpu", 8.0)
    one_step(scaler)
    scaler.scale(torch.ones(()))
    for new in (bad, torch.tensor(bad)):
        with pytest.raises(ValueError, match=r"new_scale is .*: a loss scale must be finite, above 0"):
            scaler.update(new)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.steps) == (8.0, 1, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"growth_factor": 0.5}, "growth_factor is 0.5: it must be 1 or more"),
        ({"growth_factor": math.inf}, "growth_factor is inf"),
        ({"growth_factor": math.nan}, "growth_factor is nan"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0: it must be above 0 and at most 1"),
        ({"backoff_factor": 1.5}, "backoff_factor is 1.5"),
        ({"growth_interval": 0}, "growth_interval is 0: it must be a whole number of steps, 1 or more"),
        ({"growth_interval": 2.5}, "growth_interval is 2.5"),
        ({"hysteresis": 0}, "hysteresis is 0: it must be a whole number of steps"),
        ({"tolerance": 1.0}, "tolerance is 1.0: it must be a share"),
        ({"tolerance": -0.1}, "tolerance is -0.1"),
        ({"floor": 0.0}, "floor is 0.0: a loss scale must be finite"),
        ({"ceiling": math.inf}, "ceiling is inf: a loss scale must be finite"),
        ({"floor": 8.0, "ceiling": 4.0}, "floor 8 is above ceiling 4"),
        ({"forward_nonfinite": "ignore"}, "forward_nonfinite is 'ignore': it must be 'back_off' or 'hold'"),
        ({"window": (8.0, 4.0)}, "lowest scale 8 is above its highest, 4"),
        ({"window": (0.0, 4.0)}, "lowest is 0.0: a loss scale must be finite"),
    ],
)
def test_invalid_rules_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        LossScaler("cpu", **options)


def test_settings_are_checked_too() -> None:
    scaler = LossScaler("cpu")
    for change, bad in (
        (scaler.set_growth_factor, 0.5),
        (scaler.set_backoff_factor, 2.0),
        (scaler.set_growth_interval, 0),
    ):
        with pytest.raises(ValueError, match="it must be"):
            change(bad)
    assert scaler.rules == LossScaler("cpu").rules
    scaler.set_growth_interval(2)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    assert outcomes(scaler, [False, False, True]) == [2.0**16, 2.0**18, 2.0**16]
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 2)
    # Written to GradScaler's own attribute, as some frameworks do.
    scaler._growth_interval = 1
    assert scaler.rules.growth_interval == 1
    assert outcomes(scaler, [False]) == [2.0**18]


def test_scales_that_are_not_numbers_are_refused() -> None:
    for bad in ("8", None, True):
        with pytest.raises(TypeError, match="init_scale must be a number"):
            LossScaler("cpu", bad)
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable"):
        LossScaler("cpu").scale(3.0)


def test_a_scale_other_than_a_power_of_two_warns() -> None:
    with pytest.warns(LossScaleWarning, match="loss scale 1000 is not a power of two") as told:
        scaler = LossScaler("cpu", 1000.0)
    assert told[0].filename == __file__
    one_step(scaler)
    scaler.scale(torch.ones(()))
    with pytest.warns(LossScaleWarning, match="loss scale 12 is not a power of two"):
        scaler.update(12.0)


def test_setting_the_scale() -> None:
    scaler, stock = LossScaler("cpu", 8.0, growth_interval=3), Scaler("cpu", 8.0, growth_interval=3)
    for one in (scaler, stock):
        outcomes(one, [False, False])
        weight = torch.ones((), requires_grad=True)
        one.scale(weight * 1.0).backward()
        weight.grad.fill_(math.inf)
        one.step(torch.optim.SGD([weight], lr=1.0))
        one.update(64.0)
        assert (one.get_scale(), one._get_growth_tracker()) == (64.0, 2)
        one.scale(torch.ones(()))
        one.update(torch.tensor(32.0))
        assert outcomes(one, [False]) == [64.0]
    assert (scaler.steps, scaler.skipped_steps) == (4, 1)
    assert (scaler.skips[0].loss_scale, scaler.skips[0].next_loss_scale) == (8.0, 64.0)


def test_new_scales_that_are_refused() -> None:
    scaler = LossScaler("cpu", 8.0, floor=4.0, ceiling=16.0)
    one_step(scaler)
    before = scaler.state_dict()
    for bad, words in (
        (2.0, "new_scale is 2, outside floor 4.0 and ceiling 16.0: move these with bound"),
        (torch.ones(2), r"a tensor of one element that requires no gradient, not one of shape \(2,\)"),
        (torch.ones((), requires_grad=True), "with requires_grad=True"),
    ):
        with pytest.raises(ValueError, match=words):
            scaler.update(bad)
    with pytest.raises(TypeError, match="new_scale must be a number"):
        scaler.update("8")
    assert scaler.state_dict() == before


def test_the_order_of_calls() -> None:
    scaler = LossScaler("cpu", 8.0)
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for call, name in ((scaler.step, "step"), (scaler.unscale_, "unscale_"), (lambda _: scaler.update(), "update")):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) before any scale\(\): every iteration begins with"):
            call(optimizer)
    scaled = scaler.scale(weight * 1.0)
    with pytest.raises(RuntimeError, match="no parameter of this optimizer has a gradient: call"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaled.backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError, match=r"already been called on this optimizer since the last update.* Call it once"
    ):
        scaler.unscale_(optimizer)
    assert weight.grad.item() == 1.0
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"is being called after step.*Clip between"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"already been called since the last update.*Every iteration ends"):
        scaler.step(optimizer)
    assert (weight.item(), scaler.get_scale()) == (0.0, 8.0)
    scaler.update()
    assert (scaler.steps, scaler._get_growth_tracker()) == (1, 1)


@pytest.mark.parametrize("unscale", [False, True])
def test_fp16_gradients_are_refused_unless_asked_for(unscale: bool) -> None:
    for allow in (False, True):
        scaler = LossScaler("cpu", 8.0, allow_fp16_gradients=allow)
        weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
        full = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([full, weight], lr=1.0)
        scaler.scale(weight.float().sum() + full.sum()).backward()
        call = scaler.unscale_ if unscale else scaler.step
        if allow:
            call(optimizer)
            assert weight.grad.tolist() == full.grad.tolist() == [1.0, 1.0]
            continue
        with pytest.raises(
            ValueError, match=r"Attempting to unscale FP16 gradients. The parameters are stored in FP16"
        ):
            call(optimizer)
        assert weight.grad.tolist() == full.grad.tolist() == [8.0, 8.0]
        assert (weight.tolist(), full.tolist(), scaler.get_scale()) == ([1.0, 1.0], [1.0, 1.0], 8.0)


def test_sparse_fp16_gradients_are_coalesced_first() -> None:
    """40000 + 40000 overflows FP16, although each value fits."""
    scaler = LossScaler("cpu", 2.0, allow_fp16_gradients=True)
    weight = torch.zeros(4, 1, dtype=torch.float16, requires_grad=True)
    scaler.scale(torch.ones(()))
    weight.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.full((2, 1), 40000.0, dtype=torch.float16), (4, 1), check_invariants=True
    )
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    assert scaler.last_step_skipped
    assert weight.grad.is_coalesced()
    scaler.update()
    assert scaler.get_scale() == 1.0


def test_a_disabled_scaler_has_no_effect() -> None:
    scaler = LossScaler("cpu", enabled=False)
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = weight * 1.0
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(-3.0)
    assert weight.item() == 0.0
    assert scaler.step(optimizer, lambda: 5.0) == 5.0
    assert (scaler.get_scale(), scaler.steps, scaler.skipped_steps, len(scaler.skips)) == (1.0, 0, 0, 0)
    assert not scaler.last_step_skipped
    assert not scaler.is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_scaler_is_disabled_as_in_grad_scaler() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not LossScaler("cuda").is_enabled()


# -- several processes ------------------------------------------------------------------------------------------------


def decisions(folder: Path) -> list[tuple[float, int | None, int, set[str]]]:
    """Train 6 clean steps, then 5 with a NaN in the loss of rank 0 only, then 3 clean ones, in each mode."""
    found = []
    for mode in ("hold", "back_off"):
        weight = torch.ones((), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scaler = LossScaler("cpu", 8.0, growth_interval=4, forward_nonfinite=mode)
        for step in range(14):
            optimizer.zero_grad()
            scaler.scale(weight * (math.nan if dist.get_rank() == 0 and 6 <= step < 11 else 1.0)).backward()
            dist.all_reduce(weight.grad)  # as DistributedDataParallel does
            scaler.step(optimizer)
            scaler.update()
        phases = {skip.phase for skip in scaler.skips}
        found.append((scaler.get_scale(), scaler._get_growth_tracker(), scaler.skipped_steps, phases))
    return found


def test_two_ranks_make_the_same_decisions(tmp_path: Path) -> None:
    holds, backs_off = zip(*forked_ranks.results(tmp_path, 2, decisions), strict=True)
    # One growth after 4 clean steps; 2 clean ones, 5 held, 2 more: another growth; 1 clean one.
    assert holds == ((32.0, 1, 5, {"forward"}),) * 2
    assert backs_off == ((0.5, 3, 5, {"forward"}), (0.5, 3, 5, {"backward"}))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_no_wait_of_its_own_on_a_gpu(fused: bool) -> None:
    """Only step() with an optimizer that is not fused may wait, as in GradScaler."""
    weight = torch.ones(8, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([weight], fused=fused)
    scaler = LossScaler()
    for step in range(8):
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(weight.square().mean()).backward()
            torch.cuda.set_sync_debug_mode("error" if fused else "default")
            scaler.step(optimizer)
            torch.cuda.set_sync_debug_mode("error")
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert scaler.steps == step + 1
    assert scaler.skipped_steps == 0


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_the_same_decisions_as_grad_scaler_on_a_gpu(fused: bool) -> None:
    results = []
    for scaler in (Scaler("cuda", growth_interval=3), LossScaler("cuda", growth_interval=3)):
        weight = torch.ones(8, device="cuda", requires_grad=True)
        optimizer = torch.optim.Adam([weight], fused=fused)
        results.append([])
        for step in range(40):
            optimizer.zero_grad()
            scaler.scale(weight.square().mean()).backward()
            if step % 7 == 5:
                weight.grad[step % 8] = math.nan
            scaler.step(optimizer)
            scaler.update()
            results[-1].append((scaler.get_scale(), scaler._get_growth_tracker(), weight.tolist()))
    assert results[0] == results[1]
    assert scaler.skipped_steps == 5
