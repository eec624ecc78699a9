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

// A lane's share of the copies of a warp's next tile: of each 4 rows of 128 bytes, 8 of 64 or 16 of 32 one chunk of 16, and
// one of the scales. Its second step, where it has one, is SLICE_STEPS further.
template <class F>
struct UnitSource {
  static constexpr int HIGH_ROW = F::HIGH_BYTES / UNIT_ROWS, HIGH_LANES = HIGH_ROW > 0 ? HIGH_ROW / 16 : 8;
  const unsigned char *low, *high, *rest;
  uint32_t row;  // bytes from a row to the next one, of which `high` has as many, or half or a quarter
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
      const uint32_t halved = HIGH_ROW == 64 ? lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16 : lane * 16;
      const uint32_t above = HIGH_ROW == 128 ? at : halved;
      from = high;
#pragma unroll
      for (int i = 0; i < F::HIGH_BYTES / 512; i++, from += 4 * row) {
        const uint32_t place = HIGH_ROW == 128 ? above ^ i % 2 * 64 : above;
        copy_weight(unit + F::LOW_BYTES + place + i * 512, from + slice * SLICE_STEPS * HIGH_ROW, policy);
      }
    }
    if (lane * 16 < F::REST_BYTES) {
      copy_weight(unit + F::LOW_BYTES + F::HIGH_BYTES + lane * 16, rest + slice * SLICE_STEPS * rest_step, policy);
    }
  }
};

__device__ __forceinline__ void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// Sums of four columns from `column` → the result.
__device__ __forceinline__ void store_sums(const BlockArguments& p, int token, int column, const float4& sum) {
  if (token >= p.m) return;
  float4 bias = make_float4(0.f, 0.f, 0.f, 0.f);
  if (p.bias != nullptr) {
    const __nv_bfloat16* own = p.bias + column;
    bias = make_float4(__bfloat162float(own[0]), __bfloat162float(own[1]), __bfloat162float(own[2]),
                       __bfloat162float(own[3]));
  }
  const uint2 rounded = make_uint2(pack_bf16(fmaf(sum.x, SUM_UNIT, bias.x), fmaf(sum.y, SUM_UNIT, bias.y)),
                                   pack_bf16(fmaf(sum.z, SUM_UNIT, bias.z), fmaf(sum.w, SUM_UNIT, bias.w)));
  *reinterpret_cast<uint2*>(p.out + static_cast<int64_t>(token) * p.ld_out + column) = rounded;
}

// What a cluster's CTAs found of results [tiles][tokens][16], at `found` in each, → the result, a share by each CTA of
// THREADS threads. Every thread of the cluster comes.
template <int TOKENS, int THREADS>
__device__ __forceinline__ void store_shares(const BlockArguments& p, const float* found, int rank, int first, int tiles) {
  constexpr int FOURS = TOKENS * UNIT_ROWS / 4;
  cluster_sync();
#pragma unroll 1
  for (int at = threadIdx.x + rank * THREADS; at < tiles * FOURS; at += THREADS * p.split) {
    const float4* four = reinterpret_cast<const float4*>(found) + at;
    float4 sum = read_peer(four, 0);
#pragma unroll 1
    for (int peer = 1; peer < p.split; peer++) add(sum, read_peer(four, peer));
    const int of_tile = at % FOURS;
    store_sums(p, of_tile / (UNIT_ROWS / 4), (first + at / FOURS) * UNIT_ROWS + of_tile % (UNIT_ROWS / 4) * 4, sum);
  }
  // Nobody leaves, or goes on, while its sums are read.
  cluster_arrive();
  cluster_wait();
}

}  // namespace stoker
