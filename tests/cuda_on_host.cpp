// kernels.cu and blocks.cu as host code, with what it needs of CUDA: the threads of a block are coroutines that take turns from barrier to
// barrier, and blocks run one after the other.
//
// A shuffle is two barriers here. Threads that wait at different barriers, or that end while others wait, abort the process.

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __global__
#define __constant__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, gridDim;

namespace host {
const int THREADS = 256, STACK = 1 << 15, ENDED = -1;
// The coroutines are made once, and end a block at a barrier of their own. setjmp and longjmp switch without a system call.
static jmp_buf scheduler, threads[THREADS];
static ucontext_t maker, made[THREADS];
static char stacks[THREADS][STACK];
static int waits_at[THREADS];
static unsigned long long exchanged[THREADS];
static void (*body)();

static void barrier(int line) {
  int thread = (int)threadIdx.x;
  waits_at[thread] = line;
  if (!_setjmp(threads[thread])) _longjmp(scheduler, 1);
}

static void one_thread() {
  for (barrier(ENDED);; barrier(ENDED)) body();
}

static void resume(int thread) {
  threadIdx.x = (unsigned)thread;
  if (_setjmp(scheduler)) return;
  if (made[thread].uc_link) _longjmp(threads[thread], 1);
  getcontext(&made[thread]);
  made[thread].uc_stack.ss_sp = stacks[thread];
  made[thread].uc_stack.ss_size = STACK;
  made[thread].uc_link = &maker;
  makecontext(&made[thread], one_thread, 0);
  setcontext(&made[thread]);
}

static void run_block() {
  for (int thread = 0; thread < THREADS; thread++)
    if (!made[thread].uc_link) resume(thread);
  do
    for (int thread = 0; thread < THREADS; thread++) {
      resume(thread);
      if (waits_at[thread] != waits_at[0]) {
        fprintf(stderr, "thread %d waits in line %d, thread 0 in line %d\n", thread, waits_at[thread], waits_at[0]);
        abort();
      }
    }
  while (waits_at[0] != ENDED);
}

template <class T> static T exchange(T value, unsigned distance, int line) {
  memcpy(&exchanged[threadIdx.x], &value, sizeof value);
  barrier(line);
  T found;
  memcpy(&found, &exchanged[threadIdx.x ^ distance], sizeof found);
  barrier(line);
  return found;
}
}  // namespace host

#define __syncthreads() host::barrier(__LINE__)
#define __shfl_xor_sync(mask, value, distance) host::exchange(value, distance, __LINE__)

template <class T> static void atomicAdd(T* address, T number) { *address += number; }
template <class T> static void atomicMin(T* address, T number) { *address = number < *address ? number : *address; }
template <class T> static void atomicMax(T* address, T number) { *address = number > *address ? number : *address; }

static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline unsigned __vsub2(unsigned a, unsigned b) {
  return (((a >> 16) - (b >> 16)) << 16) | ((a - b) & 0xffffu);
}
static inline unsigned __vminu2(unsigned a, unsigned b) {
  unsigned low = (a & 0xffffu) < (b & 0xffffu) ? a : b, high = a >> 16 < b >> 16 ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
}
static inline unsigned __vmaxu2(unsigned a, unsigned b) {
  unsigned low = (a & 0xffffu) > (b & 0xffffu) ? a : b, high = a >> 16 > b >> 16 ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
}

// The float32 bits of a float16 code without its sign, by integers alone.
static inline unsigned half_on_host(unsigned code) {
  unsigned field = code >> 10, mantissa = code & 0x3ffu;
  if (field == 31) return 0x7f800000u | mantissa << 13;
  if (field == 0) {
    if (mantissa == 0) return 0;
    field = 1;
    while (!(mantissa & 0x400u)) mantissa <<= 1, field--;
  }
  return ((field + 112) << 23) | (mantissa & 0x3ffu) << 13;
}

#define ONLY_FLOAT32
#define ONLY_BFLOAT16
#define ONLY_FLOAT16
#define ONLY_FLOAT64
#define ONLY_CODES
#define BLOCKS_FLOAT32
#define BLOCKS_BFLOAT16
#define BLOCKS_FLOAT16
#include "source.cu"

alignas(16) u64 shared[1 << 14];
static const void* current;

#define CASE(NAME, TYPE)                                    \
  if (!strcmp(name, "count_" #NAME)) {                      \
    host::body = [] { count_##NAME(*(const Table*)current); };            \
    bytes = Counting<TYPE>::BYTES;                          \
  }                                                         \
  if (!strcmp(name, "largest_" #NAME)) {                    \
    host::body = [] { largest_##NAME(*(const Table*)current); };          \
    bytes = Largest<TYPE>::BYTES;                           \
  }

#define CASE_OF_BLOCKS(NAME)                                            \
  if (!strcmp(name, "blocks_" #NAME)) {                                 \
    host::body = [] { blocks_##NAME(*(const Matrix*)current); };        \
    bytes = blocks::BYTES;                                              \
  }

// Runs a kernel, and returns the shared memory that it has. Shared memory holds anything when a block begins.
extern "C" unsigned launch(const char* name, const void* parameter, unsigned blocks) {
  unsigned bytes = 0;
  CASE(float32, Float32)
  CASE(bfloat16, Bfloat16)
  CASE(float16, Float16)
  CASE(float64, Float64)
  CASE(codes, Codes)
  CASE_OF_BLOCKS(float32)
  CASE_OF_BLOCKS(bfloat16)
  CASE_OF_BLOCKS(float16)
  current = parameter;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(shared, 0xa5, sizeof shared);
    host::run_block();
    for (unsigned long i = bytes; i < sizeof shared; i++)
      if (((unsigned char*)shared)[i] != 0xa5) abort();
  }
  return bytes;
}

extern "C" unsigned constants(int which) {
  const unsigned all[] = {ENTRIES, THREADS, 16 * TILE, sizeof(Table), sizeof(Matrix)};
  return all[which];
}
