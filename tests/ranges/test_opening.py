"""What a map shows at first: the place where a run broke, FP16 for an FP32 run, a healthy run as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sessions

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import analyse as analysing
from mpinspect.ranges.report.explorer import data
from mpinspect.ranges.report.opening import blocks_of
from mpinspect.ranges.session import Event, Precision, Progress, ScaleChange, Session, TensorInfo, TensorKey, coarsen

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
        assert f"the first NaN of the run (step {step}, forward)" in shown["words"]
        assert f"step {step - 1}, the last healthy sample before step {step}." in shown["words"]


def test_steps_whose_culprit_was_already_not_finite_are_not_healthy():
    assert opened(broken(6, nan_from=4))["block"] == 3


def test_without_a_healthy_step_before_it_the_whole_run_is_shown():
    shown = opened(broken(0))
    assert shown["block"] == -1
    assert shown["words"].endswith("No healthy step was counted before step 0, so the map shows the whole run.")


def test_a_culprit_of_a_kind_that_was_not_counted_shows_the_nearest_kind_and_says_so():
    shown = opened(broken())
    assert (shown["kind"], shown["marked"]) == (GRADIENT, ["blocks.1.fc1"])
    assert "Its activations were not counted; shown are its activation gradients." in shown["words"]
    counted = opened(broken(kind="activation"))
    assert (counted["kind"], counted["marked"]) == ("activation", ["blocks.1.fc1"])
    assert "not counted" not in counted["words"]


@pytest.mark.parametrize(
    ("fields", "near", "row", "words"),
    [
        (
            {"module": "blocks.1", "tensor": "blocks.1"},
            ["blocks.1.fc1", "blocks.1.fc2"],
            ("blocks.1", "shown: the activation gradients of its parts", False),
            "Marked: 'blocks.1',",
        ),
        (
            {"module": "", "what": "loss", "tensor": ""},
            ["head"],
            ("the loss", "shown: the activation gradients of 'head'", True),
            "Marked: the loss, the first NaN of the run (step 5, forward). The nearest row is 'head'.",
        ),
        (
            {"module": "", "tensor": "", "given": True},
            ["embed"],
            ("the model's input", "shown: the activation gradients of 'embed'", False),
            "The nearest row is 'embed'",
        ),
        (
            {"module": "", "tensor": ""},
            [],
            ("the model itself", "shown: all tensors of the map", False),
            "Marked: the model itself",
        ),
        (
            {"module": "dropout", "tensor": "dropout"},
            ["head"],
            ("dropout", "shown: the activation gradients of 'head'", False),
            "The nearest row is 'head'.",
        ),
        (
            {"module": "blocks.1.fc2", "tensor": "blocks.1.fc2", "after": True},
            ["blocks.1.fc2"],
            ("after 'blocks.1.fc2'", "shown: the activation gradients of 'blocks.1.fc2'", True),
            "Marked: after 'blocks.1.fc2',",
        ),
    ],
)
def test_a_culprit_without_a_tensor_of_its_own_has_a_row_and_marks_no_other(
    fields: dict[str, Any], near: list[str], row: tuple[str, str, bool], words: str
):
    shown = opened(broken(**fields))
    assert shown["marked"] == []
    assert shown["near"] == near
    assert shown["row"] == [row[0], "first NaN: step 5, forward", row[1]]
    assert shown["after"] is row[2]
    assert words in shown["words"]
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
    assert given["words"] == "Marked: 'blocks.0.fc2' (scale-too-low, from step 0 on)."


def test_a_finding_without_a_layer_says_that_no_single_layer_is_to_blame():
    from mpinspect.reporting.finding import Finding

    report = analysing.analyse(replace(broken(nan_from=99), events=()))
    finding = Finding("clip-before-unscale", "warning", "", "It is.", {}, step=3)
    given = data(replace(report, findings=(finding,)))["opening"]
    assert (given["kind"], given["marked"], given["near"]) == ("", [], [])
    assert given["row"] == ["no single layer", "clip-before-unscale, from step 3 on", "shown: all tensors of the map"]
    assert given["words"] == "No single layer is to blame (clip-before-unscale, from step 3 on)."
    at_line = replace(finding, evidence={"line": "train.py:9"})
    given = data(replace(report, findings=(at_line,)))["opening"]
    assert given["row"][:2] == ["train.py:9", "clip-before-unscale, from step 3 on"]
    assert given["words"] == "The code in train.py:9 is to blame (clip-before-unscale, from step 3 on)."


def test_the_map_opens_in_the_runs_format_or_in_fp16_for_an_fp32_run():
    healthy = replace(broken(nan_from=99), events=())
    assert opened(healthy) == {
        "format": "float16",
        "scale": 11,
        "kind": "",
        "block": -1,
        "marked": [],
        "near": [],
        "row": None,
        "after": False,
        "curve": True,
        "grave": False,
        "words": "",
    }
    shown = opened(replace(healthy, precision=Precision({"float32": 100}, autocast=("",))))
    assert (shown["format"], shown["scale"], shown["marked"]) == ("float16", 0, [])
    assert shown["words"].startswith("The run computes in FP32.")
    # Whoever asks for a format gets it.
    assert opened(healthy, "float8_e4m3")["format"] == "float8_e4m3"


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
