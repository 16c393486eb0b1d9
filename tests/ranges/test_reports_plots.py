"""The pictures: what they draw, and that they leave matplotlib as it was."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import sessions
from matplotlib.image import imread

from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT16_FTZ
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.report import plot_heat_map, plots
from mpinspect.ranges.session import TensorKey
from mpinspect.reporting.plot_style import regions, shortened


def words(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.fixture(scope="module")
def report():
    return sessions.report_by_hand(sessions.word_model())


def test_the_range_offset_picture_names_the_unused_powers_of_two(report):
    shown = words(plots.range_offset(report))
    # The largest gradient of all is one of hidden.bias, 2^-4: 15 - -4 unused; 13 fewer after scaling.
    assert "range offset: 19 unused\npowers of two" in shown
    assert "range offset: 6 unused\npowers of two" in shown
    for region in ("flushed to zero", "subnormal", "normal", "overflow"):
        assert shown.count(region) == 2
    assert "multiplied by the suggested loss scale 8192 (2^13)" in shown


def test_the_stairs_hold_each_kinds_shares(report):
    axes = plots.range_offset(report).axes[0]
    from matplotlib.patches import StepPatch

    drawn = [patch.get_data() for patch in axes.findobj(StepPatch)]
    assert len(drawn) == 4
    for data in drawn:
        assert data.values.sum() == pytest.approx(1.0)
    key = next(layer for layer in report.layers if layer.name == "decoder")
    below = min(data.edges[np.flatnonzero(data.values)[0]] for data in drawn)
    assert below == key.histogram.min_exponent


def test_values_beyond_the_format_are_counted_too():
    made = sessions.session({TensorKey("a.weight", WEIGHT_GRADIENT): sessions.bell(16, 2.0)})
    shown = words(plots.range_offset(sessions.report_by_hand(made)))
    assert "5 powers of two\nbeyond the format" in shown


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("empty", "No gradient was counted."),
        ("zero_gradients", "Every gradient element that was counted is zero."),
        ("nan_everywhere", "No gradient element that was counted is finite and non-zero."),
    ],
)
def test_where_there_is_nothing_to_draw_it_says_why(name, sentence):
    shown = words(plots.range_offset(sessions.report_by_hand(sessions.all_sessions()[name])))
    assert any(text.startswith(sentence) for text in shown)


def test_the_heat_map_has_a_row_a_layer_and_its_shares(report):
    axes = plots.heat_map(report).axes[0]
    rows = plot_heat_map.rows(report)
    assert [label.get_text() for label in axes.get_yticklabels()] == [layer.name for layer in rows]
    shares = axes.collections[0].get_array().filled(0)
    np.testing.assert_allclose(np.nansum(shares, axis=1), 1.0, rtol=1e-3)


def test_the_heat_map_shows_the_worst_of_many_layers():
    report = sessions.report_by_hand(sessions.all_sessions()["layers_300"])
    figure = plots.heat_map(report)
    assert len(figure.axes[0].get_yticklabels()) == 60
    assert any("the 60 worst of 300" in text for text in words(figure))
    assert all(
        "layers.12" in layer.name or "layers.13" in layer.name or "layers.14" in layer.name
        for layer in plot_heat_map.rows(report)
    )


@pytest.mark.parametrize("name", ["word_model", "one_layer", "layers_300", "hostile", "extreme_values"])
def test_labels_of_layers_do_not_overlap(name):
    figure = plots.heat_map(sessions.report_by_hand(sessions.all_sessions()[name]))
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    frame = figure.bbox
    for box in boxes:
        assert box.x0 >= frame.x0
    for upper, lower in itertools.pairwise(boxes):
        assert lower.y1 <= upper.y0 + 2.5


def test_one_png_holds_both_pictures(report, tmp_path):
    both = imread(plots.save(report, tmp_path / "a.png"))
    alone = plots.range_offset(report)
    assert both.shape[1] > 1000
    assert both.shape[0] / both.shape[1] > alone.get_figheight() / alone.get_figwidth() + 0.2
    assert len(np.unique(both.reshape(-1, both.shape[2]), axis=0)) > 50


def test_the_regions_are_the_formats_own():
    assert [(region.low, region.high) for region in regions(FLOAT16)] == [
        (None, -25),
        (-25, -14),
        (-14, 16),
        (16, None),
    ]
    assert [region.name for region in regions(FLOAT16_FTZ)] == ["flushed to zero", "normal", "overflow"]
    assert regions(BFLOAT16)[0].high == -134


def test_long_names_lose_their_middle():
    name = shortened("encoder.layers.11.attention.self.query.weight", 24)
    assert name == "encoder...f.query.weight"
    assert len(name) == 24
    assert shortened("a.b", 24) == "a.b"
    assert shortened("", 24) == "(the model)"


def test_matplotlib_is_left_as_it_was(report, tmp_path):
    """Neither pyplot nor a backend is loaded, and the user's style stays."""
    code = (
        "import sys, matplotlib; sys.path.insert(0, 'tests'); import sessions\n"
        "from mpinspect.ranges.report import plots\n"
        # Reading the backend would load pyplot.
        "style = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "matplotlib.rcParams['font.size'] = 31; before = style()\n"
        "plots.save(sessions.report_by_hand(sessions.word_model()), sys.argv[1])\n"
        "assert style() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = sessions.__file__.rpartition("tests")[0]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True, cwd=root)
