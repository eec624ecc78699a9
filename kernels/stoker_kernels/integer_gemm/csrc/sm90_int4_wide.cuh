// y = x · Wᵀ for four-bit weights and tiles of up to 256 tokens, by wgmma with the weight from registers.
//
// A CTA has 64 rows a warpgroup and TOKENS tokens. One thread brings x to shared memory by TMA, 64 columns a stage; each
// warp takes its rows' codes from memory to its registers, AHEAD blocks early, and turns those of the next block into bf16
// while the tensor cores work on this one. A cluster shares the columns.
#pragma once
#include <cuda.h>

#include "int4_fragments.cuh"
#include "wgmma.cuh"

namespace stoker {

template <int TOKENS_, int GROUPS_, int STAGES_>
struct Wide4 {
  static constexpr int TOKENS = TOKENS_, GROUPS = GROUPS_, STAGES = STAGES_, AHEAD = 4;
  static constexpr int ROWS = GROUPS * BLOCK_ROWS, THREADS = GROUPS * 128;
  static constexpr int STAGE_BYTES = TOKENS * 128;
};

template <bool SMALL>
struct WideBlock {
  static constexpr int GROUPS = SMALL ? STEPS : 1;
  uint4 codes;
  uint32_t scale[GROUPS], zero[GROUPS];

  __device__ __forceinline__ void fetch(const Int4Arguments& p, int rows, int tile, int block, int lane) {
    codes = stream(p.codes + (static_cast<int64_t>(rows) * (p.k / BLOCK_COLUMNS) + block) * (TILES * 32) + tile * 32 + lane);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int64_t place = static_cast<int64_t>(group_of(p, block, g)) * p.n + rows * BLOCK_ROWS + lane / 4 * 8 + tile * 2;
      scale[g] = __ldg(reinterpret_cast<const uint32_t*>(p.scale + place));
      zero[g] = p.zero == nullptr ? 0x0808u : __ldg(reinterpret_cast<const uint16_t*>(p.zero + place));
    }
  }
  __device__ __forceinline__ void unpack_all(uint32_t (&a)[STEPS][4]) const {
#pragma unroll
    for (int s = 0; s < STEPS; s++) unpack(word_of(codes, s), RowScale(scale[SMALL ? s : 0], zero[SMALL ? s : 0]), a[s]);
  }
};

// The CTA's ring of x, filled by its first thread as its other warps give stages back.
template <class C>
struct Wide4Ring {
  const CUtensorMap& map;
  uint32_t x, full, empty;
  int first, last, token0;

  __device__ __forceinline__ void load(int block) const {
    const int stage = (block - first) % C::STAGES;
    mbarrier_arrive_expect(full + 8 * stage, C::STAGE_BYTES);
    tensor_load_2d(x + stage * C::STAGE_BYTES, &map, block * BLOCK_COLUMNS, token0, full + 8 * stage, policy_evict_last());
  }
  __device__ __forceinline__ void start() const {
    for (int block = first; block < min(last, first + C::STAGES); block++) load(block);
  }
  // Block `block` has been multiplied by this warp. The thread that loads waits for the others' word on the block before,
  // which they gave a while ago.
  __device__ __forceinline__ void release(int block) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * ((block - first) % C::STAGES));
    const int before = block - 1, next = before + C::STAGES;
    if (threadIdx.x == 0 && before >= first && next < last) {
      mbarrier_wait(empty + 8 * ((before - first) % C::STAGES), (before - first) / C::STAGES & 1);
      load(next);
    }
  }
};

// One block: unpack it, ask for a later one, and multiply while the next one is unpacked.
template <class C, bool SMALL>
__device__ __forceinline__ void multiply(const Int4Arguments& p, const Wide4Ring<C>& ring, WideBlock<SMALL>& codes,
                                         uint32_t (&a)[STEPS][4], int rows, int block, float (&sums)[C::TOKENS / 2]) {
  const int tile = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, at = block - ring.first;
  codes.unpack_all(a);
  if (block + C::AHEAD < ring.last) codes.fetch(p, rows, tile, block + C::AHEAD, lane);
  mbarrier_wait(ring.full + 8 * (at % C::STAGES), at / C::STAGES & 1);
  const uint64_t x = wgmma_descriptor(ring.x + at % C::STAGES * C::STAGE_BYTES);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < STEPS; s++) WgmmaRegisters<__nv_bfloat16, C::TOKENS, false>::multiply(sums, a[s], x + s * 2, true);
  wgmma_commit();
  wgmma_wait<1>();
  if (at > 0) ring.release(block - 1);
}

template <class C, bool SMALL>
__device__ __forceinline__ void consume(const Int4Arguments& p, const Wide4Ring<C>& ring, int rows,
                                        float (&sums)[C::TOKENS / 2]) {
  const int tile = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  WideBlock<SMALL> ahead[C::AHEAD];
  uint32_t even[STEPS][4], odd[STEPS][4];
#pragma unroll
  for (int d = 0; d < C::AHEAD; d++)
    if (ring.first + d < ring.last) ahead[d].fetch(p, rows, tile, ring.first + d, lane);
  grid_dependency_wait();
  if (threadIdx.x == 0) {
    proxy_fence_async_global();
    ring.start();
  }
  int block = ring.first;
  for (; block + C::AHEAD <= ring.last; block += C::AHEAD) {
#pragma unroll
    for (int d = 0; d < C::AHEAD; d += 2) {
      multiply<C, SMALL>(p, ring, ahead[d], even, rows, block + d, sums);
      multiply<C, SMALL>(p, ring, ahead[d + 1], odd, rows, block + d + 1, sums);
    }
  }
  static_assert(C::AHEAD == 4);
  if (block < ring.last) multiply<C, SMALL>(p, ring, ahead[0], even, rows, block, sums);
  if (block + 1 < ring.last) multiply<C, SMALL>(p, ring, ahead[1], odd, rows, block + 1, sums);
  if (block + 2 < ring.last) multiply<C, SMALL>(p, ring, ahead[2], even, rows, block + 2, sums);
  wgmma_wait<0>();
  wgmma_results(sums);
}

template <class C, bool SMALL>
__device__ __forceinline__ void int4_wide(const CUtensorMap& x_map, const Int4Arguments& p) {
  extern __shared__ unsigned char raw[];
  const uint32_t full = shared_address(raw), base = (full + 16 * C::STAGES + 1023) & ~1023u;  // barriers, then the ring
  unsigned char* aligned = raw + (base - full);
  const int row_tiles = (p.n + C::ROWS - 1) / C::ROWS, rank = blockIdx.x % p.split, tile = blockIdx.x / p.split;
  const int row0 = tile % row_tiles * C::ROWS, token0 = tile / row_tiles * C::TOKENS, blocks = p.k / BLOCK_COLUMNS;
  const Wide4Ring<C> ring = {x_map, base, full, full + 8 * C::STAGES,
                             blocks * rank / p.split, blocks * (rank + 1) / p.split, token0};
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < C::STAGES; s++) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, C::THREADS / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  float sums[C::TOKENS / 2];
#pragma unroll
  for (int i = 0; i < C::TOKENS / 2; i++) sums[i] = 0;
  // A warpgroup beyond the last row still takes part in the ring, with the last rows' codes.
  consume<C, SMALL>(p, ring, min(row0 / BLOCK_ROWS + group, p.n / BLOCK_ROWS - 1), sums);
  __syncthreads();  // x gives its place to the sums
  float* to = reinterpret_cast<float*>(aligned) + group * BLOCK_ROWS + lane / 4 * 8 + threadIdx.x % 128 / 32 * 2;
#pragma unroll
  for (int n = 0; n < C::TOKENS / 8; n++)
#pragma unroll
    for (int side = 0; side < 2; side++)
      *reinterpret_cast<float2*>(to + (n * 8 + lane % 4 * 2 + side) * C::ROWS) =
          make_float2(sums[n * 4 + side], sums[n * 4 + 2 + side]);
  reduce_and_store<1, C::TOKENS, C::ROWS, C::THREADS>(p, reinterpret_cast<float*>(aligned), rank, row0, token0);
}

}  // namespace stoker
