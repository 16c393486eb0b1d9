"""Recipes of narrow formats as data: how each operand of a layer's three products is quantised.

A layer y = x W^T has three products: fprop (x and W), dgrad (y's gradient and W) and wgrad (y's gradient and x). Each operand is
quantised in blocks that share a scale. A block lies along the dimension that the product sums over, so one tensor is quantised
along its features for one product and along its tokens for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mpinspect.numeric.formats import FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E5M2, FORMATS, FloatFormat

#: The size of a block that spans its dimension: (1, WHOLE) is a row, (WHOLE, WHOLE) the tensor.
WHOLE = 0
#: The formats of scales.
FLOAT32_SCALE, POWER_OF_TWO, E4M3_SCALE = "float32", "power-of-two", "e4m3"
#: Rules that derive a scale from the largest magnitude of its block. FLOOR: the power of two that moves the maximum's exponent
#: to the format's highest, so that values near the top of that binade are clipped (OCP MX 1.0). RCEIL: the least power of two
#: without clipping. AMAX: the maximum becomes the format's largest value. HISTORY: as AMAX, with the maximum of earlier steps.
FLOOR, RCEIL, CEIL, EVEN, AMAX, HISTORY = "floor", "rceil", "ceil", "even", "amax", "history"
NEAREST, STOCHASTIC = "nearest", "stochastic"
PRODUCTS = ("fprop", "dgrad", "wgrad")
#: The tensors of a layer: its input, its weight and the gradient at its output; and each product's operands.
INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"
OPERANDS = {"fprop": (INPUT, WEIGHT), "dgrad": (GRADIENT, WEIGHT), "wgrad": (GRADIENT, INPUT)}


@dataclass(frozen=True)
class Quantization:
    """How one operand is quantised.

    Args:
        element: name of the elements' format (``FORMATS``).
        block: rows and columns that share a scale, the columns along the dimension that the product sums over; WHOLE spans one.
        scale: the scale's format, one of FLOAT32_SCALE, POWER_OF_TWO, E4M3_SCALE.
        rule: how the scale follows from the block's largest magnitude, one of FLOOR, RCEIL, CEIL, EVEN, AMAX, HISTORY.
        rounding: NEAREST (ties to even) or STOCHASTIC.
    """

    element: str
    block: tuple[int, int]
    scale: str
    rule: str
    rounding: str = NEAREST

    @property
    def format(self) -> FloatFormat:
        """The elements' format."""
        return FORMATS[self.element]

    @property
    def bits(self) -> int:
        """The width of an element."""
        return 1 + self.format.exponent_bits + self.format.mantissa_bits

    @property
    def is_power_of_two(self) -> bool:
        """Whether every scale is a power of two, so that counts of exponents below the block's maximum are exact."""
        return self.scale == POWER_OF_TWO

    @property
    def block_name(self) -> str:
        """The block in words: "tensor", "row", "1x32"."""
        rows, columns = self.block
        if columns == WHOLE:
            return "tensor" if rows == WHOLE else "row"
        return f"{rows}x{columns}"


@dataclass(frozen=True)
class Product:
    """The operands of a product, in the order of OPERANDS; None for an operand that is not quantised."""

    left: Quantization | None = None
    right: Quantization | None = None

    @property
    def bits(self) -> int | None:
        """The width of the narrower operand; None if neither is quantised."""
        return min((each.bits for each in (self.left, self.right) if each is not None), default=None)


@dataclass(frozen=True)
class Products:
    """The three products of a layer."""

    fprop: Product = Product()
    dgrad: Product = Product()
    wgrad: Product = Product()

    def each(self) -> Iterator[tuple[str, Product]]:
        """Yield each product with its name."""
        yield from zip(PRODUCTS, (self.fprop, self.dgrad, self.wgrad), strict=True)

    def operands(self) -> Iterator[Quantization]:
        """Yield the quantised operands."""
        yield from (operand for _, product in self.each() for operand in (product.left, product.right) if operand)

    @property
    def bits(self) -> int | None:
        """The width of the narrowest operand; None without a quantised operand."""
        return min((product.bits for _, product in self.each() if product.bits is not None), default=None)

    @property
    def wide(self) -> tuple[str, ...]:
        """The names of the products without a quantised operand."""
        return tuple(name for name, product in self.each() if product.bits is None)


@dataclass(frozen=True)
class TrainingRecipe:
    """A named recipe of a library.

    Args:
        name: short name, such as "mxfp8".
        title: the name in sentences, such as "MXFP8".
        products: how the three products are computed.
        multiple: the kernels need features of a layer in multiples of this.
        caveats: parts of the recipe, in some trainings, that plain counts do not show.
    """

    name: str
    title: str
    products: Products
    multiple: int
    caveats: tuple[str, ...] = ()

    @property
    def compute_capability(self) -> str:
        """The least compute capability of a GPU whose Tensor Cores take the operands; others emulate them."""
        left = self.products.fprop.left
        return {16: "10.0", 32: "10.0", 128: "9.0"}.get(left.block[1] if left else 0, "8.9")

    @property
    def token_multiple(self) -> int:
        """The tokens that wgrad sums over must be a multiple of this; 1 if wgrad is not quantised.

        Kernels cut no block of 16 or 32 tokens. torch's FP8 products sum over multiples of 16, TransformerEngine's of 8.
        """
        left = self.products.wgrad.left
        if left is None:
            return 1
        return 8 if left.rule == HISTORY else {32: 32, 128: 8}.get(left.block[1], 16)

    def quantization(self, product: str, tensor: str) -> Quantization | None:
        """Return how a tensor is quantised as an operand of a product; None if it is not.

        Raises:
            ValueError: the tensor is not an operand of the product.
        """
        found = dict(self.products.each())[product]
        return (found.left, found.right)[OPERANDS[product].index(tensor)]


def uniform(x: Quantization, weight: Quantization, gradient: Quantization) -> Products:
    """Return the products of layers that quantise a tensor in the same way for both of its products."""
    return Products(Product(x, weight), Product(gradient, weight), Product(gradient, x))


_E4M3, _E5M2, _E2M1 = FLOAT8_E4M3.name, FLOAT8_E5M2.name, FLOAT4_E2M1.name
_TENSOR = Quantization(_E4M3, (WHOLE, WHOLE), FLOAT32_SCALE, AMAX)
#: TransformerEngine's DelayedScaling.
_DELAYED = replace(_TENSOR, rule=HISTORY)
_TENSOR_GRADIENT = replace(_TENSOR, element=_E5M2)
#: torchao rounds 448 / amax down to a power of two: the divisor is then the least power of two without clipping.
_ROW = Quantization(_E4M3, (1, WHOLE), POWER_OF_TWO, RCEIL)
_TENSOR_BY_POWERS = replace(_TENSOR, scale=POWER_OF_TWO, rule=RCEIL)
MXFP8_E4M3 = Quantization(_E4M3, (1, 32), POWER_OF_TWO, RCEIL)
MXFP8_E5M2 = replace(MXFP8_E4M3, element=_E5M2)
MXFP4 = replace(MXFP8_E4M3, element=_E2M1)
FP8_BLOCK_128 = Quantization(_E4M3, (1, 128), POWER_OF_TWO, RCEIL)
NVFP4 = Quantization(_E2M1, (1, 16), E4M3_SCALE, AMAX)

_MX = uniform(MXFP8_E4M3, MXFP8_E4M3, MXFP8_E4M3)
_MX_FLOOR = replace(MXFP8_E4M3, rule=FLOOR)
_MX4_FLOOR = replace(MXFP4, rule=FLOOR)
_SQUARE = replace(FP8_BLOCK_128, block=(128, 128))
_FP32_BLOCK = replace(FP8_BLOCK_128, scale=FLOAT32_SCALE, rule=AMAX)
_ROWS = uniform(_ROW, _ROW, _ROW)
_TO_NEAREST = ("stochastic rounding of gradients, under which flushing has no bias",)

#: Every recipe by its name, as in torchao 0.18 and TransformerEngine 2.20.
RECIPES: dict[str, TrainingRecipe] = {
    recipe.name: recipe
    for recipe in (
        TrainingRecipe("fp8-tensorwise", "FP8 tensorwise", uniform(_TENSOR, _TENSOR, _TENSOR_GRADIENT), 16),
        TrainingRecipe(
            "fp8-delayed",
            "FP8 delayed scaling",
            uniform(_DELAYED, _DELAYED, replace(_DELAYED, element=_E5M2)),
            16,
            ("scales from the maxima of earlier steps",),
        ),
        TrainingRecipe("fp8-rowwise", "FP8 rowwise", _ROWS, 16),
        TrainingRecipe(
            "fp8-rowwise-with-gw-hp",
            "FP8 rowwise with wide wgrad",
            Products(Product(_ROW, _ROW), Product(_ROW, _TENSOR_BY_POWERS)),
            16,
        ),
        TrainingRecipe("mxfp8", "MXFP8", _MX, 32),
        TrainingRecipe("mxfp8-wgrad-hp", "MXFP8 with wide wgrad", replace(_MX, wgrad=Product()), 32),
        TrainingRecipe("mxfp8-floor", "MXFP8 (FLOOR)", uniform(_MX_FLOOR, _MX_FLOOR, _MX_FLOOR), 32),
        TrainingRecipe("mxfp4", "MXFP4", uniform(MXFP4, MXFP4, MXFP4), 32, _TO_NEAREST),
        TrainingRecipe("mxfp4-floor", "MXFP4 (FLOOR)", uniform(_MX4_FLOOR, _MX4_FLOOR, _MX4_FLOOR), 32, _TO_NEAREST),
        TrainingRecipe("fp8-block", "FP8 in blocks", uniform(FP8_BLOCK_128, _SQUARE, FP8_BLOCK_128), 128),
        TrainingRecipe(
            "fp8-block-fp32",
            "FP8 in blocks with FP32 scales",
            uniform(_FP32_BLOCK, replace(_FP32_BLOCK, block=(128, 128)), _FP32_BLOCK),
            128,
        ),
        TrainingRecipe(
            "nvfp4",
            "NVFP4",
            uniform(NVFP4, replace(NVFP4, block=(16, 16)), replace(NVFP4, rounding=STOCHASTIC)),
            16,
            (
                "a random Hadamard transform of wgrad's operands",
                "the choice between 4 and 6 as a block's largest value (4over6)",
            ),
        ),
    )
}


def least_even(*numbers: int) -> int:
    """Return the number with the fewest factors of two, the first of several: if it is a multiple of 2^k, so are all. 0: none."""
    return min(filter(None, numbers), key=lambda number: number & -number, default=0)


def is_grouped(function: str) -> bool:
    """Return whether a function of torch, by its name, multiplies all experts' matrices in one grouped product."""
    return function in ("grouped_mm", "_grouped_mm")


def recipe_of(products: Products) -> TrainingRecipe | None:
    """Return the recipe that computes these products; None if no known recipe does."""
    return next((recipe for recipe in RECIPES.values() if recipe.products == products), None)


def as_recipes(given: TrainingRecipe | str | Iterable[TrainingRecipe | str]) -> tuple[TrainingRecipe, ...]:
    """Return one or several recipes, given by name or as they are, each once. Raises: as ``as_recipe``."""
    if isinstance(given, (TrainingRecipe, str)):
        given = (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"recipes={given!r}: give names, such as 'mxfp8'")
    return tuple(dict.fromkeys(map(as_recipe, given)))


def as_recipe(given: TrainingRecipe | str) -> TrainingRecipe:
    """Return the recipe of a name; a recipe is returned unchanged.

    Raises:
        TypeError: neither a name nor a recipe.
        ValueError: no recipe has this name; the message lists all names.
    """
    if isinstance(given, TrainingRecipe):
        return given
    if not isinstance(given, str):
        raise TypeError(f"{given!r} names no recipe: give a name, such as 'mxfp8'")
    found = RECIPES.get(given.lower().replace("_", "-"))
    if found is None:
        raise ValueError(f"{given!r} names no recipe: there are {', '.join(RECIPES)}")
    return found
