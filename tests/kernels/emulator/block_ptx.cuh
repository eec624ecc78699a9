// The functions of csrc/block_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "ptx.cuh"

namespace stoker {

inline uint32_t only(uint32_t x, uint32_t y) { return x & y; }
inline float half_low(uint32_t pair) { return from_f16(static_cast<uint16_t>(pair)); }
inline float half_high(uint32_t pair) { return from_f16(static_cast<uint16_t>(pair >> 16)); }
inline void block_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma_m16n8k16_bf16(d, a, b[0], b[1]);
}

}  // namespace stoker
