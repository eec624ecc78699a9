// What the sampling kernel needs of the machine beyond ptx.cuh: shared memory of other CTAs of a cluster, rounded
// arithmetic that the compiler never fuses, atomics on shared memory.
#pragma once
#include "ptx.cuh"

namespace stoker {

// ---- clusters ----------------------------------------------------------------------------------------------------

// cluster_arrive that publishes this thread's writes to those who wait.
__device__ __forceinline__ void cluster_publish() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// Loads and stores at addresses of cluster_address.
__device__ __forceinline__ uint4 load_cluster_16(uint32_t there) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(there)
               : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_cluster_4(uint32_t there) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(there) : "memory");
  return x;
}
__device__ __forceinline__ void store_cluster_4(uint32_t there, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(x) : "memory");
}
__device__ __forceinline__ void store_cluster_8(uint32_t there, uint64_t x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(x) : "memory");
}

// ---- arithmetic, one rounding an operation -----------------------------------------------------------------------

__device__ __forceinline__ float added(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float multiplied(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float divided(float a, float b) { return __fdiv_rn(a, b); }
// 1.5 · 2²³ + the largest integer ≤ x, for |x| < 2²²: its low bits are that integer.
__device__ __forceinline__ float floor_shifted(float x) { return __fadd_rd(x, 12582912.0f); }
__device__ __forceinline__ int64_t truncated_product(double a, double b) { return __double2ll_rz(__dmul_rn(a, b)); }
__device__ __forceinline__ uint64_t truncated(float x) { return __float2ull_rz(x); }
__device__ __forceinline__ uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }
__device__ __forceinline__ uint64_t high_product_64(uint64_t a, uint64_t b) { return __umul64hi(a, b); }

// ---- shared memory -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void count_one(uint32_t* at) { atomicAdd(at, 1u); }
__device__ __forceinline__ uint32_t add_to(uint32_t* at, uint32_t x) { return atomicAdd(at, x); }
__device__ __forceinline__ void add_to(uint64_t* at, uint64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(x));
}

// ---- global memory -----------------------------------------------------------------------------------------------

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_streamed(const void* from) { return __ldcs(static_cast<const uint4*>(from)); }

}  // namespace stoker
