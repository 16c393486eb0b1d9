"""profile_kernels and read_trace: a CPU run is reported as without kernels; ranges name modules and are removed."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from trainings import take_step

import mpinspect
from mpinspect.kernels.capture.profiling import ModuleRanges, plain_parts, record_trace
from mpinspect.kernels.records import MODULE_RANGE

TRACES = Path(__file__).parents[1] / "data" / "traces"


class Training:
    """A small network's training step that counts its calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4)))
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        take_step(self.optimizer, self.loss(self.model(torch.ones(4, 8)), torch.tensor([0, 1, 2, 3])))


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture(autouse=True)
def no_hook_stays():
    yield
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks_always_called


def ranges(path: Path) -> list[str]:
    """Return the modules' ranges of a trace, in order of their start."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    named = [event for event in events if str(event.get("name", "")).startswith(MODULE_RANGE)]
    return [event["name"].removeprefix(MODULE_RANGE) for event in sorted(named, key=lambda event: event["ts"])]


def test_a_cpu_run_is_reported_as_without_a_gpu(training):
    report = mpinspect.profile_kernels(training.step)
    assert report.kernels == ()
    assert report.tensor_core_fraction is None
    assert "no GPU" in str(report)
    assert any("no-gpu" in finding.id for finding in report.findings)


def test_the_step_runs_warmup_plus_two_times(training):
    mpinspect.profile_kernels(training.step, warmup=1)
    assert training.calls == 3


def test_every_module_has_a_range(training, tmp_path):
    record_trace(training.step, tmp_path / "trace.json", warmup=0)
    assert ranges(tmp_path / "trace.json") == ["", "0", "1", "2", "2.0", "CrossEntropyLoss"]


def test_a_given_model_names_its_modules(training, tmp_path):
    holder = nn.ModuleDict({"net": training.model})
    record_trace(training.step, tmp_path / "trace.json", model=holder, warmup=1)
    assert ranges(tmp_path / "trace.json")[:3] == ["net", "net.0", "net.1"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_is_saved_on_request_and_can_be_read(training, tmp_path, name):
    report = mpinspect.profile_kernels(training.step, trace=tmp_path / name)
    assert ranges(tmp_path / name)
    again = mpinspect.read_trace(tmp_path / name)
    assert [finding.id for finding in again.findings] == [finding.id for finding in report.findings]


def test_a_compiled_model_is_not_recompiled_and_has_the_models_range(training, tmp_path):
    # After a compilation within a dispatch mode in other tests, Dynamo skips the function, such as nn.Sequential's forward.
    torch._dynamo.reset()
    compiled = torch.compile(training.model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(4, 8))

    def step() -> None:
        compiled(torch.ones(4, 8)).sum().backward()

    record_trace(step, tmp_path / "trace.json", warmup=1)
    assert set(ranges(tmp_path / "trace.json")) == {""}
    compiled(torch.ones(4, 8))


@pytest.mark.parametrize("when", ["warm-up", "recorded"])
def test_an_exception_of_the_step_propagates_and_ranges_are_removed(training, when):
    def step() -> None:
        training.step()
        if training.calls == (1 if when == "warm-up" else 5):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mpinspect.profile_kernels(step)
    # The profiler can be started again.
    assert mpinspect.profile_kernels(training.step).kernels == ()


def test_training_is_bit_identical_to_without(training):
    other = Training()
    mpinspect.profile_kernels(training.step, warmup=1)
    for _ in range(3):
        other.step()
    for mine, theirs in zip(training.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_errors_for_wrong_arguments_have_advice(training):
    with pytest.raises(TypeError, match=r"step must be a function.*lambda"):
        mpinspect.profile_kernels(training.model.state_dict())
    with pytest.raises(ValueError, match="warmup=-1"):
        mpinspect.profile_kernels(training.step, warmup=-1)
    with pytest.raises(ValueError, match=r"'pascal' is not a GPU known here"):
        mpinspect.profile_kernels(training.step, gpu="pascal")
    with pytest.raises(ValueError, match=r"'pascal' is not a GPU known here"):
        mpinspect.read_trace(TRACES / "a100_triton.json.gz", gpu="pascal")
    with pytest.raises(TypeError, match=r"model must be the torch.nn.Module.*int"):
        mpinspect.profile_kernels(training.step, model=3)
    with pytest.raises(TypeError, match=r"shapes must be what lint_shapes returns.*int"):
        mpinspect.profile_kernels(training.step, shapes=3)
    with pytest.raises(TypeError, match=r"path must be a trace's path.*int"):
        mpinspect.read_trace(3)
    assert training.calls == 0


def test_an_unwritable_trace_path_raises_before_the_step_runs(training, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        mpinspect.profile_kernels(training.step, trace=tmp_path / "file" / "trace.json")
    with pytest.raises(IsADirectoryError):
        mpinspect.profile_kernels(training.step, trace=tmp_path)
    assert training.calls == 0
    mpinspect.profile_kernels(training.step, trace=tmp_path / "new" / "folder" / "trace.json")
    assert (tmp_path / "new" / "folder" / "trace.json").stat().st_size


def test_a_model_that_the_step_does_not_call_is_reported(training):
    report = mpinspect.profile_kernels(training.step, model=nn.Linear(2, 2))
    assert any("called none of its modules" in finding.message for finding in report.findings)
    report = mpinspect.profile_kernels(training.step, model=training.model)
    assert not any("called none of its modules" in finding.message for finding in report.findings)


def test_another_running_profiler_is_reported(training):
    with torch.profiler.profile() as theirs:
        torch.ones(2) + 1
        with pytest.raises(RuntimeError, match=r"another torch profiler.*read_trace"):
            mpinspect.profile_kernels(training.step, warmup=0)
    assert training.calls == 0
    assert "aten::add" in {event.key for event in theirs.key_averages()}


def test_a_folder_of_ranks_and_a_list_of_traces():
    folder = mpinspect.read_trace(TRACES / "ranks")
    both = mpinspect.read_trace([TRACES / "ranks" / "worker1.json.gz", TRACES / "ranks" / "worker0.json.gz"])
    assert len(folder.ranks) == 2
    assert folder.verdict_time_us == both.verdict_time_us


def test_parts_of_names_from_wrappers_are_removed():
    model = nn.Sequential(nn.Linear(2, 2))
    assert plain_parts(model, "_orig_mod.0._checkpoint_wrapped_module.fc") == ["0", "fc"]
    assert plain_parts(nn.DataParallel(model), "module.0") == ["0"]
    assert plain_parts(model, "module.0") == ["module", "0"]


def test_the_largest_root_has_unprefixed_names():
    small, large = nn.Linear(2, 2), nn.Sequential(nn.Linear(64, 64))
    named = ModuleRanges()
    with named.installed():
        small(torch.ones(1, 2))
        large(torch.ones(1, 64))
    named.settle()
    assert (named.path(small), named.path(large), named.path(large[0])) == ("Linear", "", "0")
