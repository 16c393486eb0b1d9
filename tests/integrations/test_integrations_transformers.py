"""Transformers' callback records the same as an Inspector in a plain loop, and leaves the training unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn
from trainers import LEARNING_RATE, Regressor, hooks_on, loss_of, make_batches, same_weights, train_by_hand

import mpinspect
from mpinspect.ranges.session import Session

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from mpinspect.integrations.transformers import InspectorCallback  # noqa: E402


class Model(Regressor):
    """Returns its loss, as the Trainer requires."""

    def __init__(self, break_at: int = -1) -> None:
        super().__init__()
        self.calls, self.break_at = 0, break_at

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += self.training
        if self.training and self.calls - 1 == self.break_at:
            raise RuntimeError("the data ran out")
        return {"loss": loss_of(self.net, batch)}


class Batches(torch.utils.data.Dataset):
    """Every item is a whole batch."""

    def __len__(self) -> int:
        return len(make_batches())

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"batch": make_batches()[index]}


class InOrder(transformers.Trainer):
    """Not shuffled."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(Batches())


def make_trainer(model: nn.Module, *callbacks: object, directory: str = "out", **options: object) -> Any:
    arguments = transformers.TrainingArguments(
        directory,
        **{
            "num_train_epochs": 1,
            "per_device_train_batch_size": 1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    trainer = InOrder(
        model,
        arguments,
        train_dataset=Batches(),
        eval_dataset=Batches(),
        data_collator=lambda items: items[0],
        callbacks=list(callbacks),
        optimizers=(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.fixture(autouse=True)
def _inside(monkeypatch, tmp_path):
    """Let the Trainer write into a temporary directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_callback_records_the_same_as_an_inspector_in_a_plain_loop(accumulate, capsys):
    """Evaluations in between must not be recorded."""
    callback, model, bare = InspectorCallback(), Model(), Model()
    options = {"gradient_accumulation_steps": accumulate, "eval_strategy": "steps", "eval_steps": 1}
    make_trainer(model, callback, **options).train()
    make_trainer(bare, **options).train()
    expected, by_hand = train_by_hand(accumulate)
    session = callback.session()
    for key, window in expected.totals().items():
        assert session.totals()[key] == window, key
    assert session.progress == expected.progress
    assert session.notes == ()
    assert same_weights(model, bare)
    assert same_weights(model, by_hand)
    assert hooks_on(model) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(callback.report()) in printed.err


@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**127])
def test_a_loss_scaler_as_the_trainers_scaler(init_scale):
    scalers = mpinspect.LossScaler("cpu", init_scale), torch.amp.GradScaler("cpu", init_scale)
    models = Model(), Model()
    callback = InspectorCallback(print_report=False)
    for scaler, model, callbacks in zip(scalers, models, ([callback], []), strict=True):
        trainer = make_trainer(model, *callbacks, gradient_accumulation_steps=2, max_grad_norm=1.0)
        trainer.accelerator.scaler = scaler
        trainer.train()
    ours, torchs = scalers
    assert same_weights(*models)
    assert ours.get_scale() == torchs.get_scale()
    progress = callback.session().progress
    assert progress.steps == ours.steps == 4
    assert progress.skipped_steps == ours.skipped_steps
    assert (ours.skipped_steps > 0) == (init_scale > 2.0**100)
    assert progress.scales[0].scale == init_scale


def test_it_writes_below_the_output_directory(tmp_path):
    callback = InspectorCallback(print_report=False)
    make_trainer(Model(), callback).train()
    directory = tmp_path / "out" / "mpinspect"
    assert Session.load(directory).totals() == callback.session().totals()
    make_trainer(Model(), InspectorCallback(print_report=False, log_dir=None), directory="other").train()
    assert not (tmp_path / "other" / "mpinspect").exists()


def test_after_an_exception_the_next_training_starts_a_new_record(capsys):
    """The Trainer does not notify its callbacks of an exception."""
    callback, broken, model = InspectorCallback(log_dir=None), Model(break_at=5), Model()
    with pytest.raises(RuntimeError, match="the data ran out"):
        make_trainer(broken, callback).train()
    assert callback.session().progress.steps == 5
    assert "steps" not in capsys.readouterr().err
    make_trainer(model, callback).train()
    assert hooks_on(broken) == 0
    printed = capsys.readouterr().err
    assert printed.index("5 steps, 5 sampled") < printed.index("8 steps, 8 sampled")
    assert callback.session().progress == train_by_hand()[0].progress


def test_detach_ends_the_callbacks_inspection(capsys):
    callback, broken = InspectorCallback(log_dir=None), Model(break_at=5)
    with pytest.raises(RuntimeError, match="the data ran out"):
        make_trainer(broken, callback).train()
    callback.detach()
    callback.detach()
    assert hooks_on(broken) == 0
    assert capsys.readouterr().err.count("5 steps, 5 sampled") == 1


_BREAKS = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
import test_integrations_transformers as tests

tests.make_trainer(tests.Model(break_at=5), tests.InspectorCallback()).train()
"""


def test_after_an_exception_that_ends_the_process_the_report_is_printed(tmp_path):
    script = tmp_path / "breaks.py"
    script.write_text(_BREAKS)
    status, out, err = warm.run(tmp_path, [str(script)])
    assert (status, out) == (1, "")
    assert err.index("RuntimeError: the data ran out") < err.index("5 steps, 5 sampled")
    session = Session.load(tmp_path / "out" / "mpinspect")
    assert session.progress.ended
    assert session.ended_by is not None
    assert session.ended_by.text == "RuntimeError: the data ran out"


def test_evaluation_alone_is_not_recorded_as_training():
    callback = InspectorCallback()
    make_trainer(Model(), callback).evaluate()
    with pytest.raises(RuntimeError, match="train first"):
        callback.report()
