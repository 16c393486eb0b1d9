"""mpinspect on an asynchronous device: a stand-in that counts blocking copies, and a GPU where there is one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_device
import torch
import warm
from torch import nn
from trainings import inspected, take_step

from mpinspect import Inspector
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.session import Session
from mpinspect.ranges.store.reader import read_session

TRAININGS = (
    "defaults",
    "all kinds",
    "saturated sigmoid",
    "scaler",
    "masters",
    "accumulation",
    "lost backwards",
    "scaled by hand",
    "states in FP16",
    "gan",
    "every=10",
    "budget",
    "late events",
)
OTHERS = (
    *("counts", "culprits", "default device", "moved", "capture", "inference"),
    *("broken loss", "loss without backward", "broken weights", "data"),
)
CHECKS = (*(f"never waits: {name}" for name in TRAININGS), *OTHERS)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of all checks, in one process, since torch can rename this device type only once per process."""
    reason = stand_in_device.why_not()
    if reason:
        pytest.skip(reason)
    stand_in_device.built()
    script = Path(__file__).parents[1] / "trainings_on_a_device.py"
    _, out, err = warm.run(tmp_path_factory.mktemp("device"), ["-W", "ignore", str(script)])
    return out + err


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_on_the_stand_in_device_passes(printed: str, check: str) -> None:
    assert f"held: {check}\n" in printed, printed[-3000:]


def test_faults_of_the_gallery_are_named_on_the_stand_in_device(printed: str, tmp_path: Path) -> None:
    """The others, too: ``python tests/gallery_on_a_device.py`` runs the whole gallery."""
    script = Path(__file__).parents[1] / "gallery_on_a_device.py"
    only = ["log_of_zero", "norm_at_zero", "forgotten_step", "weights_by_variance"]
    _, out, err = warm.run(tmp_path, ["-W", "ignore", str(script), "--jobs", "2", "--only", *only])
    assert "4 of 4 faults named with module and step" in out, out + err


# -- on a GPU ---------------------------------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8, **options: Any) -> Session:
    """Train under FP16 autocast with a scaler and an inspector, and return the session."""
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with Inspector(model, optimizers=optimizer, scalers=scaler, **options) as inspector:
        for step in range(steps):
            torch.manual_seed(step)
            x, y = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            take_step(optimizer, loss, scaler)
    return inspector.session()


def _assert_complete(session: Session, steps: int = 8, tensors: int = 7) -> None:
    assert session.notes == ()
    assert (session.progress.steps, session.progress.skipped_steps, session.events) == (steps, 0, ())
    counted = session.totals().values()
    assert len([total for total in counted if total.samples == steps]) == tensors, list(session.totals())


@pytest.mark.gpu
def test_a_default_device_that_is_a_gpu() -> None:
    torch.set_default_device("cuda")
    try:
        model = _model()
        _assert_complete(_train(model, torch.optim.Adam(model.parameters())))
    finally:
        torch.set_default_device(None)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD], ids=lambda make: make.__name__)
def test_all_kinds_with_a_fused_optimizer(make: Any) -> None:
    model = _model().cuda()
    session = _train(model, make(model.parameters(), lr=1e-3, fused=True), capture=KINDS)
    assert session.notes == ()
    assert {key.kind for key in session.totals()} == set(KINDS)


@pytest.mark.gpu
def test_a_model_that_moves_to_the_gpu_after_attaching() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer) as inspector:
        model.cuda()
        for _ in range(6):
            take_step(optimizer, model(torch.randn(32, 64, device="cuda")).square().mean())
    _assert_complete(inspector.session(), steps=6)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A process group with one rank."""
    distributed = pytest.importorskip("torch.distributed")
    file = tmp_path / "store"
    distributed.init_process_group(
        "nccl", init_method=f"file://{file}", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.gpu
def test_a_process_group_of_one(nccl: None) -> None:
    model = nn.parallel.DistributedDataParallel(_model().cuda(), device_ids=[0])
    _assert_complete(_train(model, torch.optim.AdamW(model.parameters())))


@pytest.mark.gpu
def test_sharded_parameters(nccl: None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _model().cuda()
    for module in (model[0], model[2], model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    session = inspected(model, lambda _: model(torch.randn(32, 64, device="cuda")).float().square().mean(), 8).session()
    assert session.notes == ()
    assert len([total for total in session.totals().values() if total.samples == 8]) >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model(mode: str) -> None:
    model = torch.compile(_model().cuda(), mode=mode)
    session = _train(model, torch.optim.Adam(model.parameters()))
    assert session.progress.steps == 8
    weights = [key for key in session.totals() if key.kind == "weight_gradient"]
    assert len(weights) == 4


@pytest.mark.gpu
def test_workers_of_a_data_loader_are_forked_while_the_gpu_is_in_use() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    model = _model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(2):
            for (x,) in DataLoader(TensorDataset(torch.randn(64, 64)), 16, num_workers=2):
                take_step(optimizer, model(x.cuda()).square().mean())
    _assert_complete(inspector.session())


@pytest.mark.gpu
def test_a_script_under_mpinspect_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "mpinspect", "run", "--log-dir", str(tmp_path / "run"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    session = read_session(next((tmp_path / "run").rglob("session.mpinspect")))
    assert (session.notes, session.progress.steps) == ((), 30)
    assert [total.samples for key, total in session.totals().items() if key.name == "0.weight"] == [12]


_SCRIPT = """
import torch
import warm
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(30):
    x, y = torch.randn(128, 256, device="cuda"), torch.randint(1000, (128,), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
