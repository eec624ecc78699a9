// The functions of csrc/block_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "ptx.cuh"

namespace stoker {

inline float half_low(uint32_t pair) { return from_f16(static_cast<uint16_t>(pair)); }
inline float half_high(uint32_t pair) { return from_f16(static_cast<uint16_t>(pair >> 16)); }
inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t ones) { return (x & mask) | ones; }
inline void mma_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  for (float& sum : d) sum = 0.0f;
  mma(d, a, b);
}

// A group ends with a copy to nowhere.
inline void copy_weight(uint32_t to, const void* from, uint64_t) {
  copy_async_16(emulator::shared(to), from, true);
}
inline void copies_commit() { emulator::fiber->copies.push_back({nullptr, nullptr, false}); }
template <int pending>
void copies_wait_group() {
  auto& copies = emulator::fiber->copies;
  int groups = 0;
  for (const emulator::Copy& copy : copies) groups += copy.to == nullptr;
  while (groups > pending) {
    if (copies.front().to != nullptr) copies.front().land();
    groups -= copies.front().to == nullptr;
    copies.erase(copies.begin());
  }
}

template <typename T>
T load_aligned(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) emulator::fail("a misaligned load");
  return *static_cast<const T*>(from);
}
inline uint4 load_weight_16(const void* from, uint64_t) { return load_aligned<uint4>(from); }
inline uint2 load_weight_8(const void* from, uint64_t) { return load_aligned<uint2>(from); }
inline uint2 load_8(const void* from) { return load_aligned<uint2>(from); }
inline uint32_t load_4(const void* from) { return load_aligned<uint32_t>(from); }

}  // namespace stoker
