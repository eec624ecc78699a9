// y = x · Wᵀ + bias for up to 32 tokens and weights in GGUF's planes.
//
// A cluster has some tiles of 16 rows, its CTAs share the columns. A CTA brings x of its steps to shared memory once, as
// fragments of B; each of its sixteen warps takes whole tiles, its units coming by copies of its own into a ring of its
// own. After a round of tiles the cluster adds up what its CTAs found. Weights are requested before the kernel before is
// done.
#pragma once
#include "block_copies.cuh"

namespace stoker {

constexpr int SOME_WARPS = 16, SOME_THREADS = SOME_WARPS * 32, SOME_N_TILES = 4, SOME_TOKENS = 32;

// x of a step in shared memory: 16 bytes a lane for two tiles of tokens, by step of 16 columns; then its sums.
template <class F>
struct SharedX {
  static constexpr int COLUMN_BYTES = K_STEPS * (SOME_N_TILES / 2) * 512, SUMS = F::PLACES / 4;
  static constexpr int BYTES = COLUMN_BYTES + SOME_N_TILES * SUMS * 128;
  const unsigned char* at;  // of this lane

  __device__ __forceinline__ void columns(int step, uint32_t (&b)[SOME_N_TILES][2]) const {
#pragma unroll
    for (int n = 0; n < SOME_N_TILES; n += 2) {
      const uint4 both = *reinterpret_cast<const uint4*>(at + (step * SOME_N_TILES / 2 + n / 2) * 512);
      b[n][0] = both.x, b[n][1] = both.y, b[n + 1][0] = both.z, b[n + 1][1] = both.w;
    }
  }
  __device__ __forceinline__ void places(int n, uint32_t (&b)[SUMS]) const {
    // A lane has 16 bytes of columns and 4 of sums.
    const unsigned char* own = at - threadIdx.x % 32 * 12 + COLUMN_BYTES;
#pragma unroll
    for (int i = 0; i < SUMS; i++) b[i] = *reinterpret_cast<const uint32_t*>(own + (n * SUMS + i) * 128);
  }
  // A warp writes the part of a tile of tokens.
  static __device__ __forceinline__ void write(unsigned char* step, const BlockX<F, 1>& x, int n, int lane) {
#pragma unroll
    for (int i = 0; i < K_STEPS; i++) {
      uint2* place = reinterpret_cast<uint2*>(step + (i * SOME_N_TILES / 2 + n / 2) * 512 + lane * 16 + n % 2 * 8);
      *place = make_uint2(x.x[i][0][0], x.x[i][0][1]);
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      *reinterpret_cast<uint32_t*>(step + COLUMN_BYTES + (n * SUMS + i) * 128 + lane * 4) = x.sums[0][i];
    }
  }
};

template <class F>
__device__ __forceinline__ void blocks_some(const BlockArguments& p) {
  constexpr int RESULTS = SOME_TOKENS * UNIT_ROWS;  // of a tile
  extern __shared__ unsigned char raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = p.n / UNIT_ROWS;
  const int rank = blockIdx.x % p.split, cluster = blockIdx.x / p.split, clusters = gridDim.x / p.split;
  const int from = static_cast<int64_t>(cluster) * tiles / clusters;
  const int to = static_cast<int64_t>(cluster + 1) * tiles / clusters;
  const int each = (p.steps + p.split - 1) / p.split, first = rank * each;
  const int steps = max(0, min(each, p.steps - first));
  float* sums = reinterpret_cast<float*>(raw);  // [warps][tokens][16]
  unsigned char* x = raw + SOME_WARPS * RESULTS * 4;
  unsigned char* ring = x + each * SharedX<F>::BYTES + warp * p.depth * F::UNIT_BYTES;
  const uint64_t policy = policy_evict_first();

  UnitSource<F> tile_source(p, min(from + warp, tiles - 1), min(first, p.steps - 1), lane), source = tile_source;
  int asked_tile = from + warp, asked_step = 0;
  const auto ask = [&](int place) {
    if (asked_tile < to && steps > 0) {
      source.send(shared_address(ring) + place * F::UNIT_BYTES, 0, lane, policy);
      source.next_step();
      if (++asked_step == steps) {
        asked_step = 0;
        asked_tile += SOME_WARPS;
        tile_source.next_tile(lane, SOME_WARPS);
        source = tile_source;
      }
    }
    copies_commit();
  };
#pragma unroll 1
  for (int i = 0; i < p.depth; i++) ask(i);
  launch_dependents();
  grid_dependency_wait();

#pragma unroll 1
  for (int part = warp; part < steps * SOME_N_TILES; part += SOME_WARPS) {
    const int step = part / SOME_N_TILES, n = part % SOME_N_TILES;
    // Tiles of tokens beyond the last one are zeros.
    const int token = min(n * 8, p.m - 1);
    BlockX<F, 1> own;
    own.read(p.x + static_cast<int64_t>(token) * p.ld_x + (first + step) * UNIT_COLUMNS, p.ld_x, p.m - n * 8, lane);
    SharedX<F>::write(x + step * SharedX<F>::BYTES, own, n, lane);
  }
  __syncthreads();

  // In a register, as the compiler cannot know it: an instruction has one constant.
  const uint32_t magic = p.m > 0 ? 0x4B000000u : 0u;
  int place = 0;
#pragma unroll 1
  for (int round = from; round < to; round += SOME_WARPS) {
    const int tile = round + warp;
    float* mine = sums + warp * RESULTS;
    if (tile < to) {
      float total[SOME_N_TILES][4] = {};
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        if (p.depth == 1) {
          copies_wait_group<0>();
        } else if (p.depth == 2) {
          copies_wait_group<1>();
        } else {
          copies_wait_group<2>();
        }
        __syncwarp();
        const unsigned char* unit = ring + place * F::UNIT_BYTES;
        const SharedX<F> columns{x + step * SharedX<F>::BYTES + lane * 16};
        multiply_unit<F, SOME_N_TILES>({unit, unit + F::LOW_BYTES, unit + F::LOW_BYTES + F::HIGH_BYTES}, columns, total,
                                       lane, magic, [&] {
                                         __syncwarp();
                                         ask(place);
                                       });
        if (++place == p.depth) place = 0;
      }
#pragma unroll
      for (int n = 0; n < SOME_N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          mine[(n * 8 + lane % 4 * 2 + i % 2) * UNIT_ROWS + lane_row(lane) + i / 2 * 8] = total[n][i];
        }
    }
    const int held = min(SOME_WARPS, to - round);
    if (p.split > 1) {
      store_shares<SOME_TOKENS, SOME_THREADS>(p, sums, rank, round, held);
      continue;
    }
    __syncwarp();
    if (tile < to) {
#pragma unroll
      for (int at = lane; at < RESULTS / 4; at += 32) {
        store_sums(p, at / (UNIT_ROWS / 4), tile * UNIT_ROWS + at % (UNIT_ROWS / 4) * 4,
                   *reinterpret_cast<const float4*>(mine + at * 4));
      }
    }
    __syncwarp();
  }
}

}  // namespace stoker
