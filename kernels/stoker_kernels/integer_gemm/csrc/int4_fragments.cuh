// Four-bit weights as the A operand of tensor cores: how 64 × 64 of them lie in memory and become bf16 in registers.
//
// A block of 64 rows and 64 columns is 2 KB: for each of four tiles of 16 rows, 16 bytes a lane, a word for each step of
// 16 columns. With q = lane / 4 and c = lane % 4, tile t holds a lane's rows 8q + 2t and 8q + 2t + 1, step s its columns
// 16s + 2c, 16s + 2c + 1 and the same plus 8. So a lane's scales of a block are eight neighbours. Both mma.m16n8k16 and a
// warp of wgmma.m64k16 take A so. `fragments.py` writes this order; change both together.
#pragma once
#include "int4_ptx.cuh"
#include "silu.cuh"

namespace stoker {

constexpr int BLOCK_ROWS = 64, BLOCK_COLUMNS = 64, TILES = 4, STEPS = 4;

// How stored rows become columns of the result. Where gate and up are stored in turn, a thread has both of a column.
enum Int4Rows {
  PLAIN,   // row by row
  PAIRED,  // rows 2f and 2f + 1 are columns f and n / 2 + f
  GATED,   // silu(row 2f) · row 2f + 1 is column f of n / 2, without bias
};

struct Int4Arguments {
  __nv_bfloat16* out;         // [m, ld_out]
  const __nv_bfloat16* x;     // [m, ld_x]
  const __nv_bfloat16* bias;  // [n] or null, by the result's columns
  const uint4* codes;         // [n / 64, k / 64] blocks
  const __nv_bfloat16* scale; // [k / group, n]
  const uint8_t* zero;        // [k / group, n], or null: 8 everywhere
  int m, n, k, ld_x, ld_out;
  int group_shift;  // a group has 16 << group_shift columns; 30 where one group is the whole row
  int split;        // CTAs of a cluster, which share the columns
  int rows;         // Int4Rows
};

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 value) { return *reinterpret_cast<uint32_t*>(&value); }
__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// The eight lower bits of a bf16, sign and the rest of the exponent being 0, are an integer times 2^-133: below 128 the
// number is subnormal, from there on its exponent's lowest bit is one of them. So half a byte needs no shift to become a
// number, but a factor, which brings both kinds to the same unit, 2^-6, within bf16's range.
constexpr uint32_t LOWER = 0x000F000Fu, UPPER = 0x00F000F0u;
constexpr uint32_t LOWER_FACTOR = 0x7F007F00u, UPPER_FACTOR = 0x7D007D00u;  // 2^127, 2^123, twice
constexpr uint32_t ZERO_FACTOR = 0xFF00FF00u, SCALE_FACTOR = 0x42804280u;   // -2^127, 64

// Scales (times 64) and zero points (times -2^-6) of a lane's two rows of one tile, each doubled for both halves of a
// register.
struct RowScale {
  __nv_bfloat162 scale[2], zero[2];

  // `scales`: the rows' two bf16; `zeros`: their two bytes.
  __device__ __forceinline__ RowScale(uint32_t scales, uint32_t zeros) {
    scale[0] = __hmul2(pair_of(__byte_perm(scales, scales, 0x1010)), pair_of(SCALE_FACTOR));
    scale[1] = __hmul2(pair_of(__byte_perm(scales, scales, 0x3232)), pair_of(SCALE_FACTOR));
    zero[0] = __hmul2(pair_of(__byte_perm(zeros, 0, 0x4040)), pair_of(ZERO_FACTOR));
    zero[1] = __hmul2(pair_of(__byte_perm(zeros, 0, 0x4141)), pair_of(ZERO_FACTOR));
  }
};

// A step's word → the registers of A, (code - zero) · scale, rounded to bf16 once: rows 0 and 1 of columns 2c and 2c + 1,
// then of the columns eight further.
__device__ __forceinline__ void unpack(uint32_t word, const RowScale& row, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t byte = i < 2 ? word : word >> 8;
    const uint32_t raw = masked(byte, i % 2 ? UPPER : LOWER), factor = i % 2 ? UPPER_FACTOR : LOWER_FACTOR;
    a[i] = bits_of(__hmul2(__hfma2(pair_of(raw), pair_of(factor), row.zero[i % 2]), row.scale[i % 2]));
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int s) {
  return s == 0 ? words.x : s == 1 ? words.y : s == 2 ? words.z : words.w;
}

// The group of step `s` of a block.
__device__ __forceinline__ int group_of(const Int4Arguments& p, int block, int s) {
  return (block * STEPS + s) >> p.group_shift;
}

__device__ __forceinline__ void add(float4& total, const float4& more) {
  total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
}

// The bias of the even row `row` and of the next one.
__device__ __forceinline__ float2 bias_of(const Int4Arguments& p, int row) {
  if (p.bias == nullptr || row >= p.n) return make_float2(0.f, 0.f);
  if (p.rows == PLAIN) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p.bias + row));
  return make_float2(__bfloat162float(p.bias[row / 2]), __bfloat162float(p.bias[(p.n + row) / 2]));
}

// A token's sums of four rows from `row`, a multiple of four, with their bias to the result.
__device__ __forceinline__ void store_rows(const Int4Arguments& p, int token, int row, float4 sums) {
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
template <int PARTS, int TOKENS, int ROWS, int THREADS>
__device__ __forceinline__ void reduce_and_store(const Int4Arguments& p, float* sums, int rank, int row0, int token0) {
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
    store_rows(p, token, row, total);
  }
  if (p.split > 1) cluster_sync();  // nobody leaves while its sums are read
}

}  // namespace stoker
