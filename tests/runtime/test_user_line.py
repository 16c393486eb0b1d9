"""The innermost line of the user's code has its text, as far as that is certain."""

import linecache
import os
import sys

from mpinspect.runtime.user_line import assignment_of, innermost_line, source_of

SCRIPT = "import sys\ndef here():\n    return line_of(sys._getframe())"


def line_in(path, written=None):
    """Run a script at a path, with this text in its file, and return the line that it names."""
    if written is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(written, "utf-8")
        os.utime(path, (0, 0))
    names = {"__name__": "script", "line_of": innermost_line}
    exec(compile(written or SCRIPT, str(path), "exec"), names)
    return names["here"]()


def test_a_line_has_its_text(tmp_path):
    line = line_in(tmp_path / "train.py", SCRIPT)
    assert line == "train.py:3"
    assert source_of(line) == "return line_of(sys._getframe())"
    assert source_of("train.py:2") == source_of("") == ""


def test_a_long_line_is_cut_and_stays_one_line(tmp_path):
    long = SCRIPT.replace("())", "())  #\t\v\x1c" + "x" * 200)
    assert source_of(line_in(tmp_path / "long.py", long)).startswith("return line_of(sys._getframe())")
    assert source_of("long.py:3").isprintable()
    wide = SCRIPT.replace("())", "())  # " + "x" * 200)
    assert source_of(line_in(tmp_path / "wide.py", wide)) == f"return line_of(sys._getframe()) # {'x' * 86}..."


def test_a_file_that_can_not_be_read_has_no_text(tmp_path):
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe# no UTF-8\n" * 3)
    for name in ("gone.py", "broken.py", "<string>", "a\nb.py"):
        line = line_in(tmp_path / name)
        assert line == f"{name}:3"
        assert source_of(line) == ""


def test_a_file_that_was_changed_since_the_start_has_no_text(tmp_path):
    line = line_in(tmp_path / "edited.py", SCRIPT)
    assert source_of(line)
    os.utime(tmp_path / "edited.py")
    assert source_of(line) == ""


def test_a_cell_of_a_notebook_has_text_without_a_file(tmp_path, monkeypatch):
    path = str(tmp_path / "cell.py")
    monkeypatch.setitem(linecache.cache, path, (len(SCRIPT), None, SCRIPT.splitlines(keepends=True), path))
    assert source_of(line_in(tmp_path / "cell.py")) == "return line_of(sys._getframe())"


def test_lines_of_two_files_with_one_name_have_no_text(tmp_path):
    first = line_in(tmp_path / "one" / "layers.py", SCRIPT)
    assert source_of(first)
    assert line_in(tmp_path / "two" / "layers.py", SCRIPT) == first
    assert source_of(first) == ""
    assert line_in(tmp_path / "one" / "layers.py", SCRIPT) == first
    assert source_of(first) == ""


def test_the_one_assignment_to_a_name_is_found(tmp_path):
    assigns = "\nself.opt: object = 1\nscaler = 2\nscaler = 3\nif scaler == 4: loss == 5\n"
    line = line_in(tmp_path / "assigns.py", f"class self: pass\n{SCRIPT}{assigns}")
    made = assignment_of("self.opt", line)
    assert (made, source_of(made)) == ("assigns.py:5", "self.opt: object = 1")
    assert [assignment_of(name, line) for name in ("scaler", "loss", "elf.opt", "")] == [""] * 4
    assert assignment_of("self.opt", "elsewhere.py:1") == ""


def test_a_frame_of_the_library_is_not_the_users():
    assert innermost_line(sys._getframe()).startswith("test_user_line.py:")
