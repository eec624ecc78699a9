// y = x · Wᵀ for few tokens and four-bit weights, where the bytes of the weight are the limit.
//
// A CTA has 64 rows of the weight, a cluster shares their columns, and each warp takes every so-many-th block of 64 columns
// for all 64 rows: codes, scales and x go from memory straight to the warp's registers, DEPTH blocks ahead, with no
// barrier until the sums of all warps are added. Weights are requested before the predecessor is done.
#pragma once
#include "int4_fragments.cuh"

template <int TOKENS>
struct Few {
  static constexpr int WARPS = 8, THREADS = WARPS * 32, N_TILES = TOKENS / 8, DEPTH = TOKENS > 8 ? 2 : 3;
  static constexpr int SHARED = WARPS * TOKENS * BLOCK_ROWS * 4;
};

template <int TOKENS>
struct FewBlock {
  uint4 codes[TILES], scale;
  uint2 zero;
  uint4 x[TOKENS / 8][2];
};

template <int TOKENS>
__device__ __forceinline__ void fetch_weights(const Int4Arguments& p, FewBlock<TOKENS>& to, int rows, int block, int lane) {
  const uint4* codes = p.codes + (static_cast<int64_t>(rows) * (p.k / BLOCK_COLUMNS) + block) * (TILES * 32) + lane;
#pragma unroll
  for (int t = 0; t < TILES; t++) to.codes[t] = stream(codes + t * 32);
  int64_t place = static_cast<int64_t>(group_of(p, block, lane % 4)) * p.n + rows * BLOCK_ROWS + lane / 4 * 8;
  to.scale = __ldg(reinterpret_cast<const uint4*>(p.scale + place));
  to.zero = make_uint2(0x08080808u, 0x08080808u);
  if (p.zero != nullptr) to.zero = __ldg(reinterpret_cast<const uint2*>(p.zero + place));
}

template <int TOKENS>
__device__ __forceinline__ void fetch_x(const Int4Arguments& p, FewBlock<TOKENS>& to, int block, int lane) {
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) {
    int token = n * 8 + lane / 4;
    const uint4* x = reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(token) * p.ld_x + block * BLOCK_COLUMNS +
                                                    lane % 4 * 16);
    bool there = token < p.m;
    to.x[n][0] = there ? x[0] : make_uint4(0, 0, 0, 0);
    to.x[n][1] = there ? x[1] : make_uint4(0, 0, 0, 0);
  }
}

template <int TOKENS>
__device__ __forceinline__ void multiply(const FewBlock<TOKENS>& from, float (&sums)[TILES][TOKENS / 8][4]) {
  const uint32_t scales[4] = {from.scale.x, from.scale.y, from.scale.z, from.scale.w};
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    RowScale row;
    spread(scales[t], row.scale);
    uint32_t zeros = (t < 2 ? from.zero.x : from.zero.y) >> (t % 2 * 16);
    row.zero[0] = shifted(zeros & 0xFF);
    row.zero[1] = shifted(zeros >> 8 & 0xFF);
    const uint32_t words[STEPS] = {from.codes[t].x, from.codes[t].y, from.codes[t].z, from.codes[t].w};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      uint32_t a[4];
      unpack(words[s], row, a);
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
        const uint4& x = from.x[n][s / 2];
        mma(sums[t][n], a, s % 2 ? x.z : x.x, s % 2 ? x.w : x.y);
      }
    }
  }
}

template <int TOKENS>
__device__ __forceinline__ void int4_few(const Int4Arguments& p) {
  using C = Few<TOKENS>;
  extern __shared__ __align__(16) float shared[];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rank = blockIdx.x % p.split, rows = blockIdx.x / p.split;
  int blocks = p.k / BLOCK_COLUMNS, step = C::WARPS * p.split, first = rank * C::WARPS + warp;
  FewBlock<TOKENS> ring[C::DEPTH];
  float sums[TILES][C::N_TILES][4] = {};
#pragma unroll
  for (int d = 0; d < C::DEPTH; d++)
    if (first + d * step < blocks) fetch_weights<TOKENS>(p, ring[d], rows, first + d * step, lane);
  dependents_may_launch();
  wait_for_predecessor();
#pragma unroll
  for (int d = 0; d < C::DEPTH; d++)
    if (first + d * step < blocks) fetch_x<TOKENS>(p, ring[d], first + d * step, lane);
  for (int block = first; block < blocks; block += step * C::DEPTH) {
#pragma unroll
    for (int d = 0; d < C::DEPTH; d++) {
      int here = block + d * step, next = here + step * C::DEPTH;
      if (here >= blocks) break;
      multiply<TOKENS>(ring[d], sums);
      if (next < blocks) {
        fetch_weights<TOKENS>(p, ring[d], rows, next, lane);
        fetch_x<TOKENS>(p, ring[d], next, lane);
      }
    }
  }
  // d[0], d[1]: tokens 2c, 2c + 1 of the tile's first row; d[2], d[3] of its second.
  float* mine = shared + warp * TOKENS * BLOCK_ROWS;
#pragma unroll
  for (int n = 0; n < C::N_TILES; n++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      float4* place = reinterpret_cast<float4*>(mine + (n * 8 + lane % 4 * 2 + side) * BLOCK_ROWS + lane / 4 * 8);
      place[0] = make_float4(sums[0][n][side], sums[0][n][side + 2], sums[1][n][side], sums[1][n][side + 2]);
      place[1] = make_float4(sums[2][n][side], sums[2][n][side + 2], sums[3][n][side], sums[3][n][side + 2]);
    }
  reduce_and_store<C::WARPS, TOKENS, BLOCK_ROWS, C::THREADS>(p, shared, rank, rows * BLOCK_ROWS, 0);
}
