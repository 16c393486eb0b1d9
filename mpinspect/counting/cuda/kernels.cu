// Counts exponents (kernels count_*) and finds largest magnitudes (largest_*) of up to ENTRIES tensors in one launch and one read.
//
// count_* fills rows of mpinspect/counting/layout.py. Every thread adds 1 to a counter in shared memory for each value. The
// counters of a block have COLUMNS copies, and the lanes of a warp use different ones, which lie in different banks: most values
// share a few exponents, so that additions to one copy would be serialised. The key of a counter comes from the bits of a value
// by a few shifts and additions (counting/bits.py explains them). A block adds its counters to the row when it has read its share
// of a tensor: only those between the smallest and the largest magnitude that it found, and only sums other than 0.
//
// The fast loops miss two things, and see from the extremes of 64 bytes whether one is there: subnormals of float32, bfloat16
// and float64, whose counters ("extra") have one copy, and infinities and NaNs, which must not become the largest finite
// magnitude. Then the thread reads those 64 bytes again (examine).
//
// A tensor has tiles of THREADS * UNROLL vectors of 16 bytes. All tiles of a launch are divided among the blocks in order, so
// that one large tensor and many small ones both fill the device. What lies before the first address divisible by 16 belongs
// to the first tile, what lies after the last whole vector to the last. No header is included: NVRTC may have none.
//
// All arithmetic is on the bits, so that no flush-denormals mode can change a count. Integer additions commute, so the order in
// which blocks run cannot either. m is the magnitude bits of a value as float32 (float64 for float64); order is an integer that
// grows with the magnitude: m, or the code without its sign for 16-bit types; low is the smallest order - 1 (all bits of a zero),
// high the largest order. For 16-bit types low and high hold two orders, one per half word.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef COLUMNS
#define COLUMNS 32
#endif

enum { THREADS = 256, WARPS = THREADS / 32, UNROLL = 4, TILE = THREADS * UNROLL, ENTRIES = 168 };
// The row: see mpinspect/counting/layout.py.
enum { ZEROS, INFS, NANS, MIN_BITS, MAX_BITS, HEADER, NOWHERE = -1 };

// target: the address of the row (count_*) or of the 8-byte slot (largest_*). count: not 0, at most 2^30, so that no 32-bit
// counter overflows.
struct Entry {
  u64 values, target;
  u32 count, first_tile;
};

// The whole table is a kernel parameter, of which there may be 4 KB: no copy from the host, nothing to keep alive.
// codes: the row of MAGNITUDES for 8-bit types.
struct Table {
  u64 broken;
  u32 entries, tiles, codes, only_if_broken;
  Entry entry[ENTRIES];
};

// MAGNITUDES is made by the host: for each 8-bit type the upper 16 bits of every code's m; the lower are 0.

__device__ inline u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
__device__ inline u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
__device__ inline u32 larger(u32 a, u32 b) { return a > b ? a : b; }
__device__ inline u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// -- bits and slots ----------------------------------------------------------------------------------------------------

template <class Bits> struct Format;
template <> struct Format<u32> {
  enum { MANTISSA = 23 };
  static const u32 INF = 0x7f800000u;
};
template <> struct Format<u64> {
  enum { MANTISSA = 52 };
  static const u64 INF = 0x7ff0000000000000ull;
};

// The index after HEADER of a subnormal m.
template <class Bits> __device__ inline int subnormal_slot(Bits m) {
  int exponent = 0;
  for (Bits rest = m >> 1; rest; rest >>= 1) exponent++;
  bool near = exponent >= 11 && (m >> (exponent >= 11 ? exponent - 11 : 0)) == 0xfff;
  return 3 * exponent + ((m & (m - 1)) == 0 ? 0 : near ? 2 : 1);
}

// The index in the row of any m.
template <class Bits> __device__ inline int slot_of(Bits m) {
  const int M = Format<Bits>::MANTISSA;
  if (m == 0) return ZEROS;
  if (m >= Format<Bits>::INF) return m == Format<Bits>::INF ? INFS : NANS;
  int field = (int)(m >> M);
  if (field == 0) return HEADER + subnormal_slot(m);
  Bits mantissa = m & (((Bits)1 << M) - 1);
  bool near = (mantissa >> (M - 11)) == 0x7ff;
  return HEADER + 3 * (field - 1 + M) + (mantissa == 0 ? 0 : near ? 2 : 1);
}

// The float64 bits of a finite m other than 0.
__device__ inline u64 widened(u64 m) { return m; }
__device__ inline u64 widened(u32 m) {
  int shift = 0;
  for (; !(m >> (23 - shift) & 1) && m < 0x800000u; shift++) {}
  // A subnormal of float32 is normal in float64: its mantissa is moved up to the hidden bit, its exponent down.
  return m >= 0x800000u ? ((u64)m << 29) + (896ull << 52) : ((u64)(m << shift) << 29) + ((u64)(896 - shift) << 52);
}

// -- the types ---------------------------------------------------------------------------------------------------------
//
// KEYS counters of COPIES copies each; key 0 is that of zeros; keys from INF_KEY on are those of infinities and NaNs.
// add: counts the values of one word or vector, and updates low and high. slot: the index in the row of a key.

#ifdef __CUDA_ARCH__
// An address in shared memory has 32 bits.
typedef u32 Column;
__device__ inline Column column_of(u32* counter) { return (u32)__cvta_generic_to_shared(counter); }
__device__ inline void add_one(Column column, u32 byte_offset) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(column + byte_offset) : "memory");
}
#else
typedef char* Column;
__device__ inline Column column_of(u32* counter) { return (char*)counter; }
__device__ inline void add_one(Column column, u32 byte_offset) { atomicAdd((u32*)(column + byte_offset), 1u); }
#endif

// Three counters per exponent field: power of two, other, near the top.
template <class Bits, class Signed> struct Wide {
  typedef Bits Value;
  typedef Bits Extreme;
  typedef Bits Magnitude;
  enum { M = Format<Bits>::MANTISSA, FIELDS = M == 23 ? 256 : 2048, KEYS = 3 * FIELDS, INF_KEY = KEYS - 3 };
  enum { COPIES = M == 23 ? COLUMNS : COLUMNS / 8, EXTRA = 3 * M, IS_CODES = 0 };
  static const Bits SIGN = (Bits)1 << (8 * sizeof(Bits) - 1);

  __device__ static u32 key(Bits m) {
    // Zero minus one is negative, and stays so when it is shifted.
    return (u32)(m >> M) + (u32)((Signed)(m - 1) >> M) + (u32)((m + ((Bits)1 << (M - 11))) >> M) + 1;
  }
  __device__ static int slot(u32 key, const u16*) {
    if (key == 0) return ZEROS;
    if (key >= INF_KEY) return key == INF_KEY ? INFS : NANS;
    return key < 3 ? NOWHERE : HEADER + 3 * (M - 1) + (int)key;
  }
  __device__ static void add_value(Column column, Bits value, Extreme& low, Extreme& high) {
    Bits m = value & ~SIGN;
    add_one(column, key(m) * (4 * COPIES));
    low = smaller(low, m - 1);
    high = larger(high, m);
  }
  __device__ static Bits order(Value value) { return value & ~SIGN; }
  __device__ static bool is_positive(Value value) { return !(value & SIGN); }
  __device__ static Magnitude magnitude(Bits order) { return order; }
  __device__ static bool is_infinite(Bits order) { return order == Format<Bits>::INF; }
  __device__ static bool is_finite(Bits order) { return order < Format<Bits>::INF; }
  __device__ static bool is_subnormal(Bits order) { return order - 1 < ((Bits)1 << M) - 1; }
  __device__ static bool has_infinite(Extreme high) { return high >= Format<Bits>::INF; }
  __device__ static bool is_rare(Extreme low, Extreme high) { return low < ((Bits)1 << M) - 1 || has_infinite(high); }
  __device__ static Extreme spread(Bits order) { return order; }
  __device__ static Extreme lesser(Extreme a, Extreme b) { return smaller(a, b); }
  __device__ static Extreme greater(Extreme a, Extreme b) { return larger(a, b); }
  __device__ static Bits lowest(Extreme low) { return low; }
  __device__ static Bits highest(Extreme high) { return high; }
};

struct Float32 : Wide<u32, int> {
  __device__ static void add(Column column, const uint4& v, u32& low, u32& high) {
    add_value(column, v.x, low, high);
    add_value(column, v.y, low, high);
    add_value(column, v.z, low, high);
    add_value(column, v.w, low, high);
  }
  __device__ static u32 largest(const uint4& v) {
    return larger(larger(v.x & ~SIGN, v.y & ~SIGN), larger(v.z & ~SIGN, v.w & ~SIGN));
  }
};

struct Float64 : Wide<u64, long long> {
  __device__ static u64 join(u32 low, u32 high) { return (u64)high << 32 | low; }
  __device__ static void add(Column column, const uint4& v, u64& low, u64& high) {
    add_value(column, join(v.x, v.y), low, high);
    add_value(column, join(v.z, v.w), low, high);
  }
  __device__ static u64 largest(const uint4& v) { return larger(join(v.x, v.y) & ~SIGN, join(v.z, v.w) & ~SIGN); }
};

// Two counters per exponent field: the mantissa is too short for values near the top. INF: the code of infinity.
template <class Type, u32 INF> struct Half {
  typedef u16 Value;
  typedef u32 Extreme;
  typedef u32 Magnitude;
  enum { COPIES = COLUMNS, IS_CODES = 0 };

  __device__ static void add(Column column, const uint4& v, u32& low, u32& high) {
    add_word(column, v.x, low, high);
    add_word(column, v.y, low, high);
    add_word(column, v.z, low, high);
    add_word(column, v.w, low, high);
  }
  __device__ static void add_word(Column column, u32 word, u32& low, u32& high) {
    u32 pair = word & 0x7fff7fffu;
    Type::add_pair(column, pair);
    low = __vminu2(low, __vsub2(pair, 0x00010001u));
    high = __vmaxu2(high, pair);
  }
  __device__ static void add_value(Column column, u16 value, u32& low, u32& high) {
    u32 code = value & 0x7fffu;
    add_one(column, Type::key(code) * (4 * COPIES));
    low = __vminu2(low, spread((code - 1) & 0xffffu));
    high = __vmaxu2(high, spread(code));
  }
  // The slot of 2 * field + (mantissa != 0), of the exponent field of float32.
  __device__ static int slot_of_pair(int pair) {
    if (pair >= 510) return pair == 510 ? INFS : NANS;
    return HEADER + 3 * ((pair >> 1) + 22) + (pair & 1);
  }
  __device__ static u32 largest(const uint4& v) {
    const u32 mask = 0x7fff7fffu;
    return __vmaxu2(__vmaxu2(v.x & mask, v.y & mask), __vmaxu2(v.z & mask, v.w & mask));
  }
  __device__ static u32 order(Value value) { return value & 0x7fffu; }
  __device__ static bool is_positive(Value value) { return !(value & 0x8000u); }
  __device__ static bool is_infinite(u32 order) { return order == INF; }
  __device__ static bool is_finite(u32 order) { return order < INF; }
  // A half word of at least INF carries into its sign.
  __device__ static bool has_infinite(Extreme high) { return (high + 0x00010001u * (0x8000u - INF)) & 0x80008000u; }
  __device__ static Extreme spread(u32 order) { return order * 0x00010001u; }
  __device__ static Extreme lesser(Extreme a, Extreme b) { return __vminu2(a, b); }
  __device__ static Extreme greater(Extreme a, Extreme b) { return __vmaxu2(a, b); }
  __device__ static u32 lowest(Extreme low) {
    u32 found = smaller(low & 0xffffu, low >> 16);
    return found == 0xffffu ? ~0u : found;
  }
  __device__ static u32 highest(Extreme high) { return larger(high & 0xffffu, high >> 16); }
};

struct Bfloat16 : Half<Bfloat16, 0x7f80u> {
  enum { KEYS = 512, INF_KEY = 510, EXTRA = 3 * 23 };
  __device__ static u32 key(u32 code) { return (code >> 7) + ((code + 127) >> 7); }
  __device__ static void add_pair(Column column, u32 pair) {
    // Both keys at once; the lower one is scaled by a mask instead of two shifts.
    u32 next = pair + 0x007f007fu;
    add_one(column, ((pair & 0x7f80u) + (next & 0xff80u)) / (32 / COPIES));
    add_one(column, ((pair >> 23) + (next >> 23)) * (4 * COPIES));
  }
  __device__ static int slot(u32 key, const u16*) { return key == 0 ? ZEROS : key == 1 ? NOWHERE : slot_of_pair((int)key); }
  __device__ static u32 magnitude(u32 order) { return order << 16; }
  __device__ static bool is_subnormal(u32 order) { return order - 1 < 127; }
  __device__ static bool is_rare(Extreme low, Extreme high) {
    // The sign of a half word stays set where low is at least 127, or that of zeros.
    return has_infinite(high) || (~((low | 0x80008000u) - 0x007f007fu) & 0x80008000u);
  }
};

// As float32, exactly: float16's subnormals are normal there. Its fields are 103 to 142, and 255.
__device__ inline u32 bits_of_half(u32 code) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)code));
  return __float_as_uint(value);
#else
  return half_on_host(code);
#endif
}

struct Float16 : Half<Float16, 0x7c00u> {
  enum { BASE = 2 * 103 - 1, KEYS = 512 - BASE, INF_KEY = 510 - BASE, EXTRA = 0 };
  __device__ static u32 key(u32 code) {
    u32 m = bits_of_half(code);
    return larger((m >> 23) + ((m + 0x7fffffu) >> 23), (u32)BASE) - BASE;
  }
  __device__ static void add_pair(Column column, u32 pair) {
    add_one(column, key(pair & 0xffffu) * (4 * COPIES));
    add_one(column, key(pair >> 16) * (4 * COPIES));
  }
  __device__ static int slot(u32 key, const u16*) { return key == 0 ? ZEROS : slot_of_pair((int)key + BASE); }
  __device__ static u32 magnitude(u32 order) { return bits_of_half(order); }
  __device__ static bool is_subnormal(u32) { return false; }
  __device__ static bool is_rare(Extreme, Extreme high) { return has_infinite(high); }
};

// Any 8-bit type: a counter per code; what the codes mean is asked when the counters are added to the row. order is the upper
// half of m.
struct Codes {
  typedef u8 Value;
  typedef u32 Extreme;
  typedef u32 Magnitude;
  enum { COPIES = COLUMNS, KEYS = 256, INF_KEY = 256, EXTRA = 0, IS_CODES = 1, INF = 0x7f80 };

  __device__ static void add(Column column, const uint4& v, u32&, u32&) {
    add_word(column, v.x);
    add_word(column, v.y);
    add_word(column, v.z);
    add_word(column, v.w);
  }
  __device__ static void add_word(Column column, u32 word) {
    for (int k = 0; k < 32; k += 8) add_one(column, (word >> k & 0xffu) * (4 * COPIES));
  }
  __device__ static void add_value(Column column, u8 value, u32&, u32&) { add_one(column, value * (4 * COPIES)); }
  __device__ static int slot(u32 key, const u16* magnitudes) { return slot_of((u32)magnitudes[key] << 16); }
  // Not used for counting: only the codes' meanings tell extremes.
  __device__ static u32 key(u32) { return 0; }
  __device__ static u32 order(Value) { return 0; }
  __device__ static Extreme lesser(Extreme a, Extreme b) { return smaller(a, b); }
  __device__ static bool is_positive(Value value) { return value < 0x80u; }
  __device__ static bool is_infinite(u32 order) { return order == INF; }
  __device__ static bool is_finite(u32 order) { return order < INF; }
  __device__ static bool is_subnormal(u32) { return false; }
  __device__ static bool is_rare(u32, u32) { return false; }
  __device__ static bool has_infinite(Extreme high) { return high >= INF; }
  __device__ static Extreme spread(u32 order) { return order; }
  __device__ static Extreme greater(Extreme a, Extreme b) { return larger(a, b); }
  __device__ static u32 lowest(Extreme low) { return low; }
  __device__ static u32 highest(Extreme high) { return high; }
  __device__ static u32 magnitude(u32 order) { return order << 16; }
};

// -- the tiles of a block ----------------------------------------------------------------------------------------------

// A tensor as its first values, whole vectors and last values.
template <class Type> struct Parts {
  enum { SIZE = sizeof(typename Type::Value), PER_VECTOR = 16 / SIZE };
  const typename Type::Value* values;
  const uint4* vectors;
  u32 count, head, length, tail;

  __device__ explicit Parts(const Entry& entry) {
    values = (const typename Type::Value*)entry.values;
    count = entry.count;
    head = smaller((u32)(0 - entry.values & 15) / SIZE, count);
    vectors = (const uint4*)(values + head);
    length = (count - head) / PER_VECTOR;
    tail = (count - head) % PER_VECTOR;
  }
};

// Calls work.vectors<N>(first, stride 256) for this thread's vectors of the tiles begin to end, work.value(address) for the rest.
template <class Type, class Work> __device__ inline void read_tiles(const Parts<Type>& parts, u32 begin, u32 end, bool to_last, Work& work) {
  const u32 full = smaller(end, parts.length / TILE);
  const uint4* here = parts.vectors + (u64)begin * TILE + threadIdx.x;
  u32 tile = begin;
  for (; tile < full; tile++, here += TILE) work.template vectors<UNROLL>(here);
  for (; tile < end; tile++, here += TILE)
    for (u32 k = 0; k < UNROLL; k++)
      if ((u64)tile * TILE + k * THREADS + threadIdx.x < parts.length) work.template vectors<1>(here + k * THREADS);
  if (begin == 0 && threadIdx.x < parts.head) work.value(parts.values + threadIdx.x);
  if (to_last && threadIdx.x < parts.tail) work.value(parts.values + (parts.count - parts.tail) + threadIdx.x);
}

// Calls work.begin, reads the block's tiles of a tensor, and calls work.end, for each tensor of which the block has tiles.
template <class Type, class Work> __device__ inline void read_share(const Table& table, Work& work) {
  u32 tile = (u32)((u64)table.tiles * blockIdx.x / gridDim.x);
  const u32 end = (u32)((u64)table.tiles * (blockIdx.x + 1) / gridDim.x);
  u32 e = 0;
  for (u32 beyond = table.entries; e + 1 < beyond;) {
    u32 middle = (e + beyond) / 2;
    if (table.entry[middle].first_tile <= tile) e = middle;
    else beyond = middle;
  }
  for (; tile < end; e++) {
    const Entry& entry = table.entry[e];
    const u32 beyond = e + 1 < table.entries ? table.entry[e + 1].first_tile : table.tiles;
    const u32 stop = smaller(end, beyond);
    work.begin();
    read_tiles<Type>(Parts<Type>(entry), tile - entry.first_tile, stop - entry.first_tile, stop == beyond, work);
    work.end((u64*)entry.target);
    tile = stop;
  }
}

// The smallest (largest) of the block's numbers, in every thread. Barriers: one; another one must follow before the next use.
__device__ inline void block_extremes(u64* scratch, u64& low, u64& high) {
  for (int distance = 16; distance; distance /= 2) {
    low = smaller(low, __shfl_xor_sync(0xffffffffu, low, distance));
    high = larger(high, __shfl_xor_sync(0xffffffffu, high, distance));
  }
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = low;
    scratch[WARPS + threadIdx.x / 32] = high;
  }
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) {
    low = smaller(low, scratch[warp]);
    high = larger(high, scratch[WARPS + warp]);
  }
}

// -- counting ----------------------------------------------------------------------------------------------------------

template <class Type> struct Counting {
  typedef typename Type::Value Value;
  typedef typename Type::Extreme Extreme;
  typedef typename Type::Magnitude Magnitude;
  // Shared memory: the scratch of block_extremes, the counters, the extra ones.
  enum { SCRATCH = 2 * WARPS, COUNTERS = Type::KEYS * Type::COPIES, BYTES = 8 * SCRATCH + 4 * (COUNTERS + Type::EXTRA) };

  u64* scratch;
  u32 *counters, *extra;
  Column column;
  const u16* magnitudes;
  Extreme low, high;

  __device__ Counting(u64* shared, const u16* magnitudes) : scratch(shared), magnitudes(magnitudes) {
    counters = (u32*)(shared + SCRATCH);
    column = column_of(counters + threadIdx.x % Type::COPIES);
    extra = counters + COUNTERS;
    for (int i = threadIdx.x; i < COUNTERS / 4; i += THREADS) ((uint4*)counters)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < Type::EXTRA; i += THREADS) extra[i] = 0;
    __syncthreads();
  }

  __device__ void begin() {
    low = ~(Extreme)0;
    high = 0;
  }

  template <int N> __device__ void vectors(const uint4* here) {
    uint4 v[N];
    Extreme least = ~(Extreme)0, most = 0;
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = here[k * THREADS];
#pragma unroll
    for (int k = 0; k < N; k++) Type::add(column, v[k], least, most);
    if (Type::IS_CODES) return;
    low = Type::lesser(low, least);
    if (!Type::is_rare(least, most)) high = Type::greater(high, most);
    else
#pragma unroll 1
      for (int k = 0; k < N; k++)
#pragma unroll 1
        for (u32 i = 0; i < 16 / sizeof(Value); i++) examine(((const Value*)(here + k * THREADS))[i]);
  }

  __device__ void examine(Value value) {
    auto order = Type::order(value);
    if (Type::is_finite(order)) high = Type::greater(high, Type::spread(order));
    if (Type::is_subnormal(order)) atomicAdd(extra + subnormal_slot(Type::magnitude(order)), 1u);
  }

  __device__ void value(const Value* here) {
    Extreme infinite = 0;
    Type::add_value(column, *here, low, infinite);
    if (!Type::IS_CODES) examine(*here);
  }

  // The sum over the copies of a counter, which is cleared.
  __device__ u32 take(u32 key) {
    u32 sum = 0;
    for (u32 copy = 0; copy < Type::COPIES; copy++) {
      // Neighbouring threads have neighbouring keys: each begins at another bank.
      u32* counter = counters + key * Type::COPIES + (copy + key * Type::COPIES / 32) % Type::COPIES;
      sum += *counter;
      *counter = 0;
    }
    return sum;
  }

  __device__ static void add_to(u64* row, int slot, u32 number) {
    if (number && slot != NOWHERE) atomicAdd(row + slot, (u64)number);
  }

  __device__ void end(u64* row) {
    if (Type::IS_CODES) end_of_codes(row);
    else end_of_values(row);
    __syncthreads();
  }

  __device__ void end_of_values(u64* row) {
    u64 least = Type::lowest(low), most = Type::highest(high);
    if (sizeof(Magnitude) == 4 && least == 0xffffffffu) least = ~0ull;
    block_extremes(scratch, least, most);
    // Without a finite value other than 0 there is no largest one either.
    const u32 first = most ? Type::key((Extreme)(least + 1)) : Type::KEYS, last = Type::key((Extreme)most);
    for (u32 key = threadIdx.x; key < Type::KEYS; key += THREADS)
      if (key == 0 || key >= Type::INF_KEY || (first <= key && key <= last)) add_to(row, Type::slot(key, magnitudes), take(key));
    if (most && Type::is_subnormal((Extreme)(least + 1)))
      for (int i = threadIdx.x; i < Type::EXTRA; i += THREADS) {
        add_to(row, HEADER + i, extra[i]);
        extra[i] = 0;
      }
    if (threadIdx.x == 0 && most) {
      atomicMin(row + MIN_BITS, widened(Type::magnitude((Extreme)(least + 1))));
      atomicMax(row + MAX_BITS, widened(Type::magnitude((Extreme)most)));
    }
  }

  __device__ void end_of_codes(u64* row) {
    __syncthreads();
    // There are as many codes as threads.
    u32 number = take(threadIdx.x), m = (u32)magnitudes[threadIdx.x] << 16;
    bool counts = number && m && m < Format<u32>::INF;
    u64 least = counts ? m : ~0ull, most = counts ? m : 0;
    add_to(row, slot_of(m), number);
    block_extremes(scratch, least, most);
    if (threadIdx.x == 0 && most) {
      atomicMin(row + MIN_BITS, widened((u32)least));
      atomicMax(row + MAX_BITS, widened((u32)most));
    }
  }
};

// -- largest magnitudes ------------------------------------------------------------------------------------------------

// The slot becomes 1 + 2 m, and 1 more for positive infinity: 0 is "not read", NaN > infinity > minus infinity > finite.
template <class Type> struct Largest {
  typedef typename Type::Value Value;
  typedef typename Type::Extreme Extreme;
  enum { SCRATCH = 2 * WARPS, BYTES = 8 * SCRATCH + (Type::IS_CODES ? 2 * 256 : 0) };

  u64 *scratch, *broken;
  const u16* magnitudes;
  Extreme high;
  bool positive;

  __device__ Largest(u64* shared, u64* broken, const u16* magnitudes) : scratch(shared), broken(broken) {
    this->magnitudes = (const u16*)(shared + SCRATCH);
    if (Type::IS_CODES) {
      ((u16*)(shared + SCRATCH))[threadIdx.x] = magnitudes[threadIdx.x];
      __syncthreads();
    }
  }

  __device__ void begin() {
    high = 0;
    positive = false;
  }

  template <int N> __device__ void vectors(const uint4* here) {
    uint4 v[N];
    Extreme most = 0;
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = here[k * THREADS];
#pragma unroll
    for (int k = 0; k < N; k++) most = Type::greater(most, largest(v[k], Type()));
    high = Type::greater(high, most);
    if (Type::has_infinite(most) && !positive)
#pragma unroll 1
      for (int k = 0; k < N; k++)
#pragma unroll 1
        for (u32 i = 0; i < 16 / sizeof(Value); i++) look_at_sign(((const Value*)(here + k * THREADS))[i]);
  }

  template <class Other> __device__ Extreme largest(const uint4& v, Other) { return Type::largest(v); }
  __device__ Extreme largest(const uint4& v, Codes) {
    u32 most = 0, words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 16; k++) most = larger(most, (u32)magnitudes[words[k / 4] >> k % 4 * 8 & 0xffu]);
    return most;
  }

  template <class Other> __device__ auto order(Value value, Other) { return Other::order(value); }
  __device__ u32 order(Value value, Codes) { return magnitudes[(u8)value]; }

  __device__ void look_at_sign(Value value) { positive |= Type::is_infinite(order(value, Type())) && Type::is_positive(value); }

  __device__ void value(const Value* here) {
    high = Type::greater(high, Type::spread(order(*here, Type())));
    look_at_sign(*here);
  }

  __device__ void end(u64* slot) {
    auto order = Type::highest(high);
    u64 found = 2 * (u64)Type::magnitude(order) + (positive && Type::is_infinite(order)), none = 0;
    block_extremes(scratch, none, found);
    if (threadIdx.x == 0) {
      atomicMax(slot, 1 + found);
      if (found >= 2 * (u64)Format<typename Type::Magnitude>::INF) *(volatile u64*)broken = 1;
    }
    __syncthreads();
  }
};

// -- the kernels -------------------------------------------------------------------------------------------------------

#define KERNELS(NAME, TYPE)                                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS) count_##NAME(const __grid_constant__ Table table) {              \
    extern __shared__ u64 shared[];                                                                                       \
    Counting<TYPE> work(shared, MAGNITUDES[table.codes]);                                                                 \
    read_share<TYPE>(table, work);                                                                                        \
  }                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS) largest_##NAME(const __grid_constant__ Table table) {            \
    extern __shared__ u64 shared[];                                                                                       \
    if (table.only_if_broken && *(volatile u64*)table.broken == 0) return;                                                \
    Largest<TYPE> work(shared, (u64*)table.broken, MAGNITUDES[table.codes]);                                              \
    read_share<TYPE>(table, work);                                                                                        \
  }

#ifdef ONLY_FLOAT32
KERNELS(float32, Float32)
#endif
#ifdef ONLY_BFLOAT16
KERNELS(bfloat16, Bfloat16)
#endif
#ifdef ONLY_FLOAT16
KERNELS(float16, Float16)
#endif
#ifdef ONLY_FLOAT64
KERNELS(float64, Float64)
#endif
#ifdef ONLY_CODES
KERNELS(codes, Codes)
#endif
