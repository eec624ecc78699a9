// The mma operands of sm90_decode's consumer warps, for each type of cache, and what the products add up to.
#pragma once
#include "decode_ring.cuh"

namespace stoker {

__device__ __forceinline__ float soft_cap(float logit_log2, float cap) {
  // Quick divisions: an exact one by a cap of 0, moved ahead of the question whether there is one, takes 400 cycles.
  return (1.0f - __fdividef(2.0f, exp2_approx(logit_log2 * __fdividef(2.0f, cap)) + 1.0f)) * (cap * LOG2E);
}

// A warp's part of a stream: the running maxima, and sums of weighted values in mma's accumulators. Of this lane, heads
// 2·(lane % 4) and the next; sums[j] for j < 2 is [dimension a: two heads, dimension b: two heads] of 16 dimensions,
// sums[2] the weights alone. The maxima are those of all four warps.
struct Result {
  float m[2], sums[3][4];

  __device__ __forceinline__ void reset() {
    m[0] = m[1] = -INFINITY;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[j][c] = 0.0f;
    }
  }
};

// The fragments of a cache's keys and values, and the queries that go with them: zeros for heads that are not there,
// since all heads' logits decide whether maxima are raised.
template <typename Cache>
struct Fragments;

// The address of the 16-byte chunk `chunk` (0…15 along a row of bf16, 0…7 of e4m3) of key `row` in a tile.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + (chunk >> 3) * (UNIT * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

template <>
struct Fragments<bf16_cache> {
  static constexpr uint32_t ones = 0x3F803F80;
  uint32_t q[16];

  __device__ __forceinline__ void load_queries(const unsigned char* queries, int group, int lane) {
    const unsigned char* own = queries + (lane / 4) * Q_PITCH + (lane % 4) * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = lane / 4 < group ? *reinterpret_cast<const uint32_t*>(own + i * 16) : 0;
  }
  __device__ __forceinline__ void multiply_keys(float (&s)[4], uint32_t tile, int warp, int lane) const {
    float odd[4] = {};
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, chunk_address(tile, row, 2 * i + lane / 16));
      mma_m16n8k16_bf16(i % 2 ? odd : s, a, q[2 * i], q[2 * i + 1]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] += odd[c];
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    mma_m16n8k16_bf16(d, a, b.x, b.y);
  }
  // The warp's dimensions of 16 values.
  static __device__ __forceinline__ void load_values(uint32_t (&a)[2][4], uint32_t tile, int block, int warp, int lane) {
    const int row = block * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) ldmatrix_x4_trans(a[j], chunk_address(tile, row, 4 * warp + 2 * j + lane / 8 % 2));
  }
  static __device__ __forceinline__ int dimension(int j, int half, int warp, int lane) {
    return warp * 32 + j * 16 + half * 8 + lane / 4;
  }
  // Stores the results of `group` heads, 128 dimensions each. Transposed, a lane has pairs of dimensions of a head.
  static __device__ __forceinline__ void store(__nv_bfloat16* out, const float (&o)[2][4], int group, int warp,
                                               int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = transpose_8x8(pack_bf16(o[i / 2][i % 2 * 2], o[i / 2][i % 2 * 2 + 1]));
      const int at = lane / 4 * HEAD_DIM + warp * 32 + i * 8 + lane % 4 * 2;
      if (lane / 4 < group) *reinterpret_cast<uint32_t*>(out + at) = pair;
    }
  }
};

// ldmatrix moves pairs of e4m3: four neighbouring dimensions of a key, of which the first two go to the fragment's lower
// k half and the others to its upper one; of V, transposed, two dimensions of two keys, the fragment's rows r and r + 8.
template <>
struct Fragments<e4m3_cache> {
  static constexpr uint32_t ones = 0x3C003C00;
  uint32_t q[16];

  __device__ __forceinline__ void load_queries(const unsigned char* queries, int group, int lane) {
    const unsigned char* own = queries + (lane / 4) * Q_PITCH + (lane % 4) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 four = lane / 4 < group ? *reinterpret_cast<const uint2*>(own + i * 32) : make_uint2(0, 0);
      q[2 * i] = f16_from_bf16(four.x);
      q[2 * i + 1] = f16_from_bf16(four.y);
    }
  }
  __device__ __forceinline__ void multiply_keys(float (&s)[4], uint32_t tile, int warp, int lane) const {
    float odd[4] = {};
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t r[4], a[4];
      ldmatrix_x4(r, chunk_address(tile, row, 2 * i + lane / 16));
      unpack_e4m3(r[0], a[0], a[2]);
      unpack_e4m3(r[1], a[1], a[3]);
      mma_m16n8k16_f16(s, a, q[4 * i], q[4 * i + 1]);
      unpack_e4m3(r[2], a[0], a[2]);
      unpack_e4m3(r[3], a[1], a[3]);
      mma_m16n8k16_f16(odd, a, q[4 * i + 2], q[4 * i + 3]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] += odd[c];
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_f16(low, high); }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    mma_m16n8k16_f16(d, a, b.x, b.y);
  }
  static __device__ __forceinline__ void load_values(uint32_t (&a)[2][4], uint32_t tile, int block, int warp, int lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, chunk_address(tile, block * 16 + lane % 16, 2 * warp + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unpack_e4m3(__byte_perm(r[2 * j], 0, 0x3120), a[j][0], a[j][1]);
      unpack_e4m3(__byte_perm(r[2 * j + 1], 0, 0x3120), a[j][2], a[j][3]);
    }
  }
  static __device__ __forceinline__ int dimension(int j, int half, int warp, int lane) {
    return warp * 32 + j * 16 + lane / 4 * 2 + half;
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* out, const float (&o)[2][4], int group, int warp,
                                               int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = lane % 4 * 2 + c, at = head * HEAD_DIM + dimension(j, 0, warp, lane);
        if (head < group) *reinterpret_cast<uint32_t*>(out + at) = pack_bf16(o[j][c], o[j][c + 2]);
      }
    }
  }
  static __device__ __forceinline__ uint32_t f16_from_bf16(uint32_t pair) {
    return pack_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  }
};

}  // namespace stoker
