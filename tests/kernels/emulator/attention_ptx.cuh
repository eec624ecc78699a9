// The functions of csrc/attention_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "ptx.cuh"

namespace stoker {

template <int id> void named_barrier_arrive(int threads) { emulator::arrive(10 + id, threads); }
template <int> void registers_decrease() {}
template <int> void registers_increase() {}

// ---- numbers -----------------------------------------------------------------------------------------------------

inline uint16_t f16_from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent == 0 ? mantissa / 512.0f : std::ldexp(1.0f + mantissa / 8.0f, exponent - 7);
  if (exponent == 15 && mantissa == 7) value = NAN;
  return to_f16(x & 128 ? -value : value);
}
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16; }
inline uint32_t pack_f16(float low, float high) { return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16; }
inline void unpack_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  low = f16_from_e4m3(x) | static_cast<uint32_t>(f16_from_e4m3(x >> 8)) << 16;
  high = f16_from_e4m3(x >> 16) | static_cast<uint32_t>(f16_from_e4m3(x >> 24)) << 16;
}

// ---- matrix fragments --------------------------------------------------------------------------------------------

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, true); }

inline uint32_t transpose_8x8(uint32_t x) {
  const auto all = emulator::gather(x, 32);
  uint32_t y = 0;
  for (int half = 0; half < 2; ++half) {
    const int row = emulator::lane() % 4 * 2 + half, column = emulator::lane() / 4;
    y |= (all[row * 4 + column / 2] >> 16 * (column % 2) & 0xFFFF) << 16 * half;
  }
  return y;
}

inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1, from_f16);
}

// ---- memory ------------------------------------------------------------------------------------------------------

inline int load_int(const int* p) { return *p; }
inline float load_float(const float* p) { return *p; }
inline int4 load_int4(const int* p) { return {p[0], p[1], p[2], p[3]}; }
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
  if (middle + m.box[1] > m.sizes[1]) emulator::fail("a box past the middle dimension");
  load_box(*emulator::cta, destination, map, {inner, middle, outer}, barrier);
}

inline uint64_t wgmma_descriptor_columns(uint32_t address, uint32_t apart) {
  return (address >> 4) | static_cast<uint64_t>(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

}  // namespace stoker
