// What happens to a tile's accumulators: scales and bias are applied in fp32, then the tile is rounded once and stored,
// transposed, as out[token, row].
//
// A group is 128 threads (4 warps) with 64 rows of the weight; warp w holds rows [16w, 16w+16) × MT tokens in the
// fragment layout of wgmma.m64nN: acc[4j + 2h + e] is row 8h + lane/4, token 8j + 2(lane%4) + e.
#pragma once
#include "ptx.cuh"
#include "silu.cuh"

namespace stoker {

constexpr int GROUP_THREADS = 128;
constexpr int GROUP_ROWS = 64;
constexpr int STAGING_PITCH = GROUP_ROWS * 2 + 16;  // bytes per token; +16 keeps stmatrix free of bank conflicts

struct GemmArguments {
  __nv_bfloat16* out;         // [m, n], rows ld_out apart
  const __nv_bfloat16* bias;  // [n] or null
  const float* w_scale;       // [n] at steps of w_scale_step (0: one scale for all), or null
  const float* x_scale;       // [m] or null
  int m, n, ld_out, w_scale_step;
  int tiles, k_blocks, stages;
  int share;  // CTAs that share x by multicast; only sm90_gemm_multicast
  int apart;  // whether a gated result's bits may not depend on the token beside it
};

// Scales and biases of the two rows of a group that a thread holds.
struct RowScales {
  float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f};

  __device__ RowScales(const GemmArguments& g, int first) {
    const int t = threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + t / 32 * 16 + t % 32 / 4 + 8 * h;
      if (row < g.n && g.w_scale) scale[h] = g.w_scale[row * g.w_scale_step];
      if (row < g.n && g.bias) bias[h] = __bfloat162float(g.bias[row]);
    }
  }
};

// What becomes of sums: they are multiplied by scales, then a bias is added. Four of a thread are read together. Sums of
// integers are exact, and each step is rounded, in the order of int8_gemm/reference.py: so every tile gives the same bits.
template <typename S>
struct Scaled;
template <>
struct Scaled<float> {
  using Four = float4;
  static constexpr bool EXACT = false;
  static __device__ __forceinline__ float with_bias(float sum, float x, float w, float bias) {
    return fmaf(sum * x, w, bias);
  }
};
template <>
struct Scaled<int32_t> {
  using Four = int4;
  static constexpr bool EXACT = true;
  static __device__ __forceinline__ float with_bias(int32_t sum, float x, float w, float bias) {
    return __fadd_rn(__fmul_rn(__fmul_rn(__int2float_rn(sum), x), w), bias);
  }
};

// Scales, rounds and transposes a thread's sums of the block of tokens [8j, 8j + 8) into `staging`, [MT][STAGING_PITCH]
// bytes of its group.
template <typename S>
__device__ __forceinline__ void stage_block(const GemmArguments& g, const RowScales& rows, int j, const S (&sums)[4],
                                            unsigned char* staging) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x % GROUP_THREADS / 32 * 16, token = 8 * j + 2 * (lane % 4);
  float x_scale[2] = {1.f, 1.f};
  if (g.x_scale) {
    x_scale[0] = token < g.m ? g.x_scale[token] : 0.f;
    x_scale[1] = token + 1 < g.m ? g.x_scale[token + 1] : 0.f;
  }
  uint32_t packed[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    packed[h] = pack_bf16(Scaled<S>::with_bias(sums[2 * h], x_scale[0], rows.scale[h], rows.bias[h]),
                          Scaled<S>::with_bias(sums[2 * h + 1], x_scale[1], rows.scale[h], rows.bias[h]));
  }
  const int to = (8 * j + lane % 8) * STAGING_PITCH + (warp_row + (lane / 8 % 2) * 8) * 2;
  stmatrix_x2_trans(shared_address(staging + to), packed[0], packed[1]);
}

// Stores the blocks first, first + step, … of `staging`, 16 bytes a thread. `row`: the group's first.
template <int MT>
__device__ __forceinline__ void store_blocks(const GemmArguments& g, int row, const unsigned char* staging, int first,
                                             int step) {
  const int t = threadIdx.x % GROUP_THREADS, column = row + (t % 8) * 8;
#pragma unroll
  for (int j = first + t / 64 * step; j < MT / 8; j += 2 * step) {
    const int token = 8 * j + t % 64 / 8;
    if (token < g.m && column < g.n) {
      *reinterpret_cast<uint4*>(g.out + static_cast<int64_t>(token) * g.ld_out + column) =
          *reinterpret_cast<const uint4*>(staging + token * STAGING_PITCH + (t % 8) * 16);
    }
  }
}

// Scales and stores a group's tile through `staging`: of its blocks of 8 tokens those with block % step == first.
template <int MT, typename S>
__device__ __forceinline__ void store_tile(const GemmArguments& g, int row, int group, S (&acc)[MT / 2],
                                           unsigned char* staging, int first = 0, int step = 1) {
  const RowScales rows(g, row);
  named_barrier(1 + group, GROUP_THREADS);  // the previous tile has left the staging area
#pragma unroll
  for (int j = 0; j < MT / 8; ++j) {
    if (j % step != first) continue;
    const S sums[4] = {acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]};
    stage_block(g, rows, j, sums, staging);
  }
  named_barrier(1 + group, GROUP_THREADS);
  store_blocks<MT>(g, row, staging, first, step);
}

// store_tile for rows that alternate by eights between gate and up: stores silu(gate) · up, rounded once; no scales, no
// bias. `column`: the group's first of its 32 result columns; g.n: columns of the result.
template <int MT>
__device__ __forceinline__ void store_gated_tile(const GemmArguments& g, int column, int group, float (&acc)[MT / 2],
                                                 unsigned char* staging, int first = 0, int step = 1) {
  const int t = threadIdx.x % GROUP_THREADS, lane = t % 32, mine = (t / 32) * 8 + lane / 4;
  named_barrier(1 + group, GROUP_THREADS);  // the previous tile has left the staging area
#pragma unroll
  for (int j = 0; j < MT / 8; ++j) {
    if (j % step != first) continue;
    const uint32_t packed = g.apart ? silu_times_apart(acc + 4 * j, acc + 4 * j + 2)
                                    : silu_times(acc + 4 * j, acc + 4 * j + 2);
    unsigned char* to = staging + (8 * j + 2 * (lane % 4)) * STAGING_PITCH + mine * 2;
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(packed);
    *reinterpret_cast<uint16_t*>(to + STAGING_PITCH) = static_cast<uint16_t>(packed >> 16);
  }
  named_barrier(1 + group, GROUP_THREADS);
#pragma unroll
  for (int i = t; i < MT * 4; i += GROUP_THREADS) {
    const int token = i / 4, at = column + (i % 4) * 8;
    if (token < g.m && at < g.n && token / 8 % step == first) {
      *reinterpret_cast<uint4*>(g.out + static_cast<int64_t>(token) * g.ld_out + at) =
          *reinterpret_cast<const uint4*>(staging + token * STAGING_PITCH + (i % 4) * 16);
    }
  }
}

}  // namespace stoker
