// y[M, N] = x[M, K] · W[N, K]ᵀ for 33 to 128 tokens, for sm_90a: where x, read once for every tile of rows, weighs on L2
// as W weighs on HBM. A cluster is `share` neighbouring tiles of BN rows × `split` parts of K, and a CTA multiplies one
// part of one tile. The CTAs of a part read the same x: each loads its share of the tokens and multicasts it to all, so
// that x crosses L2 once for share · BN rows. The CTAs of a tile exchange their sums through distributed shared memory, by
// st.async, which is an illegal instruction in a launch without clusters: a cluster has two CTAs or more.
//
// A cluster has no second tile, so after the last k block the ring is free: sums and staging lie where it was, behind a
// barrier of the cluster that says that every CTA has read its ring.
//
// Adapters: what they add to a tile is a further part of a CTA's k blocks, behind them (gemm_adapters.cuh).
//
// Swapped: 64 rows of W are wgmma's M side, the tokens its N side. One producer thread streams W and x by TMA into a
// ring of `stages` k blocks of 128 bytes, filled with W before the wait for the previous kernel; BN / 64 consumer
// warpgroups multiply. In shared memory R rows are R × 128 bytes in the 128-byte swizzle, on a multiple of 1024 bytes.
#pragma once
#include <cuda.h>

#include "gemm_adapters.cuh"
#include "sm90_chunk.cuh"
#include "wgmma.cuh"

namespace stoker {

// Where a CTA keeps what it sums: of each part of K, group and block of its own [split][groups][owned] blocks.
template <int BN, int MT>
struct PartSums {
  static constexpr int groups = BN / GROUP_ROWS, blocks = MT / 8;
  static constexpr int block_bytes = GROUP_THREADS * 16;  // a group's fp32 sums of one block of 8 tokens
  int split, owned;                                       // most blocks that one CTA of a tile sums

  __device__ explicit PartSums(int split_) : split(split_), owned((blocks + split_ - 1) / split_) {}
  __device__ int bytes() const { return split * groups * owned * block_bytes; }
  __device__ int offset(int part, int group, int index) const {
    return ((part * groups + group) * owned + index) * block_bytes;
  }
  // Bytes that a group of part `part` receives, its own too.
  __device__ int received(int part) const { return split * ((blocks - 1 - part) / split + 1) * block_bytes; }
};

// [stages of W and x][full][empty][received barriers], with adapters [a barrier][their pairs][s]; in the end the parts' sums
// and staging lie on the stages, and the barriers behind whichever is longer. small.py reserves as much.
template <int BN, int MT>
struct MulticastRing {
  static constexpr int w_bytes = BN * 128, x_bytes = MT * 128, stage_bytes = w_bytes + x_bytes;

  uint32_t base, full, empty, received, listed;
  unsigned char* pointer;  // to base
  PairList* list;

  __device__ MulticastRing(unsigned char* raw, int stages, int split) {
    const PartSums<BN, MT> sums(split);
    const uint32_t start = shared_address(raw);
    base = (start + 1023) & ~1023u;
    pointer = raw + (base - start);
    full = base + max(stages * stage_bytes, sums.bytes() + sums.groups * MT * STAGING_PITCH);
    empty = full + 8 * stages;
    received = empty + 8 * stages;
    listed = received + 16;
    list = reinterpret_cast<PairList*>(raw + (listed + 8 - start));
  }
  __device__ uint32_t w(int stage) const { return base + stage * stage_bytes; }
  __device__ uint32_t x(int stage) const { return base + stage * stage_bytes + w_bytes; }
};

// What a CTA multiplies: k blocks [begin, end) of one tile. Ranks of a part are neighbours.
struct MulticastPart {
  int share, split, member, part, tile, begin, end;

  __device__ MulticastPart(int rank, int size, int share_, int k_blocks)
      : share(share_), split(size / share_), member(rank % share_), part(rank / share_) {
    tile = blockIdx.x / size * share + member;
    begin = part * k_blocks / split;
    end = (part + 1) * k_blocks / split;
  }
};

template <typename T, int BN, int MT, typename Adapters>
__device__ __forceinline__ void produce_multicast(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                                  const MulticastPart& mine, const MulticastRing<BN, MT>& ring,
                                                  const GemmArguments& g, const CUtensorMap& b_map,
                                                  const Adapters& adapters) {
  const uint64_t once = policy_evict_first(), keep = policy_evict_last();
  const int units = mine.end - mine.begin, stages = g.stages, ahead = min(units, stages), tokens = MT / mine.share;
  const auto everyone = static_cast<uint16_t>(((1 << mine.share) - 1) << mine.part * mine.share);
  auto load_w = [&](int i, int stage) {
    mbarrier_arrive_expect(ring.full + 8 * stage, ring.stage_bytes);
    tensor_load_2d(ring.w(stage), &w_map, (mine.begin + i) * Chunk<T>::elements, mine.tile * BN, ring.full + 8 * stage, once);
  };
  auto load_x = [&](int i, int stage) {
    const int k = (mine.begin + i) * Chunk<T>::elements, first = mine.member * tokens;
    if (mine.share == 1) {
      tensor_load_2d(ring.x(stage), &x_map, k, 0, ring.full + 8 * stage, keep);
    } else {
      tensor_multicast_2d(ring.x(stage) + first * 128, &x_map, k, first, ring.full + 8 * stage, everyone, keep);
    }
  };
  const bool issues = threadIdx.x % 32 == 0;
  typename Adapters::Tile tile;
  if (adapters.planned) tile.load_slot(adapters);
  if (issues) {
    for (int i = 0; i < ahead; ++i) load_w(i, i);
  }
  __syncwarp();
  cluster_wait();  // every CTA of the cluster has started and set up its barriers
  if (!adapters.planned) {
    grid_dependency_wait();
    tile.load_slot(adapters);
  }
  tile.load_ranks(adapters);
  if (issues) {
    adapters.wait_for_x();
    proxy_fence_async_global();
    for (int i = 0; i < ahead; ++i) load_x(i, i);
  }
  if constexpr (Adapters::present) {
    __syncwarp();
    list_pairs(tile, *ring.list, mine.part, mine.split);
    if (issues) mbarrier_arrive(ring.listed);
  }
  if (!issues) return;
  int stage = ahead == stages ? 0 : ahead;
  // Of the stage's release, by all CTAs of the part, that allows its next use; there is none before the first.
  uint32_t parity = ahead == stages ? 0 : 1;
  for (int i = ahead; i < units; ++i) {
    mbarrier_wait(ring.empty + 8 * stage, parity);
    load_w(i, stage);
    load_x(i, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  if constexpr (Adapters::present) {
    using Pairs = PairStage<BN, 1, false>;
    for (int at = 0; at < ring.list->count[1]; at += Pairs::most) {
      mbarrier_wait(ring.empty + 8 * stage, parity);
      Pairs::load(ring.w(stage), ring.full + 8 * stage, b_map, adapters, g.m, *ring.list, 1, at, mine.tile, at == 0, once);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
    grid_dependency_wait();  // who waits for the end of this grid waits for that of those before
  }
}

// Multiplies this CTA's part of K, and adds its part of what adapters do.
template <typename T, int BN, int MT, typename Adapters>
__device__ __forceinline__ void multiply_part(const GemmArguments& g, const MulticastPart& mine,
                                              const MulticastRing<BN, MT>& ring, int group, const Adapters& adapters,
                                              typename Chunk<T>::Sum (&acc)[MT / 2]) {
  using Pairs = PairStage<BN, 1, false>;
  const int lane = threadIdx.x % 32, stages = g.stages, units = mine.end - mine.begin;
  const int row = mine.tile * BN + group * GROUP_ROWS;
  int all = units;  // with the stages of pairs
  bool listed = !Adapters::present;
  auto release = [&](int i, int stage) {  // in every CTA of the part: each one's producer writes to all
    if (i + stages >= all && !listed) {
      mbarrier_wait(ring.listed, 0);
      all += (ring.list->count[1] + Pairs::most - 1) / Pairs::most;
      listed = true;
    }
    if (i + stages >= all) return;  // only for those who wait: a CTA whose producer is done may have ended
    if (mine.share == 1) {
      if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
    } else if (lane < mine.share) {
      mbarrier_arrive_cluster(cluster_address(ring.empty + 8 * stage, mine.part * mine.share + lane));
    }
  };
  typename Adapters::template Tokens<MT, false> tokens(adapters, g.m, ring.list);
  int stage = 0, held = 0;  // held: the stage before
  uint32_t parity = 0;
  for (int i = 0; i < units; ++i) {
    mbarrier_wait(ring.full + 8 * stage, parity);
    const uint64_t w = wgmma_descriptor(ring.w(stage) + group * GROUP_ROWS * 128), x = wgmma_descriptor(ring.x(stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) Wgmma<T, MT>::multiply(acc, w + step * 2, x + step * 2, i + step != 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) release(i - 1, held);
    held = stage;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
  wgmma_results(acc);
  if constexpr (Adapters::present) {
    release(units - 1, held);
    for (int at = 0, i = units; i < all; at += Pairs::most, ++i) {
      mbarrier_wait(ring.full + 8 * stage, parity);
      tokens.template add<BN, 1>(*ring.list, 1, at, ring.w(stage), group, row, g.n, acc);
      __syncwarp();
      release(i, stage);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
  }
}

// Sends every block of `acc`, block j to the CTA of the tile whose part is j % split, and stores the sums of this CTA's
// blocks. They run over the parts in order, whoever sums: a token's bits do not depend on its place.
template <int BN, int MT, typename S>
__device__ __forceinline__ void sum_and_store(const GemmArguments& g, const MulticastPart& mine,
                                              const MulticastRing<BN, MT>& ring, int group, const RowScales& rows,
                                              const S (&acc)[MT / 2]) {
  using Four = typename Scaled<S>::Four;
  const PartSums<BN, MT> sums(mine.split);
  const int t = threadIdx.x % GROUP_THREADS, row = mine.tile * BN + group * GROUP_ROWS;
  int to = 0, place = sums.offset(mine.part, group, 0) + t * 16;
#pragma unroll
  for (int j = 0; j < MT / 8; ++j) {
    const int rank = to * mine.share + mine.member;
    store_async(cluster_address(ring.base + place, rank), acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3],
                cluster_address(ring.received + 8 * group, rank));
    if (++to == mine.split) to = 0, place += sums.block_bytes;
  }
  unsigned char* staging = ring.pointer + sums.bytes() + group * MT * STAGING_PITCH;
  mbarrier_wait_cluster(ring.received + 8 * group, 0);
  int index = 0;
#pragma unroll 1
  for (int j = mine.part; j < MT / 8; j += mine.split, ++index) {
    S sum[4] = {};
#pragma unroll 4
    for (int part = 0; part < mine.split; ++part) {
      const Four v = *reinterpret_cast<const Four*>(ring.pointer + sums.offset(part, group, index) + t * 16);
      sum[0] += v.x;
      sum[1] += v.y;
      sum[2] += v.z;
      sum[3] += v.w;
    }
    stage_block(g, rows, j, sum, staging);
  }
  named_barrier(1 + group, GROUP_THREADS);
  store_blocks<MT>(g, row, staging, mine.part, mine.split);
}

// `b_map`: of adapters; without any it is not used.
template <typename T, int BN, int MT, typename Adapters = NoAdapters>
__device__ __forceinline__ void sm90_gemm_multicast(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                                    const GemmArguments& g, const CUtensorMap& b_map,
                                                    const Adapters& adapters = {}) {
  extern __shared__ unsigned char raw[];
  constexpr int groups = BN / GROUP_ROWS;
  const MulticastPart mine(cluster_rank(), cluster_size(), g.share, g.k_blocks);
  const MulticastRing<BN, MT> ring(raw, g.stages, mine.split);
  const bool producer = threadIdx.x >= groups * GROUP_THREADS;
  if (producer && threadIdx.x % 32 == 0) {
    tensor_map_prefetch(&w_map);
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < g.stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, mine.share * groups * 4);  // one arrival per consumer warp of the part
    }
    for (int group = 0; group < groups; ++group) mbarrier_init(ring.received + 8 * group, 1);
    if constexpr (Adapters::present) {
      tensor_map_prefetch(&b_map);
      mbarrier_init(ring.listed, 1);
    }
    mbarrier_init_fence();
    const uint32_t bytes = PartSums<BN, MT>(mine.split).received(mine.part);
    for (int group = 0; group < groups; ++group) mbarrier_arrive_expect(ring.received + 8 * group, bytes);
  }
  __syncthreads();
  cluster_arrive();
  launch_dependents();
  if (producer) return produce_multicast<T, BN, MT>(w_map, x_map, mine, ring, g, b_map, adapters);
  const int group = threadIdx.x / GROUP_THREADS;
  const RowScales rows(g, mine.tile * BN + group * GROUP_ROWS);  // weights as W is: no need to wait
  typename Chunk<T>::Sum acc[MT / 2];
  cluster_wait();
  if constexpr (!Adapters::present) grid_dependency_wait();
  multiply_part<T, BN, MT>(g, mine, ring, group, adapters, acc);
  cluster_arrive();  // this CTA has read its ring, and nothing is on the way to it
  cluster_wait();
  sum_and_store<BN, MT>(g, mine, ring, group, rows, acc);
}

}  // namespace stoker

// Two CTAs share an SM: this kernel's and the next one's, which fills its ring meanwhile.
#define STOKER_SM90_GEMM_MULTICAST(NAME, T, BN, MT)                                                                \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, 2)                                                   \
      NAME##_n##BN##_c1_m##MT(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, \
                              const __grid_constant__ stoker::GemmArguments g) {                                   \
    stoker::sm90_gemm_multicast<T, BN, MT>(w_map, x_map, g, w_map);                                                \
  }

#define STOKER_SM90_GEMM_MULTICAST_ADAPTED(NAME, BN, MT)                                                               \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, 2) NAME##_n##BN##_c1_m##MT(                              \
      const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                            \
      const __grid_constant__ CUtensorMap b_map, const __grid_constant__ stoker::GemmArguments g,                      \
      const __grid_constant__ stoker::AdapterArguments adapters) {                                                     \
    stoker::sm90_gemm_multicast<__nv_bfloat16, BN, MT>(w_map, x_map, g, b_map, adapters);                              \
  }
