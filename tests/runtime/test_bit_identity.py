"""Training with an inspector that captures every kind, and computes a step twice, is bit-identical to training without."""

from collections.abc import Callable

import pytest
import torch
from models import SUBJECTS
from trainings import take_step

from mpinspect import Inspector
from mpinspect.ranges.kinds import KINDS

STEPS = 4


def _run(
    name: str, step: Callable[..., None], inspect: bool
) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(7)
    subject = SUBJECTS[name]()
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses: list[float] = []
    inspector = Inspector(subject.model, capture=KINDS, every=1, second=True)
    if inspect:
        inspector.attach()
    for _ in range(STEPS):
        step(subject, optimizer, scaler, losses)
    inspector.detach()
    if inspect:
        assert inspector.session().progress.sampled_steps == STEPS
        assert not inspector.session().notes
        kinds = {key.kind for key in inspector.session().totals()}
        assert kinds == set(KINDS)
    return losses, subject.model.state_dict(), torch.get_rng_state()


def _plain(subject, optimizer, scaler, losses) -> None:  # type: ignore[no-untyped-def]
    loss = subject.loss(subject.model, subject.batch())
    take_step(optimizer, loss)
    losses.append(loss.item())


def _scaled_bfloat16_autocast(subject, optimizer, scaler, losses) -> None:  # type: ignore[no-untyped-def]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = subject.loss(subject.model, subject.batch())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())


@pytest.mark.parametrize("step", [_plain, _scaled_bfloat16_autocast])
@pytest.mark.parametrize("name", SUBJECTS)
def test_training_is_bit_identical(name: str, step: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lstm":
        # oneDNN's LSTM raises in BF16 on processors without BF16; torch's own layers run everywhere.
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    losses, state, random_state = _run(name, step, inspect=False)
    seen_losses, seen_state, seen_random_state = _run(name, step, inspect=True)
    assert seen_losses == losses
    assert torch.equal(seen_random_state, random_state)
    assert seen_state.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(seen_state[key], value), key
