"""The first view of a map: the place where a run broke, FP16 for an FP32 run, a healthy run as it is."""

from dataclasses import replace
from typing import Any

import pytest
import sessions

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import analyse as analysing
from mpinspect.ranges.report.explorer import data
from mpinspect.ranges.report.opening import blocks_of
from mpinspect.ranges.session import (
    AFTER_FORWARD,
    ENDED_BY,
    IN_FORWARD,
    Event,
    Measurement,
    Precision,
    Progress,
    ScaleChange,
    Session,
)
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.ranges.windows.window import coarsen

NAMES = ("embed", "blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "head")
GRADIENT = "activation_gradient"


def broken(step: int = 5, kind: str = GRADIENT, nan_from: int | None = None, **fields: Any) -> Session:
    """Ten steps in FP16, each counted by itself, the scale halved at step 3; an event in 'blocks.1.fc1' that no scaler caught."""
    holds_nan = ExponentHistogram.from_counts([3], -4, nans=2)
    made = sessions.session({TensorKey(name, kind): sessions.bell(-6) for name in NAMES})
    window = made.windows[0]
    first_nan = step if nan_from is None else nan_from
    bad = {key: replace(tensor, histogram=holds_nan) for key, tensor in window.tensors.items()}
    windows = tuple(
        replace(
            window, first_step=at, last_step=at, sampled_steps=1, tensors=bad if at >= first_nan else window.tensors
        )
        for at in range(10)
    )
    event = Event(step, 0, "forward", "blocks.1.fc1", "activation", "blocks.1.fc1", "nan", skipped=False)
    return replace(
        made,
        windows=windows,
        watched=tuple(TensorInfo(name, kind, name, "Linear") for name in NAMES),
        progress=Progress(
            steps=10, sampled_steps=10, backwards=10, scales=(ScaleChange(0, 2.0**12), ScaleChange(3, 2.0**11))
        ),
        events=(replace(event, **fields),),
        precision=Precision({"float32": 100}, autocast=("float16",)),
    )


def opened(session: Session, format: str | None = None) -> dict[str, Any]:
    given = data(analysing.analyse(session, format))
    return {"format": given["format"], **given["opening"]}


def test_a_broken_run_opens_at_the_last_healthy_step_before_the_event_and_at_that_steps_scale():
    for step, scale in ((3, 12), (5, 11)):
        shown = opened(broken(step))
        assert (shown["format"], shown["block"], shown["scale"]) == ("float16", step - 1, scale)
        assert (shown["said"], shown["step"]) == ("first NaN", step)
        assert f"step {step - 1}, the last counted sample before step {step}." in shown["words"]


def test_steps_whose_culprit_was_already_not_finite_are_not_healthy():
    assert opened(broken(6, nan_from=4))["block"] == 3


def test_without_a_healthy_step_before_it_the_whole_run_is_shown():
    shown = opened(broken(0))
    assert shown["block"] == -1
    assert shown["words"].endswith("these are activation gradients.")
    later = opened(broken(4, nan_from=0))
    assert later["words"].endswith("No healthy step was counted before step 4.")


def test_a_culprit_of_a_kind_that_was_not_counted_shows_the_nearest_kind_and_says_so():
    shown = opened(broken())
    assert (shown["kind"], shown["marked"]) == (GRADIENT, ["blocks.1.fc1"])
    assert shown["words"].startswith("Activations were not counted: these are activation gradients. Shown: ")
    counted = opened(broken(kind="activation"))
    assert (counted["kind"], counted["marked"]) == ("activation", ["blocks.1.fc1"])
    assert "not counted" not in counted["words"]


@pytest.mark.parametrize(
    ("fields", "near", "name", "after"),
    [
        ({"module": "blocks.1", "tensor": "blocks.1"}, ["blocks.1.fc1", "blocks.1.fc2"], "blocks.1", False),
        ({"module": "", "what": "loss", "tensor": ""}, ["head"], "the loss", True),
        ({"module": "", "tensor": "", "given": True}, ["embed"], "the model's input", False),
        ({"module": "", "tensor": ""}, [], "the model itself", False),
        ({"module": "dropout", "tensor": "dropout"}, ["head"], "dropout", False),
        (
            {"module": "blocks.1.fc2", "tensor": "blocks.1.fc2", "after": True},
            ["blocks.1.fc2"],
            "the code after 'blocks.1.fc2'",
            True,
        ),
    ],
)
def test_a_culprit_without_a_tensor_of_its_own_has_a_row_and_marks_no_other(
    fields: dict[str, Any], near: list[str], name: str, after: bool
):
    shown = opened(broken(**fields))
    assert shown["marked"] == []
    assert shown["near"] == near
    assert (shown["name"], shown["said"], shown["step"]) == (name, "first NaN", 5)
    assert shown["after"] is after
    assert ("\u25b7" in shown["words"]) is bool(near)
    # No kind of tensor would show the loss or the batch.
    is_of_module = fields.get("what") != "loss" and "given" not in fields
    assert ("Activations were not counted" in shown["words"]) is is_of_module
    assert shown["block"] == 4


def test_the_curve_is_shown_where_another_loss_scale_would_matter():
    healthy = replace(broken(nan_from=99), events=())
    assert opened(healthy)["curve"]
    # No scale changes a forward.
    assert not opened(broken())["curve"]
    assert opened(broken(phase="backward", value="inf", what=GRADIENT))["curve"]
    assert not opened(broken(phase="backward", value="nan", what=GRADIENT))["curve"]


def test_a_module_that_was_never_counted_shows_its_neighbour_in_the_models_order():
    made = broken(module="blocks.0.fc2", tensor="blocks.0.fc2")
    windows = tuple(
        replace(window, tensors={key: each for key, each in window.tensors.items() if key.name != "blocks.0.fc2"})
        for window in made.windows
    )
    assert opened(replace(made, windows=windows))["near"][0] in ("blocks.0.fc1", "blocks.1.fc1")


def test_a_finding_without_an_event_marks_its_layer_over_the_whole_run():
    session = replace(broken(nan_from=99), events=())
    report = analysing.analyse(session)
    from mpinspect.reporting.finding import Finding

    finding = Finding("scale-too-low", "warning", "blocks.0.fc2", "It is.", {}, step=0)
    given = data(replace(report, findings=(finding,)))["opening"]
    assert (given["marked"], given["block"], given["scale"]) == (["blocks.0.fc2"], -1, 11)
    assert (given["name"], given["said"], given["step"]) == ("", "Scale too low", 0)
    assert given["words"] == ""


def test_a_marked_row_whose_ranges_are_innocent_says_so():
    from mpinspect.reporting.finding import Finding

    report = analysing.analyse(replace(broken(nan_from=99), events=()))
    finding = Finding("narrow-head", "warning", "blocks.0.fc2", "It is.", {})
    given = data(replace(report, findings=(finding,)))["opening"]
    assert given["marked"] == ["blocks.0.fc2"]
    assert given["words"] == "The ranges do not show this fault."
    seen = data(replace(report, findings=(replace(finding, id="updates-lost"),)))["opening"]
    assert (seen["marked"], seen["words"]) == (["blocks.0.fc2"], "")


def test_a_fault_of_the_forward_opens_on_activations_or_says_that_they_are_missing():
    from mpinspect.reporting.finding import Finding

    evidence = {"line": "train.py:9", "operator": "sum", "phase": "forward"}
    finding = Finding("sum-loses-terms", "warning", "blocks.0.fc2", "It does.", evidence, step=1)
    for kind, words in (
        ("activation", ""),
        (GRADIENT, "Activations were not counted: these are activation gradients."),
    ):
        report = analysing.analyse(replace(broken(nan_from=99, kind=kind), events=()))
        given = data(replace(report, findings=(finding,)))["opening"]
        assert (given["kind"], given["marked"], given["words"]) == (kind, ["blocks.0.fc2"], words)
        assert (given["phase"], given["at"]) == ("forward", "train.py:9: sum")
        assert given["said"] == "Sum loses terms"
        # Code outside of modules has a row of its own.
        given = data(replace(report, findings=(replace(finding, layer=""),)))["opening"]
        assert (given["name"], given["phase"], given["at"]) == ("train.py:9", "", "sum: Sum loses terms")


def test_of_an_event_and_a_finding_in_another_step_the_finding_is_marked():
    from mpinspect.reporting.finding import Finding

    report = analysing.analyse(broken(5))
    finding = Finding("weights-exploded", "error", "blocks.0.fc2", "They did.", {}, step=2)
    for step, marked in ((2, "blocks.0.fc2"), (5, "blocks.1.fc1"), (None, "blocks.1.fc1")):
        given = data(replace(report, findings=(replace(finding, step=step),)))["opening"]
        assert (given["marked"], given["step"]) == ([marked], 2 if step == 2 else 5)


def test_a_finding_without_a_layer_says_that_no_single_layer_is_to_blame():
    from mpinspect.reporting.finding import Finding

    report = analysing.analyse(replace(broken(nan_from=99), events=()))
    finding = Finding("clip-before-unscale", "warning", "", "It is.", {}, step=3)
    given = data(replace(report, findings=(finding,)))["opening"]
    assert (given["kind"], given["marked"], given["near"]) == ("", [], [])
    assert (given["name"], given["said"]) == ("no single layer", "Clip before unscale")
    assert (given["words"], given["curve"]) == ("The ranges do not show this fault.", False)
    # The curve shows a fault of the loss scale.
    given = data(replace(report, findings=(replace(finding, id="scale-too-low"),)))["opening"]
    assert (given["words"], given["curve"]) == ("", True)
    at_line = replace(finding, evidence={"line": "train.py:9"})
    given = data(replace(report, findings=(at_line,)))["opening"]
    assert (given["name"], given["said"]) == ("train.py:9", "Clip before unscale")


@pytest.mark.parametrize(
    ("where", "marked"),
    [
        ((AFTER_FORWARD, ""), ("the run", "")),
        ((IN_FORWARD, "blocks.0"), ("blocks.0", GRADIENT)),
        ((IN_FORWARD, "blocks.0.fc2"), ("blocks.0.fc2", GRADIENT)),
    ],
)
def test_an_exception_is_marked_where_it_was_raised(where: tuple[str, str], marked: tuple[str, str]):
    phase, module = where
    error = Measurement(ENDED_BY, module, 10, {"begun": 1.0}, (phase,), "ValueError: 4: bad")
    session = replace(broken(nan_from=99), events=(), measurements=(error,))
    given = data(analysing.analyse(session))["opening"]
    assert ((given["name"] or given["marked"][0]), given["kind"]) == marked
    assert given["said"].startswith("Ended by an exception in step 10, ")
    assert (given["step"], given["grave"], given["curve"]) == (10, True, False)


def test_the_map_opens_in_the_runs_format_or_in_fp16_for_an_fp32_run():
    healthy = replace(broken(nan_from=99), events=())
    assert opened(healthy) == {
        "format": "float16",
        "scale": 11,
        "kind": "",
        "block": -1,
        "marked": [],
        "near": [],
        "name": "",
        "after": False,
        "said": "",
        "at": "",
        "phase": "",
        "step": None,
        "until": None,
        "curve": True,
        "elsewhere": False,
        "grave": False,
        "words": "",
    }
    shown = opened(replace(healthy, precision=Precision({"float32": 100}, autocast=("",))))
    assert (shown["format"], shown["scale"], shown["marked"]) == ("float16", 0, [])
    assert shown["words"].startswith("The run computes in FP32; ")
    # Whoever asks for a format gets it.
    assert opened(healthy, "float8_e4m3")["format"] == "float8_e4m3"


def test_the_trouble_ends_with_the_last_skipped_step_unless_a_step_was_taken():
    session = broken()
    (event,) = session.events
    skips = tuple(replace(event, step=step, skipped=True) for step in (5, 7))

    def until(*events: Event, **progress: Any) -> int | None:
        return opened(replace(session, events=events, progress=replace(session.progress, **progress)))["until"]

    assert until(*skips, skipped_steps=2) == 7
    # The next one was due after the end.
    assert until(skips[0], replace(skips[1], step=8), skipped_steps=2) is None
    # A step that was taken, or skipped without an event.
    assert until(skips[0], replace(skips[1], skipped=False)) is until(*skips, skipped_steps=3) is None


def test_a_broken_fp32_run_opens_in_fp32():
    shown = opened(replace(broken(), precision=Precision({"float32": 100}, autocast=("",))))
    assert (shown["format"], shown["marked"]) == ("float32", ["blocks.1.fc1"])


def test_the_window_before_an_event_is_not_merged_with_later_ones():
    session = broken(7)
    event = session.events[0]
    for limit in range(1, 12):
        blocks = blocks_of(session, event, limit)
        assert len(blocks) <= limit
        assert sum(block.sampled_steps for block in blocks) == 10
        if limit >= 3:
            assert any(block.last_step == 6 and block.first_step == 6 for block in blocks)
    assert blocks_of(session, None, 4) == coarsen(session.windows, 4)
