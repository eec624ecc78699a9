// Weights of 4 or 8 bits as the A operand of tensor cores: how 64 × 64 of them lie in memory, and what becomes of sums.
//
// A block of 64 rows and 64 columns is one piece of 2 KB, or of 8 bits two, of half the columns each: for each of four
// tiles of 16 rows 16 bytes a lane, one word, or two, for each step of 16 columns. With q = lane / 4 and c = lane % 4,
// tile t holds a lane's rows 8q + 2t and 8q + 2t + 1, step s its columns 16s + 2c, 16s + 2c + 1 and the same plus 8. So a
// lane's scales of a block are eight neighbours. Both mma.m16n8k16 and a warp of wgmma.m64k16 take A so. `order.py` writes
// this order; change both together.
//
// What words mean is said by a type N of integer_numbers.cuh or fp4_numbers.cuh:
//   PIECES        of a block
//   SETS          groups of columns with scales of their own that a block has
//   SCALE_BYTES, ZERO_BYTES   of a row's group
//   MIDDLE        zero points where a weight has none, four times
//   Scales        those of two neighbouring rows, from the bits of their scales and of their zero points
//   unpack        a step of a piece → A, times 1 / UNIT and without what FACTORS says: whether rows have a number each
#pragma once
#include "four_bits.cuh"
#include "fragments_ptx.cuh"
#include "silu.cuh"

namespace stoker {

constexpr int BLOCK_ROWS = 64, BLOCK_COLUMNS = 64, TILES = 4, STEPS = 4;

// How stored rows become columns of the result. Where gate and up are stored in turn, a thread has both of a column.
enum FragmentRows {
  PLAIN,   // row by row
  PAIRED,  // rows 2f and 2f + 1 are columns f and n / 2 + f
  GATED,   // silu(row 2f) · row 2f + 1 is column f of n / 2, without bias
};

struct FragmentArguments {
  __nv_bfloat16* out;         // [m, ld_out]
  const __nv_bfloat16* x;     // [m, ld_x]
  const __nv_bfloat16* bias;  // [n] or null, by the result's columns
  const uint4* codes;         // [n / 64, k / 64] blocks
  const uint8_t* scale;       // [k / group, n] bf16 or bytes
  const uint8_t* zero;        // [k / group, n], or null: the middle everywhere
  const float* factor;        // [n] of numbers that have FACTORS
  int m, n, k, ld_x, ld_out;
  int group_shift;  // a group has 16 << group_shift columns; 30 where one group is the whole row
  int split;        // CTAs of a cluster, which share the columns
  int rows;         // FragmentRows
};

__device__ __forceinline__ uint32_t word_of(const uint4& words, int s) {
  return s == 0 ? words.x : s == 1 ? words.y : s == 2 ? words.z : words.w;
}

// Where scales of the group of a step of 16 columns, counted over the whole row, begin: in groups of one row.
__device__ __forceinline__ int64_t group_at(const FragmentArguments& p, int step) {
  return static_cast<int64_t>(step >> p.group_shift) * p.n;
}

// The first step of a set of scales of a block.
template <class N>
__device__ __forceinline__ constexpr int step_of_set(int set) { return set * (STEPS / N::SETS); }

// Scales and zero points of a lane's eight rows in one group, of which a tile has two.
template <class N>
struct EightScales {
  uint4 scale;
  uint2 zero;

  // `place`: the first row's, counted from the first group's first row.
  __device__ __forceinline__ void fetch(const FragmentArguments& p, int64_t place) {
    const uint8_t* from = p.scale + place * N::SCALE_BYTES;
    if constexpr (N::SCALE_BYTES == 2) {
      scale = __ldg(reinterpret_cast<const uint4*>(from));
    } else {
      const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(from));
      scale.x = bytes.x, scale.y = bytes.y;
    }
    if constexpr (N::ZERO_BYTES > 0) {
      zero = make_uint2(N::MIDDLE, N::MIDDLE);
      if (p.zero != nullptr) zero = __ldg(reinterpret_cast<const uint2*>(p.zero + place));
    }
  }
  // The bits of the rows of tile t.
  __device__ __forceinline__ uint32_t scales_of(int t) const {
    if constexpr (N::SCALE_BYTES == 2) return t == 0 ? scale.x : t == 1 ? scale.y : t == 2 ? scale.z : scale.w;
    return (t < 2 ? scale.x : scale.y) >> (t % 2 * 16);
  }
  __device__ __forceinline__ uint32_t zeros_of(int t) const {
    if constexpr (N::ZERO_BYTES == 0) return 0;
    return (t < 2 ? zero.x : zero.y) >> (t % 2 * 16);
  }
  __device__ __forceinline__ typename N::Scales of(int t) const { return typename N::Scales(scales_of(t), zeros_of(t)); }
};

// What the sums of a stored row are multiplied with.
template <class N>
__device__ __forceinline__ float unit_of(const FragmentArguments& p, int row) {
  if constexpr (N::FACTORS) return row < p.n ? N::UNIT * __ldg(p.factor + row) : 0.f;
  return N::UNIT;
}

__device__ __forceinline__ void add(float4& total, const float4& more) {
  total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
}

// The bias of the even row `row` and of the next one.
__device__ __forceinline__ float2 bias_of(const FragmentArguments& p, int row) {
  if (p.bias == nullptr || row >= p.n) return make_float2(0.f, 0.f);
  if (p.rows == PLAIN) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.bias + row));
  return make_float2(__bfloat162float(p.bias[row / 2]), __bfloat162float(p.bias[(p.n + row) / 2]));
}

// A token's sums of four rows from `row`, a multiple of four, with their bias to the result.
template <class N>
__device__ __forceinline__ void store_rows(const FragmentArguments& p, int token, int row, float4 sums) {
  if constexpr (N::FACTORS || N::UNIT != 1.f) {
    sums.x *= unit_of<N>(p, row), sums.y *= unit_of<N>(p, row + 1);
    sums.z *= unit_of<N>(p, row + 2), sums.w *= unit_of<N>(p, row + 3);
  }
  const float2 low = bias_of(p, row), high = bias_of(p, row + 2);
  add(sums, make_float4(low.x, low.y, high.x, high.y));
  __nv_bfloat16* out = p.out + static_cast<int64_t>(token) * p.ld_out;
  if (p.rows == PLAIN) {
    const uint2 packed = {pack_bf16(sums.x, sums.y), pack_bf16(sums.z, sums.w)};
    *reinterpret_cast<uint2*>(out + row) = packed;
    return;
  }
  uint32_t* column = reinterpret_cast<uint32_t*>(out + row / 2);
  if (p.rows == GATED) {
    const float gate[2] = {sums.x, sums.z}, up[2] = {sums.y, sums.w};
    *column = silu_times(gate, up);
    return;
  }
  *column = pack_bf16(sums.x, sums.z);
  column[p.n / 4] = pack_bf16(sums.y, sums.w);
}

// Sums of [PARTS][TOKENS][ROWS] floats in each CTA's shared memory, over parts and CTAs in that order → out, with bias.
// Each CTA of a cluster writes a share of them. Every thread of the cluster calls this.
template <class N, int PARTS, int TOKENS, int ROWS, int THREADS>
__device__ __forceinline__ void reduce_and_store(const FragmentArguments& p, float* sums, int rank, int row0, int token0) {
  constexpr int UNITS = TOKENS * ROWS / 4;
  float4* units = reinterpret_cast<float4*>(sums);
  __syncthreads();
  if (PARTS > 1 && p.split > 1) {
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
      float4 total = units[unit];
#pragma unroll
      for (int part = 1; part < PARTS; part++) add(total, units[part * UNITS + unit]);
      units[unit] = total;
    }
  }
  if (p.split > 1) cluster_sync();
  for (int unit = threadIdx.x + rank * THREADS; unit < UNITS; unit += THREADS * p.split) {
    int token = token0 + unit / (ROWS / 4), row = row0 + unit % (ROWS / 4) * 4;
    if (token >= p.m || row >= p.n) continue;
    float4 total = p.split > 1 ? read_peer(units + unit, 0) : units[unit];
    if (p.split > 1) {
      for (int peer = 1; peer < p.split; peer++) add(total, read_peer(units + unit, peer));
    } else {
#pragma unroll
      for (int part = 1; part < PARTS; part++) add(total, units[part * UNITS + unit]);
    }
    store_rows<N>(p, token, row, total);
  }
  if (p.split > 1) cluster_sync();  // nobody leaves while its sums are read
}

}  // namespace stoker
