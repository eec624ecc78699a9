// Half steps of GGUF's planes in shared memory, as operands of wgmma in registers: a lane's rows, codes and scales.
#pragma once
#include "wide_ring.cuh"

namespace stoker {

// The rows of a lane within its first strip, that whose scales it makes numbers of, and how many rows of a span further
// the next strip is.
template <class C>
struct LaneRows {
  int row[2], table, stride;

  // Neighbours 2q and 2q + 1, of which lanes of the upper half have the odd one first: so rows that a warp reads together
  // differ modulo 8, and meet in no bank. Gate and up: q and, a span further, q again.
  static __device__ __forceinline__ int row_of(int q, int which, bool gated) {
    const int warp = threadIdx.x % 128 / 32;
    return gated ? which * C::SPAN + warp * 8 + q : warp * 16 + 2 * q + (q / 4 ^ which);
  }
  __device__ explicit LaneRows(bool gated) {
    const int lane = threadIdx.x % 32;
    stride = gated ? STRIP_ROWS / 2 : STRIP_ROWS;
    const int first = threadIdx.x / 128 * C::STRIPS * stride;
    row[0] = first + row_of(lane / 4, 0, gated), row[1] = first + row_of(lane / 4, 1, gated);
    table = first + row_of(lane % 8, lane / 8 % 2, gated);
  }
};

// The scales of 16 rows in a half step as numbers, which a warp's lanes make for each other: those of a row's two places
// in 16 bytes, of first rows before second ones.
template <class C>
struct ScaleTable {
  using F = typename C::F;
  static constexpr int PAIRS = HALF_COLUMNS / F::WORDS / 2;
  float4 held[2];  // of both rows, in two places

  static __device__ __forceinline__ void fill(const unsigned char* stage, int row, int half, uint32_t magic, float4* table) {
    const int lane = threadIdx.x % 32;
    PlaneScales<F> own;
    own.factor = *reinterpret_cast<const uint32_t*>(stage + C::FACTOR_AT + row * 4);
    const unsigned char* from = stage + C::SCALE_AT + row * 8 + (C::WHOLE_SCALES ? half % 2 * 4 : 0);
#pragma unroll
    for (int first = 0; first < PAIRS; first += 2) {
      const int pair = first + lane / 16;
      own.scales.x = *reinterpret_cast<const uint16_t*>(from + pair * 2);
      if constexpr (C::SETS == 2) own.lows.x = *reinterpret_cast<const uint16_t*>(from + C::ROWS * 8 + pair * 2);
      const auto one = SmallPlace<F>::of(own, 0, magic), two = SmallPlace<F>::of(own, 1, magic);
      // Codes of a later pair of places lie higher.
      const float lower = SmallPlace<F>::APART ? __uint_as_float((127 - 2 * F::LOW * pair) << 23) : 1.f;
      table[pair * 16 + lane % 16] = make_float4(one.scale * lower, one.add, two.scale * lower, two.add);
    }
  }
  __device__ __forceinline__ void read(const float4* table, int place) {
    const int q = threadIdx.x % 32 / 4;
    held[0] = table[place / 2 * 16 + q], held[1] = table[place / 2 * 16 + 8 + q];
  }
  __device__ __forceinline__ SmallPlace<F> place(int r, int place) const {
    return place % 2 ? SmallPlace<F>{held[r].z, held[r].w} : SmallPlace<F>{held[r].x, held[r].y};
  }
};

// A lane's codes of a group of columns, as many as share words of the plane `low`, and its scales where they are no bytes.
template <class C>
struct WideUnit {
  using F = typename C::F;
  static constexpr int WORDS = F::WORDS / 8, COLUMNS = F::EACH * F::WORDS, GROUPS = HALF_COLUMNS / COLUMNS;
  uint32_t low[2][WORDS], high[2][WORDS];
  PlaneScales<F> own[2];

  // Where a row's line of so many bytes begins, its chunks of 16 turned by the swizzle.
  template <int LINE>
  static __device__ __forceinline__ uint32_t line_at(int row) {
    const uint32_t at = row * LINE;
    return at ^ ((at >> 7 & (LINE / 16 - 1)) << 4);
  }
  // `stage`: where its planes lie; `c`: lane % 4.
  __device__ __forceinline__ void read(const unsigned char* stage, const int (&rows)[2], int group, int half, int c) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t low_line = line_at<C::LOW_LINE>(rows[r]) + 4 * c;
#pragma unroll
      for (int j = 0; j < WORDS; j++)
        low[r][j] = *reinterpret_cast<const uint32_t*>(stage + (low_line ^ (group * WORDS + j) * 16));
      if constexpr (F::HIGH > 0) read_high(stage + C::LOW_BYTES, rows[r], r, group, half, c);
      if constexpr (!F::BYTES) {
        const unsigned char* scale = stage + C::SCALE_AT + rows[r] * 8;
        own[r].scales = *reinterpret_cast<const uint2*>(scale);
        if constexpr (C::SETS == 2) own[r].lows = *reinterpret_cast<const uint2*>(scale + C::ROWS * 8);
      }
    }
  }
  // So that the group's first place is at the lowest bits.
  __device__ __forceinline__ void read_high(const unsigned char* planes, int row, int r, int group, int half, int c) {
    const uint32_t line = line_at<C::HIGH_LINE>(row);
    const int place = (C::WHOLE_HIGH ? half % 2 * (HALF_COLUMNS / F::WORDS) : 0) + group * F::EACH;  // of the line
    const int element = place / F::HIGH_EACH, shift = place % F::HIGH_EACH * F::HIGH;
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      if constexpr (F::HIGH_BITS == 16) {
        const uint32_t at = (line + 4 * c) ^ (element * WORDS + j) * 16;
        high[r][j] = *reinterpret_cast<const uint32_t*>(planes + at) >> shift;
      } else {
        const uint32_t at = (line + j % 2 * 8 + 2 * c) ^ (j / 2) * 16;
        const uint32_t both = *reinterpret_cast<const uint16_t*>(planes + at);
        high[r][j] = __byte_perm(both, 0, 0x4140) >> shift;
      }
    }
  }
  // The operand of step `t` of 16 columns of the group; `table`: with BYTES all lanes' scales.
  __device__ __forceinline__ void weights(int group, int t, uint32_t magic, const float4* table, ScaleTable<C>& scales,
                                          uint32_t (&a)[4]) const {
    constexpr int STEPS = F::WORDS / 16;  // of a place
    const int i = t / STEPS, j = t % STEPS * 2, of_half = group * F::EACH + i;
    if (F::BYTES && of_half % 2 == 0 && j == 0) scales.read(table, of_half);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      SmallPlace<F> place;
      if constexpr (F::BYTES) {
        place = scales.place(r, of_half);
      } else {
        place = SmallPlace<F>::of(own[r], i, magic);
      }
      a[r] = place.pair(low[r][j], high[r][j], i);
      a[2 + r] = place.pair(low[r][j + 1], high[r][j + 1], i);
    }
  }
};

}  // namespace stoker
