"""The table of colours: text is legible on its background, and meaningful colours are distinguishable."""

import re
from pathlib import Path

import pytest
from labels import assert_distinct, assert_lightness_distinct

import mpinspect
from mpinspect.reporting.html import STYLE
from mpinspect.reporting.palette import PALETTE, css_variables, light, tint

TEXT = ("ink", "soft", "good", "warning", "error", "unknown", "info")


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", TEXT)
def test_text_can_be_read_on_both_grounds(name, scheme):
    for ground in ("ground", "raised"):
        assert contrast(getattr(PALETTE[name], scheme), getattr(PALETTE[ground], scheme)) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_regions_and_values_stay_apart_for_a_deuteranope(scheme):
    assert_distinct({name: getattr(PALETTE[name], scheme) for name in ("fill", "flushed", "overflow", "ground")})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_calls_for_action_differs_in_lightness_for_a_deuteranope(scheme):
    colours = {name: getattr(PALETTE[name], scheme) for name in ("error", "warning", "good", "flushed")}
    assert_distinct(colours, 12)
    assert_lightness_distinct(colours)
    # Values beyond the format's maximum, beside those within.
    assert_lightness_distinct({name: getattr(PALETTE[name], scheme) for name in ("fill", "overflow")}, 12)


def test_a_page_has_both_schemes():
    assert css_variables() in STYLE
    assert css_variables(is_dark=True) in STYLE


def test_a_tint_lies_between_white_and_the_colour():
    assert (tint("flushed", 0), tint("flushed", 1)) == ("#ffffff", light("flushed"))


def test_no_other_file_has_a_colour_of_its_own():
    # The colours of the demo's curves are line styles without a meaning.
    spared = {"palette.py", "plot_curves.py", "plot_heat_map.py"}
    package = Path(mpinspect.__file__).parent
    files = [path for kind in ("py", "css", "js") for path in package.rglob(f"*.{kind}") if path.name not in spared]
    found = {path.name: re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text("utf-8")) for path in files}
    assert {name: colours for name, colours in found.items() if colours} == {}
