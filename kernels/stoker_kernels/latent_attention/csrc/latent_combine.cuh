// Adds up what the items of a row have left, in the order of their keys (flash-decoding, Dao et al. 2023).
#pragma once
#include "latent_ring.cuh"

namespace stoker {

constexpr int COMBINE_THREADS = RANK / 4;  // four dimensions each

// One head of a row that has `splits` items from `first` on, of which `SUMMED` are under way together.
template <int SUMMED>
__device__ __forceinline__ void combine_head(const LatentArguments& g, int row, int head, int first, int splits,
                                             int thread) {
  const float* lse = g.partial_lse + static_cast<int64_t>(first) * g.heads + head;
  const float* partial = g.partial + (static_cast<int64_t>(first) * g.heads + head) * RANK + thread * 4;
  const int64_t apart = static_cast<int64_t>(g.heads) * RANK;
  float greatest = -INFINITY, weights = 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int split = 0; split < splits; split += SUMMED) {
    float part_lse[SUMMED];
    float4 part[SUMMED];
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
      const bool there = split + i < splits;
      part_lse[i] = there ? load_float(lse + static_cast<int64_t>(split + i) * g.heads) : -INFINITY;
      part[i] = there ? *reinterpret_cast<const float4*>(partial + (split + i) * apart) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float m = greatest;
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) m = fmaxf(m, part_lse[i]);
    const float alpha = exp2_approx(greatest - m);
    greatest = m;
    weights *= alpha;
    sum = make_float4(sum.x * alpha, sum.y * alpha, sum.z * alpha, sum.w * alpha);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
      const float weight = exp2_approx(part_lse[i] - m);
      weights += weight;
      sum.x += weight * part[i].x, sum.y += weight * part[i].y;
      sum.z += weight * part[i].z, sum.w += weight * part[i].w;
    }
  }
  const float inverse = 1.0f / weights;
  *reinterpret_cast<uint2*>(g.out + (static_cast<int64_t>(row) * g.heads + head) * RANK + thread * 4) =
      make_uint2(pack_bf16(sum.x * inverse, sum.y * inverse), pack_bf16(sum.z * inverse, sum.w * inverse));
}

// A CTA takes `heads_each` heads of a row; rows that are whole have been written.
template <int SUMMED>
__device__ __forceinline__ void sm90_latent_combine(const LatentArguments& g, int heads_each) {
  launch_dependents();
  grid_dependency_wait();
  const int blocks = (g.heads + heads_each - 1) / heads_each;
  const int row = blockIdx.x / blocks, from = blockIdx.x % blocks * heads_each;
  const int first = load_int(g.items + row * ITEM_INTS + 6), splits = load_int(g.items + row * ITEM_INTS + 7);
  if (splits < 2) return;
  for (int head = from; head < min(from + heads_each, g.heads); ++head) {
    combine_head<SUMMED>(g, row, head, first, splits, threadIdx.x);
  }
}

}  // namespace stoker
