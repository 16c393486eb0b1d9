"""The layers as tables in Markdown and in a DataFrame."""

import math
import sys

import pytest
import sessions

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.report import dataframe
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting import forms, markdown


@pytest.mark.parametrize("name", ["everything", "hostile"])
def test_the_markdown_report_matches_its_golden_file(name, golden):
    golden(f"{name}.md", forms.render(sessions.report_by_hand(sessions.all_sessions()[name]), ".md"))


def test_names_are_escaped_in_markdown():
    escaped = markdown.escape("a|b *c* <script> _d_ [e](f) `g` # h @i")
    assert escaped == r"a\|b \*c\* &lt;script&gt; \_d\_ \[e\](f) \`g\` \# h \@i"


def test_a_dataframes_columns_have_the_same_types_whatever_is_known():
    """A column without a known figure has the dtype of its figures, too."""
    known = dataframe.render(sessions.report_by_hand(sessions.everything())).dtypes
    names = ["name", "kind", "module", "module_type"]
    empty = dataframe.render(analyse(Session(watched=sessions.word_model().watched))).dtypes
    assert not empty.empty
    for name, dtype in empty.items():
        assert dtype == known[name], name
        assert str(dtype) != "object" or name in names, name


def test_a_dataframe_has_a_row_per_layer_and_every_figure():
    report = sessions.report_by_hand(sessions.everything())
    frame = dataframe.render(report)
    assert list(zip(frame.name, frame.kind, strict=True)) == [(layer.name, layer.kind) for layer in report.layers]
    rows = frame.set_index(["name", "kind"])
    row = rows.loc[("decoder", "activation_gradient")]
    layer = next(layer for layer in report.layers if (layer.name, layer.kind) == row.name)
    assert row.flushed_fraction == row.flushed_fraction_low == layer.flushed_fraction.estimate
    assert row.flushed_fraction_scaled == layer.histogram.shifted(13).flushed_fraction(sessions.FLOAT16)
    assert row.lost_l1_share_low < row.lost_l1_share < row.lost_l1_share_high
    assert (row.range_offset, row.elements) == (layer.range_offset, layer.histogram.total)
    assert rows.loc[("decoder.3.attn.weight", "update")].lost_updates_bfloat16 == 0.995


def test_unknown_figures_are_missing_and_integers_are_integers():
    frame = dataframe.render(sessions.report_by_hand(sessions.everything()))
    never = frame[frame.samples == 0].iloc[0]
    assert math.isnan(never.flushed_fraction)
    assert frame.range_offset.dtype == frame.zeros.dtype == "Int64"
    assert frame.range_offset.isna().sum() == (frame.samples == 0).sum()


def test_the_error_without_pandas_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install mpinspect\[pandas\]"):
        dataframe.render(sessions.report_by_hand(sessions.word_model()))


def test_tables_of_nan_alone_are_a_sentence():
    holds_nan = ExponentHistogram.from_counts([], 0, nans=3, infs=1)
    made = sessions.session(
        {TensorKey(f"{place}.weight", "weight_gradient"): holds_nan for place in range(3)}
        | {TensorKey(f"{place}", "activation_gradient"): sessions.bell(-6) for place in range(2)}
    )
    report = analyse(made)
    for suffix in (".txt", ".md", ".html"):
        page = " ".join(forms.render(report, suffix).split())
        assert (
            "None of the 3 weight gradients holds a finite non-zero value: together they hold 12 inf and 36 NaN."
            in page
        )
        assert "Weight gradients in" not in page
        assert "Activation gradients in" in page
