"""The demo: its text, its model, and the output and files of a short run."""

import re
import sys
import types
from typing import ClassVar

import pytest
import rich.progress
import torch

from mpinspect.commands import demo as command
from mpinspect.demo import demo
from mpinspect.numeric.formats import FLOAT16
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.store import FILE_NAME


def test_the_text_is_the_same_every_time():
    first, second = demo.stdlib_tokens(30_000, 512), demo.stdlib_tokens(30_000, 512)
    assert torch.equal(first.tokens, second.tokens)
    assert first.words == second.words
    assert len(first.tokens) == 30_000
    assert len(first.words) == len(set(first.words)) == 512
    assert int(first.tokens.max()) == 511
    # More frequent words have smaller numbers.
    counts = torch.bincount(first.tokens)[1:]
    assert (counts[:-1] >= counts[1:]).all()


def test_the_library_has_all_the_text_that_the_demo_wants():
    corpus = demo.stdlib_tokens()
    assert len(corpus.tokens) == 400_000
    assert len(corpus.words) == 4096
    training, held_out = corpus.split()
    assert torch.equal(torch.cat([training.tokens, held_out.tokens]), corpus.tokens)
    assert len(held_out.tokens) == 40_000


def test_words_and_unreadable_bytes(tmp_path):
    (tmp_path / "b.py").write_bytes(b"y = \xff\n")
    (tmp_path / "a.py").write_text("x += x1")
    corpus = demo.stdlib_tokens(7, 100, directory=tmp_path)
    assert [corpus.words[token] for token in corpus.tokens] == ["x", "+", "=", "x1", "y", "=", "\ufffd"]


def test_a_library_without_source_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds only 0 words.*zip file"):
        demo.stdlib_tokens(directory=tmp_path)
    (tmp_path / "a.py").write_text("x " * 25_000)
    assert len(demo.stdlib_tokens(directory=tmp_path).tokens) == 25_000


def test_a_batch_is_contexts_and_the_words_that_follow():
    corpus = demo.Corpus(torch.arange(100), ())
    contexts, following = corpus.batch(torch.Generator().manual_seed(0), 50)
    assert contexts.shape == (50, 3)
    assert torch.equal(contexts + torch.tensor([3, 2, 1]), following[:, None].expand(50, 3))
    assert following.min() >= 3


def test_a_text_in_order_gives_every_word_once():
    batches = list(demo.Corpus(torch.arange(10), ()).in_order(3))
    assert [following.tolist() for _, following in batches] == [[3, 4, 5], [6, 7, 8], [9]]
    for contexts, following in batches:
        assert torch.equal(contexts + torch.tensor([3, 2, 1]), following[:, None].expand(-1, 3))


def test_a_run_takes_the_first_free_directory(tmp_path):
    assert demo.free_directory(tmp_path / "a") == tmp_path / "a"
    # A directory without a run is free.
    assert demo.free_directory(tmp_path / "a") == tmp_path / "a"
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / FILE_NAME).touch()
    assert demo.free_directory(str(tmp_path / "a")) == tmp_path / "a-3"
    assert (tmp_path / "a-3").is_dir()


def test_training_takes_the_batches_asked_for():
    corpus = demo.stdlib_tokens(20_000, 64)
    losses, model = [], demo.word_model(0, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    demo.train(model, optimizer, corpus, steps=2, seed=5, batch_tokens=16, after_step=losses.append)
    generator = torch.Generator().manual_seed(5)
    expected = [demo.word_loss(model, corpus.batch(generator, 16)).item() for _ in range(2)]
    assert [loss.item() for loss in losses] == expected


def test_the_seed_decides_the_model_and_the_random_state_is_not_changed():
    before = torch.get_rng_state()
    first, second, other = demo.word_model(1), demo.word_model(1), demo.word_model(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.output.weight, second.output.weight)
    assert not torch.equal(first.output.weight, other.output.weight)
    assert [name for name, _ in first.named_children()] == ["embedding", "hidden", "tanh", "output"]
    assert first(torch.zeros(5, 3, dtype=torch.int64)).shape == (5, 4096)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Run three steps; return the output, the report and the directory."""
    import contextlib
    import io

    directory = tmp_path_factory.mktemp("runs") / "demo"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        report = demo.run(log_dir=directory, steps=3)
    return printed.getvalue(), report, directory


def test_a_short_run_needs_scaling_at_the_output_and_not_in_the_weight_gradients(short_run):
    _, report, _ = short_run
    layers = {(layer.name, layer.kind): layer for layer in report.layers}
    assert {name for name, kind in layers if kind == ACTIVATION_GRADIENT} == {"embedding", "hidden", "tanh", "output"}
    assert layers["output", ACTIVATION_GRADIENT].flushed_fraction.estimate > 0.5
    for (_, kind), layer in layers.items():
        if kind == WEIGHT_GRADIENT:
            assert layer.flushed_fraction.estimate < 0.01
    assert report.loss_scale.needed
    assert report.session.progress.sampled_steps == 3


def test_the_headline_is_made_of_the_reports_figures(short_run):
    printed, report, _ = short_run
    histogram = next(
        layer.histogram for layer in report.layers if (layer.name, layer.kind) == ("output", ACTIVATION_GRADIENT)
    )
    share = re.search(
        r"Without scaling (\d+)% of the non-zero gradient elements at the output layer's activations", printed
    )
    assert int(share[1]) == round(100 * histogram.flushed_fraction(FLOAT16))
    assert f"Suggested loss scale: {report.loss_scale.recommended:g} (2^" in printed
    unused = min(layer.histogram.range_offset(FLOAT16) for layer in report.layers)
    assert f"no gradient uses the top {unused} powers of two" in printed
    assert "while the weight gradients are fine" in printed
    assert str(report) in printed


def test_the_run_leaves_pictures_a_log_and_a_session(short_run):
    printed, report, directory = short_run
    for name in ("range_offset.png", "layers.png"):
        data = (directory / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
        assert str(directory / name) in printed
    assert list(directory.glob("events.out.tfevents.*"))
    assert f"tensorboard --logdir {directory}" in printed
    assert printed.splitlines()[-1].strip() == str(directory / "report.html")
    assert 20_000 < (directory / "report.html").stat().st_size < 400_000
    assert Session.load(directory).totals() == report.session.totals()


def test_a_second_run_gets_the_next_name_and_quiet_prints_nothing(short_run, capsys):
    _, _, directory = short_run
    demo.run(log_dir=directory, steps=1, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert (directory.parent / "demo-2" / "layers.png").exists()


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        demo.run(log_dir=tmp_path, steps=0)
    assert not list(tmp_path.iterdir())


def test_other_weight_gradients_are_not_called_fine(short_run):
    import dataclasses

    _, report, _ = short_run
    worse = tuple(dataclasses.replace(layer, log2_scale_needed=3) for layer in report.layers)
    assert "fine" not in demo.headline(dataclasses.replace(report, layers=worse))


class Bar:
    """A stand-in for rich's Progress."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def add_task(self, name, total, completed):
        self.task = (name, total, completed)

    def update(self, task, advance, description):
        self.description = description


def test_the_bar_is_of_all_runs(monkeypatch):
    monkeypatch.setattr(rich.progress, "Progress", Bar)
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for place, of in ((2, 4), (1, 1)):
        with demo.progress(10, False, "FP32", place=place, of=of) as advance:
            advance(torch.tensor(1.5))
    assert [bar.task for bar in Bar.made] == [("FP32 (2 of 4)", 40, 10), ("FP32", 10, 0)]
    assert Bar.made[0].description == "FP32 (2 of 4), loss 1.500"


@pytest.mark.parametrize("libc", [types.SimpleNamespace(), None])
def test_the_demo_runs_where_the_c_library_has_no_such_setting(libc, monkeypatch):
    asked = []

    def load(name):
        asked.append(name)
        if libc is None:
            raise OSError("no such library")
        return libc

    monkeypatch.setattr(command.ctypes, "CDLL", load)
    command._keep_freed_memory()
    assert asked == [None]


def test_malloc_does_not_return_freed_memory(monkeypatch):
    settings = {}
    libc = types.SimpleNamespace(mallopt=settings.__setitem__)
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: libc)
    command._keep_freed_memory()
    # glibc's malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX.
    assert settings == {-1: 2**31 - 1, -2: 2**28, -4: 0}
