// Weights in fragments → bf16 [n, k], for products of so many tokens that the dense kernels' rate counts and not the bytes.
//
// A warp takes a block of 64 × 64. Lanes have pairs of columns eight apart; four that share rows exchange them, so that
// each stores 16 bytes at once, and the four a row's 64.
#pragma once
#include "fragments.cuh"

namespace stoker {

constexpr int DEQUANTIZE_WARPS = 8;  // of a CTA

// Word i of lane c and word c of lane i change places, among the four lanes 4q + c.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j & mask) continue;
      const bool upper = c & mask;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? v[j] : v[j + mask], mask);
      v[j] = upper ? got : v[j];
      v[j + mask] = upper ? v[j + mask] : got;
    }
}

template <class N>
__device__ __forceinline__ void dequantize_fragments(const FragmentArguments& p) {
  int lane = threadIdx.x % 32, chunks = p.k / BLOCK_COLUMNS, at = blockIdx.x * DEQUANTIZE_WARPS + threadIdx.x / 32;
  launch_dependents();
  grid_dependency_wait();  // who reads the scratch may still run
  if (at >= p.n / BLOCK_ROWS * chunks) return;
  int rows = at / chunks, block = at % chunks, first = rows * BLOCK_ROWS + lane / 4 * 8;
  // All loads come before the first exchange, which none of them may pass. A lane's rows are eight neighbours.
  constexpr int PIECE = TILES * 32;
  uint4 words[N::PIECES][TILES];
#pragma unroll
  for (int i = 0; i < N::PIECES * TILES; i++)
    words[i / TILES][i % TILES] = stream(p.codes + static_cast<int64_t>(at) * (N::PIECES * PIECE) + i * 32 + lane);
  EightScales<N> scales[N::SETS];
#pragma unroll
  for (int g = 0; g < N::SETS; g++) scales[g].fetch(p, group_at(p, block * STEPS + step_of_set<N>(g)) + first);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint32_t a[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      N::unpack(words[s * N::PIECES / STEPS][t], s % (STEPS / N::PIECES), scales[s * N::SETS / STEPS].of(t), a[s]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int stored = first + 2 * t + h;
      const float unit = unit_of<N>(p, stored);
      const int row = p.rows == PLAIN ? stored : (stored + h * (p.n - 1)) / 2;
      __nv_bfloat16* columns = p.out + static_cast<int64_t>(row) * p.ld_out + block * BLOCK_COLUMNS;
      uint4* out = reinterpret_cast<uint4*>(columns) + lane % 4;
#pragma unroll
      for (int half = 0; half < 2; half++) {  // of the columns: a step has two times 16 bytes of a row
        uint32_t v[4] = {a[2 * half][h], a[2 * half][h + 2], a[2 * half + 1][h], a[2 * half + 1][h + 2]};
        transpose_quad(v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = N::whole(v[i], unit);
        out[4 * half] = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace stoker
