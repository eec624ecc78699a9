// Runs a CUDA kernel's source on the CPU, one CTA after the other, for tests of its index arithmetic and its protocol.
//
// Every thread is a fiber. Warp-wide instructions gather their operands from the 32 lanes; bulk copies finish late and
// in random order; a wait that nothing can end aborts. Knows nothing of time, of caches, or of the memory model: a
// missing fence does not show.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900

struct Index { unsigned x; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }
template <typename To, typename From> To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned x) { return bits<float>(x); }
inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

namespace stoker {
alignas(1024) inline unsigned char raw[256 * 1024];  // the dynamic shared memory
}

namespace emulator {

constexpr uint32_t SHARED_BASE = 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread;
  std::vector<std::vector<std::function<void()>>> products;  // committed groups of wgmma, and the open one, last
  bool done = false;
};

struct Barrier {
  int threads = 0, arrived = 0, generation = 0;
};

struct Mbarrier {
  int count = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
};

struct Cta {
  std::vector<Fiber> fibers;
  std::map<int, Barrier> barriers;  // named ones, and those of warps and warpgroups, by kind · 1000 + number
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<std::function<void()>> copies;
  ucontext_t scheduler;
  bool progress = false;
};

inline Cta* cta;
inline Fiber* fiber;
inline Index block, grid;
inline std::mt19937 pick;
inline std::function<void()> entry;

[[noreturn]] inline void fail(const char* text) {
  std::fprintf(stderr, "emulator: %s in CTA %u, thread %u\n", text, block.x, fiber ? fiber->thread.x : 0);
  std::abort();
}

inline void yield() { swapcontext(&fiber->context, &cta->scheduler); }

// Counts this thread in; the generation that it belongs to.
inline int arrive(int key, int threads) {
  Barrier& barrier = cta->barriers[key];
  if (barrier.arrived != 0 && barrier.threads != threads) fail("a barrier with two thread counts");
  barrier.threads = threads;
  const int generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    cta->progress = true;
  }
  return generation;
}

inline void rendezvous(int key, int threads) {
  const int generation = arrive(key, threads);
  while (cta->barriers[key].generation == generation) yield();
}

inline int lane() { return fiber->thread.x % 32; }
inline int warp() { return fiber->thread.x / 32; }

// Every thread of a group of `threads` gets all of the group's values.
template <typename T>
std::vector<T> gather(const T& mine, int threads) {
  const int group = fiber->thread.x / threads, key = threads * 100 + group;
  static std::map<int, std::vector<char>> rooms;
  std::vector<char>& room = rooms[key];
  room.resize(sizeof(T) * threads);
  std::memcpy(room.data() + sizeof(T) * (fiber->thread.x % threads), &mine, sizeof(T));
  rendezvous(key, threads);
  std::vector<T> all(threads);
  std::memcpy(all.data(), room.data(), room.size());
  rendezvous(key, threads);
  return all;
}

inline unsigned char* shared(uint32_t address) {
  if (address < SHARED_BASE || address >= SHARED_BASE + sizeof stoker::raw) fail("an address outside shared memory");
  return stoker::raw + (address - SHARED_BASE);
}

inline void complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  cta->progress = true;
}

inline Mbarrier& mbarrier(uint32_t address) {
  const auto found = cta->mbarriers.find(address);
  if (found == cta->mbarriers.end()) fail("an mbarrier that was not initialised");
  return found->second;
}

inline void copy_later(uint32_t barrier, int64_t bytes, std::function<void()> move) {
  cta->copies.push_back([=] {
    move();
    Mbarrier& b = mbarrier(barrier);
    b.bytes -= bytes;
    complete(b);
  });
}

inline void start() {
  entry();
  fiber->done = true;
  cta->progress = true;
  yield();
}

inline void run_cta(int threads) {
  Cta here;
  cta = &here;
  here.fibers.resize(threads);
  std::memset(stoker::raw, 0xFF, sizeof stoker::raw);  // NaNs
  for (int i = 0; i < threads; ++i) {
    Fiber& f = here.fibers[i];
    constexpr size_t size = 256 * 1024;
    f.stack = std::make_unique<char[]>(size);
    f.thread.x = i;
    f.products.resize(1);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = size;
    f.context.uc_link = &here.scheduler;
    makecontext(&f.context, start, 0);
  }
  int idle = 0;
  while (true) {
    here.progress = false;
    bool alive = false;
    for (Fiber& f : here.fibers) {
      if (f.done) continue;
      alive = true;
      fiber = &f;
      swapcontext(&here.scheduler, &f.context);
    }
    if (!alive) break;
    if (!here.copies.empty() && (pick() % 4 == 0 || !here.progress)) {
      const size_t which = pick() % here.copies.size();
      std::swap(here.copies[which], here.copies.back());
      const auto copy = here.copies.back();
      here.copies.pop_back();
      copy();
      here.progress = true;
    }
    idle = here.progress ? 0 : idle + 1;
    if (idle > 3) fail("every thread waits for ever");
  }
  if (!here.copies.empty()) fail("a CTA ended before its copies");
}

// The CTAs in random order.
inline void run_grid(int ctas, int threads, int seed, std::function<void()> kernel) {
  pick.seed(seed);
  entry = kernel;
  grid.x = ctas;
  std::vector<int> order(ctas);
  for (int i = 0; i < ctas; ++i) order[i] = i;
  for (int i = ctas - 1; i > 0; --i) std::swap(order[i], order[pick() % (i + 1)]);
  for (const int index : order) {
    block.x = index;
    run_cta(threads);
  }
}

}  // namespace emulator

#define threadIdx (emulator::fiber->thread)
#define blockIdx (emulator::block)
#define gridDim (emulator::grid)

inline void __syncthreads() { emulator::rendezvous(1, emulator::cta->fibers.size()); }
inline void __syncwarp() { emulator::rendezvous(3200 + emulator::warp(), 32); }
inline void __threadfence() {}
template <typename T> T __shfl_sync(unsigned, T x, int from) { return emulator::gather(x, 32)[from & 31]; }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) { return emulator::gather(x, 32)[emulator::lane() ^ mask]; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned ballot = 0;
  const auto all = emulator::gather<int>(x, 32);
  for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(all[i] != 0) << i;
  return ballot;
}
inline bool __any_sync(unsigned, bool x) {
  bool any = false;
  for (const int y : emulator::gather<int>(x, 32)) any |= y != 0;
  return any;
}
