// Counts the elements of a matrix by their distance below the largest magnitude of their block (mpinspect/numeric/blocks.py).
// Compiled after kernels.cu, whose types it uses.
//
// A group of lanes has a block: it finds the largest magnitude bits, then reads the block again, from the cache, and adds 1 to a
// counter in shared memory for each element. Lanes lie along the rows, so that neighbouring lanes read neighbouring addresses;
// where a block is one column wide, each lane has a block of its own. Counters have COPIES copies, as in kernels.cu.

// A matrix whose columns lie closer in memory than its rows. right, down: from one element to the next, in elements. high, wide: the
// number of blocks in a column and in a row of blocks. rows, columns: of a block. lanes: of a group, a power of two up to 32.
// EXPONENTS slots of the result begin at LOWEST.
struct Matrix {
  u64 values, result;
  long long down, right;
  u32 high, wide, rows, columns, lanes;
};

namespace blocks {
// The result: counters of (class, distance, is a power of two), elements over each cut, largest magnitudes by exponent, elements
// by that exponent, and four numbers.
enum { DISTANCES = 64, CLASSES = 3, LOWEST = -112, EXPONENTS = 128 - LOWEST };
enum { OVER = 2 * CLASSES * DISTANCES, SLOTS = OVER + CLASSES - 1, MAXIMA = SLOTS, ELEMENTS = MAXIMA + EXPONENTS };
enum { ZERO_ELEMENTS = ELEMENTS + EXPONENTS, ZERO_BLOCKS, BROKEN, TINY, LENGTH };
enum { COPIES = 16, SINGLE = LENGTH - SLOTS, BYTES = 4 * (SLOTS * COPIES + SINGLE) };
}  // namespace blocks

// floor(log2) of magnitude bits other than 0.
__device__ inline int exponent_of(u32 m) { return m >> 23 ? (int)(m >> 23) - 127 : -118 - __clz((int)m); }
// The fraction of the significand, in units of 2^-23.
__device__ inline u32 fraction_of(u32 m) { return (m >> 23 ? m : m << (__clz((int)m) - 8)) & 0x7fffffu; }
// The class of a significand: how many of the cuts 1.5 and 1.75 it exceeds.
__device__ inline u32 class_of(u32 fraction) { return (fraction > 0x400000u) + (fraction > 0x600000u); }

template <class Type> struct Blocks {
  typedef typename Type::Value Value;
  u32 *counters, *single;
  u32 copy, lane, group;

  __device__ Blocks(u64* shared, u32 lanes) : counters((u32*)shared), single(counters + blocks::SLOTS * blocks::COPIES) {
    copy = threadIdx.x % blocks::COPIES;
    lane = threadIdx.x % lanes;
    group = threadIdx.x / lanes;
    for (int i = threadIdx.x; i < blocks::BYTES / 4; i += THREADS) counters[i] = 0;
    __syncthreads();
  }

  __device__ static u32 read(const Value* address) { return Type::magnitude(Type::order(*address)); }
  __device__ void add(u32 slot) { atomicAdd(counters + slot * blocks::COPIES + copy, 1u); }
  __device__ u32& once(u32 slot) { return single[slot - blocks::SLOTS]; }

  // Calls use(m) for each of this lane's elements of a block.
  template <class Use> __device__ void each(const Matrix& of, const Value* block, Use use) {
    for (u32 row = 0; row < of.rows; row++)
      for (u32 column = lane; column < of.columns; column += of.lanes) use(read(block + row * of.down + column * of.right));
  }

  // All threads call it, since they exchange values; those without a block have is_block false.
  __device__ void count(const Matrix& of, const Value* block, bool is_block) {
    u32 peak = 0, zeros = 0, nonzero = 0;
    if (is_block) each(of, block, [&](u32 m) { peak = larger(peak, m); });
    for (u32 distance = of.lanes / 2; distance; distance /= 2) peak = larger(peak, __shfl_xor_sync(0xffffffffu, peak, distance));
    if (!is_block) return;
    const int exponent = peak ? exponent_of(peak) : 0;
    if (peak >= Format<u32>::INF || (peak && exponent < blocks::LOWEST)) {
      if (lane == 0) atomicAdd(&once(peak >= Format<u32>::INF ? blocks::BROKEN : blocks::TINY), 1u);
      return;
    }
    const u32 own = 2 * blocks::DISTANCES * class_of(fraction_of(peak));
    each(of, block, [&](u32 m) {
      if (m == 0) {
        zeros++;
        return;
      }
      nonzero++;
      const u32 distance = smaller((u32)(exponent - exponent_of(m)), (u32)blocks::DISTANCES - 1), fraction = fraction_of(m);
      add(own + 2 * distance + (fraction == 0));
      for (u32 over = 0; distance == 0 && over < class_of(fraction); over++) add(blocks::OVER + over);
    });
    if (zeros) atomicAdd(&once(blocks::ZERO_ELEMENTS), zeros);
    if (nonzero) atomicAdd(&once(blocks::ELEMENTS + (u32)(exponent - blocks::LOWEST)), nonzero);
    if (lane == 0) atomicAdd(&once(peak ? blocks::MAXIMA + (u32)(exponent - blocks::LOWEST) : (u32)blocks::ZERO_BLOCKS), 1u);
  }

  __device__ void end(u64* result) {
    __syncthreads();
    for (u32 slot = threadIdx.x; slot < blocks::LENGTH; slot += THREADS) {
      u64 sum = slot < blocks::SLOTS ? 0 : once(slot);
      for (u32 i = 0; slot < blocks::SLOTS && i < blocks::COPIES; i++) sum += counters[slot * blocks::COPIES + i];
      if (sum) atomicAdd(result + slot, sum);
    }
  }
};

template <class Type> __device__ inline void count_blocks(const Matrix& of, u64* shared) {
  typedef typename Type::Value Value;
  Blocks<Type> work(shared, of.lanes);
  const u64 number = (u64)of.high * of.wide;
  const u32 groups = THREADS / of.lanes;
  for (u64 first = (u64)blockIdx.x * groups; first < number; first += (u64)gridDim.x * groups) {
    const u64 block = first + work.group < number ? first + work.group : first;
    const u64 above = block / of.wide * of.rows, aside = block % of.wide * of.columns;
    work.count(of, (const Value*)of.values + (long long)above * of.down + (long long)aside * of.right, block == first + work.group);
  }
  work.end((u64*)of.result);
}

#define BLOCKS(NAME, TYPE)                                                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS) blocks_##NAME(const __grid_constant__ Matrix of) {          \
    extern __shared__ u64 shared[];                                                                                 \
    count_blocks<TYPE>(of, shared);                                                                                 \
  }

#ifdef BLOCKS_FLOAT32
BLOCKS(float32, Float32)
#endif
#ifdef BLOCKS_BFLOAT16
BLOCKS(bfloat16, Bfloat16)
#endif
#ifdef BLOCKS_FLOAT16
BLOCKS(float16, Float16)
#endif
