// silu(gate) · up, as epilogues of products with gate and up share it.
#pragma once
#include "ptx.cuh"

namespace stoker {

// Of two neighbours. The special function unit gives 16 results a cycle and SM: one reciprocal serves both.
__device__ __forceinline__ uint32_t silu_times(const float* gate, const float* up) {
  constexpr float MOST = 60.f;  // 2^60 twice is finite, and gate / 2^60 is nothing
  const float a = 1.f + exp2_approx(fminf(gate[0] * -1.44269504f, MOST));
  const float b = 1.f + exp2_approx(fminf(gate[1] * -1.44269504f, MOST));
  const float one = reciprocal_approx(a * b);
  return pack_bf16(gate[0] * up[0] * (b * one), gate[1] * up[1] * (a * one));
}

// The same, each by itself: its bits are the same whatever its neighbour is.
__device__ __forceinline__ float silu_times_one(float gate, float up) {
  constexpr float MOST = 120.f;  // 1 + 2^120 is finite, and gate / 2^120 is nothing
  return gate * up * reciprocal_approx(1.f + exp2_approx(fminf(gate * -1.44269504f, MOST)));
}
__device__ __forceinline__ uint32_t silu_times_apart(const float* gate, const float* up) {
  return pack_bf16(silu_times_one(gate[0], up[0]), silu_times_one(gate[1], up[1]));
}

}  // namespace stoker
