// Rows of GGUF's planes as bf16 [rows, K], each weight as its format defines it, rounded once.
//
// A lane has 16 bytes of the lower plane: 8 columns of each of the four places, or eight, whose codes share them. Codes
// become mantissas of fp32 numbers at 2^23, where they lie or at the lowest bits; a subtraction brings out the integer
// times a power of two, and a product, or an fma where something is taken off, the weight: exact but for what the fma
// rounds, as in the definition. Each place leaves in one store of 16 bytes. Planes are requested before the kernel before
// is done, and a step ahead. `quant/block_planes.py` describes planes.
#pragma once
#include "block_ptx.cuh"

namespace stoker {

struct RowsArguments {
  __nv_bfloat16* out;                // [count, columns]
  const unsigned char *low, *high;   // [n, bytes of a row], the second null where there is none
  const unsigned char* scale;        // [steps, words of 8 bytes, n], then those of tails
  const unsigned char* factor;       // [steps, n] of 4 bytes, or null
  int n, first, count, columns;      // rows of the piece, those to decode
  int parts, part_steps;             // of a row: a CTA has so many steps of it, all tails together being one
};

constexpr int ROWS_THREADS = 256, STEP_COLUMNS = 256, TAIL_COLUMNS = 64;
constexpr uint32_t ROWS_MAGIC = 0x4B000000u;  // 2^23

// As PlaneKind of quant/block_planes.py.
template <int LOW_, int HIGH_, int WORDS_, int OFFSET_, bool BYTES_, bool MINS_ = false, bool NIBBLES_ = false,
          bool LEVELS_ = false>
struct RowsFormat {
  static constexpr int LOW = LOW_, HIGH = HIGH_, WORDS = WORDS_, OFFSET = OFFSET_;
  static constexpr bool BYTES = BYTES_, MINS = MINS_, NIBBLES = NIBBLES_, LEVELS = LEVELS_;
  static constexpr int PLACES = STEP_COLUMNS / WORDS, EACH = 16 / LOW;     // places of a step, and of a lane
  static constexpr int HIGH_BITS = PLACES * HIGH < 16 ? PLACES * HIGH : 16;  // of an element of the plane `high`
  static constexpr int HIGH_EACH = HIGH > 0 ? HIGH_BITS / (HIGH > 0 ? HIGH : 1) : EACH;
  static constexpr int SCALE_WORDS = PLACES / (BYTES ? 8 : 4) * (MINS && !NIBBLES ? 2 : 1), TAIL_WORDS = MINS ? 2 : 1;
  static constexpr int LANES = STEP_COLUMNS / (8 * EACH), ROWS = ROWS_THREADS / LANES;  // of a row, of a CTA
  static constexpr int LOW_STEP = 32 * LOW, HIGH_STEP = 32 * HIGH;                      // bytes of a row's step
  static_assert(HIGH_EACH % EACH == 0 && (BYTES || LANES == 8), "a lane's places lie in one element");
};

// What a lane reads of a row: `low` and `high` as pairs of columns, places from the lowest bits on.
template <class F>
struct RowsUnit {
  uint32_t low[4], high[4];
  uint2 scales, lows;  // of the lane's places: bytes, or fp16 numbers
  uint32_t factor;

  template <bool TAIL>
  __device__ __forceinline__ void read(const RowsArguments& p, int row, int step, int lane, uint64_t policy) {
    constexpr int CHUNKS = (TAIL ? TAIL_COLUMNS / 4 : F::WORDS) / 8;  // of 8 columns of a place
    const int steps = p.columns / STEP_COLUMNS, tails = (p.columns % STEP_COLUMNS + TAIL_COLUMNS - 1) / TAIL_COLUMNS;
    const int group = lane / CHUNKS, chunk = lane % CHUNKS;
    if (TAIL && group >= tails) return;
    const int64_t low_row = steps * F::LOW_STEP + (F::BYTES ? 0 : tails * 32);
    const uint4 own = load_weight_16(p.low + row * low_row + step * F::LOW_STEP + lane * 16, policy);
    low[0] = own.x, low[1] = own.y, low[2] = own.z, low[3] = own.w;
    if constexpr (F::HIGH > 0) {
      const int64_t high_row = steps * F::HIGH_STEP + (F::BYTES ? 0 : tails * 2 * F::HIGH_BITS);
      const int place = TAIL ? 0 : group * F::EACH;
      const int at = TAIL ? lane : place / F::HIGH_EACH * CHUNKS + chunk;
      const unsigned char* from = p.high + row * high_row + step * F::HIGH_STEP + at * F::HIGH_BITS;
      const int shift = place % F::HIGH_EACH * F::HIGH;
      if constexpr (F::HIGH_BITS == 16) {
        const uint4 above = load_weight_16(from, policy);
        high[0] = above.x >> shift, high[1] = above.y >> shift, high[2] = above.z >> shift, high[3] = above.w >> shift;
      } else {
        const uint2 above = load_weight_8(from, policy);
        high[0] = __byte_perm(above.x, 0, 0x4140) >> shift, high[1] = __byte_perm(above.x, 0, 0x4342) >> shift;
        high[2] = __byte_perm(above.y, 0, 0x4140) >> shift, high[3] = __byte_perm(above.y, 0, 0x4342) >> shift;
      }
    }
    const int64_t n = p.n;
    if constexpr (F::BYTES) {
      // Eight scales a word; a lane has four of them, or eight.
      constexpr int LANES_OF_WORD = 8 / F::EACH;
      const int word = group / LANES_OF_WORD, part = group % LANES_OF_WORD * F::EACH;
      const unsigned char* from = p.scale + ((step * F::SCALE_WORDS + word) * n + row) * 8 + part;
      scales = F::EACH == 8 ? load_8(from) : make_uint2(load_4(from), 0);
      if constexpr (F::MINS && !F::NIBBLES) lows.x = load_4(from + F::SCALE_WORDS / 2 * n * 8);
      factor = load_4(p.factor + (step * n + row) * 4);
    } else {
      const int word = group * (TAIL ? F::TAIL_WORDS : 1);
      const unsigned char* from = p.scale + ((step * F::SCALE_WORDS + word) * n + row) * 8;
      scales = load_8(from);
      if constexpr (F::MINS) lows = load_8(from + (TAIL ? 1 : F::SCALE_WORDS / 2) * n * 8);
    }
  }

  // Byte `i` of eight as an integer, of one with a sign where `SIGNED`.
  template <bool SIGNED>
  static __device__ __forceinline__ float byte_of(const uint2& words, int i) {
    const uint32_t word = (i < 4 ? words.x : words.y) ^ (SIGNED ? 0x80808080u : 0u);
    return __uint_as_float(__byte_perm(word, ROWS_MAGIC, 0x7650 | i % 4)) - (SIGNED ? 8388736.f : 8388608.f);
  }
  // Of place `i` of the lane: its scale, and what is added to the products.
  __device__ __forceinline__ void scale_of(int i, float& scale, float& add) const {
    add = 0.f;
    if constexpr (F::NIBBLES) {
      const uint32_t mask = 0x0F0F0F0Fu;
      scale = half_low(factor) * byte_of<false>(make_uint2(scales.x & mask, scales.y & mask), i);
      add = -(half_high(factor) * byte_of<false>(make_uint2(scales.x >> 4 & mask, scales.y >> 4 & mask), i));
    } else if constexpr (F::BYTES) {
      scale = half_low(factor) * byte_of<!F::MINS>(scales, i);
      if constexpr (F::MINS) add = -(half_high(factor) * byte_of<false>(lows, i));
    } else {
      const uint32_t word = i < 2 ? scales.x : scales.y, other = i < 2 ? lows.x : lows.y;
      scale = i % 2 ? half_high(word) : half_low(word);
      if constexpr (F::MINS) add = i % 2 ? half_high(other) : half_low(other);
    }
  }

  // IQ4's levels + 128 of a column's four places, a byte each: `codes` in the lower half.
  static __device__ __forceinline__ uint32_t levels_of(uint32_t codes) {
    const uint32_t at = codes & 0x7777u;
    const uint32_t first = __byte_perm(0x3F2D1801u, 0x766A5D4Fu, at), second = __byte_perm(0xA6998D81u, 0xF1D9C5B5u, at);
    return __byte_perm(first, second, 0x3210u | (codes & 0x8888u) >> 1);
  }

  template <bool TAIL>
  __device__ __forceinline__ void write(const RowsArguments& p, int row, int step, int lane, uint32_t magic) const {
    constexpr int WORDS = TAIL ? TAIL_COLUMNS / 4 : F::WORDS, CHUNKS = WORDS / 8;
    const int group = lane / CHUNKS;
    int column = step * STEP_COLUMNS + group * F::EACH * WORDS + lane % CHUNKS * 8;
    __nv_bfloat16* to = p.out + static_cast<int64_t>(row) * p.columns + column;
    uint32_t levels[4][2];
    if constexpr (F::LEVELS) {
#pragma unroll
      for (int j = 0; j < 4; j++) levels[j][0] = levels_of(low[j]), levels[j][1] = levels_of(low[j] >> 16);
    }
#pragma unroll
    for (int i = 0; i < F::EACH; i++, column += WORDS, to += WORDS) {
      if (TAIL && column >= p.columns) return;
      constexpr bool APART = F::HIGH == 0 && !F::LEVELS;  // codes stay where they lie
      const int at = APART ? F::LOW * i : 0;
      float scale, add;
      scale_of(i, scale, add);
      if (at > 0) scale *= 1.f / (1 << at);
      const float base = 8388608.f + (F::LEVELS ? 128.f : static_cast<float>(F::OFFSET << at));
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t number[2];
        if constexpr (F::LEVELS) {
          number[0] = __byte_perm(levels[j][0], ROWS_MAGIC, 0x7650 | i);
          number[1] = __byte_perm(levels[j][1], ROWS_MAGIC, 0x7650 | i);
        } else if constexpr (APART) {
          const uint32_t mask = (1u << F::LOW) - 1 << F::LOW * i;
          number[0] = low[j] & mask | magic, number[1] = low[j] >> 16 & mask | magic;
        } else {
          // What a shift brings from the other half falls outside of the mask.
          constexpr uint32_t ONES = (1u << F::LOW) - 1, ABOVE = ((1u << F::HIGH) - 1) << F::LOW;
          const int up = F::LOW - F::HIGH * i;
          const uint32_t above = up >= 0 ? high[j] << (up >= 0 ? up : 0) : high[j] >> (up >= 0 ? 0 : -up);
          const uint32_t codes = low[j] >> F::LOW * i & ONES * 0x10001u | above & ABOVE * 0x10001u;
          number[0] = __byte_perm(codes, ROWS_MAGIC, 0x7610), number[1] = __byte_perm(codes, ROWS_MAGIC, 0x7632);
        }
        float weight[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float code = __uint_as_float(number[h]) - base;
          weight[h] = F::MINS ? fmaf(code, scale, add) : code * scale;
        }
        pairs[j] = pack_bf16(weight[0], weight[1]);
      }
      *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

template <class F>
__device__ __forceinline__ void block_rows(const RowsArguments& p) {
  const int part = blockIdx.x % p.parts, lane = threadIdx.x % F::LANES;
  const int row = blockIdx.x / p.parts * F::ROWS + threadIdx.x / F::LANES;
  const bool there = row < p.count;
  const int from = p.first + (there ? row : 0), steps = p.columns / STEP_COLUMNS;
  const int begin = part * p.part_steps, end = min(begin + p.part_steps, steps);
  const bool tailed = !F::BYTES && p.columns % STEP_COLUMNS != 0 && begin <= steps && steps < begin + p.part_steps;
  const uint64_t policy = policy_evict_first();
  // In a register, as the compiler cannot know it: an instruction has one constant.
  const uint32_t magic = p.n > 0 ? ROWS_MAGIC : 0u;
  RowsUnit<F> unit, next;
  if (begin < end) unit.template read<false>(p, from, begin, lane, policy);
  launch_dependents();
  grid_dependency_wait();
#pragma unroll 1
  for (int step = begin; step < end; step++) {
    if (step + 1 < end) next.template read<false>(p, from, step + 1, lane, policy);
    if (there) unit.template write<false>(p, row, step, lane, magic);
    unit = next;
  }
  if constexpr (!F::BYTES) {
    if (tailed) {
      unit.template read<true>(p, from, steps, lane, policy);
      if (there) unit.template write<true>(p, row, steps, lane, magic);
    }
  }
}

}  // namespace stoker
