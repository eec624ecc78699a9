// Stores of sums as wgmma leaves them, in whole 16 bytes: a quad of lanes holds eight columns of a row, two a lane.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

namespace stoker {

// The quad's 4 × 4 words transposed: afterwards v[i] of lane q is what v[q] of lane i was.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = q & bit;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + bit], bit);
      if (upper) {
        v[i] = got;
      } else {
        v[i + bit] = got;
      }
    }
  }
}

// Stores `COUNT` eights of columns from `column` on of a row that is `there`, as far as it has `n`, a multiple of eight;
// word(i) gives this lane's two columns of eight i. 16 bytes a lane.
template <int COUNT, typename Word>
__device__ __forceinline__ void store_eights(__nv_bfloat16* row, bool there, int column, int n, Word word) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i + 4 <= COUNT; i += 4) {
    uint32_t v[4] = {word(i), word(i + 1), word(i + 2), word(i + 3)};
    transpose_quad(v);
    const int at = column + (i + q) * 8;
    if (there && at < n) *reinterpret_cast<uint4*>(row + at) = make_uint4(v[0], v[1], v[2], v[3]);
  }
#pragma unroll
  for (int i = COUNT / 4 * 4; i < COUNT; ++i) {
    const int at = column + i * 8 + 2 * q;
    if (there && at < n) *reinterpret_cast<uint32_t*>(row + at) = word(i);
  }
}

}  // namespace stoker
