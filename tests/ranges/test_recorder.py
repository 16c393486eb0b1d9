"""A Recorder makes the session and report of an Inspector from arrays, and no argument of its calls stops the loop."""

import math
import subprocess
import sys
import warnings
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from rounding_oracle import exponent_counts
from together import together

from mpinspect import Inspector, MpinspectWarning, Session, count_exponents
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.recorder import Recorder
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow

RANDOM = np.random.default_rng(0)


def window_of(recorder: Recorder, name: str = "x", kind: str = "weight_gradient") -> TensorWindow:
    return recorder.session().totals()[TensorKey(name, kind)]


def observed(*arrays: object, **options: object) -> Recorder:
    """Return a recorder of these arrays, each in a step of its own."""
    recorder = Recorder()
    for step, array in enumerate(arrays):
        recorder.observe("x", array, step=step, **options)
    return recorder


def of_steps(*steps: object, **options: object) -> Recorder:
    """Return a recorder of ones in these steps."""
    recorder = Recorder(**options)
    for step in steps:
        recorder.observe("x", np.ones(3), step=step)
    return recorder


def values(size: int = 100, dtype: object = np.float32) -> np.ndarray:
    return (RANDOM.standard_normal(size) * 2.0 ** RANDOM.integers(-20, 10, size)).astype(dtype)


# -- counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-3])
def test_a_power_of_two_scale_is_divided_out_exactly(scale: float) -> None:
    array = values()
    assert window_of(observed(array * np.float32(scale), loss_scale=scale)).histogram == count_exponents(array)


def test_any_other_scale_is_divided_out_in_float64() -> None:
    array = values()
    expected = count_exponents(array.astype(np.float64) / 1000.0)
    assert window_of(observed(array, loss_scale=1000.0)).histogram == expected


@pytest.mark.parametrize(
    "scale", [np.float32(8), np.array([8.0]), torch.tensor(8.0), torch.tensor([8.0], requires_grad=True)]
)
def test_a_scale_can_be_an_array(scale: object) -> None:
    assert window_of(observed(np.float32([8.0, 16.0]), loss_scale=scale)).histogram == count_exponents(
        np.array([1.0, 2.0])
    )


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, math.inf, math.nan])
def test_an_unknown_scale_produces_a_warning_and_no_advice(scale: float | None) -> None:
    recorder = Recorder()
    with pytest.warns(MpinspectWarning, match="loss scale is not known"):
        recorder.observe("x", np.ones(3), loss_scale=scale)
    assert not recorder.session().progress.scale_known
    assert window_of(recorder).histogram == count_exponents(np.ones(3))
    assert recorder.report().loss_scale.recommended is None


def test_only_gradients_are_unscaled() -> None:
    recorder = Recorder()
    for kind in ("activation", "weight", "update"):
        recorder.observe("x", np.ones(3), kind=kind, loss_scale=4.0)
        assert window_of(recorder, kind=kind).histogram.max_abs == 1.0
    for kind in ("weight_gradient", "activation_gradient"):
        recorder.observe("x", np.ones(3), kind=kind, loss_scale=4.0)
        assert window_of(recorder, kind=kind).histogram.max_abs == 0.25


@pytest.mark.parametrize(
    ("array", "given", "format", "floor"),
    [
        (np.ones(3, np.float32), None, "float32", None),
        (np.ones(3, np.float64), None, "float32", None),
        (np.ones(3, np.float16), None, "float16", -35),
        (np.ones(3, np.float32), "float16", "float16", -35),
        (np.ones(3, ml_dtypes.bfloat16), None, "bfloat16", -144),
        (np.ones(3, ml_dtypes.bfloat16), "float16", "float16", -35),
        (np.ones(3, ml_dtypes.float8_e4m3fn), None, "float8_e4m3", -20),
        (np.ones(3, ml_dtypes.float8_e5m2), "float32", "float8_e5m2", -27),
    ],
)
def test_the_format_passed_through_sets_the_visibility_floor(
    array: np.ndarray, given: str | None, format: str, floor: int | None
) -> None:
    window = window_of(observed(array, loss_scale=1024.0, passed_through=given))
    assert (window.passed_through, window.floor_exponent) == (format, floor)
    assert window.dtypes == (array.dtype.name,)


def test_an_overflow_of_fp16_counts_as_a_peak_beyond_its_range() -> None:
    for scale, least in ((1.0, 16), (1024.0, 6), (1000.0, 6)):
        recorder = observed(np.array([1.0, np.inf], np.float16), loss_scale=scale)
        assert window_of(recorder).peaks == {least: 1}
        assert recorder.session().gradient_peaks() == {least: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torch_tensors_are_counted(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(values()).to(dtype).requires_grad_()
    recorder = observed(tensor)
    assert window_of(recorder).histogram == count_exponents(tensor)
    assert recorder.session().watched[0].shape == (100,)


def test_arrays_of_several_micro_batches_are_added() -> None:
    recorder, parts = Recorder(), [values(), values(50)]
    for part in parts:
        recorder.observe("x", part, step=0)
    window = window_of(recorder)
    assert window.histogram == count_exponents(np.concatenate(parts))
    assert (window.samples, window.numel_max) == (2, 100)


def test_the_array_is_not_changed_and_is_released() -> None:
    import weakref

    recorder, array = Recorder(), values()
    before, alive = array.tobytes(), weakref.ref(array)
    recorder.observe("x", array)
    recorder.next_step()
    assert array.tobytes() == before
    del array
    assert alive() is None


# -- nested arrays --------------------------------------------------------------------------------------------------------


def test_nested_arrays_get_dotted_names() -> None:
    Pair = namedtuple("Pair", "mean scale")
    recorder = Recorder()
    tree = {"a": {"kernel": np.ones(2), "bias": None}, "b": [np.ones(3), (np.ones(4),)], "c": Pair(1.0, [1.0, 2.0])}
    recorder.observe("net", tree)
    recorder.observe("", {"d": np.ones(1), 7: np.ones(1)})
    found = {key.name: window.histogram.total for key, window in recorder.session().totals().items()}
    assert found == {"net.a.kernel": 2, "net.b.0": 3, "net.b.1.0": 4, "net.c.mean": 1, "net.c.scale": 2, "d": 1, "7": 1}


def test_a_bad_leaf_does_not_hide_its_siblings() -> None:
    recorder = Recorder()
    with pytest.warns(MpinspectWarning, match="'a' is not recorded"):
        recorder.observe("", {"a": np.arange(3), "b": np.ones(3)})
    assert [key.name for key in recorder.session().totals()] == ["b"]
    assert recorder.report().coverage.never_fired[0][0] == "a"


# -- steps ----------------------------------------------------------------------------------------------------------------


def steps(recorder: Recorder) -> list[tuple[int, int]]:
    return [(window.first_step, window.last_step) for window in recorder.session().windows]


def test_a_larger_number_ends_a_step() -> None:
    recorder = of_steps(0, 0, 1, 4, 4)
    assert steps(recorder) == [(0, 0), (1, 1), (4, 4)]
    progress = recorder.session().progress
    assert (progress.steps, progress.sampled_steps, progress.backwards) == (5, 3, 3)


def test_next_step_ends_a_step() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.observe("x", np.ones(3))
        recorder.observe("y", np.ones(3))
        recorder.next_step()
    assert steps(recorder) == [(0, 0), (1, 1), (2, 2)]
    assert recorder.session().progress.steps == 3


def test_step_numbers_and_next_step_can_be_combined() -> None:
    recorder = Recorder()
    for step in (10, 11, 20):
        recorder.observe("x", np.ones(3), step=step)
        recorder.next_step(skipped=step == 11)
    assert steps(recorder) == [(10, 10), (11, 11), (20, 20)]
    assert (recorder.session().progress.steps, recorder.session().progress.skipped_steps) == (11, 1)


def test_steps_that_restart_in_each_epoch_are_numbered_consecutively() -> None:
    recorder = of_steps(0, 1, 2)
    with pytest.warns(MpinspectWarning, match="went back from 2 to 0"):
        recorder.observe("x", np.ones(3), step=0)
    for step in (1, 2):
        recorder.observe("x", np.ones(3), step=step)
    assert steps(recorder) == [(step, step) for step in range(6)]


def test_every_third_step_is_sampled_for_any_step_numbers() -> None:
    recorder = Recorder(every=3)
    sampled = []
    for step in range(5, 75, 10):
        recorder.observe("x", np.ones(3), step=step)
        sampled.append(recorder.sampled)
    assert sampled == [True, False, False, True, False, False, True]
    assert steps(recorder) == [(5, 5), (35, 35), (65, 65)]
    assert window_of(recorder).samples == 3


def test_arrays_between_samples_are_not_read() -> None:
    recorder = Recorder(every=2)
    recorder.observe("x", np.ones(3), step=0)
    recorder.observe("x", object(), step=1)
    assert recorder.session().notes == ()


def test_a_schedule_chooses_the_sampled_steps() -> None:
    recorder = of_steps(*range(9), every=Schedule(every=4, dense=2))
    assert [first for first, _ in steps(recorder)] == [0, 1, 4, 8]


def test_reading_the_session_in_the_middle_of_a_step_does_not_end_it() -> None:
    recorder = of_steps(0)
    recorder.session()
    recorder.report()
    recorder.observe("x", np.ones(3), step=0)
    recorder.close()
    assert recorder.session().progress.sampled_steps == 1
    assert window_of(recorder).samples == 2


def test_the_session_of_a_long_run_is_bounded() -> None:
    recorder = of_steps(*range(2000))
    recorder.close()
    session = recorder.session()
    assert len(session.windows) < 256
    assert window_of(recorder).histogram.total == 6000
    assert session.progress.steps == 2000


# -- infinities -----------------------------------------------------------------------------------------------------------


def test_the_first_non_finite_array_becomes_the_steps_event() -> None:
    recorder = Recorder()
    bad = np.array([1.0, np.inf], np.float32)
    for step in range(12):
        recorder.observe("a.kernel", np.full(2, float(step)), step=step, loss_scale=2.0)
        recorder.observe("b.kernel", bad if step == 10 else np.ones(2) + step, loss_scale=2.0)
        recorder.observe("c", np.array([np.nan]) if step == 10 else np.ones(1), loss_scale=2.0)
        recorder.next_step(skipped=step == 10)
    (event,) = recorder.session().events
    assert (event.step, event.phase) == (10, "backward")
    assert (event.module, event.tensor, event.value) == ("b", "b.kernel", "inf")
    assert (event.loss_scale, event.skipped, event.forward_finite) == (2.0, True, None)
    assert event.last_maxima == tuple(float(step) for step in range(3, 11))
    assert recorder.session().progress.skipped_steps == 1
    assert recorder.report().events == (event,)


def test_the_forward_is_judged_if_activations_are_observed() -> None:
    recorder = Recorder()
    for step, out in enumerate([1.0, np.nan]):
        recorder.observe("block/out", np.array([out]), kind="activation", step=step)
        recorder.observe("block/out/kernel", np.array([np.inf]))
    first, second = recorder.session().events
    assert (first.phase, first.module, first.forward_finite) == ("backward", "block/out", True)
    assert (second.phase, second.module, second.value, second.forward_finite) == ("forward", "block/out", "nan", False)
    assert second.gradients_finite is False


def test_a_mask_of_infinities_is_one_event() -> None:
    recorder = Recorder()
    for step in range(5):
        recorder.observe("mask", np.array([-np.inf, 0.0]), kind="activation", step=step)
        recorder.observe("x", np.array([np.inf if step == 4 else 1.0]))
    events = recorder.session().events
    assert [(event.step, event.phase) for event in events] == [(0, "forward"), (4, "backward")]
    assert events[0].gradients_finite


def test_an_infinity_in_the_current_step_is_in_the_session() -> None:
    recorder = observed(np.array([np.inf]))
    assert len(recorder.session().events) == 1
    recorder.close()
    assert len(recorder.session().events) == 1


# -- the same as an Inspector ---------------------------------------------------------------------------------------------


def test_a_recorder_and_an_inspector_record_the_same() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model="Sequential")
    with Inspector(model, optimizers=optimizer, capture="weight_gradient", loss_scale=64.0) as inspector:
        for step in range(5):
            optimizer.zero_grad()
            (model(torch.randn(32, 8)).square().mean() * 64).backward()
            for name, parameter in model.named_parameters():
                recorder.observe(name, parameter.grad.numpy(), step=step, loss_scale=64.0)
            optimizer.step()
    mine, its = recorder.session(), inspector.session()
    assert mine.totals() == its.totals()
    assert mine.gradient_peaks() == its.gradient_peaks()
    assert mine.progress.scales == its.progress.scales
    assert mine.progress.steps == its.progress.steps
    assert [(info.name, info.module, info.shape, info.dtype) for info in mine.watched] == [
        (info.name, info.module, info.shape, info.dtype) for info in its.watched
    ]
    assert recorder.report().loss_scale.recommended == inspector.report().loss_scale.recommended


# -- files ----------------------------------------------------------------------------------------------------------------


def test_the_run_directory_can_be_loaded(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run", model="net") as recorder:
        for step in range(4):
            recorder.observe("x", values(), step=step, loss_scale=8.0)
    loaded = Session.load(tmp_path / "run")
    assert loaded.totals() == recorder.session().totals()
    assert loaded.info.model == "net"
    assert (loaded.progress, loaded.watched) == (recorder.session().progress, recorder.session().watched)
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert recorder.log_dir == tmp_path / "run"


def test_a_directory_with_another_run_is_not_changed(tmp_path: Path) -> None:
    Recorder(tmp_path / "run").close()
    with pytest.warns(MpinspectWarning, match="holds another run"):
        second = Recorder(tmp_path / "run")
    second.close()
    assert second.log_dir == (tmp_path / "run-2").resolve()


def test_a_directory_that_cannot_be_created_produces_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(MpinspectWarning, match="no file is written"):
        recorder = Recorder(tmp_path / "file" / "run")
    recorder.observe("x", np.ones(3))
    assert window_of(recorder).samples == 1


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_only_the_session_file_is_written_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, warnings, numpy as np\nwarnings.simplefilter('ignore')\nsys.modules['torch'] = None\n"
        "from mpinspect.ranges.recorder import Recorder\n"
        "with Recorder(sys.argv[1]) as recorder:\n    recorder.observe('x', np.ones(3))\n"
        "print(recorder.session().notes)"
    )
    done = python(code, tmp_path)
    assert "no TensorBoard log" in done.stdout, done.stderr
    assert Session.load(tmp_path).totals()["x", "weight_gradient"].samples == 1


def test_a_script_without_close_writes_the_whole_session(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\nfrom mpinspect.ranges.recorder import Recorder\nrecorder = Recorder(sys.argv[1])\n"
        "for step in range(3):\n    recorder.observe('x', np.ones(3), step=step)"
    )
    assert python(code, tmp_path).returncode == 0
    session = Session.load(tmp_path)
    assert session.progress.ended
    assert session.totals()["x", "weight_gradient"].samples == 3


def test_an_exception_in_the_loop_prints_the_report_and_is_raised() -> None:
    code = (
        "import numpy as np\nfrom mpinspect.ranges.recorder import Recorder\n"
        "with Recorder() as recorder:\n    recorder.observe('layer.kernel', np.array([np.inf]))\n    1 / 0"
    )
    done = python(code)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "step 0, backward, 'layer', first inf" in done.stderr
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


# -- wrong arguments --------------------------------------------------------------------------------------------------------


class Hostile:
    """Raises an error in every access."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise MemoryError("no room")


@pytest.mark.parametrize(
    "arguments",
    [
        {"array": Hostile()},
        {"array": object()},
        {"array": "text"},
        {"array": np.arange(3)},
        {"array": [[1.0], [1.0, 2.0]]},
        {"array": torch.ones(3, dtype=torch.int64)},
        {"array": torch.empty(3, device="meta")},
        {"array": np.ones(3), "kind": "gradient"},
        {"array": np.ones(3), "passed_through": "half"},
        {"array": np.ones(3), "loss_scale": "dynamic"},
        {"array": np.ones(3), "loss_scale": object()},
        {"array": np.ones(3), "step": "first"},
        {"array": np.ones(3), "step": math.nan},
    ],
    ids=lambda arguments: " ".join(f"{name}={value!r:.20}" for name, value in arguments.items()),
)
def test_arguments_that_cannot_be_recorded_produce_one_warning(arguments: dict[str, object]) -> None:
    recorder = Recorder()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            recorder.observe("bad", **arguments)
            recorder.observe("good", np.ones(3), step=number)
        recorder.close()
    assert len(told) == 1
    assert issubclass(told[0].category, MpinspectWarning)
    assert window_of(recorder, "good").samples == 3
    assert str(recorder.report())


def notes_of(*observed: dict[str, object]) -> list[str]:
    """Return a recorder's notes on these observations."""
    recorder = Recorder()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for arguments in observed:
            recorder.observe(**{"name": "x", "array": np.ones(3), **arguments})
    assert [str(warning.message) for warning in told] == list(recorder.session().notes)
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize(
    ("arguments", "blame"),
    [
        ({"loss_scale": "big"}, "loss_scale='big' is not a number"),
        ({"step": "a"}, "step='a' is not a step number"),
        ({"step": 1.5}, "step=1.5 is not a step number"),
        ({"step": math.inf}, "step=inf is not a step number"),
        ({"step": 10**30}, "a step is a whole number below 2^63"),
        ({"step": -(10**30)}, "a step is a whole number below 2^63"),
        ({"kind": ["weight"]}, "kind=['weight'] is none of "),
        ({"passed_through": {}}, "passed_through={} is none of "),
        ({"name": None}, "name=None is not a string: it is recorded under 'None'"),
    ],
)
def test_the_warning_names_the_wrong_argument(arguments: dict[str, object], blame: str) -> None:
    (note,) = notes_of(arguments, arguments)
    assert blame in note
    assert "array" not in note


def test_each_kind_of_wrong_argument_produces_one_warning() -> None:
    scales = [{"loss_scale": scale} for scale in ("a", "b", None, math.nan, -1.0, -2.0, 0.0, math.inf, 3 + 4j)]
    notes = notes_of(*scales, *scales, {"step": "a"}, {"step": "b"}, {"step": object()}, {"step": object()})
    blamed = [
        "'a'",
        "loss_scale=None",
        "was nan",
        "was -1.0",
        "was 0.0",
        "was inf",
        "(3+4j)",
        "step='a'",
        "step=<object",
    ]
    assert [word in note for word, note in zip(blamed, notes, strict=True)] == [True] * len(blamed)


def test_step_numbers_are_exact() -> None:
    others = (np.int64(2**60 + 2), np.array(2**60 + 3), torch.tensor(2**60 + 4), 2.0**61)
    session = of_steps(2**60, 2**60 + 1, *others, 2**63 - 1).session()
    assert session.progress.steps == 2**63 - 2**60
    assert session.notes == ()


def test_a_recorder_that_is_dropped_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.observe("x", np.ones(3), step=0)
    with warnings.catch_warnings():
        # An unclosed file would produce a ResourceWarning.
        warnings.simplefilter("error")
        del recorder
    session = Session.load(tmp_path)
    assert session.progress.ended
    assert session.progress.sampled_steps == 1


def test_warnings_as_errors_do_not_stop_the_loop() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recorder().observe("x", object())


def test_observations_after_close_are_not_recorded() -> None:
    recorder = observed(np.ones(3))
    recorder.close()
    recorder.close()
    with pytest.warns(MpinspectWarning, match=r"after close\(\)"):
        recorder.observe("x", np.ones(3))
    recorder.next_step()
    assert window_of(recorder).samples == 1


def test_a_keyboard_interrupt_is_not_caught() -> None:
    class Interrupts:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Recorder().observe("x", Interrupts())


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_must_be_a_number_of_steps(every: object) -> None:
    with pytest.raises(ValueError, match="every="):
        Recorder(every=every)


def test_threads_can_observe_concurrently() -> None:
    recorder = Recorder()
    together(4, lambda _: [recorder.observe("x", np.ones(3)) for _ in range(50)])
    assert window_of(recorder).histogram.total == 600


def test_an_empty_recorder_has_a_report() -> None:
    with Recorder() as recorder:
        recorder.next_step()
    assert "1 step" in str(recorder.report())


def test_the_counts_equal_an_oracle_in_numpy() -> None:
    arrays = [values(500), values(300, np.float16), np.zeros(7)]
    truth = exponent_counts(np.concatenate([array.astype(np.float64) for array in arrays]))
    histogram = window_of(observed(*(array.reshape(-1, 1) for array in arrays))).histogram
    assert {histogram.min_exponent + i: int(n) for i, n in enumerate(histogram.counts) if n} == truth["counts"]
    ends = (histogram.zeros, histogram.min_abs, histogram.max_abs)
    assert ends == (truth["zeros"], truth["min_abs"], truth["max_abs"])
