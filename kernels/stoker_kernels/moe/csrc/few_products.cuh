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

  // As `multiply`, of MXFP4: 2^-32 of the sums.
  __device__ __forceinline__ void multiply_packed(const unsigned char* stage, const unsigned char* scales, int wanted,
                                                  const unsigned char* row, float (&sums)[4]) const {
    float other[4] = {};
#pragma unroll 1
    for (int half = 0; half < 2 * wanted; ++half) {
      const int box = half / 2, s = half % 2;
      const uint2* of_rows = reinterpret_cast<const uint2*>(scales + box * (FEW_SCALE_BYTES / FEW_BOXES));
      uint32_t low_scale[4], high_scale[4];
      spread(of_rows[q], low_scale);
      spread(of_rows[q + 8], high_scale);
      const unsigned char* weights = stage + box * FEW_BOX_BYTES + q * 128 + ((2 * c + s) ^ q) * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(weights), high = *reinterpret_cast<const uint4*>(weights + 1024);
      const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
      const unsigned char* tokens = row + box * 512 + c * 128;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (row != nullptr) b = *reinterpret_cast<const uint4*>(tokens + (4 * s + word + 2 * c) % 8 * 16);
        uint32_t l[4], h[4];
        decode(lows[word], low_scale, l);
        decode(highs[word], high_scale, h);
        mma_m16n8k16_bf16(sums, {l[0], h[0], l[1], h[1]}, b.x, b.y);
        mma_m16n8k16_bf16(other, {l[2], h[2], l[3], h[3]}, b.z, b.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += other[i];
  }
  // Eight exponents → bf16, by pairs of code places.
  static __device__ __forceinline__ void spread(uint2 bytes, uint32_t (&pairs_of)[4]) {
    pairs_of[0] = __byte_perm(bytes.x, 0, 0x1404) >> 1;
    pairs_of[1] = __byte_perm(bytes.x, 0, 0x3424) >> 1;
    pairs_of[2] = __byte_perm(bytes.y, 0, 0x1404) >> 1;
    pairs_of[3] = __byte_perm(bytes.y, 0, 0x3424) >> 1;
  }
  // Eight codes → bf16, by pairs of code places, times their scales: exact.
  static __device__ __forceinline__ void decode(uint32_t word, const uint32_t (&scale)[4], uint32_t (&values)[4]) {
    constexpr uint32_t SIGN_AND_SIZE = 0x81C081C0u;
    values[0] = multiply_bf16(word & SIGN_AND_SIZE, scale[0]);
    values[1] = multiply_bf16(word << 3 & SIGN_AND_SIZE, scale[1]);
    values[2] = multiply_bf16(word << 6 & SIGN_AND_SIZE, scale[2]);
    values[3] = multiply_bf16((word << 1 & 0x80008000u) | (word >> 3 & 0x01800180u) | (word >> 7 & 0x00400040u), scale[3]);
  }
};

}  // namespace stoker
