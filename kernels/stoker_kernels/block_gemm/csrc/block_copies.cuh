// What the kernels of GGUF's planes are given, how units of 16 rows and a step come to shared memory, and where sums go.
#pragma once
#include "block_units.cuh"

namespace stoker {

struct BlockArguments {
  __nv_bfloat16* out;         // [m, ld_out]
  const __nv_bfloat16* x;     // [m, ld_x]
  const __nv_bfloat16* bias;  // [n] or null
  const unsigned char *low, *high;  // [n, steps, bytes of a row], the second null where there is none
  const unsigned char* scale;   // [steps, words of 8 bytes, n]
  const unsigned char* factor;  // [steps, n] of 4 bytes, or null
  int m, n, steps, ld_x, ld_out;
  int split;  // CTAs of a cluster: each has steps / split steps, rounded up, at most those that it holds x of
  int depth;  // units of a warp's ring, where x is in shared memory
};

constexpr int SLICE_STEPS = 8;

// A lane's share of the copies of a warp's next tile: of each 4 rows of 128 bytes or 8 of 64 one chunk of 16, and one of
// the scales. Its second step, where it has one, is SLICE_STEPS further.
template <class F>
struct UnitSource {
  static constexpr int HIGH_ROW = F::HIGH_BYTES / UNIT_ROWS, HIGH_LANES = HIGH_ROW == 64 ? 4 : 8;
  const unsigned char *low, *high, *rest;
  uint32_t row;  // bytes from a row to the next one, of which `high` has as many, or half
  uint32_t rest_step;

  __device__ __forceinline__ UnitSource(const BlockArguments& p, int tile, int step, int lane) {
    row = p.steps * 128;
    const int64_t first = tile * UNIT_ROWS;
    low = p.low + (first + lane / 8) * row + step * 128 + lane % 8 * 16;
    high = p.high + (first + lane / HIGH_LANES) * (p.steps * HIGH_ROW) + step * HIGH_ROW + lane % HIGH_LANES * 16;
    const int word = lane / 8;
    const bool factors = word >= F::SCALE_WORDS;
    rest_step = p.n * (factors ? 4 : 8 * F::SCALE_WORDS);
    rest = factors ? p.factor + first * 4 : p.scale + static_cast<int64_t>(word) * p.n * 8 + first * 8;
    rest += static_cast<int64_t>(step) * rest_step + lane % 8 * 16;
  }
  __device__ __forceinline__ void next_tile(int lane, int tiles = 1) {
    low += static_cast<int64_t>(tiles * UNIT_ROWS) * row;
    if constexpr (HIGH_ROW > 0) high += static_cast<int64_t>(tiles * UNIT_ROWS / (128 / HIGH_ROW)) * row;
    rest += tiles * UNIT_ROWS * (lane / 8 >= F::SCALE_WORDS ? 4 : 8);
  }
  __device__ __forceinline__ void next_step() { low += 128, high += HIGH_ROW, rest += rest_step; }
  // Rows four further have the other half of the chunks first.
  __device__ __forceinline__ void send(uint32_t unit, int slice, int lane, uint64_t policy) const {
    const uint32_t at = lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    const unsigned char* from = low;
#pragma unroll
    for (int i = 0; i < UNIT_ROWS / 4; i++, from += 4 * row) {
      copy_weight(unit + (at ^ i % 2 * 64) + i * 512, from + slice * SLICE_STEPS * 128, policy);
    }
    if constexpr (HIGH_ROW > 0) {
      const uint32_t above = HIGH_ROW == 64 ? lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16 : at;
      from = high;
#pragma unroll
      for (int i = 0; i < F::HIGH_BYTES / 512; i++, from += 4 * row) {
        const uint32_t place = HIGH_ROW == 64 ? above : above ^ i % 2 * 64;
        copy_weight(unit + F::LOW_BYTES + place + i * 512, from + slice * SLICE_STEPS * HIGH_ROW, policy);
      }
    }
    if (lane * 16 < F::REST_BYTES) {
      copy_weight(unit + F::LOW_BYTES + F::HIGH_BYTES + lane * 16, rest + slice * SLICE_STEPS * rest_step, policy);
    }
  }
};

// A sum → the result.
__device__ __forceinline__ void store_sum(const BlockArguments& p, int token, int column, float sum) {
  if (token >= p.m) return;
  float value = sum * SUM_UNIT;
  if (p.bias != nullptr) value += __bfloat162float(p.bias[column]);
  const uint32_t rounded = pack_bf16(value, 0.f);
  uint16_t* out = reinterpret_cast<uint16_t*>(p.out) + static_cast<int64_t>(token) * p.ld_out + column;
  *out = static_cast<uint16_t>(rounded);
}

}  // namespace stoker
