// Four-bit weights as the A operand of mma.sync.m16n8k16: how 64 × 64 of them lie in memory and become bf16 in registers.
//
// A block of 64 rows and 64 columns is 2 KB: for each of four tiles of 16 rows, 16 bytes a lane. With q = lane / 4 and
// c = lane % 4, tile t holds of lane's rows 8q + 2t and 8q + 2t + 1 the columns 16c … 16c + 15, four of them (4s … 4s + 3)
// in the word of step s. So a lane's scales of a block are eight neighbours, and so are its columns of x.
// `fragments.py` writes this order; change both together.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int BLOCK_ROWS = 64, BLOCK_COLUMNS = 64, TILES = 4, STEPS = 4;

// Scales and zero points of a lane's two rows of one tile, each doubled for both halves of a register.
struct RowScale {
  __nv_bfloat162 scale[2], zero[2];
};

// A product's weight is (code - zero) · scale, each step rounded to bf16; 128 + code is exact.
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 value) { return *reinterpret_cast<uint32_t*>(&value); }
__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// One step's word → the four registers of A: (row 0, row 1) of columns 0 and 1, then of columns 2 and 3.
__device__ __forceinline__ void unpack(uint32_t word, const RowScale& row, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t code = ((word >> (4 * i)) & 0x000F000Fu) | 0x43004300u;
    a[i] = bits_of(__hmul2(__hsub2(pair_of(code), row.zero[i % 2]), row.scale[i % 2]));
  }
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two scales of one word, as pairs of equal halves.
__device__ __forceinline__ void spread(uint32_t word, __nv_bfloat162 (&scale)[2]) {
  scale[0] = pair_of(__byte_perm(word, word, 0x1010));
  scale[1] = pair_of(__byte_perm(word, word, 0x3232));
}

// A zero point becomes 128 + zero, the bf16 whose low bits it is.
__device__ __forceinline__ __nv_bfloat162 shifted(uint32_t zero) { return pair_of((zero | zero << 16) | 0x43004300u); }

// Weights are read once: they must not push x out of L1.
__device__ __forceinline__ uint4 stream(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

struct Int4Arguments {
  __nv_bfloat16* out;         // [m, ld_out]
  const __nv_bfloat16* x;     // [m, ld_x]
  const __nv_bfloat16* bias;  // [n] or null
  const uint4* codes;         // [n / 64, k / 64] blocks
  const __nv_bfloat16* scale;  // [k / group, n]
  const uint8_t* zero;        // [k / group, n], or null: 8 everywhere
  int m, n, k, ld_x, ld_out;
  int group_shift;  // a group has 16 << group_shift columns; 31 where one group is the whole row
  int split;        // CTAs of a cluster, which share the columns
};

// The group of a lane's 16 columns of a block.
__device__ __forceinline__ int group_of(const Int4Arguments& p, int block, int c) {
  return (block * (BLOCK_COLUMNS / 16) + c) >> p.group_shift;
}

__device__ __forceinline__ void dependents_may_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A float of another CTA's shared memory, at the place that `local` has here.
__device__ __forceinline__ float4 read_peer(const float4* local, int rank) {
  uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(local)), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(there)
               : "memory");
  return value;
}

// Sums of [PARTS][TOKENS][ROWS] floats in each CTA's shared memory, over parts and CTAs in that order → out, with bias.
// Each CTA of a cluster writes every split-th unit of four rows. Every thread of the cluster calls this.
template <int PARTS, int TOKENS, int ROWS, int THREADS>
__device__ __forceinline__ void reduce_and_store(const Int4Arguments& p, float* sums, int rank, int row0, int token0) {
  constexpr int UNITS = TOKENS * ROWS / 4;
  float4* units = reinterpret_cast<float4*>(sums);
  __syncthreads();
  if (PARTS > 1) {
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
      float4 total = units[unit];
#pragma unroll
      for (int part = 1; part < PARTS; part++) {
        float4 more = units[part * UNITS + unit];
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      units[unit] = total;
    }
    __syncthreads();
  }
  if (p.split > 1) cluster_sync();
  for (int unit = threadIdx.x + rank * THREADS; unit < UNITS; unit += THREADS * p.split) {
    int token = token0 + unit / (ROWS / 4), row = row0 + unit % (ROWS / 4) * 4;
    if (token >= p.m || row >= p.n) continue;
    float4 total = p.split > 1 ? read_peer(units + unit, 0) : units[unit];
    for (int peer = 1; peer < p.split; peer++) {
      float4 more = read_peer(units + unit, peer);
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    if (p.bias != nullptr) {
      const __nv_bfloat162* bias = reinterpret_cast<const __nv_bfloat162*>(p.bias + row);
      float2 low = __bfloat1622float2(bias[0]), high = __bfloat1622float2(bias[1]);
      total.x += low.x, total.y += low.y, total.z += high.x, total.w += high.y;
    }
    uint2 packed = {bits_of(__floats2bfloat162_rn(total.x, total.y)), bits_of(__floats2bfloat162_rn(total.z, total.w))};
    *reinterpret_cast<uint2*>(p.out + static_cast<int64_t>(token) * p.ld_out + row) = packed;
  }
  if (p.split > 1) cluster_sync();  // nobody leaves while its sums are read
}
