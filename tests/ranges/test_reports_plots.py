"""The pictures show the counts, and drawing them does not change matplotlib's state."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import sessions
from labels import assert_distinct, assert_readable, words
from matplotlib.image import imread

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import BFLOAT16, FLOAT16, FLOAT16_FTZ
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.kinds import TABLE as KIND_TABLE
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.report import plot_heat_map, plots
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.plot_style import regions, shortened


@pytest.fixture(scope="module")
def report():
    return sessions.report_by_hand(sessions.word_model())


def test_the_figure_is_the_picture_that_is_saved(report, tmp_path):
    figure = report.figure()
    assert len(figure.subfigs) == 2
    assert set(words(plots.range_offset(report))) <= set(words(figure))
    figure.savefig(tmp_path / "figure.png", dpi=figure.dpi)
    saved = imread(report.save(tmp_path / "saved.png"))
    height, width = saved.shape[:2]
    assert width / height == pytest.approx(figure.get_figwidth() / figure.get_figheight(), rel=0.02)


def test_the_range_offset_picture_has_a_caption_and_labels(report):
    shown = words(plots.range_offset(report))
    assert "FP16 needs a loss scale of 8192 (2^13): in 'decoder' it flushes 87% without, 0.012% with it" in shown
    # The largest gradient is 2^-4 (hidden.bias), so 15 - -4 powers of two are unused, and 13 fewer after scaling.
    assert "range offset: 19 powers of two unused at loss scale 1" in shown
    assert "range offset: 6 powers of two unused at loss scale 8192 (2^13)" in shown
    for region in ("flushed", "subnormal", "normal", "overflow"):
        assert shown.count(region) == 1
    assert "activation gradients at loss scale 1: 81% flushed" in shown
    assert "activation gradients at loss scale 8192 (2^13): 0.86% flushed" in shown


def test_shares_are_written_in_percent(report):
    for figure in (plots.range_offset(report), plots.heat_map(report)):
        figure.draw_without_rendering()
        found = [text for text in words(figure) if "%" in text]
        assert found
        assert not any(re.search(r"\de[-+]?\d", text) for text in found)
    ticks = [label.get_text() for label in plots.range_offset(report).axes[0].get_yticklabels()]
    assert ticks == ["100%", "10%", "1%", "0.1%", "0.01%", "0.001%"]


def test_the_outlines_are_each_kinds_shares_before_and_after_scaling(report):
    from matplotlib.patches import StepPatch

    axes = plots.range_offset(report).axes[0]
    outlines = [patch for patch in axes.findobj(StepPatch) if not patch.get_fill()]
    lines = {patch.get_label(): patch.get_data() for patch in outlines}
    assert len(lines) == 4
    for data in lines.values():
        assert data.values.sum() == pytest.approx(1.0, abs=1e-3)
    lowest = sorted(min(data.edges[np.flatnonzero(data.values)]) for data in lines.values())
    decoder = next(layer for layer in report.layers if layer.name == "decoder")
    assert lowest[0] == decoder.histogram.min_exponent
    assert lowest[0] + 13 in lowest


def test_values_beyond_the_format_are_counted():
    made = sessions.session({TensorKey("a.weight", WEIGHT_GRADIENT): sessions.bell(16, 2.0)})
    shown = words(plots.range_offset(sessions.report_by_hand(made)))
    assert "5 powers of two beyond the format at loss scale 1" in shown
    assert any("% overflow" in text for text in shown)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("empty", "No gradient was counted."),
        ("zero_gradients", "Every gradient element that was counted is zero."),
        ("nan_everywhere", "No gradient element that was counted is finite and non-zero."),
    ],
)
def test_an_empty_picture_states_the_reason(name, sentence):
    shown = words(plots.range_offset(sessions.report_by_hand(sessions.all_sessions()[name])))
    assert any(text.startswith(sentence) for text in shown)


def test_the_heat_map_has_a_row_per_layer_with_its_shares(report):
    figure = plots.heat_map(report)
    axes, rows = figure.axes[0], plot_heat_map.rows(report)
    named = [label.get_text() for label in axes.get_yticklabels()]
    assert named == [
        "Weight gradients",
        *(row.name for row in rows[:4]),
        "Activation gradients",
        *(row.name for row in rows[4:]),
    ]
    cells = axes.collections[0].get_array().filled(0)
    np.testing.assert_allclose(np.nansum(cells, axis=1), [0, 1, 1, 1, 1, 0, 1, 1, 1], rtol=1e-3)
    shown = words(figure)
    assert {"flushed", "at 2^13", "overflow", "82%", "0.88%"} <= set(shown)
    assert "'decoder' loses most in FP16: 82% flushed at loss scale 1" in shown


def test_infinities_and_overflow_have_columns_if_there_are_any():
    tensors = {
        TensorKey("a.weight", WEIGHT_GRADIENT): sessions.bell(16, 2.0),
        TensorKey("b.weight", WEIGHT_GRADIENT): ExponentHistogram.from_counts([], 0, nans=100),
    }
    shown = words(plots.heat_map(sessions.report_by_hand(sessions.session(tensors))))
    assert "'b.weight' holds infinities or NaNs" in shown
    assert shown.count("overflow") == 2
    assert {"inf, NaN", "400"} <= set(shown)
    # 'b.weight' has no finite value, so no share in the columns "flushed", "at 2^13" and "overflow".
    assert shown.count("-") == 3


def test_the_heat_map_groups_repeated_blocks():
    figure = plots.heat_map(sessions.report_by_hand(sessions.all_sessions()["layers_300"]))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names.count("encoder.layers.{0..149}.attention.output.weight") == 2
    assert any("{0..11}: the worst of them" in text for text in words(figure))


def many(name):
    """Return a session of 80 weights with different names; the last ones flush most."""
    return sessions.session(
        {TensorKey(name.format(i), WEIGHT_GRADIENT): sessions.bell(-18 - i // 20, elements=1000) for i in range(80)}
    )


def test_the_heat_map_shows_the_worst_of_many_layers():
    figure = plots.heat_map(sessions.report_by_hand(many("tower_{}.weight")))
    assert len(figure.axes[0].get_yticklabels()) == 61
    assert any("The worst 60 rows: 60 layers of 80." in text for text in words(figure))
    assert plot_heat_map.rows(sessions.report_by_hand(many("tower_{}.weight")))[0].name == "tower_20.weight"


@pytest.mark.parametrize("name", ["word_model", "layers_300", "hostile", "nan_everywhere", "many", "empty"])
@pytest.mark.parametrize("picture", [plots.range_offset, plots.heat_map])
def test_labels_are_complete_and_do_not_overlap(name, picture):
    made = sessions.all_sessions() | {"many": many("שכבה_{}." + "deep." * 59 + "weight")}
    assert_readable(picture(escaped(sessions.report_by_hand(made[name]))))


@pytest.mark.parametrize("format", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("picture", [plots.range_offset, plots.heat_map])
def test_every_formats_regions_are_labelled(format, picture):
    figure = picture(analyse(sessions.word_model(), format=format))
    assert {"flushed", "subnormal", "normal", "overflow"} <= set(words(figure))
    assert_readable(figure)


def test_all_colours_are_distinct_for_a_deuteranope():
    assert_distinct({kind.name: kind.colour for kind in KIND_TABLE})
    assert_distinct(dict(enumerate(plot_heat_map.COLOURS)), least=15)


def test_a_png_contains_both_pictures(report, tmp_path):
    path = plots.save(report, tmp_path / "a.png")
    both, alone = imread(path), plots.range_offset(report)
    assert 1000 < both.shape[1] < 2000
    assert both.shape[0] / both.shape[1] > alone.get_figheight() / alone.get_figwidth() + 0.2
    assert path.stat().st_size < 400_000


def test_the_regions_follow_from_the_format():
    assert [(region.low, region.high) for region in regions(FLOAT16)] == [
        (-math.inf, -25),
        (-25, -14),
        (-14, 16),
        (16, math.inf),
    ]
    assert [region.name for region in regions(FLOAT16_FTZ)] == ["flushed", "normal", "overflow"]
    assert regions(BFLOAT16)[0].high == -134


def test_long_names_are_shortened_by_whole_parts():
    assert shortened("encoder.layers.11.attention.self.query.weight", 24) == "….self.query.weight"
    assert shortened("decoder.layers.11.attention.self.query.weight", 40) == "decoder.….11.attention.self.query.weight"
    # A dot inside a group's numbers does not separate parts.
    assert shortened("encoder.layers.{0..11}.query.weight", 20) == "….query.weight"
    assert shortened("x" * 300, 24) == "…" + "x" * 23
    assert shortened("sm80_xmma_fprop_implicit_gemm_indexed_tf32", 30, keep="start") == "sm80_xmma_fprop_implicit_gemm…"
    assert shortened("a.b", 24) == "a.b"
    assert shortened("", 24) == "(the model)"


def test_matplotlibs_state_is_unchanged(report, tmp_path):
    """Neither pyplot nor a backend is loaded, and the user's style is unchanged."""
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
