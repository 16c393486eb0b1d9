"""The Triton kernels: they count exponents, edge counters, zeros, infinities, NaNs and extremes in one read of the values.

A histogram in shared memory is too slow here. At 4 TB/s each of 132 multiprocessors gets about four float32 values a clock,
and most values share a few exponents, so that additions to one counter are serialised; ``tl.histogram`` votes bit by bit,
which takes several dozen instructions a value. So each lane counts 31 adjacent exponents (the window) in registers:

- A value becomes one bit of a 32-bit word: 1 << (exponent field - window's first).
- Words are added bit by bit, as 32 counters in parallel: plane k holds bit k of every counter. A full adder of three
  words takes two logical instructions, and in a tree of full adders a value costs about two instructions (carry-save
  addition, as in Harley and Seal's population count). Powers of two, and values near the top, are counted the same way.
- At the end of its share of the tensor, a program sums its counters over the lanes, and adds the non-zero sums to the row.

Each lane keeps its own count of zeros and its extremes. A tile's extremes show whether it has values outside the window (all
infinities, NaNs and subnormals are). ``_count_rest`` then reads that tile again and counts only the values outside the
window; it also counts a last tile that is not full. It finds up to eight distinct counters by comparison, with one atomic
addition each; any remaining values are spread over many counters, so that their atomic additions rarely conflict.

Performance, estimated from the code compiled for sm_90 without measuring on a GPU: 23 instructions a float32 value in the loop
over full tiles, and about 40 more for each value of a tile that is read again. This gives 3.5 values a clock and
multiprocessor, about 0.8e12 values a second on 132 of them, which is an H100's memory speed and three quarters of an H200's.

Triton 3.6 and 3.9 compile the kernels for sm_80 and sm_90, and their interpreters give the same counts. Triton 3.9 sums over
a warp's lanes in registers; 3.6 sums through 4 KiB of shared memory.

All arithmetic is on the bits, so the counts are exact under any flush-denormals mode; integer additions commute, so the
counts do not depend on the order in which programs run.

Names in this file: m is the magnitude bits (an integer, without the sign) of a value as float32, or as float64 for float64; M
is the number of mantissa bits of that format; a key is a slot of ``mpinspect.counting.bits`` minus one.
"""

# Triton compiles the source of these functions and infers types itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

#: Values per lane in a tile: the inputs of one adder tree.
VALUES = tl.constexpr(16)
#: The number of exponents in the window; the word's last bit is for values outside the window.
WINDOW = tl.constexpr(31)
# The window extends further below the mean exponent than above: most data has a finite density at zero, so that counts halve
# with each lower exponent, but fall off faster towards higher exponents.
BELOW_MEAN = tl.constexpr(20)
# The number of counters that ``_count_rest`` finds by comparison; remaining values have too many counters for much contention.
ROUNDS = tl.constexpr(8)
# Indices in a row (mpinspect.counting.layout).
ZEROS = tl.constexpr(0)
INFS = tl.constexpr(1)
NANS = tl.constexpr(2)
MIN_BITS = tl.constexpr(3)
MAX_BITS = tl.constexpr(4)
HEADER = tl.constexpr(5)


@triton.jit
def _add_words(a, b, c):
    """Return sum and carry of a full adder for each bit of three words."""
    return a ^ b ^ c, (a & b) | (c & (a ^ b))


@triton.jit
def _add_pair(x, y, p0, p1, p2, p3, w1, w2, w3, PAIR: tl.constexpr):
    """Add two words to planes 0 to 3. w1, w2, w3 hold carries until their partners; the eighth pair gives the final carry."""
    p0, carry = _add_words(p0, x, y)
    if PAIR % 2 == 0:
        w1 = carry
    else:
        p1, carry = _add_words(p1, w1, carry)
        if PAIR % 4 == 1:
            w2 = carry
        else:
            p2, carry = _add_words(p2, w2, carry)
            if PAIR % 8 == 3:
                w3 = carry
            else:
                p3, carry = _add_words(p3, w3, carry)
    return p0, p1, p2, p3, w1, w2, w3, carry


@triton.jit
def _carry_on(carry, p4, p5, p6, p7, p8, p9):
    """Add a carry of weight 16 to planes 4 to 9, and return these planes."""
    p4, carry = p4 ^ carry, p4 & carry
    p5, carry = p5 ^ carry, p5 & carry
    p6, carry = p6 ^ carry, p6 & carry
    p7, carry = p7 ^ carry, p7 & carry
    p8, carry = p8 ^ carry, p8 & carry
    return p4, p5, p6, p7, p8, p9 ^ carry


@triton.jit
def _two_fields(plane, bit: tl.constexpr):
    """Return a plane's bits of the counters ``bit`` and ``bit`` + 16, in 16 bits each."""
    return (plane >> bit) & 0x10001


@triton.jit
def _totals(p0, p1, p2, p3, p4, p5, p6, p7, p8, p9):
    """Return the 32 counters summed over the lanes: int32, shape (32,). Each sum must be below 2^15."""
    bins = tl.arange(0, 32)
    totals = tl.zeros([32], tl.int32)
    for bit in tl.static_range(16):
        low = _two_fields(p0, bit) + (_two_fields(p1, bit) << 1) + (_two_fields(p2, bit) << 2)
        middle = (_two_fields(p3, bit) << 3) + (_two_fields(p4, bit) << 4) + (_two_fields(p5, bit) << 5)
        high = (_two_fields(p6, bit) << 6) + (_two_fields(p7, bit) << 7) + (_two_fields(p8, bit) << 8)
        both = tl.sum((low + middle + high + (_two_fields(p9, bit) << 9)).to(tl.int32, bitcast=True), 0)
        totals = tl.where(bins == bit, both & 0xFFFF, totals)
        totals = tl.where(bins == bit + 16, both >> 16, totals)
    return totals


@triton.jit
def _magnitudes(pointers, inside, codes, KIND: tl.constexpr):
    """Return m of the values at these addresses; 0 where ``inside`` is False (None: all are inside)."""
    other = None if inside is None else 0
    bits = tl.load(pointers, mask=inside, other=other)
    if KIND == "float64":
        m = bits & 0x7FFFFFFFFFFFFFFF
    elif KIND == "float32":
        m = bits & 0x7FFFFFFF
    elif KIND == "bfloat16":
        m = (bits.to(tl.int32) << 16) & 0x7FFFFFFF
    elif KIND == "float16":
        # The conversion is exact, and float16's subnormals are normal in float32.
        m = bits.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        m = tl.load(codes + bits.to(tl.int32), mask=inside, other=other)
    return m


@triton.jit
def _words(m, first, M: tl.constexpr):
    """Return each value's word (bit 31: outside the window), and two copies: 0 unless a power of two, 0 unless near the top."""
    place = ((m >> M) - first).to(tl.int32).to(tl.uint32, bitcast=True)
    place = tl.minimum(place, WINDOW)
    word = tl.full(place.shape, 1, tl.uint32) << place
    mantissa = m & ((1 << M) - 1)
    nothing = tl.zeros_like(word)
    power = tl.where(mantissa == 0, word, nothing)
    near = tl.where(mantissa >= (1 << M) - (1 << (M - 11)), word, nothing)
    return word, power, near


@triton.jit
def _keys(m, M: tl.constexpr):
    """Return the key (counter) of each finite non-zero value; key 0 is the smallest subnormal, a power of two."""
    if M == 23:
        as_float = m.to(tl.float32).to(tl.int32, bitcast=True)
        below_zero = (127 + 22) << 23
    else:
        as_float = m.to(tl.float64).to(tl.int64, bitcast=True)
        below_zero = (1023 + 51) << 52
    # Write subnormals as if the exponent field continued below zero.
    extended = tl.where(m < (1 << M), as_float - below_zero, m)
    keys = (extended >> M) + ((extended - 1) >> M) + ((extended + (1 << (M - 11))) >> M) + (3 * M - 2)
    return keys.to(tl.int32)


@triton.jit
def _float64_bits(m, M: tl.constexpr):
    """Return the float64 bits of a finite scalar m; 0 for m = 0."""
    if M == 52:
        bits = m
    else:
        subnormal = m.to(tl.float64).to(tl.int64, bitcast=True) - (149 << 52)
        bits = tl.where(m < (1 << 23), subnormal, (m.to(tl.int64) << 29) + (896 << 52))
        bits = tl.where(m == 0, 0, bits)
    return bits


@triton.jit
def _merge_extremes(row, low, high, infinity, M: tl.constexpr):
    """Merge a program's extremes into the row.

    Args:
        low: the smallest non-zero m minus one; ``infinity`` - 1 or more if there is none.
        high: the largest finite m; 0 if there is none.
    """
    if low < infinity - 1:
        tl.atomic_min(row + MIN_BITS, _float64_bits(low + 1, M), sem="relaxed")
    if high > 0:
        tl.atomic_max(row + MAX_BITS, _float64_bits(high, M), sem="relaxed")


@triton.jit
def _add_scalar(pointer, number):
    if number > 0:
        tl.atomic_add(pointer, number.to(tl.int64), sem="relaxed")


@triton.jit
def _count_rest(
    values, row, codes, length, first, WINDOWED: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr
):
    """Count a tile of ``length`` values into the row, value by value; if WINDOWED, only values outside the window.

    The extremes are always taken over all values, because in a tile with infinities or NaNs the fast loop skips the maximum.
    """
    infinity = _infinity(M)
    places = tl.arange(0, VALUES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = places < length
    m = _magnitudes(values + places, inside, codes, KIND)
    finite = inside & (m > 0) & (m < infinity)
    low = tl.min(tl.min(tl.where(finite, m - 1, infinity), 0), 0)
    high = tl.max(tl.max(tl.where(finite, m, 0), 0), 0)
    _merge_extremes(row, low, high, infinity, M)
    _add_scalar(row + INFS, tl.sum(tl.sum((inside & (m == infinity)).to(tl.int32), 0), 0))
    _add_scalar(row + NANS, tl.sum(tl.sum((inside & (m > infinity)).to(tl.int32), 0), 0))
    left = finite
    if WINDOWED:
        left = finite & (((m >> M) < first) | ((m >> M) >= first + WINDOW))
    else:
        _add_scalar(row + ZEROS, tl.sum(tl.sum((inside & (m == 0)).to(tl.int32), 0), 0))
    waiting = tl.where(left, _keys(m, M), -1)
    counters = row + HEADER
    largest = tl.max(tl.max(waiting, 0), 0)
    rounds = 0
    while (largest >= 0) & (rounds < ROUNDS):
        found = waiting == largest
        _add_scalar(counters + largest, tl.sum(tl.sum(found.to(tl.int32), 0), 0))
        waiting = tl.where(found, -1, waiting)
        largest = tl.max(tl.max(waiting, 0), 0)
        rounds += 1
    if largest >= 0:
        one = tl.full(waiting.shape, 1, tl.int64)
        tl.atomic_add(counters + waiting, one, mask=waiting >= 0, sem="relaxed")


@triton.jit
def _infinity(M: tl.constexpr):
    """Return m of infinity."""
    return 0x7F800000 if M == 23 else 0x7FF0000000000000


@triton.jit
def _first_of_window(values, codes, KIND: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Return the window's lowest exponent field, BELOW_MEAN less than the mean over the first values that are normal."""
    fields: tl.constexpr = 255 if M == 23 else 2047
    places = tl.arange(0, 4)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    field = (_magnitudes(values + places, None, codes, KIND) >> M).to(tl.int32)
    normal = (field > 0) & (field < fields)
    total = tl.sum(tl.sum(tl.where(normal, field, 0), 0), 0)
    mean = total // tl.maximum(tl.sum(tl.sum(normal.to(tl.int32), 0), 0), 1)
    return tl.minimum(tl.maximum(mean - BELOW_MEAN, 1), fields - WINDOW)


@triton.jit
def _count_tiles(values, row, codes, tiles, KIND: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Count ``tiles`` full tiles into the row: at least one tile, and at most 2^15 - 1 values in total."""
    infinity = _infinity(M)
    lane = tl.arange(0, LANES)
    first = _first_of_window(values, codes, KIND, M, LANES)
    # The mantissas of 16-bit and 8-bit formats are too short for values near the top of an exponent.
    HAS_NEAR: tl.constexpr = (KIND == "float32") or (KIND == "float64")
    none = tl.zeros([LANES], tl.uint32)
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 = none, none, none, none, none, none, none, none, none, none
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9 = none, none, none, none, none, none, none, none, none, none
    c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 = none, none, none, none, none, none, none, none, none, none
    zeros = tl.zeros([LANES], tl.int32)
    start = _magnitudes(values + lane, None, codes, KIND)
    unsigned: tl.constexpr = tl.uint32 if M == 23 else tl.uint64
    top_bit: tl.constexpr = 31 if M == 23 else 63
    low = tl.full([LANES], infinity, unsigned)
    high = tl.zeros([LANES], start.dtype)
    for tile in range(tiles):
        here = values + tile * (VALUES * LANES)
        tile_low = tl.full([LANES], infinity, unsigned)
        tile_high = tl.zeros([LANES], start.dtype)
        u1, u2, u3, v1, v2, v3, w1, w2, w3 = none, none, none, none, none, none, none, none, none
        ac, bc, cc = none, none, none
        for pair in tl.static_range(VALUES // 2):
            x = _magnitudes(here + (2 * pair * LANES + lane), None, codes, KIND)
            y = _magnitudes(here + ((2 * pair + 1) * LANES + lane), None, codes, KIND)
            # Zero minus one is the largest unsigned integer, and the only difference whose top bit is set.
            x_less, y_less = (x - 1).to(unsigned, bitcast=True), (y - 1).to(unsigned, bitcast=True)
            zeros += (x_less >> top_bit).to(tl.int32) + (y_less >> top_bit).to(tl.int32)
            tile_low = tl.minimum(tile_low, tl.minimum(x_less, y_less))
            tile_high = tl.maximum(tile_high, tl.maximum(x, y))
            x_word, x_power, x_near = _words(x, first, M)
            y_word, y_power, y_near = _words(y, first, M)
            a0, a1, a2, a3, u1, u2, u3, ac = _add_pair(x_word, y_word, a0, a1, a2, a3, u1, u2, u3, pair)
            b0, b1, b2, b3, v1, v2, v3, bc = _add_pair(x_power, y_power, b0, b1, b2, b3, v1, v2, v3, pair)
            if HAS_NEAR:
                c0, c1, c2, c3, w1, w2, w3, cc = _add_pair(x_near, y_near, c0, c1, c2, c3, w1, w2, w3, pair)
        a4, a5, a6, a7, a8, a9 = _carry_on(ac, a4, a5, a6, a7, a8, a9)
        b4, b5, b6, b7, b8, b9 = _carry_on(bc, b4, b5, b6, b7, b8, b9)
        if HAS_NEAR:
            c4, c5, c6, c7, c8, c9 = _carry_on(cc, c4, c5, c6, c7, c8, c9)
        low = tl.minimum(low, tile_low)
        high = tl.where(tile_high < infinity, tl.maximum(high, tile_high), high)
        lowest = (tile_low + 1).to(start.dtype, bitcast=True)
        outside = ((lowest >> M) < first) | ((tile_high >> M) >= first + WINDOW)
        if tl.max(outside.to(tl.int32), 0) > 0:
            _count_rest(here, row, codes, VALUES * LANES, first, True, KIND, M, LANES)
    _merge_extremes(row, tl.min(low.to(start.dtype, bitcast=True), 0), tl.max(high, 0), infinity, M)
    _add_scalar(row + ZEROS, tl.sum(zeros, 0))
    every = _totals(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9)
    power = _totals(b0, b1, b2, b3, b4, b5, b6, b7, b8, b9)
    near = _totals(c0, c1, c2, c3, c4, c5, c6, c7, c8, c9) if HAS_NEAR else tl.zeros([32], tl.int32)
    bins = tl.arange(0, 32)
    counters = row + HEADER + 3 * (first - 1 + M + bins)
    _add_where_any(counters, power, bins)
    _add_where_any(counters + 1, every - power - near, bins)
    if HAS_NEAR:
        _add_where_any(counters + 2, near, bins)


@triton.jit
def _add_where_any(counters, counts, bins):
    tl.atomic_add(counters, counts.to(tl.int64), mask=(counts > 0) & (bins < WINDOW), sem="relaxed")


@triton.jit
def _count_share(values, row, codes, length, KIND: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Count one program's share of a tensor."""
    tiles = length // (VALUES * LANES)
    if tiles > 0:
        _count_tiles(values, row, codes, tiles, KIND, M, LANES)
    counted = tiles * (VALUES * LANES)
    if counted < length:
        _count_rest(values + counted, row, codes, length - counted, 0, False, KIND, M, LANES)


@triton.jit(do_not_specialize=["values", "row", "codes", "length", "share"])
def count_one(values, row, codes, length, share, KIND: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Add the counts of ``length`` values (below 2^31) to a row; each program counts ``share`` of them.

    Args:
        values: the values' bits; row: int64; codes: int32 m of each code for 8-bit dtypes, else not read.
    """
    start = tl.program_id(0) * share
    _count_share(values + start, row, codes, tl.minimum(length - start, share), KIND, M, LANES)


@triton.jit(do_not_specialize=["entries", "owners", "codes", "share"])
def count_many(entries, owners, codes, share, KIND: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Add the counts of many tensors of one dtype to one row per tensor.

    Args:
        entries: int64, (tensors, 4): address and number of the values, the row's address, the tensor's first program.
        owners: int64, the index of the tensor that each program works on.
    """
    program = tl.program_id(0)
    entry = entries + 4 * tl.load(owners + program).to(tl.int64)
    start = (program - tl.load(entry + 3)) * share
    length = tl.minimum(tl.load(entry + 1) - start, share).to(tl.int32)
    if KIND == "float64":
        values = tl.load(entry).to(tl.pointer_type(tl.int64))
    elif KIND == "float32":
        values = tl.load(entry).to(tl.pointer_type(tl.int32))
    elif (KIND == "float16") or (KIND == "bfloat16"):
        values = tl.load(entry).to(tl.pointer_type(tl.int16))
    else:
        values = tl.load(entry).to(tl.pointer_type(tl.uint8))
    row = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
    _count_share(values + start, row, codes, length, KIND, M, LANES)
