"""How figures are worded in messages: one way for all of them."""

from __future__ import annotations

import math
import re

from mpinspect.session import ACTIVATION, ACTIVATION_GRADIENT, UPDATE, WEIGHT, WEIGHT_GRADIENT

_NOUNS = {
    WEIGHT: "the weight",
    ACTIVATION: "the activations of",
    WEIGHT_GRADIENT: "the weight gradient of",
    ACTIVATION_GRADIENT: "the activation gradients of",
    UPDATE: "the update of",
    "gradient": "the gradient",
}


def scale_of(log2_scale: int) -> float:
    """2^log2_scale as a float; exponents beyond FP32's range are cut to it, for no scaler could use them."""
    return math.ldexp(1.0, min(max(log2_scale, -126), 127))


def power(log2_scale: int) -> str:
    """ "2^13 = 8192"; the figure is left out where it would be long."""
    return f"2^{log2_scale} = {2**log2_scale}" if 0 <= log2_scale <= 24 else f"2^{log2_scale}"


def percent(share: float) -> str:
    """A share 0..1 with about two significant digits: "87%", "0.3%", "under 0.001%"."""
    value = 100 * share
    if value == 0:
        return "0%"
    if value < 0.001:
        return "under 0.001%"
    if value < 10:
        return f"{value:.2g}%"
    return f"{value:.0f}%" if value < 99.5 or value == 100 else f"{value:.4g}%"


def steps_named(first: int, last: int) -> str:
    """ "step 7", "steps 800-999"."""
    return f"step {first}" if first == last else f"steps {first}-{last}"


def lower_first(sentence: str) -> str:
    """The sentence as the rest of one."""
    return sentence[:1].lower() + sentence[1:]


def upper_first(clause: str) -> str:
    """The clause as a sentence of its own."""
    return clause[:1].upper() + clause[1:]


def indefinite(noun: str) -> str:
    """ "an int", "a list"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def tensor(name: str, kind: str) -> str:
    """ "the activation gradients of 'decoder'"."""
    return f"{_NOUNS.get(kind, kind)} {name or '(the model itself)'!r}"


def some(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def format_name(name: str) -> str:
    """The name that people use: "FP16" for "float16", "FP8 E4M3" for "float8_e4m3"."""
    match = re.fullmatch(r"(b|t)?float(\d+)(?:_([a-z0-9]+))?(-ftz)?", name)
    if match is None:
        return name
    brand, width, variant, flushed = match.groups()
    family = f"{brand.upper()}F" if brand else "FP"
    return f"{family}{width}" + (f" {variant.upper()}" if variant else "") + (" without subnormals" if flushed else "")
