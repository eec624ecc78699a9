// Numbers of four bits as pairs of bf16, for whoever has the codes of two columns at the same place of a word's halves.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace stoker {

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 value) { return *reinterpret_cast<uint32_t*>(&value); }
__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// Floats (e2m1): sign, exponent and mantissa of code f are bits 15 and 8 to 6, where bf16 has its own, moved down by 3 · f;
// f = 3 has the rest, the sign in bit 14, the mantissa in 13, the exponent in 11 and 10. So a code is a bf16, 2^-126 times
// its value, the one subnormal value included.
constexpr uint32_t FLOAT_BITS = 0x81C081C0u, SIGN_BITS = 0x80008000u, EXPONENT_BITS = 0x01800180u, MANTISSA_BIT = 0x00400040u;

// The codes 0 to 3 of both halves.
__device__ __forceinline__ void unpack_floats(uint32_t word, uint32_t (&codes)[4]) {
  codes[3] = (word << 1 & SIGN_BITS) | (word >> 3 & EXPONENT_BITS) | (word >> 7 & MANTISSA_BIT);
  codes[0] = word & FLOAT_BITS, codes[1] = word << 3 & FLOAT_BITS, codes[2] = word << 6 & FLOAT_BITS;
}

// Integers: the eight lower bits of a bf16, sign and the rest of the exponent being 0, are an integer times 2^-133: below
// 128 the number is subnormal, from there on its exponent's lowest bit is one of them. So a byte, or half of one, needs no
// shift to become a number, but a factor, which brings all kinds to the same unit, 2^-6, within bf16's range.
constexpr uint32_t LOWER = 0x000F000Fu, UPPER = 0x00F000F0u, BYTE = 0x00FF00FFu;
constexpr uint32_t LOWER_FACTOR = 0x7F007F00u, UPPER_FACTOR = 0x7D007D00u;  // 2^127, 2^123, twice
constexpr uint32_t SCALE_FACTOR = 0x42804280u;                              // 64

// A pair of codes as they lie in a register, times `factor` in units of 2^-6 less the zero point in them: exact, then
// times the scale, rounded once.
__device__ __forceinline__ uint32_t scaled_integers(uint32_t raw, uint32_t factor, __nv_bfloat162 zero, __nv_bfloat162 scale) {
  return bits_of(__hmul2(__hfma2(pair_of(raw), pair_of(factor), zero), scale));
}

}  // namespace stoker
