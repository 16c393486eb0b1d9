"""Formats figures and names in the same way in all tables and sentences.

A *measured* figure has no mark. An *estimate* is marked "~", with its bounds in brackets if they are far enough apart
to matter. "<=" marks an upper bound of unseen values. An unknown figure is "?", and "-" means that there is no value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeVar

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import floor_log2, is_power_of_two

#: Bounds of a share that are no further apart do not matter, unless a threshold lies between them.
NEAR = 0.1
#: Bounds that are no further apart than this are shown as one estimate.
_ROUGHLY = 0.01
#: An upper bound that need not be shown.
NEGLIGIBLE = 0.001
#: Estimates below this count as zero.
_NOTHING = 1e-5

UNKNOWN = "?"
NOT_APPLICABLE = "-"

_T = TypeVar("_T")


def scale_of(log2_scale: int) -> float:
    """Return 2^log2_scale as a float, with the exponent clamped to FP32's normal range: no scaler could use others."""
    return math.ldexp(1.0, min(max(log2_scale, -126), 127))


def percent(fraction: float) -> str:
    """Return a share 0..1 in percent with two significant digits: "87%", "0.3%".

    Shares other than 0 and 1 are never rounded to 0% or 100%: "<0.001%", "99.97%".
    """
    value = 100 * fraction
    if value == 0 or value == 100:
        return f"{value:.0f}%"
    if value < 0.001:
        return "<0.001%"
    if value < 10:
        return f"{value:.2g}%"
    if value < 99.5:
        return f"{value:.0f}%"
    if value < 99.995:
        return f"{value:.4g}%"
    return ">99.99%"


def at_most(fraction: float) -> str:
    """Return an upper bound of a share in words: "at most 0.3%", "<0.001%"."""
    told = percent(fraction)
    return told if told.startswith("<") else f"at most {told}"


def as_power(scale: float | None) -> str:
    """Return a scale as a power of two ("2^13") or else as a plain number; "?" for None."""
    if scale is not None and is_power_of_two(scale):
        return f"2^{floor_log2(scale)}"
    return optional(scale, "{:g}".format, UNKNOWN)


def with_power(scale: float | None) -> str:
    """Return a scale like ``as_power``, and as a number too from 1 to 2^24: "1", "8192 (2^13)", "2^-3", "2^40"."""
    if scale == 1:
        return "1"
    if scale is None or not is_power_of_two(scale) or not 1 < scale <= 1 << 24:
        return as_power(scale)
    return f"{scale:.0f} ({as_power(scale)})"


def number_or_power(scale: float) -> str:
    """Return a scale like ``as_power``, but as a number from 1 to 1024: "128", "2^16"."""
    return f"{scale:g}" if 1 <= scale <= 1024 else as_power(scale)


def share(
    interval: Interval | None, *, is_estimate: bool = False, near: float = NEAR, negligible: float = NEGLIGIBLE
) -> str:
    """Return a share in words: "87%" measured, "~9.8%" or "~9.8% [2.5%..35%]" estimated, "<=2%" or "5%..35%" bounded, "?".

    Args:
        interval: the share.
        is_estimate: whether counts can only estimate the share, as with the lost L1 share.
        near: bounds further apart than this are shown.
        negligible: an unseen share of at most this is "0%", and "<0.1%" if it is that small; a larger one is shown by its upper
            bound.
    """
    if interval is None:
        return UNKNOWN
    low, high = percent(interval.low), percent(interval.high)
    if interval.low == interval.high:
        return low
    if interval.estimate < min(_NOTHING, interval.high):
        return _unseen(interval.high, negligible)
    if low == high and not is_estimate:
        return low
    estimate = percent(interval.estimate)
    apart = f"~{estimate} [{low}..{high}]"
    if estimate == low:
        # An estimate equal to the lower bound adds no information.
        near, apart = max(_ROUGHLY, negligible), f"{low}..{high}"
    return f"~{estimate}" if interval.high - interval.low <= near else apart


def _unseen(high: float, negligible: float) -> str:
    """Return words for a share of at most ``high`` without any observed case."""
    if high <= NEGLIGIBLE:
        return f"<{percent(NEGLIGIBLE)}"
    if high <= negligible:
        return percent(0.0)
    if high > 1 - _ROUGHLY / 2:
        return UNKNOWN
    return f"<={percent(high)}"


def duration(us: float) -> str:
    """Return a duration in microseconds as three digits and a unit: "0.85 us", "41.3 us", "12.6 ms", "3.20 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        # 999.6 us would read 1000 us.
        if us >= 0.9995 * size:
            return f"{_three(us / size)} {unit}"
    return f"{_three(us)} us"


def time_taken(seconds: float) -> str:
    """Return a time in the two largest units: "41.3 s", "12 min 5 s", "3 h 7 min"."""
    if seconds < 60:
        return duration(1e6 * seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _three(value: float) -> str:
    for least, places in ((99.95, 0), (9.995, 1)):
        if value >= least:
            return f"{value:,.{places}f}"
    return f"{value:.2f}"


def shortened(name: str, length: int, cut: str) -> str:
    """Return a name with its ``cut`` ("start" or "middle") replaced by "..." to fit ``length``, at least 4."""
    if len(name) <= length:
        return name
    tail = length - 3 if cut == "start" else (length - 3) // 3
    return f"{name[: length - 3 - tail]}...{name[len(name) - tail :]}"


def steps_named(first: int, last: int) -> str:
    """Return a range of steps in words: "step 7", "steps 800-999"."""
    return f"step {first:,}" if first == last else f"steps {first:,}-{last:,}"


def by_number(number: float, one: _T, several: _T) -> _T:
    """Return the words on one thing if there is just one, else the words on several."""
    return one if number == 1 else several


def number_of(number: int, thing: str) -> str:
    """Return a number of things in words: "1 step", "1,000 steps", "2 batches"."""
    plural = re.sub("(ch|sh|s|x)$", r"\1e", thing) + "s"
    return f"{number:,} {by_number(number, thing, plural)}"


def powers_of_two(number: int) -> str:
    """Return a number of powers of two in words: "1 power of two", "12 powers of two"."""
    return f"{number_of(number, 'power')} of two"


def lower_first(sentence: str) -> str:
    """Return the sentence with a lower-case first letter, to continue another sentence."""
    return sentence[:1].lower() + sentence[1:]


def upper_first(clause: str) -> str:
    """Return the clause with an upper-case first letter, to begin a sentence."""
    return clause[:1].upper() + clause[1:]


def indefinite(noun: str) -> str:
    """Return the noun with its indefinite article: "an int", "a list"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def bracketed(*clauses: str) -> str:
    """Return the clauses that are not empty in brackets after a space; "" if all are empty."""
    return filled(" ({})", ", ".join(filter(None, clauses)))


def filled(form: str, value: object) -> str:
    """Return the form with the value in its braces: filled(" on rank {}", 3); "" for None and for an empty value but 0."""
    return form.format(value) if value or value == 0 else ""


def optional(value: _T | None, form: Callable[[_T], str], none: str = NOT_APPLICABLE) -> str:
    """Return the value in its form: ``percent``, "2^{}".format; ``none`` for None, which is "-" or "?"."""
    return none if value is None else form(value)


def some(names: list[str], limit: int = 5) -> str:
    """Return the first ``limit`` names in words, and how many more there are."""
    return ", ".join(map(repr, names[:limit])) + and_more(len(names) - limit)


def and_more(number: int, form: str = " and {:,} more") -> str:
    """Return the end of a list in words: " and 2 more"; "" for a number of 0 or less."""
    return form.format(number) if number > 0 else ""


def format_name(name: str) -> str:
    """Return a format's usual name: "FP16" for "float16", "FP8 E4M3" for "float8_e4m3"."""
    match = re.fullmatch(r"(b|t)?float(\d+)(?:_([a-z0-9]+))?(-ftz)?", name)
    if match is None:
        return name
    brand, width, variant, flushed = match.groups("")
    family = {"b": "BF", "t": "TF"}.get(brand, "FP")
    return f"{family}{width}{filled(' {}', variant.upper())}{flushed and ' without subnormals'}"


def class_beside(module: str, module_type: str) -> str:
    """Return the words that follow a module's dotted path: " (ReLU)" if it ends in a number, else ""."""
    return filled(" ({})", module_type) if module.rpartition(".")[2].isdigit() else ""
