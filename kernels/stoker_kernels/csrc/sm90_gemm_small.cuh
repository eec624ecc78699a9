// y[M, N] = x[M, K] · W[N, K]ᵀ for M ≤ MT tokens, bound by the bytes of W: a persistent stream-K GEMM for sm_90a.
//
// Swapped: 64 rows of W are wgmma's M side, the tokens its N side. One producer thread streams W and x by TMA into a
// ring of `stages`; BN / 64 consumer warpgroups multiply. The ring is filled with W before the wait for the previous
// kernel (W does not depend on it), so HBM stays busy across kernel boundaries.
//
// Bytes are the unit of K: a chunk is 128 bytes of a row (64 bf16 or 128 e4m3), a k block KC chunks. In shared memory a
// chunk of R rows is R × 128 bytes in the 128-byte swizzle, on a multiple of 1024 bytes.
#pragma once
#include <cuda.h>

#include "gemm_epilogue.cuh"
#include "sm90_chunk.cuh"
#include "unit_walk.cuh"
#include "wgmma.cuh"

namespace stoker {

template <int BN, int KC, int MT>
struct Ring {
  static constexpr int w_bytes = BN * 128 * KC, x_bytes = MT * 128 * KC, stage_bytes = w_bytes + x_bytes;
  static constexpr int groups = BN / GROUP_ROWS;
  static constexpr int staging_bytes = groups * MT * STAGING_PITCH;

  uint32_t base, full, empty;
  unsigned char* staging;
  int* is_last;

  // [stages of W and x][staging][full barriers][empty barriers][flags]; the launcher reserves the same (gemm_small.py).
  __device__ Ring(unsigned char* raw, int stages) {
    const uint32_t start = shared_address(raw), aligned = (start + 1023) & ~1023u;
    base = aligned;
    staging = raw + (aligned - start) + stages * stage_bytes;
    full = aligned + stages * stage_bytes + staging_bytes;
    empty = full + 8 * stages;
    is_last = reinterpret_cast<int*>(staging + staging_bytes + 16 * stages);
  }
  __device__ uint32_t w(int stage) const { return base + stage * stage_bytes; }
  __device__ uint32_t x(int stage) const { return base + stage * stage_bytes + w_bytes; }
};

template <typename T, int BN, int KC, int MT>
__device__ __forceinline__ void produce(const CUtensorMap& w_map, const CUtensorMap& x_map, const StreamK& part,
                                        const Ring<BN, KC, MT>& ring, int stages) {
  const uint64_t once = policy_evict_first(), keep = policy_evict_last();
  auto load_w = [&](const UnitWalk& u, int stage) {
    mbarrier_arrive_expect(ring.full + 8 * stage, ring.stage_bytes);
#pragma unroll
    for (int c = 0; c < KC; ++c) {
      tensor_load_2d(ring.w(stage) + c * BN * 128, &w_map, (u.k_block * KC + c) * Chunk<T>::elements,
                     u.segment.tile * BN, ring.full + 8 * stage, once);
    }
  };
  auto load_x = [&](const UnitWalk& u, int stage) {
#pragma unroll
    for (int c = 0; c < KC; ++c) {
      tensor_load_2d(ring.x(stage) + c * MT * 128, &x_map, (u.k_block * KC + c) * Chunk<T>::elements, 0,
                     ring.full + 8 * stage, keep);
    }
  };
  const int units = part.last - part.first, ahead = min(units, stages);
  UnitWalk walk(part), walk_x(part);
  for (int i = 0; i < ahead; ++i, walk.next()) load_w(walk, i);
  grid_dependency_wait();
  proxy_fence_async_global();
  for (int i = 0; i < ahead; ++i, walk_x.next()) load_x(walk_x, i);
  int stage = 0;
  uint32_t parity = 0;  // of the stage's release that allows its next use
  for (int i = ahead; i < units; ++i, walk.next()) {
    mbarrier_wait(ring.empty + 8 * stage, parity);
    load_w(walk, stage);
    load_x(walk, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

template <typename T, int BN, int KC, int MT>
__device__ __forceinline__ void consume(const GemmArguments& g, const StreamK& part, const Ring<BN, KC, MT>& ring) {
  const int group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x % 32;
  float acc[MT / 2];
  int stage = 0;
  uint32_t parity = 0;
  grid_dependency_wait();
  for (int i = 0; i < part.segments; ++i) {
    const Segment segment = part.segment(i);
    int held = -1;  // stage whose products may still run
    for (int kb = segment.begin; kb < segment.end; ++kb) {
      mbarrier_wait(ring.full + 8 * stage, parity);
      const uint64_t w = wgmma_descriptor(ring.w(stage) + group * GROUP_ROWS * 128);
      const uint64_t x = wgmma_descriptor(ring.x(stage));
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < KC; ++c) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Wgmma<T, MT>::multiply(acc, w + c * (BN * 128 / 16) + step * 2, x + c * (MT * 128 / 16) + step * 2,
                                 kb != segment.begin || c + step != 0);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (held >= 0 && lane == 0) mbarrier_arrive(ring.empty + 8 * held);
      held = stage;
      if (++stage == g.stages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    wgmma_results(acc);
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * held);
    finish_segment<MT, BN / GROUP_ROWS>(g, part, segment, segment.tile * BN + group * GROUP_ROWS, group, acc,
                                        ring.staging + group * MT * STAGING_PITCH, ring.is_last + group);
  }
}

template <typename T, int BN, int KC, int MT>
__device__ __forceinline__ void sm90_gemm_small(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                                const GemmArguments& g) {
  extern __shared__ unsigned char raw[];
  constexpr int groups = BN / GROUP_ROWS;
  const Ring<BN, KC, MT> ring(raw, g.stages);
  const StreamK part(blockIdx.x, gridDim.x, g.tiles, g.k_blocks);
  const bool producer = threadIdx.x >= groups * GROUP_THREADS;
  if (producer && threadIdx.x % 32 == 0) {
    tensor_map_prefetch(&w_map);
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < g.stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, groups * 4);  // one arrival per consumer warp
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
  if (producer) {
    if (threadIdx.x % 32 == 0 && part.segments > 0) produce<T>(w_map, x_map, part, ring, g.stages);
  } else {
    consume<T>(g, part, ring);
  }
}

}  // namespace stoker

#define STOKER_SM90_GEMM_SMALL(NAME, T, BN, KC, MT)                                                                \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, 1)                                                   \
      NAME##_n##BN##_c##KC##_m##MT(const __grid_constant__ CUtensorMap w_map,                                      \
                                   const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::GemmArguments g) { \
    stoker::sm90_gemm_small<T, BN, KC, MT>(w_map, x_map, g);                                                       \
  }
