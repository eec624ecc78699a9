// Products of a warp: 16 rows of an expert's weight in shared memory with up to eight rows of x.
#pragma once
#include "few_arguments.cuh"

namespace stoker {

template <FewKind kind>
struct FewProducts {
  using Layout = FewLayout<kind>;
  const int lane = threadIdx.x % 32, q = lane / 4, c = lane % 4;

  // Sums of a stage: rows q and q + 8 of the weight with tokens 2c and 2c + 1 of eight. `row`: of the token q, or null.
  // A lane's columns of a box are 32 bytes that follow each other, so that a quarter of a warp reads every bank once.
  __device__ __forceinline__ void multiply(const unsigned char* stage, int wanted, const unsigned char* row,
                                           const float (&scales)[2][2], float (&sums)[4]) const {
    float other[4] = {};
#pragma unroll 1
    for (int box = 0; box < wanted; ++box, stage += FEW_BOX_BYTES) {
      float d[2][4] = {};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const unsigned char* weights = stage + q * 128 + ((2 * c + s) ^ q) * 16;
        const uint4 low = *reinterpret_cast<const uint4*>(weights), high = *reinterpret_cast<const uint4*>(weights + 1024);
        const unsigned char* tokens = row + (box * Layout::BOX_COLUMNS + (2 * c + s) * (Layout::BOX_COLUMNS / 8)) * 2;
        multiply_16_bytes(low, high, tokens, row != nullptr, Layout::quantized ? d[s] : s == 0 ? sums : other);
      }
      if (Layout::quantized) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float both = d[0][i] + d[1][i];
          sums[i] += kind == FewKind::BLOCK ? both * (box == 0 ? scales[i / 2][0] : scales[i / 2][1]) : both;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += other[i];
  }

  static __device__ __forceinline__ void multiply_16_bytes(uint4 low, uint4 high, const unsigned char* tokens, bool there,
                                                           float (&d)[4]) {
    const uint4 none = make_uint4(0, 0, 0, 0);
    const uint4 b = there ? *reinterpret_cast<const uint4*>(tokens) : none;
    if (!Layout::quantized) {
      mma_m16n8k16_bf16(d, {low.x, high.x, low.y, high.y}, b.x, b.y);
      mma_m16n8k16_bf16(d, {low.z, high.z, low.w, high.w}, b.z, b.w);
      return;
    }
    const uint4 more = there ? *reinterpret_cast<const uint4*>(tokens + 16) : none;
    multiply_word(low.x, high.x, b.x, b.y, d);
    multiply_word(low.y, high.y, b.z, b.w, d);
    multiply_word(low.z, high.z, more.x, more.y, d);
    multiply_word(low.w, high.w, more.z, more.w, d);
  }
  static __device__ __forceinline__ void multiply_word(uint32_t low, uint32_t high, uint32_t b0, uint32_t b1, float (&d)[4]) {
    uint32_t l0, l1, h0, h1;
    unpack_e4m3(low, l0, l1);
    unpack_e4m3(high, h0, h1);
    mma_m16n8k16_f16(d, {l0, h0, l1, h1}, b0, b1);
  }

};

}  // namespace stoker
