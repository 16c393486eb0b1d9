"""The table of the kinds of tensor that can be captured, with their properties for reports, plots and loss scales."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.reporting.palette import light


@dataclass(frozen=True)
class TensorKind:
    """One kind of tensor.

    Args:
        name: the name used in ``capture=`` and in session files.
        title: heading of the kind's table in a report.
        phrase: words that precede a tensor's quoted name in a sentence.
        is_scaled: whether a loss scale multiplies tensors of this kind.
        is_of_parameters: whether a tensor has the name of a parameter; otherwise it has the name of the module that outputs it.
        is_default: whether the kind is captured by default.
    """

    name: str
    title: str
    phrase: str
    is_scaled: bool = False
    is_of_parameters: bool = False
    is_default: bool = False

    @property
    def colour(self) -> str:
        """The colour of its outlines, "#rrggbb"; the colours are distinct under all forms of colour blindness."""
        return light(self.name)


WEIGHT_GRADIENT = "weight_gradient"
ACTIVATION_GRADIENT = "activation_gradient"
ACTIVATION = "activation"
WEIGHT = "weight"
UPDATE = "update"

#: In the order of the reports.
TABLE = (
    TensorKind(
        WEIGHT_GRADIENT,
        "Weight gradients",
        "the weight gradient of",
        is_scaled=True,
        is_of_parameters=True,
        is_default=True,
    ),
    TensorKind(
        ACTIVATION_GRADIENT, "Activation gradients", "the activation gradients of", is_scaled=True, is_default=True
    ),
    TensorKind(ACTIVATION, "Activations", "the activations of"),
    TensorKind(WEIGHT, "Weights", "the weight", is_of_parameters=True),
    # Also captured by default if parameters are stored in FP16 or BF16 (inspector.py).
    TensorKind(UPDATE, "Updates", "the update of", is_of_parameters=True),
)

KINDS = tuple(kind.name for kind in TABLE)
#: The kinds that a loss scale multiplies.
GRADIENT_KINDS = tuple(kind.name for kind in TABLE if kind.is_scaled)
PARAMETER_KINDS = tuple(kind.name for kind in TABLE if kind.is_of_parameters)
OUTPUT_KINDS = tuple(kind.name for kind in TABLE if not kind.is_of_parameters)
DEFAULT_KINDS = tuple(kind.name for kind in TABLE if kind.is_default)
#: The kinds of a forward without a backward.
INFERENCE_KINDS = (ACTIVATION, WEIGHT)

_BY_NAME = {kind.name: kind for kind in TABLE}
_PHRASES = {kind.name: kind.phrase for kind in TABLE} | {"gradient": "the gradient"}


def kind_named(name: str) -> TensorKind:
    """Return the table row of a kind. Raises KeyError for an unknown name."""
    return _BY_NAME[name]


def phrase(name: str, kind: str) -> str:
    """Return words for a tensor, like "the activation gradients of 'decoder'"; ``kind`` may also be a plain "gradient"."""
    return f"{_PHRASES.get(kind, kind)} {name or '(the model itself)'!r}"
