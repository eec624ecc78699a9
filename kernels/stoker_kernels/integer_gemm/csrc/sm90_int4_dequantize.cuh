// Four-bit weights → bf16 [n, k], for products of so many tokens that the dense kernels' rate counts and not the bytes.
//
// A warp takes a block of 64 × 64. The columns of a lane are pairs eight apart, so that each quad of lanes writes a row's 16
// bytes twice a step.
#pragma once
#include "int4_fragments.cuh"

namespace stoker {

constexpr int DEQUANTIZE_WARPS = 8;  // of a CTA

__device__ __forceinline__ void int4_dequantize(const Int4Arguments& p) {
  int lane = threadIdx.x % 32, chunks = p.k / BLOCK_COLUMNS, at = blockIdx.x * DEQUANTIZE_WARPS + threadIdx.x / 32;
  launch_dependents();
  grid_dependency_wait();  // who reads the scratch may still run
  if (at >= p.n / BLOCK_ROWS * chunks) return;
  int rows = at / chunks, block = at % chunks, first = rows * BLOCK_ROWS + lane / 4 * 8;
  const uint4* codes = p.codes + static_cast<int64_t>(at) * (TILES * 32) + lane;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint4 words = stream(codes + t * 32);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      int64_t place = static_cast<int64_t>(group_of(p, block, s)) * p.n + first + 2 * t;
      uint32_t scales = __ldg(reinterpret_cast<const uint32_t*>(p.scale + place));
      uint32_t zeros = p.zero == nullptr ? 0x0808u : __ldg(reinterpret_cast<const uint16_t*>(p.zero + place));
      uint32_t a[4];
      unpack(word_of(words, s), RowScale(scales, zeros), a);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int stored = first + 2 * t + h, row = p.rows == PLAIN ? stored : (stored + h * (p.n - 1)) / 2;
        uint32_t* out = reinterpret_cast<uint32_t*>(p.out + static_cast<int64_t>(row) * p.ld_out + block * BLOCK_COLUMNS +
                                                    s * 16) + lane % 4;
        out[0] = a[h];
        out[4] = a[h + 2];
      }
    }
  }
}

}  // namespace stoker
