"""Every report renders every session: empty, without gradients, all NaN, with 300 layers, with hostile names."""

import pytest
import sessions

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.report import plots
from mpinspect.ranges.report.tensorboard import TensorBoardSink
from mpinspect.reporting import plot_style
from mpinspect.reporting.forms import render

SESSIONS = sessions.all_sessions()
REPORTS = {name: sessions.report_by_hand(session) for name, session in SESSIONS.items()}
ANALYSED = {name: analyse(session) for name, session in SESSIONS.items()}


@pytest.mark.parametrize("name", SESSIONS)
def test_every_session_has_a_dataframe(name):
    assert len(ANALYSED[name].to_dataframe()) == len(ANALYSED[name].layers)


@pytest.mark.parametrize("name", SESSIONS)
def test_every_session_has_pictures(name, tmp_path, monkeypatch):
    """``save`` draws both pictures of the hand-made report, in few pixels; of the analysed one the range offset is laid out."""
    monkeypatch.setattr(plot_style, "DPI", 30)
    plots.range_offset(ANALYSED[name]).draw_without_rendering()
    path = plots.save(REPORTS[name], tmp_path / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", SESSIONS)
def test_every_session_has_a_tensorboard_log(name, tmp_path):
    session = SESSIONS[name]
    sink = TensorBoardSink(tmp_path)
    sink.watched(session.watched)
    for window in session.windows[:2]:
        sink.window(window)
    for event in session.events:
        sink.event(event)
    for note in session.notes:
        sink.note(note)
    sink.progress(session.progress)
    sink.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 0


@pytest.mark.parametrize("name", SESSIONS)
def test_layer_names_are_never_truncated_in_text(name):
    """A name may wrap over lines; with white space removed, it is complete."""
    from mpinspect.ranges.report.document import LAYERS
    from mpinspect.ranges.report.layers import badness, repeated, seen_layers
    from mpinspect.reporting.streams import printable

    for width in (60, 90, 140):
        lines = render(REPORTS[name], ".txt", width=width).splitlines()
        assert max(map(_cells, lines)) <= width
        seen = seen_layers(REPORTS[name])
        rows = repeated(seen, LAYERS.terminal)
        # One row is reserved for the gradient nearest to overflow.
        for row in sorted(rows, key=lambda row: badness(row.worst), reverse=True)[: LAYERS.terminal - 1]:
            assert _holds(lines, printable(row.name)), (width, row.name)


def test_a_picture_is_saved_into_a_new_folder(tmp_path):
    path = REPORTS["word_model"].save(str(tmp_path / "deep" / "er" / "report.PNG"))
    assert path.read_bytes().startswith(b"\x89PNG")


def _cells(line):
    from rich.cells import cell_len

    return cell_len(line)


def _holds(lines, name):
    """Return whether the lines contain the name, in one line or in pieces at the starts of neighbouring lines."""
    wanted = name.replace(" ", "")
    for start in range(len(lines)):
        rest = wanted
        for line in lines[start:]:
            piece = "".join(line.split())
            common = next((n for n in range(min(len(piece), len(rest)), 0, -1) if piece[:n] == rest[:n]), 0)
            rest = rest[common:]
            if not rest or not common:
                break
        if not rest:
            return True
    return False
