// y = x · Wᵀ for up to 128 tokens a tile and four-bit weights, where the tensor cores are about as busy as memory.
//
// A CTA has ROWS rows of the weight and TOKENS tokens. Each stage is K_WARPS blocks of 64 columns of x in shared
// memory, each for ROW_WARPS warps; a warp has 32 rows, whose codes go straight to its registers. A cluster shares the
// columns.
#pragma once
#include "int4_fragments.cuh"

template <int TOKENS_, int ROW_WARPS_, int K_WARPS_, int CTAS_>
struct Many {
  static constexpr int TOKENS = TOKENS_, ROW_WARPS = ROW_WARPS_, K_WARPS = K_WARPS_, CTAS = CTAS_, N_TILES = TOKENS / 8;
  static constexpr int ROWS = ROW_WARPS * 32, THREADS = ROW_WARPS * K_WARPS * 32;
  static constexpr int STAGES = 4, STAGE_UNITS = K_WARPS * TOKENS * 8;  // of 16 bytes
};

struct ManyBlock {
  uint4 codes[2];
  uint2 scale;
  uint32_t zero;
};

__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
}

// Stage `stage` of x: K_WARPS parts of [TOKENS][64 columns], units of eight columns swizzled by the token. A thread copies
// the same unit of every SKIP-th token, so that what changes from copy to copy is one stride.
template <class C>
__device__ __forceinline__ void fetch_stage(const Int4Arguments& p, uint4* ring, int stage, int blocks, int token0) {
  constexpr int SKIP = C::THREADS / (8 * C::K_WARPS);  // tokens from one copy of a thread to its next
  int eight = threadIdx.x % 8, part = threadIdx.x / 8 % C::K_WARPS, first = threadIdx.x / (8 * C::K_WARPS);
  int block = stage * C::K_WARPS + part;
  uint4* to = ring + stage % C::STAGES * C::STAGE_UNITS + (part * C::TOKENS + first) * 8 + (eight ^ (first & 7));
  const __nv_bfloat16* from = p.x + static_cast<int64_t>(token0 + first) * p.ld_x + block * BLOCK_COLUMNS + eight * 8;
  int room = block < blocks ? p.m - token0 : 0;
#pragma unroll 1
  for (int token = first; token < C::TOKENS; token += SKIP, to += SKIP * 8, from += SKIP * p.ld_x)
    copy_async(to, token < room ? from : p.x, token < room);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void fetch_weights(const Int4Arguments& p, ManyBlock& to, int rows, int pair, int block, int lane) {
  const uint4* codes = p.codes + (static_cast<int64_t>(rows) * (p.k / BLOCK_COLUMNS) + block) * (TILES * 32) + pair * 64 + lane;
  to.codes[0] = stream(codes);
  to.codes[1] = stream(codes + 32);
  int64_t place = static_cast<int64_t>(group_of(p, block, lane % 4)) * p.n + rows * BLOCK_ROWS + lane / 4 * 8 + pair * 4;
  to.scale = __ldg(reinterpret_cast<const uint2*>(p.scale + place));
  to.zero = p.zero == nullptr ? 0x08080808u : __ldg(reinterpret_cast<const uint32_t*>(p.zero + place));
}

template <class C>
__device__ __forceinline__ void multiply(const ManyBlock& from, const uint4* x, int lane, float (&sums)[2][C::N_TILES][4]) {
  RowScale row[2];
  spread(from.scale.x, row[0].scale);
  spread(from.scale.y, row[1].scale);
#pragma unroll
  for (int each = 0; each < 4; each++) row[each / 2].zero[each % 2] = shifted(from.zero >> (8 * each) & 0xFF);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t a[2][2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      unpack(half ? from.codes[t].z : from.codes[t].x, row[t], a[t][0]);
      unpack(half ? from.codes[t].w : from.codes[t].y, row[t], a[t][1]);
    }
#pragma unroll
    for (int n = 0; n < C::N_TILES; n++) {
      int token = n * 8 + lane / 4;
      uint4 b = x[token * 8 + ((lane % 4 * 2 + half) ^ (token & 7))];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        mma(sums[t][n], a[t][0], b.x, b.y);
        mma(sums[t][n], a[t][1], b.z, b.w);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void int4_many(const Int4Arguments& p) {
  extern __shared__ __align__(16) float shared[];
  uint4* ring = reinterpret_cast<uint4*>(shared);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / C::ROW_WARPS, row_warp = warp % C::ROW_WARPS;
  int row_tiles = (p.n + C::ROWS - 1) / C::ROWS;
  int rank = blockIdx.x % p.split, tile = blockIdx.x / p.split, token0 = tile / row_tiles * C::TOKENS;
  int row0 = tile % row_tiles * C::ROWS, rows = row0 / BLOCK_ROWS + row_warp / 2, pair = row_warp % 2;
  bool mine = rows * BLOCK_ROWS < p.n;
  int blocks = p.k / BLOCK_COLUMNS, stages = (blocks + C::K_WARPS - 1) / C::K_WARPS;
  int first = static_cast<int64_t>(stages) * rank / p.split, last = static_cast<int64_t>(stages) * (rank + 1) / p.split;
  ManyBlock ahead[2];
#pragma unroll
  for (int d = 0; d < 2; d++) {
    int block = (first + d) * C::K_WARPS + part;
    if (mine && first + d < last && block < blocks) fetch_weights(p, ahead[d], rows, pair, block, lane);
  }
  dependents_may_launch();
  wait_for_predecessor();
#pragma unroll
  for (int s = 0; s < C::STAGES - 1; s++) {
    if (first + s < last) fetch_stage<C>(p, ring, first + s, blocks, token0);
    else asm volatile("cp.async.commit_group;" ::: "memory");
  }
  float sums[2][C::N_TILES][4] = {};
  for (int stage = first; stage < last; stage += 2) {
#pragma unroll
    for (int d = 0; d < 2; d++) {
      int here = stage + d;
      if (here >= last) break;
      asm volatile("cp.async.wait_group %0;" ::"n"(C::STAGES - 2) : "memory");
      __syncthreads();
      if (here + C::STAGES - 1 < last) fetch_stage<C>(p, ring, here + C::STAGES - 1, blocks, token0);
      else asm volatile("cp.async.commit_group;" ::: "memory");
      int block = here * C::K_WARPS + part, next = block + 2 * C::K_WARPS;
      if (mine && block < blocks) {
        multiply<C>(ahead[d], ring + here % C::STAGES * C::STAGE_UNITS + part * C::TOKENS * 8, lane, sums);
        if (here + 2 < last && next < blocks) fetch_weights(p, ahead[d], rows, pair, next, lane);
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();  // x gives its place to the sums
  float* to = shared + part * C::TOKENS * C::ROWS + row_warp / 2 * BLOCK_ROWS + lane / 4 * 8 + pair * 4;
#pragma unroll
  for (int n = 0; n < C::N_TILES; n++)
#pragma unroll
    for (int side = 0; side < 2; side++)
      *reinterpret_cast<float4*>(to + (n * 8 + lane % 4 * 2 + side) * C::ROWS) =
          make_float4(sums[0][n][side], sums[0][n][side + 2], sums[1][n][side], sums[1][n][side + 2]);
  reduce_and_store<C::K_WARPS, C::TOKENS, C::ROWS, C::THREADS>(p, shared, rank, row0, token0);
}
