"""Counts a tensor's elements by their distance below the largest magnitude of their block, which decides what a recipe flushes.

An element of exponent e in a block whose largest magnitude has exponent E lies d = E - e powers of two below it. A power-of-two
scale moves both by the same amount, so d decides whether the element survives, whatever the tensor's magnitude. The rule RCEIL
adds one power of two to the scale of blocks whose largest significand exceeds the format's, so elements are also counted by
that significand. The formulas are from the OCP MX specification 1.0, sections 5 and 6.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from mpinspect.numeric.exponents import ratio
from mpinspect.numeric.formats import FloatFormat
from mpinspect.numeric.recipes import AMAX, E4M3_SCALE, FLOOR, RCEIL, Quantization

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
#: The largest finite magnitudes.
_HIGHEST_EXPONENT = 127
#: NVFP4's scale of a block before it is rounded to E4M3, in units of E4M3's smallest subnormal 2^-9: limits, and the least and
#: greatest ratio to the rounded scale between each limit and the one before. Up to a half the scale becomes zero, and the block
#: with it. Between powers of two below 8 the integers are E4M3's numbers; from 8 on there are eight to a binade.
_E4M3_RATIOS = (
    (0.5, 0.0, 0.0),
    (1.0, 0.5, 1.0),
    *((2.0 * whole, (whole + 0.5) / (whole + 1), (whole + 0.5) / whole) for whole in (1, 2, 4)),
    (math.inf, 8.5 / 9, 8.5 / 8),
)
#: The scale of the block with the tensor's largest magnitude, 448.
_LARGEST_SCALE = 448.0 * 2**9

Rows = tuple[tuple[int, ...], ...]
_NONE: Rows = ((0,) * DISTANCES,) * (len(CUTS) + 1)
_NO_MAXIMA = (0,) * (_HIGHEST_EXPONENT + 1 - LOWEST_EXPONENT)


@dataclass(frozen=True)
class BlockCounts:
    """The elements of a tensor by their distance below their block's largest magnitude. Integers; ``a + b`` adds tensors.

    Args:
        block: rows and columns of a block.
        distances: by class of the block's largest significand m (m <= 1.5, <= 1.75, above), the number of non-zero elements for
            each distance d in powers of two; the last bin has all larger ones. Shape (3, 64).
        powers: the powers of two among ``distances``, shape (3, 64).
        maxima: by the exponent of their largest magnitude, from -112 to 127, the number of counted blocks. Shape (240,).
        elements: the number of non-zero elements in these blocks, shape (240,).
        over: the number of elements at d = 0 whose significand exceeds 1.5, and 1.75.
        zeros: number of zeros in the counted blocks.
        blocks: number of blocks, including the following three kinds.
        zero_blocks: blocks of zeros.
        broken_blocks, broken_elements: blocks with an infinity or NaN, which become NaN, and their elements.
        tiny_blocks, tiny_elements: blocks with a largest magnitude below 2^-112, and their elements.
        cut_blocks, cut_elements: parts of blocks whose other parts lie on other ranks, and their elements that are not zero. The
            distances of these elements may be larger in the whole block, so the counts give bounds alone.
        tensors: number of tensors, or parts of one, that were counted.
        shards: how many of them are shards, whose other parts lie on other ranks. Neither number is compared by ``==``.
    """

    block: tuple[int, int]
    distances: Rows = _NONE
    powers: Rows = _NONE
    maxima: tuple[int, ...] = _NO_MAXIMA
    elements: tuple[int, ...] = _NO_MAXIMA
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
    tensors: int = field(default=0, compare=False)
    shards: int = field(default=0, compare=False)

    def __add__(self, other: BlockCounts) -> BlockCounts:
        """Return the counts of both tensors. Raises ValueError if the blocks have different sizes."""
        if self.block != other.block:
            raise ValueError(f"blocks of {self.block} and {other.block} can't be added: count both with one size")
        return BlockCounts(
            self.block,
            _added(self.distances, other.distances),
            _added(self.powers, other.powers),
            _sums(self.maxima, other.maxima),
            _sums(self.elements, other.elements),
            (self.over[0] + other.over[0], self.over[1] + other.over[1]),
            *(getattr(self, name) + getattr(other, name) for name in _NUMBERS),
        )

    def as_cut(self) -> BlockCounts:
        """Return the same counts of blocks whose other parts lie on other ranks."""
        return replace(self, cut_blocks=self.blocks, cut_elements=self.nonzero)

    @property
    def nonzero(self) -> int:
        """Number of non-zero elements in counted blocks."""
        return sum(map(sum, self.distances))

    def flushed(self, quantization: Quantization) -> int:
        """Return how many non-zero elements of counted blocks a recipe rounds to zero, exactly; of tiny blocks there are bounds.

        Raises:
            ValueError: the scale is not a power of two by the rule FLOOR or RCEIL, the blocks have another size, or some are cut.
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

    def flushed_bounds(self, quantization: Quantization, largest: float | None = None) -> tuple[int, int]:
        """Return the least and greatest number of elements that a recipe flushes.

        They are equal for power-of-two scales, unless blocks are cut or tiny. An FP32 scale maps a block's maximum to the
        format's largest value, so the distance decides for all but two powers of two.

        NVFP4's scales depend on the tensor's largest magnitude too: blocks 2^18 below it and lower may be flushed whole. In the
        counts of one tensor this is the highest of ``maxima``. Counts added over tensors or steps do not have it for each: the
        upper bound then assumes the highest of all, the lower bound that every block may be its tensor's largest. Adding the
        bounds of single tensors is closer. Of a shard the upper bound is trivial, all non-zero elements, unless ``largest`` is
        given.

        Args:
            largest: the largest finite magnitude of the tensor, if all counts are of parts of one tensor.

        Raises:
            ValueError: the blocks have another size, the scale depends on earlier steps, or a block exceeds ``largest``.
        """
        if quantization.is_power_of_two:
            flushed = self._flushed(quantization)
            return flushed, flushed + self.cut_elements + self.tiny_elements
        self._require_block(quantization)
        if quantization.rule != AMAX:
            raise ValueError(
                f"a scale by the rule {quantization.rule} depends on earlier steps: the counts have no bounds"
            )
        scales = [(1.0, 1.0, self.nonzero)]
        if quantization.scale == E4M3_SCALE:
            scales = list(self._e4m3_scales(largest))
        limits = list(self._limits(quantization.format))
        flushed = _most_pairs(
            [(least * (1 - _FLOAT32_ERROR), number) for least, _, number in scales],
            [(beyond, number) for _, beyond, number in limits],
        )
        kept = _most_pairs(
            [(-greatest * (1 + _FLOAT32_ERROR), number) for _, greatest, number in scales],
            [(-upto, number) for upto, _, number in limits],
        )
        return self.nonzero - kept, min(flushed + self.cut_elements, self.nonzero) + self.tiny_elements

    def _limits(self, format: FloatFormat) -> Iterator[tuple[float, float, int]]:
        """Yield numbers of elements with two ratios: up to the first they are flushed, and beyond the second they are kept.

        The ratio is that of the scale which maps the block's maximum to the format's largest value to the block's own.
        """
        # The half of the smallest subnormal, which rounds to zero, in units of the binade of the largest value.
        edge = 2.0 ** -_edge(format) / format.max_significand
        for (least, greatest), row, powers in zip(_CLASSES, self.distances, self.powers, strict=True):
            for distance, (number, exact) in enumerate(zip(row, powers, strict=True)):
                unit = edge * 2.0**distance
                yield unit * least, unit * greatest, exact
                yield unit * least / 2, unit * greatest, number - exact

    def _e4m3_scales(self, largest: float | None) -> Iterator[tuple[float, float, int]]:
        """Yield numbers of elements with the least and greatest ratio of ``_limits`` in their blocks, by NVFP4's scales."""
        exponents = range(LOWEST_EXPONENT, _HIGHEST_EXPONENT + 1)
        top = max((each for each, number in zip(exponents, self.maxima, strict=True) if number), default=-math.inf)
        if largest is not None and not largest >= 2.0**top:
            raise ValueError(f"a block's largest magnitude exceeds {largest}: give the largest of the whole tensor")
        least, greatest = 2.0**top, 2.0 ** (top + 1)
        if largest is not None:
            least = greatest = largest
        elif self.shards:
            greatest = math.inf
        is_one = (largest is not None or (self.tensors == 1 and not self.shards)) and not self.cut_blocks
        for exponent, number in zip(exponents, self.elements, strict=True):
            if number:
                scale = 2.0**exponent * _LARGEST_SCALE
                high = 2 * scale / least if is_one else math.inf
                yield *_ratios(scale / greatest, min(high, _LARGEST_SCALE)), number

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
            raise ValueError(f"{quantization.element} is not a format of block recipes: FP8 and FP4 are")
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
    "tensors",
    "shards",
)


def _edge(format: FloatFormat) -> int:
    """Return the distance below the largest value's binade at which a power of two is half of the smallest subnormal."""
    return format.max_exponent - format.min_subnormal_exponent + 1


def _ratios(low: float, high: float) -> tuple[float, float]:
    """Return the least and greatest ratio of a scale between these to its number in E4M3, both in units of 2^-9."""
    low, high = low * (1 - _FLOAT32_ERROR), high * (1 + _FLOAT32_ERROR)
    before, found = 0.0, []
    for limit, least, greatest in _E4M3_RATIOS:
        if low <= limit and high > before:
            found += [least, greatest]
        before = limit
    return min(found), max(found)


def _most_pairs(scales: Sequence[tuple[float, int]], limits: Sequence[tuple[float, int]]) -> int:
    """Return how many elements can at most have a scale that is no greater than their limit.

    The counts do not join the two, so any assignment of the elements to the scales is possible. By König's theorem the most
    pairs are the fewest elements and scales that take part in all of them: scales below some value, and limits from it on.
    """
    values = [*(scale for scale, _ in scales), math.inf]
    return min(
        sum(number for scale, number in scales if scale < value)
        + sum(number for limit, number in limits if limit >= value)
        for value in values
    )


def _added(one: Rows, two: Rows) -> Rows:
    return tuple(_sums(a, b) for a, b in zip(one, two, strict=True))


def _sums(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(one, two, strict=True)))
