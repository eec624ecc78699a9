// What becomes of a tile's sums: scales, biases and the activation in fp32, one rounding, stores of 16 bytes a lane.
#pragma once
#include "grouped_tiles.cuh"
#include "silu.cuh"
#include "store_eights.cuh"

namespace stoker {

// A thread's two of its group's 64 places in the order, eight apart: where their rows go, and their scales. Made before
// the tile is multiplied, so that they are there when it is.
template <GroupedKind kind, bool GATED>
struct GroupedPlaces {
  int row[2];  // of the result
  bool there[2];
  float x_scale[2];

  __device__ __forceinline__ GroupedPlaces(const GroupedArguments& a, const GroupedTile& tile, int group) {
    constexpr bool scaled = kind != GroupedKind::BF16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
      const int place = tile.first + min(at, tile.count - 1), pair = !GATED || scaled ? load_int(a.order + place) : 0;
      there[h] = at < tile.count;
      row[h] = GATED ? place : pair;
      if (scaled) x_scale[h] = a.x_scale[GATED ? pair / a.top_k : place];
    }
  }
};

// Brings a tile's scales of rows of the weight to L1 while it is multiplied, a line a thread.
template <bool GATED>
__device__ __forceinline__ void prefetch_scales(const GroupedArguments& a, const GroupedTile& tile, int first, int columns) {
  constexpr int LINE = 32;  // scales
  const int skipped = LINE * static_cast<int>(threadIdx.x % 128);
  if (skipped > columns) return;  // a line more than it has, for a tile that starts within one
  const float* from = a.w_scale + static_cast<int64_t>(tile.expert) * a.rows + min(first + skipped, a.n - 1);
  prefetch_l1(from);
  if (GATED) prefetch_l1(from + a.n);
}

// Calls each(sums, column, from) for this thread's two pairs of sums in every eight of columns: `column` of the result,
// the nearest that there is, and row `from` of the weight. No branches, so that the loads of a loop run together.
template <bool GATED, int COUNT, typename Each>
__device__ __forceinline__ void for_eights(const GroupedArguments& a, int first, float (&sums)[COUNT], Each each) {
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    const int column = min(first + (GATED ? i / 2 : i) * 8 + 2 * static_cast<int>(threadIdx.x % 4), a.n - 2);
    each(sums + 4 * i, GATED && i % 2 ? a.n + column : column);
  }
}

// gate and up of two neighbours, gate up to `limit` and up within ±limit: (up + 1) · gate · sigmoid(slope · gate).
__device__ __forceinline__ uint32_t clamped_times(const GroupedArguments& a, const float* gate, const float* up) {
  float result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float open = fminf(gate[i], a.limit), through = fminf(fmaxf(up[i], -a.limit), a.limit) + 1.0f;
    const float power = exp2_approx(fminf(open * a.slope * -1.44269504f, 60.0f));
    result[i] = through * open * reciprocal_approx(1.0f + power);
  }
  return pack_bf16(result[0], result[1]);
}

// Stores the tile's columns from `first` on.
template <GroupedKind kind, bool GATED, int COUNT>
__device__ __forceinline__ void finish(const GroupedArguments& a, const GroupedTile& tile, int first,
                                       const GroupedPlaces<kind, GATED>& mine, float (&sums)[COUNT]) {
  const int64_t weight_row = static_cast<int64_t>(tile.expert) * a.rows;
  if constexpr (kind != GroupedKind::BF16) {
    const float* w_scale = a.w_scale + weight_row;
    for_eights<GATED>(a, first, sums, [&](float* four, int from) {
      const bool channels = kind == GroupedKind::CHANNEL;
      const float2 scale = channels ? *reinterpret_cast<const float2*>(w_scale + from) : make_float2(1.0f, 1.0f);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        four[2 * h] *= mine.x_scale[h] * scale.x;
        four[2 * h + 1] *= mine.x_scale[h] * scale.y;
      }
    });
  }
  if (a.bias != nullptr) {
    const __nv_bfloat16* bias = a.bias + weight_row;
    for_eights<GATED>(a, first, sums, [&](float* four, int from) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(bias + from);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        four[2 * h] += bf16_low(two);
        four[2 * h + 1] += bf16_high(two);
      }
    });
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float* of = sums + 2 * h;
    __nv_bfloat16* row = a.out + static_cast<int64_t>(mine.row[h]) * a.n;
    if constexpr (!GATED) {
      store_eights<COUNT / 4>(row, mine.there[h], first, a.n, [&](int i) { return pack_bf16(of[4 * i], of[4 * i + 1]); });
    } else if (a.clamped) {
      store_eights<COUNT / 8>(row, mine.there[h], first, a.n,
                              [&](int i) { return clamped_times(a, of + 8 * i, of + 8 * i + 4); });
    } else {
      store_eights<COUNT / 8>(row, mine.there[h], first, a.n,
                              [&](int i) { return silu_times(of + 8 * i, of + 8 * i + 4); });
    }
  }
}

}  // namespace stoker
