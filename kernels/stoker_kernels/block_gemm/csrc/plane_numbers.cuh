// Codes and scales of GGUF's planes as bf16 weights, each as its format defines it, rounded once.
//
// Codes become mantissas of fp32 numbers at 2^23, where they lie or at the lowest bits; a subtraction brings out the integer
// times a power of two, and a product, or an fma where something is taken off, the weight: exact but for what the fma
// rounds, as in the definition. `quant/block_planes.py` describes planes.
#pragma once
#include "block_ptx.cuh"

namespace stoker {

constexpr int STEP_COLUMNS = 256, TAIL_COLUMNS = 64;
constexpr uint32_t PLANE_MAGIC = 0x4B000000u;  // 2^23

// As PlaneKind of quant/block_planes.py.
template <int LOW_, int HIGH_, int WORDS_, int OFFSET_, bool BYTES_, bool MINS_ = false, bool NIBBLES_ = false,
          bool LEVELS_ = false>
struct PlaneFormat {
  static constexpr int LOW = LOW_, HIGH = HIGH_, WORDS = WORDS_, OFFSET = OFFSET_;
  static constexpr bool BYTES = BYTES_, MINS = MINS_, NIBBLES = NIBBLES_, LEVELS = LEVELS_;
  static constexpr int PLACES = STEP_COLUMNS / WORDS, EACH = 16 / LOW;     // places of a step, and of an element of `low`
  static constexpr int HIGH_BITS = PLACES * HIGH < 16 ? PLACES * HIGH : 16;  // of an element of the plane `high`
  static constexpr int HIGH_EACH = HIGH > 0 ? HIGH_BITS / (HIGH > 0 ? HIGH : 1) : EACH;
  static constexpr int SCALE_WORDS = PLACES / (BYTES ? 8 : 4) * (MINS && !NIBBLES ? 2 : 1), TAIL_WORDS = MINS ? 2 : 1;
  static constexpr int LOW_STEP = 32 * LOW, HIGH_STEP = 32 * HIGH;  // bytes of a row's step
  static_assert(HIGH_EACH % EACH == 0, "places of an element of `low` lie in one of `high`");
};

// By the name of a block format, in lower case.
namespace plane {
using q8_0 = PlaneFormat<4, 4, 32, 128, false>;
using q4_0 = PlaneFormat<4, 0, 32, 8, false>;
using q4_1 = PlaneFormat<4, 0, 32, 0, false, true>;
using q5_0 = PlaneFormat<4, 1, 32, 16, false>;
using q5_1 = PlaneFormat<4, 1, 32, 0, false, true>;
using iq4_nl = PlaneFormat<4, 0, 32, 0, false, false, false, true>;
using iq4_xs = PlaneFormat<4, 0, 32, 0, true, false, false, true>;
using q2_k = PlaneFormat<2, 0, 16, 0, true, true, true>;
using q3_k = PlaneFormat<2, 1, 16, 4, true>;
using q4_k = PlaneFormat<4, 0, 32, 0, true, true>;
using q5_k = PlaneFormat<4, 1, 32, 0, true, true>;
using q6_k = PlaneFormat<4, 2, 16, 32, true>;
}  // namespace plane

// Scales of EACH places of a row: bytes, or fp16 numbers; `lows` are what is taken off or added.
template <class F>
struct PlaneScales {
  uint2 scales, lows;
  uint32_t factor;

  // Byte `i` of eight as an integer, of one with a sign where `SIGNED`.
  template <bool SIGNED>
  static __device__ __forceinline__ float byte_of(const uint2& words, int i, uint32_t magic) {
    const uint32_t word = (i < 4 ? words.x : words.y) ^ (SIGNED ? 0x80808080u : 0u);
    return __uint_as_float(__byte_perm(word, magic, 0x7650 | i % 4)) - (SIGNED ? 8388736.f : 8388608.f);
  }
  // Of place `i`: its scale, and what is added to the products. `magic` is PLANE_MAGIC in a register, as the compiler
  // cannot know it: an instruction has one constant.
  __device__ __forceinline__ void scale_of(int i, uint32_t magic, float& scale, float& add) const {
    add = 0.f;
    if constexpr (F::NIBBLES) {
      const uint32_t mask = 0x0F0F0F0Fu;
      scale = half_low(factor) * byte_of<false>(make_uint2(scales.x & mask, scales.y & mask), i, magic);
      add = -(half_high(factor) * byte_of<false>(make_uint2(scales.x >> 4 & mask, scales.y >> 4 & mask), i, magic));
    } else if constexpr (F::BYTES) {
      scale = half_low(factor) * byte_of<!F::MINS>(scales, i, magic);
      if constexpr (F::MINS) add = -(half_high(factor) * byte_of<false>(lows, i, magic));
    } else {
      const uint32_t word = i < 2 ? scales.x : scales.y, other = i < 2 ? lows.x : lows.y;
      scale = i % 2 ? half_high(word) : half_low(word);
      if constexpr (F::MINS) add = i % 2 ? half_high(other) : half_low(other);
    }
  }
};

// IQ4's levels + 128 of four codes, each without its highest bit, where that is 0 and where it is 1.
__device__ __forceinline__ uint32_t lower_levels(uint32_t at) { return __byte_perm(0x3F2D1801u, 0x766A5D4Fu, at); }
__device__ __forceinline__ uint32_t upper_levels(uint32_t at) { return __byte_perm(0xA6998D81u, 0xF1D9C5B5u, at); }

// Place `i` of elements: what their codes are multiplied with, and what is added.
template <class F>
struct PlanePlace {
  static constexpr bool APART = F::HIGH == 0 && !F::LEVELS;  // codes stay where they lie
  float scale, add;

  static __device__ __forceinline__ PlanePlace of(const PlaneScales<F>& scales, int i, uint32_t magic) {
    PlanePlace place;
    scales.scale_of(i, magic, place.scale, place.add);
    if (shift_of(i) > 0) place.scale *= 1.f / (1 << shift_of(i));
    return place;
  }
  static __device__ __forceinline__ int shift_of(int i) { return APART ? F::LOW * i : 0; }

  // IQ4's levels + 128 of an element's four places, a byte each: `codes` in the lower half.
  static __device__ __forceinline__ uint32_t levels_of(uint32_t codes) {
    const uint32_t at = codes & 0x7777u;
    return __byte_perm(lower_levels(at), upper_levels(at), 0x3210u | (codes & 0x8888u) >> 1);
  }
  // Codes of two planes, of both columns.
  static __device__ __forceinline__ uint32_t codes_of(uint32_t low, uint32_t high, int i) {
    // What a shift brings from the other half falls outside of the mask.
    constexpr uint32_t ONES = (1u << F::LOW) - 1, ABOVE = ((1u << F::HIGH) - 1) << F::LOW;
    const int up = F::LOW - F::HIGH * i;
    const uint32_t above = up >= 0 ? high << (up >= 0 ? up : 0) : high >> (up >= 0 ? 0 : -up);
    return low >> F::LOW * i & ONES * 0x10001u | above & ABOVE * 0x10001u;
  }
  // A pair of neighbouring columns: `low` and `high` have an element of each, of `high` with the first place at the lowest
  // bits.
  __device__ __forceinline__ uint32_t pair(uint32_t low, uint32_t high, int i, uint32_t magic) const {
    uint32_t number[2];
    if constexpr (F::LEVELS) {
      number[0] = __byte_perm(levels_of(low), magic, 0x7650 | i);
      number[1] = __byte_perm(levels_of(low >> 16), magic, 0x7650 | i);
    } else if constexpr (APART) {
      const uint32_t mask = (1u << F::LOW) - 1 << F::LOW * i;
      number[0] = low & mask | magic, number[1] = low >> 16 & mask | magic;
    } else {
      const uint32_t codes = codes_of(low, high, i);
      number[0] = __byte_perm(codes, magic, 0x7610), number[1] = __byte_perm(codes, magic, 0x7632);
    }
    const float base = 8388608.f + (F::LEVELS ? 128.f : static_cast<float>(F::OFFSET << shift_of(i)));
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float code = __uint_as_float(number[h]) - base;
      weight[h] = F::MINS ? fmaf(code, scale, add) : code * scale;
    }
    return pack_bf16(weight[0], weight[1]);
  }
};

// The same for products: weights times 2^-48, of which a sum is one times 2^-48.
//
// A mask alone makes a number of a code: the lowest 24 bits of an fp32 number, all others being 0, are an integer times
// 2^-149, subnormal or not. Its scale makes up for that, and an fma takes off what has to be taken off, rounding once, as
// the definition does. With 2^-48 no scale overflows, and no weight but 0 is subnormal: it is a multiple of 2^-24 at least,
// as fp16 numbers are.
template <class F>
struct SmallPlace {
  static constexpr bool APART = PlanePlace<F>::APART;
  static constexpr float SMALL = 0x1p-48f;
  float scale, add;

  static __device__ __forceinline__ SmallPlace of(const PlaneScales<F>& scales, int i, uint32_t magic) {
    float scale, add;
    scales.scale_of(i, magic, scale, add);
    constexpr float OFFSET = F::LEVELS ? 128.f : static_cast<float>(F::OFFSET);
    return {scale * (0x1p101f / (1 << PlanePlace<F>::shift_of(i))), F::MINS ? add * SMALL : scale * (-OFFSET * SMALL)};
  }
  __device__ __forceinline__ uint32_t pair(uint32_t low, uint32_t high, int i) const {
    uint32_t number[2];
    if constexpr (F::LEVELS) {
      number[0] = __byte_perm(PlanePlace<F>::levels_of(low), 0, 0x4440 | i);
      number[1] = __byte_perm(PlanePlace<F>::levels_of(low >> 16), 0, 0x4440 | i);
    } else if constexpr (APART) {
      const uint32_t mask = (1u << F::LOW) - 1 << F::LOW * i;
      number[0] = low & mask, number[1] = low >> 16 & mask;
    } else {
      const uint32_t codes = PlanePlace<F>::codes_of(low, high, i);
      number[0] = codes & 0xFFFFu, number[1] = codes >> 16;
    }
    return pack_bf16(fmaf(__uint_as_float(number[0]), scale, add), fmaf(__uint_as_float(number[1]), scale, add));
  }
};

}  // namespace stoker
