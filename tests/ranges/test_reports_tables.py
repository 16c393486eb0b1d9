"""The layers as tables in Markdown and in a DataFrame."""

from __future__ import annotations

import math
import re
import sys

import pytest
import sessions

from mpinspect.ranges.report import dataframe
from mpinspect.reporting import forms, markdown


@pytest.mark.parametrize("name", ["everything", "hostile"])
def test_the_markdown_report_matches_its_golden_file(name, golden):
    golden(f"{name}.md", forms.render(sessions.report_by_hand(sessions.all_sessions()[name]), ".md"))


@pytest.mark.parametrize("name", sessions.all_sessions())
def test_every_row_of_a_table_has_as_many_cells_as_its_header(name):
    columns = 0
    for line in forms.render(sessions.report_by_hand(sessions.all_sessions()[name]), ".md").splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        columns = columns or cells
        assert cells == columns, line


def test_names_are_escaped_in_markdown():
    escaped = markdown.escape("a|b *c* <script> _d_ [e](f) `g` # h @i")
    assert escaped == r"a\|b \*c\* &lt;script&gt; \_d\_ \[e\](f) \`g\` \# h \@i"


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
