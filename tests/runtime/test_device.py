"""Streams and captures of devices, whose functions are replaced: no GPU is needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mpinspect.runtime import device as devices
from mpinspect.runtime.device import on_stream


@pytest.mark.parametrize(("device", "stream", "is_entered"), [(0, 7, False), (0, 8, True), (1, 7, True)])
def test_a_stream_is_entered_unless_it_and_its_device_are_current(
    device: int, stream: int, is_entered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    @contextmanager
    def enter(stream: object) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    wanted = SimpleNamespace(device=torch.device("cuda", device), cuda_stream=stream)
    with on_stream(wanted):
        assert entered == [wanted] * is_entered


def test_a_torch_that_raises_without_an_accelerator_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse() -> None:
        asked.append(True)
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(devices, "_found", None)
    monkeypatch.setattr(devices, "_asked", refuse)
    assert not devices.is_capturing()
    assert not devices.is_capturing()
    assert asked == [True]
