// Floats of four bits (e2m1) with a scale of eight for each block of columns: MXFP4 and NVFP4.
//
// Half a word has four codes of one column each, as four_bits.cuh says (`order.py` writes this).
#pragma once
#include "fragments.cuh"

namespace stoker {

// A byte of a scale becomes bits of a bf16, twice: byte · STEP + BASE, which brings codes back from 2^-126 to 1 / UNIT.
template <uint32_t STEP, uint32_t BASE>
struct ByteScales {
  __nv_bfloat162 scale[2];

  __device__ __forceinline__ ByteScales(uint32_t scales, uint32_t) {
    scale[0] = pair_of(__byte_perm(scales, 0, 0x4040) * STEP + BASE);
    scale[1] = pair_of(__byte_perm(scales, 0, 0x4141) * STEP + BASE);
  }
};

template <uint32_t STEP, uint32_t BASE>
struct Fp4 {
  static constexpr int PIECES = 1, SCALE_BYTES = 1, ZERO_BYTES = 0;
  static constexpr uint32_t MIDDLE = 0;
  using Scales = ByteScales<STEP, BASE>;

  // As of integers: rows 0 and 1 of columns 2c and 2c + 1, then of the columns eight further. Every product is exact.
  static __device__ __forceinline__ void unpack(const uint4& words, int step, const Scales& row, uint32_t (&a)[4]) {
    uint32_t codes[4];
    unpack_floats(word_of(words, step), codes);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = bits_of(__hmul2(pair_of(codes[i]), row.scale[i % 2]));
  }
};

// A byte of e8m0 is 127 and an exponent. With 94 more, as the exponent of a bf16, it is 2^94 times the scale: codes then
// lack 2^32. So scales from 2^-100 to 2^33 are exact.
struct Mxfp4 : Fp4<0x80u, 94u * 0x00800080u> {
  static constexpr int SETS = 2;
  static constexpr bool FACTORS = false;
  static constexpr float UNIT = 0x1p32f;

  static __device__ __forceinline__ uint32_t whole(uint32_t pair, float) {
    return bits_of(__hmul2(pair_of(pair), pair_of(0x4F804F80u)));  // 2^32
  }
};

// Five bits of an exponent and ten, three of a mantissa: beside the bits of 2^97 a bf16, 2^107 times the scale. The
// factor of a row is multiplied with its sums.
struct Nvfp4 : Fp4<0x10u, 0x70007000u> {
  static constexpr int SETS = 4;
  static constexpr bool FACTORS = true;
  static constexpr float UNIT = 0x1p19f;

  static __device__ __forceinline__ uint32_t whole(uint32_t pair, float unit) {
    const float2 values = __bfloat1622float2(pair_of(pair));
    return pack_bf16(values.x * unit, values.y * unit);
  }
};

}  // namespace stoker
