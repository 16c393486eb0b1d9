"""``mpinspect run`` on scripts that run models without a backward: each forward is a step."""

import math
import threading
import warnings
import weakref

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from torch.nn.modules import module as global_hooks
from watched_training import train, watched

from mpinspect import Inspector
from mpinspect.ranges.faults.measure import prepared
from mpinspect.ranges.records import BornInfinite, GradientsError, recorded
from mpinspect.run.models import inspected_models
from mpinspect.shapes.record.attribution import ModuleCalls


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Squared(nn.Module):
    """Squares the output of a layer, which overflows FP16 for inputs of 100 or more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        nn.init.constant_(self.up.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(y * y)


def _infer(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(each) for each in inputs]


def _session(run):
    (model,) = run.parts.models
    return model.session


def _half(size: float) -> torch.Tensor:
    return torch.full((3, 4), size, dtype=torch.float16)


def test_an_overflow_in_a_forward_is_named_with_its_module_line_and_step(tmp_path):
    model = Squared().half().eval()
    expected = _infer(model, _half(1), _half(2), _half(3), _half(100))
    with watched(tmp_path) as run:
        found = _infer(model, _half(1), _half(2), _half(3), _half(100))
    assert all(torch.allclose(*pair, 0, 0, equal_nan=True) for pair in zip(expected, found, strict=True))
    session = _session(run)
    assert [(event.step, event.phase, event.value) for event in session.events] == [(3, "forward", "nan")]
    assert session.progress.steps == 4
    assert "1 model was inspected in inference" in run.seen.sentences()[0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_first_forward_is_computed_twice(context, tmp_path):
    model = Squared().half().eval()
    with watched(tmp_path) as run, context():
        model(_half(100))
    (born,) = recorded(_session(run).measurements, BornInfinite)
    assert (born.names[0], born.step, born.text) == ("mul", 0, "float16")
    (finding,) = [each for each in analyse(_session(run)).findings if each.id == "overflow-in-operator"]
    assert (finding.severity, finding.step) == ("error", 0)
    assert finding.evidence["line"].startswith("test_inference.py:")


def test_a_forward_after_one_that_broke_is_computed_twice(tmp_path):
    model = Squared().half().eval()
    with watched(tmp_path) as run:
        _infer(model, *map(_half, (1, 1, 1, 1, 1, 100, 100)))
    assert [each.step for each in recorded(_session(run).measurements, BornInfinite)] == [6]
    (finding,) = [each for each in analyse(_session(run)).findings if each.id == "overflow-in-operator"]
    assert (finding.severity, finding.step) == ("error", 5)


def test_the_outputs_error_is_that_of_fp32_and_the_verdict_states_it(tmp_path):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16().eval(), torch.randn(16, 64)
    with watched(tmp_path) as run:
        (output,) = _infer(model, x.bfloat16())
    (exact,) = _infer(model.float(), x.bfloat16().float())
    error, in_fp64 = sorted(recorded(_session(run).measurements, GradientsError), key=lambda each: each.text)
    assert error.error == pytest.approx(float((output.float() - exact).norm() / exact.norm()), rel=1e-3)
    assert (error.of_outputs, in_fp64.of_outputs, in_fp64.text) == (1, 1, "float32")
    report = analyse(_session(run))
    assert report.verdict.healthy
    assert "In 1 forward computed twice, rounding put the outputs off by at most" in " ".join(report.verdict.sentences)
    assert "inference" in report.verdict.precision


@pytest.mark.parametrize("kinds", [("weight_gradient",), ("weight_gradient", "activation")])
def test_kinds_and_recipes_of_trainings_alone_are_noted(kinds, tmp_path):
    with watched(tmp_path, kinds=kinds, recipes=("mxfp8",)) as run:
        _infer(nn.Linear(4, 2), torch.ones(2, 4))
    notes = _session(run).notes
    assert [note.partition(":")[0] for note in notes] == ["--kinds weight_gradient", "--recipes mxfp8"]
    assert bool(_session(run).totals()) is ("activation" in kinds)


def test_a_fault_of_the_products_hooks_does_not_reach_the_script(tmp_path, monkeypatch):
    def fails(*args: object) -> None:
        raise RuntimeError("broken hook")

    monkeypatch.setattr(ModuleCalls, "_enter", fails)
    with watched(tmp_path) as run:
        _infer(nn.Linear(4, 2), *[torch.ones(2, 4)] * 3)
    assert "broken hook" in " ".join(run.parts.matmuls.notes)


class Shifted(nn.Module):
    """Has a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_a_model_with_buffers_alone_is_inspected(tmp_path):
    with watched(tmp_path) as run:
        _infer(Shifted(), torch.ones(2, 3), torch.full((2, 3), torch.inf))
    assert [event.step for event in _session(run).events] == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_score_that_is_added_up_in_16_bits_is_named_where_it_is_read(dtype, tmp_path):
    model = nn.Linear(4, 1).eval()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 1.0)
    scores = []
    with watched(tmp_path) as run, torch.no_grad():
        for _ in range(2):
            step = model(torch.ones(1, 4))
            score = torch.zeros((), dtype=dtype)
            for _ in range(600):
                score = score + step[0, 0].to(dtype)
            scores.append(score.item())
    assert scores == [{torch.bfloat16: 1024.0, torch.float32: 1800.0}[dtype]] * 2
    found = [each for each in analyse(_session(run)).findings if each.id == "read-number-off"]
    assert [each.severity for each in found] == ["warning"] * (dtype is torch.bfloat16)
    assert all("reads 1024 (test_inference.py:" in each.message and "it is 1800" in each.message for each in found)


class Wave(nn.Module):
    """A sine of large positions, which BF16 rounds away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        angles = positions * 0.731
        return self.layer(torch.sin(angles))


def test_outputs_that_are_rounding_error_are_a_warning_at_their_line(tmp_path):
    model = Wave().bfloat16().eval()
    with watched(tmp_path) as run:
        _infer(model, torch.arange(129.0, 255.0).bfloat16()[:, None])
    report = analyse(_session(run))
    grave = [finding for finding in report.findings if finding.severity != "info"]
    assert grave
    assert all(finding.evidence["line"].startswith("test_inference.py:") for finding in grave)
    assert any("the model's outputs off by" in finding.message for finding in grave)


@pytest.mark.parametrize(("size", "is_beyond"), [(1.0, False), (1e5, True)])
def test_an_fp32_inference_tells_what_fp16_would_overflow(size, is_beyond, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    with watched(tmp_path) as run:
        _infer(model, size * torch.ones(2, 4))
    sentences = " ".join(analyse(_session(run)).verdict.sentences)
    assert ("the activations of '0' would overflow" in sentences) is is_beyond
    assert ("no counted activation would overflow" in sentences) is not is_beyond


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_evaluation_before_the_training_leaves_no_trace(by_hand, tmp_path):
    model = nn.Linear(4, 2)
    with watched(tmp_path) as run:
        _infer(model, torch.ones(2, 4), torch.ones(2, 4))
        assert global_hooks._global_forward_hooks
        if by_hand:
            for _ in range(3):
                model(torch.randn(5, 4)).square().mean().backward()
                with torch.no_grad():
                    model.weight -= 0.1 * model.weight.grad
                model.zero_grad()
        else:
            train(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert not global_hooks._global_forward_hooks
    session = _session(run)
    assert (session.info.inference, session.progress.steps, session.progress.backwards) == (False, 3, 3)
    assert [path.name for path in tmp_path.iterdir()] == [run.names[0]]
    assert run.seen.notes == []


def test_models_that_a_script_calls_in_turn_have_a_record_each(tmp_path):
    encoder, decoder = nn.Linear(4, 8).half(), nn.Sequential(nn.Linear(8, 4), nn.ReLU()).half()
    with watched(tmp_path) as run, torch.no_grad():
        for _ in range(3):
            decoder(encoder(_half(1)))
    assert [(each.name, each.session.progress.steps) for each in run.parts.models] == [("encoder", 3), ("decoder", 3)]


def test_the_first_forwards_of_each_model_are_computed_twice(tmp_path):
    first, second = nn.Linear(4, 4).half().eval(), Squared().half().eval()
    with watched(tmp_path) as run:
        _infer(first, *map(_half, (1, 1, 1, 1)))
        _infer(second, _half(100))
    born = [list(recorded(each.session.measurements, BornInfinite)) for each in run.parts.models]
    assert [[each.step for each in found] for found in born] == [[], [0]]


def test_the_outputs_in_a_mapping_are_compared(tmp_path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.layer(x)}

    model = Named().bfloat16().eval()
    with watched(tmp_path) as run, torch.no_grad():
        model(torch.randn(3, 4, dtype=torch.bfloat16))
    assert any(each.text == "bfloat16" for each in recorded(_session(run).measurements, GradientsError))


def test_a_model_that_fills_the_memory_is_released_after_its_first_forwards(tmp_path, monkeypatch):
    monkeypatch.setattr(inspected_models, "free_memory", lambda device: 200.0)
    large, small = nn.Linear(8, 8).eval(), nn.Linear(8, 1).eval()
    freed = weakref.ref(large)
    with watched(tmp_path) as run:
        _infer(large, *torch.ones(4, 1, 8))
        del large
        assert freed() is None
        _infer(small, *torch.ones(4, 1, 8))
    assert [run.steps(number) for number in (0, 1)] == [2, 4]
    assert ["more than half of the memory" in " ".join(each.session.notes) for each in run.parts.models] == [
        True,
        False,
    ]


def test_many_models_in_turn_are_all_inspected(tmp_path):
    models = [nn.Linear(4, 4).eval() for _ in range(6)]
    with watched(tmp_path) as run:
        for _ in range(3):
            for model in models:
                _infer(model, torch.ones(1, 4))
    assert [run.steps(number) for number in range(6)] == [3] * 6


def test_a_model_on_the_meta_device_is_left_alone(tmp_path):
    with watched(tmp_path) as run:
        nn.Linear(4, 2, device="meta")(torch.ones(2, 4, device="meta"))
        nn.LazyLinear(2)(torch.ones(2, 4))
        _infer(nn.Linear(4, 2), torch.ones(2, 4))
    assert [each.session.progress.steps for each in run.parts.models] == [1]
    assert run.seen.notes == []


def test_models_called_before_something_is_compiled_stay_inspected(tmp_path):
    model = nn.Linear(4, 2).eval()
    with watched(tmp_path) as run:
        _infer(model, torch.ones(2, 4))
        torch.compile(nn.Linear(2, 2), backend="eager")
        _infer(model, torch.ones(2, 4))
    assert run.steps() == 2
    assert "models that were first called after torch.compile were not inspected" in run.seen.notes


def test_a_module_that_the_compiler_leaves_out_causes_no_warning(tmp_path):
    filters = list(warnings.filters)
    model = torch.compiler.disable(nn.Linear(4, 2).eval())
    with watched(tmp_path) as run:
        _infer(model, torch.ones(2, 4))
        with pytest.warns(UserWarning, match="own"):
            warnings.warn("own", UserWarning, stacklevel=1)
    assert len(run.parts.models) <= 1
    assert list(warnings.filters) == filters


def test_the_gradient_of_an_input_is_no_training(tmp_path):
    model = nn.Linear(4, 2).eval()
    with watched(tmp_path) as run:
        _infer(model, torch.ones(2, 4))
        x = torch.ones(2, 4, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
    assert (run.steps(), _session(run).info.inference) == (2, True)


def test_a_break_before_the_training_is_noted(tmp_path):
    teacher, student = Squared().half().eval(), nn.Linear(4, 2)
    with watched(tmp_path) as run:
        _infer(teacher, _half(100))
        train(student, torch.optim.SGD(student.parameters(), lr=0.01))
    assert len(run.names) == 1
    (note,) = run.seen.notes
    assert note.startswith("before the training, in Squared: step 0, forward")


def test_models_on_other_threads_are_said_to_be_unseen(tmp_path):
    model = nn.Linear(4, 2).eval()
    with watched(tmp_path) as run:
        thread = threading.Thread(target=_infer, args=(model, torch.ones(2, 4)))
        thread.start()
        thread.join()
    assert run.parts.models == []
    assert "on other threads" in " ".join(run.seen.notes)


def test_the_step_of_a_finite_input_is_not_explained_by_one_of_an_infinite_input(tmp_path):
    model = nn.Linear(4, 2).half().eval()
    with torch.no_grad():
        model.weight.fill_(1.0)
    with watched(tmp_path) as run:
        _infer(model, *map(_half, (1, 1, 1, 1, 30000, math.inf, math.inf)))
    ids = {finding.id for finding in analyse(_session(run)).findings if finding.severity != "info"}
    assert "breaks-in-fp32-too" not in ids


def test_steps_limits_an_inference(tmp_path):
    with watched(tmp_path, steps=3) as run:
        _infer(nn.Linear(4, 2).eval(), *torch.ones(6, 1, 4))
    assert run.steps() == 3


def test_functions_without_weights_and_traced_models_are_left_alone(tmp_path):
    model = nn.Linear(4, 2).eval()
    with watched(tmp_path) as run:
        nn.Softmax(-1)(torch.ones(4))
        torch.func.vmap(model)(torch.ones(3, 4))
        torch.export.export(model, (torch.ones(1, 4),))
    assert run.parts.models == []
    assert run.seen.notes == []


def test_no_global_hook_is_left_once_a_model_is_compiled(tmp_path):
    model = nn.Linear(4, 2).eval()
    with watched(tmp_path) as run:
        compiled = torch.compile(model, backend="eager")
        assert not global_hooks._global_forward_hooks
        _infer(compiled, torch.ones(2, 4))
    assert run.parts.models == []


def test_a_failure_of_ours_is_a_note_and_the_outputs_stay(tmp_path, monkeypatch):
    from mpinspect.run.models import attaching

    def fails(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(attaching, "script_names", fails)
    model = nn.Linear(4, 2).eval()
    with watched(tmp_path) as run:
        _infer(model, torch.ones(2, 4))
    assert any("broken" in note for note in run.seen.notes)


@pytest.mark.parametrize("each", [False, True])
def test_operators_work_after_inference_mode(each, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_MOST_OPERATORS", 5)
    model = Squared().half().eval()
    with watched(tmp_path) as run:
        table = torch.arange(8) + 1
        for size in (1, 100) if each else (1,):
            with torch.inference_mode():
                for _ in range(20):
                    table = table + 1
                outputs = [model(_half(size)) for _ in range(1 if each else 3)]
                table = table + len(outputs)
            assert torch.equal(table + 1, 1 + table)
        model(_half(1))
        with torch.inference_mode():
            model(_half(1))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.equal(table + 1, 1 + table)
    assert run.seen.notes == []


def test_code_after_a_forward_in_inference_mode_is_computed_twice(tmp_path):
    model = nn.Linear(4, 2).half().eval()
    with watched(tmp_path) as run, torch.inference_mode():
        (model(_half(1)) + 300).square()
    (born,) = recorded(_session(run).measurements, BornInfinite)
    assert (born.name, born.names[0], born.step) == ("", "pow", 0)


@pytest.mark.parametrize("is_searched", [True, False])
def test_a_schedule_with_equal_numbers_is_named_where_one_of_them_is_searched(is_searched, tmp_path):
    model = nn.Linear(4, 2).bfloat16().eval()
    with watched(tmp_path) as run, torch.no_grad():
        times = torch.linspace(1.0, 0.002, 400, dtype=torch.bfloat16)
        for time in times[:3]:
            model(torch.full((1, 4), float(time), dtype=torch.bfloat16))
            if is_searched:
                (times - time).abs().argmin()
    found = {finding.id: finding for finding in analyse(_session(run)).findings}
    assert ("choices-differ" in found, "prepared-in-16-bits" in found) == (is_searched, is_searched)
    if is_searched:
        evidence = found["prepared-in-16-bits"].evidence
        assert (evidence["operator"], evidence["equal"]) == ("linspace", int((times.diff() == 0).sum()))


@pytest.mark.parametrize(("spread", "is_told"), [(0.001, True), (1.0, False)])
def test_a_choice_that_is_compared_with_others_is_judged(spread, is_told, tmp_path):
    model = nn.Linear(1, 128).bfloat16().eval()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(1.0)
    with watched(tmp_path) as run, torch.no_grad():
        scores = model(torch.zeros(128, 1, dtype=torch.bfloat16)) + (1 + spread * torch.eye(128)).bfloat16()
        (scores.argmax(1) == torch.arange(128)).float().mean()
        exact = 2 + spread * torch.eye(128)
    found = [finding for finding in analyse(_session(run)).findings if finding.id == "choices-differ"]
    assert bool(found) is is_told
    assert bool((scores.argmax(1) != exact.argmax(1)).any()) is is_told


# -- the inspector -------------------------------------------------------------------------------------------------------


def test_an_inspector_counts_the_activations_of_each_forward():
    model = Squared().half().eval()
    with Inspector(model, inference=True, second=True) as inspector:
        _infer(model, _half(1), _half(1), _half(100))
    session = inspector.session()
    assert (session.progress.steps, session.info.kinds) == (3, ("activation",))
    totals = {key.name: each.histogram.total for key, each in session.totals().items()}
    assert totals == {"up": 72, "down": 18}
    assert [event.step for event in session.events] == [2]


def test_an_inspector_leaves_inference_mode_as_it_was():
    model = Squared().half().eval()
    with Inspector(model, inference=True, second=True) as inspector:
        for size in (1, 100):
            with torch.inference_mode():
                model(_half(size))
            assert torch._C._len_torch_dispatch_stack() == 0
            assert torch.ones(1) + 1 == 2
    assert [born.step for born in recorded(inspector.session().measurements, BornInfinite)] == [1]


def test_gradients_of_an_inference_are_refused():
    with pytest.raises(ValueError, match="an inference has activations and weights alone"):
        Inspector(nn.Linear(2, 2), inference=True, capture=["weight_gradient"])


def test_an_inspector_of_a_training_ignores_forwards_without_gradients():
    model = nn.Linear(4, 2)
    with Inspector(model) as inspector:
        _infer(model.eval(), torch.ones(2, 4))
    assert inspector.session().progress.steps == 0
