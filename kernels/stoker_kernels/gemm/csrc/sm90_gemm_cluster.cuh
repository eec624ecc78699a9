// y[M, N] = x[M, K] · W[N, K]ᵀ for M ≤ MT tokens, bound by the bytes of W, for sm_90a: a persistent GEMM. CTAs that share
// a tile sit in one cluster and exchange their sums through distributed shared memory: no partial sums in global memory,
// no counters, no waiting for anyone outside the cluster.
//
// Swapped: 64 rows of W are wgmma's M side, the tokens its N side. One producer thread streams W and x by TMA into a
// ring of `stages`; BN / 64 consumer warpgroups multiply. The ring is filled with W before the wait for the previous
// kernel (W does not depend on it), so HBM stays busy across kernel boundaries.
//
// Bytes are the unit of K: a chunk is 128 bytes of a row (64 bf16 or 128 e4m3), a k block KC chunks. In shared memory a
// chunk of R rows is R × 128 bytes in the 128-byte swizzle, on a multiple of 1024 bytes.
//
// Adapters: what they add to a tile is a further part of its K, behind the k blocks (gemm_adapters.cuh).
//
// GATED: W stacks the rows of a gate and of an up projection, and the result is silu(gate) · up, [M, N / 2]. The map of W
// has four dimensions, so that TMA lays 8 rows of gate and 8 of up side by side and one thread holds both sums.
#pragma once
#include <cuda.h>

#include "cluster_split.cuh"
#include "gemm_adapters.cuh"
#include "sm90_chunk.cuh"
#include "wgmma.cuh"

namespace stoker {

// [stages of W and x][staging][sums from the other CTAs][full][empty][received barriers], with adapters [a barrier][their
// pairs][s]; small.py reserves as much.
template <int BN, int KC, int MT>
struct ClusterRing {
  static constexpr int w_bytes = BN * 128 * KC, x_bytes = MT * 128 * KC, stage_bytes = w_bytes + x_bytes;
  static constexpr int groups = BN / GROUP_ROWS, blocks = MT / 8;  // a block: 8 tokens
  static constexpr int block_bytes = GROUP_THREADS * 16;           // a group's fp32 sums of one block

  int size, owned;  // CTAs of the cluster; most blocks that one of them sums up
  uint32_t base, sums, full, empty, received, listed;
  unsigned char* staging;
  unsigned char* sums_pointer;
  PairList* list;

  __device__ ClusterRing(unsigned char* raw, int stages, int size_) : size(size_), owned((blocks + size_ - 1) / size_) {
    const uint32_t start = shared_address(raw), aligned = (start + 1023) & ~1023u;
    base = aligned;
    staging = raw + (aligned - start) + stages * stage_bytes;
    sums_pointer = staging + groups * MT * STAGING_PITCH;
    sums = aligned + stages * stage_bytes + groups * MT * STAGING_PITCH;
    full = sums + (size - 1) * groups * owned * block_bytes;
    empty = full + 8 * stages;
    received = empty + 8 * stages;
    listed = received + 16;
    list = reinterpret_cast<PairList*>(raw + (listed + 8 - start));
  }
  __device__ uint32_t w(int stage) const { return base + stage * stage_bytes; }
  __device__ uint32_t x(int stage) const { return base + stage * stage_bytes + w_bytes; }
  // Where the sums of block j from CTA `from` lie at CTA `to`, which is j % size.
  __device__ int sum_offset(int from, int to, int group, int j) const {
    const int slot = from < to ? from : from - 1;
    return ((slot * groups + group) * owned + j / size) * block_bytes;
  }
  __device__ int blocks_of(int rank) const { return rank < blocks ? (blocks - 1 - rank) / size + 1 : 0; }
};

// One thread's loads of a k block to a stage.
template <typename T, int BN, int KC, int MT, bool GATED>
struct ClusterLoads {
  const CUtensorMap &w_map, &x_map;
  const ClusterRing<BN, KC, MT>& ring;
  uint64_t once = policy_evict_first(), keep = policy_evict_last();

  __device__ void w(int tile, int k_block, int stage) const {
    mbarrier_arrive_expect(ring.full + 8 * stage, ring.stage_bytes);
#pragma unroll
    for (int c = 0; c < KC; ++c) {
      const int k = (k_block * KC + c) * Chunk<T>::elements;
      if constexpr (GATED) {
        tensor_load_4d(ring.w(stage) + c * BN * 128, &w_map, k, 0, 0, tile * (BN / 16), ring.full + 8 * stage, once);
      } else {
        tensor_load_2d(ring.w(stage) + c * BN * 128, &w_map, k, tile * BN, ring.full + 8 * stage, once);
      }
    }
  }
  __device__ void x(int k_block, int stage) const {
#pragma unroll
    for (int c = 0; c < KC; ++c) {
      tensor_load_2d(ring.x(stage) + c * MT * 128, &x_map, (k_block * KC + c) * Chunk<T>::elements, 0,
                     ring.full + 8 * stage, keep);
    }
  }
};

template <typename T, int BN, int KC, int MT, bool GATED>
__device__ __forceinline__ void produce(const ClusterLoads<T, BN, KC, MT, GATED>& load, const ClusterSplit& part,
                                        const ClusterRing<BN, KC, MT>& ring, int stages) {
  const int units = part.units(), ahead = min(units, stages);
  ClusterWalk walk(part), walk_x(part);
  for (int i = 0; i < ahead; ++i, walk.next()) load.w(walk.segment.tile, walk.k_block, i);
  grid_dependency_wait();
  proxy_fence_async_global();
  for (int i = 0; i < ahead; ++i, walk_x.next()) load.x(walk_x.k_block, i);
  int stage = 0;
  uint32_t parity = 0;  // of the stage's release that allows its next use
  for (int i = ahead; i < units; ++i, walk.next()) {
    mbarrier_wait(ring.empty + 8 * stage, parity);
    load.w(walk.segment.tile, walk.k_block, stage);
    load.x(walk.k_block, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

// `produce` with the pairs of each tile behind its k blocks; a whole warp, of which one lane loads.
template <typename T, int BN, int KC, int MT, bool GATED>
__device__ __forceinline__ void produce_adapted(const ClusterLoads<T, BN, KC, MT, GATED>& load, const ClusterSplit& part,
                                                const ClusterRing<BN, KC, MT>& ring, const GemmArguments& g,
                                                const CUtensorMap& b_map, const AdapterArguments& adapters) {
  using Pairs = PairStage<BN, KC, GATED>;
  const bool issues = threadIdx.x % 32 == 0;
  const ClusterSplit::Segment first = part.segment(0);
  const int stages = g.stages, ahead = min(first.end - first.begin, stages);
  TileOfLane tile;
  if (adapters.planned) tile.load_slot(adapters);
  if (issues) {
    for (int i = 0; i < ahead; ++i) load.w(first.tile, first.begin + i, i);
  }
  if (!adapters.planned) {
    grid_dependency_wait();
    tile.load_slot(adapters);
  }
  tile.load_ranks(adapters);
  if (issues) {
    adapters.wait_for_x();
    proxy_fence_async_global();
    for (int i = 0; i < ahead; ++i) load.x(first.begin + i, i);
  }
  __syncwarp();
  list_pairs(tile, *ring.list, part.rank, part.size);
  if (!issues) return;
  mbarrier_arrive(ring.listed);
  int stage = ahead == stages ? 0 : ahead;
  uint32_t parity = ahead == stages ? 0 : 1;  // of the stage's release that allows its next use; there is none before the first
  bool has_s = false;
  auto next = [&] {
    if (++stage == stages) stage = 0, parity ^= 1;
  };
  for (int i = 0; i < part.segments(); ++i) {
    const ClusterSplit::Segment segment = part.segment(i);
    for (int k_block = segment.begin + (i == 0 ? ahead : 0); k_block < segment.end; ++k_block, next()) {
      mbarrier_wait(ring.empty + 8 * stage, parity);
      load.w(segment.tile, k_block, stage);
      load.x(k_block, stage);
    }
    const int which = i < part.shared;
    for (int at = 0; at < ring.list->count[which]; at += Pairs::most, next()) {
      mbarrier_wait(ring.empty + 8 * stage, parity);
      Pairs::load(ring.w(stage), ring.full + 8 * stage, b_map, adapters, g.m, *ring.list, which, at, segment.tile,
                  !has_s, load.once);
      has_s = true;
    }
  }
  grid_dependency_wait();  // who waits for the end of this grid waits for that of those before
}

// Sends each block of `acc` to the CTA that sums it. Sums run over the ranks in order, whoever sums: where a token is does
// not change a bit.
template <int BN, int KC, int MT, typename S>
__device__ __forceinline__ void sum_over_cluster(const ClusterRing<BN, KC, MT>& ring, int rank, int group,
                                                 S (&acc)[MT / 2]) {
  using Four = typename Scaled<S>::Four;
  const int t = threadIdx.x % GROUP_THREADS;
  cluster_wait();  // every CTA of the cluster has started and set up its barriers
#pragma unroll
  for (int j = 0; j < MT / 8; ++j) {
    const int to = j % ring.size;
    if (to != rank) {
      const uint32_t place = ring.sums + ring.sum_offset(rank, to, group, j) + t * 16;
      store_async(cluster_address(place, to), acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3],
                  cluster_address(ring.received + 8 * group, to));
    }
  }
  if (rank >= MT / 8) return;  // sums no block
  mbarrier_wait_cluster(ring.received + 8 * group, 0);
#pragma unroll
  for (int j = 0; j < MT / 8; ++j) {
    if (j % ring.size == rank) {
      S sum[4] = {};
      for (int from = 0; from < ring.size; ++from) {
        Four v = {acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]};
        if (from != rank) {
          v = *reinterpret_cast<const Four*>(ring.sums_pointer + ring.sum_offset(from, rank, group, j) + t * 16);
        }
        sum[0] += v.x;
        sum[1] += v.y;
        sum[2] += v.z;
        sum[3] += v.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[4 * j + e] = sum[e];
    }
  }
}

template <typename T, int BN, int KC, int MT, bool GATED, typename Adapters>
__device__ __forceinline__ void consume(const GemmArguments& g, const ClusterSplit& part,
                                        const ClusterRing<BN, KC, MT>& ring, const Adapters& adapters) {
  const int group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x % 32;
  typename Chunk<T>::Sum acc[MT / 2];
  int stage = 0;
  uint32_t parity = 0;
  if constexpr (!Adapters::present) grid_dependency_wait();
  typename Adapters::template Tokens<MT, GATED> tokens(adapters, g.m, ring.list);
  for (int i = 0; i < part.segments(); ++i) {
    const ClusterSplit::Segment segment = part.segment(i);
    const int row = segment.tile * BN + group * GROUP_ROWS;
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
    const bool alone = i >= part.shared;
    if constexpr (Adapters::present) {
      using Pairs = PairStage<BN, KC, GATED>;
      mbarrier_wait(ring.listed, 0);
      for (int at = 0; at < ring.list->count[!alone]; at += Pairs::most) {
        mbarrier_wait(ring.full + 8 * stage, parity);
        tokens.template add<BN, KC>(*ring.list, !alone, at, ring.w(stage), group, row, g.n, acc);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
        if (++stage == g.stages) stage = 0, parity ^= 1;
      }
    }
    if (!alone) sum_over_cluster(ring, part.rank, group, acc);
    if (alone || part.rank < MT / 8) {
      const int first = alone ? 0 : part.rank, step = alone ? 1 : part.size;
      unsigned char* staging = ring.staging + group * MT * STAGING_PITCH;
      if constexpr (GATED) {
        store_gated_tile<MT>(g, row / 2, group, acc, staging, first, step);
      } else {
        store_tile<MT>(g, row, group, acc, staging, first, step);
      }
    }
  }
}

// `b_map`: of adapters; without any it is not used.
template <typename T, int BN, int KC, int MT, bool GATED = false, typename Adapters = NoAdapters>
__device__ __forceinline__ void sm90_gemm_cluster(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                                  const GemmArguments& g, const CUtensorMap& b_map,
                                                  const Adapters& adapters = {}) {
  extern __shared__ unsigned char raw[];
  constexpr int groups = BN / GROUP_ROWS;
  const int size = cluster_size(), rank = cluster_rank();
  const ClusterRing<BN, KC, MT> ring(raw, g.stages, size);
  const ClusterSplit part(blockIdx.x / size, gridDim.x / size, rank, size, g.tiles, g.k_blocks);
  const bool producer = threadIdx.x >= groups * GROUP_THREADS;
  if (producer && threadIdx.x % 32 == 0) {
    tensor_map_prefetch(&w_map);
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < g.stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, groups * 4);  // one arrival per consumer warp
    }
    for (int group = 0; group < groups; ++group) mbarrier_init(ring.received + 8 * group, 1);
    if constexpr (Adapters::present) {
      tensor_map_prefetch(&b_map);
      mbarrier_init(ring.listed, 1);
    }
    mbarrier_init_fence();
    if (part.shared && size > 1) {
      const uint32_t bytes = (size - 1) * ring.blocks_of(rank) * ring.block_bytes;
      for (int group = 0; group < groups; ++group) mbarrier_arrive_expect(ring.received + 8 * group, bytes);
    }
  }
  __syncthreads();
  cluster_arrive();
  launch_dependents();
  if (producer) {
    const ClusterLoads<T, BN, KC, MT, GATED> load{w_map, x_map, ring};
    if constexpr (Adapters::present) {
      produce_adapted<T, BN, KC, MT, GATED>(load, part, ring, g, b_map, adapters);
    } else if (threadIdx.x % 32 == 0) {
      produce<T, BN, KC, MT, GATED>(load, part, ring, g.stages);
    }
  } else {
    consume<T, BN, KC, MT, GATED>(g, part, ring, adapters);
  }
}

}  // namespace stoker

// Two CTAs share an SM (but the largest): this kernel's and the next one's, which fills its ring meanwhile.
#define STOKER_SM90_GEMM_CLUSTER(NAME, T, BN, KC, MT)                                                              \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, (BN) * (MT) < 128 * 128 ? 2 : 1)                                 \
      NAME##_n##BN##_c##KC##_m##MT(const __grid_constant__ CUtensorMap w_map,                                      \
                                   const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::GemmArguments g) { \
    stoker::sm90_gemm_cluster<T, BN, KC, MT>(w_map, x_map, g, w_map);                                                     \
  }

#define STOKER_SM90_GEMM_CLUSTER_ADAPTED(NAME, GATED, BN, KC, MT)                                                      \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, 2) NAME##_n##BN##_c##KC##_m##MT(                         \
      const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                            \
      const __grid_constant__ CUtensorMap b_map, const __grid_constant__ stoker::GemmArguments g,                      \
      const __grid_constant__ stoker::AdapterArguments adapters) {                                                     \
    stoker::sm90_gemm_cluster<__nv_bfloat16, BN, KC, MT, GATED>(w_map, x_map, g, b_map, adapters);                     \
  }
