#pragma once
#include <cstdint>

#include "builtins.h"

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { uint16_t low, high; };

inline uint16_t bf16_bits(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return x != x ? 0x7FFF : static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {bf16_bits(low), bf16_bits(high)}; }
inline float from_bits(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {from_bits(x.low), from_bits(x.high)}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 x, __nv_bfloat162 y) {
  return __floats2bfloat162_rn(from_bits(x.low) - from_bits(y.low), from_bits(x.high) - from_bits(y.high));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 x, __nv_bfloat162 y) {
  return __floats2bfloat162_rn(from_bits(x.low) * from_bits(y.low), from_bits(x.high) * from_bits(y.high));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 x, __nv_bfloat162 y, __nv_bfloat162 z) {
  const auto one = [](uint16_t a, uint16_t b, uint16_t c) { return std::fma(from_bits(a), from_bits(b), from_bits(c)); };
  return __floats2bfloat162_rn(one(x.low, y.low, z.low), one(x.high, y.high, z.high));
}
inline float __bfloat162float(__nv_bfloat16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
