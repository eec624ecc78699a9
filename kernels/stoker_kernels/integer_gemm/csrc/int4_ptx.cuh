// Names for the PTX that kernels of four-bit weights use beside ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace stoker {

// x & y: by hand, since the compiler turns masks of shifted words into more.
__device__ __forceinline__ uint32_t masked(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("and.b32 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Half bytes i and i + 4 of a word → the bf16 pair 128 + code, which is exact.
__device__ __forceinline__ uint32_t raised(uint32_t word, int i) {
  uint32_t pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word >> (4 * i)), "r"(0x000F000Fu), "r"(0x43004300u));
  return pair;
}

// Weights are read once: they must not push x out of L1.
__device__ __forceinline__ uint4 stream(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// A barrier of every thread of the cluster, after which its writes are seen.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Four floats of another CTA's shared memory, at the place that `local` has here.
__device__ __forceinline__ float4 read_peer(const float4* local, int rank) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(cluster_address(shared_address(local), rank))
               : "memory");
  return value;
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace stoker
