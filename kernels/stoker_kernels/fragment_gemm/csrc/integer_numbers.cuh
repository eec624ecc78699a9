// Integers of 4 and 8 bits with a scale in bf16 and a zero point for each group of columns: `(code - zero) · scale`.
#pragma once
#include "fragments.cuh"

namespace stoker {

constexpr uint32_t ZERO_FACTOR = 0xFF00FF00u;  // -2^127, of bytes

// Scales (times 64) and zero points (times -2^-6) of a lane's two rows of one tile, each doubled for both halves of a
// register.
struct IntegerScales {
  __nv_bfloat162 scale[2], zero[2];

  // `scales`: the rows' two bf16; `zeros`: their two bytes.
  __device__ __forceinline__ IntegerScales(uint32_t scales, uint32_t zeros) {
    scale[0] = __hmul2(pair_of(__byte_perm(scales, scales, 0x1010)), pair_of(SCALE_FACTOR));
    scale[1] = __hmul2(pair_of(__byte_perm(scales, scales, 0x3232)), pair_of(SCALE_FACTOR));
    zero[0] = __hmul2(pair_of(__byte_perm(zeros, 0, 0x4040)), pair_of(ZERO_FACTOR));
    zero[1] = __hmul2(pair_of(__byte_perm(zeros, 0, 0x4141)), pair_of(ZERO_FACTOR));
  }

  // A pair of codes of row `h`, as they lie in a register, times `factor` in units of 2^-6: exact, then rounded once.
  __device__ __forceinline__ uint32_t weights(uint32_t raw, uint32_t factor, int h) const {
    return scaled_integers(raw, factor, zero[h], scale[h]);
  }
};

template <bool SMALL>
struct Integers {
  static constexpr int SETS = SMALL ? STEPS : 1, SCALE_BYTES = 2, ZERO_BYTES = 1;
  static constexpr bool FACTORS = false;
  static constexpr float UNIT = 1.f;
  using Scales = IntegerScales;

  // What a dequantized pair of row `h` is.
  static __device__ __forceinline__ uint32_t whole(uint32_t pair, float) { return pair; }
};

// SMALL: groups of less than a block of columns.
template <bool SMALL>
struct Int4 : Integers<SMALL> {
  static constexpr int PIECES = 1;
  static constexpr uint32_t MIDDLE = 0x08080808u;

  // Rows 0 and 1 of columns 2c and 2c + 1, then of the columns eight further: half bytes 0 to 3 of both halves.
  static __device__ __forceinline__ void unpack(const uint4& words, int step, const IntegerScales& row, uint32_t (&a)[4]) {
    const uint32_t word = word_of(words, step);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t byte = i < 2 ? word : word >> 8;
      a[i] = row.weights(masked(byte, i % 2 ? UPPER : LOWER), i % 2 ? UPPER_FACTOR : LOWER_FACTOR, i % 2);
    }
  }
};

template <bool SMALL>
struct Int8 : Integers<SMALL> {
  static constexpr int PIECES = 2;
  static constexpr uint32_t MIDDLE = 0x80808080u;

  // The same: a word has columns 2c and 2c + 1, the next one those eight further; byte h + 2e is row h of column e.
  static __device__ __forceinline__ void unpack(const uint4& words, int step, const IntegerScales& row, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t word = word_of(words, 2 * step + i / 2);
      a[i] = row.weights(i % 2 ? __byte_perm(word, 0, 0x4341) : masked(word, BYTE), LOWER_FACTOR, i % 2);
    }
  }
};

}  // namespace stoker
