"""The lint's reports: golden files and the sentences that they do not contain."""

import pytest
from shape_records import linear, recording, small

from mpinspect.reporting import text as text_form
from mpinspect.reporting.forms import render
from mpinspect.runtime.gpus import Gpu, named
from mpinspect.runtime.version import __version__
from mpinspect.shapes.analysis import analyse_shapes
from mpinspect.shapes.analysis.wording import grouped
from mpinspect.shapes.report.document import padding_document


def empty():
    record = recording(backward=False, stopped="the forward failed before its first product", notes=("a note",))
    return analyse_shapes(record, named("hopper"))


REPORTS = {"small": small, "empty": empty}


@pytest.mark.parametrize("width", [70, 110])
@pytest.mark.parametrize("name", REPORTS)
def test_golden_text(name, width, golden):
    golden(f"shapes_{name}_{width}.txt", render(REPORTS[name](), ".txt", width=width))


@pytest.mark.parametrize("name", REPORTS)
def test_golden_markdown(name, golden):
    golden(f"shapes_{name}.md", render(REPORTS[name](), ".md"))


@pytest.mark.parametrize("name", REPORTS)
def test_golden_json(name, golden):
    text = REPORTS[name]().to_json()
    golden(f"shapes_{name}.json", text.replace(f'"mpinspect_version": "{__version__}"', '"mpinspect_version": "?"'))


def test_a_clean_model_gets_one_sentence():
    report = analyse_shapes(recording(*linear(4096, 1024, 1024)), named("hopper"))
    assert "Nothing to fix: the shapes suit the Tensor Cores of H100." in str(report)
    assert "Findings" not in str(report)
    assert "Nothing to fix" not in str(small())
    assert "Nothing to fix" not in str(empty())
    assert "Nothing to fix" not in str(analyse_shapes(recording(*linear(64, 64, 64)), Gpu("mystery")))


def test_a_model_off_tensor_cores_is_not_called_suited_to_them():
    tiny = analyse_shapes(recording(linear(8, 8, 8, "float32", backward=False)[0]), named("hopper"))
    text = render(tiny, ".txt", width=160)
    assert [finding.severity for finding in tiny.findings] == ["info"]
    assert "No finding above info; 100% of the FLOPs are not on Tensor Cores (tf32-off)." in text
    assert "1 product, 1,024 FLOP" in text
    assert "1 of 1 product has them" in text
    assert "Nothing to fix" not in text
    assert "Nothing to fix" not in render(tiny, ".md")
    assert "Nothing to fix" not in str(analyse_shapes(recording(*linear(0, 64, 64)), named("hopper")))
    few = recording(*linear(4096, 1024, 1024), linear(1, 64, 64, backward=False)[0])
    assert "Nothing to fix" in str(analyse_shapes(few, named("hopper")))


def test_the_worst_products_are_listed_first_and_the_rest_are_counted():
    layers = [product for index in range(30) for product in linear(64, 64, 64 + 8 * index, name=f"layer{index}")]
    text = render(analyse_shapes(recording(*layers, *linear(64, 1023, 64)), named("hopper")), ".txt", width=140)
    table = text[text.index("Products, worst first") :].splitlines()
    assert "degraded" in table[3]
    assert "more kinds of products" in text


def test_the_table_of_padded_sizes_alone():
    text = text_form.render(padding_document(small()))
    assert "50257" in text
    assert "50304" in text
    assert "config.vocab_size" in text
    assert text_form.render(padding_document(empty())) == "No size needs padding.\n"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["a"], ["a"]),
        (["h.0.q", "h.1.q", "h.2.q"], ["h.{0..2}.q"]),
        (["h.0.q", "h.2.q"], ["h.{0,2}.q"]),
        (["h.0.q", "h.1.k"], ["h.0.q", "h.1.k"]),
        (["e.0.l.0", "e.0.l.1", "e.1.l.0"], ["e.{0..1}.l.{0..1}"]),
        (["layer1.0", "layer2.0"], ["layer1.0", "layer2.0"]),
        ([f"h.{2 * index}" for index in range(6)], ["h.{0,2,4,6,...}"]),
        (["", "x"], ["", "x"]),
        (["h.#.q", "h.0.q"], ["h.#.q", "h.0.q"]),
    ],
)
def test_grouped_names(names, expected):
    assert grouped(names) == expected
