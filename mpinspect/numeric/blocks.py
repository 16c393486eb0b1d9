"""Counts a tensor's elements by their distance below the largest magnitude of their block, which decides what a recipe flushes.

An element of exponent e in a block whose largest magnitude has exponent E lies d = E - e powers of two below it. A power-of-two
scale moves both by the same amount, so d decides whether the element survives, whatever the tensor's magnitude. The rule RCEIL
adds one power of two to the scale of blocks whose largest significand exceeds the format's, so elements are also counted by
that significand. The formulas are from the OCP MX specification 1.0, sections 5 and 6.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from mpinspect.numeric.exponents import ratio
from mpinspect.numeric.formats import FloatFormat
from mpinspect.numeric.recipes import AMAX, FLOAT32_SCALE, FLOOR, RCEIL, Quantization

#: The bins of d: 0 to 62, and everything beyond.
DISTANCES = 64
#: The significands of the formats' largest values, FP4 E2M1's and FP8's. They separate the classes of blocks.
CUTS = (1.5, 1.75)
#: Blocks whose largest magnitude has a lower exponent are counted separately: their scale may be the least one, 2^-127.
LOWEST_EXPONENT = -112
#: The ranges of the largest significand in each class of blocks.
_CLASSES = ((1.0, 1.5), (1.5, 1.75), (1.75, 2.0))
#: Generous bound of the rounding errors of a scale and a product in FP32.
_FLOAT32_ERROR = 2.0**-20

Rows = tuple[tuple[int, ...], ...]
_NONE: Rows = ((0,) * DISTANCES,) * (len(CUTS) + 1)


@dataclass(frozen=True)
class BlockCounts:
    """The elements of a tensor by their distance below their block's largest magnitude. Integers; ``a + b`` adds tensors.

    Args:
        block: rows and columns of a block.
        distances: by class of the block's largest significand m (m <= 1.5, <= 1.75, above), the number of non-zero elements for
            each distance d in powers of two; the last bin has all larger ones. Shape (3, 64).
        powers: the powers of two among ``distances``, shape (3, 64).
        over: the number of elements at d = 0 whose significand exceeds 1.5, and 1.75.
        zeros: number of zeros in the counted blocks.
        blocks: number of blocks, including the following three kinds.
        zero_blocks: blocks of zeros.
        broken_blocks, broken_elements: blocks with an infinity or NaN, which become NaN, and their elements.
        tiny_blocks, tiny_elements: blocks with a largest magnitude below 2^-112, and their elements.
        cut_blocks, cut_elements: parts of blocks whose other parts lie on other ranks, and their elements that are not zero. The
            distances of these elements may be larger in the whole block, so the counts give bounds alone.
    """

    block: tuple[int, int]
    distances: Rows = _NONE
    powers: Rows = _NONE
    over: tuple[int, int] = (0, 0)
    zeros: int = 0
    blocks: int = 0
    zero_blocks: int = 0
    broken_blocks: int = 0
    broken_elements: int = 0
    tiny_blocks: int = 0
    tiny_elements: int = 0
    cut_blocks: int = 0
    cut_elements: int = 0

    def __add__(self, other: BlockCounts) -> BlockCounts:
        """Return the counts of both tensors. Raises ValueError if the blocks have different sizes."""
        if self.block != other.block:
            raise ValueError(f"blocks of {self.block} and {other.block} can't be added: count both with one size")
        return BlockCounts(
            self.block,
            _added(self.distances, other.distances),
            _added(self.powers, other.powers),
            (self.over[0] + other.over[0], self.over[1] + other.over[1]),
            *(getattr(self, name) + getattr(other, name) for name in _NUMBERS),
        )

    def as_cut(self) -> BlockCounts:
        """Return the same counts of blocks whose other parts lie on other ranks."""
        return replace(self, cut_blocks=self.blocks, cut_elements=self.nonzero + self.tiny_elements)

    @property
    def nonzero(self) -> int:
        """Number of non-zero elements in counted blocks."""
        return sum(map(sum, self.distances))

    def flushed(self, quantization: Quantization) -> int:
        """Return how many non-zero elements a recipe rounds to zero, exactly.

        Raises:
            ValueError: the scale is no power of two by the rule FLOOR or RCEIL, the blocks have another size, or some are cut.
        """
        self._require_whole()
        return self._flushed(quantization)

    def _flushed(self, quantization: Quantization) -> int:
        edge = _edge(quantization.format)
        return sum(
            sum(row[edge + 1 - shift :]) + powers[edge - shift] for row, powers, shift in self._shifted(quantization)
        )

    def subnormal(self, quantization: Quantization) -> int:
        """Return how many elements survive below the format's smallest normal value, with fewer bits.

        Raises:
            ValueError: as ``flushed``.
        """
        format = quantization.format
        first = format.max_exponent - format.min_normal_exponent + 1
        below = sum(sum(row[first - shift :]) for row, _, shift in self._shifted(quantization))
        return below - self.flushed(quantization)

    def clipped(self, quantization: Quantization) -> int:
        """Return how many elements exceed the format's largest value after scaling; 0 by the rule RCEIL.

        Raises:
            ValueError: as ``flushed``.
        """
        self._require(quantization)
        if quantization.rule == RCEIL:
            return 0
        self._require_whole()
        return self.over[CUTS.index(quantization.format.max_significand)]

    def flushed_bounds(self, quantization: Quantization) -> tuple[int, int]:
        """Return the least and greatest number of elements that a recipe flushes.

        They are equal for power-of-two scales, unless blocks are cut. An FP32 scale maps a block's maximum to the format's
        largest value, so the distance decides for all but two powers of two.

        Raises:
            ValueError: the scale depends on more than the block, or the blocks have another size.
        """
        if quantization.is_power_of_two:
            flushed = self._flushed(quantization)
            return flushed, flushed + self.cut_elements
        self._require_block(quantization)
        if quantization.scale != FLOAT32_SCALE or quantization.rule != AMAX:
            raise ValueError(
                f"a scale in {quantization.scale} by the rule {quantization.rule} depends on the whole tensor"
            )
        format = quantization.format
        # The half of the smallest subnormal, which rounds to zero, in units of the binade of the largest value.
        edge = 2.0 ** -_edge(format)
        low, high = 0, self.cut_elements
        for (least, greatest), row, powers in zip(_CLASSES, self.distances, self.powers, strict=True):
            smallest = format.max_significand / greatest * (1 - _FLOAT32_ERROR)
            largest = format.max_significand / least * (1 + _FLOAT32_ERROR)
            for distance, (number, exact) in enumerate(zip(row, powers, strict=True)):
                unit = 2.0**-distance
                if smallest * unit <= edge:
                    high += number
                if 2 * largest * unit <= edge:
                    low += number
                elif largest * unit <= edge:
                    low += exact
        return low, high

    def _shifted(self, quantization: Quantization) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield each class's counts, and the power of two that the scale's rule adds to these blocks."""
        self._require(quantization)
        cut = quantization.format.max_significand if quantization.rule == RCEIL else 2.0
        for (_, greatest), row, powers in zip(_CLASSES, self.distances, self.powers, strict=True):
            yield row, powers, int(greatest > cut)

    def _require(self, quantization: Quantization) -> None:
        if not quantization.is_power_of_two or quantization.rule not in (FLOOR, RCEIL):
            raise ValueError(
                f"a scale in {quantization.scale} by the rule {quantization.rule} is not exact: ask for flushed_bounds"
            )
        if quantization.format.max_significand not in CUTS:
            raise ValueError(f"{quantization.element} is no format of block recipes: FP8 and FP4 are")
        self._require_block(quantization)

    def _require_whole(self) -> None:
        if self.cut_blocks:
            raise ValueError(
                f"the ranks' shards cut {self.cut_blocks} blocks, so the count is not exact: ask for flushed_bounds"
            )

    def _require_block(self, quantization: Quantization) -> None:
        if quantization.block != self.block:
            raise ValueError(
                f"the recipe has blocks of {quantization.block_name}, the counts are of {self.block[0]}x{self.block[1]}: count "
                "the tensor with the recipe's blocks"
            )


@dataclass(frozen=True)
class QuantizationLoss:
    """The loss by quantising a tensor's finite blocks. ``a + b`` adds tensors.

    Args:
        nonzero: number of non-zero elements.
        flushed: number of elements that become zero when rounded to nearest.
        clipped: number of elements beyond the format's largest value.
        broken: elements of blocks with an infinity or NaN.
        magnitudes, lost: the sums of the magnitudes of all elements, and of the flushed ones.
        squares, products: the sums of x x, and of x times its quantised value.
        noise: the sum of the squared errors; under stochastic rounding their expectation.
    """

    nonzero: int = 0
    flushed: int = 0
    clipped: int = 0
    broken: int = 0
    magnitudes: float = 0.0
    lost: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    noise: float = 0.0

    def __add__(self, other: QuantizationLoss) -> QuantizationLoss:
        """Return the loss of both tensors."""
        return QuantizationLoss(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def flushed_fraction(self) -> float:
        """Flushed elements as a share of the non-zero ones, 0..1."""
        return ratio(self.flushed, self.nonzero)

    @property
    def clipped_fraction(self) -> float:
        """Clipped elements as a share of the non-zero ones, 0..1."""
        return ratio(self.clipped, self.nonzero)

    @property
    def lost_l1_share(self) -> float:
        """The flushed elements' share of the sum of magnitudes, 0..1."""
        return ratio(self.lost, self.magnitudes)

    @property
    def gain(self) -> float:
        """How much larger the quantised tensor is along the tensor itself: sum(x q) / sum(x x) - 1; 0 is unbiased."""
        return ratio(self.products, self.squares) - 1 if self.squares else 0.0

    @property
    def noise_to_signal(self) -> float:
        """The squared error relative to the squares, 0 or more."""
        return ratio(self.noise, self.squares)


_NUMBERS = (
    *("zeros", "blocks", "zero_blocks", "broken_blocks", "broken_elements", "tiny_blocks", "tiny_elements"),
    "cut_blocks",
    "cut_elements",
)


def _edge(format: FloatFormat) -> int:
    """Return the distance below the largest value's binade at which a power of two is half of the smallest subnormal."""
    return format.max_exponent - format.min_subnormal_exponent + 1


def _added(one: Rows, two: Rows) -> Rows:
    return tuple(tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(one, two, strict=True))
