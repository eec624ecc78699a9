// Adds up what the items of a row have left, in the order of their keys (flash-decoding, Dao et al. 2023).
#pragma once
#include "latent_ring.cuh"

namespace stoker {

constexpr int COMBINE_THREADS = RANK / 4;  // of a team, four dimensions each
constexpr int TEAM_BYTES = COMBINE_THREADS * 16 + 16;  // what a team leaves in shared memory

// Sums of four dimensions, weighed by exp2 of log-sums less the greatest.
struct Combined {
  float greatest, weights;
  float4 sum;

  // To the base of a greatest log-sum that is not less.
  __device__ __forceinline__ void rebase(float m) {
    const float alpha = exp2_approx(greatest - m);
    greatest = m;
    weights *= alpha;
    sum = make_float4(sum.x * alpha, sum.y * alpha, sum.z * alpha, sum.w * alpha);
  }
  __device__ __forceinline__ void add(float weight, float4 part) {
    sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
  }
};

// Items [split, end) of one head of a row whose first item is `first`; `SUMMED` are under way together.
template <int SUMMED>
__device__ __forceinline__ Combined combine_items(const LatentArguments& g, int head, int first, int split, int end,
                                                  int thread) {
  const float* lse = g.partial_lse + static_cast<int64_t>(first) * g.heads + head;
  const float* partial = g.partial + (static_cast<int64_t>(first) * g.heads + head) * RANK + thread * 4;
  const int64_t apart = static_cast<int64_t>(g.heads) * RANK;
  Combined all{-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  for (; split < end; split += SUMMED) {
    float part_lse[SUMMED];
    float4 part[SUMMED];
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
      const bool there = split + i < end;
      part_lse[i] = there ? load_float(lse + static_cast<int64_t>(split + i) * g.heads) : -INFINITY;
      part[i] = there ? *reinterpret_cast<const float4*>(partial + (split + i) * apart) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float m = all.greatest;
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) m = fmaxf(m, part_lse[i]);
    all.rebase(m);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
      const float weight = exp2_approx(part_lse[i] - m);
      all.weights += weight;
      all.add(weight, part[i]);
    }
  }
  return all;
}

// A CTA takes `heads_each` heads of a row; rows that are whole have been written. Each of its `TEAMS` has a share of the
// items, and the first one adds up what they found.
template <int SUMMED, int TEAMS>
__device__ __forceinline__ void sm90_latent_combine(const LatentArguments& g, int heads_each) {
  extern __shared__ unsigned char raw[];
  launch_dependents();
  grid_dependency_wait();
  const int blocks = (g.heads + heads_each - 1) / heads_each, team = threadIdx.x / COMBINE_THREADS;
  const int row = blockIdx.x / blocks, from = blockIdx.x % blocks * heads_each, thread = threadIdx.x % COMBINE_THREADS;
  const int first = load_int(g.items + row * ITEM_INTS + 6), splits = load_int(g.items + row * ITEM_INTS + 7);
  if (splits < 2) return;
  const int each = (splits + TEAMS - 1) / TEAMS;
  for (int head = from; head < min(from + heads_each, g.heads); ++head) {
    Combined all = combine_items<SUMMED>(g, head, first, team * each, min((team + 1) * each, splits), thread);
    if (TEAMS > 1) {
      float4* left = reinterpret_cast<float4*>(raw + team * TEAM_BYTES);
      left[thread] = all.sum;
      if (thread == 0) left[COMBINE_THREADS] = make_float4(all.greatest, all.weights, 0.0f, 0.0f);
      __syncthreads();
#pragma unroll
      for (int other = 1; other < TEAMS; ++other) {
        const float4* theirs = reinterpret_cast<const float4*>(raw + other * TEAM_BYTES);
        const float4 state = theirs[COMBINE_THREADS];
        all.rebase(fmaxf(all.greatest, state.x));
        const float weight = exp2_approx(state.x - all.greatest);
        all.weights += weight * state.y;
        all.add(weight, theirs[thread]);
      }
      __syncthreads();
      if (team > 0) continue;
    }
    const float inverse = 1.0f / all.weights;
    *reinterpret_cast<uint2*>(g.out + (static_cast<int64_t>(row) * g.heads + head) * RANK + thread * 4) =
        make_uint2(pack_bf16(all.sum.x * inverse, all.sum.y * inverse), pack_bf16(all.sum.z * inverse, all.sum.w * inverse));
  }
}

}  // namespace stoker
