// s = A · x for the tokens of a plan, a few of each adapter, for sm_90a: rows of A are mma's M side, tokens its N side.
//
// A cluster is one tile of the plan (16 places of one slot) × one piece × 16 ranks; its CTAs, and their warps, take the
// columns of x in turn, by units of 32, as many neighbours as a warp holds of A. What they have summed meets in distributed shared memory at the CTA of rank 0,
// which adds it up in their order: a token's bits do not depend on its place or on who is beside it. A warp reads AHEAD
// units of A before the wait for the kernel that writes x: all of its units, but of very wide x.
//
// The kernel behind needs x from the start, and s in its end only. So it does not wait for this grid's end, but for two
// words: that x has been written, which a cluster of its own waits for, and that s has been. All CTAs of this grid have
// started by then, or the one behind could not have.
//
// x may be in e4m3 or int8 with a scale a token: mma takes its values as bf16, which holds them, and the sums are scaled.
#include "ptx.cuh"

namespace stoker {

constexpr int SHRINK_WARPS = 8, SHRINK_CTAS = 8, SHRINK_UNIT = 32, SHRINK_TILE = 16, SHRINK_RANKS = 16;
constexpr int SHRINK_PITCH = SHRINK_RANKS + 4;  // floats from a token's sums to the next one's
constexpr int SHRINK_SUMS = SHRINK_TILE * SHRINK_RANKS;

struct ShrinkArguments {
  const void* x;           // [m][columns], rows x_stride apart
  const float* x_scale;    // [m], or null
  const __nv_bfloat16* a;  // [slots][ranks][pieces][columns]
  void* out;               // bf16 by token, [m][pieces][row_ranks], or fp32 by place, [tiles · 16][pieces][row_ranks]
  const int* order;        // [tiles · 16]: tokens, or -1
  const int* of_tile;      // [tiles]: slots, or -1
  const int* ranks;        // by slot
  int64_t slot_stride;     // of a, in elements, as the others
  const int* turn;         // what the words hold when they are true, another value in each step
  int* words;              // [x has been written][s has been written][clusters that are done], or null
  int rank_stride, piece_stride, x_stride, columns, pieces, row_ranks, rank_blocks, by_place, planned, clusters;

  // One thread of a cluster that is done, after all that it has written.
  __device__ void done() const {
    if (words && last_of(words + 2, clusters)) release_word(words + 1, *turn);
  }
};

struct ShrinkShared {
  float of_warps[SHRINK_WARPS][SHRINK_TILE][SHRINK_PITCH];
  float of_ctas[SHRINK_CTAS][SHRINK_SUMS];
  uint64_t received;
};

// What x, and A, may be: a value, eight of them as they are loaded, and the same in bf16.
struct Bf16Values {
  using Value = __nv_bfloat16;
  using Eight = uint4;
  static __device__ __forceinline__ uint4 widened(const uint4& eight) { return eight; }
};

struct E4m3Values {
  using Value = uint8_t;
  using Eight = uint2;
  // Exponents have 120 less in e4m3; its bits where those of bf16 are, so a factor of 2^120 makes up for it.
  static __device__ __forceinline__ uint32_t pair(uint32_t high_bytes) {
    const uint32_t bits = (high_bytes & 0x80008000u) | (high_bytes >> 4 & 0x07F007F0u), power = 0x7B807B80u;
    const __nv_bfloat162 values = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits),
                                          *reinterpret_cast<const __nv_bfloat162*>(&power));
    return *reinterpret_cast<const uint32_t*>(&values);
  }
  static __device__ __forceinline__ uint4 widened(const uint2& eight) {
    return uint4{pair(__byte_perm(eight.x, 0, 0x1404)), pair(__byte_perm(eight.x, 0, 0x3424)),
                 pair(__byte_perm(eight.y, 0, 0x1404)), pair(__byte_perm(eight.y, 0, 0x3424))};
  }
};

struct S8Values {
  using Value = int8_t;
  using Eight = uint2;
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int at) {
    const auto low = static_cast<int8_t>(word >> 8 * at), high = static_cast<int8_t>(word >> (8 * at + 8));
    const __nv_bfloat162 values = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&values);
  }
  static __device__ __forceinline__ uint4 widened(const uint2& eight) {
    return uint4{pair(eight.x, 0), pair(eight.x, 2), pair(eight.y, 0), pair(eight.y, 2)};
  }
};

// Eight values of one row from column `unit` · 32 + 8 · (lane % 4) on; zeros outside.
template <typename T>
__device__ __forceinline__ typename T::Eight eight_values(const typename T::Value* row, int unit, int columns, bool there) {
  const int column = unit * SHRINK_UNIT + threadIdx.x % 4 * 8;
  return there && column < columns ? *reinterpret_cast<const typename T::Eight*>(row + column) : typename T::Eight{};
}

// Eight columns a lane are two steps of mma whose columns are dealt anew, for A and for x alike.
__device__ __forceinline__ void multiply_unit(float (&sums)[4], const uint4& low, const uint4& high, const uint4& x) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  mma_m16n8k16_bf16(sums, first, x.x, x.y);
  mma_m16n8k16_bf16(sums, second, x.z, x.w);
}

// Four ranks' sums of a token.
__device__ __forceinline__ void store_sums(const ShrinkArguments& g, int token, int tile, int place, int piece, int rank,
                                           const float4& sum) {
  const int64_t row = g.by_place ? tile * SHRINK_TILE + place : token;
  const int64_t at = (row * g.pieces + piece) * g.row_ranks + rank;
  if (g.by_place) {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      if (rank + v < g.row_ranks) static_cast<float*>(g.out)[at + v] = values[v];
    }
  } else {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum.x, sum.y), __floats2bfloat162_rn(sum.z, sum.w)};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(g.out) + at) = *reinterpret_cast<const uint2*>(pairs);
  }
}

template <typename X, int AHEAD>
__device__ __forceinline__ void shrink_tile(const ShrinkArguments& g, ShrinkShared& shared, int tile, int piece,
                                            int first_rank, int slot, int owned) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, of_eight = lane / 4, in_four = lane % 4;
  const int rank = cluster_rank(), units = (g.columns + SHRINK_UNIT - 1) / SHRINK_UNIT;
  const int start = (rank * SHRINK_WARPS + warp) * AHEAD, step = SHRINK_CTAS * SHRINK_WARPS * AHEAD;
  const __nv_bfloat16* low_row = g.a + slot * g.slot_stride + static_cast<int64_t>(piece) * g.piece_stride +
                                 static_cast<int64_t>(first_rank + of_eight) * g.rank_stride;
  const __nv_bfloat16* high_row = low_row + static_cast<int64_t>(8) * g.rank_stride;
  const bool low_there = first_rank + of_eight < owned, high_there = first_rank + 8 + of_eight < owned;
  uint4 low[AHEAD], high[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    low[i] = eight_values<Bf16Values>(low_row, start + i, g.columns, low_there);
    high[i] = eight_values<Bf16Values>(high_row, start + i, g.columns, high_there);
  }
  int tokens[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) tokens[n] = g.order[tile * SHRINK_TILE + 8 * n + of_eight];
  const bool both = __any_sync(~0u, tokens[1] >= 0);
  grid_dependency_wait();
  const typename X::Value* x_row[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    x_row[n] = static_cast<const typename X::Value*>(g.x) + static_cast<int64_t>(max(tokens[n], 0)) * g.x_stride;
  }
  float sums[2][4] = {};
  for (int base = start; base < units; base += step) {
    if (base != start) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        low[i] = eight_values<Bf16Values>(low_row, base + i, g.columns, low_there);
        high[i] = eight_values<Bf16Values>(high_row, base + i, g.columns, high_there);
      }
    }
    constexpr int TOGETHER = AHEAD < 5 ? AHEAD : 5;  // units of x that are loaded at once
#pragma unroll
    for (int i = 0; i < AHEAD; i += TOGETHER) {
      typename X::Eight x[TOGETHER][2];
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        x[u][0] = eight_values<X>(x_row[0], base + i + u, g.columns, tokens[0] >= 0);
        x[u][1] = eight_values<X>(x_row[1], base + i + u, g.columns, tokens[1] >= 0);
      }
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        multiply_unit(sums[0], low[i + u], high[i + u], X::widened(x[u][0]));
        if (both) multiply_unit(sums[1], low[i + u], high[i + u], X::widened(x[u][1]));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int v = 0; v < 4; ++v) shared.of_warps[warp][8 * n + 2 * in_four + v % 2][of_eight + v / 2 * 8] = sums[n][v];
  }
  __syncthreads();
  cluster_wait();  // the CTA of rank 0 has set up its barrier
  const int t = threadIdx.x;
  if (t >= SHRINK_SUMS / 4) return;
  const int place = t / 4, four = t % 4 * 4;
  float4 sum = *reinterpret_cast<const float4*>(&shared.of_warps[0][place][four]);
#pragma unroll
  for (int from = 1; from < SHRINK_WARPS; ++from) {
    const float4 more = *reinterpret_cast<const float4*>(&shared.of_warps[from][place][four]);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  store_async(cluster_address(shared_address(&shared.of_ctas[rank][4 * t]), 0), sum.x, sum.y, sum.z, sum.w,
              cluster_address(shared_address(&shared.received), 0));
  if (rank != 0) return;
  mbarrier_wait_cluster(shared_address(&shared.received), 0);
  sum = *reinterpret_cast<const float4*>(&shared.of_ctas[0][4 * t]);
#pragma unroll
  for (int from = 1; from < SHRINK_CTAS; ++from) {
    const float4 more = *reinterpret_cast<const float4*>(&shared.of_ctas[from][4 * t]);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  const int token = g.order[tile * SHRINK_TILE + place];
  if (g.x_scale && token >= 0) {
    const float scale = g.x_scale[token];
    sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
  }
  if (token >= 0) store_sums(g, token, tile, place, piece, first_rank + four, sum);
  named_barrier(1, SHRINK_SUMS / 4);
  if (t == 0) g.done();
}

template <typename X, int AHEAD>
__device__ __forceinline__ void lora_shrink(const ShrinkArguments& g) {
  extern __shared__ unsigned char raw[];
  ShrinkShared& shared = *reinterpret_cast<ShrinkShared*>(raw);
  launch_dependents();
  if (!g.planned) grid_dependency_wait();
  if (g.words && blockIdx.x < SHRINK_CTAS) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const int turn = *g.turn;
    grid_dependency_wait();
    release_word(g.words, turn);
    return;
  }
  const int item = blockIdx.x / SHRINK_CTAS - (g.words ? 1 : 0), blocks = g.pieces * g.rank_blocks;
  const int tile = item / blocks, piece = item % blocks / g.rank_blocks;
  const int first_rank = item % g.rank_blocks * SHRINK_RANKS;
  const int slot = g.of_tile[tile], owned = slot < 0 ? 0 : g.ranks[slot];
  if (first_rank >= owned) {  // all CTAs of the cluster alike
    grid_dependency_wait();
    if (threadIdx.x == 0 && cluster_rank() == 0) g.done();
    return;
  }
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    const uint32_t received = shared_address(&shared.received);
    mbarrier_init(received, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(received, sizeof(ShrinkShared::of_ctas));
  }
  __syncwarp();
  cluster_arrive();
  shrink_tile<X, AHEAD>(g, shared, tile, piece, first_rank, slot, owned);
}

}  // namespace stoker

#define SHRINK(NAME, X, AHEAD, CTAS)                                                             \
  extern "C" __global__ void __launch_bounds__(256, CTAS)                                        \
      sm90_bf16_lora_shrink_##NAME##AHEAD(const __grid_constant__ stoker::ShrinkArguments g) {   \
    stoker::lora_shrink<stoker::X, AHEAD>(g);                                                    \
  }
#define SHRINK_TYPES(AHEAD, CTAS)          \
  SHRINK(a, Bf16Values, AHEAD, CTAS)       \
  SHRINK(e4m3_a, E4m3Values, AHEAD, CTAS)  \
  SHRINK(s8_a, S8Values, AHEAD, CTAS)

SHRINK_TYPES(2, 3)
SHRINK_TYPES(4, 2)
SHRINK_TYPES(10, 1)

#undef SHRINK_TYPES
#undef SHRINK
