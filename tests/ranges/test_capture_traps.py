"""Situations in which naive hooks fail, one test each."""

import copy
import dataclasses
import gc
import io
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Of, cnn
from sharded_training import NO_FSDP2
from together import together
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from trainings import closure_of, cpu_scaler, inspected, sgd, take_step

import mpinspect
from mpinspect import Inspector, count_exponents
from mpinspect.ranges.analysis.ranges import NO_GRADIENT_SEEN
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow

ALL_KINDS = ("weight_gradient", "activation_gradient", "activation", "weight", "update")


def totals(inspector: Inspector) -> dict[TensorKey, TensorWindow]:
    """Return the counts, after asserting that the session has no notes."""
    session = inspector.session()
    assert session.notes == ()
    return session.totals()


def weight(inspector: Inspector, name: str) -> TensorWindow:
    return totals(inspector)[TensorKey(name, "weight_gradient")]


def gradient(inspector: Inspector, name: str) -> TensorWindow:
    return totals(inspector)[TensorKey(name, "activation_gradient")]


def summed(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Inspector:
    """Run one backward of the sum of the model's output under an inspector."""
    with Inspector(model, **options) as inspector:
        model(*inputs).sum().backward()
    return inspector


def of_ones(model: nn.Module, *shape: int, steps: int = 3, **options: Any) -> Inspector:
    """Train on the sum of the model's output for ones."""
    return inspected(model, lambda step: model(torch.ones(shape)).sum(), steps, **{"optimizers": None, **options})


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_a_gradient_is_counted_before_an_in_place_activation() -> None:
    """A full backward hook would raise an error here."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    with Inspector(model) as inspector:
        x = torch.randn(16, 4)
        model(x).sum().backward()
    before_relu = gradient(inspector, "0").histogram
    hidden = model[0](x)
    assert before_relu.zeros == int((hidden <= 0).sum())
    assert gradient(inspector, "1").histogram.zeros == 0


@dataclasses.dataclass
class _Output:
    value: torch.Tensor
    other: list[torch.Tensor]


@pytest.mark.parametrize(
    "pack",
    [
        lambda y: {"value": y, "note": None},
        lambda y: (y, 3),
        lambda y: [None, [y]],
        lambda y: _Output(y, []),
        lambda y: {"deep": (y, {"deeper": torch.ones(1, dtype=torch.int64)})},
    ],
    ids=["dict", "tuple", "list", "dataclass", "nested"],
)
def test_tensors_in_structured_outputs_are_counted(pack: Callable[[torch.Tensor], Any]) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        held.append(x * self.weight)
        return pack(held[0])

    held: list[torch.Tensor] = []
    model = nn.Sequential(Of(forward, weight=nn.Parameter(torch.ones(3))))
    with Inspector(model, capture=ALL_KINDS) as inspector:
        model(torch.ones(2, 3))
        held[0].sum().backward()
    assert gradient(inspector, "0").histogram.total == 6
    assert totals(inspector)[TensorKey("0", "activation")].histogram.total == 6


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout])
def test_an_uncalled_dropout_with_probability_zero_is_not_reported_as_uncovered(kind: type[nn.Module]) -> None:
    """Attention that passes ``dropout.p`` to a fused kernel never calls its dropout. A positive ``p`` is still reported."""

    model = Of(lambda self, x: self.fc(x), fc=nn.Linear(4, 4), none=kind(0.0), some=kind(0.5))
    for given, names in (({}, {"some"}), ({"include": "none"}, {"none"})):
        with Inspector(model, capture=("activation_gradient", "activation"), **given) as inspector:
            model(torch.ones(2, 4)).sum().backward()
        assert {name for name, _, _ in inspector.report().coverage.never_fired} == names
        assert not inspector.session().notes


def test_a_module_before_all_trainable_weights_needs_no_gradient() -> None:
    """Coverage distinguishes such a module from one that a detach or no_grad leaves without gradients."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.first, self.cut = nn.Tanh(), nn.Linear(4, 4), nn.Tanh()
            self.quiet, self.late, self.last = nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
            x = self.scale(x)
            with torch.no_grad():
                x = x + self.quiet(x)
            hidden = self.first(x)
            self.late(hidden if late else x)
            self.cut(hidden)
            return self.last(hidden)

    model = Odd()
    optimizer = sgd(model)
    needless = "frozen: nothing in it or before it needs a gradient"
    with Inspector(model, capture="activation_gradient") as inspector:
        model(torch.ones(2, 4), False).sum().backward()
        optimizer.step()
        reasons = {name: why for name, _, why in inspector.report().coverage.never_fired}
        assert reasons == {"scale": needless, "late": needless, "cut": NO_GRADIENT_SEEN, "quiet": NO_GRADIENT_SEEN}
        model(torch.ones(2, 4), True).sum().backward()
    report = inspector.report()
    reasons = {name: why for name, _, why in report.coverage.never_fired}
    # A later call that needs a gradient changes the reason.
    assert reasons == {"scale": needless, **dict.fromkeys(("late", "cut", "quiet"), NO_GRADIENT_SEEN)}
    assert not report.findings


# -- nested tensors, the user's defaults --------------------------------------------------------------------------------


def _nested_training(layout: torch.layout, broken_step: int | None = None) -> Inspector:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(step: int) -> torch.Tensor:
        rows = [torch.randn(length, 8) for length in (3, 5, 2)]
        if step == broken_step:
            rows[1][0, 0] = math.inf
        parts = model(torch.nested.nested_tensor(rows, layout=layout)).unbind()
        return sum(part.square().mean() for part in parts)

    return inspected(model, loss, 3, capture=("activation", "activation_gradient", "weight_gradient"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_the_values_of_nested_tensors_are_counted_and_watched(layout: torch.layout) -> None:
    session = _nested_training(layout).session()
    assert not session.notes
    counted = {key: window.histogram.total for key, window in session.totals().items()}
    rows = 3 * (3 + 5 + 2)
    for path, width in (("0", 16), ("1", 16), ("2", 4)):
        for kind in ("activation", "activation_gradient"):
            assert counted[TensorKey(path, kind)] == rows * width
    event = _nested_training(layout, broken_step=1).session().events[0]
    assert (event.step, event.phase, event.given, event.elsewhere) == (1, "forward", True, False)


def test_the_users_default_device_and_dtype_do_not_change_the_counts() -> None:
    """The inspector creates every tensor with an explicit device and dtype; the test sets the defaults meta and float64."""

    def trained(default: bool) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
        batches = [(torch.randn(16, 8, dtype=torch.bfloat16), torch.randint(4, (16,))) for _ in range(6)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
        scaler = cpu_scaler(1024.0)
        # The first step creates the optimizer's own tensors, before the defaults change.
        take_step(optimizer, model(batches[0][0]).float().sum(), scaler)
        if default:
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float64)
        try:
            with Inspector(model, optimizers=optimizer, scalers=scaler, capture=KINDS) as inspector:
                for x, y in batches:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x).float(), y)
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(optimizer)
                    scaler.update()
            return model.state_dict(), inspector.session(), inspector.report()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)

    (state, session, report), (other_state, other, other_report) = trained(False), trained(True)
    assert not other.notes
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert session.totals() == other.totals()
    assert session.measurements == other.measurements
    assert [str(finding) for finding in report.findings] == [str(finding) for finding in other_report.findings]


# -- torch.func, torch.compile ----------------------------------------------------------------------------------------


def test_torch_func_transforms_are_not_counted() -> None:
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    inspector = Inspector(model).attach()
    with pytest.warns(mpinspect.MpinspectWarning, match=r"torch\.func"):
        vmap(grad(lambda x: functional_call(model, parameters, (x,)).sum()))(torch.ones(5, 3))
    for _ in range(6):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    inspector.detach()
    assert inspector.session().progress.steps == 6
    assert inspector.session().totals()[TensorKey("weight", "weight_gradient")].samples == 6


def test_lazy_parameters_are_counted_and_integer_parameters_ignored() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    model.register_parameter("packed", nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    with Inspector(model, capture=ALL_KINDS) as inspector:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            model.zero_grad()
    found = totals(inspector)
    # Lazy parameters have neither shape nor hook before the first forward.
    assert found[TensorKey("0.weight", "weight_gradient")].samples == 2
    assert found[TensorKey("0", "activation_gradient")].samples == 3
    assert inspector.session().progress.steps == 3
    assert not [key for key in found if key.name == "packed"]


def test_a_layer_added_while_attached_produces_a_warning() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inspector = Inspector(model).attach()
    model[1] = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(mpinspect.MpinspectWarning, match=r"2 parameters were added to the model.*1\.weight"):
        inspector.detach()


def test_inspectors_can_attach_and_detach_while_other_threads_step() -> None:
    """torch iterates over its table of optimizer hooks while they run; changing it meanwhile would raise an error."""

    def work(_: int) -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        for _ in range(10):
            with Inspector(model):
                for _ in range(3):
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()

    together(4, work)


# -- accumulation, reuse, sharing ------------------------------------------------------------------------------------


def test_accumulation_counts_increments_not_the_running_sum() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model, 0.0)
    with Inspector(model) as inspector:
        for _ in range(4):
            model(torch.full((1, 1), 3.0)).sum().backward()
        optimizer.step()
    found = weight(inspector, "weight")
    assert model.weight.grad.item() == 12.0
    assert (found.samples, found.histogram.max_abs, found.histogram.total) == (4, 3.0, 4)
    assert inspector.session().progress.steps == 1


def test_a_module_used_twice_is_counted_twice_under_its_first_name() -> None:
    layer = nn.Linear(3, 3)
    inspector = summed(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(5, 3))
    assert gradient(inspector, "0").samples == 2
    assert weight(inspector, "0.weight").samples == 1
    assert TensorKey("2", "activation_gradient") not in totals(inspector)


def test_shared_parameters_are_counted_once_under_their_first_name() -> None:
    layers = {"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)}
    model = Of(lambda self, tokens: self.head(self.embedding(tokens)), **layers)
    model.head.weight = model.embedding.weight
    inspector = summed(model, torch.tensor([1, 2]))
    assert [key.name for key in totals(inspector) if key.kind == "weight_gradient"] == ["embedding.weight"]
    assert weight(inspector, "embedding.weight").histogram == count_exponents(model.head.weight.grad)


def test_a_layer_unfrozen_during_the_run_is_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with Inspector(model) as inspector:
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 0:
                reasons = {(name, kind): why for name, kind, why in inspector.report().coverage.never_fired}
                assert "frozen" in reasons["0.weight", "weight_gradient"]
                model[0].requires_grad_(True)
    # It is unfrozen after the second step begins, so it is counted from the third step.
    assert weight(inspector, "0.weight").samples == 1
    assert weight(inspector, "1.weight").samples == 3


def test_two_losses_with_retain_graph_are_counted_separately() -> None:
    model = nn.Linear(2, 2, bias=False)
    with Inspector(model) as inspector:
        y = model(torch.ones(1, 2))
        y.sum().backward(retain_graph=True)
        (4 * y).sum().backward()
    assert gradient(inspector, "").samples == 2
    assert gradient(inspector, "").histogram.max_abs == 4.0
    assert weight(inspector, "weight").peaks == {0: 1, 2: 1}


def test_autograd_grad_of_inputs_counts_activations_only() -> None:
    """A gradient penalty calls autograd.grad, which computes no gradients of parameters here."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with Inspector(model) as inspector:
        x = torch.ones(3, 2, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
    assert gradient(inspector, "0").samples == 1
    assert TensorKey("0.weight", "weight_gradient") not in totals(inspector)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_does_not_change_the_counts(set_to_none: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model, 0.0)
    with Inspector(model) as inspector:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.full((1, 1), 2.0)).sum().backward()
            optimizer.step()
    assert weight(inspector, "weight").peaks == {1: 3}


@pytest.mark.parametrize("is_stranger", [False, True], ids=["a part's", "another model's"])
def test_a_step_ends_once_however_many_optimizers_step(is_stranger: bool) -> None:
    model, stranger = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(1, 1)
    first, second = (sgd(each) for each in ((model, stranger) if is_stranger else model))
    with Inspector(model, optimizers=None if is_stranger else [first, second]) as inspector:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            first.step()
            second.step()
    assert inspector.session().progress.steps == 3


def _update_in_place(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
        parameter.grad.zero_()


def _update_data(parameter: torch.Tensor) -> None:
    parameter.data -= 0.1 * parameter.grad.data
    parameter.grad.data.zero_()


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("update", [_update_in_place, _update_data, _drop_gradient])
def test_updates_by_hand_end_a_step(update: Callable[[torch.Tensor], None]) -> None:
    model = nn.Linear(1, 1)
    with Inspector(model, every=2) as inspector:
        for _ in range(4):
            model(torch.ones(1, 1)).sum().backward()
            for parameter in model.parameters():
                update(parameter)
    assert inspector.session().progress.steps == 4
    assert weight(inspector, "weight").samples == 2


def test_a_step_of_lbfgs_with_several_closure_calls_is_one_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    closure = closure_of(optimizer, lambda: (model(torch.ones(4, 2)) - 3).square().mean())
    with Inspector(model) as inspector:
        optimizer.step(closure)
        optimizer.step(closure)
    assert inspector.session().progress.steps == 2


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_every_nth_step_is_sampled() -> None:
    inspector = of_ones(nn.Linear(1, 1), 1, 1, steps=7, every=3, watch=False)
    progress = inspector.session().progress
    assert (progress.steps, progress.sampled_steps) == (7, 3)
    assert weight(inspector, "weight").samples == gradient(inspector, "").samples == 3
    assert [window.first_step for window in inspector.session().windows] == [0, 3, 6]


def test_evaluation_is_not_counted() -> None:
    model = nn.Linear(1, 1)
    with Inspector(model, capture=ALL_KINDS) as inspector:
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 1))
        with torch.inference_mode():
            model(torch.ones(1, 1))
        model.train()
        model(torch.ones(1, 1)).sum().backward()
    assert totals(inspector)[TensorKey("", "activation")].samples == 1


def test_validation_in_train_mode_is_neither_counted_nor_a_step() -> None:
    model = nn.Linear(1, 1)
    inspector = of_ones(model, 1, 1, capture=ALL_KINDS, after_step=lambda step: model(torch.ones(1, 1)))
    assert totals(inspector)[TensorKey("", "activation")].samples == 3
    assert inspector.session().progress.steps == 3


# -- checkpointing ----------------------------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_does_not_count_the_recomputation(reentrant: bool) -> None:
    found = {}
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = _Checkpointed(kind)
        with Inspector(model, capture=ALL_KINDS) as inspector:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        found[kind] = totals(inspector)
    assert found[reentrant] == found[None]
    for index in range(3):
        for kind in ("activation", "activation_gradient"):
            assert found[reentrant][TensorKey(f"layers.{index}", kind)].samples == 1


# -- copies, pickles --------------------------------------------------------------------------------------------------


def test_deep_copies_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Inspector(model, capture=ALL_KINDS) as inspector:
        average = copy.deepcopy(model)
        average(torch.ones(3, 2)).sum().backward()
        shallow = copy.copy(model)
        shallow(torch.ones(3, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    # The shallow copy shares its submodules with the model, so its call counts too.
    assert gradient(inspector, "0").samples == 2


def test_an_attached_model_pickles_and_loads_without_mpinspect(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Inspector(model):
        path = tmp_path / "model.pt"
        torch.save(model, path)
        again = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
    assert torch.equal(again(torch.ones(1, 2)), model(torch.ones(1, 2)))
    program = (
        "import sys; sys.modules['mpinspect'] = None; import torch;"
        f"model = torch.load({str(path)!r}, weights_only=False); model(torch.ones(1, 2)).sum().backward(); print('fine')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "fine\n", result.stderr


def test_saving_a_hooked_output_produces_no_warning() -> None:
    model = nn.Linear(2, 2)
    with Inspector(model):
        torch.save(model(torch.ones(1, 2)).detach(), io.BytesIO())
        torch.save(model(torch.ones(1, 2)), io.BytesIO())


def test_forked_loader_workers_do_not_count() -> None:
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.ones(8, 2))
    with Inspector(model) as inspector:
        for (batch,) in DataLoader(data, batch_size=4, num_workers=2):
            model(batch).sum().backward()
    assert weight(inspector, "weight").samples == 2


# -- detaching and memory -----------------------------------------------------------------------------------------------


def test_detaching_removes_every_hook() -> None:
    scale, step = torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    model = cnn().model
    returned = nn.Module()
    returned.weight = nn.Parameter(torch.ones(2))
    returned.forward = lambda: returned.weight  # type: ignore[method-assign]
    for _ in range(2):
        with Inspector(model), Inspector(returned):
            assert torch.amp.GradScaler.scale is not scale
            model(torch.randn(2, 1, 8, 8)).sum().backward()
            returned().sum().backward()
    assert torch.amp.GradScaler.scale is scale
    assert torch.amp.GradScaler.step is step
    for module in (*model.modules(), *returned.modules()):
        assert not module._forward_hooks
        assert not module._forward_hooks_with_kwargs
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    for parameter in (*model.parameters(), *returned.parameters()):
        assert not parameter._backward_hooks
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None)
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


def test_tensors_and_graphs_are_released() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Inspector(model, capture=ALL_KINDS):
        y = model(torch.ones(1, 4))
        alive = weakref.ref(y)
        saved = weakref.ref(y.grad_fn._saved_result)
        y.sum().backward()
        gradient_of = weakref.ref(model[0].weight.grad)
        del y
        model.zero_grad()
        gc.collect()
        assert alive() is None
        assert saved() is None
        assert gradient_of() is None


def test_a_backward_after_detaching_is_not_counted() -> None:
    model = nn.Linear(2, 2)
    with Inspector(model) as inspector:
        y = model(torch.ones(1, 2))
    y.sum().backward()
    assert inspector.session().totals() == {}


def test_two_inspectors_on_one_model_count_the_same() -> None:
    model = cnn(dropout=0.0).model
    with Inspector(model) as outer, Inspector(model, every=2) as inner:
        model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert totals(outer) == totals(inner)


# -- tensors that break statistics -----------------------------------------------------------------------------------


def test_counts_do_not_overflow_in_the_tensors_own_dtype() -> None:
    """An FP16 sum of 70,000 ones would overflow; the counts are integers."""
    model = nn.Embedding(1, 70_000).to(torch.float16)
    inspector = summed(model, torch.zeros(1, dtype=torch.int64), loss_scale=1.0)
    found = weight(inspector, "weight").histogram
    assert (found.nonzero, found.infs, found.max_abs) == (70_000, 0, 1.0)


def test_uncoalesced_sparse_gradients_are_counted_with_their_zeros() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    inspector = summed(model, torch.tensor([1, 1, 4]))
    assert model.weight.grad.is_sparse
    found = weight(inspector, "weight").histogram
    assert (found.total, found.zeros, found.max_abs) == (30, 24, 2.0)


def test_complex_gradients_count_two_elements_each() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with Inspector(model) as inspector:
        model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    assert weight(inspector, "weight").histogram.total == 8


def test_empty_tensors_are_counted_as_empty() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inspector = summed(model, torch.ones(0, 2), capture=ALL_KINDS)
    assert gradient(inspector, "0").histogram.total == 0
    assert weight(inspector, "0.weight").histogram.zeros == 4


def test_zeros_in_fp32_do_not_count_as_flushed() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    inspector = summed(model, torch.randn(32, 4))
    (layer,) = (row for row in inspector.report().layers if (row.name, row.kind) == ("0", "activation_gradient"))
    assert layer.histogram is not None
    assert layer.histogram.zeros > 0
    assert layer.flushed_fraction.estimate == 0.0


# -- distributed ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.skipif(bool(NO_FSDP2), reason=NO_FSDP2)
def test_the_local_gradients_of_fsdp2_are_counted(one_rank: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for module in (*model, model):
        fully_shard(module)
    inspector = summed(model, torch.ones(2, 4))
    local = model[0].weight.grad.to_local()
    assert weight(inspector, "0.weight").histogram == count_exponents(local)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_ddp_counts_local_gradients(one_rank: None) -> None:
    model = nn.Linear(4, 1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    inspector = summed(wrapped, torch.ones(2, 4))
    assert weight(inspector, "weight").histogram == count_exponents(model.weight.grad)


def _parts_wrapped(model: nn.Sequential) -> nn.Module:
    model[0] = torch.compile(checkpoint_wrapper(model[0]), backend="eager")
    model.module = nn.DataParallel(model.module)
    return model


WRAPPINGS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled ddp": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "ddp of compiled": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")),
    "checkpointed": checkpoint_wrapper,
    "ddp of parts wrapped": lambda model: nn.parallel.DistributedDataParallel(_parts_wrapped(model)),
    "fsdp": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapped_model_has_the_names_of_the_bare_one(wrapping: str, one_rank: None) -> None:
    """A module that its author named ``module`` is not mistaken for a wrapper's."""

    def make() -> nn.Sequential:
        inner = OrderedDict(module=nn.Linear(4, 4), last=nn.Linear(4, 1))
        return nn.Sequential(OrderedDict([("0", nn.Linear(4, 4)), ("module", nn.Sequential(inner))]))

    torch._dynamo.reset()
    bare, options = make(), {"capture": ALL_KINDS, "include": ["module.*"], "exclude": "module.last.bias"}
    expected = Inspector(bare, **options).session()
    wrapped = WRAPPINGS[wrapping](make())
    session = summed(wrapped, torch.ones(2, 4), **options).session()
    names = [(info.name, info.kind, info.module, info.module_type) for info in session.watched]
    assert names == [(info.name, info.kind, info.module, info.module_type) for info in expected.watched]
    assert not [note for note in session.notes if "matches no" in note]
    assert session.info.model == "Sequential"
    if wrapping != "fsdp":  # Its gradients belong to flat parameters.
        assert session.totals()[TensorKey("module.last.weight", "weight_gradient")].histogram.total == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_the_output_of_a_compiled_submodule_is_counted() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 2), backend="eager"))
    inspector = summed(model, torch.ones(3, 4), capture=ALL_KINDS)
    assert gradient(inspector, "1").histogram.total == totals(inspector)[TensorKey("1", "activation")].histogram.total
    assert gradient(inspector, "1").histogram.total == 6


# -- errors and unusual loops -----------------------------------------------------------------------------------------


def test_an_error_while_counting_is_noted_and_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("out of order")

    monkeypatch.setattr("mpinspect.ranges.capture.tally.HostRows.count_together", broken)
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    inspector = Inspector(model).attach()
    with pytest.warns(mpinspect.MpinspectWarning, match="out of order"):
        model(torch.ones(1, 2)).sum().backward()
    for _ in range(4):
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    inspector.detach()
    assert inspector.session().progress.steps == 5
    assert any("training is not affected" in note for note in inspector.session().notes)


class StepsTwiceOver(torch.optim.SGD):
    """Its step calls its base's step, so torch's hooks run twice."""

    def step(self, closure: object = None) -> object:
        return super().step(closure)


def test_an_optimizer_step_that_calls_its_base_is_one_step() -> None:
    model = torch.nn.Linear(4, 4)
    sgd(model)  # torch wraps the base's step when it is first created.
    optimizer = StepsTwiceOver(model.parameters(), lr=0.1)
    session = of_ones(model, 2, 4, steps=5, optimizer=optimizer, capture=["weight_gradient", "update"]).session()
    assert session.progress.steps == 5
    assert {window.samples for window in session.totals().values()} == {5}


def test_torch_jit_trace_records_no_hooks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with mpinspect.Inspector(model) as inspector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, torch.ones(2, 4))
    assert torch.equal(traced(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert any("torch.jit.trace" in note for note in inspector.session().notes)


def test_a_parameter_list_that_is_never_called_adds_no_note() -> None:
    parameters = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3))])
    session = inspected(parameters, lambda step: parameters[0].square().sum(), 3, optimizers=None).session()
    assert session.notes == ()
    assert session.progress.steps == 3


def test_parameters_without_a_module_updated_by_hand_make_steps() -> None:
    """Neither a forward nor an optimizer ends a step here; micro-batches still belong to one step."""
    for micro_batches in (1, 3):
        weights = nn.ParameterList([nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))])
        with Inspector(weights) as inspector:
            for _ in range(10):
                for _ in range(micro_batches):
                    (torch.ones(3, 4) @ weights[0] + weights[1]).square().mean().backward()
                for weight in weights:
                    weight.data -= 1e-3 * weight.grad
                    weight.grad = None
        session = inspector.session()
        assert (session.progress.steps, session.progress.backwards) == (10, 10 * micro_batches)
        assert session.totals()[TensorKey("0", "weight_gradient")].samples == 10 * micro_batches


def test_an_unfinished_step_is_not_counted() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    with Inspector(model) as inspector:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if step < 3:
                optimizer.step()
    session = inspector.session()
    assert (session.progress.steps, session.progress.sampled_steps, session.progress.backwards) == (3, 3, 4)
    assert session.totals()[TensorKey("weight", "weight_gradient")].samples == 3
    with Inspector(model) as only:
        model(torch.ones(2, 4)).sum().backward()
    assert only.session().totals()[TensorKey("weight", "weight_gradient")].samples == 1


class Stateful(nn.Linear):
    """A module with its own ``__getstate__``."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "extra": 1}


def test_pickles_and_copies_contain_no_hook_of_the_inspector() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LSTM(2, 2), Stateful(2, 2))
    own = model.register_forward_hook(print)
    before, getters = pickle.dumps(model), [kind.__getstate__ for kind in (nn.Module, nn.RNNBase, Stateful)]
    with Inspector(model), Inspector(model):
        assert len(model[0]._forward_hooks) == 2
        assert pickle.dumps(model) == before
        copied = copy.deepcopy(model)
        assert [len(module._forward_hooks) for module in copied.modules()] == [1, 0, 0, 0, 0]
        saved = io.BytesIO()
        torch.save(model[0], saved)
        saved.seek(0)
        with torch.serialization.safe_globals([nn.Linear]):
            assert torch.equal(torch.load(saved, weights_only=True).weight, model[0].weight)
    assert [kind.__getstate__ for kind in (nn.Module, nn.RNNBase, Stateful)] == getters
    own.remove()


# -- between samples -----------------------------------------------------------------------------------------------------


def test_modules_have_no_hook_between_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.ranges.capture.model_hooks.compiled_graphs", lambda: 0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = sgd(model)
    users = model[0].register_forward_hook(lambda *_: None)
    hooked = []
    with Inspector(model, optimizers=optimizer, every=3, watch=False) as inspector:
        for _ in range(7):
            hooked.append([len(module._forward_hooks) for module in model.modules()])
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
    # The container needs no hook: it has no parameter of its own, and returns its last part's output.
    assert hooked == [[0, 2, 1, 1] if step % 3 == 0 else [0, 1, 0, 0] for step in range(7)]
    assert [len(module._forward_hooks) for module in model.modules()] == [0, 1, 0, 0]
    assert not any(module._forward_hooks_with_kwargs for module in model.modules())
    users.remove()
    assert {tensor.samples for tensor in inspector.session().totals().values()} == {3}


def test_parameters_without_other_hooks_have_no_hook_between_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inspector's hook stays before a hook that the user adds later, so it counts the unmodified gradient."""
    monkeypatch.setattr("mpinspect.ranges.capture.model_hooks.compiled_graphs", lambda: 0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model, 0.0)
    earlier = model.bias.register_hook(lambda gradient: gradient * 2)
    hooked = []
    with Inspector(model, optimizers=optimizer, every=3, watch=False) as inspector:
        for step in range(7):
            if step == 4:
                later = model.weight.register_hook(lambda gradient: gradient * 0)
            hooked.append([len(parameter._backward_hooks) for parameter in (model.weight, model.bias)])
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            assert model.weight.grad.tolist() == ([[1.0] * 3] * 2 if step < 4 else [[0.0] * 3] * 2)
            optimizer.step()
    assert hooked == [[1, 2], [0, 2], [0, 2], [1, 2], [1, 2], [1, 2], [2, 2]]
    totals = inspector.session().totals()
    assert (totals[TensorKey("weight", "weight_gradient")].histogram.zeros, len(model.weight._backward_hooks)) == (0, 1)
    # A hook that was registered before the inspector's doubles it.
    assert totals[TensorKey("bias", "weight_gradient")].histogram.min_exponent == 1
    assert {tensor.samples for tensor in totals.values()} == {3}
    earlier.remove()
    later.remove()


def test_detaching_between_samples_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.ranges.capture.model_hooks.compiled_graphs", lambda: 0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model, 0.0)
    of_ones(model, 1, 3, steps=1, optimizer=optimizer, optimizers=optimizer, every=3, watch=False)
    assert not model._forward_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_compiled_model_is_not_recompiled_between_samples() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    inspector = Inspector(model, optimizers=optimizer, every=3, watch=False).attach()
    for _ in range(7):
        compiled(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    with pytest.warns(mpinspect.MpinspectWarning, match=r"hooks do not run inside torch\.compile"):
        inspector.detach()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
