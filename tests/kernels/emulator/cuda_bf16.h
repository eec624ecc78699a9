#pragma once
#include <cstdint>

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { uint16_t low, high; };

inline uint16_t bf16_bits(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return x != x ? 0x7FFF : static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {bf16_bits(low), bf16_bits(high)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
