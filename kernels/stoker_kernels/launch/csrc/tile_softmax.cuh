// The softmax of a warpgroup's 64 rows of queries, in the accumulators of wgmma (FlashAttention-2, Dao 2023).
#pragma once
#include "attention_ptx.cuh"

namespace stoker {

// A thread's two rows of the warpgroup's 64: lane / 4 of its warp's 16, and the eighth after. Of row r the accumulators
// [4 i + 2 r] and [4 i + 2 r + 1] are columns 8 i + 2 (lane % 4) and the next.
struct RowState {
  float m[2], l[2];
  int limit[2];  // the last key that the row sees
};

template <int count>
__device__ __forceinline__ void mask_keys(float (&s)[count], const RowState& a, int from, int lane) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int key = from + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (key > a.limit[i / 2 % 2]) s[i] = -INFINITY;
  }
}

// Turns logits into weights, and gives the factors that the results so far shrink by.
template <int count>
__device__ __forceinline__ void softmax(float (&s)[count], RowState& a, float (&alpha)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = a.m[r];
#pragma unroll
    for (int i = 2 * r; i < count; i += 4) m = fmaxf(m, fmaxf(s[i], s[i + 1]));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    const float base = m == -INFINITY ? 0.0f : m * scale_log2;  // a row of padding may see no key
    alpha[r] = exp2_approx(a.m[r] * scale_log2 - base);
    a.m[r] = m;
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < count; i += 4) {
      s[i] = exp2_approx(s[i] * scale_log2 - base);
      s[i + 1] = exp2_approx(s[i + 1] * scale_log2 - base);
      sum += s[i] + s[i + 1];
    }
    a.l[r] = a.l[r] * alpha[r] + sum;
  }
}

// Weights as fragments of A, each pair packed by `pack`.
template <uint32_t (*pack)(float, float), int count>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[count / 8][4], const float (&s)[count]) {
#pragma unroll
  for (int i = 0; i < count / 2; ++i) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale(float (&o)[64], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i] *= alpha[i / 2 % 2];
}

}  // namespace stoker
