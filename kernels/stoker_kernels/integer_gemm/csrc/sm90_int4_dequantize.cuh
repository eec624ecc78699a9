// Four-bit weights → bf16 [n, k], for products of so many tokens that the dense kernels' rate counts and not the bytes.
//
// A warp takes a block of 64 × 64. Lanes have pairs of columns eight apart; four that share rows exchange them, so that
// each stores 16 bytes at once, and the four a row's 64.
#pragma once
#include "int4_fragments.cuh"

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

__device__ __forceinline__ void int4_dequantize(const Int4Arguments& p) {
  int lane = threadIdx.x % 32, chunks = p.k / BLOCK_COLUMNS, at = blockIdx.x * DEQUANTIZE_WARPS + threadIdx.x / 32;
  launch_dependents();
  grid_dependency_wait();  // who reads the scratch may still run
  if (at >= p.n / BLOCK_ROWS * chunks) return;
  int rows = at / chunks, block = at % chunks, first = rows * BLOCK_ROWS + lane / 4 * 8;
  // All loads come before the first exchange, which none of them may pass. A lane's rows are eight neighbours.
  uint4 words[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) words[t] = stream(p.codes + static_cast<int64_t>(at) * (TILES * 32) + t * 32 + lane);
  const int64_t group = static_cast<int64_t>(group_of(p, block, 0)) * p.n + first;
  const uint4 scale = __ldg(reinterpret_cast<const uint4*>(p.scale + group));
  uint2 zero = make_uint2(0x08080808u, 0x08080808u);
  if (p.zero != nullptr) zero = __ldg(reinterpret_cast<const uint2*>(p.zero + group));
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint32_t a[STEPS][4], scales = word_of(scale, t), zeros = (t < 2 ? zero.x : zero.y) >> (t % 2 * 16);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      if (s > 0 && p.group_shift < 2) {  // a block of several groups
        const int64_t place = static_cast<int64_t>(group_of(p, block, s)) * p.n + first + 2 * t;
        scales = __ldg(reinterpret_cast<const uint32_t*>(p.scale + place));
        if (p.zero != nullptr) zeros = __ldg(reinterpret_cast<const uint16_t*>(p.zero + place));
      }
      unpack(word_of(words[t], s), RowScale(scales, zeros), a[s]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int stored = first + 2 * t + h, row = p.rows == PLAIN ? stored : (stored + h * (p.n - 1)) / 2;
      __nv_bfloat16* columns = p.out + static_cast<int64_t>(row) * p.ld_out + block * BLOCK_COLUMNS;
      uint4* out = reinterpret_cast<uint4*>(columns) + lane % 4;
#pragma unroll
      for (int half = 0; half < 2; half++) {  // of the columns: a step has two times 16 bytes of a row
        uint32_t v[4] = {a[2 * half][h], a[2 * half][h + 2], a[2 * half + 1][h], a[2 * half + 1][h + 2]};
        transpose_quad(v);
        out[4 * half] = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace stoker
