// Four-bit weights → bf16 [n, k], for products of so many tokens that the dense kernels' rate counts and not the bytes.
//
// A warp takes a block of 64 × 64; each lane writes 32 bytes of each of its eight rows.
#pragma once
#include "int4_fragments.cuh"

__device__ __forceinline__ void int4_dequantize(const Int4Arguments& p) {
  int lane = threadIdx.x % 32, chunks = p.k / BLOCK_COLUMNS, at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  dependents_may_launch();
  wait_for_predecessor();  // who reads the scratch may still run
  if (at >= p.n / BLOCK_ROWS * chunks) return;
  int rows = at / chunks, block = at % chunks, c = lane % 4, first = rows * BLOCK_ROWS + lane / 4 * 8;
  const uint4* codes = p.codes + static_cast<int64_t>(at) * (TILES * 32) + lane;
  int64_t place = static_cast<int64_t>(group_of(p, block, c)) * p.n + first;
  uint4 packed = __ldg(reinterpret_cast<const uint4*>(p.scale + place));
  const uint32_t scales[4] = {packed.x, packed.y, packed.z, packed.w};
  uint2 zeros = make_uint2(0x08080808u, 0x08080808u);
  if (p.zero != nullptr) zeros = __ldg(reinterpret_cast<const uint2*>(p.zero + place));
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    RowScale row;
    spread(scales[t], row.scale);
    uint32_t two = (t < 2 ? zeros.x : zeros.y) >> (t % 2 * 16);
    row.zero[0] = shifted(two & 0xFF);
    row.zero[1] = shifted(two >> 8 & 0xFF);
    uint4 words = stream(codes + t * 32);
    uint32_t low[4][4];
    unpack(words.x, row, low[0]);
    unpack(words.y, row, low[1]);
    unpack(words.z, row, low[2]);
    unpack(words.w, row, low[3]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4* out = reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(first + 2 * t + h) * p.ld_out +
                                            block * BLOCK_COLUMNS + c * 16);
      out[0] = make_uint4(low[0][h], low[0][h + 2], low[1][h], low[1][h + 2]);
      out[1] = make_uint4(low[2][h], low[2][h + 2], low[3][h], low[3][h + 2]);
    }
  }
}
