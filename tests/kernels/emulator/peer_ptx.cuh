// The functions of csrc/peer_ptx.cuh, done by the emulator. Ranks are processes; what they share is memory that all have
// mapped, and a thread that waits for a peer's word lets the others of its rank go on.
#pragma once
#include <sched.h>

#include "ptx.cuh"

#define blockDim (emulator::block_shape())

namespace emulator {
inline Index block_shape() { return {static_cast<unsigned>(cta->fibers.size())}; }
}  // namespace emulator

namespace stoker {

inline uint4 load_shared_with_peers(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a misaligned load");
  const auto* words = static_cast<const uint32_t*>(from);
  const auto word = [&](int i) { return __atomic_load_n(words + i, __ATOMIC_RELAXED); };
  return make_uint4(word(0), word(1), word(2), word(3));
}
// The words arrive one by one, in any order.
inline void store_shared_with_peers(void* to, uint4 x) {
  if (reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("a misaligned store");
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  const unsigned first = emulator::pick() % 4;
  for (unsigned i = 0; i < 4; ++i) {
    if (emulator::pick() % 64 == 0) emulator::yield();
    __atomic_store_n(static_cast<uint32_t*>(to) + (first + i) % 4, words[(first + i) % 4], __ATOMIC_RELAXED);
  }
  emulator::cluster->progress = true;
}
inline uint32_t load_word_of_peer(const uint32_t* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline void look_again() {
  emulator::cluster->progress = true;  // a peer's
  if (emulator::pick() % 8 == 0) sched_yield();
  emulator::yield();
}

inline uint32_t count_arrival(uint32_t* at) { return (*at)++; }

inline float inverse_root(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }

}  // namespace stoker
