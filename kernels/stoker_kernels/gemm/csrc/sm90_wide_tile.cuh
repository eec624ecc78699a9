// A tile of sm90_gemm_wide.cuh: what its kernels are given, where a CTA's part of it is, and what becomes of its sums.
#pragma once
#include "gemm_epilogue.cuh"
#include "sm90_chunk.cuh"
#include "store_eights.cuh"

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

// Scales and stores `COUNT` eights of columns, of the result, of a tile's sums of integers, from eight `begin` on.
template <int COUNT, typename SIZE, bool GATED>
__device__ __forceinline__ void store_integers(const WideArguments& g, const WideTile<SIZE>& tile, int begin,
                                               const int32_t (&sums)[SIZE::HALF]) {
  const int token = token_of(tile), first = (GATED ? tile.row / 2 : tile.row) + 8 * begin;
  const int own = first + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float x_scale = g.x_scale[min(token + 8 * h, g.m - 1)];
    // Two neighbours of eight `i` of the sums, whose row of W is `row`.
    auto scaled = [&](int i, int row, float (&pair)[2]) {
      const float2 scale = *reinterpret_cast<const float2*>(g.w_scale + row);
      float bias[2] = {0.f, 0.f};
      if (!GATED && g.bias) {
        const uint32_t two = *reinterpret_cast<const uint32_t*>(g.bias + row);
        bias[0] = __uint_as_float(two << 16);
        bias[1] = __uint_as_float(two & 0xffff0000u);
      }
      pair[0] = Scaled<int32_t>::with_bias(sums[4 * i + 2 * h], x_scale, scale.x, bias[0]);
      pair[1] = Scaled<int32_t>::with_bias(sums[4 * i + 2 * h + 1], x_scale, scale.y, bias[1]);
    };
    __nv_bfloat16* out = g.out + static_cast<int64_t>(token + 8 * h) * g.ld_out;
    store_eights<COUNT>(out, token + 8 * h < g.m, first, g.n, [&](int i) {
      const int column = min(own + 8 * i, g.n - 2);
      float one[2], other[2];
      if constexpr (GATED) {
        scaled(2 * (begin + i), column, one);
        scaled(2 * (begin + i) + 1, g.n + column, other);
        return silu_times_apart(one, other);
      } else {
        scaled(begin + i, column, one);
        return pack_bf16(one[0], one[1]);
      }
    });
  }
}

// Scales are read where they are needed: all at once, with where they lie, would be more than the registers that sums leave.
template <typename SIZE, bool GATED>
__device__ __forceinline__ void store_integers(const WideArguments& g, const WideTile<SIZE>& tile,
                                               const int32_t (&sums)[SIZE::HALF]) {
  constexpr int EIGHTS = GATED ? SIZE::HALF / 8 : SIZE::HALF / 4, REST = EIGHTS % 4;
#pragma unroll
  for (int begin = 0; begin + 4 <= EIGHTS; begin += 4) {
    keep_loads_behind();
    store_integers<4, SIZE, GATED>(g, tile, begin, sums);
  }
  keep_loads_behind();
  if constexpr (REST > 0) store_integers<REST, SIZE, GATED>(g, tile, EIGHTS - REST, sums);
}

}  // namespace stoker
