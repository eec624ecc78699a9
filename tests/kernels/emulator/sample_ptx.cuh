// The functions of csrc/sample_ptx.cuh, done by the emulator.
#pragma once
#include "ptx.cuh"

namespace stoker {

inline void cluster_publish() { cluster_arrive(); }

template <typename T> T* at_cluster(uint32_t there) {
  emulator::Cta& owner = emulator::owner(there);
  emulator::running(owner);
  if (there % sizeof(T)) emulator::fail("a misaligned access to shared memory");
  return reinterpret_cast<T*>(emulator::shared(owner, there & LOCAL));
}
inline uint4 load_cluster_16(uint32_t there) { return *at_cluster<uint4>(there); }
inline uint32_t load_cluster_4(uint32_t there) { return *at_cluster<uint32_t>(there); }
inline void store_cluster_4(uint32_t there, uint32_t x) { *at_cluster<uint32_t>(there) = x; }
inline void store_cluster_8(uint32_t there, uint64_t x) { *at_cluster<uint64_t>(there) = x; }

inline float added(float a, float b) { return a + b; }
inline float multiplied(float a, float b) { return a * b; }
inline float divided(float a, float b) { return a / b; }
inline float floor_shifted(float x) { return 12582912.0f + std::floor(x); }
inline int64_t truncated_product(double a, double b) { return static_cast<int64_t>(a * b); }
inline uint64_t truncated(float x) { return static_cast<uint64_t>(x); }
inline uint32_t high_product(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline uint64_t high_product_64(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline void count_one(uint32_t* at) { ++*at; }
inline uint32_t add_to(uint32_t* at, uint32_t x) {
  const uint32_t old = *at;
  *at += x;
  return old;
}
inline void add_to(uint64_t* at, uint64_t x) { *at += x; }

inline uint4 load_streamed(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a misaligned load");
  return *static_cast<const uint4*>(from);
}

}  // namespace stoker
