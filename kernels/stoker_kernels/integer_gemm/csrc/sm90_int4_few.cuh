// y = x · Wᵀ for few tokens and four-bit weights, where the bytes of the weight are the limit.
//
// A CTA has 64 rows of the weight, a cluster shares their columns, and each warp takes every so-many-th block of 64 columns
// for all 64 rows: codes, scales and x go from memory straight to the warp's registers, DEPTH blocks ahead, with no
// barrier until the sums of all warps are added. Weights are requested before the predecessor is done.
//
// With up to 8 tokens and groups of a block or more, codes are multiplied as 128 + code and the block's sums become those
// of (code - zero) · scale afterwards, by the sum of x, which a tile of ones gives: two instructions a pair of codes. More
// tokens would take too many registers; groups smaller than a block (SMALL) change within one.
#pragma once
#include "int4_fragments.cuh"

namespace stoker {

template <int TOKENS, bool SMALL>
struct Few {
  static constexpr int WARPS = 8, THREADS = WARPS * 32, N_TILES = TOKENS / 8, DEPTH = SMALL ? 1 : 2;
};

template <int TOKENS, bool SMALL>
struct FewBlock {
  static constexpr int GROUPS = SMALL ? STEPS : 1;
  uint4 codes[TILES], scale[GROUPS];
  uint2 zero[GROUPS];
  uint32_t x[TOKENS / 8][STEPS][2];

  __device__ __forceinline__ void fetch_weights(const Int4Arguments& p, int rows, int block, int lane) {
    const uint4* from = p.codes + (static_cast<int64_t>(rows) * (p.k / BLOCK_COLUMNS) + block) * (TILES * 32) + lane;
#pragma unroll
    for (int t = 0; t < TILES; t++) codes[t] = stream(from + t * 32);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int64_t place = static_cast<int64_t>(group_of(p, block, g)) * p.n + rows * BLOCK_ROWS + lane / 4 * 8;
      scale[g] = __ldg(reinterpret_cast<const uint4*>(p.scale + place));
      zero[g] = make_uint2(0x08080808u, 0x08080808u);
      if (p.zero != nullptr) zero[g] = __ldg(reinterpret_cast<const uint2*>(p.zero + place));
    }
  }
  __device__ __forceinline__ void fetch_x(const Int4Arguments& p, int block, int lane) {
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
      int token = n * 8 + lane / 4;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(p.x + static_cast<int64_t>(token) * p.ld_x +
                                                               block * BLOCK_COLUMNS) + lane % 4;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        x[n][s][0] = token < p.m ? from[s * 8] : 0;
        x[n][s][1] = token < p.m ? from[s * 8 + 4] : 0;
      }
    }
  }
  // The scales of the rows of tile t, and their zero points.
  __device__ __forceinline__ uint32_t scales_of(int g, int t) const { return word_of(scale[g], t); }
  __device__ __forceinline__ uint32_t zeros_of(int g, int t) const {
    return (t < 2 ? zero[g].x : zero[g].y) >> (t % 2 * 16);
  }
};

// Every code scaled.
template <int TOKENS, bool SMALL>
__device__ __forceinline__ void multiply(const FewBlock<TOKENS, SMALL>& from, float (&sums)[TILES][TOKENS / 8][4]) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int g = SMALL ? s : 0;
      uint32_t a[4];
      unpack(word_of(from.codes[t], s), RowScale(from.scales_of(g, t), from.zeros_of(g, t)), a);
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) mma(sums[t][n], a, from.x[n][s]);
    }
}

// The block's sums scaled: a block lies in one group.
__device__ __forceinline__ void multiply(const FewBlock<8, false>& from, float (&sums)[TILES][1][4]) {
  constexpr uint32_t ONES = 0x3F803F80u;
  const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
  float raw[TILES][4] = {}, of_x[4] = {};
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    mma(of_x, ones, from.x[0][s]);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      uint32_t word = word_of(from.codes[t], s);
      const uint32_t a[4] = {raised(word, 0), raised(word, 1), raised(word, 2), raised(word, 3)};
      mma(raw[t], a, from.x[0][s]);
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint32_t scales = from.scales_of(0, t), zeros = from.zeros_of(0, t);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float scale = __uint_as_float(h ? scales & 0xFFFF0000u : scales << 16);
      float shift = -static_cast<float>(128 + (zeros >> (8 * h) & 0xFF));
#pragma unroll
      for (int side = 0; side < 2; side++) {
        float& sum = sums[t][0][2 * h + side];
        sum = fmaf(scale, fmaf(shift, of_x[side], raw[t][2 * h + side]), sum);
      }
    }
  }
}

template <int TOKENS, bool SMALL>
__device__ __forceinline__ void int4_few(const Int4Arguments& p) {
  using C = Few<TOKENS, SMALL>;
  extern __shared__ unsigned char raw[];
  float* shared = reinterpret_cast<float*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rank = blockIdx.x % p.split, rows = blockIdx.x / p.split;
  int blocks = p.k / BLOCK_COLUMNS, step = C::WARPS * p.split, first = rank * C::WARPS + warp;
  FewBlock<TOKENS, SMALL> ring[C::DEPTH];
  float sums[TILES][C::N_TILES][4] = {};
#pragma unroll
  for (int d = 0; d < C::DEPTH; d++)
    if (first + d * step < blocks) ring[d].fetch_weights(p, rows, first + d * step, lane);
  launch_dependents();
  grid_dependency_wait();
#pragma unroll
  for (int d = 0; d < C::DEPTH; d++)
    if (first + d * step < blocks) ring[d].fetch_x(p, first + d * step, lane);
  for (int block = first; block < blocks; block += step * C::DEPTH) {
#pragma unroll
    for (int d = 0; d < C::DEPTH; d++) {
      int here = block + d * step, next = here + step * C::DEPTH;
      if (here >= blocks) break;
      multiply(ring[d], sums);
      if (next < blocks) {
        ring[d].fetch_weights(p, rows, next, lane);
        ring[d].fetch_x(p, next, lane);
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

}  // namespace stoker
