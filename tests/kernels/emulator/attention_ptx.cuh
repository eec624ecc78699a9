// The functions of csrc/attention_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "ptx.cuh"

namespace stoker {

template <int id> void named_barrier_arrive(int threads) { emulator::arrive(10 + id, threads); }
template <int> void registers_decrease() {}
template <int> void registers_increase() {}

// ---- matrix fragments --------------------------------------------------------------------------------------------

inline uint32_t transpose_8x8(uint32_t x) {
  const auto all = emulator::gather(x, 32);
  uint32_t y = 0;
  for (int half = 0; half < 2; ++half) {
    const int row = emulator::lane() % 4 * 2 + half, column = emulator::lane() / 4;
    y |= (all[row * 4 + column / 2] >> 16 * (column % 2) & 0xFFFF) << 16 * half;
  }
  return y;
}

// ---- memory ------------------------------------------------------------------------------------------------------

inline float load_float(const float* p) { return *p; }
inline uint4 load_once_16(const unsigned char* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) emulator::fail("a misaligned load");
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
inline int atomic_add_acq_rel(int* p, int value) {
  const int old = *p;
  *p += value;
  return old;
}

inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  bulk_load(destination, source, bytes, barrier, 0);
}

inline void tensor_load_3d(uint32_t destination, const void* map, int inner, int middle, int outer, uint32_t barrier) {
  const CUtensorMap& m = *static_cast<const CUtensorMap*>(map);
  if (destination % 1024) emulator::fail("a misaligned box");
  if (middle >= m.sizes[1] || outer >= m.sizes[2]) emulator::fail("a box of nothing");
  load_box(*emulator::cta, destination, map, {inner, middle, outer}, barrier);
}

inline uint64_t wgmma_descriptor_columns(uint32_t address, uint32_t apart) {
  return (address >> 4) | static_cast<uint64_t>(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

}  // namespace stoker
