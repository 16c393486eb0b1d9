"""Lightning's callback records the same as an Inspector in a plain loop, and leaves the training unchanged."""

import logging
import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn
from trainers import LEARNING_RATE, hooks_on, loss_of, make_batches, make_net, same_weights, train_by_hand

import mpinspect
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from mpinspect.integrations.lightning import InspectorCallback, _callback_class  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Let the Trainer write into a temporary directory; silence its messages on workers and hardware."""
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)
    # Warnings about data loaders' workers and tensorboardX, and Lightning's use of deprecated torch functions.
    for package in ("lightning", "pytorch_lightning", "torch.jit", "torch.utils._pytree"):
        warnings.filterwarnings("ignore", module=package)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.break_at = -1
        self.how: BaseException = RuntimeError("the data ran out")

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if number == self.break_at:
            raise self.how
        return loss_of(self.net, batch)

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("validation", loss_of(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def make_trainer(*callbacks: object, package: Any = lightning, **options: object) -> Any:
    fixed = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return package.Trainer(callbacks=list(callbacks), **{"logger": False, **fixed, **options})


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(make_batches(), batch_size=None)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_callback_records_the_same_as_an_inspector_in_a_plain_loop(accumulate, capsys):
    callback, module, bare = InspectorCallback(), Module(), Module()
    make_trainer(callback, accumulate_grad_batches=accumulate).fit(module, loader(), loader())
    make_trainer(accumulate_grad_batches=accumulate).fit(bare, loader(), loader())
    expected, by_hand = train_by_hand(accumulate)
    session = callback.session()
    assert session.windows == expected.windows
    assert session.progress == expected.progress
    assert session.notes == ()
    assert same_weights(module, bare)
    assert same_weights(module, by_hand)
    assert hooks_on(module) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"{callback.report()}\n"
    assert f"{8 // accumulate} steps, {8 // accumulate} sampled" in printed.err


@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**120])
def test_a_loss_scaler_as_the_precisions_scaler(init_scale):
    scalers = mpinspect.LossScaler("cpu", init_scale), torch.amp.GradScaler("cpu", init_scale)
    modules = Module(), Module()
    callback = InspectorCallback(print_report=False)
    for scaler, module, callbacks in zip(scalers, modules, ([callback], []), strict=True):
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        make_trainer(*callbacks, plugins=[plugin], accumulate_grad_batches=2, gradient_clip_val=1.0).fit(
            module, loader()
        )
    ours, torchs = scalers
    assert same_weights(*modules)
    assert ours.get_scale() == torchs.get_scale()
    progress = callback.session().progress
    assert progress.steps == ours.steps == 4
    assert progress.skipped_steps == ours.skipped_steps == (4 if init_scale > 2.0**100 else 0)
    assert progress.scales[0].scale == init_scale
    assert len(callback.session().events) == ours.skipped_steps


def test_a_loss_scaler_travels_with_the_checkpoint(tmp_path):
    def fit(scaler: torch.amp.GradScaler, **resume: str) -> Any:
        trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
        trainer.fit(Module(), loader(), **resume)
        return trainer

    path = str(tmp_path / "a.ckpt")
    first = mpinspect.LossScaler("cpu", 2.0**10, growth_interval=3, hysteresis=2)
    fit(first).save_checkpoint(path)
    second = mpinspect.LossScaler("cpu")
    fit(second, ckpt_path=path)
    assert second.get_scale() == first.get_scale() == 2.0**12
    assert second.state_dict() == first.state_dict()


class Adversaries(lightning.LightningModule):
    """Two networks and two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.judge = nn.Linear(4, 8), make_net()

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        generating, judging = self.optimizers()
        for network, optimizer in ((self.generator, generating), (self.judge, judging)):
            self.toggle_optimizer(optimizer)
            loss = self.judge(self.generator(batch[:, :4])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            assert all(parameter.grad is not None for parameter in network.parameters())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.SGD(self.judge.parameters(), lr=0.01)]


def test_manual_optimization_with_two_optimizers():
    callback = InspectorCallback(print_report=False)
    torch.manual_seed(0)
    module = Adversaries()
    make_trainer(callback).fit(module, loader())
    session = callback.session()
    assert session.progress.steps == 8
    totals = session.totals()
    for name in ("generator.weight", "judge.0.weight", "judge.2.bias"):
        assert totals[TensorKey(name, WEIGHT_GRADIENT)].samples == 8
    assert hooks_on(module) == 0


@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**120])
def test_a_loss_scaler_in_manual_optimization(init_scale):
    """Lightning updates the scale after each optimizer's step."""
    scalers = mpinspect.LossScaler("cpu", init_scale), torch.amp.GradScaler("cpu", init_scale)
    callback, modules = InspectorCallback(print_report=False), []
    for scaler, callbacks in zip(scalers, ([callback], []), strict=True):
        torch.manual_seed(0)
        modules.append(Adversaries())
        make_trainer(*callbacks, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)]).fit(modules[-1], loader())
    assert same_weights(*modules)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert callback.session().progress.skipped_steps == scalers[0].skipped_steps
    assert (scalers[0].skipped_steps > 0) == (init_scale > 2.0**100)


def test_an_exception_is_the_users_and_the_report_is_printed(capsys):
    callback, module = InspectorCallback(), Module()
    module.break_at = 5
    with pytest.raises(RuntimeError, match="the data ran out") as caught:
        make_trainer(callback).fit(module, loader())
    assert caught.value is module.how
    assert "5 steps, 5 sampled" in capsys.readouterr().err
    assert hooks_on(module) == 0
    assert callback.session().progress.ended
    error = callback.session().ended_by
    assert error is not None
    assert error.text == "RuntimeError: the data ran out"
    assert callback.report().verdict.healthy is None


def test_after_ctrl_c_lightning_exits_as_it_does_without(capsys):
    callback, module = InspectorCallback(), Module()
    module.break_at, module.how = 3, KeyboardInterrupt()
    with pytest.raises(SystemExit) as caught:
        make_trainer(callback).fit(module, loader())
    assert caught.value.code == 1
    assert "3 steps, 3 sampled" in capsys.readouterr().err
    assert callback.session().ended_by is None


def test_each_fit_has_its_own_record():
    callback = InspectorCallback(print_report=False, every=2)
    make_trainer(callback).fit(Module(), loader())
    first = callback.session()
    make_trainer(callback, max_steps=3).fit(Module(), loader())
    assert first.progress.steps == 8
    assert callback.session().progress.steps == 3
    assert callback.session().progress.sampled_steps == 2


def test_validation_alone_is_not_recorded_as_training():
    callback = InspectorCallback()
    make_trainer(callback).validate(Module(), loader(), verbose=False)
    with pytest.raises(RuntimeError, match="train first"):
        callback.report()


def test_it_writes_below_the_loggers_directory(tmp_path):
    callback = InspectorCallback(print_report=False)
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path, name="run")
    make_trainer(callback, logger=logger).fit(Module(), loader())
    directory = tmp_path / "run" / "version_0" / "mpinspect"
    assert Session.load(directory).totals() == callback.session().totals()
    assert list(directory.glob("events.out.tfevents*"))


def test_without_a_logger_no_file_is_written_unless_requested(tmp_path):
    make_trainer(InspectorCallback(print_report=False)).fit(Module(), loader())
    assert list(tmp_path.iterdir()) == []
    make_trainer(InspectorCallback(print_report=False, log_dir=tmp_path / "here")).fit(Module(), loader())
    assert Session.load(tmp_path / "here").progress.steps == 8


def test_a_failing_inspector_does_not_stop_the_training(monkeypatch):
    callback, module, (_, by_hand) = InspectorCallback(), Module(), train_by_hand()
    # Fails half-way, when some hooks are already on the model.
    monkeypatch.setattr("mpinspect.ranges.capture.optimizer_steps.listen", lambda capture: 1 / 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callback).fit(module, loader())
    (said,) = [str(warning.message) for warning in caught if warning.category is mpinspect.MpinspectWarning]
    assert "this training is not inspected" in said
    assert "ZeroDivisionError" in said
    assert hooks_on(module) == 0
    assert same_weights(module, by_hand)


def test_it_is_pickled_without_its_inspector():
    callback = InspectorCallback(every=3, print_report=False)
    make_trainer(callback).fit(Module(), loader())
    copy = pickle.loads(pickle.dumps(callback))
    assert type(copy) is InspectorCallback
    assert copy.inspector is None
    make_trainer(copy).fit(Module(), loader())
    assert copy.session().windows == callback.session().windows


def test_it_works_with_the_package_pytorch_lightning():
    package = pytest.importorskip("pytorch_lightning")
    old = type("Old", (package.LightningModule,), {**vars(Module), "__init__": _old_init})
    callback = InspectorCallback(print_report=False)
    make_trainer(callback, package=package).fit(old(), loader())
    assert callback.session().windows == train_by_hand()[0].windows


def _old_init(self: Any) -> None:
    super(type(self), self).__init__()
    self.net, self.break_at = make_net(), -1


def test_the_base_class_is_from_the_imported_lightning_package(monkeypatch):
    stub = types.ModuleType("pytorch_lightning")
    stub.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "pytorch_lightning", stub)
    assert _callback_class() is lightning.pytorch.Callback
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert _callback_class() is stub.Callback
    assert "lightning.pytorch" not in sys.modules


def test_each_process_of_several_writes_to_its_own_directory(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(_TWO_PROCESSES.format(tests=str(Path(__file__).parent), beside=str(Path(__file__).parents[1])))
    status, _, err = warm.run(tmp_path, [str(script)], modules=("lightning",))
    assert status == 0, err
    assert err.count("4 steps, 4 sampled") == 1
    for rank in ("rank0", "rank1"):
        assert Session.load(tmp_path / "log" / rank).progress.steps == 4


_TWO_PROCESSES = """
import sys
sys.path[:0] = [{tests!r}, {beside!r}]
import test_integrations_lightning as tests

if __name__ == "__main__":
    callback = tests.InspectorCallback(log_dir="log")
    tests.make_trainer(callback, devices=2, strategy="ddp_fork").fit(tests.Module(), tests.loader())
    try:
        callback.report()
    except RuntimeError as error:
        assert "processes of its own" in str(error)
    else:
        raise AssertionError("the report of another process")
"""
