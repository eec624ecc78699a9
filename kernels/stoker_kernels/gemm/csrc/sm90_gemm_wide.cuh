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

#include "gemm_epilogue.cuh"
#include "sm90_chunk.cuh"
#include "store_eights.cuh"
#include "wgmma.cuh"

namespace stoker {

constexpr int WIDE_GROUP = 2048;  // tokens that go together through the rows of W, so that both stay in L2

// Which order sums have: any that is fast, that of a CTA that multiplies all of K, or that of `parts` CTAs.
enum class WideOrder { Any, Whole, Parts };

struct WideArguments {
  __nv_bfloat16* out;  // [m, n], rows ld_out apart
  // Scales of e4m3 alone, a bias too in WideOrder::Any; a gated product has no bias.
  const __nv_bfloat16* bias;  // [n] or null
  const float* w_scale;       // [rows of W], at steps of w_scale_step (0: one scale for all; not in WideOrder::Any)
  const float* x_scale;       // [m]
  int m, n, ld_out;           // n: columns of the result
  int row_blocks, token_blocks, k_blocks, stages;  // blocks: of both CTAs' rows or tokens
  int by_tokens;                                   // what a cluster's CTAs share: 0: x, 1: W
  int w_scale_step, parts;                         // parts of K, of which each k block belongs to one
};

// 2 · HALF rows × 64 · GROUPS tokens, the sizes of a tile.
template <int HALF_, int GROUPS_>
struct WideSize {
  static constexpr int HALF = HALF_, GROUPS = GROUPS_, TOKENS = 64 * GROUPS, CONSUMERS = GROUPS * GROUP_THREADS;
  // An SM's registers by warpgroups: 64 tokens × 288 rows need more than a third of them. Two have all that they can.
  static constexpr bool SHARES_REGISTERS = GROUPS > 1;
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 56 : 40, CONSUMER_REGISTERS = GROUPS == 3 ? 152 : 232;
};

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

// A CTA's part of a cluster's tile: its first row of W and its first token.
template <typename SIZE>
struct WideTile {
  int row, token;

  // Tiles in an order that takes WIDE_GROUP tokens through all rows before the next.
  __device__ WideTile(const WideArguments& g, int index, int rank) {
    const int group = WIDE_GROUP / SIZE::TOKENS >> g.by_tokens;
    const int each = group * g.row_blocks, first = index / each * group;
    const int wide = max(1, min(group, g.token_blocks - first)), inside = index % each;  // 1: past the end
    const int row_block = inside / wide, token_block = first + inside % wide;
    row = (g.by_tokens ? row_block : row_block * 2 + rank) * 2 * SIZE::HALF;
    token = (g.by_tokens ? token_block * 2 + rank : token_block) * SIZE::TOKENS;
  }
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

// The first of a consumer thread's two tokens; the other is 8 further.
template <typename SIZE>
__device__ __forceinline__ int token_of(const WideTile<SIZE>& tile) {
  const int t = threadIdx.x;
  return tile.token + t / GROUP_THREADS * 64 + t % GROUP_THREADS / 32 * 16 + t % 32 / 4;
}

// Brings a tile's scales and bias to L1 while it is multiplied, a line a thread.
template <typename SIZE, bool GATED>
__device__ __forceinline__ void prefetch_scales(const WideArguments& g, const WideTile<SIZE>& tile) {
  constexpr int LINE = 32;  // scales
  const int first = LINE * static_cast<int>(threadIdx.x);
  if (first < SIZE::TOKENS) prefetch_l1(g.x_scale + min(tile.token + first, g.m - 1));
  if (first > (GATED ? SIZE::HALF : 2 * SIZE::HALF)) return;  // a line more than it has, for a tile that starts within one
  const int column = min((GATED ? tile.row / 2 : tile.row) + first, g.n - 1);
  prefetch_l1(g.w_scale + column);
  if (GATED) prefetch_l1(g.w_scale + g.n + column);
  if (!GATED && g.bias) prefetch_l1(g.bias + column);
}

// Calls each(pairs, column, from) for this thread's two pairs of sums in every eight of columns: `column` of the result,
// the nearest that there is, and row `from` of W. No branches, so that the loads of a loop run together.
template <typename SIZE, bool GATED, typename Each>
__device__ __forceinline__ void for_eights(const WideArguments& g, const WideTile<SIZE>& tile, float (&sums)[SIZE::HALF],
                                           Each each) {
#pragma unroll
  for (int i = 0; i < SIZE::HALF / 4; ++i) {
    const int first = GATED ? tile.row / 2 + i / 2 * 8 : tile.row + i * 8;
    const int column = min(first + 2 * static_cast<int>(threadIdx.x % 4), g.n - 2);
    each(sums + 4 * i, column, GATED && i % 2 ? g.n + column : column);
  }
}

// Turns a tile's sums into those of scaled operands, plus the bias.
template <typename SIZE, bool GATED>
__device__ __forceinline__ void scale_sums(const WideArguments& g, const WideTile<SIZE>& tile,
                                           float (&sums)[SIZE::HALF]) {
  const int token = token_of(tile);
  const float x_scale[2] = {g.x_scale[min(token, g.m - 1)], g.x_scale[min(token + 8, g.m - 1)]};
  for_eights<SIZE, GATED>(g, tile, sums, [&](float* pairs, int, int from) {
    const float2 scale = *reinterpret_cast<const float2*>(g.w_scale + from);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pairs[2 * h] *= x_scale[h] * scale.x;
      pairs[2 * h + 1] *= x_scale[h] * scale.y;
    }
  });
  if (GATED || !g.bias) return;
  for_eights<SIZE, GATED>(g, tile, sums, [&](float* pairs, int column, int) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(g.bias + column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pairs[2 * h] += __uint_as_float(two << 16);
      pairs[2 * h + 1] += __uint_as_float(two & 0xffff0000u);
    }
  });
}

// What `stage_block` of gemm_epilogue.cuh does with sums before it rounds them.
template <typename T, typename SIZE>
__device__ __forceinline__ void scale_sums_fixed(const WideArguments& g, const WideTile<SIZE>& tile,
                                                 float (&sums)[SIZE::HALF]) {
  const int token = token_of(tile);
  float x_scale[2] = {1.f, 1.f};
  if constexpr (Chunk<T>::scaled) {
    x_scale[0] = g.x_scale[min(token, g.m - 1)];
    x_scale[1] = g.x_scale[min(token + 8, g.m - 1)];
  }
  for_eights<SIZE, false>(g, tile, sums, [&](float* pairs, int column, int) {
    float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f};
    if constexpr (Chunk<T>::scaled) {
      scale[0] = g.w_scale[column * g.w_scale_step];
      scale[1] = g.w_scale[(column + 1) * g.w_scale_step];
    }
    if (g.bias) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(g.bias + column);
      bias[0] = __uint_as_float(two << 16);
      bias[1] = __uint_as_float(two & 0xffff0000u);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = fmaf(pairs[i] * x_scale[i / 2], scale[i % 2], bias[i % 2]);
  });
}

template <typename SIZE, bool GATED, bool APART>
__device__ __forceinline__ void store_wide(const WideArguments& g, const WideTile<SIZE>& tile,
                                           const float (&sums)[SIZE::HALF]) {
  const int first = token_of(tile);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = first + 8 * h;
    const float* of = sums + 2 * h;
    __nv_bfloat16* row = g.out + static_cast<int64_t>(token) * g.ld_out;
    if constexpr (GATED) {
      store_eights<SIZE::HALF / 8>(row, token < g.m, tile.row / 2, g.n,
                                   [&](int i) {
                                     return APART ? silu_times_apart(of + 8 * i, of + 8 * i + 4)
                                                  : silu_times(of + 8 * i, of + 8 * i + 4);
                                   });
    } else {
      store_eights<SIZE::HALF / 4>(row, token < g.m, tile.row, g.n,
                                   [&](int i) { return pack_bf16(of[4 * i], of[4 * i + 1]); });
    }
  }
}

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
  float sums[HALF];
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
            auto& some = reinterpret_cast<float(&)[columns / 2]>(sums[first / 2]);
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
    auto& all = reinterpret_cast<float(&)[HALF]>(ORDER == WideOrder::Parts ? total[0] : sums[0]);
    const WideTile<SIZE> tile(g, index, rank);
    if constexpr (ORDER != WideOrder::Any) {
      if constexpr (!GATED) scale_sums_fixed<T, SIZE>(g, tile, all);
    } else if constexpr (Chunk<T>::scaled) {
      scale_sums<SIZE, GATED>(g, tile, all);
    }
    store_wide<SIZE, GATED, ORDER != WideOrder::Any>(g, tile, all);
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
