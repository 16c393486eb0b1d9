"""The layout of a tile of blocks, of its planes of bits and of the counts in a result."""

from __future__ import annotations

from mpinspect.counting.cpu import planes
from mpinspect.counting.cpu.vectors import LANES
from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT

CLASSES, TURNS = len(CUTS) + 1, planes.COLUMNS // LANES
#: Elements of a tile, unless a block has more; and those of the largest block.
TILE, MOST_ELEMENTS = 8192, 1 << 16
#: Elements whose exponents, if they are counted apart, are counted before their blocks, where no copy is needed: they stay in the
#: second-level cache.
TOGETHER = 4 * TILE
#: Magnitudes are doubled, so that the sign is shifted out: their mantissas have 24 bits.
FIELD, MANTISSA = 24, (1 << 24) - 1
CUT_MANTISSAS = tuple(int((cut - 1) * (1 << FIELD)) for cut in CUTS)
#: A bit of listed edges that are not powers of two.
NEAR_NEXT = 1 << 16
#: The largest ``_edge_key`` of an edge, whose significand is 1, or at least 2 - 2^-11.
EDGE = 1 << (32 - 11)
#: Blocks with a largest magnitude of a lower exponent field are too small to be counted at all. Those outside the next two are
#: counted one by one: within these, neither a zero nor a value next to a limit of all ones has a bit in the planes.
TINY_FIELD, LEAST_FIELD, MOST_FIELD, BROKEN_FIELD = LOWEST_EXPONENT + 127, 64, 191, 255
NO_LIMIT = (1 << 32) - 1
#: Sets of planes: of each reach (distances below 32, and up to 63) and class; then of 32 exponents of largest magnitudes each.
REACHES, WINDOWS = 2, 8
#: The last set: of exponents.
EXPONENT_SET = REACHES * CLASSES + WINDOWS
SETS = EXPONENT_SET + 1
#: Rows of a set: lower planes and their carries, the other planes, and the state.
UPPER = planes.LOWER + 1
STATE = UPPER + planes.ROWS
SET_ROWS = STATE + 1
SET_BYTES = SET_ROWS * planes.ROW_BYTES
#: Prefetch distance in bytes: a tile. The pass over listed vectors prefetches, since it takes longest: the memory is never idle.
AHEAD = 4 * TILE
#: A number of elements that no tensor has.
ALL = 1 << 48
#: The fields of the array that describes a tensor's blocks: address, bytes of an element, whether it is BF16; blocks in a row of
#: blocks; elements from one row to the next; rows, columns and padded elements of a block; the share of a job's length that
#: stands for a block; whether the exponents are counted.
ADDRESS, BYTES, IS_BF16, WIDE, STRIDE, ROWS, COLUMNS, PADDED, UNIT, EXPONENTS, FIELDS = range(11)
#: Copies of counters: neighbouring values, which often share a counter, add to different copies.
COPIES = 4
#: The fields of a result: distances by class, then powers; vectors by the exponent field of their block's largest magnitude, from
#: the highest one on, and the zeros in them by this field; then these; then a row of exponents.
KINDS = 2
MAXIMA = KINDS * CLASSES * DISTANCES
ZEROS_AT = MAXIMA + WINDOWS * planes.WINDOW
OVER = ZEROS_AT + WINDOWS * planes.WINDOW
ZERO = OVER + len(CUTS)
ROW = ZERO + 1
#: The fields of a tile's ``window``, and the place of its first count.
LOWEST, ELEMENTS, IS_APART, IN_WINDOW = range(4)
