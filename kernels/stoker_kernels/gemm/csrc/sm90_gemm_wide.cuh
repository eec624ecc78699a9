// y[M, N] = x[M, K] · W[N, K]ᵀ for more tokens than the small kernels take, for sm_90a.
//
// A CTA multiplies 64 · GROUPS tokens with 2 · HALF rows of W: a consumer warpgroup for 64 tokens (wgmma's M side), all
// rows an instruction or, of more than 256, half of them. The two CTAs of a cluster share one operand, of which each loads
// half and multicasts it to both, so that it crosses L2 once a cluster. By rows they take neighbouring rows of W and share
// x: for one block of tokens there is no other way. By tokens they take neighbouring tokens and share W, the larger operand: 34 KB
// from L2 a k block instead of 45 (of 288 rows and 128 tokens), which at the tensor cores' full speed are 30 bytes a cycle
// and SM instead of 39, of the 39 that L2 has.
// One thread of a last warpgroup streams both by TMA into a ring of `stages`, filled with W before the wait for the
// previous kernel. Clusters are persistent and take tiles in turn; the ring fills for the next tile while one is stored.
//
// GATED: W stacks the rows of a gate and of an up projection, eights of which TMA lays side by side (a map of four
// dimensions); the result is silu(gate) · up, [M, N / 2]. Eights of columns alternate in a thread's sums.
// e4m3: sums are multiplied by the scales of their token and their row of W, in fp32, before anything else.
// WideOrder: where bits may not depend on the tile, sums are scaled and rounded as sm90_gemm_cluster.cuh does it; those of
// a K that its clusters cut are added part by part, in a second set of sums.
#pragma once
#include <cuda.h>

#include "sm90_wide_tile.cuh"
#include "wgmma.cuh"

namespace stoker {

template <typename SIZE>
struct WideRing {
  static constexpr int half_bytes = SIZE::HALF * 128, w_bytes = 2 * half_bytes, x_bytes = SIZE::TOKENS * 128;
  static constexpr int stage_bytes = w_bytes + x_bytes;
  uint32_t base, full, empty;

  __device__ WideRing(unsigned char* raw, int stages) {
    base = (shared_address(raw) + 1023) & ~1023u;
    full = base + stages * stage_bytes;
    empty = full + 8 * stages;
  }
  __device__ uint32_t w(int stage) const { return base + stage * stage_bytes; }
  __device__ uint32_t x(int stage) const { return base + stage * stage_bytes + w_bytes; }
};

// The k blocks of a CTA's tiles, one by one.
template <typename SIZE>
struct WideWalk {
  const WideArguments& g;
  int rank, index, step, k_block = 0;
  WideTile<SIZE> tile;

  __device__ WideWalk(const WideArguments& g_, int rank_, int cluster, int clusters)
      : g(g_), rank(rank_), index(cluster), step(clusters), tile(g_, cluster, rank_) {}
  __device__ void next() {
    if (++k_block < g.k_blocks) return;
    k_block = 0;
    index += step;
    tile = WideTile<SIZE>(g, index, rank);
  }
};

template <typename T, typename SIZE, bool GATED>
struct WideProducer {
  const CUtensorMap &w_map, &x_map;
  const WideArguments& g;
  const WideRing<SIZE>& ring;
  int rank;
  uint64_t w_policy, x_policy;

  __device__ void load_w(const WideWalk<SIZE>& u, int stage) const {
    mbarrier_arrive_expect(ring.full + 8 * stage, ring.stage_bytes);
    // Eights of gate and up are sixteen rows: where they cannot be halved, the map takes all, by rows alone.
    if constexpr (!GATED || SIZE::HALF % 16 == 0) {
      if (g.by_tokens) return load_half(u, stage, rank);
      load_half(u, stage, 1);
    }
    load_half(u, stage, 0);
  }
  __device__ void load_half(const WideWalk<SIZE>& u, int stage, int half) const {
    const int row = u.tile.row + half * SIZE::HALF, k = u.k_block * Chunk<T>::elements;
    const uint32_t to = ring.w(stage) + half * ring.half_bytes, full = ring.full + 8 * stage;
    if constexpr (GATED) {
      if (g.by_tokens) {
        tensor_multicast_4d(to, &w_map, k, 0, 0, row / 16, full, 3, w_policy);
      } else {
        tensor_load_4d(to, &w_map, k, 0, 0, row / 16, full, w_policy);
      }
    } else if (g.by_tokens) {
      tensor_multicast_2d(to, &w_map, k, row, full, 3, w_policy);
    } else {
      tensor_load_2d(to, &w_map, k, row, full, w_policy);
    }
  }
  __device__ void load_x(const WideWalk<SIZE>& u, int stage) const {
    const int k = u.k_block * Chunk<T>::elements, some = SIZE::TOKENS / 2;
    const uint32_t full = ring.full + 8 * stage;
    if (g.by_tokens) {
      tensor_load_2d(ring.x(stage), &x_map, k, u.tile.token, full, x_policy);
      tensor_load_2d(ring.x(stage) + some * 128, &x_map, k, u.tile.token + some, full, x_policy);
    } else {
      tensor_multicast_2d(ring.x(stage) + rank * some * 128, &x_map, k, u.tile.token + rank * some, full, 3, x_policy);
    }
  }
};

template <typename T, typename SIZE, bool GATED>
__device__ __forceinline__ void produce_wide(const WideProducer<T, SIZE, GATED>& p, int cluster, int clusters, int tiles) {
  const int mine = cluster < tiles ? (tiles - 1 - cluster) / clusters + 1 : 0;
  const int units = mine * p.g.k_blocks, ahead = min(units, p.g.stages);
  WideWalk<SIZE> walk(p.g, p.rank, cluster, clusters), walk_x(p.g, p.rank, cluster, clusters);
  const bool issues = threadIdx.x % 32 == 0;
  auto fill = [&] {
    for (int i = 0; i < ahead; ++i, walk.next()) p.load_w(walk, i);
  };
  if (issues && !p.g.by_tokens) fill();  // to this CTA alone
  __syncwarp();
  cluster_wait();  // the other CTA's barriers are set up
  if (!issues) return;
  if (p.g.by_tokens) fill();
  grid_dependency_wait();
  proxy_fence_async_global();
  for (int i = 0; i < ahead; ++i, walk_x.next()) p.load_x(walk_x, i);
  int stage = 0;
  uint32_t parity = 0;  // of the stage's release, by both CTAs, that allows its next use
  for (int i = ahead; i < units; ++i, walk.next()) {
    mbarrier_wait(p.ring.empty + 8 * stage, parity);
    p.load_w(walk, stage);
    p.load_x(walk, stage);
    if (++stage == p.g.stages) stage = 0, parity ^= 1;
  }
}

template <typename T, typename SIZE, bool GATED, WideOrder ORDER>
__device__ __forceinline__ void consume_wide(const WideArguments& g, const WideRing<SIZE>& ring, int rank, int cluster,
                                             int clusters, int tiles) {
  const int group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x % 32;
  constexpr int HALF = SIZE::HALF;
  constexpr int columns = HALF > 128 ? HALF : 2 * HALF;  // of the sums that one instruction makes: 256 at most
  using Sum = typename Chunk<T>::Sum;
  Sum sums[HALF];
  int stage = 0;
  uint32_t parity = 0;
  cluster_wait();
  grid_dependency_wait();
  const int parts = ORDER == WideOrder::Parts ? g.parts : 1;
  const int mine = cluster < tiles ? (tiles - 1 - cluster) / clusters + 1 : 0;
  int awaited = mine * g.k_blocks - g.stages;  // releases that producers wait for
  auto release = [&](int held) {  // in both CTAs: each one's producer writes to both
    // Only those: another would still be on its way when that CTA has ended, and the next kernel has its shared memory.
    if (awaited-- > 0 && lane < 2) mbarrier_arrive_cluster(cluster_address(ring.empty + 8 * held, lane));
  };
  for (int index = cluster; index < tiles; index += clusters) {
    if constexpr (Chunk<T>::scaled && ORDER == WideOrder::Any) {
      prefetch_scales<SIZE, GATED>(g, WideTile<SIZE>(g, index, rank));
    }
    float total[ORDER == WideOrder::Parts ? HALF : 1];  // of the parts so far
    for (int part = 0; part < parts; ++part) {
      const int begin = part * g.k_blocks / parts, end = (part + 1) * g.k_blocks / parts;
      int held = -1;  // stage whose products may still run
      for (int kb = begin; kb < end; ++kb) {
        mbarrier_wait(ring.full + 8 * stage, parity);
        const uint64_t x = wgmma_descriptor(ring.x(stage) + group * 64 * 128);
        const uint64_t w = wgmma_descriptor(ring.w(stage));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int first = 0; first < 2 * HALF; first += columns) {
            auto& some = reinterpret_cast<Sum(&)[columns / 2]>(sums[first / 2]);
            Wgmma<T, columns>::multiply(some, x + step * 2, w + first * 8 + step * 2, kb + step != begin);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (held >= 0) release(held);
        held = stage;
        if (++stage == g.stages) stage = 0, parity ^= 1;
      }
      wgmma_wait<0>();
      wgmma_results(sums);
      release(held);
      if constexpr (ORDER == WideOrder::Parts) {
#pragma unroll
        for (int i = 0; i < HALF; ++i) total[i] = part > 0 ? total[i] + sums[i] : sums[i];
      }
    }
    const WideTile<SIZE> tile(g, index, rank);
    if constexpr (Scaled<Sum>::EXACT) {
      store_integers<SIZE, GATED>(g, tile, sums);
    } else {
      auto& all = reinterpret_cast<float(&)[HALF]>(ORDER == WideOrder::Parts ? total[0] : sums[0]);
      if constexpr (ORDER != WideOrder::Any) {
        if constexpr (!GATED) scale_sums_fixed<T, SIZE>(g, tile, all);
      } else if constexpr (Chunk<T>::scaled) {
        scale_sums<SIZE, GATED>(g, tile, all);
      }
      store_wide<SIZE, GATED, ORDER != WideOrder::Any>(g, tile, all);
    }
  }
}

template <typename T, typename SIZE, bool GATED, WideOrder ORDER>
__device__ __forceinline__ void sm90_gemm_wide(const CUtensorMap& w_map, const CUtensorMap& x_map, const WideArguments& g) {
  extern __shared__ unsigned char raw[];
  const WideRing<SIZE> ring(raw, g.stages);
  const int rank = cluster_rank(), cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  const int tiles = g.row_blocks * g.token_blocks;
  const bool producer = threadIdx.x >= SIZE::CONSUMERS, loads = threadIdx.x / 32 == SIZE::CONSUMERS / 32;
  if (loads && threadIdx.x % 32 == 0) {
    tensor_map_prefetch(&w_map);
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < g.stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, 2 * 4 * SIZE::GROUPS);  // one arrival per consumer warp of both CTAs
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  cluster_arrive();
  launch_dependents();
  if (producer) {
    if constexpr (SIZE::SHARES_REGISTERS) registers_shrink<SIZE::PRODUCER_REGISTERS>();
    if (loads) {
      const uint64_t w_policy = g.token_blocks == 1 ? policy_evict_first() : policy_evict_normal();
      const uint64_t x_policy = g.m <= WIDE_GROUP ? policy_evict_last() : policy_evict_normal();
      produce_wide(WideProducer<T, SIZE, GATED>{w_map, x_map, g, ring, rank, w_policy, x_policy}, cluster, clusters, tiles);
      __syncwarp();
    } else {
      cluster_wait();
    }
  } else {
    if constexpr (SIZE::SHARES_REGISTERS) registers_grow<SIZE::CONSUMER_REGISTERS>();
    consume_wide<T, SIZE, GATED, ORDER>(g, ring, rank, cluster, clusters, tiles);
  }
  cluster_arrive();  // no CTA leaves while the other may still write or arrive here
  cluster_wait();
}

}  // namespace stoker

#define STOKER_SM90_GEMM_WIDE(NAME, T, HALF, GATED) STOKER_SM90_GEMM_WIDE_IN(NAME, T, HALF, 2, GATED, Any)
#define STOKER_SM90_GEMM_WIDE_IN(NAME, T, HALF, GROUPS, GATED, ORDER)                                              \
  extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)                                              \
      NAME(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                   \
           const __grid_constant__ stoker::WideArguments g) {                                                      \
    stoker::sm90_gemm_wide<T, stoker::WideSize<HALF, GROUPS>, GATED, stoker::WideOrder::ORDER>(w_map, x_map, g);   \
  }
