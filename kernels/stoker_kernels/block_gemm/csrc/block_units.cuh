// Units of GGUF's planes, 16 rows × a step of 256 columns, as operands of mma.m16n8k16: how they lie in shared memory and
// become numbers in registers. `quant/block_planes.py` describes planes; in a unit's rows of them the 16 bytes change places
// by the row, its scales lie as in memory.
//
// The eight lower bits of a bf16, all others being 0, are an integer times 2^-133: below 128 the number is subnormal, from
// there on its exponent's lowest bit is one of them. Tensor cores take such numbers, so a code needs a mask to become one.
// x is multiplied by 2^64 for it, and sums are those of the definition times 2^-69. Codes of four bits may lie four bits
// higher: x of their columns is multiplied by 2^60 then. All of it is exact where 2^-56 < |x| < 2^63.
//
// With q = lane / 4 and c = lane % 4 a lane has rows r(q) and r(q) + 8 of a unit, r the three bits of q in reverse, so that
// no two rows of a read meet in a bank. Of a place of 32 columns it has 8c to 8c + 7, of one of 16 columns 4c to 4c + 3.
#pragma once
#include "plane_numbers.cuh"

namespace stoker {

constexpr int UNIT_ROWS = 16, UNIT_COLUMNS = 256, K_STEPS = 16;
constexpr float SUM_UNIT = 590295810358705651712.f;  // 2^69

enum BlockCodes { FOUR, FIVE, SIX, EIGHT, LEVELS };

// `BYTES`: scales are bytes that two fp16 numbers of the step multiply, else fp16; `MINS`: something is taken off (BYTES) or
// added to the product; `OFFSET` is what a code stands above its value.
template <BlockCodes CODES_, bool BYTES_, bool MINS_, int OFFSET_>
struct BlockFormat {
  static constexpr BlockCodes CODES = CODES_;
  static constexpr bool BYTES = BYTES_, MINS = MINS_;
  static constexpr int OFFSET = OFFSET_;
  static constexpr int PLACES = CODES == SIX ? 16 : 8, STEPS_OF_PLACE = K_STEPS / PLACES;
  static constexpr int SCALE_WORDS = BYTES ? PLACES / 8 * (MINS ? 2 : 1) : PLACES / 4 * (MINS ? 2 : 1);
  static constexpr int LOW_BYTES = UNIT_ROWS * 128;
  static constexpr int HIGH_BITS = CODES == FIVE ? 1 : CODES == SIX ? 2 : CODES == EIGHT ? 4 : 0;
  static constexpr int HIGH_BYTES = UNIT_ROWS * 32 * HIGH_BITS;
  static constexpr int SCALE_BYTES = SCALE_WORDS * UNIT_ROWS * 8, FACTOR_BYTES = BYTES ? UNIT_ROWS * 4 : 0;
  static constexpr int REST_BYTES = SCALE_BYTES + FACTOR_BYTES, UNIT_BYTES = LOW_BYTES + HIGH_BYTES + REST_BYTES;

  // Places in the order in which they are multiplied: neighbours share what their codes are made of.
  static __device__ __forceinline__ constexpr int place_at(int i) {
    if (CODES == SIX) return i / 8 * 8 + i % 8 / 2 + i % 2 * 4;
    if (CODES == EIGHT) return i / 4 * 4 + i % 4 / 2 + i % 2 * 2;
    return i;
  }
  // Whether codes of a place lie four bits higher.
  static __device__ __forceinline__ constexpr bool raised(int place) { return CODES == FOUR && place % 2 == 1; }
};

using Q4K = BlockFormat<FOUR, true, true, 0>;
using Q6K = BlockFormat<SIX, true, false, 32>;
using Q80 = BlockFormat<EIGHT, false, false, 128>;
using Q40 = BlockFormat<FOUR, false, false, 8>;
using Q41 = BlockFormat<FOUR, false, true, 0>;
using Q5K = BlockFormat<FIVE, true, true, 0>;
using Q50 = BlockFormat<FIVE, false, false, 16>;
using Q51 = BlockFormat<FIVE, false, true, 0>;
// Of four bits that name a level, which stands 128 higher.
using IQ4XS = BlockFormat<LEVELS, true, false, 128>;
using IQ4NL = BlockFormat<LEVELS, false, false, 128>;

// Where a unit's parts lie in shared memory.
struct UnitPlace {
  const unsigned char *low, *high, *rest;
};

__device__ __forceinline__ int lane_row(int lane) {
  const int q = lane / 4;
  return (q & 1) * 4 + (q & 2) + q / 4;
}

template <class F>
struct BlockUnit {
  static constexpr int CODE_WORDS = 4, HIGH_WORDS = F::CODES == EIGHT ? 4 : F::HIGH_BITS > 0 ? 2 : 1;
  // By half of the step and row of the lane: of SIX a quarter's two words after the other's; of FIVE the first half's have
  // the bits of all places, a byte a column.
  uint32_t low[2][2][CODE_WORDS], high[2][2][HIGH_WORDS];
  uint32_t scales[2][8 * F::PLACES / (F::BYTES ? 32 : 16)], factor[2];
  // What sums of x are multiplied with, by row: with BYTES a byte of places 2c and 2c + 1, and of SIX of the eighth behind
  // them; else two fp16 numbers.
  uint32_t shifts[2][F::CODES == SIX ? 2 : 1];

  __device__ __forceinline__ void read_codes(const UnitPlace& from, int half, int lane) {
    const int row = lane_row(lane), c = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const unsigned char* low_row = from.low + (row + 8 * h) * 128;
      if constexpr (F::CODES == SIX) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
          const int chunk = (half * 4 + part * 2 + c / 2) ^ row;
          const uint2 words = *reinterpret_cast<const uint2*>(low_row + chunk * 16 + c % 2 * 8);
          low[half][h][part * 2] = words.x, low[half][h][part * 2 + 1] = words.y;
        }
        const int chunk = (half * 2 + c / 2) ^ (row / 2);
        const unsigned char* high_row = from.high + (row + 8 * h) * 64;
        const uint2 words = *reinterpret_cast<const uint2*>(high_row + chunk * 16 + c % 2 * 8);
        high[half][h][0] = words.x, high[half][h][1] = words.y;
      } else {
        const int at = ((half * 4 + c) ^ row) * 16;
        put(low[half][h], *reinterpret_cast<const uint4*>(low_row + at));
        if constexpr (F::CODES == EIGHT) {
          put(high[half][h], *reinterpret_cast<const uint4*>(from.high + (row + 8 * h) * 128 + at));
        } else if constexpr (F::CODES == FIVE) {
          if (half > 0) continue;
          const uint2 words = *reinterpret_cast<const uint2*>(from.high + (row + 8 * h) * 32 + c * 8);
          high[0][h][0] = words.x, high[0][h][1] = words.y;
        }
      }
    }
  }
  __device__ __forceinline__ void read_scales(const UnitPlace& from, int lane) {
    const int row = lane_row(lane), c = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int word = 0; word < static_cast<int>(sizeof scales[0] / 8); word++) {
        const uint2 both = *reinterpret_cast<const uint2*>(from.rest + (word * UNIT_ROWS + row + 8 * h) * 8);
        scales[h][word * 2] = both.x, scales[h][word * 2 + 1] = both.y;
      }
      if constexpr (F::BYTES) {
        const unsigned char* own = from.rest + (F::MINS ? UNIT_ROWS * 8 : 0) + (row + 8 * h) * 8 + 2 * c;
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof shifts[0] / 4); i++) {
          shifts[h][i] = *reinterpret_cast<const uint16_t*>(own + i * UNIT_ROWS * 8);
        }
      } else {
        const int word = c / 2 + (F::MINS ? F::SCALE_WORDS / 2 : 0);
        shifts[h][0] = *reinterpret_cast<const uint32_t*>(from.rest + (word * UNIT_ROWS + row + 8 * h) * 8 + c % 2 * 4);
      }
      if constexpr (F::BYTES) {
        factor[h] = *reinterpret_cast<const uint32_t*>(from.rest + F::SCALE_BYTES + (row + 8 * h) * 4);
      }
    }
  }
  static __device__ __forceinline__ void put(uint32_t (&into)[4], const uint4& words) {
    into[0] = words.x, into[1] = words.y, into[2] = words.z, into[3] = words.w;
  }

  // The codes of both rows in the columns of step `j` of a place.
  __device__ __forceinline__ void codes(int place, int j, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {  // a[0], a[1]: the first pair of columns of both rows
      const int h = i % 2, pair = i / 2;
      if constexpr (F::CODES == FOUR) {
        const uint32_t word = low[place / 4][h][j * 2 + pair];
        a[i] = masked(place % 4 < 2 ? word : word >> 8, place % 2 ? 0x00F000F0u : 0x000F000Fu);
      } else if constexpr (F::CODES == FIVE) {
        const uint32_t fifths = __byte_perm(high[0][h][j], 0, pair ? 0x4342 : 0x4140);  // of all places, by column
        const uint32_t above = place < 4 ? fifths << (4 - place) : fifths >> (place - 4);
        a[i] = masked(low[place / 4][h][j * 2 + pair] >> place % 4 * 4, 0x000F000Fu) | above & 0x00100010u;
      } else if constexpr (F::CODES == LEVELS) {
        const uint32_t both = levels(low[place / 4][h][j * 2 + pair], place % 4 / 2);
        a[i] = place % 2 ? __byte_perm(both, 0, 0x4341) : masked(both, 0x00FF00FFu);
      } else {
        const uint32_t both = F::CODES == SIX ? six(h, pair, place) : eight(h, j * 2 + pair, place);
        const bool upper = F::CODES == SIX ? place % 8 >= 4 : place % 4 >= 2;
        a[i] = upper ? __byte_perm(both, 0, 0x4341) : masked(both, 0x00FF00FFu);
      }
    }
  }
  // Codes of a pair of columns in a byte each: of places p and p + 4 of a half, p = place % 4.
  __device__ __forceinline__ uint32_t six(int h, int pair, int place) const {
    const int half = place / 8, p = place % 4;
    const uint32_t first = low[half][h][pair], second = low[half][h][2 + pair], two = high[half][h][pair];
    const uint32_t four = __byte_perm(first, second, p < 2 ? 0x6240 : 0x7351);
    const uint32_t upper = p == 0 ? two << 4 : p == 1 ? two << 2 : p == 2 ? two : two >> 2;
    return (p % 2 ? four >> 4 : four) & 0x0F0F0F0Fu | upper & 0x30303030u;
  }
  // Levels + 128 of the first or second two places of a pair of columns, a byte each.
  static __device__ __forceinline__ uint32_t levels(uint32_t word, int second) {
    const uint32_t codes = __byte_perm(word, 0, 0x3120);  // those of the first two places in the lower half
    const uint32_t within = masked(codes, 0x77777777u), table = masked_or(codes >> 1, 0x44444444u, 0x32103210u);
    const uint32_t at = second ? within >> 16 : within;
    return __byte_perm(lower_levels(at), upper_levels(at), second ? table >> 16 : table);
  }
  // The same of places p and p + 2, p = place % 2.
  __device__ __forceinline__ uint32_t eight(int h, int pair, int place) const {
    const uint32_t lower = low[place / 4][h][pair], upper = high[place / 4][h][pair];
    return place % 2 ? lower >> 4 & 0x0F0F0F0Fu | upper & 0xF0F0F0F0u : lower & 0x0F0F0F0Fu | upper << 4 & 0xF0F0F0F0u;
  }

  // The scale of a place in row h; with BYTES the byte, by a magic number of the bits of 2^23.
  __device__ __forceinline__ float scale(int h, int place, uint32_t magic) const {
    if constexpr (F::BYTES) {
      constexpr uint32_t SIGNS = F::MINS ? 0 : 0x80808080u;
      const uint32_t word = scales[h][place / 4] ^ SIGNS;
      const uint32_t number = __byte_perm(word, magic, 0x7440 + place % 4);  // 2^23 and the byte
      return __uint_as_float(number) - (F::MINS ? 8388608.f : 8388736.f);
    } else {
      const uint32_t word = scales[h][place / 2];
      return place % 2 ? half_high(word) : half_low(word);
    }
  }
};

// x of a step for up to 8 · N_TILES tokens as B, and what its columns sum up to.
template <class F, int N_TILES>
struct BlockX {
  uint32_t x[K_STEPS][N_TILES][2];
  // The sums of places 2c and 2c + 1 of token q, and of SIX of the eighth behind them, times OFFSET (if any) and 2^64: as
  // two bf16 numbers that add up to them, the large ones first.
  static constexpr int EIGHTS = F::PLACES / 8;
  uint32_t sums[N_TILES][2 * EIGHTS];

  __device__ __forceinline__ void columns(int step, uint32_t (&b)[N_TILES][2]) const {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) b[n][0] = x[step][n][0], b[n][1] = x[step][n][1];
  }
  __device__ __forceinline__ void places(int n, uint32_t (&b)[2 * EIGHTS]) const {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; i++) b[i] = sums[n][i];
  }

  // `from`: the step's first column of token 0. Tokens beyond m are 0.
  __device__ __forceinline__ void read(const __nv_bfloat16* from, int64_t stride, int m, int lane) {
    const int q = lane / 4, c = lane % 4;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const int token = n * 8 + q;
      const __nv_bfloat16* row = from + (token < m ? token : 0) * stride;
#pragma unroll
      for (int place = 0; place < F::PLACES; place++) {
        if constexpr (F::STEPS_OF_PLACE == 2) {
          const uint4 own = *reinterpret_cast<const uint4*>(row + place * 32 + c * 8);
          keep(place * 2, n, token < m, own.x, own.y, F::raised(place));
          keep(place * 2 + 1, n, token < m, own.z, own.w, F::raised(place));
        } else {
          const uint2 own = *reinterpret_cast<const uint2*>(row + place * 16 + c * 4);
          keep(place, n, token < m, own.x, own.y, false);
        }
      }
    }
    sum(q);
  }
  __device__ __forceinline__ void keep(int step, int n, bool there, uint32_t first, uint32_t second, bool raised) {
    x[step][n][0] = there ? times(first, raised) : 0;
    x[step][n][1] = there ? times(second, raised) : 0;
  }
  static __device__ __forceinline__ uint32_t times(uint32_t pair, bool raised) {
    const uint32_t factor = raised ? 0x5D805D80u : 0x5F805F80u;  // 2^60, 2^64
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&factor));
    return *reinterpret_cast<const uint32_t*>(&product);
  }
  // Row `place` of a product whose A is ones in that row has the sums of a place.
  __device__ __forceinline__ void sum(int q) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float found[4] = {};
#pragma unroll
      for (int step = 0; step < K_STEPS; step++) {
        const int place = step / F::STEPS_OF_PLACE;
        const uint32_t ones = q == place % 8 ? (F::raised(place) ? 0x41804180u : 0x3F803F80u) : 0u;  // 16, 1
        const uint32_t a[4] = {place < 8 ? ones : 0, place < 8 ? 0 : ones, place < 8 ? ones : 0, place < 8 ? 0 : ones};
        mma(found, a, x[step][n]);
      }
      constexpr float OFFSET = F::OFFSET > 0 ? F::OFFSET : 1;
#pragma unroll
      for (int i = 0; i < EIGHTS; i++) {
        const float first = found[2 * i] * OFFSET, second = found[2 * i + 1] * OFFSET;
        const uint32_t large = pack_bf16(first, second);
        const uint32_t small = pack_bf16(first - bf16_low(large), second - bf16_high(large));
        sums[n][i] = transpose_matrix(large);
        sums[n][EIGHTS + i] = transpose_matrix(small);
      }
    }
  }
};

// What is taken off each place, or added, times its sum of x: products of their own, as x has no row.
template <class F, int N_TILES, class X>
__device__ __forceinline__ void shift_sums(const BlockUnit<F>& unit, const X& x, float (&total)[N_TILES][4]) {
  constexpr float HALF_UNIT = 9.183549615799121e-41f;  // 2^-133
  uint32_t a[4], b[4] = {};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if constexpr (F::BYTES && F::MINS) {
      a[h] = a[h + 2] = __byte_perm(unit.shifts[h][0], 0, 0x4140);
    } else if constexpr (F::BYTES) {
      // Bytes with signs, 128 above their value first.
      const uint32_t middle = 0x00800080u;
#pragma unroll
      for (int i = 0; i < F::PLACES / 8; i++) {
        const uint32_t raised = __byte_perm(unit.shifts[h][i] ^ 0x8080u, 0, 0x4140);
        const __nv_bfloat162 value =
            __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&raised), *reinterpret_cast<const __nv_bfloat162*>(&middle));
        a[h + 2 * i] = *reinterpret_cast<const uint32_t*>(&value);
        if (F::PLACES == 8) a[h + 2] = a[h];
      }
    } else {
      const float first = half_low(unit.shifts[h][0]), second = half_high(unit.shifts[h][0]);
      a[h] = b[h] = pack_bf16(first, second);
      a[h + 2] = pack_bf16(first - bf16_low(a[h]), second - bf16_high(a[h]));
    }
  }
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    float off[4];
    uint32_t sums[F::PLACES / 4];
    x.places(n, sums);
    if constexpr (F::BYTES && F::PLACES == 8) {
      mma_first(off, a, sums);
    } else if constexpr (F::BYTES) {
      const uint32_t large[2] = {sums[0], sums[1]}, small[2] = {sums[2], sums[3]};
      mma_first(off, a, large);
      mma(off, a, small);
    } else {
      const uint32_t large[2] = {sums[0], sums[0]}, small[2] = {sums[1], 0};
      mma_first(off, a, large);
      mma(off, b, small);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float factor = F::MINS ? HALF_UNIT : -HALF_UNIT;
      if constexpr (F::BYTES) factor = -(F::MINS ? half_high(unit.factor[i / 2]) : half_low(unit.factor[i / 2]));
      total[n][i] = fmaf(factor, off[i], total[n][i]);
    }
  }
}

// Adds a unit's products to `total`: its rows r(q) of tokens 2c and 2c + 1, then rows r(q) + 8, times 2^-69. `magic`: the
// bits of 2^23. `release` is called once all of the unit is in registers: half of it at a time where codes have many bits.
template <class F, int N_TILES, class X, class Release>
__device__ __forceinline__ void multiply_unit(const UnitPlace& from, const X& x, float (&total)[N_TILES][4], int lane,
                                              uint32_t magic, Release release) {
  BlockUnit<F> unit;
  unit.read_scales(from, lane);
  unit.read_codes(from, 0, lane);
  float inner[N_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < F::PLACES; i++) {
    const int place = F::place_at(i);
    if (i == (F::CODES == FOUR || F::CODES == LEVELS ? 0 : F::PLACES / 2)) {
      unit.read_codes(from, 1, lane);
      release();
    }
    float raw[N_TILES][4];
#pragma unroll
    for (int j = 0; j < F::STEPS_OF_PLACE; j++) {
      uint32_t a[4], b[N_TILES][2];
      unit.codes(place, j, a);
      x.columns(place * F::STEPS_OF_PLACE + j, b);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        if (j == 0) {
          mma_first(raw[n], a, b[n]);
        } else {
          mma(raw[n], a, b[n]);
        }
      }
    }
    const float scale[2] = {unit.scale(0, place, magic), unit.scale(1, place, magic)};
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& sum = F::BYTES ? inner[n][i] : total[n][i];
        sum = fmaf(scale[i / 2], raw[n][i], sum);
      }
  }
  if constexpr (F::BYTES) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[n][i] = fmaf(half_low(unit.factor[i / 2]), inner[n][i], total[n][i]);
  }
  shift_sums<F, N_TILES>(unit, x, total);
}

}  // namespace stoker
