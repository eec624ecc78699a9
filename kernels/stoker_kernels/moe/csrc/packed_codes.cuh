// Experts in four bits: what a word of eight codes is as numbers, and where a row's words and scales are.
//
// Rows lie in steps, as `moe/steps.py` says: the codes 2f and 2f + 1 of a word, in its lower and upper half alike, are of
// columns as far apart as the step has words.
#pragma once
#include "few_arguments.cuh"
#include "four_bits.cuh"

namespace stoker {

enum class PackedKind { MXFP4, NVFP4, INT4 };

struct PackedArguments {
  FewArguments few;             // without scale; `chunks`: parts into which down cuts rows
  const unsigned char* weight;  // [experts, (2 ·) rows, columns / 2]
  const unsigned char* scales;  // [experts, lines, (2 ·) rows, SCALE_BYTES]
  const float* factor;          // of NVFP4: [experts, (2 ·) rows]
  const unsigned char* next;    // of gate-up: down's weight, a row of `rows` columns
  int next_rows;                // of an expert's, a multiple of 16
  int ld_out;                   // of gate-up, whose rows are in the order in which down reads them
  int lines;                    // of scales that an expert has
  int group_shift;              // of INT4: the logarithm of a group's columns, 31 for whole rows
};

constexpr int PACKED_BOX = 256;  // columns, of which a part of a row has whole multiples; a warp takes half at a time
constexpr int PACKED_TILE = 16;  // rows of a job: of gate-up eight of gate and of up

// A step of a row: its number, its first column, its words.
struct PackedStep {
  int line, column, words;
};

// The step of a word of a row of so many columns; of a word behind the row the last one. A whole step has `most` words.
template <int most>
__device__ __forceinline__ PackedStep packed_step(int word, int columns) {
  const int whole = columns / (8 * most), rest = columns / 8 % most;
  if (word < whole * most) return {word / most, word / most * most * 8, most};
  int line = whole - 1, first = (whole - 1) * most, words = most;  // of the step before
#pragma unroll
  for (int size = most / 2; size >= 4; size /= 2) {
    if ((rest & size) && word >= first + words) ++line, first += words, words = size;
  }
  return {line, first * 8, words};
}

// e2m1 with a byte of scale for each code place: `moe/layouts/fp4_words.py`.
template <uint32_t STEP, uint32_t BASE>
struct PackedFloats {
  static constexpr int SCALE_BYTES = 8;
  __nv_bfloat162 factors[4];

  // `line(i)`: a row's scales of the i-th line.
  template <typename Line>
  __device__ __forceinline__ PackedFloats(const PackedStep& step, int, const Line& line) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(line(step.line));
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      factors[f] = pair_of(__byte_perm(f < 2 ? bytes.x : bytes.y, 0, f % 2 ? 0x4342 : 0x4140) * STEP + BASE);
    }
  }

  __device__ __forceinline__ void unpack(uint32_t word, uint32_t (&pairs)[4]) const {
    uint32_t codes[4];
    unpack_floats(word, codes);
#pragma unroll
    for (int f = 0; f < 4; ++f) pairs[f] = bits_of(__hmul2(pair_of(codes[f]), factors[f]));
  }
};

// Integers with a scale and a zero point for each group of columns: `moe/layouts/int4.py`.
struct PackedIntegers {
  static constexpr int SCALE_BYTES = 4;
  __nv_bfloat162 scales[4], zeros[4];

  template <typename Line>
  __device__ __forceinline__ PackedIntegers(const PackedStep& step, int shift, const Line& line) {
    const bool wide = shift >= 7;  // so that four code places share a group
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      if (f % 2 && wide) {
        scales[f] = scales[f - 1], zeros[f] = zeros[f - 1];
        continue;
      }
      const uint32_t low = *reinterpret_cast<const uint32_t*>(line((step.column + 2 * f * step.words) >> shift));
      uint32_t high = low;
      if (!wide) high = *reinterpret_cast<const uint32_t*>(line((step.column + (2 * f + 1) * step.words) >> shift));
      scales[f] = __hmul2(pair_of(__byte_perm(low, high, 0x5410)), pair_of(SCALE_FACTOR));
      zeros[f] = __hmul2(pair_of(__byte_perm(low, high, 0x7632)), pair_of(0xBC80BC80u));   // -2^-6
    }
  }

  __device__ __forceinline__ void unpack(uint32_t word, uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const uint32_t raw = (f < 2 ? word : word >> 8) & (f % 2 ? UPPER : LOWER);
      pairs[f] = scaled_integers(raw, f % 2 ? UPPER_FACTOR : LOWER_FACTOR, zeros[f], scales[f]);
    }
  }
};

// STEP_WORDS: of a whole step. UNIT: what sums lack.
template <PackedKind kind>
struct PackedLayout;
template <>
struct PackedLayout<PackedKind::MXFP4> {
  using Codes = PackedFloats<0x80u, 0u>;
  static constexpr int STEP_WORDS = 32;
  static constexpr float UNIT = 0x1p32f;
};
template <>
struct PackedLayout<PackedKind::NVFP4> {
  using Codes = PackedFloats<0x10u, 0x70007000u>;
  static constexpr int STEP_WORDS = 16;
  static constexpr float UNIT = 0x1p19f;
};
template <>
struct PackedLayout<PackedKind::INT4> {
  using Codes = PackedIntegers;
  static constexpr int STEP_WORDS = 32;
  static constexpr float UNIT = 1.0f;
};

}  // namespace stoker
