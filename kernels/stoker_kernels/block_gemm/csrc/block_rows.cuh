// Rows of GGUF's planes as bf16 [rows, K], each weight as its format defines it, rounded once.
//
// A lane has 16 bytes of the lower plane: 8 columns of each of the four places, or eight, whose codes share them. Each
// place leaves in one store of 16 bytes. Planes are requested before the kernel before is done, and a step ahead.
// `quant/block_planes.py` describes planes, and plane_numbers.cuh makes weights of them.
#pragma once
#include "plane_numbers.cuh"

namespace stoker {

struct RowsArguments {
  __nv_bfloat16* out;                // [count, columns]
  const unsigned char *low, *high;   // [n, bytes of a row], the second null where there is none
  const unsigned char* scale;        // [steps, words of 8 bytes, n], then those of tails
  const unsigned char* factor;       // [steps, n] of 4 bytes, or null
  int n, first, count, columns;      // rows of the piece, those to decode
  int parts, part_steps;             // of a row: a CTA has so many steps of it, all tails together being one
};

constexpr int ROWS_THREADS = 256;

template <class F>
struct RowsShape {
  static constexpr int LANES = STEP_COLUMNS / (8 * F::EACH), ROWS = ROWS_THREADS / LANES;  // of a row, of a CTA
  static_assert(F::BYTES || LANES == 8, "tails have as many lanes");
};

// What a lane reads of a row: `low` and `high` as pairs of columns, places from the lowest bits on.
template <class F>
struct RowsUnit {
  uint32_t low[4], high[4];
  PlaneScales<F> own;  // of the lane's places

  template <bool TAIL>
  __device__ __forceinline__ void read(const RowsArguments& p, int row, int step, int lane, uint64_t policy) {
    constexpr int CHUNKS = (TAIL ? TAIL_COLUMNS / 4 : F::WORDS) / 8;  // of 8 columns of a place
    const int steps = p.columns / STEP_COLUMNS, tails = (p.columns % STEP_COLUMNS + TAIL_COLUMNS - 1) / TAIL_COLUMNS;
    const int group = lane / CHUNKS, chunk = lane % CHUNKS;
    if (TAIL && group >= tails) return;
    const int64_t low_row = steps * F::LOW_STEP + (F::BYTES ? 0 : tails * 32);
    const uint4 codes = load_weight_16(p.low + row * low_row + step * F::LOW_STEP + lane * 16, policy);
    low[0] = codes.x, low[1] = codes.y, low[2] = codes.z, low[3] = codes.w;
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
      own.scales = F::EACH == 8 ? load_8(from) : make_uint2(load_4(from), 0);
      if constexpr (F::MINS && !F::NIBBLES) own.lows.x = load_4(from + F::SCALE_WORDS / 2 * n * 8);
      own.factor = load_4(p.factor + (step * n + row) * 4);
    } else {
      const int word = group * (TAIL ? F::TAIL_WORDS : 1);
      const unsigned char* from = p.scale + ((step * F::SCALE_WORDS + word) * n + row) * 8;
      own.scales = load_8(from);
      if constexpr (F::MINS) own.lows = load_8(from + (TAIL ? 1 : F::SCALE_WORDS / 2) * n * 8);
    }
  }

  template <bool TAIL>
  __device__ __forceinline__ void write(const RowsArguments& p, int row, int step, int lane, uint32_t magic) const {
    constexpr int WORDS = TAIL ? TAIL_COLUMNS / 4 : F::WORDS, CHUNKS = WORDS / 8;
    const int group = lane / CHUNKS;
    int column = step * STEP_COLUMNS + group * F::EACH * WORDS + lane % CHUNKS * 8;
    __nv_bfloat16* to = p.out + static_cast<int64_t>(row) * p.columns + column;
#pragma unroll
    for (int i = 0; i < F::EACH; i++, column += WORDS, to += WORDS) {
      if (TAIL && column >= p.columns) return;
      const auto place = PlanePlace<F>::of(own, i, magic);
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; j++) pairs[j] = place.pair(low[j], high[j], i, magic);
      *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

template <class F>
__device__ __forceinline__ void block_rows(const RowsArguments& p) {
  const int part = blockIdx.x % p.parts, lane = threadIdx.x % RowsShape<F>::LANES;
  const int row = blockIdx.x / p.parts * RowsShape<F>::ROWS + threadIdx.x / RowsShape<F>::LANES;
  const bool there = row < p.count;
  const int from = p.first + (there ? row : 0), steps = p.columns / STEP_COLUMNS;
  const int begin = part * p.part_steps, end = min(begin + p.part_steps, steps);
  const bool tailed = !F::BYTES && p.columns % STEP_COLUMNS != 0 && begin <= steps && steps < begin + p.part_steps;
  const uint64_t policy = policy_evict_first();
  const uint32_t magic = p.n > 0 ? PLANE_MAGIC : 0u;
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
