// y = x · Wᵀ + bias for up to 16 tokens and weights in GGUF's planes, where the bytes of the weight are the limit.
//
// A cluster has some tiles of 16 rows, its CTAs share the columns, and so do the eight warps of each: a warp keeps x of one
// or two steps of 256 columns in registers and takes them of a tile after the other, its units coming by copies of its own
// into a ring of its own. What the warps found of a tile is added in their order, then what the CTAs found. Weights are
// requested before the kernel before is done.
#pragma once
#include "block_copies.cuh"

namespace stoker {

constexpr int BLOCK_WARPS = SLICE_STEPS, BLOCK_THREADS = BLOCK_WARPS * 32;

// Two CTAs find room in an SM.
template <int N_TILES>
struct FewTokens {
  static constexpr int TOKENS = 8 * N_TILES, SLICES = N_TILES > 1 ? 1 : 2;
  static constexpr int SHARED_BYTES = 113 * 1024, CHUNK_TILES = N_TILES == 2 ? 12 : 16;
};

// The rings and the sums in shared memory.
template <class F, int N_TILES>
struct BlockShared {
  using T = FewTokens<N_TILES>;
  static constexpr int SUM_STRIDE = UNIT_ROWS + 4, WARP_SUMS = T::TOKENS * SUM_STRIDE, RESULTS = T::TOKENS * UNIT_ROWS;
  static constexpr int SUM_BYTES = 4 * T::TOKENS * (2 * BLOCK_WARPS * SUM_STRIDE + T::CHUNK_TILES * UNIT_ROWS);
  // Tiles ahead in a warp's ring.
  static constexpr int DEPTH = (T::SHARED_BYTES - SUM_BYTES) / (BLOCK_WARPS * T::SLICES * F::UNIT_BYTES);
  float* sums;   // [2][warps][tokens][SUM_STRIDE], of tiles in turn
  float* whole;  // [tiles of a chunk][tokens][16], where a cluster shares the columns
  unsigned char* ring;

  __device__ __forceinline__ BlockShared(unsigned char* raw, int warp) {
    sums = reinterpret_cast<float*>(raw);
    whole = sums + 2 * BLOCK_WARPS * WARP_SUMS;
    ring = raw + SUM_BYTES + warp * DEPTH * T::SLICES * F::UNIT_BYTES;
  }
};

// What the warps found of a tile → the result, or what the cluster adds up: by one warp.
template <class F, int N_TILES>
__device__ __forceinline__ void finish_tile(const BlockArguments& p, const BlockShared<F, N_TILES>& s, int buffer, int tile,
                                            int lane, float* whole) {
  using S = BlockShared<F, N_TILES>;
#pragma unroll
  for (int at = lane; at < S::RESULTS / 4; at += 32) {
    const int token = at / (UNIT_ROWS / 4), row = at % (UNIT_ROWS / 4) * 4;
    const float* found = s.sums + buffer * BLOCK_WARPS * S::WARP_SUMS + token * S::SUM_STRIDE + row;
    float4 sum = *reinterpret_cast<const float4*>(found);
#pragma unroll
    for (int warp = 1; warp < BLOCK_WARPS; warp++) add(sum, *reinterpret_cast<const float4*>(found + warp * S::WARP_SUMS));
    if (p.split > 1) {
      *reinterpret_cast<float4*>(whole + at * 4) = sum;
    } else {
      store_sums(p, token, tile * UNIT_ROWS + row, sum);
    }
  }
}

template <class F, int N_TILES>
__device__ __forceinline__ void blocks_few(const BlockArguments& p) {
  using S = BlockShared<F, N_TILES>;
  constexpr int SLICES = S::T::SLICES, CHUNK = S::T::CHUNK_TILES, UNITS = S::DEPTH * SLICES;
  extern __shared__ unsigned char raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = p.n / UNIT_ROWS;
  const int rank = blockIdx.x % p.split, cluster = blockIdx.x / p.split, clusters = gridDim.x / p.split;
  const int from = static_cast<int64_t>(cluster) * tiles / clusters;
  const int to = static_cast<int64_t>(cluster + 1) * tiles / clusters;
  const int each = (p.steps + p.split - 1) / p.split, step = rank * each + warp;
  const int own = min((rank + 1) * each, p.steps) - step;  // more than 0: the warp has a step; than BLOCK_WARPS: two
  const S s(raw, warp);
  const uint64_t policy = policy_evict_first();
  UnitSource<F> source(p, from, own > 0 ? step : 0, lane);
  int asked = from;  // tiles
  const auto ask = [&](int place, int slice) {
    if (asked < to && own > slice * BLOCK_WARPS) {
      source.send(shared_address(s.ring) + (place * SLICES + slice) * F::UNIT_BYTES, slice, lane, policy);
    }
    copies_commit();
    if (slice + 1 == SLICES) {
      source.next_tile(lane);
      asked++;
    }
  };
#pragma unroll 1
  for (int i = 0; i < S::DEPTH; i++) {
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) ask(i, slice);
  }
  launch_dependents();
  grid_dependency_wait();

  // In a register, as the compiler cannot know it: an instruction has one constant.
  const uint32_t magic = p.m > 0 ? 0x4B000000u : 0u;
  BlockX<F, N_TILES> x[SLICES];
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    if (own > slice * BLOCK_WARPS) {
      x[slice].read(p.x + (step + slice * BLOCK_WARPS) * UNIT_COLUMNS, p.ld_x, p.m, lane);
    }
  }
  int place = 0, of_chunk = 0;
#pragma unroll 1
  for (int tile = from; tile < to; tile++) {
    float total[N_TILES][4] = {};
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      copies_wait_group<UNITS - 1>();
      __syncwarp();
      if (own > slice * BLOCK_WARPS) {
        const unsigned char* unit = s.ring + (place * SLICES + slice) * F::UNIT_BYTES;
        multiply_unit<F, N_TILES>({unit, unit + F::LOW_BYTES, unit + F::LOW_BYTES + F::HIGH_BYTES}, x[slice], total, lane,
                                  magic, [&] {
                                    __syncwarp();
                                    ask(place, slice);
                                  });
      } else {
        ask(place, slice);
      }
    }
    if (++place == S::DEPTH) place = 0;
    const int turn = (tile - from) % 2;
    float* mine = s.sums + (turn * BLOCK_WARPS + warp) * S::WARP_SUMS + lane % 4 * 2 * S::SUM_STRIDE + lane_row(lane);
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) mine[(n * 8 + i % 2) * S::SUM_STRIDE + i / 2 * 8] = total[n][i];
    __syncthreads();
    if ((tile - from) % BLOCK_WARPS == warp) {
      finish_tile<F, N_TILES>(p, s, turn, tile, lane, s.whole + of_chunk * S::RESULTS);
    }
    if (p.split > 1 && (++of_chunk == CHUNK || tile + 1 == to)) {
      store_shares<S::T::TOKENS, BLOCK_THREADS>(p, s.whole, rank, tile + 1 - of_chunk, of_chunk);
      of_chunk = 0;
    }
  }
}

}  // namespace stoker
