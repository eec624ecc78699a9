// Experts for many tokens, for sm_90a: the products are the limit, or the bytes of all experts, read once.
//
// Gate-up gives activation(x · gateᵀ, x · upᵀ) of every pair of token and choice in the plan's order, down the product of
// that with down's rows, each at its pair's place; who sums a token's pairs runs behind them. A CTA multiplies 128 pairs
// of one expert (wgmma's M side, 64 a consumer warpgroup) with 256 rows of its weight, of gate-up 128 of gate and 128 of
// up, which TMA lays side by side by eights, so that a thread has gate and up of the same columns in its sums. A group
// whose 64 pairs the expert does not have multiplies nothing.
//
// A fourth of the threads fills the ring: the weight by TMA. Of gate-up, they bring rows of x from where the tokens are,
// by cp.async into the swizzle that wgmma reads; the copies arrive at the barrier by themselves when they have landed. Of
// down, rows follow each other and come by TMA; those behind an expert's are of the next and are not stored. CTAs are
// persistent and find their tiles by themselves from the plan's, whatever tokens those hold.
#pragma once
#include <cuda.h>

#include "grouped_epilogue.cuh"
#include "grouped_tiles.cuh"

namespace stoker {

template <GroupedKind kind, bool GATED>
struct GroupedExperts {
  using T = typename GroupedElement<kind>::type;
  static constexpr int ROWS = GROUPED_ROWS, COLUMNS = GATED ? ROWS / 2 : ROWS;  // of the weight and the result in a tile

  const GroupedArguments& a;
  const CUtensorMap &w_map, &x_map;
  const GroupedRing ring;
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ GroupedExperts(const GroupedArguments& arguments, const CUtensorMap& w, const CUtensorMap& x,
                                            unsigned char* raw)
      : a(arguments), w_map(w), x_map(x), ring(raw, arguments.stages) {}

  __device__ __forceinline__ void run() const {
    const bool producer = threadIdx.x >= GROUPED_CONSUMERS;
    if (threadIdx.x == GROUPED_CONSUMERS) {
      tensor_map_prefetch(&w_map);
      tensor_map_prefetch(&x_map);
      for (int s = 0; s < a.stages; ++s) {
        mbarrier_init(ring.full + 8 * s, GATED ? 1 + GROUPED_PRODUCERS : 1);  // of W, and of all that bring rows of x
        mbarrier_init(ring.empty + 8 * s, 4 * GROUPED_GROUPS);  // of each warp that multiplies
      }
      mbarrier_init_fence();
    }
    // The plan is complete for down before the kernel before it is: gate-up lets it start only when it has waited.
    if (GATED) grid_dependency_wait();
    launch_dependents();
    find_places();
    if (producer) {
      registers_shrink<40>();
      if (GATED) {
        bring_rows();
      } else if (threadIdx.x == GROUPED_CONSUMERS) {
        bring_blocks();
      }
    } else {
      registers_grow<232>();
      if (!GATED) grid_dependency_wait();
      multiply();
    }
  }

  // Each expert's places in the order, from the plan's tiles.
  __device__ __forceinline__ void find_places() const {
    for (int i = threadIdx.x; i < a.experts; i += GROUPED_THREADS) ring.places[i] = {0x7FFFFFFF, 0};
    __syncthreads();
    for (int i = threadIdx.x; i < a.num_tiles; i += GROUPED_THREADS) {
      const int expert = load_int(a.tiles + 3 * i) - a.first_expert;
      const int first = load_int(a.tiles + 3 * i + 1), end = load_int(a.tiles + 3 * i + 2);
      if (first >= end || expert < 0 || expert >= a.experts) continue;
      atomicMin(&ring.places[expert].x, first);
      atomicMax(&ring.places[expert].y, end);
    }
    __syncthreads();
  }

  // Asks for the rows of the weight of a k block.
  __device__ __forceinline__ void load_w(const GroupedTile& tile, int k_block, int stage, uint32_t bytes) const {
    const uint32_t full = ring.full + 8 * stage;
    const int k = k_block * Chunk<T>::elements, from = tile.expert * a.rows + tile.row_block * COLUMNS;
    mbarrier_arrive_expect(full, bytes);
    if constexpr (GATED) {
      tensor_load_4d(ring.w(stage), &w_map, k, 0, 0, from / 8, full, policy_evict_normal());
    } else {
      tensor_load_2d(ring.w(stage), &w_map, k, from, full, policy_evict_normal());
    }
  }

  // Gate-up: four warps, 16 neighbouring rows of x at a time, of which each takes four, eight lanes a row. Lanes keep
  // where their warp's rows start, in 16 bytes: lane 4i + j that of its j-th of the i-th 16.
  __device__ __forceinline__ void bring_rows() const {
    constexpr int SIXTEENS = GROUPED_TOKENS / 16;
    const int warp = threadIdx.x / 32 - GROUPED_CONSUMERS / 32;
    GroupedWalk walk(a, ring.places);
    GroupedStage stage(1);
    constexpr int OF_LANE = (SIXTEENS + 7) / 8;  // rows whose start a lane keeps
    int pairs[OF_LANE];
    auto load_pairs = [&] {
#pragma unroll
      for (int i = 0; i < OF_LANE; ++i) {
        const int row = (i * 8 + lane / 4) * 16 + warp * 4 + lane % 4;
        pairs[i] = load_int(a.order + walk.tile.first + max(0, min(row, walk.tile.count - 1)));
      }
    };
    bool more = walk.next();
    if (more) load_pairs();
    while (more) {
      const GroupedTile tile = walk.tile;
      int starts[OF_LANE];
#pragma unroll
      for (int i = 0; i < OF_LANE; ++i) starts[i] = pairs[i] / a.top_k * (a.ld_x / 16);
      more = walk.next();
      if (more) load_pairs();  // they arrive while this tile's rows are brought
      for (int kb = 0; kb < a.k_blocks; ++kb, stage.step(a.stages)) {
        mbarrier_wait(ring.empty + 8 * stage.at, stage.parity);
        if (threadIdx.x == GROUPED_CONSUMERS) load_w(tile, kb, stage.at, GroupedRing::w_bytes);
        __syncwarp();
        const int chunk = lane % 8;
        const bool there = kb * 128 + chunk * 16 < a.x_bytes;
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) {
          if (i * 16 >= tile.count) break;
          const int row = i * 16 + warp * 4 + lane / 8;
          const int start = __shfl_sync(0xFFFFFFFFu, starts[i / 8], i % 8 * 4 + lane / 8);
          copy_async_16(ring.x(stage.at) + row * 128 + (chunk ^ row % 8) * 16,
                        a.x + static_cast<int64_t>(there ? start + kb * 8 + chunk : start) * 16, there);
        }
        copies_arrive(ring.full + 8 * stage.at);
      }
    }
  }

  // Down, one thread: the ring fills with the weight before the wait for gate-up.
  __device__ __forceinline__ void bring_blocks() const {
    GroupedWalk walk(a, ring.places), walk_x(a, ring.places);
    auto load_x = [&](const GroupedTile& tile, int k_block, int stage) {
#pragma unroll
      for (int g = 0; g < GROUPED_GROUPS; ++g) {
        if (g * 64 >= tile.count) break;
        tensor_load_2d(ring.x(stage) + g * 64 * 128, &x_map, k_block * Chunk<T>::elements, tile.first + g * 64,
                       ring.full + 8 * stage, policy_evict_normal());
      }
    };
    auto bytes = [&](const GroupedTile& tile) {
      return static_cast<uint32_t>(GroupedRing::w_bytes + (tile.count + 63) / 64 * 64 * 128);
    };
    int ahead = 0;
    bool waited = false;
    GroupedStage stage(1), stage_x(1);
    auto wait_and_catch_up = [&] {
      grid_dependency_wait();
      proxy_fence_async_global();
      waited = true;
      while (ahead > 0 && walk_x.next()) {
        for (int kb = 0; kb < a.k_blocks && ahead > 0; ++kb, --ahead, stage_x.step(a.stages)) {
          load_x(walk_x.tile, kb, stage_x.at);
        }
      }
    };
    while (walk.next()) {
      for (int kb = 0; kb < a.k_blocks; ++kb, stage.step(a.stages)) {
        if (!waited && ahead == a.stages) wait_and_catch_up();
        mbarrier_wait(ring.empty + 8 * stage.at, stage.parity);
        load_w(walk.tile, kb, stage.at, bytes(walk.tile));
        if (waited) {
          load_x(walk.tile, kb, stage.at);
        } else {
          ++ahead;
        }
      }
    }
    if (!waited) wait_and_catch_up();
  }

  __device__ __forceinline__ void release(int stage) const {
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
  }

  // For a stage's operands. Rows of x were written by threads' copies, and wgmma reads by another proxy.
  __device__ __forceinline__ void await(const GroupedStage& stage) const {
    mbarrier_wait(ring.full + 8 * stage.at, stage.parity);
    if (GATED) proxy_fence_async_shared();
  }

  __device__ __forceinline__ void multiply() const {
    const int group = threadIdx.x / 128;
    GroupedWalk walk(a, ring.places);
    GroupedStage stage(0);
    float sums[ROWS / 2];
    while (walk.next()) {
      const GroupedTile tile = walk.tile;
      if (group * 64 >= tile.count) {
        for (int kb = 0; kb < a.k_blocks; ++kb, stage.step(a.stages)) {
          mbarrier_wait(ring.full + 8 * stage.at, stage.parity);
          __syncwarp();
          release(stage.at);
        }
        continue;
      }
      const GroupedPlaces<kind, GATED> mine(a, tile, group);
      if constexpr (kind == GroupedKind::CHANNEL) prefetch_scales<GATED>(a, tile, tile.row_block * COLUMNS, COLUMNS);
      if constexpr (kind == GroupedKind::BLOCK) {
        sum_blocks(tile, group, stage, sums);
      } else {
        sum_all(group, stage, sums);
      }
      finish<kind, GATED>(a, tile, tile.row_block * COLUMNS, mine, sums);
    }
  }

  __device__ __forceinline__ void sum_all(int group, GroupedStage& stage, float (&sums)[ROWS / 2]) const {
    int held = -1;  // the stage whose products may still run
    for (int kb = 0; kb < a.k_blocks; ++kb, stage.step(a.stages)) {
      await(stage);
      const uint64_t x = wgmma_descriptor(ring.x(stage.at) + group * 64 * 128), w = wgmma_descriptor(ring.w(stage.at));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) Wgmma<T, ROWS>::multiply(sums, x + step * 2, w + step * 2, kb + step != 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (held >= 0) release(held);
      held = stage.at;
    }
    wgmma_wait<0>();
    wgmma_results(sums);
    release(held);
  }

  // A k block is one of the scales' blocks: its products with half of the rows at a time are scaled and added, while those
  // of the other group run. Of gate-up both halves have the columns of one block of gate and of one of up.
  __device__ __forceinline__ void sum_blocks(const GroupedTile& tile, int group, GroupedStage& stage,
                                             float (&sums)[ROWS / 2]) const {
    constexpr int HALF = ROWS / 2;
    const int wide = (a.n + 127) / 128;  // blocks of the result's columns
    const float* scale = a.w_scale + static_cast<int64_t>(tile.expert) * (GATED ? 2 : 1) * wide * a.k_blocks;
    const float* const first = scale + (GATED ? tile.row_block : 2 * tile.row_block) * a.k_blocks;
    const float* const second = GATED ? first + wide * a.k_blocks : scale + min(2 * tile.row_block + 1, wide - 1) * a.k_blocks;
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
    float next[2] = {*first, *second};
    for (int kb = 0; kb < a.k_blocks; ++kb, stage.step(a.stages)) {
      const float now[2] = {next[0], next[1]};
      const int following = min(kb + 1, a.k_blocks - 1);
      next[0] = first[following], next[1] = second[following];
      await(stage);
      const uint64_t x = wgmma_descriptor(ring.x(stage.at) + group * 64 * 128), w = wgmma_descriptor(ring.w(stage.at));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[HALF / 2];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Wgmma<T, HALF>::multiply(part, x + step * 2, w + half * HALF * 8 + step * 2, step != 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_results(part);
        if (half == 1) release(stage.at);
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) sums[half * HALF / 2 + i] += part[i] * now[GATED ? i / 4 % 2 : half];
      }
    }
  }
};

template <GroupedKind kind, bool GATED>
__device__ __forceinline__ void sm90_grouped_experts(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                                     const GroupedArguments& a) {
  extern __shared__ unsigned char raw[];
  GroupedExperts<kind, GATED>(a, w_map, x_map, raw).run();
}

}  // namespace stoker

#define STOKER_SM90_GROUPED_EXPERTS(name, kind, gated)                                                          \
  extern "C" __global__ void __launch_bounds__(stoker::GROUPED_THREADS, 1)                                      \
      name(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                \
           const __grid_constant__ stoker::GroupedArguments a) {                                                \
    stoker::sm90_grouped_experts<stoker::GroupedKind::kind, gated>(w_map, x_map, a);                            \
  }
