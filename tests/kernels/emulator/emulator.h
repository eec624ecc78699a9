// Runs a CUDA kernel's source on the CPU, one cluster of CTAs after the other, for tests of its index arithmetic and its
// protocol.
//
// Every thread is a fiber. Warp-wide instructions gather their operands from the 32 lanes; warps and CTAs run at random
// speeds; bulk copies finish late and in random order; a wait that nothing can end aborts, and so does an access to a CTA
// of the cluster that has not begun or has ended, or a CTA that ends with bytes still expected. The kernel before this one
// finishes when all that this one can do without it is done. Knows nothing of time, of caches, or of the memory model: a
// missing fence does not show.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
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

#include "builtins.h"

namespace stoker {
// The dynamic shared memory of the CTA whose turn it is. Of a cluster's CTAs each has memory of its own, mapped here.
alignas(65536) inline unsigned char raw[256 * 1024];
}

namespace emulator {

constexpr uint32_t SHARED_BASE = 1024;
constexpr uint32_t RANK_SHIFT = 20;  // an address in another CTA: its rank + 1 above the address there
constexpr int REGISTERS = 65536;     // of an SM
inline int resident = 1;             // CTAs that share them
inline bool in_order = false;        // whether clusters run in their order, as a GPU begins them

// One wgmma of a thread: its sums, the operands' descriptors, and its own way to multiply where A is in registers.
struct Product {
  float* sums;  // or of integers, as their bits
  uint64_t a, b;
  int columns;
  bool accumulate, e4m3, f16, by_columns;
  std::function<void()> own;
  bool s8 = false;

  bool same(const Product& o) const {
    return a == o.a && b == o.b && columns == o.columns && accumulate == o.accumulate && e4m3 == o.e4m3 &&
           f16 == o.f16 && by_columns == o.by_columns && s8 == o.s8 && !own == !o.own;
  }
};

struct Copy {  // 16 bytes on their way to shared memory
  void* to;
  const void* from;
  bool there;

  void land() const { there ? std::memcpy(to, from, 16) : std::memset(to, 0, 16); }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread;
  const int* watched = nullptr;  // stays where it is while (*watched & mask) == held
  int mask = 0, held = 0;
  int registers = 0, cluster_generation = -1;
  std::vector<std::vector<Product>> products;  // committed groups of wgmma, and the open one, last
  std::vector<Copy> copies;                    // of cp.async, on their way
  bool waits_for_cluster = false, done = false;
};

struct Barrier {
  int threads = 0, arrived = 0, generation = 0;
  std::vector<char> rooms[2];  // what the threads of a generation hand to each other
};

constexpr uint64_t MBARRIER_BYTES = 0x7265697272616267;  // what shared memory holds where a barrier is

struct Mbarrier {
  int count = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
};

struct Cta {
  unsigned char* memory = nullptr;
  Index block;
  int rank = 0, alive = 0, stalled = 0, free_registers = 0;
  bool started = false;
  std::vector<Fiber> fibers;
  std::vector<int> paused;  // turns that a warp is still left out, while others have something to do
  std::map<int, Barrier> barriers;  // named ones, and those of warps and warpgroups, by kind · 1000 + number
  std::map<uint32_t, Mbarrier> mbarriers;
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::function<void()>> copies;
  int threads = 0, arrived = 0, left = 0, exited = 0, generation = 0;  // of the barrier of all its threads
  ucontext_t scheduler;
  bool progress = false;
};

// A place in memory that the kernel before this one writes.
struct Region {
  unsigned char* at;
  int64_t bytes;
};

// The kernel before this one: what it writes, and what it may still read. Its end gives its regions their contents.
struct Predecessor {
  std::vector<Region> writes;
  const unsigned char* out = nullptr;
  int64_t out_bytes = 0;
  std::vector<std::vector<unsigned char>> after;
  std::vector<unsigned char> out_before;
  int done = 1;
};

inline Cluster* cluster;
inline Cta* cta;
inline Fiber* fiber;
inline Index grid;
inline std::mt19937 pick;
inline std::function<void()> entry;
inline Predecessor predecessor;

[[noreturn]] inline void fail(const char* text) {
  std::fprintf(stderr, "emulator: %s in CTA %u, thread %u\n", text, cta->block.x, fiber ? fiber->thread.x : 0);
  std::abort();
}

inline void yield() { swapcontext(&fiber->context, &cluster->scheduler); }

inline void wait_while(const int& value, int mask, int held) {
  if ((value & mask) != held) return;
  fiber->watched = &value, fiber->mask = mask, fiber->held = held;
  yield();
}

// Counts this thread in; the generation that it belongs to.
inline int arrive(Barrier& barrier, int threads) {
  if (barrier.arrived != 0 && barrier.threads != threads) fail("a barrier with two thread counts");
  barrier.threads = threads;
  const int generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    cluster->progress = true;
  }
  return generation;
}
inline int arrive(int key, int threads) { return arrive(cta->barriers[key], threads); }

inline void rendezvous(int key, int threads) {
  Barrier& barrier = cta->barriers[key];
  wait_while(barrier.generation, -1, arrive(barrier, threads));
}

inline int lane() { return fiber->thread.x % 32; }
inline int warp() { return fiber->thread.x / 32; }

// What PTX marks .aligned: every lane of the warp comes, or the run hangs and fails.
inline void aligned() { rendezvous(3200 + warp(), 32); }

// Every thread of a group of `threads` gets all of the group's values.
template <typename T>
std::vector<T> gather(const T& mine, int threads) {
  Barrier& barrier = cta->barriers[threads * 100 + fiber->thread.x / threads];
  std::vector<char>& room = barrier.rooms[barrier.generation & 1];  // free again two generations later
  room.resize(sizeof(T) * threads);
  std::memcpy(room.data() + sizeof(T) * (fiber->thread.x % threads), &mine, sizeof(T));
  wait_while(barrier.generation, -1, arrive(barrier, threads));
  std::vector<T> all(threads);
  std::memcpy(all.data(), room.data(), room.size());
  return all;
}

inline unsigned char* shared(const Cta& of, uint32_t address) {
  if (address < SHARED_BASE || address >= SHARED_BASE + sizeof stoker::raw) fail("an address outside shared memory");
  return of.memory + (address - SHARED_BASE);
}
inline unsigned char* shared(uint32_t address) { return shared(*cta, address); }

// The CTA that an address lies in, itself without a rank; it has to be running.
inline Cta& owner(uint32_t address) {
  const uint32_t rank = address >> RANK_SHIFT;
  if (rank > cluster->ctas.size()) fail("an address in a CTA outside the cluster");
  return rank == 0 ? *cta : *cluster->ctas[rank - 1];
}
inline void running(const Cta& other) {
  if (!other.started) fail("an access to a CTA of the cluster that has not started");
  if (other.alive == 0) fail("an access to a CTA of the cluster that has ended");
}

inline void complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  cluster->progress = true;
}

inline Mbarrier& mbarrier(Cta& of, uint32_t address) {
  const auto found = of.mbarriers.find(address);
  if (found == of.mbarriers.end()) fail("an mbarrier that was not initialised");
  if (*reinterpret_cast<const uint64_t*>(shared(of, address)) != MBARRIER_BYTES) fail("an mbarrier that was overwritten");
  return found->second;
}
inline Mbarrier& mbarrier(uint32_t address) { return mbarrier(*cta, address); }

// A copy into `to`, counted on a barrier there when it lands.
inline void copy_later(Cta& to, uint32_t barrier, int64_t bytes, std::function<void()> move) {
  mbarrier(to, barrier);
  cluster->copies.push_back([=, &to] {
    running(to);
    move();
    Mbarrier& b = mbarrier(to, barrier);
    b.bytes -= bytes;
    if (b.bytes < -(1 << 20)) fail("more bytes than a barrier counts");
    complete(b);
  });
}
inline void copy_later(uint32_t barrier, int64_t bytes, std::function<void()> move) {
  copy_later(*cta, barrier, bytes, move);
}

// The cluster's barrier is complete once every thread has arrived or ended.
inline void cluster_check() {
  Cluster& c = *cluster;
  if (c.arrived == 0 || c.arrived + c.exited < c.threads) return;
  c.exited += c.left;
  c.arrived = c.left = 0;
  ++c.generation;
  c.progress = true;
}

inline void end_of_predecessor() {
  Predecessor& p = predecessor;
  if (std::memcmp(p.out, p.out_before.data(), p.out_bytes)) fail("a store before the kernel before has ended");
  for (size_t i = 0; i < p.writes.size(); ++i) std::memcpy(p.writes[i].at, p.after[i].data(), p.writes[i].bytes);
  p.done = 1;
}

inline void start() {
  entry();
  Cluster& c = *cluster;
  fiber->done = true;
  --cta->alive;
  ++(fiber->waits_for_cluster && fiber->cluster_generation == c.generation ? c.left : c.exited);
  cluster_check();
  c.progress = true;
  yield();
}

inline std::vector<std::unique_ptr<char[]>> stacks;

inline void prepare(Fiber& f, int index, int registers) {
  constexpr size_t size = 256 * 1024;
  if (stacks.empty()) stacks.push_back(std::make_unique_for_overwrite<char[]>(size));
  f.stack = std::move(stacks.back());
  stacks.pop_back();
  f.thread.x = index;
  f.registers = registers;
  f.products.resize(1);
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = size;
  f.context.uc_link = &cluster->scheduler;
  makecontext(&f.context, start, 0);
}

constexpr int64_t SHARED_BYTES = sizeof stoker::raw;
constexpr int MOST_CTAS = 16;  // of a cluster

inline int memory_file() {
  static const int file = [] {
    const int made = memfd_create("shared memory", 0);
    if (made < 0 || ftruncate(made, SHARED_BYTES * MOST_CTAS)) std::abort();
    return made;
  }();
  return file;
}

inline unsigned char* map_memory(void* where, int64_t bytes, int64_t offset, int flags) {
  void* found = mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, memory_file(), offset);
  if (found == MAP_FAILED) std::abort();
  return static_cast<unsigned char*>(found);
}

// How many rounds a CTA stands still: mostly few, at times more than another needs to end.
inline int stall() { return 1 << pick() % 12; }

inline std::unique_ptr<Cta> make_cta(unsigned block, int rank, int size, int threads) {
  static unsigned char* const all = map_memory(nullptr, SHARED_BYTES * MOST_CTAS, 0, 0);
  auto made = std::make_unique<Cta>();
  made->memory = size > 1 ? all + SHARED_BYTES * rank : stoker::raw;
  std::memset(made->memory, 0xFF, sizeof stoker::raw);  // NaNs
  made->block.x = block;
  made->rank = rank;
  made->alive = threads;
  made->stalled = size > 1 ? stall() : 0;
  made->fibers.resize(threads);
  made->paused.resize((threads + 31) / 32);
  for (int i = 0; i < threads; ++i) prepare(made->fibers[i], i, REGISTERS / resident / threads / 8 * 8);
  return made;
}

// Whether a warp is left out of a turn: at random, and now and then of many that follow each other.
inline bool left_out(int& paused) {
  if (paused > 0) return --paused >= 0;
  if (pick() % 128 == 0) paused = 1 << pick() % 8;
  return pick() % 4 == 0;
}

// A turn of a CTA's threads. If `ragged`, some warps are left out.
inline void turn(Cta& here, bool ragged) {
  cta = &here;
  if (cluster->ctas.size() > 1) map_memory(stoker::raw, SHARED_BYTES, SHARED_BYTES * here.rank, MAP_FIXED);
  here.started = true;
  bool skip = false;
  for (Fiber& f : here.fibers) {
    if (f.thread.x % 32 == 0) skip = ragged && left_out(here.paused[f.thread.x / 32]);
    if (f.done || skip) continue;
    if (f.watched != nullptr) {
      if ((*f.watched & f.mask) == f.held) continue;
      f.watched = nullptr;
    }
    fiber = &f;
    swapcontext(&cluster->scheduler, &f.context);
  }
}

inline void land_a_copy() {
  auto& copies = cluster->copies;
  std::swap(copies[pick() % copies.size()], copies.back());
  const auto copy = copies.back();
  copies.pop_back();
  copy();
  cluster->progress = true;
}

inline void check_end() {
  if (!cluster->copies.empty()) fail("a CTA ended before its copies");
  for (const auto& each : cluster->ctas) {
    for (const auto& [address, _] : each->mbarriers) {
      if (mbarrier(*each, address).bytes != 0) fail("a barrier still expects bytes at the end");
    }
    for (Fiber& f : each->fibers) stacks.push_back(std::move(f.stack));
  }
}

inline bool started() {
  return std::any_of(cluster->ctas.begin(), cluster->ctas.end(), [](const auto& each) { return each->started; });
}

inline void run_cluster(unsigned first, int size, int threads) {
  Cluster here;
  cluster = &here;
  here.threads = size * threads;
  for (int rank = 0; rank < size; ++rank) here.ctas.push_back(make_cta(first + rank, rank, size, threads));
  for (int idle = 0; idle <= 3;) {  // rounds in which nothing happened
    here.progress = false;
    bool alive = false, stalled = false;
    for (auto& each : here.ctas) {
      if (each->alive == 0) continue;
      alive = true;
      if (each->stalled > 0) {
        --each->stalled;
        stalled = true;
      } else {
        turn(*each, idle == 0);
        if (size > 1 && idle == 0 && pick() % 64 == 0) each->stalled = stall();
      }
    }
    if (!alive) return check_end();
    if (!here.copies.empty() && (pick() % 4 == 0 || !here.progress)) land_a_copy();
    if (idle > 1 && !predecessor.done && started()) {
      end_of_predecessor();
      here.progress = true;
    }
    idle = here.progress ? 0 : stalled ? min(idle + 1, 2) : idle + 1;
  }
  fail("every thread waits for ever");
}

// The clusters of a grid, in random order unless they wait for earlier ones. Each sees the kernel before it end anew.
inline void run_grid(int ctas, int threads, int seed, std::function<void()> kernel, int size = 1) {
  pick.seed(seed);
  entry = kernel;
  grid.x = ctas;
  Predecessor& p = predecessor;
  for (const Region& r : p.writes) p.after.emplace_back(r.at, r.at + r.bytes);
  std::vector<int> order(ctas / size);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  if (!in_order) std::shuffle(order.begin(), order.end(), pick);
  for (const int index : order) {
    if (!p.writes.empty()) {
      p.done = 0;
      for (const Region& r : p.writes) std::memset(r.at, 0xFF, r.bytes);  // NaNs
      p.out_before.assign(p.out, p.out + p.out_bytes);
    }
    run_cluster(index * size, size, threads);
    if (!p.done) end_of_predecessor();  // nothing waited for it
  }
  p = {};
}

}  // namespace emulator
