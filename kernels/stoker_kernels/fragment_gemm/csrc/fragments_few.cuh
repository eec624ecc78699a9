// y = x · Wᵀ for few tokens and weights in fragments, where the bytes of the weight are the limit.
//
// A CTA has 64 rows of the weight, a cluster shares their columns, and each warp takes every so-many-th piece of columns
// for all 64 rows: codes, scales and x go from memory straight to the warp's registers, DEPTH pieces ahead, with no
// barrier until the sums of all warps are added. Weights are requested before the predecessor is done.
//
// Of four bits in groups of a block or more, codes are multiplied as 128 + code and the block's sums become those of
// (code - zero) · scale afterwards, by the sum of x, which a tile of ones gives: two instructions a pair of codes. Smaller
// groups change within a block, eight bits have no room beside 128 and take as many bytes of memory again, and floats of
// four are no integers.
#pragma once
#include "integer_numbers.cuh"

namespace stoker {

template <class N, int TOKENS>
struct Few {
  static constexpr int PIECE_STEPS = STEPS / N::PIECES, PIECE_COLUMNS = BLOCK_COLUMNS / N::PIECES;
  static constexpr int SETS = N::SETS < N::PIECES ? 1 : N::SETS / N::PIECES;  // of a piece
  static constexpr int WARPS = 8, THREADS = WARPS * 32, N_TILES = TOKENS / 8;
  // What a thread's registers hold: scales of integers take twice as many as those of floats.
  static constexpr int DEPTH = N::PIECES == 2 && SETS == 1 ? 3 : SETS * N::SCALE_BYTES > 4 ? 1 : 2;
};

template <class N, int TOKENS>
struct FewPiece {
  using C = Few<N, TOKENS>;
  uint4 codes[TILES];
  EightScales<N> scales[C::SETS];
  uint32_t x[TOKENS / 8][C::PIECE_STEPS][2];

  __device__ __forceinline__ void fetch_weights(const FragmentArguments& p, int rows, int piece, int lane) {
    const int64_t pieces = p.k / C::PIECE_COLUMNS;
    const uint4* from = p.codes + (rows * pieces + piece) * (TILES * 32) + lane;
#pragma unroll
    for (int t = 0; t < TILES; t++) codes[t] = stream(from + t * 32);
#pragma unroll
    for (int g = 0; g < C::SETS; g++) {
      const int step = piece * C::PIECE_STEPS + g * (C::PIECE_STEPS / C::SETS);
      scales[g].fetch(p, group_at(p, step) + rows * BLOCK_ROWS + lane / 4 * 8);
    }
  }
  __device__ __forceinline__ void fetch_x(const FragmentArguments& p, int piece, int lane) {
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
      int token = n * 8 + lane / 4;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(p.x + static_cast<int64_t>(token) * p.ld_x +
                                                               piece * C::PIECE_COLUMNS) + lane % 4;
#pragma unroll
      for (int s = 0; s < C::PIECE_STEPS; s++) {
        x[n][s][0] = token < p.m ? from[s * 8] : 0;
        x[n][s][1] = token < p.m ? from[s * 8 + 4] : 0;
      }
    }
  }
};

// Every code scaled.
template <class N, int TOKENS>
__device__ __forceinline__ void multiply(const FewPiece<N, TOKENS>& from, float (&sums)[TILES][TOKENS / 8][4]) {
  using C = Few<N, TOKENS>;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int s = 0; s < C::PIECE_STEPS; s++) {
      uint32_t a[4];
      N::unpack(from.codes[t], s, from.scales[s * C::SETS / C::PIECE_STEPS].of(t), a);
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) mma(sums[t][n], a, from.x[n][s]);
    }
}

// The block's sums scaled: a block lies in one group.
__device__ __forceinline__ void multiply(const FewPiece<Int4<false>, 8>& from, float (&sums)[TILES][1][4]) {
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
    uint32_t scales = from.scales[0].scales_of(t), zeros = from.scales[0].zeros_of(t);
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

template <class N, int TOKENS>
__device__ __forceinline__ void fragments_few(const FragmentArguments& p) {
  using C = Few<N, TOKENS>;
  extern __shared__ unsigned char raw[];
  float* shared = reinterpret_cast<float*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rank = blockIdx.x % p.split, rows = blockIdx.x / p.split;
  int pieces = p.k / C::PIECE_COLUMNS, step = C::WARPS * p.split, first = rank * C::WARPS + warp;
  FewPiece<N, TOKENS> ring[C::DEPTH];
  float sums[TILES][C::N_TILES][4] = {};
#pragma unroll
  for (int d = 0; d < C::DEPTH; d++)
    if (first + d * step < pieces) ring[d].fetch_weights(p, rows, first + d * step, lane);
  launch_dependents();
  grid_dependency_wait();
#pragma unroll
  for (int d = 0; d < C::DEPTH; d++)
    if (first + d * step < pieces) ring[d].fetch_x(p, first + d * step, lane);
  for (int piece = first; piece < pieces; piece += step * C::DEPTH) {
#pragma unroll
    for (int d = 0; d < C::DEPTH; d++) {
      int here = piece + d * step, next = here + step * C::DEPTH;
      if (here >= pieces) break;
      multiply(ring[d], sums);
      if (next < pieces) {
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
  reduce_and_store<N, C::WARPS, TOKENS, BLOCK_ROWS, C::THREADS>(p, shared, rank, rows * BLOCK_ROWS, 0);
}

}  // namespace stoker
