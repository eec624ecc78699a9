// y[M, N] = x[M, K] · W[N, K]ᵀ for M ≤ MT tokens by cp.async and mma.sync: the same stream-K partition, epilogue and
// arguments as sm90_gemm_small, for every SM from 8.0 on.
//
// Swapped: each warp holds 16 rows of W as mma's M side, the tokens are its N side. Every thread copies and multiplies;
// STAGES - 1 stages are in flight. A chunk is 64 elements (128 bytes) of a row, a k block KC chunks; a 16-byte piece p
// of row r lies at piece p ^ (r % 8), so that neither the copies nor ldmatrix meet bank conflicts.
#pragma once
#include "gemm_epilogue.cuh"
#include "unit_walk.cuh"

namespace stoker {

__device__ __forceinline__ uint32_t swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

template <int BN, int KC, int MT, int STAGES>
struct CopyRing {
  static constexpr int threads = 2 * BN, groups = BN / GROUP_ROWS;
  static constexpr int w_bytes = BN * 128 * KC, x_bytes = MT * 128 * KC, stage_bytes = w_bytes + x_bytes;
  static constexpr int staging_bytes = groups * MT * STAGING_PITCH;
  static constexpr int pieces_x = MT * 8 * KC;

  const GemmArguments& g;
  unsigned char* raw;
  uint32_t base;
  uint64_t once, keep;

  __device__ CopyRing(const GemmArguments& g_, unsigned char* raw_)
      : g(g_), raw(raw_), base(shared_address(raw_)), once(policy_evict_first()), keep(policy_evict_last()) {}
  __device__ unsigned char* staging(int group) const { return raw + STAGES * stage_bytes + group * MT * STAGING_PITCH; }
  __device__ int* is_last(int group) const {
    return reinterpret_cast<int*>(raw + STAGES * stage_bytes + staging_bytes) + group;
  }

  __device__ void load_w(const UnitWalk& u, int stage) const {
#pragma unroll
    for (int i = 0; i < 4 * KC; ++i) {
      const int piece = (threadIdx.x + i * threads) % 8, row = (threadIdx.x + i * threads) / 8 % BN, c = i / 4;
      const int n = u.segment.tile * BN + row, k = (u.k_block * KC + c) * 64 + piece * 8;
      cp_async_16(base + stage * stage_bytes + c * BN * 128 + swizzled(row, piece),
                  g.weight + static_cast<int64_t>(n) * g.k + k, n < g.n && k < g.k, once);
    }
  }

  __device__ const __nv_bfloat16* x_piece(int i, int k_block, uint32_t& offset, bool& valid) const {
    const int piece = i % 8, token = i / 8 % MT, c = i / (8 * MT), k = (k_block * KC + c) * 64 + piece * 8;
    offset = w_bytes + c * MT * 128 + swizzled(token, piece);
    valid = token < g.m && k < g.k;
    return g.x + static_cast<int64_t>(token) * g.ld_x + k;
  }

  __device__ void load_x(const UnitWalk& u, int stage) const {
#pragma unroll
    for (int i = threadIdx.x; i < pieces_x; i += threads) {
      uint32_t offset;
      bool valid;
      const __nv_bfloat16* from = x_piece(i, u.k_block, offset, valid);
      cp_async_16(base + stage * stage_bytes + offset, from, valid, keep);
    }
  }

  // Without cp.async: the first stages' x must not queue behind the weights that were requested before it.
  __device__ void copy_x(const UnitWalk& u, int stage) const {
#pragma unroll
    for (int i = threadIdx.x; i < pieces_x; i += threads) {
      uint32_t offset;
      bool valid;
      const __nv_bfloat16* from = x_piece(i, u.k_block, offset, valid);
      const uint4 value = valid ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(raw + stage * stage_bytes + offset) = value;
    }
  }
};

template <int BN, int KC, int MT>
__device__ __forceinline__ void multiply_stage(uint32_t w, uint32_t x, float (&acc)[MT / 2]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < 4 * KC; ++step) {
    const int c = step / 4, piece = step % 4 * 2;
    uint32_t a[4];
    ldmatrix_x4(a, w + c * BN * 128 + swizzled(row, piece + lane / 16));
    if constexpr (MT == 8) {
      uint32_t b0, b1;
      ldmatrix_x2(b0, b1, x + c * MT * 128 + swizzled(lane % 8, piece + lane / 8 % 2));
      mma_m16n8k16_bf16(acc, a, b0, b1);
    } else {
#pragma unroll
      for (int j = 0; j < MT / 16; ++j) {
        uint32_t b[4];
        ldmatrix_x4(b, x + c * MT * 128 + swizzled(16 * j + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
        mma_m16n8k16_bf16(*reinterpret_cast<float(*)[4]>(acc + 8 * j), a, b[0], b[1]);
        mma_m16n8k16_bf16(*reinterpret_cast<float(*)[4]>(acc + 8 * j + 4), a, b[2], b[3]);
      }
    }
  }
}

template <int BN, int KC, int MT, int STAGES>
__device__ __forceinline__ void sm80_gemm_small(const GemmArguments& g) {
  extern __shared__ __align__(128) unsigned char raw[];
  using Ring = CopyRing<BN, KC, MT, STAGES>;
  const Ring ring(g, raw);
  const StreamK part(blockIdx.x, gridDim.x, g.tiles, g.k_blocks);
  const int group = threadIdx.x / GROUP_THREADS, units = part.last - part.first;
  launch_dependents();
  if (units == 0) {
    grid_dependency_wait();
    return;
  }
  UnitWalk ahead(part), walk_x(part);
  int loaded = 0;
  for (; loaded < STAGES - 1; ++loaded) {
    if (loaded < units) ring.load_w(ahead, loaded), ahead.next();
    cp_async_commit();
  }
  grid_dependency_wait();
  for (int s = 0; s < min(units, STAGES - 1); ++s, walk_x.next()) ring.copy_x(walk_x, s);
  int stage = 0, done = 0;
  for (int i = 0; i < part.segments; ++i) {
    const Segment segment = part.segment(i);
    float acc[MT / 2] = {};
    for (int kb = segment.begin; kb < segment.end; ++kb, ++done) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // this stage has landed for everyone, and everyone has left the one before it
      if (done + STAGES - 1 < units) {
        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        ring.load_w(ahead, free);
        ring.load_x(ahead, free);
        ahead.next();
      }
      cp_async_commit();
      const uint32_t at = ring.base + stage * Ring::stage_bytes;
      multiply_stage<BN, KC, MT>(at, at + Ring::w_bytes, acc);
      if (++stage == STAGES) stage = 0;
    }
    finish_segment<MT, Ring::groups>(g, part, segment, segment.tile * BN + group * GROUP_ROWS, group, acc,
                                     ring.staging(group), ring.is_last(group));
  }
}

}  // namespace stoker

#define STOKER_SM80_GEMM_SMALL(NAME, BN, KC, MT, STAGES)                                    \
  extern "C" __global__ void __launch_bounds__((BN) * 2, 1)                                 \
      NAME##_n##BN##_c##KC##_m##MT(const __grid_constant__ stoker::GemmArguments g) {       \
    stoker::sm80_gemm_small<BN, KC, MT, STAGES>(g);                                         \
  }
